"""Zip files of images, unpacked for as long as the process runs."""

import atexit
import functools
import shutil
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from .decoding import made_by_machines
from .folders import find_parts, has_images, part_called, subfolders
from .tables import first_line


def parts_of_archives(archives: list[Path]) -> dict[str, list[str]]:
    """The folders in zip files, by split. A zip file counts as a folder of its name, which may name a part or a class.
    Several zip files with folders of classes count as one."""
    unpacked = _unpack(*((archive, archive.stat().st_mtime_ns) for archive in archives))
    root = Path(broadcast_object_list([unpacked])[0])
    inside = subfolders(root)
    if any(part_called(folder.name) for folder in inside) or (len(inside) > 1 and any(map(has_images, inside))):
        return find_parts(root)
    parts = defaultdict(list)
    for folder in inside:
        for split, folders in find_parts(folder).items():
            parts[split] += folders
    return dict(parts)


@functools.cache
def _unpack(*archives: tuple[Path, int]) -> str | None:
    """Unpack zip files in the main process, each into a folder of its name, and return the temporary folder around
    these."""
    if not PartialState().is_main_process:
        return None
    unpacked = tempfile.mkdtemp(prefix="frugalvit-")
    atexit.register(shutil.rmtree, unpacked, ignore_errors=True)
    for archive, _ in archives:
        folder = Path(unpacked, archive.stem.strip(".") or "zip")
        try:
            with zipfile.ZipFile(archive) as file:
                file.extractall(folder)
        # RuntimeError: a password is needed. NotImplementedError: a way to compress that Python does not know.
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError) as error:
            raise ValueError(
                f"Cannot unpack {archive.name} ({first_line(error)}); unpack it and give that folder."
            ) from error
        # What was packed as one folder, `photos.zip` with `photos/cat`, is that folder; a class or a part stays one.
        while len(inside := [path for path in folder.iterdir() if not made_by_machines(path.name)]) == 1:
            inner = inside[0]
            is_part = inner.is_dir() and (part_called(inner.name) or not subfolders(inner))
            if not inner.is_dir() or (is_part and inner.name != folder.name):
                break
            inner = inner.rename(folder.with_name(f".{folder.name}"))
            shutil.rmtree(folder)
            inner.rename(folder)
    return unpacked
