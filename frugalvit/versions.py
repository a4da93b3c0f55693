"""Versions of packages and the machine, on which a result depends."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch


def origin() -> dict[str, dict]:
    """`versions` and `machine`, which every file of results notes."""
    return {"versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, and frugalvit's commit if it runs from a clone."""
    packages = ("frugalvit", "torch", "torchvision", "transformers", "accelerate", "datasets")
    found = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    return found | ({"commit": known} if (known := commit()) else {})


def commit() -> str | None:
    """The commit of the clone that this file is in, with a mark where files differ from it; None elsewhere."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=, changed", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, object]:
    """Processor, threads and accelerators of this process."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cpu": names[0] if names else platform.processor(), "threads": torch.get_num_threads(), "gpus": gpus}
