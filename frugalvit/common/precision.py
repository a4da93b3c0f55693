"""Arithmetic that the machine is fast at."""

import functools
import time

import torch
from accelerate import Accelerator
from accelerate.utils import is_bf16_available
from torch import nn


# Training gains less than products of matrices: where these were 2.3 times as fast, a bootstrapping was 1.2 times.
WORTHWHILE = 4


def choose_mixed_precision(device: torch.device) -> str:
    """`"bf16"` where the device is fast at it, otherwise `"no"`."""
    if device.type == "cpu":
        fast = bfloat16_is_fast()
    elif device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = is_bf16_available()
    return "bf16" if fast else "no"


@functools.cache
def bfloat16_is_fast() -> bool:
    """Whether the CPUs multiply bfloat16 matrices `WORTHWHILE` times as fast as float32 ones.

    This is measured, in some 50 ms, as instructions for bfloat16 do not tell: one CPU with them was 8 times as fast,
    another 100 times slower.
    """
    # Where bfloat16 is emulated, a large product takes seconds; a small one shows it.
    return _speed_of_bfloat16(128) > 0.5 and _speed_of_bfloat16(512) > WORTHWHILE


def _speed_of_bfloat16(size: int, rounds: int = 6) -> float:
    """The speed of a product of two square bfloat16 matrices relative to float32. It is measured in the time of the
    thread itself, as others may use the machine, too."""
    seconds = {torch.float32: [], torch.bfloat16: []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(rounds):
        for dtype, times in seconds.items():
            matrix = torch.ones(size, size, dtype=dtype)
            start = time.thread_time()
            matrix @ matrix
            times.append(time.thread_time() - start)
    torch.set_num_threads(threads)
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


def hold_teacher(accelerator: Accelerator, teacher: nn.Module, classifier: nn.Module | None = None):
    """Freeze a teacher for the run, in bfloat16 where it computes in that and the device is fast at it.

    Args:
        accelerator (`Accelerator`): The run's; the teacher is called within its `autocast`.
        teacher (`nn.Module`): On the run's device.
        classifier (`nn.Module`, *optional*): A part of it that is called alone, on float32, and stays float32.
    """
    teacher.eval().requires_grad_(False)
    if accelerator.mixed_precision == "bf16" and (accelerator.device.type != "cpu" or bfloat16_is_fast()):
        teacher.to(torch.bfloat16)
        if classifier is not None:
            classifier.float()
