"""Attacks on images, and occlusion."""

import torch
from torch import nn

from ..common.scores import negative_log_likelihood
from ..common.views import ImageFormat


def fgsm(
    model: nn.Module,
    pixel_values: torch.Tensor,
    right: torch.Tensor,
    eps: float,
    image_format: ImageFormat,
    classes: torch.Tensor | slice = slice(None),
) -> torch.Tensor:
    """Attack images by one step of the fast gradient sign method (Goodfellow et al. 2015): every value moves by `eps`
    in the direction in which the loss rises, and stays a color.

    Args:
        model (`nn.Module`): Returns an output with `logits`.
        pixel_values (`torch.Tensor`): Normalized images `(batch, channels, height, width)`.
        right (`torch.Tensor`): Right classes `(batch, several)`, filled up with -1.
        eps (`float`): Step, for color values from 0 to 1.
        image_format (`ImageFormat`): The images' normalization.
        classes (`torch.Tensor`, *optional*): The classes to compare; all by default.
    """
    with torch.inference_mode(False), torch.enable_grad():
        pixel_values = pixel_values.clone().requires_grad_()
        logits = model(pixel_values=pixel_values).logits[:, classes]
        (gradient,) = torch.autograd.grad(negative_log_likelihood(logits, right.clone()), pixel_values)
    mean = torch.tensor(image_format.mean).view(-1, 1, 1).to(pixel_values)
    std = torch.tensor(image_format.std).view(-1, 1, 1).to(pixel_values)
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
