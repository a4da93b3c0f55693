"""Images to evaluate on: the arguments that name them, and batches of pixel values."""

import argparse
from collections.abc import Iterator

import datasets
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..common.data import load_images, split_names
from ..common.decoding import CorruptImageError, decode_image
from ..common.interruptions import leave_interruptions_to_the_main_process
from ..common.labels import say_if_few_classes
from ..common.splits import evaluation_splits, load_first_labeled
from ..common.views import prepare_images


def images_to_evaluate(
    arguments: argparse.Namespace, default_names: list[str] | None = None
) -> tuple[datasets.Dataset, str]:
    """The images that the arguments name, and their split; `default_names` as in `load_images`."""
    options = {
        "name": arguments.dataset_config,
        "image_column": arguments.image_column,
        "label_column": arguments.label_column,
        "class_names": getattr(arguments, "class_names", None),
        "default_names": default_names,
    }
    splits = (
        [arguments.split] if arguments.split else evaluation_splits(split_names(arguments.dataset, options["name"]))
    )
    images, split = load_first_labeled(
        splits or ["train"], lambda split: load_images(arguments.dataset, split, **options)
    )
    images = take_first(images, arguments.limit)
    if arguments.limit or "[" in split:
        say_if_few_classes(images, f"--limit {arguments.limit}" if arguments.limit else split)
    return images, split


def take_first(table: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    """The first `limit` records, or all where there are fewer or no limit is given."""
    return table.select(range(min(limit, len(table)))) if limit else table


def image_batches(
    image_processor, images: datasets.Dataset, batch_size: int, num_workers: int = 0, skip_corrupt: bool = False
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Pixel values of the images that can be read and their indices, with a progress bar.

    Args:
        image_processor: What turns `PIL.Image` into pixel values.
        images (`datasets.Dataset`): What `load_images` returns.
        batch_size (`int`): Images at a time.
        num_workers (`int`, *optional*, defaults to 0): Processes that decode.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read.

    Raises:
        CorruptImageError: for the first image that cannot be read, if they are not to be left out.
        ValueError: if none can be read.
    """
    collate = _Collate(images, image_processor, skip_corrupt)
    loader = DataLoader(
        range(len(images)),
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=collate,
        worker_init_fn=leave_interruptions_to_the_main_process,
    )
    found = False
    with tqdm(total=len(images), desc="evaluate", unit=" images", leave=False, disable=None) as progress:
        for pixel_values, indices, seen in loader:
            if indices:
                found = True
                yield pixel_values, indices
            progress.update(seen)
    if not found:
        raise ValueError(f"None of the {len(images)} images of the data set can be read.")


class _Collate:
    """Indices to pixel values of the images that can be read, their indices, and how many there were."""

    def __init__(self, images: datasets.Dataset, image_processor, skip_corrupt: bool):
        self.images, self.image_processor, self.skip_corrupt = images, image_processor, skip_corrupt

    def __call__(self, indices: list[int]) -> tuple[torch.Tensor, list[int], int]:
        decoded, readable = [], []
        for index in indices:
            try:
                decoded.append(decode_image(self.images[index]["image"], index))
            except CorruptImageError:
                if not self.skip_corrupt:
                    raise
                continue
            readable.append(index)
        pixel_values = prepare_images(self.image_processor, decoded) if decoded else None
        return pixel_values, readable, len(indices)
