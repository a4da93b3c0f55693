"""Load images for an evaluation, and iterate over batches of their pixel values."""

import argparse
import sys
from collections.abc import Iterator
from itertools import islice

import datasets
import numpy as np
import torch
from tqdm import tqdm

from ..reading import read_ahead, stack_pixels
from ..training.data import (
    EVALUATION_SPLITS,
    HELD_BACK,
    class_names,
    hold_back,
    label_numbers,
    load_images,
    load_splits,
    readable_images,
    split_names,
)
from ..training.preprocessing import CorruptImageError, decode_image, prepare_images
from ..training.text import shortened


def images_to_evaluate(arguments: argparse.Namespace, held_back: bool = False) -> tuple[datasets.Dataset, str]:
    """Load images for an evaluation, and return the images and the name of their split.

    Without `arguments.split`, the split is the first evaluation split that has labels. If no evaluation split has
    labels, the split is the first evaluation split. If the data set has no evaluation split, the split is "train". In
    this last case, `held_back=True` selects only those images of "train" that training commands hold back (see
    `hold_back`).
    """
    splits = [arguments.split]
    is_held_back = False
    if not arguments.split:
        known = split_names(arguments.dataset, arguments.dataset_config)
        splits = [split for split in EVALUATION_SPLITS if split in known]
        is_held_back = held_back and not splits
        splits = splits or ["train"]

    def load(split: str) -> datasets.Dataset:
        return load_images(
            arguments.dataset,
            split,
            name=arguments.dataset_config,
            image_column=arguments.image_column,
            label_column=arguments.label_column,
            class_names=getattr(arguments, "class_names", None),
        )

    parts = [(load(split), split) for split in splits]
    images, split = next((part for part in parts if "label" in part[0].features), parts[0])
    if is_held_back:
        images = hold_back(readable_images(images, arguments.skip_corrupt, split))[1]
        split = HELD_BACK.format(split)
    images = take_first(images, arguments.limit)
    if (arguments.limit or "[" in split) and "label" in images.features:
        names = class_names(images)
        found = [names[label] for label in np.unique(label_numbers(images)) if label >= 0]
        if len(found) < len(names):
            part = f"limit {arguments.limit}" if arguments.limit else split
            note = f"Note: {part} has images of {shortened(found)} of {len(names)} classes, and is no sample of all."
            print(note, file=sys.stderr)
    return images, split


def read_labeled_parts(arguments: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset, str]:
    """Load labeled images for training and for testing. Return both data sets and the name of the test split. Without
    an evaluation split, a part of the training images is held back for testing. `limit` is not applied."""
    if arguments.split == arguments.train_split and not arguments.eval_dataset:
        raise ValueError(f"split and train_split are both {arguments.split!r}; expected different parts.")
    options = {"eval_split": arguments.split, "class_names": None, "streaming": False}
    data = argparse.Namespace(**vars(arguments) | options)
    train, evaluation, test = load_splits(data, learns_labels=True, skip_corrupt=arguments.skip_corrupt)
    test, split = (evaluation, data.evaluated) if test is None else (test, data.tested)
    if class_names(test) is None:
        raise ValueError(f"The split {split!r} has no labels to compare with; name their column: label_column.")
    return train, test, split


def reading_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Select the arguments of `image_batches` from a command's arguments."""
    return {name: getattr(arguments, name) for name in ("batch_size", "num_workers", "skip_corrupt")}


def take_first(table: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    """Return the first `limit` records, or all records if `limit` is `None`."""
    return table.select(range(min(limit, len(table)))) if limit else table


def image_batches(
    image_processor, images: datasets.Dataset, batch_size: int = 64, num_workers: int = 0, skip_corrupt: bool = False
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield batches of pixel values with the indices of their images, and show a progress bar.

    Args:
        image_processor: Image processor of the model.
        images (`datasets.Dataset`): Images in the column `image`, not decoded.
        batch_size (`int`, *optional*, defaults to 64): Number of images in a batch, including unreadable images.
        num_workers (`int`, *optional*, defaults to 0): Number of decoding threads, see `count_threads`.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read.
    """

    def read(index: int) -> torch.Tensor | None:
        try:
            image = decode_image(images[index]["image"], index)
        except CorruptImageError:
            if skip_corrupt:
                return None
            raise
        return prepare_images(image_processor, [image])[0]

    places = tqdm(range(len(images)), desc="evaluate", unit=" images", leave=False, disable=None)
    found = False
    pending = read_ahead(read, places, 2 * batch_size, num_workers)
    while batch := list(islice(pending, batch_size)):
        pixels = {index: future.result() for index, future in batch}
        readable = {index: each for index, each in pixels.items() if each is not None}
        if readable:
            found = True
            yield stack_pixels(list(readable.values())), list(readable)
    if not found:
        raise ValueError(f"None of the {len(images)} images of the data set can be read.")
