"""Where the files that ship with the package are."""

from importlib.resources import files
from pathlib import Path


def checkpoint_path(name: str) -> Path:
    """The folder of a model that ships with frugalvit, for `from_pretrained`.

    Args:
        name (`str`): For example `"cifar10-vit"` or `"cifar10-sparseformer"`.

    Raises:
        ValueError: if no model of that name ships; the message lists those that do.
    """
    root = Path(str(files("frugalvit.checkpoints")))
    names = sorted(folder.parent.name for folder in root.glob("*/config.json"))
    if name not in names:
        raise ValueError(f"No checkpoint {name!r} ships with frugalvit. These do: {', '.join(names) or 'none'}.")
    return root / name
