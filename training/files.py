"""Find models and files that ship with the package, and write files and folders atomically."""

import difflib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path


# Form of a hub id, owner/name.
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
# Models that are only in a clone of the repository, because they are too large for the wheel (see setup.py).
IN_A_CLONE = ("caltech101-sparseformer", "caltech101-vit")
# Recipes by name: YAML files of arguments, one for each row of the papers' tables.
RECIPES = {file.stem: file for file in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}
# Names of files that belong in a model folder: files of the model, the card, files of processors and tokenizers, and
# files of `frugalvit export`. Source files and the card's pictures also belong in a model folder, but are not listed
# here.
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors")
MODEL_FILES += ("model.safetensors.index.json", "modules.json", "sentence_bert_config.json", "notebook.ipynb")
COMPANIONS = ("README.md", "*processor_config.json", "chat_template.*", "tokenizer*.json", "merges.txt", "vocab.*")
EXPORT_FILES = ("onnx", "openvino_*model.xml", "openvino_*model.bin", "export.json", "report.json", "index.html")
EXPORT_FILES += ("ort*.mjs", "ort*.wasm")


def shipped_checkpoints() -> list[str]:
    return sorted(file.parent.name for file in Path(str(files("frugalvit.checkpoints"))).glob("*/config.json"))


def checkpoint_path(name: str) -> Path:
    """Return the folder of a model that ships with frugalvit, for example of `"cifar10-vit"`."""
    names = shipped_checkpoints()
    if name not in names:
        here = f"These models are here: {', '.join(names) or 'none'}."
        if name in IN_A_CLONE:
            raise only_in_a_clone(f"The model {name!r}", here)
        raise ValueError(f"No checkpoint {name!r} ships with frugalvit. {here}")
    return Path(str(files("frugalvit.checkpoints"))) / name


def split_revision(name: str | os.PathLike, must_exist: bool = False) -> tuple[str, dict[str, str]]:
    """Return a model's folder or hub id, and keyword arguments for `from_pretrained`. For `owner/name@revision`, the
    keyword arguments contain the revision. With `must_exist`, raise a ValueError if the model is neither a folder nor
    a hub id."""
    name = os.fspath(name)
    folder = Path(name).expanduser()
    if folder.exists():
        return str(folder), {}
    if name in (*shipped_checkpoints(), *IN_A_CLONE):
        return str(checkpoint_path(name)), {}
    hub_id, at, revision = name.partition("@")
    if at and not revision:
        raise ValueError(f"{name!r} names no revision; expected owner/name@revision.")
    if must_exist and not HUB_ID.fullmatch(hub_id):
        raise unknown_model(hub_id)
    return hub_id, {"revision": revision} if at else {}


def unknown_model(found: str) -> ValueError:
    """Return the error for a name that is neither a folder nor a hub id. The hub is not contacted."""
    if found in RECIPES:
        command = re.search(r"^command: (\S+)", read_text(RECIPES[found]), re.MULTILINE)[1]
        return ValueError(
            f"{found!r} is a recipe without weights; train it by `frugalvit {command} --config {found}`."
        )
    if "/" in found or found.startswith((".", "~")):
        return ValueError(f"There is no folder {found!r}.")
    shipped = shipped_checkpoints()
    close = difflib.get_close_matches(found, shipped, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"these ship: {', '.join(shipped)}."
    return ValueError(
        f"There is no model {found!r}, expected a folder, a hub id, owner/name, or one that ships; {hint}"
    )


def shipped_images(name: str) -> Path:
    """Return the folder with the images of `"cifar10"` or `"caltech101"`. The images of `"caltech101"` are only in a
    clone of the repository."""
    return Path(str(files("frugalvit.training"))) / name


def only_in_a_clone(what: str, hint: str = "") -> ValueError:
    """Return the error for a model or a file that is missing from the wheel."""
    return ValueError(
        f"{what} lies in a clone of the repository, not in the installed wheel; `pip install -e .` there. {hint}"
    )


def check_file_path(path: str | os.PathLike) -> Path:
    """Check that a file can be written to a path, and return the path.

    Raises:
        OSError or ValueError: If no file can be written to the path.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"Cannot write {str(path)!r}: it is a folder, a device or a pipe, expected a file name.")
    if not os.access(path.parent, os.W_OK):
        raise OSError(f"Cannot write {str(path)!r}: there is no folder {str(path.parent)!r} that may be written to.")
    return path


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path. If the `with` block succeeds, the file at the temporary path replaces `path`. If the
    block fails, the temporary file is removed."""
    # If `path` is a symbolic link, the link is kept and its target is replaced.
    path = Path(os.path.realpath(check_file_path(path)))
    aside = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield aside
        if path.exists():
            shutil.copymode(path, aside)
        else:
            apply_umask(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def apply_umask(path: Path):
    """Give a file, or all files in a folder, the permissions that new files have by default. This is needed because
    safetensors 0.8 writes files that only their owner can read."""
    mask = os.umask(0o077)
    os.umask(mask)
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file() and not file.is_symlink():
            # Errors are ignored, because setting permissions fails on file systems without permissions, such as FAT.
            with suppress(OSError):
                file.chmod(0o666 & ~mask)


def read_text(path: str | os.PathLike) -> str:
    """Read a text file. If the file is not UTF-8, raise a ValueError that contains the file's name."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 ({error}); convert it, for example by iconv.") from error


def write_text(path: str | os.PathLike, text: str):
    with atomic_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, content):
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def strip_auto_map(folder: Path):
    """Remove `auto_map` from the configurations of a model and its processor in a folder, because the folder lacks the
    source files that `auto_map` names."""
    for name in ("config.json", "processor_config.json"):
        if not (folder / name).exists():
            continue
        configuration = json.loads((folder / name).read_text(encoding="utf-8"))
        for part in [configuration, *filter(lambda part: isinstance(part, dict), configuration.values())]:
            part.pop("auto_map", None)
        write_json(folder / name, configuration)


def check_output_outside_input(output: str | Path, *sources: str | Path | None):
    """Raise a ValueError if the folder `output` is or contains one of the model folders `sources`."""
    for source in sources:
        if source and os.path.exists(source) and Path(source).resolve().is_relative_to(Path(output).resolve()):
            raise ValueError(f"The output folder {str(output)!r} holds the model {str(source)!r}; choose another one.")


@contextmanager
def atomic_directory(output: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder. If the `with` block succeeds, the temporary folder replaces `output`. If the block
    fails, the temporary folder is removed.

    Args:
        output (`str` or `Path`): A new or empty folder. With `overwrite`, it may contain a model.
        overwrite (`bool`, *optional*, defaults to `False`): Replace a folder that contains only a model.

    Raises:
        ValueError: If `output` is a file or may not be replaced.
    """
    output = Path(os.path.realpath(output))
    _check_free(output, overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.{secrets.token_hex(4)}.partial")
    replaced = aside.with_suffix(".replaced")
    aside.mkdir()
    try:
        yield aside
        apply_umask(aside)
        _check_free(output, overwrite)
        if output.exists():
            output.rename(replaced)
        aside.rename(output)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if replaced.exists() and not output.exists():
            replaced.rename(output)


def _check_free(output: Path, overwrite: bool):
    if output.exists() and not output.is_dir():
        raise ValueError(f"The output {str(output)!r} is a file, expected a folder to write; choose another name.")
    if not output.is_dir() or not any(output.iterdir()):
        return
    problem = None
    if not overwrite:
        problem = "exists and is not empty; choose another one or pass --overwrite"
    elif not (output / "config.json").is_file():
        problem = "has no config.json, so it is no model folder and is not overwritten"
    elif others := unexpected_files(output):
        problem = f"has more than a model in it ({', '.join(others[:3])}), and is not overwritten"
    if problem:
        raise ValueError(f"The output folder {str(output)!r} {problem}.")


def unexpected_files(folder: Path) -> list[str]:
    """Return the names of files and folders in `folder` that are not part of a saved model, for example a training's
    checkpoints."""
    card = folder / "README.md"
    card = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    rooms = (files(f"frugalvit.{room}") for room in ("configuration", "modeling"))
    known = [path.name for room in rooms for path in Path(str(room)).rglob("*.py")]
    known += [*MODEL_FILES, *COMPANIONS, *(EXPORT_FILES if (folder / "report.json").is_file() else ())]

    def belongs(path: Path) -> bool:
        matches = any(fnmatch(path.name, pattern) for pattern in known) or is_picture_of(card, path)
        programs = (
            path.name == "onnx"
            and path.is_dir()
            and all(fnmatch(file.name, "*model*.onnx") for file in path.iterdir())
        )
        return matches and (programs or path.is_file()) and not path.is_symlink()

    return sorted(path.name for path in folder.iterdir() if not belongs(path))


def is_picture_of(card: str, path: Path) -> bool:
    """Return whether a path is a PNG file whose name occurs in `card`, the text of a model card."""
    return path.suffix == ".png" and re.search(rf"(?<![\w.-]){re.escape(path.name)}", card) is not None
