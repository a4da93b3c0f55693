"""Generalized convolution: a convolution with any number of positions, which attention heads can stand for.

Zhang et al., *Bootstrapping ViTs: Towards Liberating Vision Transformers from Pre-training* (CVPR 2022, arXiv
2112.03552), appendix A. "H6" there is one with 6 positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init


def window_size(num_positions: int) -> int:
    """The side of the smallest square window with a center that holds the positions: their root, rounded up to an odd
    number."""
    side = math.isqrt(num_positions - 1) + 1
    return side + 1 - side % 2


def generalized_conv2d(
    feature_map: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Generalized convolution of a feature map (eq. 1): an output position is a sum over the first positions of the
    window around it, row by row, each through its own matrix. Outside of the map there are zeros.

    Rows of the window that hold no position are left out, so that 6 positions cost two thirds of 9. Maps are `(batch,
    channels, height, width)`, weights `(out_channels, in_channels, positions)`, biases `(out_channels,)`.
    """
    num_positions = weight.shape[-1]
    side = window_size(num_positions)
    reach = side // 2
    rows = math.ceil(num_positions / side)
    kernel = F.pad(weight, (0, rows * side - num_positions)).unflatten(-1, (rows, side))
    # As many rows above as in the whole window; below only those that are needed, or one too many is cut off.
    return F.conv2d(F.pad(feature_map, (reach, reach, reach, rows - 1 - reach)), kernel, bias)


class GeneralizedConv2d(nn.Module):
    """A layer of generalized convolution, see `generalized_conv2d`; with `num_positions=9` a 3 x 3 convolution."""

    def __init__(self, in_channels: int, out_channels: int, num_positions: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, num_positions))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self):
        """Draw weights as PyTorch's convolutions do, uniform in +-1 / sqrt(inputs of an output)."""
        bound = self.weight[0].numel() ** -0.5
        for parameter in self.parameters():
            init.uniform_(parameter, -bound, bound)

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        return generalized_conv2d(feature_map, self.weight, self.bias)
