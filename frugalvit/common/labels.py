"""Labels of images: numbers and names of classes."""

import sys

import datasets
import numpy as np
import pyarrow.compute as pc
from accelerate import PartialState

from .classes import compose
from .columns import holds
from .tables import shortened


# Classes that get their numbers for names.
MOST_CLASSES = 100_000


def class_names(images) -> list[str] | None:
    """Names of the labels, or None if there are no labels."""
    return list(images.features["label"].names) if "label" in images.features else None


def label_numbers(images: datasets.Dataset) -> np.ndarray:
    """The labels of all images, `(images,)` int64, -1 where there is none."""
    if not len(images):
        return np.zeros(0, dtype=np.int64)
    column = images.select_columns("label").with_format("arrow")[:]["label"]
    return pc.fill_null(column, -1).to_numpy().astype(np.int64)


def name_labels(loaded, names: list[str] | None, default_names: list[str] | None):
    """Return a data set with its labels as a `ClassLabel`."""
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
    elif holds(feature, "string"):
        loaded = _compose_labels(loaded)
        found = sorted(filter(None, loaded.unique("label")))
        names = names or found
        if unknown := [label for label in found if label not in names]:
            raise ValueError(f"The labels {shortened(unknown)} are none of the classes {shortened(names)}.")
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
    """Compose letters and accents in texts that are labels, as in names of classes."""
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


def say_if_few_classes(images: datasets.Dataset, part: str):
    """Print a note if images are the first of a data set that is sorted by class: numbers on them are about few
    classes alone."""
    if "label" not in images.features or not len(images):
        return
    labels, names = label_numbers(images), class_names(images)
    known = np.unique(labels[labels >= 0])
    if len(labels) > 1 and len(known) < len(names) and (np.diff(labels) >= 0).all():
        PartialState().print(
            f"Note: {part} is the beginning of images that are sorted by class, {len(labels):,} images of "
            f"{shortened([names[label] for label in known])} of {len(names)} classes, and no sample of all.",
            file=sys.stderr,
        )


def check_same_classes(names: list[str] | None, images):
    """Raise a ValueError if images to evaluate or test on have other classes than `names`, those of the training
    images, or in another order."""
    others = None if images is None else class_names(images)
    if names and others and names != others:
        raise ValueError(
            f"The training images have the classes {shortened(names)}, the evaluation images {shortened(others)}; "
            "expected the same in the same order. Name them with --class-names if the data sets do not."
        )
