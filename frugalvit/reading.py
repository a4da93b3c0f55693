"""Read images in advance, in several threads."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch


Item = TypeVar("Item")
Result = TypeVar("Result")
# Largest default number of decoding threads. More threads would decode faster than a model computes.
MOST_THREADS = 8


def stack_pixels(pixels: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack pixel values `(channels, height, width)` of one shape into `(images, channels, height, width)`."""
    if len(shapes := {tuple(image.shape) for image in pixels}) > 1:
        raise ValueError(f"The image processor makes images of several shapes, {sorted(shapes)}, expected one.")
    return torch.stack(list(pixels))


def count_threads(num_workers: int = 0) -> int:
    """Return `num_workers`. If `num_workers` is 0, return the number of usable CPUs, at most `MOST_THREADS`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_workers if num_workers > 0 else min(usable, MOST_THREADS)


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], ahead: int, num_workers: int = 0
) -> Iterator[tuple[Item, Future]]:
    """Yield each item with the future of `read(item)`, in order. Threads process up to `ahead` items in advance."""
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
        # If the iteration ends early, the remaining results are not needed.
        for _, future in pending:
            future.cancel()
        # Do not wait for the threads to end. Python may close this generator in one of these threads, and a thread
        # cannot wait for its own end.
        pool.shutdown(wait=False)
