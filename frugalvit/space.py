"""A Space of the hub: the page of `frugalvit demo` with one model. It brings the model and frugalvit's code."""

import platform
import shutil
from importlib.metadata import requires
from importlib.resources import files
from pathlib import Path

from huggingface_hub import SpaceCard, SpaceCardData
from packaging.requirements import Requirement

from .common.exported import is_exported
from .common.loading import load_image_classifier
from .demo import import_gradio


LEFT_OUT = shutil.ignore_patterns("__pycache__", "checkpoints", "caltech101", "train.parquet", "*.md")
APP = "from frugalvit.demo import main\n\n\nmain([{model!r}])\n"


def write_space(folder: Path, name: str, license: str | list[str] | None = None):
    """Make a Space of a folder that has an image classifier in `models/{name}`."""
    model = folder / "models" / name
    load_image_classifier(model, "cpu")
    about = SpaceCardData(
        title=name,
        sdk="gradio",
        sdk_version=import_gradio().__version__,
        python_version=".".join(platform.python_version_tuple()[:2]),
        app_file="app.py",
        license=license,
    )
    SpaceCard(f"---\n{about.to_yaml()}\n---\n\n# {name}\n").save(folder / "README.md")
    (folder / "app.py").write_text(APP.format(model=f"models/{name}"), encoding="utf-8")
    extra = {"extra": "export" if is_exported(model) else ""}
    needed = [
        each for each in map(Requirement, requires("frugalvit")) if not each.marker or each.marker.evaluate(extra)
    ]
    (folder / "requirements.txt").write_text("".join(f"{each.name}{each.specifier}\n" for each in needed))
    # In a clone, these rooms lie beside the package.
    for room in ("", "configuration", "modeling", "training"):
        source = str(files(f"frugalvit.{room}".rstrip(".")))
        shutil.copytree(source, folder / "frugalvit" / room, ignore=LEFT_OUT, dirs_exist_ok=True)
    (folder / "frugalvit" / "checkpoints").mkdir()
    (folder / "frugalvit" / "checkpoints" / "__init__.py").touch()
