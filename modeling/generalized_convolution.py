"""Generalized convolution: a kernel with any number of positions. Each position corresponds to an attention head.

Zhang et al., *Bootstrapping ViTs: Towards Liberating Vision Transformers from Pre-training* (CVPR 2022, arXiv
2112.03552), appendix A. The appendix writes "H6" for a generalized convolution with 6 positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .layers import uniform_init_


def window_size(num_positions: int) -> int:
    """Return the smallest odd side of a square window that holds `num_positions` positions."""
    side = math.isqrt(num_positions - 1) + 1
    return side + 1 - side % 2


def generalized_conv2d(
    feature_map: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a generalized convolution (Zhang et al., arXiv 2112.03552, eq. 1). The positions of the kernel fill the
    square window around each output cell row by row, from the top left. Each position has its own matrix. The map is
    padded with zeros.

    Window rows without positions are not computed. For example, 6 positions fill two of the three rows of a 3 x 3
    window. They need two thirds of the multiplications of 9 positions.

    Args:
        feature_map (`torch.Tensor` of shape `(batch, in_channels, height, width)`): Input.
        weight (`torch.Tensor` of shape `(out_channels, in_channels, positions)`): One matrix for each position.
        bias (`torch.Tensor` of shape `(out_channels,)`, *optional*): Bias.

    Returns:
        `(batch, out_channels, height, width)`.
    """
    num_positions = weight.shape[-1]
    side = window_size(num_positions)
    reach = side // 2
    rows = math.ceil(num_positions / side)
    kernel = F.pad(weight, (0, rows * side - num_positions)).unflatten(-1, (rows, side))
    # Above the map, `reach` rows of zeros are added. Below the map, `rows - 1 - reach` rows of zeros are added. If
    # this number is negative, rows at the bottom of the map are removed instead.
    return F.conv2d(F.pad(feature_map, (reach, reach, reach, rows - 1 - reach)), kernel, bias)


class GeneralizedConv2d(nn.Module):
    """Layer for `generalized_conv2d`. With `num_positions=9`, the layer is a 3 x 3 convolution."""

    def __init__(self, in_channels: int, out_channels: int, num_positions: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, num_positions))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        uniform_init_(self)

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        return generalized_conv2d(feature_map, self.weight, self.bias)
