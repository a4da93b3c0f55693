"""Zip files of images, as folders."""

import hashlib
import shutil
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import datasets
from accelerate import PartialState

from .decoding import made_by_machines
from .files import whole_folder
from .folders import find_parts, has_images, part_called, subfolders
from .tables import first_line, shortened


def parts_of_archives(archives: list[Path]) -> dict[str, list[str]]:
    """The folders in zip files, by split. A zip file counts as a folder of its name, which may name a part or a class.
    Several zip files with folders of classes count as one."""
    root = _unpack(archives)
    inside = subfolders(root)
    if any(part_called(folder.name) for folder in inside) or (len(inside) > 1 and any(map(has_images, inside))):
        return find_parts(root)
    parts = defaultdict(list)
    for folder in inside:
        for split, folders in find_parts(folder).items():
            parts[split] += folders
    return dict(parts)


def _unpack(archives: list[Path]) -> Path:
    """Unpack zip files, each into a folder of its name, and return the folder around these. It is beside the copies of
    `datasets`, and stays there for the next time.

    Raises:
        ValueError: if one cannot be read, or there is no room.
    """
    keys = [(str(archive.resolve()), (stat := archive.stat()).st_size, stat.st_mtime_ns) for archive in archives]
    name = hashlib.sha256(repr(keys).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    output = Path(datasets.config.HF_DATASETS_CACHE) / "unpacked" / name
    shown = shortened([archive.name for archive in archives])
    with PartialState().main_process_first():
        if not output.is_dir():
            try:
                with whole_folder(output) as aside:
                    for archive in archives:
                        _extract(archive, aside / archive.stem)
            # RuntimeError: a password is needed. NotImplementedError: a way to compress that Python does not know.
            except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError) as error:
                raise ValueError(f"Cannot unpack {shown}: {first_line(error)}") from error
            PartialState().print(f"Unpacked {shown} into {output}.", file=sys.stderr)
    return output


def _extract(archive: Path, folder: Path):
    with zipfile.ZipFile(archive) as file:
        size, free = sum(info.file_size for info in file.infolist()), shutil.disk_usage(folder.parent).free
        if size > free:
            raise OSError(f"{size:,} bytes are needed and {free:,} free; unpack it elsewhere and give that folder.")
        file.extractall(folder)
    # What was packed as one folder, `photos.zip` with `photos/cat`, is that folder; a class or a part stays one.
    while len(inside := _visible(folder)) == 1 and inside[0].is_dir():
        if inside[0].name != folder.name and (part_called(inside[0].name) or not subfolders(inside[0])):
            break
        inner = inside[0].rename(folder.with_name(f".{folder.name}"))
        shutil.rmtree(folder)
        inner.rename(folder)


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not made_by_machines(path.name)]
