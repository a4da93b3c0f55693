"""`frugalvit features`: maps are as long as the features, and drawn where they belong."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from frugalvit import (
    AgentCNNConfig,
    AgentCNNForImageClassification,
    BootstrappedViTConfig,
    BootstrappedViTForImageClassification,
    SparseFormerConfig,
    SparseFormerForImageClassification,
)
from frugalvit.cli import main
from frugalvit.features import draw_features, feature_maps


SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "patch_size": 8}
VIT = {**SIZES, "image_size": 32, "num_attention_heads": 4}


@pytest.fixture
def folders(tmp_path):
    torch.manual_seed(0)
    for name, model in (
        ("vit", ViTForImageClassification(ViTConfig(**VIT))),
        ("pair", BootstrappedViTForImageClassification(BootstrappedViTConfig(vit_config=VIT, agent_config=SIZES))),
    ):
        model.save_pretrained(tmp_path / name)
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / name)
    pixels = np.random.default_rng(0).integers(0, 255, (2, 40, 40, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{index}.png")
    return tmp_path


@torch.no_grad()
def test_maps_are_lengths_of_vectors():
    images = torch.randn(2, 3, 32, 48)
    vit = ViTForImageClassification(ViTConfig(**VIT | {"image_size": [32, 48]})).eval()
    states = vit(images, output_hidden_states=True).hidden_states
    maps = feature_maps(vit, images)
    assert [values.shape for values in maps] == [(2, 4, 6)] * 2
    torch.testing.assert_close(maps[1][1, 2, 3], states[2][1, 1 + 2 * 6 + 3].square().sum().sqrt())
    agent = AgentCNNForImageClassification(AgentCNNConfig(**SIZES)).eval()
    states = agent(images, output_hidden_states=True).hidden_states
    maps = feature_maps(agent, images)
    torch.testing.assert_close(maps[0][1, 2, 3], states[1][1, :, 2, 3].square().sum().sqrt())


def test_colors_go_from_the_smallest_to_the_largest_value():
    maps = {"one": [torch.tensor([[[1.0, 3.0], [5.0, 2.0]]])], "two": [torch.full((1, 3, 3), 7.0)]}
    figure = draw_features(torch.rand(1, 3, 8, 8), maps)
    assert not figure.axes[2].get_images()  # the image again
    pictures = [axes.get_images()[0].get_array() if axes.get_images() else None for axes in figure.axes]
    brightness = pictures[1].sum(-1)
    assert brightness.argmin() == 0 and brightness.argmax() == 2 and brightness[0, 1] > brightness[1, 1]
    assert np.ptp(pictures[3].sum(-1)) == 0
    assert [axes.get_title() for axes in figure.axes[:2]] == ["Input", "Layer 1"]


def test_command_draws_both_of_a_pair(folders, capsys):
    arguments = [str(folders / "vit"), str(folders / "pair"), "--names", "alone", "joint"]
    picture = folders / "features.svg"
    assert main(["features", *arguments, "--image", str(folders / "*.png"), "--picture", str(picture)]) == 0
    assert capsys.readouterr().out == f"Drew {picture}.\n"
    # 2 images, each once, and 2 layers of each of 3 models.
    assert picture.read_text().count("<image ") == 2 * (1 + 3 * 2)
    options = ["--limit", "1", "--layers", "2"]
    assert main(["features", *arguments, "--image", str(folders), *options, "--picture", str(picture)]) == 0
    assert picture.read_text().count("<image ") == 1 + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "3"], "--layers has 3, expected 1 to 2"),
        (["--limit", "0"], "--limit is 0, expected at least 1"),
        (["--names", "a", "b"], "--names has 2 different names for 1 models"),
        (["--picture", "features.txt"], "expected a file name ending in"),
        (["--image", "nothing.png"], "no such file or folder: 'nothing.png'"),
    ],
)
def test_bad_input(arguments, message, folders, monkeypatch, capsys):
    monkeypatch.chdir(folders)
    before = sorted(folders.iterdir())
    assert main(["features", "vit", "--image", "0.png", "--picture", "out.png", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert sorted(folders.iterdir()) == before


def test_tokens_that_are_no_patches():
    config = SparseFormerConfig.from_variant("v1-tiny", num_latent_tokens=4, num_hidden_layers=1, image_size=32)
    with pytest.raises(ValueError, match="SparseFormerForImageClassification are no patches"):
        feature_maps(SparseFormerForImageClassification(config).eval(), torch.randn(1, 3, 32, 32))
