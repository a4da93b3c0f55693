"""Places of the files that ship with the package."""

import os
from importlib.resources import files
from pathlib import Path


# For their size these lie in a clone of the repository alone; setup.py leaves them out of the wheel.
IN_A_CLONE = ("caltech101-sparseformer", "caltech101-vit")


def shipped_checkpoints() -> list[str]:
    return sorted(file.parent.name for file in Path(str(files("frugalvit.checkpoints"))).glob("*/config.json"))


def checkpoint_path(name: str) -> Path:
    """Return the folder of a model that ships with frugalvit, for example `"cifar10-vit"`, for `from_pretrained`."""
    names = shipped_checkpoints()
    if name not in names:
        here = f"These models are here: {', '.join(names) or 'none'}."
        if name in IN_A_CLONE:
            raise only_in_a_clone(f"The model {name!r}", here)
        raise ValueError(f"No checkpoint {name!r} ships with frugalvit. {here}")
    return Path(str(files("frugalvit.checkpoints"))) / name


def shipped_images(name: str) -> Path:
    """Return the folder of `train.parquet` and `test.parquet`: `"cifar10"` or, in a clone alone, `"caltech101"`."""
    return Path(str(files("frugalvit.training"))) / name


def only_in_a_clone(what: str, hint: str = "") -> ValueError:
    """Return the error about a thing that the wheel does not have."""
    return ValueError(
        f"{what} lies in a clone of the repository, not in the installed wheel; `pip install -e .` there. {hint}"
    )


def locate_model(model: str | os.PathLike) -> str | os.PathLike:
    """Return the folder of a model that ships, where its name is given; a folder or hub id as it is."""
    ships = model in (*shipped_checkpoints(), *IN_A_CLONE) and not Path(model).exists()
    return str(checkpoint_path(model)) if ships else model
