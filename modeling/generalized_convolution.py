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
    """The side of the smallest square window with a center that holds so many positions: their root, rounded up to an
    odd number."""
    side = math.isqrt(num_positions - 1) + 1
    return side + 1 - side % 2


def generalized_conv2d(
    feature_map: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Generalized convolution of a feature map (eq. 1): an output position is a sum over the first positions of the
    window around it, row by row, each through its own matrix. Outside of the map there are zeros.

    Rows of the window that hold no position are left out, so that 6 positions cost two thirds of 9.

    Args:
        feature_map (`torch.Tensor`): `(batch, in_channels, height, width)`.
        weight (`torch.Tensor`): `(out_channels, in_channels, positions)`.
        bias (`torch.Tensor`, *optional*): `(out_channels,)`.

    Returns:
        `torch.Tensor`: `(batch, out_channels, height, width)`.
    """
    num_positions = weight.shape[-1]
    side = window_size(num_positions)
    rows, reach = -(-num_positions // side), side // 2
    kernel = F.pad(weight, (0, rows * side - num_positions)).unflatten(-1, (rows, side))
    # As many rows above as in the whole window; below only those that are needed, or one too many is cut off.
    return F.conv2d(F.pad(feature_map, (reach, reach, reach, rows - 1 - reach)), kernel, bias)


def shift_matrices(height: int, width: int, num_positions: int) -> torch.Tensor:
    """The constant matrices Φ of eqs. 4 and 6, for teaching and testing: row q of Φ_i is 1 at the position that the
    i-th position of the window around q falls on, and 0 where that is outside of the map.

    Returns:
        `torch.Tensor`: `(positions, height * width, height * width)`.
    """
    side = window_size(num_positions)
    matrices = torch.zeros(num_positions, height, width, height, width)
    for index in range(num_positions):
        dy, dx = index // side - side // 2, index % side - side // 2
        for y in range(max(0, -dy), min(height, height - dy)):
            for x in range(max(0, -dx), min(width, width - dx)):
                matrices[index, y, x, y + dy, x + dx] = 1
    return matrices.flatten(3).flatten(1, 2)


def generalized_convolution_in_matrix_form(
    feature_map: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    matrices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`generalized_conv2d` in the form of eq. 5, Y = Σ Φ_i X W_i, for teaching and testing: time and memory grow with
    the square of the map's positions. `matrices` are the `shift_matrices`, if they are known already."""
    height, width = feature_map.shape[-2:]
    if matrices is None:
        matrices = shift_matrices(height, width, weight.shape[-1]).to(feature_map)
    projected = torch.einsum("bcp,oci->ipbo", feature_map.flatten(2), weight)
    output = torch.einsum("iqp,ipbo->boq", matrices, projected)
    output = output if bias is None else output + bias[:, None]
    return output.unflatten(-1, (height, width))


class GeneralizedConv2d(nn.Module):
    """A layer of generalized convolution, see `generalized_conv2d`.

    Args:
        in_channels, out_channels (`int`): Channels.
        num_positions (`int`): Receptive field, from 1; 9 is a 3 x 3 convolution.
        bias (`bool`, *optional*, defaults to `True`): Add a learned vector.

    Raises:
        ValueError: if a number is below 1.
    """

    def __init__(self, in_channels: int, out_channels: int, num_positions: int, bias: bool = True):
        super().__init__()
        for name, value in (
            ("in_channels", in_channels),
            ("out_channels", out_channels),
            ("num_positions", num_positions),
        ):
            if value < 1:
                raise ValueError(f"`{name}` is {value}, expected at least 1.")
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, num_positions))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self):
        """Draw weights as PyTorch's convolutions do, uniform in +-1 / sqrt(inputs of an output)."""
        bound = self.weight[0].numel() ** -0.5
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        out_channels, in_channels, num_positions = self.weight.shape
        return f"{in_channels}, {out_channels}, num_positions={num_positions}, bias={self.bias is not None}"

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        return generalized_conv2d(feature_map, self.weight, self.bias)
