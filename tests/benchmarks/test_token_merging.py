"""Tests of the baselines ToMe and random patches."""

from pathlib import Path

import pytest
import torch
from transformers import Dinov2Config, Dinov2ForImageClassification
from vision_transformers import KINDS

import frugalvit
import token_merging
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.hosts.running import make_example


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Return a folder with a fake package `tome`, whose `patch.timm` returns the ViT unchanged."""
    package = tmp_path / "checkout" / "tome"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class patch:\n    timm = staticmethod(lambda vit, trace_source: vit)\n")
    return package.parent


SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "initializer_range": 0.2}


def tiny_dinov2(model_class=Dinov2ForImageClassification):
    """Build a small DINOv2 for images of 56 x 56 pixels, with random layer scale."""
    torch.manual_seed(0)
    model = model_class(Dinov2Config(**SIZES, image_size=56, patch_size=14, num_labels=5)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("lambda1"):
            torch.nn.init.uniform_(parameter, 0.3, 2.0)
    return model


@pytest.mark.parametrize("size", [(28, 28), (42, 70), (56, 56)])
def test_timm_copy_of_dinov2_gives_its_logits(size, checkout):
    """The DINOv2 has layer scale. If images do not have 56 x 56 pixels, position embeddings are interpolated."""
    teacher, pixel_values = tiny_dinov2(), torch.randn(2, 3, *size)
    anatomy = read_anatomy(teacher, size)
    model = token_merging.tome(anatomy, checkout, 8)
    with torch.inference_mode():
        embedding, logits = model(pixel_values)
        torch.testing.assert_close(logits, teacher(pixel_values).logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(embedding, anatomy.embed(pixel_values), rtol=0, atol=1e-4)
    assert embedding.shape == (2, 64)
    assert frugalvit.count_macs(model, size) == frugalvit.count_macs(teacher, size)


def test_random_patches():
    """With all patches, the embedding equals the teacher's. With 9 patches, each call gives a different embedding."""
    anatomy = read_anatomy(KINDS["vit"].make())
    images = make_example(anatomy)
    with torch.no_grad():
        expected = anatomy.embed(images)
        everything = token_merging.RandomPatches(anatomy, anatomy.num_patches, seed=0)
        assert torch.allclose(everything(images), expected, rtol=1e-3, atol=1e-4 * expected.abs().max())
        some = token_merging.RandomPatches(anatomy, 9, seed=0)
        first, second = some(images), some(images)
        assert not torch.allclose(first, expected, rtol=1e-2) and not torch.allclose(first, second, rtol=1e-2)
        assert torch.equal(first, token_merging.RandomPatches(anatomy, 9, seed=0)(images))
        tokens, kept = some.states(images)
        assert tokens.shape[1] == anatomy.num_prefix_tokens + 9 and kept.shape == (2, 9)
