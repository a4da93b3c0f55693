"""Images to evaluate on: the arguments that name them, and batches of pixel values."""

import argparse
import copy
from collections.abc import Iterator
from itertools import islice

import datasets
import torch
from tqdm import tqdm

from ..common.data import load_images, split_names
from ..common.decoding import CorruptImageError, decode_image
from ..common.labels import check_labels, class_names, say_if_few_classes
from ..common.reading import Reader, read_ahead
from ..common.splits import evaluation_splits, hold_back, load_first_labeled
from ..common.tables import shortened


def images_to_evaluate(
    arguments: argparse.Namespace, default_names: list[str] | None = None
) -> tuple[datasets.Dataset, str]:
    """Load the images that the arguments name, and their split; `default_names` as in `load_images`."""
    splits = [arguments.split]
    if not arguments.split:
        splits = evaluation_splits(split_names(arguments.dataset, arguments.dataset_config)) or ["train"]

    def load(split: str) -> datasets.Dataset:
        return load_images(
            arguments.dataset,
            split,
            name=arguments.dataset_config,
            image_column=arguments.image_column,
            label_column=arguments.label_column,
            class_names=getattr(arguments, "class_names", None),
            default_names=default_names,
        )

    images, split = load_first_labeled(splits, load)
    images = take_first(images, arguments.limit)
    if arguments.limit or "[" in split:
        say_if_few_classes(images, f"--limit {arguments.limit}" if arguments.limit else split)
    return images, split


def read_evaluated(
    arguments: argparse.Namespace, default_names: list[str] | None = None
) -> tuple[datasets.Dataset, str]:
    """`images_to_evaluate` of --eval-dataset if given, else of --dataset; without --limit."""
    evaluated = copy.copy(arguments)
    evaluated.dataset, evaluated.limit = arguments.eval_dataset or arguments.dataset, None
    return images_to_evaluate(evaluated, default_names)


def read_labeled_parts(arguments: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset, str]:
    """Load the images to learn from, the test images, and the name of their split; without --limit.

    Without other images, a tenth of the images to learn from is held back to test on.

    Raises:
        ValueError: if labels are missing, or both have not the same classes.
    """
    train = load_images(
        arguments.dataset,
        arguments.train_split,
        name=arguments.dataset_config,
        image_column=arguments.image_column,
        label_column=arguments.label_column,
    )
    names = class_names(train)
    test, split = read_evaluated(arguments, names)
    if names is None or class_names(test) is None:
        raise ValueError(f"{arguments.train_split!r} or {split!r} has no labels; name their column: --label-column.")
    if not arguments.eval_dataset and split == arguments.train_split:
        train, test = hold_back(train)
        split = f"{split} ({len(test):,} images held back)"
    if class_names(test) != names:
        raise ValueError(
            f"The images to learn from have the classes {shortened(names)}, the test images "
            f"{shortened(class_names(test))}; expected the same."
        )
    check_labels(train, arguments.train_split)
    check_labels(test, split)
    return train, test, split


def take_first(table: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    """The first `limit` records, or all where there are fewer or no limit is given."""
    return table.select(range(min(limit, len(table)))) if limit else table


def image_batches(
    reader: Reader, images: datasets.Dataset, batch_size: int, num_workers: int = 0, skip_corrupt: bool = False
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield batches of pixel values of the images that can be read, with their indices, and show a progress bar.

    Args:
        reader (`Reader`): Turns `PIL.Image` into pixel values.
        images (`datasets.Dataset`): Images, as `load_images` returns them.
        batch_size (`int`): Images at a time.
        num_workers (`int`, *optional*, defaults to 0): Threads that decode, see `count_threads`.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read.

    Raises:
        CorruptImageError: for the first image that cannot be read, unless they are left out.
        ValueError: if none can be read.
    """

    def read(index: int) -> torch.Tensor | None:
        try:
            return reader.pixels(decode_image(images[index]["image"], index, reader.at_least))
        except CorruptImageError:
            if skip_corrupt:
                return None
            raise

    found, pending = False, read_ahead(read, range(len(images)), 2 * batch_size, num_workers)
    with tqdm(total=len(images), desc="evaluate", unit=" images", leave=False, disable=None) as progress:
        while batch := list(islice(pending, batch_size)):
            pixels = {index: future.result() for index, future in batch}
            readable = {index: each for index, each in pixels.items() if each is not None}
            if readable:
                found = True
                yield reader.batch(list(readable.values())), list(readable)
            progress.update(len(batch))
    if not found:
        raise ValueError(f"None of the {len(images)} images of the data set can be read.")
