"""Test training on few images: default arguments, notes about too few steps, and recipes."""

import functools

import pytest
from trainings import TINY_VIT
from transformers import ViTConfig

from frugalvit.training.arguments import RECIPES
from frugalvit.training.train import ImageClassificationArguments, resolve_arguments
from runs import make as make_trainer
from tiny import save_vit


make = functools.partial(make_trainer, "train")


@pytest.mark.parametrize(
    ("images", "given", "batch_size"),
    [(60, None, 8), (400, None, 16), (2559, None, 64), (2560, None, 128), (50_000, None, 128), (60, 3, 3)],
)
def test_batches_are_small_where_steps_would_be_few(images, given, batch_size, tmp_path):
    args = ImageClassificationArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=given)
    assert resolve_arguments(args, ViTConfig(), range(images)).per_device_train_batch_size == batch_size


def test_a_trained_model_has_a_lower_rate_than_new_weights(tmp_path):
    folder = save_vit(tmp_path / "vit", num_labels=10)
    rates = {
        make(tmp_path / "out", **options, **given).args.learning_rate: given
        for options in ({"model": folder}, {"config_overrides": TINY_VIT})
        for given in ({}, {"learning_rate": 0.5})
    }
    assert [*rates] == [1e-4, 0.5, 1e-3]


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_training_that_learned_nothing_is_noted(epochs, tmp_path, capsys):
    """With two epochs, the first one is the best, because both have the same accuracy."""
    options = {"config_overrides": TINY_VIT, "learning_rate": 1e-9, "train_split": "train[:32]"}
    make(tmp_path / "out", num_train_epochs=epochs, **options).run()
    notes = capsys.readouterr().err
    assert ("Note: 2 steps are few to learn from; num_train_epochs 50 makes 100." in notes) == (epochs == 1)
    assert ("are few to learn from" in notes) == (epochs == 1)
    assert (
        "on 32 images may be chance (10.0%). Try more num_train_epochs, or a lower learning_rate than 1e-09." in notes
    )


@pytest.mark.parametrize(("name", "images"), [("few-50", 50), ("few-200", 200), ("few-1000", 1000)])
def test_recipes_for_few_images_have_enough_steps(name, images):
    text = RECIPES[name].read_text("utf-8")
    values = dict(line.split(": ") for line in text.splitlines() if ": " in line and not line.startswith("#"))
    steps = -(-images // int(values["per_device_train_batch_size"])) * int(values["num_train_epochs"])
    assert 100 <= steps <= 250 and values["learning_rate"] == "1.0e-4"
