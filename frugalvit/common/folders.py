"""Folders and zip files of images: their parts, classes and files."""

import atexit
import functools
import os
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import datasets
from accelerate import PartialState

from .decoding import IMAGE_ENDINGS, UNREAD_ENDINGS, is_image_file, made_by_machines, undecoded
from .labels import compose
from .tables import first_line, printable, shortened


# Names of folders that hold a part of the images.
PART_FOLDERS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Shards of a stream of a folder's images.
FOLDER_SHARDS = 1_024


def part_called(name: str) -> str | None:
    """The split that a folder's name stands for, or None."""
    return next((split for split, names in PART_FOLDERS.items() if name.lower() in names), None)


def find_parts(folder: Path) -> dict[str, Path]:
    """Find the folders that are parts of a data set by their names, see `PART_FOLDERS`.

    A single one beside other folders with images is a class. A folder that holds one folder alone is entered. Without
    parts, all images are "train".
    """
    while True:
        children = [child for child in subfolders(folder) if next(image_files(child), None)]
        parts = {split: child for split in PART_FOLDERS for child in children if part_called(child.name) == split}
        others = [child for child in children if child not in parts.values()]
        metadata = metadata_files(folder)
        if len(parts) > 1 or (parts and not others):
            if metadata:
                raise ValueError(f"{metadata[0]} lies beside the parts {', '.join(parts)}, expected one in each")
            if others:
                leave_out(others, f"the folders beside them are {' and '.join(parts)}")
            return parts
        if len(children) != 1 or metadata or has_images(folder) or has_images(children[0]):
            return {"train": folder}
        folder = children[0]


def read_folder(folder: Path, split: str, streaming: bool = False) -> datasets.Dataset | datasets.IterableDataset:
    """Read the images of parts of a folder, or of slices of these, not decoded.

    The first folder in a part is an image's class, however deep the image lies. A part without folders has no labels.
    """
    say_unread(folder)
    parts = {part: _labeled_files(files) for part, files in find_parts(folder).items()}
    sizes = {part: len(files) for part, files in parts.items()}
    slices = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    found = [file for each in slices for file in parts[each.splitname][each.from_ : each.to]]
    labels = [label for label, _ in found if label]
    if not found or 0 < len(labels) < len(found):
        raise ValueError("only some of these parts have classes" if labels else "there are no images")
    columns = {"image": [undecoded(path) for _, path in found]}
    features = {"image": datasets.Image(decode=False)}
    if labels:
        # Of all parts: one may lack a class.
        features["label"] = datasets.ClassLabel(
            names=sorted({name for files in parts.values() for name, _ in files if name})
        )
        columns["label"] = features["label"].str2int(labels)
    table = datasets.Dataset.from_dict(columns, datasets.Features(features))
    return table.to_iterable_dataset(min(len(table), FOLDER_SHARDS)) if streaming else table


def _labeled_files(part: Path) -> list[tuple[str, Path]]:
    """The class and path of each image of a part; all classes are "" where there are none."""
    inside = [(path.relative_to(part).parts, path) for path in image_files(part)]
    found = [(compose(parts[0]), path) for parts, path in inside if len(parts) > 1]
    loose = [("", path) for parts, path in inside if len(parts) == 1]
    if found and loose:
        leave_out([path for _, path in loose], "they lie beside folders of classes")
    return sorted(found or loose)


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, but those that programs made."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not made_by_machines(path.name))


def has_images(folder: Path) -> bool:
    """Whether images lie in a folder itself."""
    return any(map(is_image_file, folder.iterdir()))


def metadata_files(folder: Path) -> list[Path]:
    """Tables of a folder's images as `datasets` reads them."""
    return [folder / name for name in METADATA_FILES if (folder / name).is_file()]


def files_within(folder: str | Path, endings: Collection[str]) -> Iterator[Path]:
    """Yield the files with these endings in a folder and all within it, but those in folders that programs made.

    Links are followed after the folders themselves, and no folder is entered twice. A folder that may not be read is
    an `OSError`: its images would be missing without a word.
    """

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
    """Yield the images in a folder and all within it, see `files_within`."""
    return files_within(folder, IMAGE_ENDINGS)


def parquet_files(folder: str | Path) -> list[Path]:
    """The parquet files in a folder and all within it, but tables of images."""
    return [path for path in files_within(folder, {".parquet"}) if path.name not in METADATA_FILES]


@functools.cache
def unpack(*archives: Path) -> Path:
    """Unpack zip files into a temporary folder of this process, each into a folder of its name, and return the folder
    of one file, or the folder of these folders: parts, or classes."""
    root = Path(tempfile.mkdtemp(prefix="frugalvit-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for archive in archives:
        folder = root / (archive.stem.strip(".") or "zip")
        folder.mkdir()
        try:
            with zipfile.ZipFile(archive) as file:
                tops = {name.partition("/")[0] for name in file.namelist() if is_image_file(Path(name))}
                file.extractall(root if tops == {folder.name} else folder)
        # RuntimeError: a password is needed, or Python does not know the compression.
        except (zipfile.BadZipFile, RuntimeError, EOFError, OSError) as error:
            raise ValueError(f"{archive} cannot be unpacked ({first_line(error)}); give a folder") from error
        if len(archives) > 1 and len(subfolders(folder)) > 1 and not part_called(folder.name):
            raise ValueError(f"{archive} is one of {len(archives)} zip files of several folders; unpack them into one")
    return root if len(archives) > 1 else folder


def say_unread(folder: str | Path):
    """Print how many pictures in a folder and all within it are not read, such as .heic, and what to do."""
    counts = Counter(path.suffix.lower() for path in files_within(folder, UNREAD_ENDINGS))
    for ending, count in sorted(counts.items()):
        where, advice = printable(str(folder)), UNREAD_ENDINGS[ending]
        _say_once(f"Left out of {where}, as they are not read: {count:,} {ending}. To have them: {advice}.")


def leave_out(paths: list[Path], reason: str):
    """Print that files or folders are left out, and why."""
    where, names = printable(str(paths[0].parent)), shortened([printable(path.name) for path in paths])
    _say_once(f"Left out of {where}, as {reason}: {names}.")


# A folder is looked through for its parts, and then for each of them.
@functools.cache
def _say_once(message: str):
    PartialState().print(message, file=sys.stderr)
