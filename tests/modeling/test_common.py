"""Transformers' own common model tests, run on every class of both generations.

They are part of Transformers' source distribution and not of this repository. Unpack the one of the installed version
(`pip download --no-deps --no-binary :all: transformers==<version>`) and name its folder in
FRUGALVIT_TRANSFORMERS_SOURCE. What the distribution leaves out (export and generation tests) is replaced by empty
mixins; `test_ecosystem.py` tests exporting.
"""

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
from transformers.models.auto import modeling_auto

from frugalvit import (
    SparseFormerConfig,
    SparseFormerForImageClassification,
    SparseFormerModel,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)


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

# The tests choose inputs and what they skip by the names in these tables.
CLASS_NAMES = {
    "MODEL_MAPPING_NAMES": (
        "SparseFormerModel",
        "SparseFormerVisionModel",
        "SparseFormerVisionModelWithProjection",
    ),
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "SparseFormerForImageClassification",
}


class SparseFormerModelTester:
    """Tiny configurations and inputs, under the attribute names that the common tests read."""

    batch_size = 3
    image_size = 32
    num_channels = 3
    num_latent_tokens = 5
    hidden_size = 64
    num_hidden_layers = 2
    num_attention_heads = 4
    is_training = True
    # Each generation's differences, as they stand in the variants.
    variant: str
    fields: dict

    def __init__(self, parent):
        self.parent = parent
        self.seq_length = self.num_latent_tokens + self.get_config().use_cls_token

    def get_config(self) -> SparseFormerConfig:
        return SparseFormerConfig.from_variant(
            self.variant,
            image_size=self.image_size,
            num_latent_tokens=self.num_latent_tokens,
            num_sampling_points=4,
            num_mixed_points=8,
            stem_channels=8,
            focusing_hidden_size=32,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            projection_dim=16,
            num_labels=3,
            drop_path_rate=0.0,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self):
        size = (self.batch_size, self.num_channels, self.image_size, self.image_size)
        return self.get_config(), {"pixel_values": common.floats_tensor(size)}


class CommonTests:
    """What a vision model without text overrides of the common tests, for both generations."""

    all_model_classes = (
        SparseFormerModel,
        SparseFormerForImageClassification,
        SparseFormerVisionModel,
        SparseFormerVisionModelWithProjection,
    )
    model_tester_class: type
    test_resize_embeddings = False  # no token embeddings
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        for table, names in CLASS_NAMES.items():
            patch = mock.patch.dict(getattr(modeling_auto, table), {"sparseformer": names})
            patch.start()
            self.addCleanup(patch.stop)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.addCleanup(torch.set_num_threads, threads)
        self.model_tester = self.model_tester_class(self)

    def test_config(self):
        tester = configuration_common.ConfigTester(
            self, config_class=SparseFormerConfig, has_text_modality=False, hidden_size=64
        )
        tester.run_common_tests()

    def test_model_get_set_embeddings(self):
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            self.assertIsInstance(model.get_input_embeddings(), nn.Conv2d)
            self.assertIsNone(model.get_output_embeddings())


class BootstrappedTester(SparseFormerModelTester):
    variant = "augreg-base-49-224"
    fields = {"mixing_hidden_size": 16}


class V1Tester(SparseFormerModelTester):
    variant = "v1-tiny"
    # More heads than flash and flex attention can do, as in the published models.
    num_attention_heads = 16
    fields = {"focusing_num_attention_heads": 16}


class BootstrappedCommonTest(CommonTests, common.ModelTesterMixin, unittest.TestCase):
    model_tester_class = BootstrappedTester


class V1CommonTest(CommonTests, common.ModelTesterMixin, unittest.TestCase):
    model_tester_class = V1Tester
