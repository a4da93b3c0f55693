"""Places of the files that ship with the package."""

from importlib.resources import files
from pathlib import Path


def _root() -> Path:
    return Path(str(files("frugalvit.checkpoints")))


def shipped_checkpoints() -> list[str]:
    """Names of the models that ship with frugalvit."""
    return sorted(folder.parent.name for folder in _root().glob("*/config.json"))


def checkpoint_path(name: str) -> Path:
    """The folder of a model that ships with frugalvit, for `from_pretrained`.

    Args:
        name (`str`): For example `"cifar10-vit"` or `"cifar10-sparseformer"`.

    Raises:
        ValueError: if no model of that name ships; the message lists those that do.
    """
    names = shipped_checkpoints()
    if name not in names:
        raise ValueError(f"No checkpoint {name!r} ships with frugalvit. These do: {', '.join(names) or 'none'}.")
    return _root() / name
