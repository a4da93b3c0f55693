"""Labels of images: their names, and the classes of a model that they are."""

import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence

import datasets
import numpy as np
import pyarrow.compute as pc
from accelerate import PartialState
from timm.data import ImageNetInfo

from .tables import first_line, shortened


IMAGENET_CLASSES = 1000
# Classes that get their numbers for names.
MOST_CLASSES = 100_000
# Transformers' names for classes that have none, and numbers.
_NO_NAME = re.compile(r"(LABEL_)?\d+", re.IGNORECASE)


def compose(text: str) -> str:
    """Write letters and their accents in one character each: macOS writes them apart in names of files."""
    return unicodedata.normalize("NFC", text)


def class_names(images) -> list[str] | None:
    return list(images.features["label"].names) if "label" in images.features else None


def label_numbers(images: datasets.Dataset) -> np.ndarray:
    """The labels of all images, `(images,)` int64, -1 where there is none."""
    if not len(images):
        return np.zeros(0, dtype=np.int64)
    column = images.select_columns("label").with_format("arrow")[:]["label"]
    return pc.fill_null(column.cast("int64"), -1).to_numpy().copy()


def name_labels(images, names: list[str] | None, default_names: list[str] | None):
    """Return images with their labels, numbers or texts, as a `ClassLabel`; arguments as in `load_images`."""
    feature = images.features["label"]
    own = feature.names if isinstance(feature, datasets.ClassLabel) else None
    names = names or own or default_names
    if isinstance(images, datasets.IterableDataset):
        if names is None:
            raise ValueError("The stream's labels have no names; give them with --class-names.")
    elif "string" in feature.dtype:
        names = names or sorted(label for label in images.unique("label") if label is not None)
    else:
        highest, count = label_numbers(images).max(initial=-1), len(names) if names else MOST_CLASSES
        if highest >= count:
            raise ValueError(f"The labels go up to {highest}, expected less than {count:,} (--class-names).")
        names = names or [str(label) for label in range(highest + 1)]
    if names == own:
        return images
    try:
        return images.cast_column("label", datasets.ClassLabel(names=names))
    except ValueError as error:
        raise ValueError(f"Not all labels are among the classes {shortened(names)} ({first_line(error)}).") from error


def check_labels(images: datasets.Dataset, split: str):
    """Raise a ValueError if an image has no label, as in the test splits of some data sets."""
    missing = np.flatnonzero(label_numbers(images) < 0)
    if len(missing):
        count = f"{len(missing):,} of {len(images):,}"
        raise ValueError(f"{count} images of the split {split!r} have no label, the first is image {missing[0]}.")


def check_same_classes(names: list[str] | None, images):
    """Raise a ValueError if images to evaluate on have other classes than the training images, or in another order."""
    others = None if images is None else class_names(images)
    if names and others and names != others:
        both = f"{shortened(names)} to train and {shortened(others)} to evaluate on"
        raise ValueError(f"There are the classes {both}; expected the same in the same order (--class-names).")


def say_if_few_classes(images: datasets.Dataset, part: str):
    """Print a note if the first images of a data set are of some of its classes alone."""
    if "label" in images.features:
        names = class_names(images)
        found = [names[label] for label in np.unique(label_numbers(images)) if label >= 0]
        if len(found) < len(names):
            note = f"Note: {part} has images of {shortened(found)} of {len(names)} classes, and is no sample of all."
            PartialState().print(note, file=sys.stderr)


def check_single_label(config, use: str):
    """Raise a ValueError if a classifier gives several labels or a number, for messages about a `use` of one label."""
    if config.problem_type not in (None, "single_label_classification"):
        raise ValueError(
            f"{use} is for one label an image; the classifier's problem_type is {config.problem_type!r}, expected "
            "None or 'single_label_classification'."
        )


def match_labels(names: Sequence[str], id2label: Mapping[int, str]) -> list[int]:
    """Return the model's index of each class of a data set; raise a ValueError if it does not know one, or has several
    of that name, as ImageNet's two cranes.

    Classes are matched by name: exactly, or else without regard to case, to marks between words and to the way in
    which Unicode writes accents. Those of ImageNet are matched by WordNet's numbers ("n01440764"), too. Names that are
    numbers of the model's classes mean these. If the model's classes have no names, the data set's are the first ones.
    """
    exact, plain = defaultdict(list), defaultdict(list)
    for index, label in id2label.items():
        exact[compose(label)].append(index)
        plain[_plain(label)].append(index)
    found = {name: exact.get(compose(name)) or plain.get(_plain(name), []) for name in names}
    unknown = [name for name, indices in found.items() if not indices]
    if not unknown:
        for name, indices in found.items():
            if len(indices) > 1:
                numbers = ", ".join(map(str, indices))
                raise ValueError(f"The model has classes {numbers} called {name!r}; name them so (--class-names).")
        return [found[name][0] for name in names]
    if len(id2label) == IMAGENET_CLASSES:
        synsets = {synset: index for index, synset in enumerate(ImageNetInfo().label_names())}
        if all(name in synsets for name in names):
            return [synsets[name] for name in names]
    if all(name.isdecimal() and int(name) < len(id2label) for name in names):
        return [int(name) for name in names]
    if len(names) <= len(id2label) and all(_NO_NAME.fullmatch(label) for label in id2label.values()):
        return list(range(len(names)))
    own = shortened(list(id2label.values()))
    raise ValueError(f"The model does not know the classes {shortened(unknown)}, its own are {own} (--class-names).")


def _plain(name: str) -> str:
    return compose(re.sub(r"[\s_-]+", " ", name).strip().casefold())
