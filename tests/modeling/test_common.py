"""Transformers' common model tests, run on one class of every family, and with `-m nightly` on all classes.

The common tests are part of Transformers' source distribution. Unpack the distribution of the installed version
(`pip download --no-deps --no-binary transformers transformers==<version>`) and set FRUGALVIT_TRANSFORMERS_SOURCE to
its folder. The distribution lacks the tests of export and generation, so empty mixins replace these tests.
`test_ecosystem.py` tests export.
"""

import contextlib
import copy
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


# Fields of every configuration, with values other than the defaults.
FIELDS = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SparseFormerModel"],
    "problem_type": "regression",
    "id2label": {0: "label"},
    "label2id": {"label": 0},
}
# Replacements of modules that the source distribution lacks.
MISSING = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": FIELDS},
}


def import_common_tests(name: str) -> types.ModuleType:
    """Import a module of the folder `tests` of Transformers' source. The module becomes part of a new package, because
    this folder has no `__init__.py`."""
    package, folder = "transformers_common_tests", Path(SOURCE) / "tests"
    if package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(folder)]
        for missing, names in MISSING.items():
            if not (folder / f"{missing.replace('.', '/')}.py").is_file():
                for module in (missing.partition(".")[0], missing):
                    sys.modules[f"{package}.{module}"] = types.ModuleType(f"{package}.{module}")
                vars(sys.modules[f"{package}.{missing}"]).update(names)
    return importlib.import_module(f"{package}.{name}")


common = import_common_tests("test_modeling_common")
# `_config_zero_init` sets fields with `layer_scale` in their name to a small number, but our `layer_scale` is a bool.
common._config_zero_init = copy.deepcopy
# `direct_transformers_import` fails without `tests/__init__.py`, and our tests do not use its result.
with mock.patch("transformers.utils.direct_transformers_import"):
    configuration_common = import_common_tests("test_configuration_common")
backbone_common = import_common_tests("test_backbone_common")


class CommonTests(common.ModelTesterMixin):
    """Transformers' common model tests, adapted to the models of this package."""

    # Vision models have no token embeddings.
    test_resize_embeddings = False
    test_can_init_all_missing_weights_before_2023 = True
    # Transformers' tables of class names by task. Common tests read these tables to choose inputs and skip checks.
    tables: dict[str, str | tuple[str, ...]] = {}

    def setUp(self):
        super().setUp()
        # The common tests format every parameter for error messages. Short printing saves time.
        torch.set_printoptions(threshold=0, edgeitems=1)
        self.addCleanup(torch.set_printoptions, profile="default")
        self.model_tester = self.make_tester(self)
        model_type = self.model_tester.get_config().model_type
        for table, names in self.tables.items():
            patch = mock.patch.dict(getattr(modeling_auto, f"{table}_MAPPING_NAMES"), {model_type: names})
            patch.start()
            self.addCleanup(patch.stop)

    def subTest(self, *_, **__):
        # There are thousands of subtests, and reporting them takes longer than running them. So they are not reported.
        return contextlib.nullcontext()


class ImageTests(CommonTests):
    """Common tests of models whose only inputs are images.

    Tests of attention with masks are left out, because images have no attention mask.
    """

    def test_model_get_set_embeddings(self):
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            self.assertIsInstance(model.get_input_embeddings(), nn.Module)
            self.assertIsNone(model.get_output_embeddings())


for name in dir(common.ModelTesterMixin):
    if "eager_matches_sdpa_inference" in name and not ("left_no_attn_mask" in name or "output_attentions" in name):
        setattr(ImageTests, name, None)


class ModelTester:
    """Tiny configurations and inputs, with the attribute names that the common tests expect."""

    batch_size = 3
    image_size = 32
    num_channels = 3
    num_hidden_layers = 2
    is_training = True
    fields = {}

    def __init__(self, parent):
        self.parent = parent
        config = self.get_config()
        self.hidden_size = config.hidden_size
        if parent.has_attentions:
            self.num_attention_heads = config.num_attention_heads
            has_cls = config.model_type == "vit_context_broadcast"
            self.seq_length = getattr(config, "num_latent_tokens", 64) + getattr(config, "num_class_tokens", has_cls)

    def get_config(self):
        model_class = self.parent.all_model_classes[0]
        return KINDS[self.parent.kind].config(model_class, num_hidden_layers=2, **self.fields)

    def prepare_config_and_inputs_for_common(self):
        size = (self.batch_size, self.num_channels, self.image_size, self.image_size)
        return self.get_config(), {"pixel_values": common.floats_tensor(size)}


class FamilyTests(ImageTests):
    kind: str
    make_tester = ModelTester
    has_attentions = True
    every_class = False

    @property
    def all_model_classes(self):
        # Backbones are left out, because `BackboneCommonTest` tests them.
        classes = [each for each in KINDS[self.kind].classes if not issubclass(each, BackboneMixin)]
        classes = classes if self.every_class else classes[1:2]
        return tuple(each for each in classes if each.config_class is self.config_class)

    @property
    def config_class(self):
        return KINDS[self.kind].config_class

    @property
    def tables(self):
        names = [model_class.__name__ for model_class in self.all_model_classes]
        tasks = ("ForImageClassification", "ForSemanticSegmentation")
        return {
            "MODEL_FOR_IMAGE_CLASSIFICATION": tuple(name for name in names if name.endswith(tasks[0])),
            "MODEL_FOR_SEMANTIC_SEGMENTATION": tuple(name for name in names if name.endswith(tasks[1])),
            "MODEL": tuple(name for name in names if not name.endswith(tasks)),
        }

    def test_config(self):
        names = ["hidden_size", "num_hidden_layers", *["num_attention_heads"] * self.has_attentions]
        config = self.model_tester.get_config()
        configuration_common.ConfigTester(
            self,
            config_class=self.config_class,
            has_text_modality=False,
            common_properties=names,
            **{name: getattr(config, name) for name in names},
        ).run_common_tests()


class BootstrappedCommonTest(FamilyTests, unittest.TestCase):
    kind = "bootstrapped"


class PatchesCommonTest(FamilyTests, unittest.TestCase):
    kind = "patches"


@pytest.mark.nightly
class V1CommonTest(FamilyTests, unittest.TestCase):
    kind = "v1"
    every_class = True
    # The paper's segmentation head has a fixed width. So the model is larger than `test_model_is_small` allows.
    test_model_is_small = None


@pytest.mark.nightly
class ProjectionCommonTest(V1CommonTest):
    config_class = frugalvit.SparseFormerVisionModelWithProjection.config_class


@pytest.mark.nightly
class EveryPatchesCommonTest(PatchesCommonTest):
    every_class = True


@pytest.mark.nightly
class PatchesProjectionCommonTest(EveryPatchesCommonTest):
    config_class = frugalvit.PatchSparseFormerVisionModelWithProjection.config_class


class BackboneCommonTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    kind = "patches"
    all_model_classes = (frugalvit.PatchSparseFormerBackbone,)
    config_class = frugalvit.PatchSparseFormerConfig
    has_attentions = True

    def setUp(self):
        self.model_tester = ModelTester(self)


class ViTImpulseInitCommonTest(FamilyTests, unittest.TestCase):
    kind = "vit_impulse_init"

    def setUp(self):
        super().setUp()
        if "eager_matches_sdpa_inference" in self._testMethodName:
            # On some CPUs, the sharp attention of impulse initialization has rounding errors beyond the tolerance.
            self.model_tester.fields = {"initialization": "trunc_normal"}


class ViTContextBroadcastCommonTest(FamilyTests, unittest.TestCase):
    kind = "vit_context_broadcast"


class ConvMixerCommonTest(FamilyTests, unittest.TestCase):
    kind = "convmixer"
    has_attentions = False

    def test_hidden_states_output(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            outputs = model_class(config).eval()(**inputs, output_hidden_states=True)
            shapes = [tuple(states.shape) for states in outputs.hidden_states]
            self.assertEqual(shapes, [(3, config.hidden_size, 8, 8)] * 3)

    # `test_init_weights_can_init_buffers` initializes a model twice and expects equal buffers, but frozen filters are
    # random buffers.
    test_init_weights_can_init_buffers = None


class AgentCNNCommonTest(ConvMixerCommonTest):
    kind = "agent_cnn"


class JointTester(ModelTester):
    """`ModelTester` for a ViT and its agent CNN."""

    num_attention_heads = 4
    hidden_size = 32
    seq_length = 17

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        sizes = {"hidden_size": self.hidden_size, "num_hidden_layers": 2, "intermediate_size": 37, "patch_size": 8}
        return frugalvit.BootstrappedViTConfig(
            vit_config={**sizes, "image_size": 32, "num_attention_heads": self.num_attention_heads},
            agent_config={**sizes, "num_positions": 4},
            sharing="weights",
            num_labels=3,
        )


class BootstrappedViTCommonTest(ImageTests, unittest.TestCase):
    all_model_classes = (frugalvit.BootstrappedViTForImageClassification,)
    make_tester = JointTester
    tables = {"MODEL_FOR_IMAGE_CLASSIFICATION": "BootstrappedViTForImageClassification"}
    _is_composite = True

    # The loss compares class distributions of ViT and agent, so only single-label classification is possible.
    test_problem_types = None


class VisionAndTextTester(ModelTester):
    """`ModelTester` for models of images and texts whose vision model is a SparseFormer."""

    num_attention_heads = 4
    hidden_size = 32
    image_tokens = 5
    seq_length = 12

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        text = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37}
        text |= {"num_hidden_layers": 2, "num_attention_heads": 4}
        vision = KINDS["bootstrapped"].config(num_hidden_layers=2).to_dict()
        config_class = self.parent.all_model_classes[0].config_class
        return config_class(text_config=text | self.parent.text, vision_config=vision, **self.parent.fields)

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        input_ids = common.ids_tensor([self.batch_size, self.seq_length], 94) + 5
        input_ids[:, 1 : 1 + self.image_tokens] = 4
        inputs |= {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        return config, inputs | self.parent.inputs


class VisionAndTextTests(CommonTests):
    make_tester = VisionAndTextTester
    inputs = {}
    test_can_init_all_missing_weights_before_2023 = False
    _is_composite = True


@pytest.mark.nightly
class ClipCommonTest(VisionAndTextTests, unittest.TestCase):
    all_model_classes = (frugalvit.SparseFormerCLIPModel,)
    text = {"max_position_embeddings": 16}
    fields = {"projection_dim": 16}
    inputs = {"return_loss": True}
    test_attention_outputs = False

    def setUp(self):
        super().setUp()
        if "eager_matches_sdpa_inference" in self._testMethodName:
            self.skipTest("This test gives models a single input; test_clip.py compares both sides.")

    # As in `CLIPModel`, the hidden states are in the outputs of the text model and of the vision model.
    test_hidden_states_output = test_retain_grad_hidden_states_attentions = None


# One of the common tests passes `past_key_values`, which is deprecated.
@pytest.mark.filterwarnings("default:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.nightly
class LlavaCommonTest(VisionAndTextTests, common.GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (frugalvit.SparseFormerLlavaForConditionalGeneration,)
    text = {"model_type": "llama", "pad_token_id": 0, "num_key_value_heads": 4}
    # As in Transformers' tests of LLaVA, image features come from the last layer. Reading other layers requires
    # recorded hidden states.
    fields = {"image_token_index": 4, "vision_feature_layer": -1}
    tables = {"MODEL_FOR_IMAGE_TEXT_TO_TEXT": "SparseFormerLlavaForConditionalGeneration"}
    test_resize_embeddings = True

    def setUp(self):
        super().setUp()
        if "training_gradient_checkpointing" in self._testMethodName:
            self.skipTest("LLaVA reads a layer before the last, so that later layers get no gradient.")
