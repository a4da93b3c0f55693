"""The page of `frugalvit demo` with one model as a Space of the hub, which brings frugalvit's code and the model: it
needs packages of PyPI and nothing else."""

import platform
import shutil
from importlib.metadata import requires
from importlib.resources import files
from pathlib import Path

from huggingface_hub import SpaceCard, SpaceCardData
from packaging.requirements import Requirement

from .common.exported import is_exported
from .common.loading import load_image_classifier
from .demo import example_images, gradio


# In a clone these lie beside the package, installed within it.
ROOMS = ("configuration", "modeling", "training")
# What the page does without.
LEFT_OUT = shutil.ignore_patterns("__pycache__", "checkpoints", "caltech101", "train.parquet", "*.md")
APP = '''"""The page of `frugalvit demo` with one model. `frugalvit publish --space` wrote it."""

from pathlib import Path

from frugalvit.demo import build_page, serve


HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    serve(build_page({{{name!r}: HERE / "model"}}, examples=HERE / "examples"))
'''


def write_space(folder: Path, name: str, license: str | list[str] | None = None):
    """Make a Space of a folder that has an image classifier in `model`.

    Args:
        folder (`Path`): The folder.
        name (`str`): The model's, on the page.
        license (`str` or `list[str]`, *optional*): The model's.

    Raises:
        ValueError: if the model classifies no images, or gradio is not installed.
    """
    load_image_classifier(folder / "model", "cpu")
    about = SpaceCardData(
        title=name,
        sdk="gradio",
        sdk_version=gradio().__version__,
        python_version=".".join(platform.python_version_tuple()[:2]),
        app_file="app.py",
        license=license,
    )
    text = "An image classifier, and where it looks. Drop in an image of your own."
    SpaceCard(f"---\n{about.to_yaml()}\n---\n\n# {name}\n\n{text}\n").save(folder / "README.md")
    (folder / "app.py").write_text(APP.format(name=name), encoding="utf-8")
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements(folder / "model")))
    example_images(folder / "examples")
    shutil.copytree(str(files("frugalvit")), folder / "frugalvit", ignore=LEFT_OUT)
    for room in ROOMS:
        place = str(files(f"frugalvit.{room}"))
        shutil.copytree(place, folder / "frugalvit" / room, ignore=LEFT_OUT, dirs_exist_ok=True)
    (folder / "frugalvit" / "checkpoints").mkdir()
    (folder / "frugalvit" / "checkpoints" / "__init__.py").touch()


def requirements(model: Path) -> list[str]:
    """Return the packages that the page with a model needs, as pip takes them, without gradio, which a Space has."""
    extra = "export" if is_exported(model) else ""
    found = []
    for requirement in map(Requirement, requires("frugalvit")):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            found.append(str(requirement))
    return found
