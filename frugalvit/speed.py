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


class MatrixProduct(nn.Module):
    """Multiplies two square matrices, whatever it is given: among the models of `images_per_second`, what the machine
    can do in that run.

    Args:
        size (`int`): Rows and columns; a multiplication has `macs`, `size` to the third.
        dtype, device: Of the matrices.
    """

    def __init__(self, size: int = 2048, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        super().__init__()
        self.macs = size**3
        self.register_buffer("matrix", torch.randn(size, size).to(device, dtype))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.matrix @ self.matrix


def measure(
    models: Mapping[str, nn.Module], macs: Mapping[str, int], pixel_values: torch.Tensor, rounds: int = 20
) -> list[dict[str, object]]:
    """Speeds of models on one batch, beside each other and beside a product of matrices.

    Args:
        models, pixel_values, rounds: As in `images_per_second`.
        macs (mapping of `str` to `int`): Multiply-accumulates of each model for one image.

    Returns:
        `list[dict]`: For each model `row`, its name, `batch_size`, `images_per_second`, `times_first`, the ratio to
        the first model, and `of_matrix_rate`, its multiply-accumulates a second as a share of those of a large product
        of matrices in the same dtype.
    """
    product = MatrixProduct(dtype=pixel_values.dtype, device=pixel_values.device)
    speeds = images_per_second({**models, "": product}, pixel_values, rounds)
    rate = speeds.pop("") / len(pixel_values) * product.macs
    first = next(iter(speeds.values()))
    return [
        {
            "row": name,
            "batch_size": len(pixel_values),
            "images_per_second": speed,
            "times_first": speed / first,
            "of_matrix_rate": speed * macs[name] / rate,
        }
        for name, speed in speeds.items()
    ]
