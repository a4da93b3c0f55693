"""Changes of images that show how far a classifier can be trusted: attacks, and hidden parts."""

import torch
from torch import nn

from ..common.scores import negative_log_likelihood


def fgsm(
    model: nn.Module,
    pixel_values: torch.Tensor,
    right: torch.Tensor,
    eps: float,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    classes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attack images by one step of the fast gradient sign method (Goodfellow et al. 2015): every value moves by `eps`
    in the direction in which the loss rises, and stays a color.

    Args:
        model (`nn.Module`): Returns an output with `logits`.
        pixel_values (`torch.Tensor`): Normalized images `(batch, channels, height, width)`.
        right (`torch.Tensor`): Right classes `(batch, several)`, filled up with -1.
        eps (`float`): Step, of color values in 0..1.
        mean, std (`tuple[float, ...]`): The images' normalization.
        classes (`torch.Tensor`, *optional*): The classes that are compared; all if not given.

    Returns:
        `torch.Tensor`: Normalized images of the same shape.
    """
    with torch.inference_mode(False), torch.enable_grad():
        pixel_values = pixel_values.clone().requires_grad_()
        logits = model(pixel_values=pixel_values).logits
        loss = negative_log_likelihood(logits if classes is None else logits[:, classes], right.clone())
        (gradient,) = torch.autograd.grad(loss, pixel_values)
    mean, std = (torch.tensor(values).view(-1, 1, 1).to(pixel_values) for values in (mean, std))
    colors = pixel_values.detach() * std + mean + eps * gradient.sign()
    return (colors.clamp(0, 1) - mean) / std


def occlude_center(pixel_values: torch.Tensor, ratio: float) -> torch.Tensor:
    """Hide the middle of images, `(batch, channels, height, width)`: a rectangle of the image's shape, with `ratio` of
    its area, has the mean color (0 after normalization)."""
    height, width = pixel_values.shape[-2:]
    rows, columns = (round(side * ratio**0.5) for side in (height, width))
    top, left = (height - rows) // 2, (width - columns) // 2
    occluded = pixel_values.clone()
    occluded[..., top : top + rows, left : left + columns] = 0
    return occluded
