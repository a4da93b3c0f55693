"""Reading images ahead, by threads, for a model that waits for batches."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch


Item = TypeVar("Item")
Result = TypeVar("Result")
# Most threads that decode: more find nothing to do beside a model.
MOST_THREADS = 8


def stack_pixels(pixels: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack the pixel values of images, `(channels, height, width)`; raise a ValueError if their shapes differ."""
    if len(shapes := {tuple(image.shape) for image in pixels}) > 1:
        raise ValueError(f"The image processor makes images of several shapes, {sorted(shapes)}, expected one.")
    return torch.stack(list(pixels))


def count_threads(num_workers: int = 0) -> int:
    """Return `num_workers`, or one for each CPU that the process may use, up to `MOST_THREADS`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_workers if num_workers > 0 else min(usable, MOST_THREADS)


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], ahead: int, num_workers: int = 0
) -> Iterator[tuple[Item, Future]]:
    """Yield items in order, each with the future of `read(item)`, which threads compute up to `ahead` items before."""
    pending = deque()
    pool = ThreadPoolExecutor(count_threads(num_workers), thread_name_prefix="read")
    try:
        for item in items:
            pending.append((item, pool.submit(read, item)))
            if len(pending) > ahead:
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        # The iteration may end early, while what was yielded is still waited for.
        for _, future in pending:
            future.cancel()
        # Do not wait for the threads: the generator may be collected in one of them.
        pool.shutdown(wait=False)
