"""Versions of what a result depends on."""

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, and the commit of frugalvit where it runs from a clone."""
    packages = ("frugalvit", "torch", "torchvision", "transformers", "accelerate", "datasets")
    found = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    return found | ({"commit": commit()} if commit() else {})


@functools.cache
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
