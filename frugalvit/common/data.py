"""Images to train and evaluate on, from any source, in one form."""

import glob
from contextlib import contextmanager
from pathlib import Path

import datasets
import torch

from .classes import compose
from .columns import check_image_column, find_column, find_image_column, holds
from .decoding import undecoded
from .folders import METADATA_FILES, images_within, leave_out, subfolders
from .labels import name_labels
from .sources import EXPECTED, find_source
from .tables import first_line


# Shards of a stream of a folder's images.
FOLDER_SHARDS = 1_024


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
    """Load images and, where there are any, labels.

    Args:
        dataset (`str` or `list[str]`):
            A hub id (owner/name@revision, too), a folder of images, see `find_parts`, or of parquet files, parquet
            files (several, or with wildcards), or `"cifar10-subset"`, which ships with frugalvit.
        split (`str`): Name of the part; slices such as `"train[:1000]"`, too. Files that are given directly are
            "train".
        name (`str`, *optional*): Configuration of a hub data set that has several.
        image_column, label_column (`str`, *optional*): Their names, where the types do not tell.
        class_names (`list[str]`, *optional*): Names of the labels 0, 1, …, where the data set has none, or the texts
            that are its labels, in their order.
        default_names (`list[str]`, *optional*): The same where neither `class_names` nor the data set say.
        streaming (`bool`): Whether images are read as training goes on, without a copy on disk.

    Returns:
        A `datasets.Dataset` (`IterableDataset` when streaming) with the columns `image`, not decoded, and `label`, a
        `ClassLabel`, if there are labels.

    Raises:
        ValueError: if there is no such data set, split or column, or a label is none of the classes.
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
    """Return the columns of a table that `load_images` returns; `dataset` is the table's name in messages. Arguments
    and errors are those of `load_images`."""
    loaded = table._resolve_features() if table.features is None else table
    features, streaming = loaded.features, isinstance(loaded, datasets.IterableDataset)
    image = find_image_column(features, image_column, dataset)
    classes = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    label = find_column(features, label_column, classes, "label", dataset)
    # A stream does not tell which texts there are.
    numbered = ("int",) if streaming and not class_names else ("int", "string")
    if label is None and "label" in features and holds(features["label"], *numbered):
        label = "label"
    check_image_column(features, image, dataset)
    if label and not (
        isinstance(features[label], datasets.ClassLabel) or holds(features[label], "int", "uint", "string")
    ):
        raise ValueError(f"The column {label!r} of {dataset!r} holds {features[label]}, expected class numbers.")
    columns = {image: "image"} | ({label: "label"} if label else {})
    # This comes first: renaming the columns of a stream would read from it.
    loaded = loaded.cast_column(image, datasets.Image(decode=False)).select_columns(list(columns))
    loaded = loaded.rename_columns({old: new for old, new in columns.items() if old != new})
    return name_labels(loaded, class_names, default_names) if label else loaded


def load_table(
    dataset: str | list[str], split: str, name: str | None = None, streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """A data set with all its columns. Arguments and errors as in `load_images`."""
    source = find_source(dataset, name)
    if source["path"] == "imagefolder" and "data_files" in source:
        parts = source["data_files"]
        if unknown := [name for name in names_in(split) if name not in parts]:
            raise ValueError(f"Cannot load the split {unknown[0]!r} of {dataset!r}: it has {', '.join(parts)}.")
        folders = [Path(folder) for part in parts.values() for folder in part]
        if not any((folder / name).is_file() for folder in folders for name in METADATA_FILES):
            return _read_parts(dataset, split, parts, streaming)
        source |= _part_of_folder(dataset, split, parts)
    with _one_error(dataset, split):
        return datasets.load_dataset(**source, split=split, streaming=streaming)


def split_names(dataset: str | list[str], name: str | None = None) -> list[str]:
    """The splits of a data set. Arguments and errors as in `load_images`."""
    source = find_source(dataset, name)
    if "data_files" in source:
        return list(source["data_files"])
    with _one_error(dataset):
        return datasets.get_dataset_split_names(source.pop("path"), config_name=source.pop("name", None), **source)


def _read_parts(
    dataset, split: str, parts: dict[str, list[str]], streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    """The images of parts of a folder: those in their class folders, however deep, or flat ones, which have no
    labels."""
    named = names_in(split)
    found = {name: images_within(folders) for name, folders in parts.items()}
    if empty := [name for name in named if not found[name]]:
        raise ValueError(f"Cannot load {dataset!r}: there are no images in {', '.join(parts[empty[0]])}; {EXPECTED}.")
    classes = {name: {_class_of(inside) for inside, _ in found[name] if "/" in inside} for name in found}
    if len({bool(classes[name]) for name in named}) > 1:
        raise ValueError(f"Cannot load {split!r} of {dataset!r}: only some of these parts have classes.")
    # Names are those of all parts: one part may lack a class.
    names = sorted(set().union(*classes.values())) if classes[named[0]] else []
    number_of = {name: number for number, name in enumerate(names)}
    try:
        slices = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(found[name]) for name in found})
    except (ValueError, AssertionError) as error:
        raise ValueError(f"Cannot take {split!r} of {dataset!r}: {first_line(error)}") from error
    files = [file for each in slices for file in found[each.splitname][each.from_ : each.to]]
    if names and (loose := [Path(path) for inside, path in files if "/" not in inside]):
        leave_out(loose, "they lie beside the folders of classes")
        files = [file for file in files if "/" in file[0]]
    features, columns = {"image": datasets.Image()}, {"image": [undecoded(path) for _, path in files]}
    if names:
        features["label"] = datasets.ClassLabel(names=names)
        columns["label"] = [number_of[_class_of(inside)] for inside, _ in files]
    table = datasets.Dataset.from_dict(columns, datasets.Features(features))
    return table.to_iterable_dataset(min(len(table), FOLDER_SHARDS) or 1) if streaming else table


def _class_of(inside: str) -> str:
    """The class of an image by its path in a part."""
    return compose(inside.partition("/")[0])


def _part_of_folder(dataset, split: str, parts: dict[str, list[str]]) -> dict:
    """Arguments of `datasets.load_dataset` for a split of a folder of images.

    `datasets` takes the names of folders for labels, and the name of a part for a label where it has no folders.
    Parts with and without classes are therefore loaded apart.
    """
    named = names_in(split)
    flat = {name: not any(map(subfolders, map(Path, folders))) for name, folders in parts.items()}
    if len({flat[name] for name in named}) > 1:
        raise ValueError(f"Cannot load {split!r} of {dataset!r}: only some of these parts have classes.")
    data_files = {
        name: [f"{glob.escape(folder)}/**" for folder in folders]
        for name, folders in parts.items()
        if flat[name] == flat[named[0]]
    }
    return {"data_files": data_files, "drop_labels": True if flat[named[0]] else None}


def names_in(split: str) -> list[str]:
    """The splits that a text such as `"train[:50%]+test"` names."""
    return [part.partition("[")[0].strip() for part in split.split("+")]


def sample(images: datasets.Dataset, limit: int | None, seed: int) -> datasets.Dataset:
    """Choose `limit` images at random, in their order; all if there are fewer or no limit is given."""
    if limit is None or limit >= len(images):
        return images
    generator = torch.Generator().manual_seed(seed)
    return images.select(torch.randperm(len(images), generator=generator)[:limit].sort().values.tolist())


@contextmanager
def _one_error(dataset, split: str | None = None):
    """Within, an error that `datasets` raises when it loads a data set becomes a clear one of one line."""
    given = dataset if isinstance(dataset, str) else dataset[0]
    part = f"the split {split!r} of " if split else ""
    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"Cannot read the data set {given!r}: {first_line(error.__cause__ or error)}") from error
    except (datasets.exceptions.DatasetsError, OSError) as error:
        raise ValueError(f"Cannot load the data set {given!r} ({first_line(error)}); {EXPECTED}.") from error
    except ValueError as error:
        raise ValueError(f"Cannot load {part}{given!r}: {first_line(error)}") from error
