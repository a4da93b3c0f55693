"""Images to train on, to evaluate on and to test on."""

from collections.abc import Callable, Mapping, Sequence

import datasets
import numpy as np
from accelerate import PartialState

from .choices import NO_EVALUATION
from .data import load_images, split_names
from .labels import check_labels, check_same_classes, class_names, label_numbers, match_labels
from .tables import shortened


# Splits for evaluation, the first choice first.
EVALUATION_SPLITS = ("test", "validation", "valid", "val", "dev")


def load_splits(data, learns_labels: bool = False) -> tuple:
    """Load the images to train on, to evaluate on and to test on that `DataArguments` name, see `load_parts`.

    A label of -1, as in ImageNet's test split, is no label. Images count as unlabeled if all lack their label, or some
    for a training that does not learn from labels. With `learns_labels`, all training images need one, and all classes
    that are evaluated need training images; in a stream, neither is checked.
    """
    # Class names of the training images, for images whose labels are numbers or texts.
    names = None

    def load(dataset: list[str], split: str, streaming: bool = False):
        nonlocal names
        images = load_images(
            dataset,
            split,
            name=data.dataset_config,
            image_column=data.image_column,
            label_column=data.label_column,
            class_names=data.class_names,
            default_names=names,
            streaming=streaming,
        )
        names = names or class_names(images)
        return images

    parts = load_parts(data, load, lambda dataset: split_names(dataset, data.dataset_config))
    if learns_labels and names is None:
        raise ValueError(f"{' '.join(data.dataset)} has no labels to train with; name their column: label_column.")
    if learns_labels and not data.streaming:
        check_labels(parts[0], data.train_split)
    splits = (data.train_split, data.evaluated, data.tested)
    train, *others = (_complete(*each, learns_labels) for each in zip(parts, splits, strict=True))
    for images in others:
        if images is None or "label" not in images.features:
            continue
        check_same_classes(class_names(parts[0]), images)
        if learns_labels and not data.streaming:
            lacking = [names[label] for label in np.setdiff1d(label_numbers(images), label_numbers(train))]
            if lacking:
                raise ValueError(f"{data.train_split} has no images of the evaluated classes {shortened(lacking)}.")
    return train, *others


def _complete(images, split: str | None, learns_labels: bool):
    """Images with all their labels, or without any."""
    if images is None or "label" not in images.features or isinstance(images, datasets.IterableDataset):
        return images
    missing = label_numbers(images) < 0
    if missing.any() and (missing.all() or not learns_labels):
        count = f"{missing.sum():,} of {len(missing):,}"
        PartialState().print(f"{count} images of the split {split!r} have no labels; it counts as unlabeled.")
        return images.remove_columns("label")
    check_labels(images, split)
    return images


def load_parts(data, load: Callable, names_of_splits: Callable[[list[str]], list[str]]) -> tuple:
    """Load the images to train on, to evaluate on and to test on by `load(dataset, split, streaming=…)`; the latter
    two may be `None`.

    Without `eval_split`, the best epoch is chosen on the split for validation and tested on "test", if both have
    labels or none has; or else chosen on one of them, on the first split of an `eval_dataset` or on a part of the
    training images. `data.evaluated` and `data.tested` are filled in.
    """
    train = load(data.dataset, data.train_split, streaming=data.streaming)
    source, data.evaluated, data.tested = data.eval_dataset or data.dataset, data.eval_split, None
    if data.eval_split == NO_EVALUATION:
        data.evaluated = None
        return train, None, None
    if data.eval_split is not None:
        return train, load(source, data.eval_split), None
    splits = names_of_splits(source)
    trained = () if data.eval_dataset else [part.partition("[")[0].strip() for part in data.train_split.split("+")]
    usual = [split for split in evaluation_splits(splits) if split not in trained]
    usual = usual[: 2 if "test" in usual else 1] or (splits[:1] if data.eval_dataset else [])
    loaded = [(split, load(source, split)) for split in usual]
    loaded = [(split, images) for split, images in loaded if _is_labeled(images)] or loaded
    if loaded:
        data.evaluated, evaluation = loaded[-1]
        data.tested, test = loaded[0] if len(loaded) > 1 else (None, None)
        return train, evaluation, test
    if data.streaming:
        choice = ", ".join([*splits, NO_EVALUATION])
        raise ValueError(f"{' '.join(source)} has no split to evaluate on; give eval_split (of {choice}).")
    train, evaluation = hold_back(train)
    data.evaluated = f"{data.train_split}, held back"
    count = f"{len(evaluation):,} of {len(train) + len(evaluation):,} images of {data.train_split}"
    PartialState().print(f"{count} are held back to evaluate on; to choose: eval_split, eval_dataset.")
    return train, evaluation, None


def hold_back(images: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split images into those to train on and those to evaluate on: a tenth, at most 5,000, drawn at random, but
    always the same. Each class has its share where it has several images, and keeps one to train on."""
    count = min(max(len(images) // 10, 1), 5_000)
    labels = label_numbers(images) if "label" in images.features else np.zeros(len(images), dtype=np.int64)
    _, firsts, sizes = np.unique(labels, return_index=True, return_counts=True)
    if len(images) == len(firsts):
        raise ValueError(f"{len(images)} images are too few to evaluate on some: try eval_split {NO_EVALUATION}.")
    if "label" in images.features and labels.min() >= 0 and sizes.min() > 1 and count >= len(sizes):
        parts = images.train_test_split(count, stratify_by_column="label", seed=0)
        return parts["train"], parts["test"]
    others = np.random.default_rng(0).permutation(np.delete(np.arange(len(images)), firsts))[:count]
    return images.select(np.setdiff1d(np.arange(len(images)), others)), images.select(np.sort(others))


def load_first_labeled(splits: list[str], load: Callable) -> tuple[datasets.Dataset, str]:
    """Load the images of the first split with labels or masks, or of the first split, and return its name, too."""
    loaded = [(load(split), split) for split in splits]
    return next((each for each in loaded if _is_labeled(each[0])), loaded[0])


def _is_labeled(images: datasets.Dataset) -> bool:
    return "mask" in images.features or ("label" in images.features and (label_numbers(images) >= 0).any())


def default_split(dataset: str | list[str], name: str | None = None) -> str:
    """Return the first split for evaluation, or else "train"."""
    return next(iter(evaluation_splits(split_names(dataset, name))), "train")


def evaluation_splits(splits: list[str]) -> list[str]:
    """Return the splits of a data set that are for evaluation, the first choice first."""
    return [split for split in EVALUATION_SPLITS if split in splits]


def match_classes(parts: Sequence, id2label: Mapping[int, str] | None, learns_labels: bool) -> tuple:
    """Return the parts, and the classifier's number of each class, `None` without labels or a classifier. Labels that
    it does not know, and the training does not need, are left out."""
    names = next(filter(None, (class_names(part) for part in parts if part is not None)), None)
    if id2label is None or names is None:
        return *parts, None
    try:
        return *parts, match_labels(names, id2label)
    except ValueError as error:
        if learns_labels:
            raise
        PartialState().print(f"{error} They are left out.")
    unlabeled = (part if part is None or class_names(part) is None else part.remove_columns("label") for part in parts)
    return *unlabeled, None
