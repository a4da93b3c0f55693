"""Arithmetic that the machine is fast at."""

import functools
import time
import timeit

import torch
from accelerate import Accelerator
from accelerate.utils import is_bf16_available
from torch import nn


# Training gains less than products of matrices: where these were 2.3 times as fast, a bootstrapping was 1.2 times.
WORTHWHILE = 4


def choose_mixed_precision(device: torch.device) -> str:
    """Return `"bf16"` where the device is fast at it, otherwise `"no"`."""
    if device.type == "cpu":
        fast = bfloat16_is_fast()
    elif device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = is_bf16_available()
    return "bf16" if fast else "no"


@functools.cache
def bfloat16_is_fast() -> bool:
    """Measure whether the CPUs multiply bfloat16 matrices `WORTHWHILE` times as fast as float32 ones: the instructions
    for it do not tell."""
    # Where bfloat16 is emulated, a large product takes seconds; a small one shows it.
    return _speed_of_bfloat16(128) > 0.5 and _speed_of_bfloat16(512) > WORTHWHILE


def _speed_of_bfloat16(size: int) -> float:
    """Measure the speed of a product of two bfloat16 matrices relative to float32, in the thread's own time."""
    seconds = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, dtype=dtype)
        seconds.append(min(timeit.repeat(lambda: matrix @ matrix, timer=time.thread_time, repeat=6, number=1)))  # noqa: B023
    torch.set_num_threads(threads)
    return seconds[0] / seconds[1]


def hold_teacher(accelerator: Accelerator, teacher: nn.Module, classifier: nn.Module | None = None):
    """Freeze a teacher for the run, in bfloat16 where it computes in that and the device is fast at it. A part that is
    called alone on float32, its `classifier`, stays float32."""
    teacher.eval().requires_grad_(False)
    if accelerator.mixed_precision == "bf16" and (accelerator.device.type != "cpu" or bfloat16_is_fast()):
        teacher.to(torch.bfloat16)
        if classifier is not None:
            classifier.float()
