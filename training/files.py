"""Files and folders that appear whole or not at all, whenever the process dies."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_file_path(path: str | os.PathLike) -> Path:
    """The path, if a file can be written there.

    Raises:
        ValueError: if it is a folder.
        FileNotFoundError: if its folder does not exist.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"Cannot write {str(path)!r}: it is a folder, expected a file name.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"Cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it."
        )
    return path


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A path beside `path` to write to, with its ending; it takes the name if the block succeeds."""
    path = check_file_path(path)
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str):
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, content):
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def whole_folder(output: str | Path, overwrite: bool = False):
    """A new folder beside `output` that takes its name if the block succeeds and is removed if it does not.

    A process that is killed just between the two renames of overwriting leaves the old folder as `.NAME.replaced`; the
    next call gives it its name back.

    Raises:
        ValueError: if `output` is a file or a folder with something in it, unless it is a model folder and
            `overwrite` is set.
    """
    output = Path(output).absolute()
    partial, replaced = (output.with_name(f".{output.name}.{state}") for state in ("partial", "replaced"))
    _give_back(replaced, output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"The output {str(output)!r} is a file, expected a folder to write; choose another name.")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise ValueError(
                f"The output folder {str(output)!r} exists and is not empty; choose another one or pass --overwrite."
            )
        if not (output / "config.json").is_file():
            raise ValueError(
                f"The output folder {str(output)!r} has no config.json, so it is no model folder and is not "
                "overwritten; choose another one."
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    # A run that was killed may have left them.
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _give_back(replaced, output)


def _give_back(replaced: Path, output: Path):
    """Its name to a folder that was to be replaced and was not."""
    if replaced.exists() and not output.exists():
        replaced.rename(output)
