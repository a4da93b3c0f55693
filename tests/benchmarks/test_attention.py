"""benchmarks/attention.py: pictures show what was measured, and a run's start is drawn again."""

import importlib
import math
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTImageProcessor

from frugalvit import AgentCNNConfig, AgentCNNForImageClassification
from frugalvit.attention import measure_attention
from frugalvit.training import joint, train


with patch.object(sys, "path", [str(Path(__file__).resolve().parents[2] / "benchmarks"), *sys.path]):
    attention = importlib.import_module("attention")


SIZES = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=5, **SIZES)).eval()


def test_pictures_show_what_was_measured(tmp_path, capsys):
    model, images = vit(), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    measured = {"one": measure_attention(model, [images])}
    for head, expected in ((3, measured["one"][1].maps[2]), (None, measured["one"][1].maps.mean(0))):
        whole, corner = attention.draw_maps(measured, [2], head).axes
        np.testing.assert_allclose(whole.get_images()[0].get_array(), expected)
        np.testing.assert_allclose(corner.get_images()[0].get_array(), expected[:48, :48])
    mean, uniform = attention.draw_entropy(measured).axes[0].get_lines()
    assert mean.get_ydata().tolist() == pytest.approx([np.mean(layer.entropy) for layer in measured["one"]])
    assert uniform.get_ydata()[0] == pytest.approx(math.log(65))
    with pytest.raises(ValueError, match="one has 4 heads to draw, not head 5"):
        attention.draw_maps(measured, [1], 5)


@torch.no_grad()
def test_features_are_lengths_of_vectors():
    images = torch.randn(3, 3, 32, 32)
    for model in (vit(), AgentCNNForImageClassification(AgentCNNConfig(hidden_size=24, patch_size=8)).eval()):
        states = model(images, output_hidden_states=True).hidden_states[1]
        length = states[2, 1 + 8 * 1 + 2] if states.ndim == 3 else states[2, :, 1, 2]
        maps = attention.feature_maps(model, images.split(2))
        torch.testing.assert_close(maps[0][2, 1, 2], length.norm())


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    vit().save_pretrained("trained-vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained("trained-vit")
    Image.new("RGB", (40, 40), (9, 80, 200)).save("image.png")
    attention.main(["maps", "trained-vit", "--initialization", "impulse", "--layers", "1", "2"])
    said = capsys.readouterr().out
    assert "impulse, before training" in said and said.count("trained-vit") == 2
    for what in ("entropy", "features"):
        attention.main([what, "trained-vit", "--images", "image.png"])
    assert all(Path(f"{what}.png").stat().st_size > 5000 for what in ("maps", "entropy", "features"))


@pytest.mark.parametrize("command", ["train", "joint"])
def test_a_start_is_drawn_again(command, tmp_path):
    """A run that learned nothing has saved its start."""
    sizes = "patch_size=8,hidden_size=36,num_hidden_layers=2,intermediate_size=48"
    run = ["--train_split", "train[:64]", "--eval_split", "test[:8]", "--per_device_train_batch_size", "8"]
    run += ["--max_steps", "1", "--learning_rate", "1e-12", "--seed", "3", "--output_dir", str(tmp_path / "run")]
    if command == "joint":
        joint.main([*run, "--vit", f"image_size=32,{sizes}", "--agent", sizes])
    else:
        overrides = f"image_size=32,{sizes},num_attention_heads=4"
        train.main([*run, "--config_overrides", overrides, "--initialization", "mimetic"])
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run")
    start = attention.own_start(tmp_path / "run", model).state_dict()
    assert start.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        # Statistics of batches are no weights.
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(start[name], tensor, rtol=0, atol=1e-6)
