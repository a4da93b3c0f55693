"""Versions of packages and a description of the machine, for files of results."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch


def origin() -> dict[str, dict]:
    """Return the versions of packages and the description of the machine."""
    return {"versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results. In a git clone, add the commit."""
    packages = ("frugalvit", "torch", "torchvision", "transformers", "accelerate", "datasets")
    found = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    return found | ({"commit": known} if (known := commit()) else {})


def commit() -> str | None:
    """Return the commit of this git clone, with a mark if files were changed, or `None` outside of a clone."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=, changed", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, object]:
    """Return the name of the CPU, the number of PyTorch's threads and the names of the GPUs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cpu": names[0] if names else platform.processor(), "threads": torch.get_num_threads(), "gpus": gpus}
