"""Versions of what a result depends on."""

import importlib.metadata
import platform


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    packages = ("frugalvit", "torch", "torchvision", "transformers", "accelerate", "datasets")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
