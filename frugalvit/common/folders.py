"""Folders of images: their files, and the part of a data set that each is."""

import functools
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from accelerate import PartialState

from .decoding import UNREAD_ENDINGS, is_image_file, is_unread_picture, made_by_machines
from .tables import printable, shortened


# Names of folders that hold a part of the images, as `datasets` has them.
PART_FOLDERS = {
    "train": re.compile(r"train(ing)?", re.IGNORECASE),
    "validation": re.compile(r"val(id(ation)?)?|dev", re.IGNORECASE),
    "test": re.compile(r"test(ing)?|eval(uation)?", re.IGNORECASE),
}
# What may follow the name of a part: years and numbers, and of parquet files how many there are of them and a hash; or
# other words, which may as well name a class ("train freight").
_NUMBERS = re.compile(r"[-._ 0-9]*|-\d+-of-\d+(-[0-9a-f]+)?")
_WORDS = re.compile(r"[-._ 0-9].*")
# What several files are packed into.
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def find_parts(folder: str | Path) -> dict[str, list[str]]:
    """The folders that a folder of images consists of, by split.

    These are the topmost folders that are called like a part (`train`, `val`, `validation`, `test`, …), as ImageNet
    has them, with a year or number or without. Other words may follow (`train_images`) where nothing else there holds
    images. Without such folders all of it is "train". In a part, images lie in one folder a class; or flat, without
    labels; or a `metadata.csv` (`file_name,label`) names them. Names of files say nothing.

    Raises:
        ValueError: if a `metadata.csv` is beside the parts rather than in them.
    """
    level = [Path(folder)]
    while level:
        parts, below = defaultdict(list), []
        for parent in level:
            children = subfolders(parent)
            named, others = _parts_among(children)
            # A class may be called so, too.
            if len(named) > 1 or not others:
                if named and others:
                    leave_out(others, f"{' and '.join(child.name for child in named)} are parts of {parent}")
                for child, split in named.items():
                    parts[split].append(str(child))
                metadata = [name for name in METADATA_FILES if (parent / name).is_file()]
                if named and metadata:
                    raise ValueError(
                        f"{parent / metadata[0]} is beside the parts {', '.join(child.name for child in named)}; "
                        "expected one of its own in each of them."
                    )
            if not has_images(parent):
                below += children
        if parts:
            break
        level = below
    return {split: parts[split] for split in PART_FOLDERS if split in parts} or {"train": [str(folder)]}


def _parts_among(children: list[Path]) -> tuple[dict[Path, str], list[Path]]:
    """Folders that are parts of a data set by their names, with their splits, and the other folders with images."""
    named = {child: split for child in children if (split := part_called(child.name))}
    worded = {child: split for child in children if (split := part_called(child.name, _WORDS)) and child not in named}
    others = [child for child in children if child not in named | worded and next(image_files(child), None)]
    splits = {*named.values(), *worded.values()}
    # Two flat folders are two classes unless one is to train on and another is not.
    flat = len(named | worded) > 1 and any(map(has_images, worded)) and not (len(splits) > 1 and "train" in splits)
    if others or flat:
        return named, [*others, *(child for child in worded if next(image_files(child), None))]
    return named | worded, []


def part_called(name: str, suffix: re.Pattern = _NUMBERS) -> str | None:
    """The split that a folder's name stands for, with numbers after it or without, or with a match of `suffix`."""
    for split, pattern in PART_FOLDERS.items():
        if (found := pattern.match(name)) and suffix.fullmatch(name, found.end()):
            return split
    return None


def subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not made_by_machines(path.name))


def has_images(folder: Path) -> bool:
    return any(map(is_image_file, folder.iterdir()))


def files_within(folder: str | Path, fits: Callable[[Path], bool]) -> Iterator[Path]:
    """Files whose names fit in a folder and in those within it, but for folders that machines make. Symbolic links are
    followed, though not in circles.

    Raises:
        PermissionError: if a folder may not be looked into: its images would be missing without a word.
    """

    def refuse(error: OSError):
        # Others are gone since they were listed.
        if isinstance(error, PermissionError):
            raise error

    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        above = os.path.realpath(parent)
        folders[:] = sorted(
            name
            for name in folders
            if not made_by_machines(name)
            and not f"{above}{os.sep}".startswith(f"{os.path.realpath(os.path.join(parent, name))}{os.sep}")
        )
        found = (Path(parent, name) for name in sorted(names) if not name.startswith(".") and fits(Path(name)))
        yield from (path for path in found if path.is_file())


def image_files(folder: str | Path) -> Iterator[Path]:
    """The images in a folder and those within it, see `files_within`."""
    return files_within(folder, is_image_file)


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files in a folder and those within it, but for metadata of images."""
    return list(files_within(folder, lambda path: path.suffix == ".parquet" and path.name not in METADATA_FILES))


def images_within(folders: list[str]) -> list[tuple[str, str]]:
    """Images in folders, in order, as pairs of the path within the folder and the whole path. Print how many pictures
    are not read."""
    found, unread = [], []
    for folder in folders:
        for path in files_within(folder, lambda path: is_image_file(path) or is_unread_picture(path)):
            if is_image_file(path):
                found.append((path.relative_to(folder).as_posix(), str(path)))
            else:
                unread.append(path)
    _say_unread(unread)
    return sorted(found)


def say_unread(folder: str | Path):
    """Print how many pictures in a folder and within it are not read, such as .heic, and what to do, and which
    archives are not looked into."""
    _say_unread(list(files_within(folder, is_unread_picture)))
    if archives := list(files_within(folder, lambda path: path.suffix.lower() in ARCHIVES)):
        leave_out(archives, "archives are not looked into here; unpack them")


def _say_unread(pictures: list[Path]):
    by_advice = defaultdict(list)
    for ending, count in sorted(Counter(path.suffix.lower() for path in pictures).items()):
        by_advice[UNREAD_ENDINGS[ending]].append(f"{count:,} {ending}")
    for advice, found in by_advice.items():
        where = printable(os.path.commonpath([path.parent for path in pictures]))
        _say_once(f"Left out, as they are not read: {', '.join(found)} in {where}. To have them: {advice}.", where)


def leave_out(paths: Iterable[Path], reason: str):
    paths = list(paths)
    names = shortened([printable(path.name) for path in paths])
    _say_once(f"Left out, as {reason}: {names}.", str(paths[0].parent))


# A folder is looked through for its parts, and then for each of them.
@functools.cache
def _say_once(message: str, where: str):
    PartialState().print(message, file=sys.stderr)
