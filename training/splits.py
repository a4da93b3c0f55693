"""Choose splits for training, evaluation and testing, and match the classes of data sets with a model's classes."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import datasets
import numpy as np
from accelerate import PartialState
from timm.data import ImageNetInfo

from .choices import NO_EVALUATION
from .data import class_names, label_numbers, load_images, readable_images, split_names
from .text import shortened


# Names of splits for evaluation, in order of preference.
EVALUATION_SPLITS = ("test", "validation", "valid", "val", "dev")
# The model card's name for the evaluation images that `hold_back` takes from a split.
HELD_BACK = "{}, held back"
IMAGENET_CLASSES = 1000
# Pattern of class names that are placeholders: numbers, and Transformers' `LABEL_0`, `LABEL_1`, …
_NO_NAME = re.compile(r"(LABEL_)?\d+", re.IGNORECASE)


def load_splits(data, learns_labels: bool = False, skip_corrupt: bool = False) -> tuple:
    """Load the images for training, evaluation and test that `data` (`DataArguments`) describes, see `load_parts`.

    With `learns_labels`, at least two classes and a label for each image are required. Otherwise, a split with missing
    labels loses all labels. Labels of a stream are not checked. See `readable_images` for `skip_corrupt`.
    """
    # Class names of the training images. A split without class names of its own uses these class names.
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
        return readable_images(images, skip_corrupt, split)

    parts = load_parts(data, load, lambda dataset: split_names(dataset, data.dataset_config))
    if learns_labels and class_names(parts[0]) is None:
        raise ValueError(f"{' '.join(data.dataset)} has no labels to train with; name their column: label_column.")
    if learns_labels:
        check_classes(class_names(parts[0]))
    checked = []
    for images, split in zip(parts, (data.train_split, data.evaluated, data.tested), strict=True):
        check_same_classes(class_names(parts[0]), images)
        if isinstance(images, datasets.Dataset) and "label" in images.features:
            if learns_labels:
                check_labels(images, split)
            elif (label_numbers(images) < 0).any():
                images = images.remove_columns("label")
        checked.append(images)
    return tuple(checked)


def load_parts(data, load: Callable, names_of_splits: Callable[[list[str]], list[str]]) -> tuple:
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
        load (`Callable`): Loads a split. The call is `load(dataset, split, streaming=…)`.
        names_of_splits (`Callable`): Returns the split names of a data set.
    """
    train = load(data.dataset, data.train_split, streaming=data.streaming)
    source = data.eval_dataset or data.dataset
    data.evaluated = None if data.eval_split == NO_EVALUATION else data.eval_split
    data.tested = None
    if data.eval_split is not None:
        return train, data.evaluated and load(source, data.eval_split), None
    splits = names_of_splits(source)
    trained = () if data.eval_dataset else [part.partition("[")[0].strip() for part in data.train_split.split("+")]
    usual = [split for split in EVALUATION_SPLITS if split in splits and split not in trained]
    usual = usual[: 2 if "test" in usual else 1] or (splits[:1] if data.eval_dataset else [])
    loaded = {split: load(source, split) for split in usual}
    labeled = {split: images for split, images in loaded.items() if {"label", "mask"} & {*images.features}}
    loaded = labeled or loaded
    if loaded:
        *tested, data.evaluated = loaded
        data.tested = tested[0] if tested else None
        return train, loaded[data.evaluated], loaded.get(data.tested)
    if data.streaming:
        choice = ", ".join([*splits, NO_EVALUATION])
        raise ValueError(f"{' '.join(source)} has no split to evaluate on; give eval_split (of {choice}).")
    train, evaluation = hold_back(train)
    data.evaluated = HELD_BACK.format(data.train_split)
    count = f"{len(evaluation):,} of {len(train) + len(evaluation):,} images of {data.train_split}"
    PartialState().print(f"{count} are held back to evaluate on; to choose: eval_split, eval_dataset.")
    return train, evaluation, None


def hold_back(images: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split images into a part to train on and a smaller part to evaluate on. The smaller part is a tenth of the
    images, but at most 5,000 images.

    The images to evaluate on are drawn with a fixed seed, so that a data set is always split in the same way. The
    split is stratified if all classes are large enough. Each class keeps at least one image to train on.
    """
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


def default_split(dataset: str | list[str], name: str | None = None) -> str:
    """Return the first of `EVALUATION_SPLITS` that a data set has, or "train"."""
    splits = split_names(dataset, name)
    return next((split for split in EVALUATION_SPLITS if split in splits), "train")


def check_labels(images: datasets.Dataset, split: str):
    """Raise a ValueError if an image has no label."""
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
