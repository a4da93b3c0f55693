"""Speeds of models, side by side."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping

import torch
from tqdm import tqdm


# Seconds after which a comparison of speeds on the way to something else begins no further round.
LIMIT = 3.0


@torch.inference_mode()
def median_seconds(
    calls: Mapping[Hashable, Callable[[], object]], rounds: int = 20, limit: float = math.inf, warmup: int = 2
) -> dict[Hashable, float]:
    """Measure the seconds that calls take, the median of interleaved rounds.

    The calls take turns, so that a machine whose speed drifts treats them alike and ratios hold.

    Args:
        calls (mapping of names to `Callable`): Functions without arguments.
        rounds (`int`, *optional*, defaults to 20): Timed calls of each.
        limit (`float`, *optional*): Seconds after which no further round begins; if there were 2 rounds, the second
            one counts.
        warmup (`int`, *optional*, defaults to 2): Rounds before, which are not counted.

    Returns:
        `dict`: Seconds under the calls' names.
    """
    seconds = {name: [] for name in calls}
    end = time.perf_counter() + limit
    with tqdm(total=(warmup + rounds) * len(calls), desc="speed", leave=False, disable=None) as progress:
        for number in range(warmup + rounds):
            if number >= 2 and time.perf_counter() > end:
                break
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
                progress.update()
    return {name: statistics.median(times[min(warmup, len(times) - 1) :]) for name, times in seconds.items()}


def images_per_second(
    models: Mapping[Hashable, Callable[[torch.Tensor], object]],
    pixel_values: torch.Tensor | Mapping[Hashable, torch.Tensor],
    rounds: int = 20,
    limit: float = math.inf,
) -> dict[Hashable, float]:
    """Measure the images per second of models by `median_seconds`.

    Args:
        models (mapping of names to `nn.Module`): Models in evaluation mode, on their batches' device.
        pixel_values (`torch.Tensor` or mapping of names to `torch.Tensor`): One batch for all, `(batch, channels,
            height, width)`, or one for each.
        rounds (`int`), limit (`float`): As of `median_seconds`.

    Returns:
        `dict`: Images per second under the models' names.
    """
    batches = pixel_values if isinstance(pixel_values, Mapping) else dict.fromkeys(models, pixel_values)
    calls = {name: functools.partial(_pass, model, batches[name]) for name, model in models.items()}
    return {name: len(batches[name]) / seconds for name, seconds in median_seconds(calls, rounds, limit).items()}


def _pass(model: Callable[[torch.Tensor], object], pixel_values: torch.Tensor):
    model(pixel_values)
    if pixel_values.device.type != "cpu":
        torch.accelerator.synchronize()


def duration(seconds: float) -> str:
    """A duration in words, rounded as a person rounds it."""
    if seconds < 10:
        return "a few seconds"
    return f"{5 * round(seconds / 5)} seconds" if seconds < 90 else f"{round(seconds / 60)} minutes"
