"""Trainings on an accelerator, which none of the machines that run the tests needs to have: no tensor of
the CPU meets one of the device, and in a step nothing waits for the device."""

import pytest
from accelerate import Accelerator
from torch._subclasses import fake_tensor
from trainings import STUDENT, run_command
from transformers import AutoModelForImageClassification

from fake_cuda import fake_cuda
from frugalvit import SparseFormerForImageClassification
from frugalvit.training.trainer import ImageTrainer
from tiny import save_vit


if not hasattr(fake_tensor, "FakeTensorDeviceMismatchError"):
    pytest.skip("what stands in for a device needs a newer PyTorch than 2.11", allow_module_level=True)


@pytest.fixture
def device():
    with fake_cuda() as mode:
        yield mode


@pytest.fixture
def run(device, tmp_path, monkeypatch):
    """Runs a training for two steps and its evaluation, and returns where each step but the last has waited."""
    waits, training_step = [], ImageTrainer.training_step
    watched = lambda *arguments: waits.append(device.waits.copy()) or training_step(*arguments)  # noqa: E731
    monkeypatch.setattr(ImageTrainer, "training_step", watched)
    # A fake tensor has nothing to write, and widths that are read are 0.
    monkeypatch.setattr(ImageTrainer, "save_model", lambda self: None)
    monkeypatch.setattr(Accelerator, "pad_across_processes", lambda self, tensor, **_: tensor)

    def run(command, **options):
        shared = {"num_train_epochs": 1, "train_split": "train[:32]", "logging_steps": 2, "use_cpu": None}
        shared |= {"save_strategy": "no", "load_best_model_at_end": False}
        run_command(command, tmp_path / "out", **shared | options)
        return [after - before for before, after in zip(waits, waits[1:], strict=False)]

    return run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder with a ViT of 2 blocks: what stands in for a device takes its time."""
    return save_vit(tmp_path_factory.mktemp("teacher"), num_hidden_layers=2, num_labels=10)


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    """A folder with a SparseFormer that has the teacher's blocks, made on the CPU."""
    folder, sizes = tmp_path_factory.mktemp("student"), STUDENT | {"num_focusing_iterations": 1}
    model = AutoModelForImageClassification.from_pretrained(teacher)
    SparseFormerForImageClassification.from_teacher(model, 4, truncate=1, resample=2, **sizes).save_pretrained(folder)
    return folder


LOSSES = {"loss": "kl", "label_loss_weight": 0.5, "token_loss_weight": 1, "bf16": True}
PLACED = {"focusing": "inherited", "placement": "content", "placement_rule": "learned", "num_tokens": [4, 7]}
PLACED |= {"dense_loss_weight": 1}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("bootstrap", {"teacher": "{teacher}", "student": "{student}"} | LOSSES),
        ("bootstrap", {"teacher": "{teacher}"} | PLACED),
    ],
)
def test_a_step_does_not_wait(command, options, run, teacher, student):
    folders = {"teacher": teacher, "student": student}
    options = {name: value.format(**folders) if isinstance(value, str) else value for name, value in options.items()}
    steps = run(command, **options)
    assert len(steps) == 1 and not any(steps), steps
