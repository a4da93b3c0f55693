"""The code that the rows of peers (ToMe, DiffRate) stand on, without their own code."""

import functools
import importlib
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTForImageClassification,
)
from vision_transformers import KINDS

import frugalvit
from frugalvit.common.data import load_images
from frugalvit.common.loading import load_image_classifier
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.image_format import ImageFormat


@pytest.fixture(scope="module")
def token_merging():
    with patch.object(sys, "path", [str(Path(__file__).resolve().parents[2] / "benchmarks"), *sys.path]):
        return importlib.import_module("token_merging")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Stands in for ToMe: the call by which it patches a model."""
    package = tmp_path / "checkout" / "tome"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class patch:\n    timm = staticmethod(lambda vit, trace_source: vit)\n")
    return package.parent


SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "initializer_range": 0.2}


def tiny_vit(**options) -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(**SIZES, image_size=16, patch_size=4, intermediate_size=64, **options)
    return ViTForImageClassification(config).eval()


def tiny_dinov2(model_class=Dinov2ForImageClassification):
    """A DINOv2 with layer scale that is not 1, for larger images than it will see."""
    torch.manual_seed(0)
    model = model_class(Dinov2Config(**SIZES, image_size=56, patch_size=14, num_labels=5)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("lambda1"):
            torch.nn.init.uniform_(parameter, 0.3, 2.0)
    return model


def test_timm_copy_gives_the_logits_of_the_shipped_teacher(token_merging):
    teacher = ViTForImageClassification.from_pretrained(frugalvit.checkpoint_path("cifar10-vit")).eval()
    vit, pixel_values = token_merging.as_timm(teacher), torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(vit(pixel_values).logits, teacher(pixel_values).logits, rtol=0, atol=1e-4)
    assert frugalvit.count_macs(vit, 32) == frugalvit.count_macs(teacher, 32)


@pytest.mark.parametrize("size", [(28, 28), (42, 70), (56, 56)])
def test_timm_copy_of_dinov2_gives_its_logits(size, token_merging, checkout):
    """Layer scale, interpolated positions, [CLS] and the mean patch token side by side."""
    teacher, pixel_values = tiny_dinov2(), torch.randn(2, 3, *size)
    anatomy = read_anatomy(teacher, size)
    model = token_merging.tome(anatomy, checkout, 8)
    with torch.inference_mode():
        embedding, logits = model(pixel_values)
        torch.testing.assert_close(logits, teacher(pixel_values).logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(embedding, anatomy.embed(pixel_values), rtol=0, atol=1e-4)
    assert embedding.shape == (2, 64)
    assert frugalvit.count_macs(model, size) == frugalvit.count_macs(teacher, size)


def test_a_token_counts_in_the_mean_as_often_as_it_stands_for_others(token_merging):
    vit = token_merging.as_timm(read_anatomy(tiny_dinov2(), (28, 28)))
    tokens = torch.randn(2, 4, 32)
    vit._tome_info = {"size": torch.tensor([1.0, 3.0, 1.0, 2.0]).view(1, 4, 1).expand(2, -1, -1)}
    apart = tokens[:, [0, 1, 1, 1, 2, 3, 3]]
    torch.testing.assert_close(vit.forward_head(tokens).embedding[:, 32:], apart[:, 1:].mean(1))
    torch.testing.assert_close(vit.forward_head(tokens).embedding[:, :32], tokens[:, 0])
    # While DiffRate searches, tokens that it would leave out are there, behind a mask.
    vit._diffrate_info = vit.__dict__.pop("_tome_info") | {"mask": torch.tensor([[1.0, 1, 0, 1]]).expand(2, -1)}
    vit.train()
    apart = tokens[:, [0, 1, 1, 1, 3, 3]]
    torch.testing.assert_close(vit.forward_head(tokens).embedding[:, 32:], apart[:, 1:].mean(1))


def test_refuses_a_copy_that_computes_something_else(token_merging):
    with pytest.raises(ValueError, match="embeddings that differ"):
        token_merging.as_timm(tiny_vit(hidden_act="relu"))


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZES, image_size=28)), "the peers know .CLS."),
        (
            lambda: frugalvit.ConvMixerForImageClassification(frugalvit.ConvMixerConfig(hidden_size=8)),
            "its model type 'convmixer' is not known",
        ),
    ],
)
def test_refuses_what_the_peers_do_not_know(teacher, message, token_merging):
    with pytest.raises(ValueError, match=f"Cannot copy into timm .*: {message}"):
        token_merging.as_timm(teacher().eval())


@pytest.mark.parametrize("loss", ["teacher", "cosine"])
def test_tunes_what_a_peer_patched(loss, token_merging, tmp_path, checkout, monkeypatch):
    teacher, processor = load_image_classifier(frugalvit.checkpoint_path("cifar10-vit"), "cpu")
    anatomy, image_format = read_anatomy(teacher), ImageFormat.from_processor(processor)
    before = token_merging.as_timm(anatomy).state_dict()
    budget = {"learning_rate": 1e-4, "epochs": 1, "warmup_epochs": 0, "scale": (0.8, 1.0), "seed": 0}
    tune = functools.partial(
        token_merging.tune, tmp_path / "run", anatomy=anatomy, image_format=image_format, loss=loss, **budget
    )
    monkeypatch.setattr(token_merging, "BATCH_SIZE", 16)
    model = tune(token_merging.tome(anatomy, checkout, 8), images=load_images("cifar10-subset", "train[:32]"))
    after = model.vit.state_dict()
    same = {name for name, tensor in after.items() if torch.equal(before[name], tensor)}
    # Embeddings alone do not tell how to classify.
    assert same == ({"head.weight", "head.bias"} if loss == "cosine" else set())
    # Tuned once: no images are looked at again.
    again = tune(token_merging.tome(anatomy, checkout, 8), images=None).vit.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in again.items())
    test = load_images("cifar10-subset", "test[:64]")
    assert token_merging.evaluate(model, test, image_format)["eval_accuracy"] > 0.5


def test_refuses_a_folder_without_the_package(token_merging, tmp_path):
    with pytest.raises(ValueError, match="no checkout with a package 'tome'"):
        token_merging.apply_tome(torch.nn.Identity(), str(tmp_path), 8)


def test_random_patches(token_merging):
    """All patches, in any order, give the teacher's embedding. A few give another one each time."""
    anatomy = read_anatomy(KINDS["vit"].make())
    images = anatomy.example()
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
