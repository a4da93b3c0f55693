"""Patches at any place and size in an image, which a vision transformer's patch embedding takes as if they were its
own: an image pyramid, and samples from it."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .layers import in_float32


def grid_rois(grid: tuple[int, int]) -> torch.Tensor:
    """RoIs that are the cells of a grid, `(cells, 4)` as left, top, right, bottom, in row order."""
    rows, columns = grid
    top, left = torch.meshgrid(torch.arange(rows) / rows, torch.arange(columns) / columns, indexing="ij")
    return torch.stack([left, top, left + 1 / columns, top + 1 / rows], dim=-1).flatten(0, 1)


def window_of(weights: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """The box that has the mean and the variance of weights along each axis, cut at the image.

    Args:
        weights (`torch.Tensor`): `(batch, cells, 1)`, sums to 1; each lies evenly on its cell.
        cells (`torch.Tensor`): `(1, cells, 4)` as left, top, right, bottom.

    Returns:
        `torch.Tensor`: `(batch, 1, 4)`.
    """
    left_top, right_bottom = cells.chunk(2, dim=-1)
    centers, sizes = (left_top + right_bottom) * 0.5, right_bottom - left_top
    mean = (weights * centers).sum(1, keepdim=True)
    # Twelve times the variance is the square of an even box's size.
    half = 0.5 * (weights * (12 * (centers - mean).square() + sizes.square())).sum(1, keepdim=True).sqrt()
    corners = torch.cat([mean - half, mean + half], dim=-1)
    # Cut without stopping the gradient, which at first would stop it for good: the window is the image then.
    return corners - (corners - corners.clamp(0, 1)).detach()


def place_in_window(rois: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """RoIs `(batch, tokens, 4)`, 0 to 1 across a window, in an image whose part `(batch, 1, 4)` that is."""
    left_top, right_bottom = window.chunk(2, dim=-1)
    return left_top.repeat(1, 1, 2) + rois * (right_bottom - left_top).repeat(1, 1, 2)


def sample_features(features: torch.Tensor, points: torch.Tensor, padding_mode: str) -> torch.Tensor:
    """Bilinear interpolation of a feature map, in float32.

    Args:
        features (`torch.Tensor`): `(batch, channels, height, width)`.
        points (`torch.Tensor`): `(batch, tokens, points, 2)` as x, y, 0 to 1 across the image; or a batch of 1 for
            all images.
        padding_mode (`str`): What points outside the image read, "border" or "zeros".

    Returns:
        `torch.Tensor`: `(batch, tokens, points, channels)`; NaN at points that are NaN.
    """
    return sample_maps([features], points, padding_mode)[0]


def sample_maps(maps: list[torch.Tensor], points: torch.Tensor, padding_mode: str) -> list[torch.Tensor]:
    """`sample_features` of several maps at the same points."""
    # Beyond one image size outside nothing changes any more; the clamp keeps the pixel index of far points an integer.
    points = points.to(torch.promote_types(in_float32(points).dtype, maps[0].dtype)).clamp(-2, 3)
    # It lets NaN pass, which on CPUs addresses memory outside the map, and the backward pass writes there.
    grid = (points.nan_to_num() * 2 - 1).expand(maps[0].shape[0], -1, -1, -1)
    # Adds 0, or NaN where a coordinate is NaN, so that a model that diverged does not look sound.
    sound = 0 * points.detach().sum(-1, keepdim=True)
    maps = [features.to(grid.dtype) for features in maps]
    return [
        F.grid_sample(features, grid, padding_mode=padding_mode, align_corners=False).permute(0, 2, 3, 1) + sound
        for features in maps
    ]


def points_in(rois: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """The centers of a RoI's cells if it is divided into so many rows and columns, in row order.

    Args:
        rois (`torch.Tensor`): `(batch, tokens, 4)`.
        patch_size (pair of `int`): Rows and columns.

    Returns:
        `torch.Tensor`: `(batch, tokens, rows * columns, 2)` float32 as x, y.
    """
    rows, columns = ((torch.arange(count, device=rois.device) + 0.5) / count for count in patch_size)
    shares = torch.cartesian_prod(rows, columns).flip(-1)
    left_top, right_bottom = in_float32(rois).unsqueeze(2).chunk(2, dim=-1)
    return left_top + shares * (right_bottom - left_top)


class ImagePyramid(nn.Module):
    """An image at several sizes: the points of a grid's cells are the pixels of the first, each of the others is twice
    as large, up to the image's own.

    Args:
        patch_size (pair of `int`): Rows and columns of points in a cell.
        num_levels (`int`): Sizes.
    """

    def __init__(self, patch_size: tuple[int, int], num_levels: int):
        super().__init__()
        self.patch_size, self.num_levels = patch_size, num_levels

    def forward(self, pixel_values: torch.Tensor, grid: tuple[int, int]) -> list[torch.Tensor]:
        """`(batch, channels, height, width)` to as many images in float32, smallest first."""
        pixel_values = in_float32(pixel_values)
        height, width = pixel_values.shape[-2:]
        first = [cells * points for cells, points in zip(grid, self.patch_size, strict=True)]
        levels = []
        for level in range(self.num_levels):
            rows, columns = (count << level for count in first)
            # The first may be larger than the image, where a token has more points than pixels.
            size = (min(rows, max(height, first[0])), min(columns, max(width, first[1])))
            same = size == (height, width)
            levels.append(pixel_values if same else F.interpolate(pixel_values, size, mode="bilinear", antialias=True))
        return levels


class PatchSampling(nn.Module):
    """Each token embeds the pixels at a grid of points in its RoI, as a vision transformer embeds a patch.

    Where RoIs are smaller than the cells that the pyramid's first image is made for, points are read from its larger
    images, between two of which they are interpolated.

    Args:
        patch_size (pair of `int`): Rows and columns of points.
        num_channels, hidden_size (`int`): Channels of the image and of tokens.
        padding_mode (`str`): What points outside the image read, "border" or "zeros".
        norm (`nn.Module`, *optional*): Of what is embedded.
    """

    def __init__(
        self,
        patch_size: tuple[int, int],
        num_channels: int,
        hidden_size: int,
        padding_mode: str,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.patch_size, self.padding_mode = patch_size, padding_mode
        self.projection = nn.Linear(num_channels * math.prod(patch_size), hidden_size)
        self.norm = nn.Identity() if norm is None else norm

    def forward(
        self, tokens: torch.Tensor, rois: torch.Tensor, levels: list[torch.Tensor] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RoIs `(batch, tokens, 4)`, or a batch of 1 for all images, and the pyramid's images, or the patches where
        these were cut already, `(batch, tokens, channels * rows * columns)`, to what joins the tokens, `(batch,
        tokens, hidden_size)`, and the points `(batch, tokens, rows * columns, 2)`."""
        points, patches = points_in(rois, self.patch_size), levels
        if isinstance(levels, list):
            read = sample_maps(levels, points, self.padding_mode)
            shares = self.shares_of_levels(rois, len(levels))
            sampled = sum(values * share for values, share in zip(read, shares, strict=True))
            # Channels before points, as the weights of a convolution.
            patches = sampled.transpose(2, 3).flatten(2)
        tokens = self.norm(self.projection(patches.to(self.projection.weight.dtype)))
        return tokens, points.expand(tokens.shape[0], -1, -1, -1)

    def shares_of_levels(self, rois: torch.Tensor, count: int) -> list[torch.Tensor | int]:
        """How much of each image a token reads, `(batch, tokens, 1, 1)`; the shares sum to 1."""
        if count == 1:
            return [1]
        left_top, right_bottom = in_float32(rois).chunk(2, dim=-1)
        # In cells of the whole image, for which the first is made.
        area = (right_bottom - left_top).prod(-1).abs().clamp(min=1e-12) * rois.shape[1]
        level = (-0.5 * torch.log2(area)).clamp(0, count - 1)[..., None, None]
        return [(1 - (level - index).abs()).clamp(min=0) for index in range(count)]
