"""Attacks on images, and occlusion."""

import torch
import torch.nn.functional as F
from torch import nn

from ..modeling.image_format import ImageFormat


def fgsm(
    model: nn.Module, pixel_values: torch.Tensor, labels: torch.Tensor, eps: float, image_format: ImageFormat
) -> torch.Tensor:
    """Attack images by one step of the fast gradient sign method (Goodfellow et al. 2015): every value moves by `eps`
    in the direction in which the loss rises, and stays a color, from 0 to 1."""
    with torch.inference_mode(False), torch.enable_grad():
        pixel_values = pixel_values.clone().requires_grad_()
        loss = F.cross_entropy(model(pixel_values=pixel_values).logits, labels.clone())
        (gradient,) = torch.autograd.grad(loss, pixel_values)
    mean = torch.tensor(image_format.mean).view(-1, 1, 1).to(pixel_values)
    std = torch.tensor(image_format.std).view(-1, 1, 1).to(pixel_values)
    colors = pixel_values.detach() * std + mean + eps * gradient.sign()
    return (colors.clamp(0, 1) - mean) / std


def occlude_center(pixel_values: torch.Tensor, ratio: float) -> torch.Tensor:
    """Hide the middle of images, `(batch, channels, height, width)`: a rectangle of the image's shape, with `ratio` of
    its area, has the mean color (0 after normalization)."""
    height, width = pixel_values.shape[-2:]
    rows, columns = (round(side * ratio**0.5) for side in (height, width))
    top = (height - rows) // 2
    left = (width - columns) // 2
    occluded = pixel_values.clone()
    occluded[..., top : top + rows, left : left + columns] = 0
    return occluded
