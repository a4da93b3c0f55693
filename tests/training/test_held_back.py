"""Trainings on folders as people have them, and without images to evaluate on."""

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from drawn import draw
from frugalvit.training import bootstrap


SMALL = "stem_channels=8,num_sampling_points=4,num_mixed_points=4,num_focusing_iterations=2,mixing_hidden_size=8"


def test_bootstraps_on_folders(teacher, tmp_path, capsys):
    """The README's command."""
    draw(tmp_path / "images", 20)
    options = [
        *("--teacher", str(teacher), "--dataset", str(tmp_path / "images"), "--output", str(tmp_path / "out")),
        *("--config-overrides", SMALL, "--batch-size", "6", "--epochs", "1", "--recipe", "paper", "--no-compare"),
    ]
    bootstrap.main(options)
    best = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["best"]
    assert best["step"] == 3 and "alignment" in best and "accuracy" not in best
    assert "2 of 20 images of train are held back" in capsys.readouterr().out


def test_without_evaluation_the_last_epoch_is_kept(teacher, tmp_path):
    out = tmp_path / "out"
    bootstrap.main(
        [
            *("--teacher", str(teacher), "--output", str(out), "--config-overrides", SMALL),
            *("--train-split", "train[:64]", "--eval-split", "none", "--batch-size", "16", "--epochs", "2"),
            *("--recipe", "paper", "--no-compare"),
        ]
    )
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["best"] == results["epochs"][-1] and results["best"]["epoch"] == 2
    assert not {"accuracy", "alignment"} & results["best"].keys()
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "epoch 2 of 2, none was evaluated" in card and "not evaluated" in card
    assert "accuracy" not in card and "model-index" not in card
    last = load_file(out / "checkpoints" / "step-00000008" / "model.safetensors")
    kept = AutoModelForImageClassification.from_pretrained(out).state_dict()
    # The base model alone is in checkpoints.
    assert all(torch.equal(kept[f"sparseformer.{name}"], weight) for name, weight in last.items())
