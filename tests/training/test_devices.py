"""Recipes and commands on an accelerator, which none of the machines that run the tests needs to have: no tensor of
the CPU meets one of the device, and in a step nothing waits for the device."""

import importlib

import pytest
import torch
from accelerate import Accelerator
from fake_cuda import fake_cuda

from frugalvit import SparseFormerConfig, SparseFormerForImageClassification
from frugalvit.training import loop
from frugalvit.training.data import TrainingLoader


VIT = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
SMALL = "stem_channels=8,num_sampling_points=4,num_mixed_points=4,num_focusing_iterations=2,mixing_hidden_size=8"
SIZES = "hidden_size=36,num_hidden_layers=2,intermediate_size=48,patch_size=8"
TOWER = "num_hidden_layers=2,num_attention_heads=2,hidden_size=32,intermediate_size=64"


@pytest.fixture
def device():
    with fake_cuda() as mode:
        yield mode


@pytest.fixture
def run(device, tmp_path, monkeypatch):
    """Runs three steps of a recipe and its evaluation, and returns how often each of the steps waited."""

    def read_weights(self, model):
        return {name: value.cpu() for name, value in model.state_dict().items()}

    # A fake tensor has nothing to write.
    monkeypatch.setattr(loop.Checkpoints, "save", lambda self, state: None)
    monkeypatch.setattr(Accelerator, "get_state_dict", read_weights)
    waits, epoch = [], TrainingLoader.epoch

    def watched(self, *position):
        for batch in epoch(self, *position):
            waits.append(device.waits.copy())
            yield batch

    monkeypatch.setattr(TrainingLoader, "epoch", watched)

    def run(recipe, options):
        options = {
            "output_dir": tmp_path / "out",
            "train_split": "train[:48]",
            "eval_split": "test[:24]",
            "epochs": 1,
            "batch_size": 16,
            "logging_steps": 3,
        } | options
        texts = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
        assert not importlib.import_module(f"frugalvit.training.{recipe}").main(texts)
        return [after - before for before, after in zip(waits, waits[1:], strict=False)]

    return run


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("train", {"config_overrides": VIT, "mixup": 0.8, "cutmix": 1}),
        ("train", {"config_overrides": VIT, "optimizer": "muon", "mixed_precision": "no"}),
        ("joint", {"vit": f"{SIZES},image_size=32", "agent": SIZES}),
        ("contrastive", {"vision": f"{TOWER},image_size=32,patch_size=8", "text": TOWER, "projection_dim": 16}),
    ],
)
def test_recipe(recipe, options, run):
    steps = run(recipe, options)
    assert len(steps) == 2 and not any(steps), steps


@pytest.mark.parametrize("options", [{"distill_kind": "soft"}, {"distill_kind": "hard", "mixed_precision": "no"}])
def test_distilling(options, run, teacher):
    steps = run("train", {"config_overrides": VIT, "distill_from": teacher} | options)
    assert len(steps) == 2 and not any(steps), steps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "muon", "mixed_precision": "no", "repeats": 2},
        {"loss": "kl", "label_loss_weight": 0.5, "token_loss_weight": 1},
    ],
)
def test_bootstrap(options, run, teacher):
    steps = run("bootstrap", {"teacher": teacher, "config_overrides": SMALL} | options)
    assert len(steps) >= 2 and not any(steps), steps
