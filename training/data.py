"""Load images and labels from folders, archives, tables or the hub as a `datasets.Dataset` with fixed column names."""

import atexit
import functools
import glob
import os
import re
import shutil
import sys
import tempfile
import unicodedata
import zipfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from .choices import SUBSET
from .files import read_text, shipped_images, split_revision
from .preprocessing import IMAGE_ENDINGS, UNREAD_ENDINGS, decode_image, open_record
from .text import first_line, printable, shortened


EXPECTED = f"expected a hub id, a folder of images or of parquet files, parquet files, or {SUBSET!r}"
# Maps the name of a split folder, in lower case, to the name of its split.
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), "validation")
# Names of files from which `datasets` reads the labels of a folder of images.
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Folders that operating systems and network disks create for thumbnails, copies and deleted files.
SYSTEM_FOLDERS = re.compile(r"[.@].*|__macosx|\$recycle\.bin|system volume information|lost\+found", re.IGNORECASE)
NOT_READ = "these are not read (convert them to JPEG or PNG; pip install 'frugalvit[pictures]' reads .heic and .jxl)"
# Largest number of classes in a data set without class names. The names of such classes are numbers.
MOST_CLASSES = 100_000
# Limits of `readable_images`: the largest data set that is decoded, and the most images that a message lists.
MOST_DECODED = 20_000
MOST_NAMED = 20


def load_images(
    dataset: str | list[str] | datasets.Dataset | datasets.IterableDataset,
    split: str = "train",
    *,
    name: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: list[str] | None = None,
    default_names: list[str] | None = None,
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Load images and their labels.

    Args:
        dataset (`str`, `list[str]`, `datasets.Dataset` or `datasets.IterableDataset`):
            A hub id (also owner/name@revision), a folder of images (see `scan_folder`) or a zip file of such a folder,
            a folder that `datasets.load_dataset` reads, parquet files, `"cifar10-subset"`, or a loaded data set.
        split (`str`, *optional*, defaults to `"train"`):
            Split of the data set, or a slice such as `"train[:1000]"`. Parquet files have only the split "train".
        name (`str`, *optional*): Name of a configuration, for hub data sets with several configurations.
        image_column (`str`, *optional*): Name of the column of images. Default: the only column of images.
        label_column (`str`, *optional*): Name of the column of labels. Default: the only column of labels.
        class_names (`list[str]`, *optional*): Names of the labels 0, 1, … If labels are texts, `class_names` must
            contain all labels.
        default_names (`list[str]`, *optional*): Class names to use if neither `class_names` nor the data set has any.
        streaming (`bool`, *optional*, defaults to `False`): Read images only when they are used.

    Returns:
        `datasets.Dataset` or `datasets.IterableDataset`: The images, with the columns `image` and `label`.
        Images are not decoded. Labels are a `ClassLabel`. If all labels are missing or -1, there is no column `label`.

    Raises:
        ValueError: If the data set or a column does not exist, or if a label is not among the classes.
    """
    if isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        loaded = reset_format(dataset)
        dataset = "the data set"
    else:
        loaded = load_table(dataset, split, name, streaming)
    if loaded.features is None:
        try:
            loaded = loaded._resolve_features()
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"The columns of the stream are not known ({first_line(error)}); give them where it is mapped: "
                "stream.map(function, features=stream.features)."
            ) from error
    kinds = {name: kind_of(feature) for name, feature in loaded.features.items()}
    image = find_column(kinds, image_column, ("image", "bytes"), "image", dataset)
    if kinds[image] not in ("image", "bytes", "texts"):
        raise ValueError(f"The column {image!r} of {dataset!r} holds {loaded.features[image]}, expected images.")
    label = find_column(kinds, label_column, ("classes",), "label", dataset)
    # The texts in a stream's column are not known in advance. So a stream's texts are only used as labels if
    # `class_names` is given.
    named = class_names or not isinstance(loaded, datasets.IterableDataset)
    if label is None and kinds.get("label") in (("numbers", "texts") if named else ("numbers",)):
        label = "label"
    if label and kinds[label] not in ("classes", "numbers", "texts"):
        found = loaded.features[label]
        raise ValueError(f"The column {label!r} of {dataset!r} holds {found}, expected class numbers.")
    columns = {image: "image"} | ({label: "label"} if label else {})
    # The column is cast before it is renamed: renaming a column of unknown type would read rows of a stream.
    loaded = loaded.cast_column(image, datasets.Image(decode=False)).select_columns(list(columns))
    loaded = loaded.rename_columns({old: new for old, new in columns.items() if old != new})
    if not label:
        return loaded
    feature = loaded.features["label"]
    own = feature.names if isinstance(feature, datasets.ClassLabel) else None
    names = class_names or own or default_names
    if isinstance(loaded, datasets.IterableDataset):
        if names is None:
            raise ValueError("The stream's labels have no names; give them with class_names.")
    elif "string" in feature.dtype:
        names = names or sorted(text for text in loaded.unique("label") if text is not None)
    else:
        highest = label_numbers(loaded).max(initial=-1)
        if highest < 0:
            # In splits without labels, such as ImageNet's test split, all labels are -1.
            return loaded.remove_columns("label")
        count = len(names) if names else MOST_CLASSES
        if highest >= count:
            raise ValueError(f"The labels go up to {highest}, expected less than {count:,} (class_names).")
        names = names or [str(number) for number in range(highest + 1)]
    if names == own:
        return loaded
    try:
        return loaded.cast_column("label", datasets.ClassLabel(names=names))
    except ValueError as error:
        raise ValueError(f"Not all labels are among the classes {shortened(names)} ({first_line(error)}).") from error


def reset_format(images: datasets.Dataset | datasets.IterableDataset) -> datasets.Dataset | datasets.IterableDataset:
    """Remove a data set's format. Raise a ValueError if the format has a transform or hides columns."""
    if isinstance(images, datasets.Dataset):
        if images.format["type"] == "custom":
            raise ValueError(
                "The data set has a transform (with_transform or set_transform), which training would replace; "
                "expected images without one: apply it by `map`, or call reset_format()."
            )
        if hidden := sorted({*images.column_names} - {*images.format["columns"]}):
            raise ValueError(
                f"The format of the data set leaves out {', '.join(hidden)}; expected all columns: call "
                "reset_format()."
            )
    return images.with_format(None)


def kind_of(feature) -> str:
    """Return the kind of a column: "image", "bytes", "classes" (labels with names), "numbers", "texts" or "else"."""
    # In parquet files that other libraries wrote, an image is a struct with the fields `bytes` and `path`.
    is_record = isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}
    if is_record or isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, datasets.ClassLabel):
        return "classes"
    dtype = feature.dtype.removeprefix("large_") if isinstance(feature, datasets.Value) else ""
    known = {"binary": "bytes", "string": "texts", "bool": "numbers"}
    return known.get(dtype, "numbers" if "int" in dtype else "else")


def find_column(kinds: Mapping[str, str], given: str | None, wanted: tuple, what: str, dataset) -> str | None:
    """Return the name of the image column or of the label column. Return `None` if there is no label column.

    Args:
        kinds (`Mapping[str, str]`): Kind of each column, see `kind_of`.
        given (`str`, *optional*): Name of the column that the user chose.
        wanted (`tuple[str]`): Kinds that the column may have, in order of preference.
        what (`str`): "image" or "label", for messages.
        dataset: The data set's name, for messages.
    """
    if given is not None and given not in kinds:
        raise ValueError(f"{dataset!r} has no column {given!r} (--{what}-column); it has {', '.join(kinds)}.")
    kind = next((kind for kind in wanted if kind in kinds.values()), None)
    found = [name for name in kinds if kind is not None and kinds[name] == kind]
    if given is None and (len(found) > 1 or (what == "image" and not found)):
        count = len(found) or "no"
        raise ValueError(f"{dataset!r} has {count} {what} columns among {', '.join(kinds)}; give --{what}-column.")
    return given or next(iter(found), None)


def class_names(images) -> list[str] | None:
    """Return the names of the classes of images, or `None` if the images have no labels."""
    return list(images.features["label"].names) if "label" in images.features else None


def label_numbers(images: datasets.Dataset) -> np.ndarray:
    """Return the labels of all images, `(images,)` int64. Missing labels are -1."""
    if not len(images):
        return np.zeros(0, dtype=np.int64)
    column = images.select_columns("label").with_format("arrow")[:]["label"]
    return pc.fill_null(column.cast("int64"), -1).to_numpy().copy()


def sample(images: datasets.Dataset, limit: int | None, seed: int) -> datasets.Dataset:
    """Return `limit` random images in their original order. If `limit` is `None` or too large, return all images."""
    if limit is None or limit >= len(images):
        return images
    generator = torch.Generator().manual_seed(seed)
    return images.select(torch.randperm(len(images), generator=generator)[:limit].sort().values.tolist())


def readable_images(images, skip_corrupt: bool = False, name: str = "the data set"):
    """Return the images that can be read. Print which images are left out.

    Images are decoded in data sets of up to `MOST_DECODED` images. In larger data sets, only headers are read, so
    truncated images are not found. Streams are not checked. Distributed processes share the work.

    Args:
        images (`datasets.Dataset` or `datasets.IterableDataset`): A data set with the columns `image` and optionally
            `mask`, which are not decoded.
        skip_corrupt (`bool`): Leave out images that cannot be read.
        name (`str`): Name of the split or data set, for messages.

    Raises:
        ValueError: If no image can be read or, without `skip_corrupt`, if any image cannot be read.
    """
    if isinstance(images, datasets.IterableDataset) or not len(images):
        return images
    state = PartialState()
    headers_only = len(images) > MOST_DECODED
    if headers_only:
        state.print(f"Of {len(images):,} images of {name}, the headers are checked, not the pixels.", file=sys.stderr)
    columns = [column for column in ("image", "mask") if column in images.features]

    def problem(index: int) -> tuple[int, str] | None:
        record = images[index]
        for column in columns:
            try:
                if headers_only:
                    open_record(record[column]).close()
                else:
                    # The image is decoded, because decoding reads the whole file.
                    decode_image(record[column], draft=True)
            # All exceptions are caught, because decoders raise errors of many types for broken files.
            except Exception as error:
                path = isinstance(record[column], Mapping) and record[column].get("path")
                return index, f"{printable(path or f'{column} {index}')} ({first_line(error)})"
        return None

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        own = range(state.process_index, len(images), state.num_processes)
        found = dict(filter(None, pool.map(problem, own)))
    if state.num_processes > 1:
        found = dict(pair for each in gather_object([found]) for pair in each.items())
    if not found:
        return images
    problems = [found[index] for index in sorted(found)]
    count = f"{len(problems):,} of {len(images):,}"
    listed = ", ".join(problems[:MOST_NAMED]) + (", …" if len(problems) > MOST_NAMED else "")
    if len(problems) == len(images):
        raise ValueError(f"None of the {len(images):,} images of {name} can be read: {listed}.")
    if not skip_corrupt:
        raise ValueError(f"{count} images of {name} cannot be read: {listed}. To leave them out: skip_corrupt.")
    state.print(f"{count} images of {name} left out: {listed}.", file=sys.stderr)
    return images.select([index for index in range(len(images)) if index not in found])


def load_table(
    dataset: str | list[str], split: str, name: str | None = None, streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """Load a data set with all its columns, without decoding images. See `load_images` for arguments and errors."""
    source = find_source(dataset, name)
    with _source_errors(dataset, split):
        if "parts" not in source:
            return datasets.load_dataset(**source, split=split, streaming=streaming)
        parts = source["parts"]
        slices = datasets.ReadInstruction.from_spec(split).to_absolute({part: len(parts[part]) for part in parts})
        found = [file for each in slices for file in parts[each.splitname][each.from_ : each.to]]
        labels = [label for label, _ in found if label]
        if not found or 0 < len(labels) < len(found):
            raise ValueError("only some of these parts have classes" if labels else "there are no images")
        columns = {"image": [{"bytes": None, "path": str(path)} for _, path in found]}
        features = datasets.Features({"image": datasets.Image(decode=False)})
        if labels:
            # Class names are collected from all splits, because one split may lack a class.
            names = sorted({label for files in parts.values() for label, _ in files if label})
            features["label"] = datasets.ClassLabel(names=names)
            columns["label"] = features["label"].str2int(labels)
        table = datasets.Dataset.from_dict(columns, features)
        return table.to_iterable_dataset(min(len(table), 1_024)) if streaming else table


def split_names(dataset: str | list[str], name: str | None = None) -> list[str]:
    """Return the names of the splits of a data set. See `load_images` for arguments and errors."""
    source = find_source(dataset, name)
    for parts in ("parts", "data_files"):
        if parts in source:
            return list(source[parts])
    with _source_errors(dataset):
        return datasets.get_dataset_split_names(source["path"], source["name"], revision=source.get("revision"))


def find_source(dataset: str | list[str], name: str | None = None) -> dict:
    """Return the source of a data set. For a folder of images, the source is `{"parts": scan_folder(…)}`. For other
    data sets, it is a dict of arguments for `datasets.load_dataset`. See `load_images` for arguments and errors."""
    paths = [dataset] if isinstance(dataset, str) else list(dataset)
    path = shipped_images("cifar10") if paths == [SUBSET] else Path(paths[0])
    if not path.is_dir() and all(file.endswith(".parquet") for file in paths):
        if missing := [file for file in paths if not os.path.isfile(file)]:
            raise ValueError(f"There is no file {missing[0]!r}; expected parquet files.")
        with _source_errors(dataset):
            _check_class_names(paths)
        return {"path": "parquet", "data_files": {"train": [glob.escape(file) for file in paths]}}
    if len(paths) > 1:
        raise ValueError(f"Several data sets, {', '.join(paths)}; expected one, or several parquet files.")
    if path.is_dir() or (path.suffix.lower() == ".zip" and path.is_file()):
        with _source_errors(dataset):
            return find_in_folder(path if path.is_dir() else unpack(path), name)
    hub_id, revision = split_revision(paths[0])
    if path.exists() or paths[0].startswith((".", "~", os.sep)) or hub_id.count("/") > 1:
        raise ValueError(f"{paths[0]!r} is no data set; {EXPECTED}.")
    return {"path": hub_id, "name": name, **revision}


def find_in_folder(folder: Path, name: str | None) -> dict:
    """Return the source (see `find_source`) of the images in a folder. If the folder has no image files, the source is
    either its tables and tar archives, or the content of its only zip file."""
    files = list(files_within(folder, {*IMAGE_ENDINGS, *UNREAD_ENDINGS, ".parquet", ".tar", ".csv", ".jsonl"}))
    images = [path for path in files if path.suffix.lower() in IMAGE_ENDINGS]
    metadata = [path for path in files if path.name in METADATA_FILES]
    tables = [path for path in files if path.suffix.lower() == ".parquet" and path not in metadata]
    for path in metadata:
        text = "" if path.suffix == ".parquet" else read_text(path)
        # `datasets` reads labels such as "01" as numbers, so it would merge the classes "01" and "1".
        if path.suffix == ".csv" and (found := re.search(r"(?:^|,)(0\d+)(?=,|\s*$)", text, re.MULTILINE)):
            raise ValueError(f"{path} has {found[1]!r}, which is read as a number; write a letter before it")
    archives = sorted(folder.glob("*.zip"))
    if unread := [path for path in files if path.suffix.lower() in UNREAD_ENDINGS]:
        leave_out(unread, NOT_READ)
    if images:
        if tables or archives:
            leave_out([*tables, *archives], "images come first")
        parts = {SPLITS.get(file.parent.name.lower(), "train"): file for file in metadata}
        if parts and all(file.parent == folder or file.parent.name.lower() in SPLITS for file in metadata):
            return {"path": "imagefolder", "data_files": {part: [glob.escape(str(parts[part]))] for part in parts}}
        return {"parts": scan_folder(folder, images)}
    if len(archives) == 1 and not tables:
        return find_in_folder(unpack(archives[0]), name)
    if not tables and not any(path.suffix == ".tar" for path in files):
        raise ValueError(f"it has no images, and {len(archives)} zip files; {EXPECTED}")
    if glob.has_magic(str(folder.resolve())):
        raise ValueError("its path has one of *?[, which datasets takes for a pattern; rename it")
    _check_class_names(tables)
    # The path is absolute, because `datasets` would read a relative path such as "csv" as the name of a format.
    return {"path": str(folder.resolve()), "name": name}


def scan_folder(folder: Path, images: list[Path]) -> dict[str, list[tuple[str, Path]]]:
    """Return a dict that maps each split of a folder to a list with the class and the file of each image.

    Subfolders whose names are in `SPLITS` are splits. There is one exception: if `folder` has only one such subfolder,
    and also has subfolders with other names, no subfolder is a split. If there are no splits, `folder` is the split
    "train". Each subfolder of a split is a class. All images in this subfolder, at any depth, belong to the class. If
    a split has subfolders with images, images directly in the split are left out. Otherwise, the images directly in
    the split have the class "". If `folder` contains nothing but one subfolder, and this subfolder contains only
    folders, the subfolder is scanned instead of `folder`.
    """
    holding = {path.parent for path in images}
    while True:
        children = sorted({folder / parent.relative_to(folder).parts[0] for parent in holding - {folder}})
        if len(children) != 1 or children[0].name.lower() in SPLITS or not holding.isdisjoint({folder, *children}):
            break
        folder = children[0]
    named = {SPLITS[child.name.lower()]: child for child in children if child.name.lower() in SPLITS}
    roots = {split: named[split] for split in ("train", "validation", "test") if split in named}
    others = [child for child in children if child not in roots.values()]
    if len(roots) < 2 and (not roots or others):
        roots = {"train": folder}
    elif others:
        leave_out(others, f"the folders beside them are {' and '.join(roots)}")
    parts = {}
    for split, root in roots.items():
        inside = {parent: parent.relative_to(root).parts for parent in holding if parent.is_relative_to(root)}
        # Class names are normalized, because macOS stores letters and accents separately in file names.
        classes = {parent: unicodedata.normalize("NFC", "".join(names[:1])) for parent, names in inside.items()}
        files = sorted((classes[path.parent], path) for path in images if path.parent in classes)
        labeled = [file for file in files if file[0]]
        if 0 < len(labeled) < len(files):
            leave_out([path for label, path in files if not label], "they lie beside folders of classes")
        parts[split] = labeled or files
    return parts


def files_within(folder: str | Path, endings: Collection[str]) -> Iterator[Path]:
    """Yield the files with the extensions `endings` in a folder and its subfolders, except for `SYSTEM_FOLDERS`. Links
    to folders are followed last, and no folder is visited twice. Raise an `OSError` if a folder cannot be read."""

    def refuse(error: OSError):
        raise error

    entered = set()
    roots = [folder]
    for root in roots:
        for parent, folders, names in os.walk(root, onerror=refuse):
            real = os.path.realpath(parent)
            if real in entered:
                folders.clear()
                continue
            entered.add(real)
            folders[:] = sorted(name for name in folders if not SYSTEM_FOLDERS.fullmatch(name))
            roots += [path for name in folders if os.path.islink(path := os.path.join(parent, name))]
            fitting = [name for name in names if os.path.splitext(name)[1].lower() in endings and name[0] != "."]
            yield from (path for name in sorted(fitting) if (path := Path(parent, name)).is_file())


@functools.cache
def unpack(archive: Path) -> Path:
    """Unpack a zip file into a temporary folder, which is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="frugalvit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)
    # `zipfile` raises a RuntimeError if the file is encrypted or its compression is unknown.
    except (zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise ValueError(f"{archive} cannot be unpacked ({first_line(error)}); give a folder") from error
    return folder


def leave_out(paths: list[Path], reason: str):
    """Print which files or folders are left out, and the reason."""
    names = shortened([printable(path.name) for path in paths])
    _print_once(f"Left out of {printable(str(paths[0].parent))}, as {reason}: {names}.")


@functools.cache
def _print_once(message: str):
    PartialState().print(message, file=sys.stderr)


def _check_class_names(files: list):
    """Raise a ValueError if parquet files have different class names, because `datasets` would use the first file's
    class names for all files."""
    known = {}
    for file in files:
        for column, feature in datasets.Features.from_arrow_schema(pq.read_schema(file)).items():
            names = feature.names if isinstance(feature, datasets.ClassLabel) else None
            if names and names != known.setdefault(column, names):
                both = f"{shortened(known[column])} in {files[0]} and {shortened(names)} in {file}"
                raise ValueError(f"the column {column} has the classes {both}, expected the same in the same order")


@contextmanager
def _source_errors(dataset: str | list[str], split: str | None = None):
    """Convert errors of `datasets` to a ValueError whose message is one line and contains the data set's name."""
    try:
        yield
    except (datasets.exceptions.DatasetsError, OSError, ValueError, AssertionError) as error:
        given = dataset if isinstance(dataset, str) else dataset[0]
        part = f"the split {split!r} of " if split else ""
        hint = f"; {EXPECTED}" if isinstance(error, datasets.exceptions.DatasetNotFoundError | OSError) else ""
        wraps = isinstance(error, datasets.exceptions.DatasetGenerationError)
        cause = (wraps and error.__cause__) or error
        raise ValueError(f"Cannot load {part}{given!r}: {first_line(cause)}{hint}") from error
