"""Images to train and evaluate on: found, read, and brought into one form."""

import functools
import glob
import hashlib
import os
import re
import shutil
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from PIL import Image

from .choices import NO_EVALUATION, SUBSET
from .classes import compose, match_labels
from .decoding import UNREAD_ENDINGS, is_image_file, is_unread_picture, made_by_machines, read_record
from .files import whole_folder
from .loading import split_revision
from .tables import printable
from .views import ORDER, random_seed


# Splits that are there to evaluate on, the first choice first.
EVALUATION_SPLITS = ("test", "validation", "valid", "val", "dev")
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
# Columns of images that have no type of their own, and columns of their files.
IMAGE_COLUMNS = re.compile(r"(image|img|picture|photo)s?(_bytes)?|jpe?g|png|webp", re.IGNORECASE)
PATH_COLUMNS = re.compile(r"((image|img)_)?(file|path)|file_?(name|path)", re.IGNORECASE)
# What several files are packed into.
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Images that are held back to evaluate on, where there is no split for that: a share of them, and the most.
HELD_BACK_SHARE, MOST_HELD_BACK = 0.1, 5_000
# Classes that get their numbers for names.
MOST_CLASSES = 100_000
# Shards of a stream of a folder's images.
FOLDER_SHARDS = 1_024


class ImageError(ValueError):
    """Something wrong with an image of a data set, said in one line also where a worker found it."""

    def __init__(self, message: str):
        # DataLoader raises again what a worker raised, with the worker's whole traceback as the message.
        where = f"{type(self).__module__}.{type(self).__name__}: "
        super().__init__(message.strip().splitlines()[-1].removeprefix(where))


class CorruptImageError(ImageError):
    """An image of a data set that cannot be decoded."""


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
    """Images and, where there are any, labels.

    Args:
        dataset (`str` or `list[str]`):
            A hub id (owner/name@revision, too), a folder of images, see `find_parts`, or of parquet files, parquet
            files (several, or with wildcards), or `"cifar10-subset"`, which ships with frugalvit.
        split (`str`): Which part, slices such as `"train[:1000]"` included. Files given directly are "train".
        name (`str`, *optional*): Configuration of a hub data set that has several.
        image_column, label_column (`str`, *optional*): Their names, where the types do not tell.
        class_names (`list[str]`, *optional*): Names of the labels 0, 1, …, where the data set has none, or the texts
            that are its labels, in their order.
        default_names (`list[str]`, *optional*): The same where neither `class_names` nor the data set say.
        streaming (`bool`): Read as training goes, without a copy on disk.

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
    """The columns of a table, of the name `dataset` in messages, that `load_images` returns; arguments and errors are
    its own."""
    loaded = table._resolve_features() if table.features is None else table
    features, streaming = loaded.features, isinstance(loaded, datasets.IterableDataset)
    image = find_image_column(features, image_column, dataset)
    classes = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    label = _find_column(features, label_column, classes, "label", dataset)
    # A stream does not tell which texts there are.
    numbered = ("int",) if streaming and not class_names else ("int", "string")
    if label is None and "label" in features and _holds(features["label"], *numbered):
        label = "label"
    check_image_column(features, image, dataset)
    if label and not (
        isinstance(features[label], datasets.ClassLabel) or _holds(features[label], "int", "uint", "string")
    ):
        raise ValueError(f"The column {label!r} of {dataset!r} holds {features[label]}, expected class numbers.")
    columns = {image: "image"} | ({label: "label"} if label else {})
    # This comes first: renaming the columns of a stream would read from it.
    loaded = loaded.cast_column(image, datasets.Image(decode=False)).select_columns(list(columns))
    loaded = loaded.rename_columns({old: new for old, new in columns.items() if old != new})
    return _name_labels(loaded, class_names, default_names) if label else loaded


def load_splits(
    data, learns_labels: bool = False
) -> tuple[datasets.Dataset | datasets.IterableDataset, datasets.Dataset | None, datasets.Dataset | None]:
    """The images to train on, to evaluate on and to test on that `DataArguments` tell, see `load_parts`.

    Labels of -1, as in ImageNet's test split, or none at all are no labels: images to evaluate on of which some lack
    theirs (of a recipe that learns from labels, all) count as unlabeled, which is printed.

    Args:
        data (`DataArguments`): What the command line says; `data.evaluated` and `data.tested` are filled.
        learns_labels (`bool`, *optional*, defaults to `False`): Whether the recipe learns from the labels, which then
            have to be there, and of all classes that are evaluated. Of a stream that is not known.

    Raises:
        ValueError: as `load_images` and `load_parts`; if the two have different classes; or, of a recipe that learns
            from labels, if some lack.
    """
    options = {
        "name": data.dataset_config,
        "image_column": data.image_column,
        "label_column": data.label_column,
        "class_names": data.class_names,
    }
    # Class names of the training images, for images whose labels are numbers or texts.
    names = None

    def load(dataset: list[str], split: str, streaming: bool = False):
        nonlocal names
        images = load_images(dataset, split, default_names=names, streaming=streaming, **options)
        names = names or class_names(images)
        return images

    train, evaluation, test = load_parts(data, load, lambda dataset: split_names(dataset, data.dataset_config))
    names, labeled = class_names(train), not data.streaming and "label" in train.features
    if learns_labels:
        if names is None:
            raise ValueError(
                f"{' '.join(data.dataset)} has no labels to train with. Name their column by --label-column."
            )
        if labeled:
            check_labels(train, data.train_split)
    elif labeled and (label_numbers(train) < 0).any():
        train, labeled = train.remove_columns("label"), False

    def check_part(evaluation: datasets.Dataset | None, split: str | None) -> datasets.Dataset | None:
        if evaluation is None or "label" not in evaluation.features:
            return evaluation
        unlabeled = label_numbers(evaluation) < 0
        if unlabeled.any() and (unlabeled.all() or not learns_labels):
            count = "The" if unlabeled.all() else f"{unlabeled.sum():,} of {len(unlabeled):,}"
            PartialState().print(f"{count} images of the split {split!r} have no labels; it counts as unlabeled.")
            return evaluation.remove_columns("label")
        check_labels(evaluation, split)
        if "[" in split:
            say_if_few_classes(evaluation, split)
        eval_names = class_names(evaluation)
        if names and names != eval_names:
            raise ValueError(
                f"The training images have the classes {_short(names)}, the evaluation images {_short(eval_names)}; "
                "expected the same. Name them with --class-names if the data sets do not."
            )
        lacking = np.setdiff1d(label_numbers(evaluation), label_numbers(train)) if labeled else ()
        if len(lacking):
            message = (
                f"Among the training images ({data.train_split}) there are none of {len(lacking)} classes that are "
                f"evaluated: {_short([eval_names[label] for label in lacking])}."
            )
            if learns_labels:
                raise ValueError(
                    f"{message} Are the images sorted by class, so that a slice has only some? Without --eval-split, "
                    "a part of each class is held back where there is no split for evaluation."
                )
            PartialState().print(message)
        return evaluation

    return train, check_part(evaluation, data.evaluated), check_part(test, data.tested)


def say_if_few_classes(images: datasets.Dataset, part: str):
    """Say that images are the first of a data set that is sorted by class, so that what is measured on them is of
    those classes alone."""
    if "label" not in images.features or not len(images):
        return
    labels, names = label_numbers(images), class_names(images)
    known = np.unique(labels[labels >= 0])
    if len(labels) > 1 and len(known) < len(names) and (np.diff(labels) >= 0).all():
        PartialState().print(
            f"Note: {part} is the beginning of images that are sorted by class, {len(labels):,} images of "
            f"{_short([names[label] for label in known])} of {len(names)} classes, and no sample of all.",
            file=sys.stderr,
        )


def match_classes(parts: Sequence, id2label: Mapping[int, str] | None, learns_labels: bool) -> tuple:
    """The images to train on, to evaluate on and to test on, and what a trained classifier calls each of their
    classes, `None` where there are no labels: they are left out where nothing learns from them and the classifier does
    not know them, which is printed.

    Args:
        parts: What `load_splits` returns.
        id2label (`Mapping[int, str]`, *optional*): The classifier's classes; `None` where there is no classifier.
        learns_labels (`bool`): Whether the recipe learns from the labels.

    Raises:
        ValueError: if it does, and the classifier does not know all of them.
    """
    names = next(filter(None, (class_names(part) for part in parts if part is not None)), None)
    if id2label is None or names is None:
        return *parts, None
    try:
        return *parts, match_labels(names, id2label)
    except ValueError as error:
        if learns_labels:
            raise
        PartialState().print(f"{error} They are left out: nothing is learned from them, and no accuracy is measured.")
    labeled = [part is not None and "label" in part.features for part in parts]
    return *(part.remove_columns("label") if has else part for part, has in zip(parts, labeled, strict=True)), None


def load_parts(data, load: Callable, names_of_splits: Callable[[list[str]], list[str]]) -> tuple:
    """The images to train on, those to evaluate on and those to test on, which are never streamed, or `None`.

    Without `--eval-split`, images to evaluate on are the first of `EVALUATION_SPLITS` that is there, if possible one
    with labels; the images of an `--eval-dataset` without such a split; or else a part of the training images that is
    held back, see `hold_back`, which is printed. Where there is a split for validation beside "test", the best epoch
    is chosen on that, and "test" is what it is tested on.

    Args:
        data (`ImageArguments`): What the command line says; `data.evaluated` and `data.tested` are filled.
        load: Takes data set, split, and `streaming` as a keyword, to images.
        names_of_splits: Takes a data set to the names of its splits.

    Raises:
        ValueError: as what is called, and if nothing can be held back.
    """
    train = load(data.dataset, data.train_split, streaming=data.streaming)
    source, data.evaluated, data.tested = data.eval_dataset or data.dataset, data.eval_split, None
    if data.eval_split == NO_EVALUATION:
        data.evaluated = None
        PartialState().print("There is no evaluation: the model of the last epoch is kept.")
        return train, None, None
    if data.eval_split is not None:
        return train, load(source, data.eval_split), None
    splits = names_of_splits(source)
    usual = evaluation_splits(splits) or (splits if data.eval_dataset else [])
    if not data.eval_dataset:
        usual = [split for split in usual if split not in _names_in(data.train_split)]
    if usual:
        evaluation, data.evaluated = load_first_labeled(usual, lambda split: load(source, split))
        if data.evaluated != "test" or len(usual) == 1:
            return train, evaluation, None
        chooses, split = load_first_labeled(usual[1:], lambda split: load(source, split))
        if _is_labeled(chooses) != _is_labeled(evaluation):
            return train, evaluation, None
        data.evaluated, data.tested = split, "test"
        return train, chooses, evaluation
    if data.streaming:
        raise ValueError(
            f"{' '.join(source)} has no split to evaluate on, and nothing can be held back from a stream. Give "
            f"--eval-split (of {', '.join(splits)}), --eval-dataset, or go without: --eval-split {NO_EVALUATION}."
        )
    train, evaluation = hold_back(train)
    data.evaluated = f"{data.train_split}, held back"
    total = len(train) + len(evaluation)
    PartialState().print(
        f"{' '.join(source)} has no split to evaluate on: {len(evaluation):,} of {total:,} images of "
        f"{data.train_split} are held back for that, the same in every run. To choose: --eval-split, --eval-dataset."
    )
    return train, evaluation, None


def hold_back(images: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Images to train on and images to evaluate on: a tenth, at most 5,000, of each class its share, chosen at random
    but always the same. The only image of a class stays with training.

    Raises:
        ValueError: if there are too few.
    """
    generator = torch.Generator().manual_seed(random_seed(len(images), ORDER))
    order = torch.randperm(len(images), generator=generator).numpy()
    if "label" in images.features:
        _, classes, sizes = np.unique(label_numbers(images)[order], return_inverse=True, return_counts=True)
        by_class = np.argsort(classes, kind="stable")
        order = order[by_class[sizes[classes[by_class]] > 1]]
    if len(order) < 2:
        raise ValueError(
            f"{len(images)} images are too few to hold some back to evaluate on. Give --eval-dataset, or go without "
            f"evaluation: --eval-split {NO_EVALUATION}."
        )
    count = min(max(int(HELD_BACK_SHARE * len(order)), 1), MOST_HELD_BACK)
    # In even steps through the classes, one after the other.
    held_back = np.sort(order[((np.arange(count) + 0.5) * len(order) / count).astype(int)])
    return images.select(np.setdiff1d(np.arange(len(images)), held_back)), images.select(held_back)


def class_names(images) -> list[str] | None:
    """Names of the labels, or None if there are no labels."""
    return list(images.features["label"].names) if "label" in images.features else None


def label_numbers(images: datasets.Dataset) -> np.ndarray:
    """The labels of all images, `(images,)` int64, -1 where there is none."""
    if not len(images):
        return np.zeros(0, dtype=np.int64)
    column = images.select_columns("label").with_format("arrow")[:]["label"]
    return pc.fill_null(column, -1).to_numpy().astype(np.int64)


def load_first_labeled(splits: list[str], load: Callable) -> tuple[datasets.Dataset, str]:
    """The images of the first split that has labels or masks, or if none has them of the first, and which it is."""
    first = None
    for split in splits:
        images = load(split)
        if _is_labeled(images):
            return images, split
        first = first or (images, split)
    return first


def _is_labeled(images: datasets.Dataset) -> bool:
    return "mask" in images.features or ("label" in images.features and (label_numbers(images) >= 0).any())


def default_split(dataset: str | list[str], name: str | None = None) -> str:
    """The split to evaluate on where none is named: the first of `EVALUATION_SPLITS` that the data set has, or else
    "train", all of it."""
    return next(iter(evaluation_splits(split_names(dataset, name))), "train")


def evaluation_splits(splits: list[str]) -> list[str]:
    """Which of a data set's splits are there to evaluate on, the first choice first."""
    return [split for split in EVALUATION_SPLITS if split in splits]


def split_names(dataset: str | list[str], name: str | None = None) -> list[str]:
    """The splits of a data set. Arguments and errors as in `load_images`."""
    source = _find(dataset, name)
    if "data_files" in source:
        return list(source["data_files"])
    with _one_error(dataset):
        return datasets.get_dataset_split_names(source.pop("path"), config_name=source.pop("name", None), **source)


def load_table(
    dataset: str | list[str], split: str, name: str | None = None, streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """A data set with all its columns. Arguments and errors as in `load_images`."""
    source = _find(dataset, name)
    if source["path"] == "imagefolder" and "data_files" in source:
        parts = source["data_files"]
        folders = [Path(folder) for part in parts.values() for folder in part]
        if not any((folder / name).is_file() for folder in folders for name in METADATA_FILES):
            return _read_parts(dataset, split, parts, streaming)
        source |= _part_of_folder(dataset, split, parts)
    with _one_error(dataset, split):
        return datasets.load_dataset(**source, split=split, streaming=streaming)


def _find(dataset: str | list[str], name: str | None) -> dict:
    """What `datasets.load_dataset` takes for a data set: its folders or files by split, if they tell."""
    paths = [dataset] if isinstance(dataset, str) else list(dataset)
    path = Path(paths[0])
    hub_id, revision = split_revision(paths[0])
    if paths == [SUBSET]:
        folder = files("frugalvit.training") / "cifar10"
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
        return {"path": "imagefolder", "data_files": _parts_of_archives([path])}
    if path.exists() or paths[0].startswith((".", "~", os.sep)) or hub_id.count("/") > 1:
        raise ValueError(f"{paths[0]!r} is no data set; {_EXPECTED}.")
    return {"path": hub_id, "name": name, **revision}


def _find_in_folder(folder: Path) -> dict:
    """What `datasets.load_dataset` takes for a folder: its images; or its parquet files, where they hold more of them;
    or, where it has neither, those in its zip files."""
    tables, archives = parquet_files(folder), sorted(file for file in folder.glob("*.zip") if file.is_file())
    images = sum(1 for _ in image_files(folder)) if tables else int(next(image_files(folder), None) is not None)
    holding = {table: rows for table in tables if (rows := _rows_with_images(table))}
    if tables and (not images or sum(holding.values()) > images):
        if images:
            _leave_out(image_files(folder), f"the parquet files of {folder} hold more images")
        if others := [table for table in tables if holding and table not in holding]:
            _leave_out(others, "they hold no images")
        return {"path": "parquet", "data_files": _parts_of_tables(folder, list(holding) or tables)}
    if not images and archives:
        return {"path": "imagefolder", "data_files": _parts_of_archives(archives)}
    if others := [*tables, *archives]:
        _leave_out(others, f"the images of {folder} lie in its folders")
    return {"path": "imagefolder", "data_files": find_parts(folder)}


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files in a folder and those within it but for metadata of images."""
    return list(files_within(folder, lambda path: path.suffix == ".parquet" and path.name not in METADATA_FILES))


def _rows_with_images(table: Path) -> int:
    """Rows of a parquet file with a column of images, else 0."""
    try:
        with pq.ParquetFile(table) as file:
            return file.metadata.num_rows if image_columns(features_of(file.schema_arrow), sure=True) else 0
    # Who reads it says so.
    except (pa.ArrowException, OSError):
        return 0


def features_of(schema: pa.Schema) -> dict:
    """The columns that `datasets` has types for."""
    features = {}
    for field in schema:
        with suppress(ValueError):
            features[field.name] = datasets.features.features.generate_from_arrow_type(field.type)
    return features


def _parts_of_archives(archives: list[Path]) -> dict[str, list[str]]:
    """The folders in zip files by split. A zip file is a folder of its name, which may name a part or a class; but
    several with folders of classes are together what one of them is."""
    root = _unpack(archives)
    inside = subfolders(root)
    if any(part_called(folder.name) for folder in inside) or (len(inside) > 1 and any(map(_has_images, inside))):
        return find_parts(root)
    parts = defaultdict(list)
    for folder in inside:
        for split, folders in find_parts(folder).items():
            parts[split] += folders
    return dict(parts)


def _unpack(archives: list[Path]) -> Path:
    """A folder with what is in zip files, each in a folder of its name, beside the copies of `datasets`, where it
    stays for the next time.

    Raises:
        ValueError: if one cannot be read, or there is no room.
    """
    keys = [(str(archive.resolve()), (stat := archive.stat()).st_size, stat.st_mtime_ns) for archive in archives]
    name = hashlib.sha256(repr(keys).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    output = Path(datasets.config.HF_DATASETS_CACHE) / "unpacked" / name
    shown = _short([archive.name for archive in archives])
    with PartialState().main_process_first():
        if not output.is_dir():
            try:
                with whole_folder(output) as aside:
                    for archive in archives:
                        _extract(archive, aside / archive.stem)
            # RuntimeError: a password is needed. NotImplementedError: a way to compress that Python does not know.
            except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError) as error:
                raise ValueError(f"Cannot unpack {shown}: {_first_line(error)}") from error
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
                    _leave_out(others, f"{' and '.join(child.name for child in named)} are parts of {parent}")
                for child, split in named.items():
                    parts[split].append(str(child))
                metadata = [name for name in METADATA_FILES if (parent / name).is_file()]
                if named and metadata:
                    raise ValueError(
                        f"{parent / metadata[0]} is beside the parts {', '.join(child.name for child in named)}; "
                        "expected one of its own in each of them."
                    )
            if not _has_images(parent):
                below += children
        if parts:
            break
        level = below
    return {split: parts[split] for split in PART_FOLDERS if split in parts} or {"train": [str(folder)]}


def _parts_among(children: list[Path]) -> tuple[dict[Path, str], list[Path]]:
    """Which folders beside each other are parts, by their names, and the others that hold images."""
    named = {child: split for child in children if (split := part_called(child.name))}
    worded = {child: split for child in children if (split := part_called(child.name, _WORDS)) and child not in named}
    others = [child for child in children if child not in named | worded and next(image_files(child), None)]
    splits = {*named.values(), *worded.values()}
    # Two flat folders are two classes unless one is to train on and another is not.
    flat = len(named | worded) > 1 and any(map(_has_images, worded)) and not (len(splits) > 1 and "train" in splits)
    if others or flat:
        return named, [*others, *(child for child in worded if next(image_files(child), None))]
    return named | worded, []


def part_called(name: str, suffix: re.Pattern = _NUMBERS) -> str | None:
    """The split that the name of a folder names, with numbers after it or without, or with what matches `suffix`."""
    for split, pattern in PART_FOLDERS.items():
        if (found := pattern.match(name)) and suffix.fullmatch(name, found.end()):
            return split
    return None


def subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not made_by_machines(path.name))


def _has_images(folder: Path) -> bool:
    return any(map(is_image_file, folder.iterdir()))


def files_within(folder: str | Path, fits: Callable[[Path], bool]) -> Iterator[Path]:
    """Files that are people's own in a folder and those within it, through symbolic links, too, which may not lead
    round in circles; those whose names fit.

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


def say_unread(folder: str | Path):
    """Print how many pictures in a folder and within it are not read, such as .heic, and what to do, and which
    archives are not looked into."""
    _say_unread(list(files_within(folder, is_unread_picture)))
    if archives := list(files_within(folder, lambda path: path.suffix.lower() in ARCHIVES)):
        _leave_out(archives, "archives are not looked into here; unpack them")


def _say_unread(pictures: list[Path]):
    by_advice = defaultdict(list)
    for ending, count in sorted(Counter(path.suffix.lower() for path in pictures).items()):
        by_advice[UNREAD_ENDINGS[ending]].append(f"{count:,} {ending}")
    for advice, found in by_advice.items():
        where = printable(os.path.commonpath([path.parent for path in pictures]))
        _say_once(f"Left out, as they are not read: {', '.join(found)} in {where}. To have them: {advice}.", where)


def _leave_out(paths: Iterable[Path], reason: str):
    paths = list(paths)
    names = _short([printable(path.name) for path in paths])
    _say_once(f"Left out, as {reason}: {names}.", str(paths[0].parent))


# A folder is looked through for its parts, and then for each of them.
@functools.cache
def _say_once(message: str, where: str):
    PartialState().print(message, file=sys.stderr)


def undecoded(path: str | Path) -> dict[str, str | None]:
    """The record of an image file, as `datasets` has it.

    Raises:
        ValueError: if its name is not UTF-8.
    """
    path = str(path)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"The name of the file {printable(path)} is not UTF-8. Rename it, or all that are so with: convmv -f "
            "latin1 -t utf8 -r --notest FOLDER."
        ) from None
    return {"bytes": None, "path": path}


def _parts_of_tables(folder: Path, tables: Sequence[Path]) -> dict[str, list[str]]:
    """The parquet files of a folder by split, which names of files and folders in there tell (`train-00000.parquet`);
    without any such name, all of them are "train". Other words may stand beside such a name (`cifar10-train`) where
    every file has one."""
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
        _leave_out(others, f"other files of {folder} are called {', '.join(parts)}")
    return {split: [glob.escape(str(path)) for path in parts[split]] for split in PART_FOLDERS if split in parts}


def _files_within(folders: list[str]) -> list[tuple[str, str]]:
    """Images in folders, in order: their paths in there, and their paths. Pictures that are not read are counted and
    said."""
    found, unread = [], []
    for folder in folders:
        for path in files_within(folder, lambda path: is_image_file(path) or is_unread_picture(path)):
            if is_image_file(path):
                found.append((path.relative_to(folder).as_posix(), str(path)))
            else:
                unread.append(path)
    _say_unread(unread)
    return sorted(found)


def _read_parts(
    dataset, split: str, parts: dict[str, list[str]], streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    """The images of parts of a folder: those in their class folders, however deep, or flat ones, which have no
    labels."""
    named = _names_in(split)
    if unknown := [name for name in named if name not in parts]:
        raise ValueError(f"Cannot load the split {unknown[0]!r} of {dataset!r}: it has {', '.join(parts)}.")
    found = {name: _files_within(folders) for name, folders in parts.items()}
    if empty := [name for name in named if not found[name]]:
        raise ValueError(f"Cannot load {dataset!r}: there are no images in {', '.join(parts[empty[0]])}; {_EXPECTED}.")
    classes = {name: {_class_of(inside) for inside, _ in found[name] if "/" in inside} for name in found}
    if len({bool(classes[name]) for name in named}) > 1:
        raise ValueError(f"Cannot load {split!r} of {dataset!r}: only some of these parts have classes.")
    # Names are those of all parts: one part may lack a class.
    names = sorted(set().union(*classes.values())) if classes[named[0]] else []
    number_of = {name: number for number, name in enumerate(names)}
    try:
        slices = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(found[name]) for name in found})
    except (ValueError, AssertionError) as error:
        raise ValueError(f"Cannot take {split!r} of {dataset!r}: {_first_line(error)}") from error
    files = [file for each in slices for file in found[each.splitname][each.from_ : each.to]]
    if names and (loose := [Path(path) for inside, path in files if "/" not in inside]):
        _leave_out(loose, "they lie beside the folders of classes")
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
    """What `datasets` is to read for a split of a folder of images.

    It takes the names of folders for labels, in flat parts their own: parts with and without classes go apart.
    """
    named = _names_in(split)
    if unknown := [name for name in named if name not in parts]:
        raise ValueError(f"Cannot load the split {unknown[0]!r} of {dataset!r}: it has {', '.join(parts)}.")
    flat = {name: not any(map(subfolders, map(Path, folders))) for name, folders in parts.items()}
    if len({flat[name] for name in named}) > 1:
        raise ValueError(f"Cannot load {split!r} of {dataset!r}: only some of these parts have classes.")
    data_files = {
        name: [f"{glob.escape(folder)}/**" for folder in folders]
        for name, folders in parts.items()
        if flat[name] == flat[named[0]]
    }
    return {"data_files": data_files, "drop_labels": True if flat[named[0]] else None}


def _names_in(split: str) -> list[str]:
    """The splits that a text such as `"train[:50%]+test"` names."""
    return [part.partition("[")[0].strip() for part in split.split("+")]


@contextmanager
def _one_error(dataset, split: str | None = None):
    """One clear error for what `datasets` raises when it loads a data set."""
    given = dataset if isinstance(dataset, str) else dataset[0]
    part = f"the split {split!r} of " if split else ""
    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"Cannot read the data set {given!r}: {_first_line(error.__cause__ or error)}") from error
    except (datasets.exceptions.DatasetsError, OSError) as error:
        if isinstance(error, PermissionError) or _is_of_cache(error):
            raise ValueError(
                f"Cannot load the data set {given!r} ({_first_line(error)}). Where `datasets` cannot keep a copy, let "
                "HF_HOME name a folder that can be written."
            ) from error
        raise ValueError(f"Cannot load the data set {given!r} ({_first_line(error)}); {_EXPECTED}.") from error
    except ValueError as error:
        raise ValueError(f"Cannot load {part}{given!r}: {_first_line(error)}") from error


def _is_of_cache(error: BaseException) -> bool:
    """Whether an error is about the folder in which `datasets` keeps copies, or one that this lies in."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return False
    file, cache = Path(error.filename), Path(datasets.config.HF_DATASETS_CACHE)
    return file == cache or file in cache.parents or cache in file.parents


_EXPECTED = f"expected a hub id, a folder of images or of parquet files, parquet files, or {SUBSET!r}"


def _matching(pattern: str) -> list[str]:
    found = sorted(glob.glob(pattern))
    if not found:
        raise ValueError(f"There is no file {pattern!r}; expected a parquet file or a pattern that matches some.")
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _short(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''} ({len(names)})"


def is_image(feature) -> bool:
    # Parquet files that were not written by `datasets` hold images as structures of bytes and path.
    return isinstance(feature, datasets.Image) or (
        isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}
    )


def check_image_column(features: datasets.Features, column: str, dataset):
    """Raise a ValueError if a column holds neither images nor what they could be read from: bytes, or paths."""
    if not (is_image(features[column]) or _holds(features[column], "binary", "string")):
        raise ValueError(f"The column {column!r} of {dataset!r} holds {features[column]}, expected images.")


def _holds(feature, *types: str) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype.removeprefix("large_").startswith(types)


def image_columns(features: Mapping, sure: bool = False) -> list[str]:
    """The columns of images: those of that type; or else of bytes, if possible with a name that says so; or else of
    texts that are called as paths of images are. With `sure`, only where type or name say that these are images."""
    binary = [name for name, feature in features.items() if _holds(feature, "binary")]
    texts = [name for name, feature in features.items() if _holds(feature, "string")]
    signs = [
        [name for name, feature in features.items() if is_image(feature)],
        [name for name in binary if IMAGE_COLUMNS.fullmatch(name)],
        binary,
        [name for name in texts if IMAGE_COLUMNS.fullmatch(name)],
        [name for name in texts if PATH_COLUMNS.fullmatch(name)],
    ]
    return next(filter(None, signs[:2] if sure else signs), [])


def find_image_column(features: Mapping, given: str | None, dataset) -> str:
    """The one column of images, or the given one.

    Raises:
        ValueError: if there is none or several, or no column is called so.
    """
    return _find_column(features, given, image_columns(features), "image", dataset)


def _find_column(features: Mapping, given: str | None, found: list[str], what: str, dataset) -> str | None:
    if given is not None:
        if given not in features:
            raise ValueError(f"{dataset!r} has no column {given!r} (--{what}-column); it has {', '.join(features)}.")
        return given
    if len(found) > 1 or (what == "image" and not found):
        raise ValueError(
            f"{dataset!r} has {len(found) or 'no'} {what} columns among {', '.join(features)}; expected one. "
            f"Name it with --{what}-column."
        )
    return found[0] if found else None


def _name_labels(loaded, names: list[str] | None, default_names: list[str] | None):
    """The labels as a `ClassLabel`."""
    feature, streams = loaded.features["label"], isinstance(loaded, datasets.IterableDataset)
    names, default_names = (given and [compose(name) for name in given] for given in (names, default_names))
    if names is None and isinstance(feature, datasets.ClassLabel):
        if not streams and (highest := label_numbers(loaded).max(initial=-1)) >= len(feature.names):
            raise ValueError(f"The labels go up to {highest}, and {len(feature.names)} classes have names.")
        return loaded
    given, names = "--class-names" if names else "classes of the training images", names or default_names
    if streams:
        if names is None:
            raise ValueError("The stream's labels have no names; give them with --class-names.")
    elif _holds(feature, "string"):
        loaded = _compose_labels(loaded)
        found = sorted(filter(None, loaded.unique("label")))
        names = names or found
        if unknown := [label for label in found if label not in names]:
            raise ValueError(f"The labels {_short(unknown)} are none of the classes {_short(names)}.")
    else:
        highest = label_numbers(loaded).max(initial=-1)
        if not names and highest >= MOST_CLASSES:
            raise ValueError(
                f"The labels go up to {highest}, expected class numbers from 0 to less than {MOST_CLASSES:,}; name "
                "another column with --label-column."
            )
        names = names or [str(label) for label in range(highest + 1)]
        if highest >= len(names):
            raise ValueError(f"{len(names)} {given} do not fit the labels, which go up to {highest}.")
    if feature == datasets.Value("large_string"):
        # `datasets` 5.1 makes class numbers of these alone.
        loaded = loaded.cast_column("label", datasets.Value("string"))
    return loaded.cast_column("label", datasets.ClassLabel(names=names))


def _compose_labels(images: datasets.Dataset) -> datasets.Dataset:
    """Texts that are labels, with letters and accents in one, as names of classes are."""
    if all(label is None or label == compose(label) for label in images.unique("label")):
        return images
    labels = images.select_columns("label").with_format("arrow")[:]["label"]
    composed = pc.utf8_normalize(labels, form="NFC").combine_chunks()
    return images.remove_columns("label").add_column("label", composed.to_pylist())


def check_labels(images: datasets.Dataset, split: str):
    """Raise a ValueError if an image has no label: the test splits of some data sets keep theirs secret."""
    missing = np.flatnonzero(label_numbers(images) < 0)
    if len(missing):
        others = f", as {len(missing) - 1:,} others of {len(images):,}" if len(missing) > 1 else ""
        raise ValueError(f"Image {missing[0]} of the split {split!r} has no label{others}; choose another split.")


def decode_image(image: dict | Image.Image, index: int) -> Image.Image:
    """The RGB image of an undecoded `datasets` record, or of a PIL image, upright.

    Raises:
        CorruptImageError: with the index, if it cannot be read.
    """
    try:
        return read_record(image)
    except Exception as error:
        path = f", {image['path']}" if isinstance(image, dict) and image.get("path") else ""
        raise CorruptImageError(
            f"Image {index} of the data set cannot be read ({_first_line(error)}{path}). "
            "Repair or remove it, or go on without such images: --skip-corrupt."
        ) from error
