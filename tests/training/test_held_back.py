"""Trainings on folders as people have them, and without images to evaluate on."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from drawn import draw, draw_classes
from frugalvit.training import bootstrap, joint


SMALL = "stem_channels=8,num_sampling_points=4,num_mixed_points=4,num_focusing_iterations=2,mixing_hidden_size=8"


def flat(folder):
    draw(folder, 20)


def validation(folder):
    draw_classes(folder / "train", 10)
    draw_classes(folder / "validation", 5, start=50)


@pytest.mark.parametrize(("layout", "measured"), [(flat, {"alignment"}), (validation, {"alignment", "accuracy"})])
def test_bootstraps_on_folders(layout, measured, teacher, tmp_path, capsys):
    """The README's command."""
    layout(tmp_path / "images")
    options = [
        *("--teacher", str(teacher), "--dataset", str(tmp_path / "images"), "--output", str(tmp_path / "out")),
        *("--config-overrides", SMALL, "--batch-size", "6", "--epochs", "1", "--recipe", "paper", "--no-compare"),
    ]
    if layout is validation:
        options += ["--class-names", *"0123456789"]
    bootstrap.main(options)
    best = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["best"]
    assert best["step"] == 3 and measured <= best.keys() and ("accuracy" in best) == ("accuracy" in measured)
    assert ("2 of 20 images of train are held back" in capsys.readouterr().out) == (layout is flat)


@pytest.mark.parametrize("recipe", ["train", "bootstrap", "joint"])
def test_without_evaluation_the_last_epoch_is_kept(recipe, teacher, tmp_path, tiny_run):
    out = tmp_path / "out"
    if recipe == "train":
        tiny_run(eval_split="none")
    elif recipe == "bootstrap":
        bootstrap.main(
            [
                *("--teacher", str(teacher), "--output", str(out), "--config-overrides", SMALL),
                *("--train-split", "train[:64]", "--eval-split", "none", "--batch-size", "16", "--epochs", "2"),
                *("--recipe", "paper", "--no-compare"),
            ]
        )
    else:
        sizes = "hidden_size=36,num_hidden_layers=2,intermediate_size=48,patch_size=8"
        joint.main(
            [
                *("--output", str(out), "--vit", f"{sizes},image_size=32", "--agent", sizes),
                *("--train-split", "train[:64]", "--eval-split", "none", "--batch-size", "16", "--epochs", "2"),
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
    # Of a student, the base model alone is in checkpoints.
    prefix = "sparseformer." if recipe == "bootstrap" else ""
    assert all(torch.equal(kept[prefix + name], weight) for name, weight in last.items())
