"""Speeds of models, side by side."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping

import torch
from tqdm import tqdm


WARMUP = 2


@torch.inference_mode()
def images_per_second(
    models: Mapping[Hashable, Callable[[torch.Tensor], object]],
    pixel_values: torch.Tensor | Mapping[Hashable, torch.Tensor],
    rounds: int = 20,
) -> dict[Hashable, float]:
    """Measure the images per second of models, by their names, by the median of interleaved rounds: the models take
    turns, so that a machine whose speed drifts treats them alike and ratios hold. `WARMUP` rounds come before.

    `pixel_values` are one batch for all, `(batch, channels, height, width)`, or one for each."""
    batches = pixel_values if isinstance(pixel_values, Mapping) else dict.fromkeys(models, pixel_values)
    seconds = {name: [] for name in models}
    for _ in tqdm(range(WARMUP + rounds), desc="speed", leave=False, disable=None):
        for name, model in models.items():
            start = time.perf_counter()
            model(batches[name])
            if batches[name].device.type != "cpu":
                torch.accelerator.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: len(batches[name]) / statistics.median(times[WARMUP:]) for name, times in seconds.items()}
