"""How fast models are, side by side."""

import statistics
import time
from collections.abc import Mapping

import torch
from torch import nn


@torch.inference_mode()
def images_per_second(
    models: Mapping[str, nn.Module], pixel_values: torch.Tensor, rounds: int = 20
) -> dict[str, float]:
    """Images per second of models on one batch, the median of interleaved rounds.

    The models take turns, so that a machine whose speed drifts treats them alike and ratios hold.

    Args:
        models (mapping of `str` to `nn.Module`): Models in evaluation mode, on the batch's device.
        pixel_values (`torch.Tensor`): `(batch, channels, height, width)`.
        rounds (`int`, *optional*, defaults to 20): Timed passes of each model, after 2 that are not counted.

    Returns:
        `dict[str, float]`: Images per second under the models' names.
    """
    seconds = {name: [] for name in models}
    for number in range(rounds + 2):
        for name, model in models.items():
            start = time.perf_counter()
            model(pixel_values)
            if pixel_values.is_cuda:
                torch.cuda.synchronize()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: len(pixel_values) / statistics.median(times) for name, times in seconds.items()}
