"""Load images and labels for training, evaluation and testing, and match their classes with a model's classes.

`load_splits` chooses the splits of a data set. `load_images` loads a split from a folder, an archive, tables or the
hub, as a `datasets.Dataset` with the columns `image` and `label`.
"""

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
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from .choices import NO_EVALUATION, SUBSET
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
# Errors of `datasets` for sources that do not exist or cannot be read. `ReadInstruction` raises an AssertionError.
SOURCE_ERRORS = (datasets.exceptions.DatasetsError, OSError, ValueError, AssertionError)
# Names of splits for evaluation, in order of preference.
EVALUATION_SPLITS = ("test", "validation", "valid", "val", "dev")
# The model card's name for the evaluation images that `hold_back` takes from a split.
HELD_BACK = "{}, held back"
IMAGENET_CLASSES = 1000
# Pattern of class names that are placeholders: numbers, and Transformers' `LABEL_0`, `LABEL_1`, …
_NO_NAME = re.compile(r"(LABEL_)?\d+", re.IGNORECASE)


def load_splits(
    data,
    learns_labels: bool = False,
    skip_corrupt: bool = False,
    load: Callable | None = None,
    names_of_splits: Callable | None = None,
) -> tuple:
    """Load the images for training, evaluation and test. The images for evaluation and for test may be `None`.

    If `data.eval_split` names a split, the best epoch is chosen on this split, and there is no test.

    If `data.eval_split` is None, the best epoch is chosen on the validation split, and the model is tested on the test
    split. If only one of these two splits exists, or if only one of them has labels, the best epoch is chosen on this
    split, and there is no test.

    If neither of the two splits exists, there is also no test. With `data.eval_dataset`, the best epoch is chosen on
    the first split of `data.eval_dataset`. Without `data.eval_dataset`, it is chosen on a part of the training images
    (see `hold_back`).

    Args:
        data (`DataArguments`): The arguments. `data.evaluated` and `data.tested` are set to the names of the chosen
            splits.
        learns_labels (`bool`): Require labels as in `check_labeled_parts`. Otherwise, a split with missing labels
            loses all labels. Labels of a stream are not checked.
        skip_corrupt (`bool`): See `readable_images`.
        load (`Callable`, *optional*): Loads a split. The call is `load(dataset, split)`, with `streaming` for training
            images and, if these have labels, with `default_names` for other images. Default: `load_images`.
        names_of_splits (`Callable`, *optional*): Returns the split names of a data set. Default: `split_names`.
    """
    load = load or functools.partial(
        load_images,
        name=data.dataset_config,
        image_column=data.image_column,
        label_column=data.label_column,
        class_names=data.class_names,
    )
    train = load(data.dataset, data.train_split, streaming=data.streaming)
    train = readable_images(train, skip_corrupt, data.train_split)
    source = data.eval_dataset or data.dataset
    chosen = [] if data.eval_split in (None, NO_EVALUATION) else [data.eval_split]
    splits = []
    if data.eval_split is None:
        splits = (names_of_splits or split_names)(source, data.dataset_config)
        trained = () if data.eval_dataset else [part.partition("[")[0].strip() for part in data.train_split.split("+")]
        usual = [split for split in EVALUATION_SPLITS if split in splits and split not in trained]
        chosen = usual[: 2 if "test" in usual else 1] or (splits[:1] if data.eval_dataset else [])
    # A split without class names of its own has the class names of the training images.
    names = {"default_names": class_names(train)} if "label" in train.features else {}
    loaded = {split: readable_images(load(source, split, **names), skip_corrupt, split) for split in chosen}
    loaded = {split: part for split, part in loaded.items() if {"label", "mask"} & {*part.features}} or loaded
    *tested, data.evaluated = loaded or [None]
    data.tested = tested[0] if tested else None
    evaluation = loaded.get(data.evaluated)
    if data.eval_split is None and not loaded:
        if data.streaming:
            choice = ", ".join([*splits, NO_EVALUATION])
            raise ValueError(f"{' '.join(source)} has no split to evaluate on; give eval_split (of {choice}).")
        train, evaluation = hold_back(train)
        data.evaluated = HELD_BACK.format(data.train_split)
        count = f"{len(evaluation):,} of {len(train) + len(evaluation):,} images of {data.train_split}"
        PartialState().print(f"{count} are held back to evaluate on; to choose: eval_split, eval_dataset.")
    parts = [train, evaluation, loaded.get(data.tested)]
    if learns_labels:
        check_labeled_parts(parts, (data.train_split, data.evaluated, data.tested), data.dataset)
    for number, images in enumerate(parts):
        has_labels = isinstance(images, datasets.Dataset) and "label" in images.features
        # Missing labels are None or -1.
        if has_labels and not {None, -1}.isdisjoint(images.select_columns("label")[:]["label"]):
            parts[number] = images.remove_columns("label")
    return tuple(parts)


def hold_back(images) -> tuple:
    """Split images into a part to train on and a smaller part to evaluate on. The smaller part is a tenth of the
    images, but at most 5,000 images.

    The images to evaluate on are drawn with a fixed seed, so that a data set is always split in the same way. With a
    labeled `datasets.Dataset`, the split is stratified if all classes are large enough, and each class keeps at least
    one image to train on.
    """
    count = min(max(len(images) // 10, 1), 5_000)
    # To read the labels of a PyTorch dataset, its images would have to be read, too.
    has_labels = isinstance(images, datasets.Dataset) and "label" in images.features
    labels = label_numbers(images) if has_labels else np.zeros(len(images), dtype=np.int64)
    _, firsts, sizes = np.unique(labels, return_index=True, return_counts=True)
    if len(images) == len(firsts):
        raise ValueError(f"{len(images)} images are too few to evaluate on some: try eval_split {NO_EVALUATION}.")
    if has_labels and labels.min() >= 0 and sizes.min() > 1 and count >= len(sizes):
        parts = images.train_test_split(count, stratify_by_column="label", seed=0)
        return parts["train"], parts["test"]
    others = np.random.default_rng(0).permutation(np.delete(np.arange(len(images)), firsts))[:count]
    return images.select(np.setdiff1d(np.arange(len(images)), others)), images.select(np.sort(others))


def default_split(dataset: str | list[str]) -> str:
    """Return the first of `EVALUATION_SPLITS` that a data set has, or "train"."""
    splits = split_names(dataset)
    return next((split for split in EVALUATION_SPLITS if split in splits), "train")


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
    table = load_table(dataset, split, name, streaming)
    source = repr(dataset) if isinstance(dataset, str | list) else "The data set"
    is_stream = isinstance(table, datasets.IterableDataset)
    features = table.features
    image = find_image_column(features, image_column, source)
    classes = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if label_column not in (None, *features):
        raise ValueError(f"{source} has no column {label_column!r} (--label-column); it has {', '.join(features)}.")
    if label_column is None and len(classes) > 1:
        raise ValueError(f"{source} has the label columns {', '.join(classes)}; give --label-column.")
    label = label_column or next(iter(classes), None)
    feature = features.get(label or "label")
    dtype = feature.dtype if isinstance(feature, datasets.Value | datasets.ClassLabel) else ""
    is_text = "string" in dtype
    is_label = is_text or dtype == "bool" or "int" in dtype
    if label and not is_label:
        raise ValueError(f"The column {label!r} of {source} holds {feature}, expected class numbers.")
    # The texts in a stream's column are not known in advance. So a stream's texts are only used as labels if
    # `class_names` is given.
    if is_label and (class_names or not is_text or not is_stream):
        label = label or "label"
    columns = {image: "image"} | ({label: "label"} if label else {})
    # The column is cast before it is renamed: renaming a column of unknown type would read rows of a stream.
    table = table.cast_column(image, datasets.Image(decode=False)).select_columns(list(columns))
    table = table.rename_columns({old: new for old, new in columns.items() if old != new})
    if not label:
        return table
    own = features[label].names if label in classes else None
    names = class_names or own or default_names
    if is_stream and names is None:
        raise ValueError("The stream's labels have no names; give them with class_names.")
    if not is_stream and is_text:
        names = names or sorted(text for text in table.unique("label") if text is not None)
    elif not is_stream:
        given = table.select_columns("label")[:]["label"]
        highest = max((number for number in given if number is not None), default=-1)
        if highest < 0:
            # In splits without labels, such as ImageNet's test split, all labels are -1.
            return table.remove_columns("label")
        count = len(names) if names else MOST_CLASSES
        if highest >= count:
            raise ValueError(f"The labels go up to {highest}, expected less than {count:,} (class_names).")
        names = names or [str(number) for number in range(highest + 1)]
    if names == own:
        return table
    try:
        return table.cast_column("label", datasets.ClassLabel(names=names))
    except ValueError as error:
        raise ValueError(f"Not all labels are among the classes {shortened(names)} ({first_line(error)}).") from error


def find_image_column(features: datasets.Features, given: str | None, source: str) -> str:
    """Return the name of the only column of images or, if there is none, of the only column of bytes. If `given` names
    a column, check that the column holds images, bytes or paths. `source` describes the data set in messages."""
    found = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    found = found or [column for column, feature in features.items() if "binary" in getattr(feature, "dtype", "")]
    if given is None and len(found) != 1:
        count = f"{len(found) or 'no'} image columns among {', '.join(features)}"
        raise ValueError(f"{source} has {count}; give --image-column.")
    if given not in (None, *features):
        raise ValueError(f"{source} has no column {given!r} (--image-column); it has {', '.join(features)}.")
    column = given or found[0]
    dtype = getattr(features[column], "dtype", "")
    if column not in found and "binary" not in dtype and "string" not in dtype:
        raise ValueError(f"The column {column!r} of {source} holds {features[column]}, expected images.")
    return column


def load_table(
    dataset: str | list[str] | datasets.Dataset | datasets.IterableDataset,
    split: str = "train",
    name: str | None = None,
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Load a data set with all its columns. Images are not decoded. See `load_images` for arguments and errors."""
    if isinstance(dataset, datasets.Dataset):
        if dataset.format["type"] == "custom":
            raise ValueError(
                "The data set has a transform (with_transform or set_transform), which training would replace; "
                "expected images without one: apply it by `map`, or call reset_format()."
            )
        if hidden := sorted({*dataset.column_names} - {*dataset.format["columns"]}):
            raise ValueError(
                f"The format of the data set leaves out {', '.join(hidden)}; expected all columns: call "
                "reset_format()."
            )
    if isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        table = dataset.with_format(None)
    else:
        try:
            source = find_source(dataset, name)
            if "parts" not in source:
                table = datasets.load_dataset(**source, split=split, streaming=streaming)
            else:
                parts = source["parts"]
                sizes = {part: len(files) for part, files in parts.items()}
                slices = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
                found = [file for each in slices for file in parts[each.splitname][each.from_ : each.to]]
                labels = [label for label, _ in found if label]
                if not found or 0 < len(labels) < len(found):
                    raise ValueError("only some of these parts have classes" if labels else "there are no images")
                # Class names are collected from all splits, because one split may lack a class.
                names = sorted({label for files in parts.values() for label, _ in files if label})
                numbers = {name: number for number, name in enumerate(names)}
                columns = {
                    "image": [{"bytes": None, "path": str(path)} for _, path in found],
                    "label": [numbers.get(label) for label, _ in found],
                }
                features = {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=names)}
                table = datasets.Dataset.from_dict(columns, datasets.Features(features))
                table = table if labels else table.remove_columns("label")
                table = table.to_iterable_dataset(min(len(table), 1_024)) if streaming else table
        except SOURCE_ERRORS as error:
            raise source_error(error, dataset, split) from error
    if table.features is None:
        try:
            table = table._resolve_features()
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"The columns of the stream are not known ({first_line(error)}); give them where it is mapped: "
                "stream.map(function, features=stream.features)."
            ) from error
    for column, feature in table.features.items():
        # In parquet files that other libraries wrote, an image is a struct with the fields `bytes` and `path`.
        is_record = isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}
        if is_record or isinstance(feature, datasets.Image):
            table = table.cast_column(column, datasets.Image(decode=False))
    return table


def split_names(dataset: str | list[str], name: str | None = None) -> list[str]:
    """Return the names of the splits of a data set. See `load_images` for arguments and errors."""
    try:
        source = find_source(dataset, name)
        for parts in ("parts", "data_files"):
            if parts in source:
                return list(source[parts])
        return datasets.get_dataset_split_names(source["path"], source["name"], revision=source.get("revision"))
    except SOURCE_ERRORS as error:
        raise source_error(error, dataset) from error


def source_error(error: Exception, dataset: str | list[str], split: str | None = None) -> ValueError:
    """Convert one of `SOURCE_ERRORS` to an error whose message is one line and contains the data set's name."""
    given = dataset if isinstance(dataset, str) else dataset[0]
    part = f"the split {split!r} of " if split else ""
    hint = f"; {EXPECTED}" if isinstance(error, datasets.exceptions.DatasetNotFoundError | OSError) else ""
    wraps = isinstance(error, datasets.exceptions.DatasetGenerationError)
    cause = (wraps and error.__cause__) or error
    return ValueError(f"Cannot load {part}{given!r}: {first_line(cause)}{hint}")


def find_source(dataset: str | list[str], name: str | None = None) -> dict:
    """Return the source of a data set. For a folder of images, the source is `{"parts": scan_folder(…)}`. For other
    data sets, it is a dict of arguments for `datasets.load_dataset`. If a folder has no image files, the source is
    either its tables and tar archives, or the content of its only zip file. See `load_images` for arguments."""
    paths = [dataset] if isinstance(dataset, str) else list(dataset)
    path = shipped_images("cifar10") if paths == [SUBSET] else Path(paths[0])
    if not path.is_dir() and all(file.lower().endswith(".parquet") for file in paths):
        if missing := [file for file in paths if not os.path.isfile(file)]:
            raise ValueError(f"there is no file {missing[0]!r}; expected parquet files")
        _check_class_names(paths)
        return {"path": "parquet", "data_files": {"train": [glob.escape(file) for file in paths]}}
    if len(paths) > 1:
        raise ValueError(f"several data sets, {', '.join(paths)}; expected one, or several parquet files")
    if path.suffix.lower() == ".zip" and path.is_file():
        path = unpack(path)
    if not path.is_dir():
        hub_id, revision = split_revision(paths[0])
        if path.exists() or paths[0].startswith((".", "~", os.sep)) or hub_id.count("/") > 1:
            raise ValueError(f"it is no data set; {EXPECTED}")
        return {"path": hub_id, "name": name, **revision}
    files = list(files_within(path, {*IMAGE_ENDINGS, *UNREAD_ENDINGS, ".parquet", ".tar", ".csv", ".jsonl"}))
    images = [file for file in files if file.suffix.lower() in IMAGE_ENDINGS]
    metadata = [file for file in files if file.name in METADATA_FILES]
    tables = [file for file in files if file.suffix.lower() == ".parquet" and file not in metadata]
    for file in metadata:
        # `datasets` reads labels such as "01" as numbers, so it would merge the classes "01" and "1".
        text = read_text(file) if file.suffix != ".parquet" else ""
        if file.suffix == ".csv" and (found := re.search(r"(?:^|,)(0\d+)(?=,|\s*$)", text, re.MULTILINE)):
            raise ValueError(f"{file} has {found[1]!r}, which is read as a number; write a letter before it")
    archives = sorted(path.glob("*.zip"))
    if unread := [file for file in files if file.suffix.lower() in UNREAD_ENDINGS]:
        leave_out(unread, NOT_READ)
    if images:
        if tables or archives:
            leave_out([*tables, *archives], "images come first")
        # The name of the folder itself is not the name of a split.
        parts = {"train" if file.parent == path else SPLITS.get(file.parent.name.lower()): file for file in metadata}
        if parts and all(file.parent == path or file.parent.name.lower() in SPLITS for file in metadata):
            return {"path": "imagefolder", "data_files": {part: [glob.escape(str(parts[part]))] for part in parts}}
        return {"parts": scan_folder(path, images)}
    if len(archives) == 1 and not tables:
        return find_source(str(archives[0]), name)
    if not tables and not any(file.suffix == ".tar" for file in files):
        raise ValueError(f"it has no images, and {len(archives)} zip files; {EXPECTED}")
    if glob.has_magic(str(path.resolve())):
        raise ValueError("its path has one of *?[, which datasets takes for a pattern; rename it")
    _check_class_names(tables)
    # The path is absolute, because `datasets` would read a relative path such as "csv" as the name of a format.
    return {"path": str(path.resolve()), "name": name}


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


def check_labeled_parts(parts: Sequence, splits: Sequence[str | None], dataset: list[str]):
    """Raise a ValueError if training images have no labels or fewer than two classes, if other images have other
    classes, or if an image has no label. Labels of a stream are not checked.

    Args:
        parts (sequence): The images for training and, or `None`, for evaluation and test.
        splits (sequence of `str`): Names of the splits of `parts`, for messages.
        dataset (`list[str]`): The training data set, for messages.
    """
    names = class_names(parts[0])
    if names is None:
        raise ValueError(f"{' '.join(dataset)} has no labels to train with; name their column: label_column.")
    check_classes(names)
    for images, split in zip(parts, splits, strict=True):
        check_same_classes(names, images)
        check_labels(images, split)


def check_labels(images, split: str):
    """Raise a ValueError if an image of a `datasets.Dataset` with labels has no label. `split` is the name of the
    images in the message."""
    if not isinstance(images, datasets.Dataset) or "label" not in images.features:
        return
    missing = np.flatnonzero(label_numbers(images) < 0)
    if len(missing):
        count = f"{len(missing):,} of {len(images):,}"
        raise ValueError(f"{count} images of the split {split!r} have no label, the first is image {missing[0]}.")


def check_classes(names: Sequence[str]):
    """Raise a ValueError if there are fewer than two classes. With a single class, every prediction would be right."""
    if len(names) < 2:
        raise ValueError(
            f"There is one class, {shortened(list(names))}, expected two or more: with one, every answer is right. "
            "A folder of images has a folder for each class."
        )


def check_same_classes(names: list[str] | None, images):
    """Raise a ValueError if training images and evaluation images have different classes or a different order of
    classes."""
    others = None if images is None else class_names(images)
    if names and others and names != others:
        both = f"{shortened(names)} to train and {shortened(others)} to evaluate on"
        raise ValueError(f"There are the classes {both}; expected the same in the same order (class_names).")


def match_classes(parts: Sequence, id2label: Mapping[int, str] | None, learns_labels: bool) -> tuple:
    """Return each data set of `parts`, followed by a list with the classifier's index of each class (see
    `match_labels`).

    The list is `None` if labels need no conversion, if there are no labels, or if there is no classifier. If the
    classes do not match the classifier's classes, labels are removed from the data sets. With `learns_labels`, a
    ValueError is raised instead.
    """
    names = next(filter(None, (class_names(part) for part in parts if part is not None)), None)
    if id2label is None or names in (None, list(id2label.values())):
        return *parts, None
    try:
        return *parts, match_labels(names, id2label)
    except ValueError as error:
        if learns_labels:
            raise
        PartialState().print(f"{error} They are left out.")
    unlabeled = (part if part is None or class_names(part) is None else part.remove_columns("label") for part in parts)
    return *unlabeled, None


def check_single_label(config, use: str):
    """Raise a ValueError if a classifier's `problem_type` is multi-label classification or regression. The message
    starts with `use`, the name of the feature that needs single labels."""
    if config.problem_type not in (None, "single_label_classification"):
        raise ValueError(
            f"{use} is for one label an image; the classifier's problem_type is {config.problem_type!r}, expected "
            "None or 'single_label_classification'."
        )


def match_labels(names: Sequence[str], id2label: Mapping[int, str]) -> list[int]:
    """Return the model's index of each class of a data set.

    Classes are matched by name. Without an exact match, the comparison ignores case, word separators and Unicode forms
    of accents. ImageNet's classes are also matched by WordNet id, such as "n01440764". Names that are numbers are
    matched with the model's indices. If the model's classes have no names, the model's first classes are used in
    order.

    Args:
        names (sequence of `str`): The data set's classes.
        id2label (`Mapping[int, str]`): The model's classes.

    Raises:
        ValueError: If the model lacks a class, or if a name matches several classes, such as ImageNet's two "crane".
    """
    exact = defaultdict(list)
    plain = defaultdict(list)
    for index, label in id2label.items():
        exact[label].append(index)
        plain[_plain(label)].append(index)
    found = {name: exact.get(name) or plain.get(_plain(name), []) for name in names}
    unknown = [name for name, indices in found.items() if not indices]
    if not unknown:
        for name, indices in found.items():
            if len(indices) > 1:
                numbers = ", ".join(map(str, indices))
                raise ValueError(f"The model has classes {numbers} called {name!r}; name them so (class_names).")
        return _distinct(names, [found[name][0] for name in names], id2label)
    if len(id2label) == IMAGENET_CLASSES:
        from timm.data import ImageNetInfo

        synsets = {synset: index for index, synset in enumerate(ImageNetInfo().label_names())}
        if all(name in synsets for name in names):
            return [synsets[name] for name in names]
    if all(name.isdecimal() and int(name) < len(id2label) for name in names):
        return _distinct(names, [int(name) for name in names], id2label)
    if len(names) <= len(id2label) and all(_NO_NAME.fullmatch(label) for label in id2label.values()):
        return list(range(len(names)))
    own = shortened(list(id2label.values()))
    raise ValueError(f"The model does not know the classes {shortened(unknown)}, its own are {own} (class_names).")


def _distinct(names: Sequence[str], indices: list[int], id2label: Mapping[int, str]) -> list[int]:
    """Return `indices`. Raise a ValueError if two names, such as "Cat" and "cat", match one class of the model."""
    for index, count in Counter(indices).most_common(1):
        if count > 1:
            twice = " and ".join(repr(name) for name, other in zip(names, indices, strict=True) if other == index)
            raise ValueError(f"The classes {twice} are both the model's {id2label[index]!r} (class_names).")
    return indices


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", re.sub(r"[\s_-]+", " ", name).strip().casefold())
