"""Run training commands in this process, on a few images."""

import importlib
from pathlib import Path

import datasets
import pytest
import timm
import torch
from timm.models._hub import save_for_hf
from torch import nn
from torch.utils.data import Dataset

from frugalvit.training.data import load_images
from tiny import SMALL


# Configuration fields of a tiny ViT and a tiny student, as command-line arguments.
TINY_VIT = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
STUDENT = SMALL | {"mixing_hidden_size": 8}
TINY_STUDENT = ",".join(f"{name}={value}" for name, value in STUDENT.items())
# Command-line options for a short training on the CPU.
SHORT = {
    "train_split": "train[:64]",
    "eval_split": "test[:32]",
    "num_train_epochs": 2,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "logging_steps": 1,
    "use_cpu": True,
    # By default, the speed of the machine decides whether `frugalvit bootstrap` computes in bfloat16.
    "bf16": False,
}


def command_words(**options) -> list[str]:
    """Return options as a list of command-line arguments, without options whose value is None."""
    words = []
    for name, value in options.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def values_of(groups) -> list[dict]:
    """Return each dataclass's fields as a dictionary, without fields that depend on the process."""
    left_out = ("distributed_state", "_n_gpu", "command")
    return [{name: value for name, value in vars(group).items() if name not in left_out} for group in groups]


def run_command(command: str, output_dir, **options):
    """Run a training command and return its trainer."""
    module = importlib.import_module(f"frugalvit.training.{command}")
    trainers, make_trainer = [], module.make_trainer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_trainer", lambda *given: trainers.append(make_trainer(*given)) or trainers[0])
        assert not module.main(command_words(**SHORT | {"output_dir": output_dir} | options))
    return trainers[0]


def logged(trainer, name: str) -> list[float]:
    """Return the values of a metric in a trainer's log."""
    return [record[name] for record in trainer.state.log_history if name in record]


@torch.inference_mode()
def measured(model, processor) -> float:
    """Return the accuracy of a classifier on the first 32 test images of the CIFAR-10 subset."""
    images = load_images("cifar10-subset", "test[:32]").cast_column("image", datasets.Image())
    logits = model(**processor(images["image"][:], return_tensors="pt")).logits
    return (logits.argmax(1) == torch.tensor(images["label"][:])).float().mean().item()


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]):
    """Check that two dictionaries have the same names, and tensors that are equal bit by bit."""
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# Arguments of a small ViT of timm.
TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}


def save_timm(folder: Path, labels: list[str] | None = None, num_classes: int = 5) -> nn.Module:
    """Save a small ViT in timm's format, and return the ViT."""
    options = TIMM | {"num_classes": num_classes}
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    config = {"label_names": labels} if labels else {}
    images = {"input_size": (3, 32, 32), "mean": (0.5, 0.4, 0.3), "crop_pct": 0.8}
    save_for_hf(model, folder, config, model_args=options, data_config=images, safe_serialization=True)
    return model


class Pairs(Dataset):
    """PyTorch dataset of (image, label) pairs with an attribute `classes`, like torchvision's datasets."""

    def __init__(self, pictures, labels, classes):
        self.pictures = pictures
        self.labels = labels
        self.classes = classes

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index]
