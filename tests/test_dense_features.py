"""`frugalvit features --dense`: the maps that are written are the model's, and their colors those of its teacher's
components."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import Dinov2Config, Dinov2Model, ViTImageProcessor

from frugalvit import SparseFormerBackbone, SparseFormerModel
from frugalvit.cli import main
from frugalvit.common.loading import load_image_processor
from frugalvit.common.views import prepare_images
from frugalvit.dense import principal_colors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher, a student with a token for each of its patches, placed by content, and images."""
    folder = tmp_path_factory.mktemp("dense")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "mlp_ratio": 1}
    teacher = Dinov2Model(Dinov2Config(**sizes, image_size=56, patch_size=14)).eval()
    # Patches that differ.
    torch.nn.init.normal_(teacher.embeddings.patch_embeddings.projection.weight, std=0.1)
    teacher.save_pretrained(folder / "teacher")
    ViTImageProcessor(size={"height": 56, "width": 56}).save_pretrained(folder / "teacher")
    # As DPT reads it.
    fields = {"placement": "content", "reshape_hidden_states": False}
    student = SparseFormerModel.from_teacher(teacher, 16, focusing="inherited", **fields)
    student.save_pretrained(folder / "student")
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((60, 80), Image.Resampling.NEAREST).save(folder / f"{number}.png")
    return folder


def features(folder, *arguments) -> int:
    return main(["features", str(folder / "*.png"), "--dense", "--model", str(folder / "student"), *arguments])


def test_writes_the_maps_and_draws_them_beside_the_teachers(folder, tmp_path, capsys):
    output, picture = tmp_path / "maps.safetensors", tmp_path / "maps.svg"
    teacher = ["--teacher", str(folder / "teacher"), "--layers", "1", "3"]
    assert features(folder, *teacher, "--output", str(output), "--picture", str(picture), "--limit", "2") == 0
    said = capsys.readouterr().out.splitlines()
    # Its student is the teacher.
    assert said[:2] == [f"stage{layer}: cosine with the teacher's map 1.000" for layer in (1, 3)]
    with safe_open(output, "pt") as file:
        maps = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert json.loads(file.metadata()["images"]) == [str(folder / f"{number}.png") for number in range(2)]
    backbone = SparseFormerBackbone.from_pretrained(folder / "student", out_indices=[1, 3], reshape_hidden_states=True)
    images = [Image.open(folder / f"{number}.png").convert("RGB") for number in range(2)]
    pixel_values = prepare_images(load_image_processor(folder / "student", False, "a model"), images)
    with torch.no_grad():
        for name, expected in zip(("stage1", "stage3"), backbone(pixel_values).feature_maps, strict=True):
            assert maps[name].shape == (2, 32, 4, 4) and maps[name].dtype == torch.float32
            torch.testing.assert_close(maps[name], expected)
    # Of each image itself, and two layers of both models.
    assert picture.read_text().count("<image ") == 2 * (1 + 2 * 2)


def test_fewer_tokens_and_another_size(folder, tmp_path, capsys):
    output = tmp_path / "maps.safetensors"
    options = ["--num-tokens", "7", "--size", "70", "42", "--teacher", str(folder / "teacher")]
    assert features(folder, *options, "--output", str(output)) == 0
    cosine = float(capsys.readouterr().out.split("teacher's map ")[1].split()[0])
    assert 0 < cosine < 0.999
    with safe_open(output, "pt") as file:
        assert file.get_tensor("stage3").shape == (3, 32, 5, 3)


def test_colors_are_the_references_components():
    torch.manual_seed(0)
    directions = torch.linalg.qr(torch.randn(6, 3)).Q
    scores = torch.randn(2 * 4 * 5, 3) * torch.tensor([9.0, 3.0, 1.0])
    reference = (scores @ directions.T + 2).view(2, 4, 5, 6).permute(0, 3, 1, 2)
    own, same, shifted = principal_colors(reference, reference, reference + 100 * directions[:, 0].view(1, 6, 1, 1))
    assert own.shape == (2, 3, 4, 5) and own.min() == 0 and own.max() == 1
    torch.testing.assert_close(own, same)
    for component in range(3):
        pair = torch.stack([own[:, component].flatten(), scores[:, component]])
        assert torch.corrcoef(pair)[0, 1].abs() > 0.95
    # What is beyond the reference's colors is at an end of them.
    assert len(shifted[:, 0].unique()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "4", "--output", "maps.safetensors"], "--layers has 4, expected 1 to 3"),
        (["--limit", "0", "--output", "maps.safetensors"], "--limit is 0, expected at least 1"),
        (["--output", "maps.pt"], "expected a file name ending in .safetensors"),
        (["--output", "maps.safetensors", "--num-tokens", "3"], "3 tokens are fewer than the 4 cells"),
        (["--output", "maps.safetensors", "--size", "7", "70"], "expected at least 14 x 14"),
        (["--output", "maps.safetensors", "--model", "teacher"], "as a SparseFormer: ValueError: it is a dinov2"),
        ([], "--dense writes --output, maps, or --picture"),
        (["--output", "maps.safetensors", "--names", "a"], "--names is not read with --dense"),
    ],
)
def test_bad_input(arguments, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    code = 0
    try:
        code = features(folder, *arguments)
    except SystemExit as error:
        code = error.code
    assert code and message in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def test_options_of_feature_maps_need_dense(capsys):
    with pytest.raises(SystemExit):
        main(["features", "model", "--image", "0.png", "--picture", "out.png", "--num-tokens", "4"])
    assert "--num-tokens is not read without --dense" in capsys.readouterr().err
