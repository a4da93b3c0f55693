"""Tests of `frugalvit info`."""

import json
import math

import pytest
import timm
import torch
from safetensors import safe_open
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import frugalvit
import frugalvit.training.files
from frugalvit.info import describe, main, with_speeds
from frugalvit.macs import count_macs
from frugalvit.training.text import format_table


# Columns: tokens, image size, parameters, and the reference implementation's GMACs without and with the two matrix
# products of attention. A number that is None is not checked. GMACs of v1 include the matrix products of mixing.
REFERENCE = {
    "v1-tiny": (49, 224, 31_522_212, 2.160, None),
    "v1-small": (64, 224, 47_575_056, 3.949, None),
    "v1-base": (81, 224, 81_076_996, 7.883, None),
    "augreg-base-49-224": (49, 224, 64_185_448, 3.749, 3.785),
    "augreg-base-80-224": (80, 224, 64_185_572, 6.056, 6.154),
    "augreg-base-80-320": (80, 320, 64_185_572, 6.179, None),
    "augreg-base-100-320": (100, 320, 64_185_652, 7.668, 7.821),
    "augreg-base-49-224-untruncated": (49, 224, 92_536_936, 5.137, None),
    "augreg-large-49-224": (49, 224, 212_426_984, 11.268, 11.356),
    "augreg-large-49-384": (49, 384, 212_426_984, 11.497, None),
    "augreg-large-80-224": (80, 224, 212_427_108, 18.338, 18.574),
    "augreg-large-80-320": (80, 320, 212_427_108, 18.461, 18.696),
    "augreg-large-100-320": (100, 320, 212_427_188, 23.023, 23.390),
    "augreg-large-144-384": (144, 384, 212_427_364, 33.164, 33.927),
    "augreg-large-196-384": (196, 384, 212_427_572, 45.023, 46.438),
    "augreg-large-49-224-untruncated": (49, 224, 313_196_776, 16.205, None),
    "clip-base-49-224": (49, 224, 63_809_664, 3.748, None),
    "clip-large-64-224": (64, 224, 212_188_476, 14.689, None),
    "clip-large-128-224": (128, 224, 212_188_732, 29.286, 29.888),
    "clip-large-144-336": (144, 336, 212_188_796, 33.082, 33.845),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if "large" in name else []) for name in REFERENCE]
)
def test_costs_are_those_of_the_reference_implementation(name):
    tokens, image_size, parameters, gmacs, gmacs_with_attention = REFERENCE[name]
    row = describe(name)
    assert (row["tokens"], row["image_size"], row["parameters"]) == (tokens, image_size, parameters)
    assert row["macs"] / 1e9 == pytest.approx(gmacs, rel=0.005)
    assert row["macs"] < row["macs_with_attention"]
    if gmacs_with_attention is not None:
        assert row["macs_with_attention"] / 1e9 == pytest.approx(gmacs_with_attention, rel=0.005)


def vit(attention: str = "sdpa") -> ViTForImageClassification:
    config = ViTConfig(image_size=32, patch_size=4, num_labels=10, intermediate_size=96, **SIZES)
    config._attn_implementation = attention
    return ViTForImageClassification(config)


def timm_vit() -> timm.models.VisionTransformer:
    shape = {"patch_size": 4, "num_classes": 10, "embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 2}
    return timm.create_model("vit_tiny_patch16_224", img_size=32, **shape)


SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
# The terms are the multiply-accumulates of 64 patch embeddings, 2 encoder blocks on 65 tokens, and the classifier.
VIT_MACS = 64 * 48 * 48 + 2 * 65 * (4 * 48 * 48 + 2 * 48 * 96) + 48 * 10
VIT_ATTENTION_MACS = 2 * 2 * 65 * 65 * 48


@pytest.mark.parametrize("make", [vit, lambda: vit("eager"), timm_vit])
def test_macs_by_hand(make):
    assert count_macs(make(), (32, 32)) == (VIT_MACS, VIT_MACS + VIT_ATTENTION_MACS)


@pytest.mark.parametrize("name", frugalvit.training.files.shipped_checkpoints())
def test_shipped_models(name):
    row = describe(name)
    size, most = (224, 7e9) if name.startswith("caltech101") else (32, 3e8)
    assert row["image_size"] == size and 1e6 < row["macs"] < most
    weights = frugalvit.checkpoint_path(name) / "model.safetensors"
    with safe_open(weights, "pt") as file:
        stored = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    # `stored` also contains buffers, such as running means and fixed filters. `num_parameters` counts no buffers.
    others = [key for key in stored if "running" in key or "batches" in key or "spatial_mixing" in key]
    assert row["parameters"] == sum(math.prod(shape) for key, shape in stored.items() if key not in others)
    if "clip" in name or "llava" in name:
        assert row["tokens"] in (16, 32)


def test_the_table(capsys):
    main(["v1-tiny", "clip-base-49-224"])
    assert capsys.readouterr().out == format_table([describe("v1-tiny"), describe("clip-base-49-224")]) + "\n"


def test_speed_with_each_number_of_tokens(capsys):
    """An elastic model has one row for each number of tokens. Only the costs differ, not the number of parameters."""
    name = "caltech101-sparseformer"
    main([name, "cifar10-vit", "--speed", "--batch-size", "1", "--device", "cpu", "--json"])
    rows = json.loads(capsys.readouterr().out)
    counts = [9, 16, 25, 36, 49, 64]
    assert [(row["name"], row["num_tokens"]) for row in rows] == [*((name, n) for n in counts), ("cifar10-vit", None)]
    assert [row["tokens"] for row in rows] == [10, 17, 26, 37, 50, 65, 65]
    assert {row["parameters"] for row in rows[:-1]} == {describe(name)["parameters"]}
    expected = describe(name)["macs"]
    assert rows[0]["macs"] < expected / 6 and rows[-2]["macs"] == expected
    assert all(row["images/s"] > 0 for row in rows)


def test_speed_is_measured_in_float32(tmp_path, monkeypatch):
    vit().half().save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    measured = []
    monkeypatch.setattr(
        "frugalvit.info.images_per_second", lambda models, *_, **options: [measured.append(models[0].dtype)]
    )
    with_speeds([describe(str(tmp_path))], 1, torch.device("cpu"))
    assert measured == [torch.float32]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Did you mean: .*augreg-base-49-224"):
        describe("augreg-base-49")
    with pytest.raises(ValueError, match=r"config\.json"):
        describe(str(tmp_path))


def test_weights_of_other_shapes_are_refused(tmp_path):
    vit().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 4}))
    with pytest.raises(ValueError, match="checkpoint has other shapes of vit.layers.0.mlp.fc1.bias"):
        describe(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no file named model.safetensors"):
        describe(str(tmp_path))
