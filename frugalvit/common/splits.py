"""Images to train on, to evaluate on and to test on."""

from collections.abc import Callable, Mapping, Sequence

import datasets
import numpy as np
import torch
from accelerate import PartialState

from .choices import NO_EVALUATION
from .classes import match_labels
from .data import load_images, names_in, split_names
from .labels import check_labels, check_same_classes, class_names, label_numbers, say_if_few_classes
from .tables import shortened
from .views import ORDER, random_seed


# Splits that are there to evaluate on, the first choice first.
EVALUATION_SPLITS = ("test", "validation", "valid", "val", "dev")
# Images that are held back to evaluate on, where there is no split for that: a share of them, and the most.
HELD_BACK_SHARE, MOST_HELD_BACK = 0.1, 5_000


def load_splits(
    data, learns_labels: bool = False
) -> tuple[datasets.Dataset | datasets.IterableDataset, datasets.Dataset | None, datasets.Dataset | None]:
    """Load the images to train on, to evaluate on and to test on that `DataArguments` name, see `load_parts`.

    A label of -1, as in ImageNet's test split, is no label. Images to evaluate on count as unlabeled if some lack
    their label (if all do, for a training that learns from labels), which is printed.

    Args:
        data (`DataArguments`): The command's options; `data.evaluated` and `data.tested` are filled in.
        learns_labels (`bool`, *optional*, defaults to `False`): Whether the training learns from the labels. Then all
            training images need one, and all classes that are evaluated need training images. In a stream, this cannot
            be checked.

    Raises:
        ValueError: as `load_images` and `load_parts`; if parts have different classes; or, for a training that learns
            from labels, if some are missing.
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
        check_same_classes(names, evaluation)
        lacking = np.setdiff1d(label_numbers(evaluation), label_numbers(train)) if labeled else ()
        if len(lacking):
            message = (
                f"Among the training images ({data.train_split}) there are none of {len(lacking)} classes that are "
                f"evaluated: {shortened([names[label] for label in lacking])}."
            )
            if learns_labels:
                raise ValueError(
                    f"{message} Are the images sorted by class, so that a slice has only some? Without --eval-split, "
                    "a part of each class is held back where there is no split for evaluation."
                )
            PartialState().print(message)
        return evaluation

    return train, check_part(evaluation, data.evaluated), check_part(test, data.tested)


def load_parts(data, load: Callable, names_of_splits: Callable[[list[str]], list[str]]) -> tuple:
    """Load the images to train on, those to evaluate on and those to test on. The latter two are never streamed, and
    `None` if there are none.

    Without `--eval-split`, images to evaluate on are those of the first of `EVALUATION_SPLITS` that is there, if
    possible one with labels; or all images of an `--eval-dataset` without such a split; or else a part of the training
    images that is held back, see `hold_back`, which is printed. If there is a split for validation beside "test", the
    best epoch is chosen on the former and tested on the latter.

    Args:
        data (`ImageArguments`): The command's options; `data.evaluated` and `data.tested` are filled in.
        load (`Callable`): Returns images, given a data set, a split, and `streaming` as a keyword.
        names_of_splits (`Callable`): Returns the names of the splits of a data set.

    Raises:
        ValueError: as these functions, and if nothing can be held back.
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
        usual = [split for split in usual if split not in names_in(data.train_split)]
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
    """Split images into those to train on and those to evaluate on: a tenth, at most 5,000, with each class's share.
    They are chosen at random, but always the same. The only image of a class stays with training.

    Raises:
        ValueError: if there are too few images.
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


def load_first_labeled(splits: list[str], load: Callable) -> tuple[datasets.Dataset, str]:
    """Load the images of the first split that has labels or masks, or of the first split if none has, and return them
    and the split's name."""
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
    """The split to evaluate on if none is named: the first of `EVALUATION_SPLITS` that the data set has, or else all
    of "train"."""
    return next(iter(evaluation_splits(split_names(dataset, name))), "train")


def evaluation_splits(splits: list[str]) -> list[str]:
    """The splits of a data set that are for evaluation, the first choice first."""
    return [split for split in EVALUATION_SPLITS if split in splits]


def match_classes(parts: Sequence, id2label: Mapping[int, str] | None, learns_labels: bool) -> tuple:
    """Match the labels of images to a classifier's classes.

    If the classifier does not know the labels, and the training does not learn from them, they are left out, which is
    printed.

    Args:
        parts (`tuple`): Images to train on, to evaluate on and to test on, as `load_splits` returns them.
        id2label (`Mapping[int, str]`, *optional*): The classifier's classes; `None` if there is no classifier.
        learns_labels (`bool`): Whether the training learns from the labels.

    Returns:
        `tuple`: The three parts, and the classifier's number of each class, `None` if there are no labels.

    Raises:
        ValueError: if the training learns from the labels, and the classifier does not know all of them.
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
