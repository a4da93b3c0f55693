"""Names of data sets and what they stand for: files, folders and data sets of the hub."""

import glob
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .archives import parts_of_archives
from .choices import SUBSET
from .columns import features_of, image_columns
from .folders import PART_FOLDERS, find_parts, image_files, leave_out, parquet_files, part_called
from .loading import split_revision
from .resources import shipped_images


EXPECTED = f"expected a hub id, a folder of images or of parquet files, parquet files, or {SUBSET!r}"


def find_source(dataset: str | list[str], name: str | None) -> dict:
    """Arguments of `datasets.load_dataset` for a data set: its folders or files, by split where their names tell."""
    paths = [dataset] if isinstance(dataset, str) else list(dataset)
    path = Path(paths[0])
    hub_id, revision = split_revision(paths[0])
    if paths == [SUBSET]:
        folder = shipped_images("cifar10")
        return {
            "path": "parquet",
            "data_files": {part: str(folder / f"{part}.parquet") for part in ("train", "test")},
        }
    if all(path.endswith(".parquet") for path in paths):
        return {"path": "parquet", "data_files": {"train": [file for path in paths for file in _matching(path)]}}
    if len(paths) > 1:
        raise ValueError(f"Several data sets, {', '.join(paths)}; expected one, or several parquet files.")
    if path.is_dir():
        return _find_in_folder(path)
    if path.suffix.lower() == ".zip" and path.is_file():
        return {"path": "imagefolder", "data_files": parts_of_archives([path])}
    if path.exists() or paths[0].startswith((".", "~", os.sep)) or hub_id.count("/") > 1:
        raise ValueError(f"{paths[0]!r} is no data set; {EXPECTED}.")
    return {"path": hub_id, "name": name, **revision}


def _find_in_folder(folder: Path) -> dict:
    """Arguments of `datasets.load_dataset` for a folder: its images; or its parquet files, if they hold more images;
    or, if it has neither, its zip files."""
    tables, archives = parquet_files(folder), sorted(file for file in folder.glob("*.zip") if file.is_file())
    images = sum(1 for _ in image_files(folder)) if tables else int(next(image_files(folder), None) is not None)
    holding = {table: rows for table in tables if (rows := _rows_with_images(table))}
    if tables and (not images or sum(holding.values()) > images):
        if images:
            leave_out(image_files(folder), f"the parquet files of {folder} hold more images")
        if others := [table for table in tables if holding and table not in holding]:
            leave_out(others, "they hold no images")
        return {"path": "parquet", "data_files": _parts_of_tables(folder, list(holding) or tables)}
    if not images and archives:
        return {"path": "imagefolder", "data_files": parts_of_archives(archives)}
    if others := [*tables, *archives]:
        leave_out(others, f"the images of {folder} lie in its folders")
    return {"path": "imagefolder", "data_files": find_parts(folder)}


def _rows_with_images(table: Path) -> int:
    """Number of rows of a parquet file that has a column of images; 0 for others."""
    try:
        with pq.ParquetFile(table) as file:
            return file.metadata.num_rows if image_columns(features_of(file.schema_arrow), sure=True) else 0
    # Who reads it says so.
    except (pa.ArrowException, OSError):
        return 0


def _parts_of_tables(folder: Path, tables: Sequence[Path]) -> dict[str, list[str]]:
    """The parquet files of a folder, by split. Names of files and folders in there tell it (`train-00000.parquet`);
    other words may stand beside it (`cifar10-train`) if every file has one. Without any such name, all files are
    "train"."""
    names = {path: path.relative_to(folder).with_suffix("").parts for path in tables}
    named = {path: next(filter(None, map(part_called, parts)), None) for path, parts in names.items()}
    words = {path: [word for part in parts for word in re.split(r"[-._ ]", part)] for path, parts in names.items()}
    worded = {path: named[path] or next(filter(None, map(part_called, words[path])), None) for path in tables}
    parts, others = defaultdict(list), []
    for path, split in (worded if all(worded.values()) else named).items():
        (parts[split] if split else others).append(path)
    if not parts:
        parts, others = {"train": others}, []
    if others:
        leave_out(others, f"other files of {folder} are called {', '.join(parts)}")
    return {split: [glob.escape(str(path)) for path in parts[split]] for split in PART_FOLDERS if split in parts}


def _matching(pattern: str) -> list[str]:
    found = sorted(glob.glob(pattern))
    if not found:
        raise ValueError(f"There is no file {pattern!r}; expected a parquet file or a pattern that matches some.")
    return found
