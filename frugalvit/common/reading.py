"""Reading image files as pixel values, by threads, at no higher resolution than a model reads."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from PIL import Image
from torch import nn

from ..configuration.configuration_base import is_sparseformer, pair
from .exported import ExportedModule
from .views import EvalView, ImageFormat, prepare_images, squashes_before_crop, vision_config_of


Item, Result = TypeVar("Item"), TypeVar("Result")
# Most threads that decode: more find nothing to do beside a model.
MOST_THREADS = 8


class Reader:
    """Prepares images for a model as its image processor does, from images that may be decoded at a lower resolution.

    If training can follow the image processor (`ImageFormat.from_processor`), images are resized and cropped as 8-bit
    numbers, and normalized as a batch. Otherwise, where it squashes images before a crop (DeiT's), and always with
    `exact`, they go through the image processor, one by one.

    Args:
        image_processor: A Transformers image processor, or a function that is called like one.
        share (`float`, *optional*, defaults to 1.0): The part of the resized image's pixels, each way, that the model
            reads, see `share_read`.
        exact (`bool`, *optional*, defaults to `False`): Decode images whole, and use the image processor.

    Attributes:
        at_least (pair of `int`, *optional*): Width and height that suffice, for `read_image` and others.
    """

    def __init__(self, image_processor, share: float = 1.0, exact: bool = False):
        self.image_processor, self.format, self.at_least = image_processor, None, None
        if exact or squashes_before_crop(image_processor):
            return
        try:
            self.format = ImageFormat.from_processor(image_processor)
        except ValueError:
            return
        self.view = EvalView(self.format)
        self.at_least = tuple(math.ceil(share * length) for length in self.view.at_least)

    def pixels(self, image: Image.Image) -> torch.Tensor:
        """Prepare an RGB image for `batch`; all have the same size afterwards."""
        if self.format is None:
            return prepare_images(self.image_processor, [image])[0]
        return self.view(image)["pixel_values"]

    def batch(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make pixel values, `(batch, channels, height, width)` float32, of images that `pixels` returned.

        Raises:
            ValueError: if the image processor made different sizes.
        """
        if len(sizes := {tuple(image.shape) for image in pixels}) > 1:
            raise ValueError(
                f"{type(self.image_processor).__name__} makes pixels of different shapes, {sorted(sizes)}, of images "
                "of different shapes; expected one that resizes to one size, or crops."
            )
        pixels = torch.stack(list(pixels))
        return pixels if self.format is None else self.format.normalize(pixels)


def share_read(model: nn.Module, num_tokens: int | None = None) -> float:
    """The part of an image's rows and columns that a model reads, up to 1. For a SparseFormer whose tokens embed the
    patches of a grid, it is `grid * patch_size`, the pixels of their points, divided by `image_size`; for other
    models, it is 1. `num_tokens` are the most tokens that it is going to compute with, by default its own."""
    config = vision_config_of(getattr(model, "config", None))
    if not is_sparseformer(config) or not config.embeds_patches or isinstance(model, ExportedModule):
        return 1.0
    # Trees read small parts of an image as finely as they can.
    if config.placement != "grid":
        return 1.0
    grid = config.grid_of(num_tokens or config.default_num_tokens)
    lengths = zip(grid, pair(config.patch_size), pair(config.image_size), strict=True)
    return min(1.0, max(cells * points / size for cells, points, size in lengths))


def count_threads(num_workers: int = 0) -> int:
    """Number of threads that decode: `num_workers`, or, if that is 0, one for each CPU that the process may use, up to
    `MOST_THREADS`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_workers if num_workers > 0 else min(usable, MOST_THREADS)


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], ahead: int, num_workers: int = 0
) -> Iterator[tuple[Item, Future]]:
    """Yield items in order, each with the future of `read(item)`, which runs in one of `count_threads(num_workers)`
    threads, up to `ahead` items before it is returned."""
    pending, pool = deque(), ThreadPoolExecutor(count_threads(num_workers), thread_name_prefix="read")
    try:
        for item in items:
            pending.append((item, pool.submit(read, item)))
            if len(pending) > ahead:
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        # Whoever iterates may have seen enough, and may still wait for what it got.
        for _, future in pending:
            future.cancel()
        # Threads are not waited for: what is forgotten after an error may be collected in one of them.
        pool.shutdown(wait=False)
