"""Images to train and evaluate on, from any source, in one form."""

import glob
import os
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import torch

from .choices import SUBSET
from .decoding import IMAGE_ENDINGS, UNREAD_ENDINGS
from .folders import METADATA_FILES, ImageFolder, files_within, leave_out, part_called, say_unread, unpack
from .labels import name_labels
from .loading import split_revision
from .resources import shipped_images
from .tables import first_line, shortened


EXPECTED = f"expected a hub id, a folder of images or of parquet files, parquet files, or {SUBSET!r}"


def load_images(
    dataset: str | list[str],
    split: str = "train",
    *,
    name: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: list[str] | None = None,
    default_names: list[str] | None = None,
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Load the columns `image`, not decoded, and `label`, a `ClassLabel`, if there are labels.

    Args:
        dataset (`str` or `list[str]`): A hub id (owner/name@revision, too), a folder of images or a zip file of one,
            see `ImageFolder`, a folder that `datasets.load_dataset` reads, parquet files, or `"cifar10-subset"`.
        split (`str`): Name of the part; slices such as `"train[:1000]"`, too. Files are "train".
        name (`str`, *optional*): Configuration of a hub data set that has several.
        class_names (`list[str]`, *optional*): Names of the labels 0, 1, …, or the texts that are labels.
        default_names (`list[str]`, *optional*): The same where neither `class_names` nor the data set have them.
    """
    loaded = load_table(dataset, split, name, streaming)
    return select_images(loaded, dataset, image_column, label_column, class_names, default_names)


def select_images(
    table: datasets.Dataset | datasets.IterableDataset,
    dataset: str | list[str],
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: list[str] | None = None,
    default_names: list[str] | None = None,
) -> datasets.Dataset | datasets.IterableDataset:
    """Return the columns of a table that `load_images` returns; `dataset` is its name in errors."""
    loaded = table._resolve_features() if table.features is None else table
    features = loaded.features
    image = find_image_column(features, image_column, dataset)
    classes = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    label = find_column(features, label_column, classes, "label", dataset)
    # A stream does not tell which texts there are.
    texts = ("string",) if class_names or not isinstance(loaded, datasets.IterableDataset) else ()
    if label is None and holds(features.get("label"), "int", "uint", *texts):
        label = "label"
    if label and label not in classes and not holds(features[label], "int", "uint", "string"):
        raise ValueError(f"The column {label!r} of {dataset!r} holds {features[label]}, expected class numbers.")
    columns = {image: "image"} | ({label: "label"} if label else {})
    # Cast before renaming, which would read from a stream.
    loaded = loaded.cast_column(image, datasets.Image(decode=False)).select_columns(list(columns))
    loaded = loaded.rename_columns({old: new for old, new in columns.items() if old != new})
    return name_labels(loaded, class_names, default_names) if label else loaded


def load_table(
    dataset: str | list[str], split: str, name: str | None = None, streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """Load a data set with all its columns. Arguments and errors as in `load_images`."""
    source = find_source(dataset, name)
    with _one_error(dataset, split):
        if isinstance(source, ImageFolder):
            return source.read(split, streaming)
        return datasets.load_dataset(**source, split=split, streaming=streaming)


def split_names(dataset: str | list[str], name: str | None = None) -> list[str]:
    """Return the splits of a data set. Arguments and errors as in `load_images`."""
    source = find_source(dataset, name)
    if isinstance(source, ImageFolder):
        return list(source.parts)
    if "data_files" in source:
        return list(source["data_files"])
    with _one_error(dataset):
        return datasets.get_dataset_split_names(source["path"], source["name"], revision=source.get("revision"))


def sample(images: datasets.Dataset, limit: int | None, seed: int) -> datasets.Dataset:
    """Choose `limit` images at random, in their order; all if there are fewer or no limit is given."""
    if limit is None or limit >= len(images):
        return images
    generator = torch.Generator().manual_seed(seed)
    return images.select(torch.randperm(len(images), generator=generator)[:limit].sort().values.tolist())


def find_source(dataset: str | list[str], name: str | None = None) -> ImageFolder | dict:
    """Return the folder of images that is a data set, or else arguments of `datasets.load_dataset`."""
    paths = [dataset] if isinstance(dataset, str) else list(dataset)
    path = shipped_images("cifar10") if paths == [SUBSET] else Path(paths[0])
    if not path.is_dir() and all(file.endswith(".parquet") for file in paths):
        if missing := [file for file in paths if not os.path.isfile(file)]:
            raise ValueError(f"There is no file {missing[0]!r}; expected parquet files.")
        with _one_error(dataset):
            _check_class_names(paths)
        return {"path": "parquet", "data_files": {"train": [glob.escape(file) for file in paths]}}
    if len(paths) > 1:
        raise ValueError(f"Several data sets, {', '.join(paths)}; expected one, or several parquet files.")
    if path.is_dir() or (path.suffix.lower() == ".zip" and path.is_file()):
        with _one_error(dataset):
            return _find_in_folder(path if path.is_dir() else unpack(path), name)
    hub_id, revision = split_revision(paths[0])
    if path.exists() or paths[0].startswith((".", "~", os.sep)) or hub_id.count("/") > 1:
        raise ValueError(f"{paths[0]!r} is no data set; {EXPECTED}.")
    return {"path": hub_id, "name": name, **revision}


def _find_in_folder(folder: Path, name: str | None) -> ImageFolder | dict:
    """`find_source` of a folder: its images, or else what `datasets` reads, or else its zip file."""
    endings = {*IMAGE_ENDINGS, *UNREAD_ENDINGS, ".parquet", ".tar", ".csv", ".jsonl"}
    files = list(files_within(folder, endings))
    images = [path for path in files if path.suffix.lower() in IMAGE_ENDINGS]
    metadata = [path for path in files if path.name in METADATA_FILES]
    tables = [path for path in files if path.suffix.lower() == ".parquet" and path not in metadata]
    archives = sorted(folder.glob("*.zip"))
    say_unread(folder, files)
    if images:
        if tables or archives:
            leave_out([*tables, *archives], "images come first")
        parts = {part_called(file.parent.name) or "train": file for file in metadata}
        if parts and all(file.parent == folder or part_called(file.parent.name) for file in metadata):
            return {"path": "imagefolder", "data_files": {part: [glob.escape(str(parts[part]))] for part in parts}}
        return ImageFolder(folder, images)
    if len(archives) == 1 and not tables:
        return _find_in_folder(unpack(archives[0]), name)
    if not tables and not any(path.suffix == ".tar" for path in files):
        raise ValueError(f"it has no images, and {len(archives)} zip files; {EXPECTED}")
    if glob.has_magic(str(folder.resolve())):
        raise ValueError("its path has one of *?[, which datasets takes for a pattern; rename it")
    _check_class_names(tables)
    # Absolute: a name such as "csv" would be that of a format.
    return {"path": str(folder.resolve()), "name": name}


def _check_class_names(files: list):
    """Raise a ValueError if parquet files name their classes differently: `datasets` takes the first file's names."""
    known = {}
    for file in files:
        for column, feature in datasets.Features.from_arrow_schema(pq.read_schema(file)).items():
            names = feature.names if isinstance(feature, datasets.ClassLabel) else None
            if names and names != known.setdefault(column, names):
                both = f"{shortened(known[column])} in {files[0]} and {shortened(names)} in {file}"
                raise ValueError(f"the column {column} has the classes {both}, expected the same in the same order")


def find_image_column(features: Mapping, given: str | None, dataset) -> str:
    """Return the only column of images or else of bytes, or the column that is given, which may hold paths, too."""
    typed = [name for name, feature in features.items() if is_image(feature)]
    binary = [name for name, feature in features.items() if holds(feature, "binary")]
    column = find_column(features, given, typed or binary, "image", dataset)
    if not (is_image(features[column]) or holds(features[column], "binary", "string")):
        raise ValueError(f"The column {column!r} of {dataset!r} holds {features[column]}, expected images.")
    return column


def find_column(features: Mapping, given: str | None, found: list[str], what: str, dataset) -> str | None:
    """Return the column that is given, or else the only one that was found; there may be none of labels."""
    if given is not None and given not in features:
        raise ValueError(f"{dataset!r} has no column {given!r} (--{what}-column); it has {', '.join(features)}.")
    if given is None and (len(found) > 1 or (what == "image" and not found)):
        count, columns = len(found) or "no", ", ".join(features)
        raise ValueError(f"{dataset!r} has {count} {what} columns among {columns}; name one with --{what}-column.")
    return given or next(iter(found), None)


def is_image(feature) -> bool:
    # Parquet files that were not written by `datasets` hold images as structures of bytes and path.
    return isinstance(feature, datasets.Image) or (
        isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}
    )


def holds(feature, *types: str) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype.removeprefix("large_").startswith(types)


@contextmanager
def _one_error(dataset: str | list[str], split: str | None = None):
    """Turn an error of `datasets` into a ValueError of one line that names the data set."""
    try:
        yield
    except (datasets.exceptions.DatasetsError, OSError, ValueError, AssertionError) as error:
        given = dataset if isinstance(dataset, str) else dataset[0]
        part = f"the split {split!r} of " if split else ""
        hint = f"; {EXPECTED}" if isinstance(error, datasets.exceptions.DatasetNotFoundError | OSError) else ""
        wraps = isinstance(error, datasets.exceptions.DatasetGenerationError)
        cause = (wraps and error.__cause__) or error
        raise ValueError(f"Cannot load {part}{given!r}: {first_line(cause)}{hint}") from error
