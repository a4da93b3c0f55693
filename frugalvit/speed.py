"""Measure the speed of models in images per second."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from tqdm import tqdm


WARMUP = 2


@torch.inference_mode()
def images_per_second(
    models: Mapping[Hashable, Callable[[torch.Tensor], object]],
    pixel_values: torch.Tensor | Mapping[Hashable, torch.Tensor | Sequence[torch.Tensor]],
    rounds: int = 20,
) -> dict[Hashable, float]:
    """Measure the images per second of models. Each round runs all models in turn, so that a change of the machine's
    speed affects all models alike.

    Args:
        models (`Mapping[Hashable, Callable]`): Models by name.
        pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)` or a mapping):
            One batch for all models, or a mapping from names to one or more batches. A round runs all batches of a
            model.
        rounds (`int`, *optional*, defaults to 20): Number of measured rounds, after `WARMUP` unmeasured rounds.

    Returns:
        Images per second by name, from the median time of the rounds.
    """
    batches = pixel_values if isinstance(pixel_values, Mapping) else dict.fromkeys(models, pixel_values)
    batches = {name: [each] if isinstance(each, torch.Tensor) else each for name, each in batches.items()}
    seconds = {name: [] for name in models}
    for _ in tqdm(range(WARMUP + rounds), desc="speed", leave=False, disable=None):
        for name, model in models.items():
            start = time.perf_counter()
            for batch in batches[name]:
                model(batch)
            if batch.device.type != "cpu":
                torch.accelerator.synchronize()
            seconds[name].append(time.perf_counter() - start)
    images = {name: sum(map(len, each)) for name, each in batches.items()}
    return {name: images[name] / statistics.median(times[WARMUP:]) for name, times in seconds.items()}
