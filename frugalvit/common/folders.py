"""Folders and zip files of images: their parts, classes and files."""

import atexit
import functools
import os
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import datasets
from accelerate import PartialState

from .decoding import IMAGE_ENDINGS, UNREAD_ENDINGS, made_by_machines, undecoded
from .labels import compose
from .tables import first_line, printable, shortened


# Names of folders that hold a part of the images.
PART_FOLDERS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
# Tables of images and labels that `datasets` reads.
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


class ImageFolder:
    """The images of a folder: `parts` has class (or "") and file of each, by split. The first folder in a part is an
    image's class, however deep the image lies. A part without folders has no labels."""

    def __init__(self, folder: Path, images: list[Path]):
        self.parts = {}
        holding = {path.parent for path in images}
        for split, part in find_parts(folder, holding).items():
            inside = {parent: parent.relative_to(part).parts for parent in holding if parent.is_relative_to(part)}
            classes = {parent: compose(folders[0]) if folders else "" for parent, folders in inside.items()}
            files = sorted((classes[path.parent], path) for path in images if path.parent in classes)
            labeled = [(label, path) for label, path in files if label]
            if 0 < len(labeled) < len(files):
                leave_out([path for label, path in files if not label], "they lie beside folders of classes")
            self.parts[split] = labeled or files

    def read(self, split: str, streaming: bool = False) -> datasets.Dataset | datasets.IterableDataset:
        """Return images of parts, or of slices of these, not decoded."""
        sizes = {part: len(files) for part, files in self.parts.items()}
        slices = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
        found = [file for each in slices for file in self.parts[each.splitname][each.from_ : each.to]]
        labels = [label for label, _ in found if label]
        if not found or 0 < len(labels) < len(found):
            raise ValueError("only some of these parts have classes" if labels else "there are no images")
        columns = {"image": [undecoded(path) for _, path in found]}
        features = datasets.Features({"image": datasets.Image(decode=False)})
        if labels:
            # From all parts: one may lack a class.
            names = sorted({label for files in self.parts.values() for label, _ in files if label})
            features["label"] = datasets.ClassLabel(names=names)
            columns["label"] = features["label"].str2int(labels)
        table = datasets.Dataset.from_dict(columns, features)
        return table.to_iterable_dataset(min(len(table), 1_024)) if streaming else table


def part_called(name: str) -> str | None:
    return next((split for split, names in PART_FOLDERS.items() if name.lower() in names), None)


def find_parts(folder: Path, holding: Collection[Path]) -> dict[str, Path]:
    """Find the folders that are parts of a data set, given all folders that hold images. A single one beside others is
    a class. A folder that holds one folder alone is entered. Without parts, all images are "train"."""
    while True:
        below = [parent.relative_to(folder).parts for parent in holding if parent.is_relative_to(folder)]
        children = sorted({folder / parts[0] for parts in below if parts})
        parts = {split: child for split in PART_FOLDERS for child in children if part_called(child.name) == split}
        others = [child for child in children if child not in parts.values()]
        if len(parts) > 1 or (parts and not others):
            if others:
                leave_out(others, f"the folders beside them are {' and '.join(parts)}")
            return parts
        if len(children) != 1 or folder in holding or children[0] in holding:
            return {"train": folder}
        folder = children[0]


def subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not made_by_machines(path.name))


def files_within(folder: str | Path, endings: Collection[str]) -> Iterator[Path]:
    """Yield the files with these endings in a folder and all within it, but those in folders that programs made. Links
    are followed last, and no folder is entered twice. A folder that may not be read is an `OSError`."""

    def refuse(error: OSError):
        raise error

    roots, entered = [folder], set()
    for root in roots:
        for parent, folders, names in os.walk(root, onerror=refuse):
            real = os.path.realpath(parent)
            if real in entered:
                folders.clear()
                continue
            entered.add(real)
            folders[:] = sorted(name for name in folders if not made_by_machines(name))
            roots += [path for name in folders if os.path.islink(path := os.path.join(parent, name))]
            fitting = [name for name in names if os.path.splitext(name)[1].lower() in endings and name[0] != "."]
            yield from (path for name in sorted(fitting) if (path := Path(parent, name)).is_file())


def image_files(folder: str | Path) -> Iterator[Path]:
    return files_within(folder, IMAGE_ENDINGS)


@functools.cache
def unpack(archive: Path) -> Path:
    """Unpack a zip file into a temporary folder of this process."""
    folder = Path(tempfile.mkdtemp(prefix="frugalvit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)
    # RuntimeError: a password is needed, or Python does not know the compression.
    except (zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise ValueError(f"{archive} cannot be unpacked ({first_line(error)}); give a folder") from error
    return folder


def say_unread(folder: str | Path, files: Iterable[Path] | None = None):
    """Print how many pictures in a folder, or among its `files` where these are known, are not read."""
    files = files_within(folder, UNREAD_ENDINGS) if files is None else files
    counts = Counter(path.suffix.lower() for path in files if path.suffix.lower() in UNREAD_ENDINGS)
    if counts:
        found = ", ".join(f"{count:,} {ending}" for ending, count in sorted(counts.items()))
        _say_once(
            f"Left out of {printable(str(folder))}, as they are not read: {found}. Convert them to JPEG or PNG; .heic "
            "and .jxl are read after pip install 'frugalvit[pictures]'."
        )


def leave_out(paths: list[Path], reason: str):
    """Print that files or folders are left out, and why."""
    where, names = printable(str(paths[0].parent)), shortened([printable(path.name) for path in paths])
    _say_once(f"Left out of {where}, as {reason}: {names}.")


@functools.cache
def _say_once(message: str):
    PartialState().print(message, file=sys.stderr)
