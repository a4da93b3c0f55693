"""Choose the precision of a training by the speed of the device."""

import functools
import time
import timeit

import torch
from accelerate import Accelerator
from accelerate.utils import is_bf16_available
from torch import nn


# Training on a CPU uses bfloat16 only if matrix products in bfloat16 have a speedup of more than this factor over
# float32. The speedup of all other operations is lower.
WORTHWHILE = 2


def choose_mixed_precision(device: torch.device) -> str:
    """Return `"bf16"` if the device computes fast in bfloat16, otherwise `"no"`."""
    if device.type == "cpu":
        fast = bfloat16_is_fast()
    elif device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = is_bf16_available()
    return "bf16" if fast else "no"


@functools.cache
def bfloat16_is_fast() -> bool:
    """Measure whether the CPU multiplies bfloat16 matrices more than `WORTHWHILE` times as fast as float32 matrices.
    The speed cannot be inferred from the CPU's instruction set."""
    # A large product takes seconds if bfloat16 is emulated, so a small product is measured first.
    return _speed_of_bfloat16(128) > 0.5 and _speed_of_bfloat16(512) > WORTHWHILE


def _speed_of_bfloat16(size: int) -> float:
    seconds = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, dtype=dtype)
        seconds.append(min(timeit.repeat(lambda: matrix @ matrix, timer=time.thread_time, repeat=6, number=1)))  # noqa: B023
    torch.set_num_threads(threads)
    return seconds[0] / seconds[1]


def hold_teacher(accelerator: Accelerator, teacher: nn.Module, classifier: nn.Module | None = None):
    """Freeze a teacher in place. If the run uses bfloat16 and the device is fast in bfloat16, convert the teacher to
    bfloat16. The `classifier` stays in float32, because it is also called on float32 embeddings."""
    teacher.eval().requires_grad_(False)
    if accelerator.mixed_precision == "bf16" and (accelerator.device.type != "cpu" or bfloat16_is_fast()):
        teacher.to(torch.bfloat16)
        if classifier is not None:
            classifier.float()
