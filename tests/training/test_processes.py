"""Several processes do what one does, and end together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTImageProcessor

from frugalvit.training import train


RECIPES = Path(train.__file__).with_name("recipes")
VIT = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
VIT |= {"intermediate_size": 64}
# Images to train on that make no whole batch at the end, and images to evaluate on that have no even shares.
SHARED = {"train_split": "train[:72]", "eval_split": "test[:51]", "eval_batch_size": 16, "epochs": 2, "batch_size": 16}
SHARED |= {"warmup_epochs": 1, "logging_steps": 1, "checkpointing_steps": 3}


def fsdp() -> dict[str, str]:
    """What `accelerate launch --config_file fsdp2.yaml` says to its processes."""
    config = yaml.safe_load((RECIPES / "fsdp2.yaml").read_text(encoding="utf-8"))
    options = {name.upper(): str(value).lower() for name, value in config["fsdp_config"].items()}
    return options | {"ACCELERATE_USE_FSDP": "true"}


def run(folder: Path, jobs: list[dict], **options):
    """Runs jobs of several_processes.py, whose `options` are to be the command line's."""
    for job in jobs:
        values = SHARED | options | {"output_dir": str(folder / job["name"])} | job.pop("options", {})
        job["arguments"] = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program = Path(__file__).with_name("several_processes.py")
    process = subprocess.run(
        [sys.executable, program, folder / "jobs.json"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr[-5000:]


def log(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "images_per_second"} for record in records]


def assert_same_run(folder: Path, expected: Path):
    assert len(log(folder)) == len(log(expected)) == 2 * 4 + 2
    for ours, theirs in zip(log(folder), log(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert (folder / "config.json").read_text() == (expected / "config.json").read_text()
    models = [AutoModelForImageClassification.from_pretrained(path).state_dict() for path in (folder, expected)]
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-5)


def test_a_classifier(tmp_path):
    """Four processes; and two that share out its weights, accumulate, and go on from a checkpoint."""
    overrides = ",".join(f"{name}={value}" for name, value in VIT.items())
    parts = {"gradient_accumulation_steps": 2}
    jobs = [
        {"name": "one", "processes": 1},
        {"name": "four", "processes": 4, "options": parts},
        {"name": "sharded", "processes": 2, "options": parts, "fsdp": fsdp(), "stop": 5},
        {"name": "sharded", "processes": 2, "options": parts, "fsdp": fsdp()},
    ]
    jobs = [{"recipe": "train", **job} for job in jobs]
    run(tmp_path, jobs, config_overrides=overrides, mixup=0.8, cutmix=1)
    checkpoint = sorted((tmp_path / "sharded" / "checkpoints").iterdir())[-1]
    assert (checkpoint / "pytorch_model_fsdp_0" / "__1_0.distcp").is_file()
    for name in ("four", "sharded"):
        assert_same_run(tmp_path / name, tmp_path / "one")


def test_a_bootstrapped_student(tmp_path):
    """Two processes that accumulate, four, and two that share out the student's weights."""
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(**VIT, num_labels=10)).save_pretrained(tmp_path / "teacher")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "teacher")
    small = "stem_channels=8,num_sampling_points=4,num_mixed_points=4,num_focusing_iterations=2,mixing_hidden_size=8"
    jobs = [
        {"name": "one", "processes": 1},
        {"name": "two", "processes": 2, "options": {"gradient_accumulation_steps": 2}},
        {"name": "four", "processes": 4},
        {"name": "sharded", "processes": 2, "fsdp": fsdp()},
    ]
    jobs = [{"recipe": "bootstrap", **job} for job in jobs]
    run(tmp_path, jobs, teacher=tmp_path / "teacher", config_overrides=small, learning_rate=1e-3)
    for name in ("two", "four", "sharded"):
        assert_same_run(tmp_path / name, tmp_path / "one")
