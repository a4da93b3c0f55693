"""Transformers' own common model tests, run on every class of every family.

They are part of Transformers' source distribution and not of this repository. Unpack the one of the installed version
(`pip download --no-deps --no-binary :all: transformers==<version>`) and name its folder in
FRUGALVIT_TRANSFORMERS_SOURCE. The distribution has no tests of export and generation; empty mixins replace them, and
`test_ecosystem.py` tests exporting.
"""

import contextlib
import importlib
import os
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.backbone_utils import BackboneMixin
from transformers.models.auto import modeling_auto

import frugalvit
from kinds import KINDS


SOURCE = os.environ.get("FRUGALVIT_TRANSFORMERS_SOURCE")
if not SOURCE:
    pytest.skip(
        "FRUGALVIT_TRANSFORMERS_SOURCE does not name Transformers' unpacked source distribution",
        allow_module_level=True,
    )


# What the distribution leaves out; a checkout of Transformers has the files themselves.
MISSING = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    # Fields that every configuration takes, with other values than the defaults.
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "return_dict": False,
            "output_hidden_states": True,
            "output_attentions": True,
            "dtype": "float16",
            "chunk_size_feed_forward": 5,
            "architectures": ["SparseFormerModel"],
            "id2label": {0: "label"},
            "label2id": {"label": 0},
            "problem_type": "regression",
        }
    },
}


def import_common_tests(name: str) -> types.ModuleType:
    """A module of the `tests` folder, as part of a package made here: the distribution has no `tests/__init__.py`."""
    package, folder = "transformers_common_tests", Path(SOURCE) / "tests"
    if package not in sys.modules:
        if not (folder / "test_modeling_common.py").is_file():
            raise FileNotFoundError(f"FRUGALVIT_TRANSFORMERS_SOURCE={SOURCE} has no tests/test_modeling_common.py.")
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(folder)]
        for missing, names in MISSING.items():
            if not (folder / f"{missing.replace('.', '/')}.py").is_file():
                for module in (missing.partition(".")[0], missing):
                    sys.modules[f"{package}.{module}"] = types.ModuleType(f"{package}.{module}")
                vars(sys.modules[f"{package}.{missing}"]).update(names)
    return importlib.import_module(f"{package}.{name}")


common = import_common_tests("test_modeling_common")
with mock.patch("transformers.utils.direct_transformers_import"):  # wants `tests/__init__.py`, for other models
    configuration_common = import_common_tests("test_configuration_common")
backbone_common = import_common_tests("test_backbone_common")


class ModelTesterMixin(common.ModelTesterMixin):
    """The common tests, on one thread, and no slower than they must be."""

    def setUp(self):
        super().setUp()
        # Messages print every parameter, of tests that pass, too.
        torch.set_printoptions(threshold=0, edgeitems=1)
        self.addCleanup(torch.set_printoptions, profile="default")

    def subTest(self, *_, **__):
        """Part of its test: thousands of their own take longer to report than to run."""
        return contextlib.nullcontext()


class ModelTester:
    """Tiny configurations and inputs, under the attribute names that the common tests read."""

    batch_size = 3
    image_size = 32
    num_channels = 3
    num_hidden_layers = 2
    is_training = True
    fields = {}

    def __init__(self, parent):
        self.parent = parent
        self.kind = KINDS[parent.kind]
        config = self.get_config()
        self.hidden_size = config.hidden_size
        if parent.has_attentions:
            self.num_attention_heads = config.num_attention_heads
            tokens = getattr(config, "num_latent_tokens", 64)
            has_cls = getattr(config, "use_cls_token", config.model_type == "vit_context_broadcast")
            self.seq_length = tokens + has_cls

    def get_config(self):
        fields = {**self.kind.fields, "num_hidden_layers": self.num_hidden_layers, "image_size": self.image_size}
        fields |= self.fields
        return self.kind.config(**fields)

    def prepare_config_and_inputs_for_common(self):
        size = (self.batch_size, self.num_channels, self.image_size, self.image_size)
        return self.get_config(), {"pixel_values": common.floats_tensor(size)}


def enter_class(case: unittest.TestCase, table: str, model_type: str, names: str | tuple[str, ...]):
    """Write into a table of Transformers', by which tests choose inputs and what they skip, while a test runs."""
    patch = mock.patch.dict(getattr(modeling_auto, table), {model_type: names})
    patch.start()
    case.addCleanup(patch.stop)


def images_alone(test_class: type) -> type:
    """Leave out repetitions of a test, of models that take no attention mask: however texts would be padded, eager and
    SDPA attention see the same images of the same seed. Each precision remains, with and without fused kernels, and
    attention maps."""
    for name in dir(test_class):
        if "eager_matches_sdpa_inference" in name and not ("left_no_attn_mask" in name or "output_attentions" in name):
            setattr(test_class, name, None)
    return test_class


class CommonTests:
    """The common tests, with those overridden that are not for a vision model without text."""

    kind: str
    has_attentions = True
    test_resize_embeddings = False  # no token embeddings
    test_can_init_all_missing_weights_before_2023 = True

    @property
    def all_model_classes(self):
        # Backbones have common tests of their own.
        return tuple(each for each in KINDS[self.kind].classes if not issubclass(each, BackboneMixin))

    def setUp(self):
        names = [model_class.__name__ for model_class in self.all_model_classes]
        family = KINDS[self.kind].config_class.model_type
        tasks = {
            "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "ForImageClassification",
            "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES": "ForSemanticSegmentation",
        }
        tables = {table: tuple(name for name in names if name.endswith(ending)) for table, ending in tasks.items()}
        tables["MODEL_MAPPING_NAMES"] = tuple(name for name in names if not name.endswith(tuple(tasks.values())))
        for table, value in tables.items():
            enter_class(self, table, family, value)
        super().setUp()
        self.model_tester = ModelTester(self)

    def test_config(self):
        names = ["hidden_size", "num_hidden_layers", *["num_attention_heads"] * self.has_attentions]
        tester = configuration_common.ConfigTester(
            self,
            config_class=KINDS[self.kind].config_class,
            has_text_modality=False,
            common_properties=names,
            **{name: getattr(self.model_tester.get_config(), name) for name in names},
        )
        tester.run_common_tests()

    def test_model_get_set_embeddings(self):
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            self.assertIsInstance(model.get_input_embeddings(), nn.Module)
            self.assertIsNone(model.get_output_embeddings())


@images_alone
class BootstrappedCommonTest(CommonTests, ModelTesterMixin, unittest.TestCase):
    kind = "bootstrapped"


class OtherGeneration(CommonTests):
    """Tests of a generation's base model and classifier alone: the classes around the base model have the same code in
    all generations of SparseFormer, and another generation tests all of them."""

    @property
    def all_model_classes(self):
        return KINDS[self.kind].classes[:2]


@images_alone
class PatchesCommonTest(OtherGeneration, ModelTesterMixin, unittest.TestCase):
    kind = "patches"


@images_alone
class V1CommonTest(OtherGeneration, ModelTesterMixin, unittest.TestCase):
    # More heads than flash and flex attention can do, as in the published models.
    kind = "v1"


class BackboneCommonTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    kind = "bootstrapped"
    all_model_classes = (frugalvit.SparseFormerBackbone,)
    config_class = frugalvit.SparseFormerConfig

    def setUp(self):
        self.model_tester = ModelTester(self)


class PatchesBackboneCommonTest(BackboneCommonTest):
    kind = "patches"


@images_alone
class ViTImpulseInitCommonTest(CommonTests, ModelTesterMixin, unittest.TestCase):
    kind = "vit_impulse_init"

    def setUp(self):
        super().setUp()
        if "eager_matches_sdpa_inference" in self._testMethodName:
            # Sharp attention magnifies what half precision rounds away, on some CPUs beyond the tolerance.
            self.model_tester.fields = {"initialization": "trunc_normal"}


@images_alone
class ViTContextBroadcastCommonTest(CommonTests, ModelTesterMixin, unittest.TestCase):
    kind = "vit_context_broadcast"


class FeatureMapTests(CommonTests):
    """The common tests, with those overridden that are not for convolutional models."""

    has_attentions = False
    maps: list[tuple[int, int]]

    def test_hidden_states_output(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            for by_config in (False, True):
                config.output_hidden_states = by_config
                model = model_class(config).eval()
                with torch.no_grad():
                    outputs = model(**inputs, **({} if by_config else {"output_hidden_states": True}))
                shapes = [tuple(states.shape) for states in outputs.hidden_states]
                self.assertEqual(shapes, [(3, config.hidden_size, *sides) for sides in self.maps])


class ConvMixerCommonTest(FeatureMapTests, ModelTesterMixin, unittest.TestCase):
    kind = "convmixer"
    maps = [(8, 8)] * 3

    @unittest.skip("frozen filters are buffers and random")
    def test_init_weights_can_init_buffers(self):
        pass


class AgentCNNCommonTest(FeatureMapTests, ModelTesterMixin, unittest.TestCase):
    kind = "agent_cnn"
    maps = [(8, 8)] * 3


class TwoTowersTester:
    """Like `ModelTester`, of a CLIP with a SparseFormer."""

    batch_size = 3
    num_hidden_layers = 2  # of both sides
    is_training = True
    text = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
    }

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        vision = self.get_vision_config()
        return frugalvit.SparseFormerCLIPConfig(text_config=self.text, vision_config=vision, projection_dim=16)

    def get_vision_config(self, **fields) -> dict:
        return KINDS["bootstrapped"].config(**{"num_hidden_layers": self.num_hidden_layers} | fields).to_dict()

    def prepare_config_and_inputs_for_common(self):
        input_ids = common.ids_tensor([self.batch_size, 7], 99)
        return self.get_config(), {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "pixel_values": common.floats_tensor((self.batch_size, 3, 32, 32)),
            "return_loss": True,
        }


class SigmoidTowersTester(TwoTowersTester):
    """The same of a SigLIP with a SparseFormer."""

    def get_config(self):
        vision = self.get_vision_config(use_cls_token=False, pooling="attention")
        text = {**self.text, "projection_size": vision["hidden_size"], "bos_token_id": None, "eos_token_id": None}
        return frugalvit.SparseFormerSiglipConfig(text_config=text, vision_config=vision)


class ClipCommonTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (frugalvit.SparseFormerCLIPModel,)
    make_tester = TwoTowersTester
    test_resize_embeddings = False
    test_attention_outputs = False
    _is_composite = True

    def setUp(self):
        super().setUp()
        self.model_tester = self.make_tester(self)
        if "eager_matches_sdpa_inference" in self._testMethodName:
            self.skipTest("it knows models of one input only; test_clip.py compares both sides")

    @unittest.skip("the two sides' outputs hold them, as CLIPModel's do")
    def test_hidden_states_output(self):
        pass

    @unittest.skip("the two sides' outputs hold them, as CLIPModel's do")
    def test_retain_grad_hidden_states_attentions(self):
        pass


class SiglipCommonTest(ClipCommonTest):
    all_model_classes = (frugalvit.SparseFormerSiglipModel,)
    make_tester = SigmoidTowersTester


class TwinsTester:
    """Like `ModelTester`, of a ViT with an agent."""

    batch_size = 3
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32
    seq_length = 17
    is_training = True
    sharing = "none"

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        sizes = {"hidden_size": self.hidden_size, "num_hidden_layers": 2, "intermediate_size": 37, "patch_size": 8}
        return frugalvit.BootstrappedViTConfig(
            vit_config={**sizes, "image_size": 32, "num_attention_heads": self.num_attention_heads},
            agent_config={**sizes, "num_positions": 4},
            sharing=self.sharing,
            num_labels=3,
        )

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": common.floats_tensor((self.batch_size, 3, 32, 32))}


@images_alone
class BootstrappedViTCommonTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (frugalvit.BootstrappedViTForImageClassification,)
    test_resize_embeddings = False
    test_can_init_all_missing_weights_before_2023 = True
    _is_composite = True

    def setUp(self):
        table = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
        enter_class(self, table, "bootstrapped_vit", "BootstrappedViTForImageClassification")
        super().setUp()
        self.model_tester = TwinsTester(self)

    def test_model_get_set_embeddings(self):
        model = self.all_model_classes[0](self.model_tester.get_config())
        self.assertIsInstance(model.get_input_embeddings(), nn.Module)
        self.assertIsNone(model.get_output_embeddings())

    @unittest.skip("the two teach each other a distribution over classes, of which an image has one")
    def test_problem_types(self):
        pass


class SharedViTCommonTest(BootstrappedViTCommonTest):
    def setUp(self):
        super().setUp()
        self.model_tester.sharing = "weights"


class VisionLanguageTester:
    """Like `ModelTester`, of a LLaVA with a SparseFormer."""

    batch_size = 3
    num_hidden_layers = 2  # of both sides
    num_attention_heads = 4
    hidden_size = 32
    image_tokens = 5
    seq_length = 12
    is_training = True

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        text = self.get_text_config("llama", num_key_value_heads=4)
        return frugalvit.SparseFormerLlavaConfig(
            text_config=text,
            vision_config=self.get_vision_config().to_dict(),
            image_token_index=4,
            image_seq_length=self.image_tokens,
            # As in Transformers' tests of LLaVA: others have to be among the states that are asked for.
            vision_feature_layer=-1,
        )

    def get_text_config(self, model_type: str, **fields) -> dict:
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: getattr(self, name) for name in names} | {"vocab_size": 99, "intermediate_size": 37}
        return {"model_type": model_type, "pad_token_id": 0, **sizes, **fields}

    def get_vision_config(self):
        return KINDS["bootstrapped"].config(num_hidden_layers=2)

    def prepare_config_and_inputs_for_common(self):
        input_ids = common.ids_tensor([self.batch_size, self.seq_length], 94) + 5
        input_ids[:, 1 : 1 + self.image_tokens] = 4
        return self.get_config(), {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "pixel_values": common.floats_tensor((self.batch_size, 3, 32, 32)),
        }


# One of the tests is about it.
@pytest.mark.filterwarnings("default:`past_key_values` is deprecated:FutureWarning")
class LlavaCommonTest(ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (frugalvit.SparseFormerLlavaForConditionalGeneration,)
    make_tester = VisionLanguageTester
    layer_before_the_last = True
    _is_composite = True

    def setUp(self):
        [model_class] = self.all_model_classes
        table = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
        enter_class(self, table, model_class.config_class.model_type, model_class.__name__)
        super().setUp()
        self.model_tester = self.make_tester(self)
        if self.layer_before_the_last and "training_gradient_checkpointing" in self._testMethodName:
            self.skipTest("LLaVA reads a layer before the last, so that what follows has no gradient")


class PaliGemmaTester(VisionLanguageTester):
    """The same, of a PaliGemma, which reads [CLS], too."""

    image_tokens = 6

    def get_config(self):
        text = self.get_text_config("gemma", num_key_value_heads=1, head_dim=8)
        return frugalvit.SparseFormerPaliGemmaConfig(
            text_config=text,
            vision_config=self.get_vision_config().to_dict(),
            image_token_index=4,
            vocab_size=99,
            projection_dim=self.hidden_size,
            hidden_size=self.hidden_size,
        )

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        return config, inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


class PaliGemmaCommonTest(LlavaCommonTest):
    all_model_classes = (frugalvit.SparseFormerPaliGemmaForConditionalGeneration,)
    make_tester = PaliGemmaTester
    additional_model_inputs = ("token_type_ids",)
    layer_before_the_last = False
