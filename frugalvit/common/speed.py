"""Speeds of models, side by side."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
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


def foretold(seconds: Mapping[str, float]) -> str:
    """The seconds that parts of a command will take, in words: all of them, and each."""
    parts = [f"{duration(value)} for {name}" for name, value in seconds.items()]
    return f"about {duration(sum(seconds.values()))} ({', '.join(parts)})"


class MatrixProduct(nn.Module):
    """Multiplies two square matrices, whatever its input. Among the models of `images_per_second`, it shows the speed
    that the machine has in that run.

    Args:
        size (`int`): Rows and columns; a multiplication has `macs`, `size` to the third.
        dtype, device: Type and device of the matrices.
    """

    def __init__(self, size: int = 2048, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        super().__init__()
        self.macs = size**3
        self.register_buffer("matrix", torch.randn(size, size).to(device, dtype))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.matrix @ self.matrix


class OwnProducts(nn.Module):
    """A model's own products of matrices on a batch, convolutions as such products, and nothing else: a model that
    spends no time between them. Matrices are random, and each product has its own weights.

    Args:
        model (`nn.Module`): In evaluation mode.
        pixel_values (`torch.Tensor`): Images on the model's device.
    """

    def __init__(self, model: nn.Module, pixel_values: torch.Tensor):
        super().__init__()
        with torch.no_grad(), _ProductShapes() as seen:
            model(pixel_values)
        like = {"dtype": pixel_values.dtype, "device": pixel_values.device}
        inputs = {}
        self.products = []
        for batch, rows, inner, columns in seen.shapes:
            left = inputs.setdefault((batch, rows, inner), torch.randn(batch, rows, inner, **like))
            self.products.append((left, torch.randn(batch, columns, inner, **like)))

    def forward(self, pixel_values: torch.Tensor):
        for left, right in self.products:
            # The product of a linear layer, computed as the layer computes it.
            F.linear(left[0], right[0]) if len(left) == 1 else torch.bmm(left, right.mT)


class _ProductShapes(TorchDispatchMode):
    """A mode that notes the shapes (batch, rows, inner, columns) of the products of matrices that run within it."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[int, int, int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            self.shapes.append((1, *left.shape, right.shape[1]))
        elif name in ("bmm", "baddbmm"):
            left, right = args[-2:]
            self.shapes.append((*left.shape, right.shape[2]))
        elif name == "convolution":
            weight, groups = args[1], args[8]
            columns = len(weight) // groups
            self.shapes.append((groups, output.numel() // len(weight), weight[0].numel(), columns))
        elif name.startswith("_scaled_dot_product"):
            (*batch, queries, width), keys = args[0].shape, args[1].shape[-2]
            batch = math.prod(batch)
            self.shapes += [(batch, queries, width, keys), (batch, queries, keys, width)]
        return output


def measure(
    models: Mapping[str, nn.Module], macs: Mapping[str, int], pixel_values: torch.Tensor, rounds: int = 20
) -> list[dict[str, object]]:
    """Speeds of models on one batch, beside each other and beside a product of matrices.

    Args:
        models, pixel_values, rounds: As in `images_per_second`.
        macs (mapping of `str` to `int`): Multiply-accumulates of each model for one image, `None` if not known.

    Returns:
        `list[dict]`: For each model `row`, its name; `batch_size`; `images_per_second`; `times_first`, the ratio to
        the first model; `of_matrix_rate`, its multiply-accumulates a second as a share of those of a large product of
        matrices in the same dtype; and `of_own_products`, the same as a share of its own products run alone, most of
        which are smaller. `None` stands for numbers that are not known.
    """
    device = pixel_values.device
    # Large enough to take long beside what starting a product on an accelerator takes.
    largest = MatrixProduct(2048 if device.type == "cpu" else 8192, pixel_values.dtype, device)
    # Layers are looked up in the model that was compiled.
    originals = {name: getattr(model, "_orig_mod", model) for name, model in models.items()}
    products = {f"{name}, products alone": OwnProducts(model, pixel_values) for name, model in originals.items()}
    # Products inside another runtime's programs cannot be seen.
    alone = {name: each for name, each in products.items() if each.products}
    speeds = images_per_second({**models, **alone, "": largest}, pixel_values, rounds)
    rate = speeds[""] / len(pixel_values) * largest.macs
    first = speeds[next(iter(models))]
    own = {name: speeds[key] for name in models if (key := f"{name}, products alone") in alone}
    return [
        {
            "row": name,
            "batch_size": len(pixel_values),
            "images_per_second": speeds[name],
            "times_first": speeds[name] / first,
            "of_matrix_rate": speeds[name] * macs[name] / rate if macs[name] else None,
            "of_own_products": speeds[name] / own[name] if name in own else None,
        }
        for name in models
    ]
