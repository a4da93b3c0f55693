"""Patches at any place in an image, which a vision transformer's patch embedding takes as if they were its own."""

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


def sample_features(features: torch.Tensor, points: torch.Tensor, padding_mode: str) -> torch.Tensor:
    """Bilinear interpolation of a feature map, in float32.

    Args:
        features (`torch.Tensor`): `(batch, channels, height, width)`.
        points (`torch.Tensor`): `(batch, tokens, points, 2)` as x, y, 0 to 1 across the image; or a batch of 1 for
            all images.
        padding_mode (`str`): Values that points outside the image read, "border" or "zeros".

    Returns:
        `torch.Tensor`: `(batch, tokens, points, channels)`; NaN at points that are NaN.
    """
    # Beyond one image size outside nothing changes any more; the clamp keeps the pixel index of far points an integer.
    points = points.to(torch.promote_types(in_float32(points).dtype, features.dtype)).clamp(-2, 3)
    # It lets NaN pass, which on CPUs addresses memory outside the map, and the backward pass writes there.
    grid = (points.nan_to_num() * 2 - 1).expand(features.shape[0], -1, -1, -1)
    # Adds 0, or NaN where a coordinate is NaN, so that a model that diverged does not look sound.
    sound = 0 * points.detach().sum(-1, keepdim=True)
    sampled = F.grid_sample(features.to(grid.dtype), grid, padding_mode=padding_mode, align_corners=False)
    return sampled.permute(0, 2, 3, 1) + sound


def points_in(rois: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """The centers of the cells into which rows and columns divide a RoI, in row order.

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


def resize(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Images `(batch, channels, height, width)` at another size, in float32; those that have it are left as they are,
    if that is known: in a program for several sizes it is not."""
    is_known = all(isinstance(side, int) for side in (*size, *images.shape[-2:]))
    if is_known and size == tuple(images.shape[-2:]):
        return images
    return F.interpolate(in_float32(images), size, mode="bilinear", antialias=True)


class GridImage(nn.Module):
    """Resizes an image for a grid, so that a point of a cell is a pixel.

    Args:
        patch_size (pair of `int`): Rows and columns of points in a cell.
    """

    def __init__(self, patch_size: tuple[int, int]):
        super().__init__()
        self.patch_size = patch_size

    def forward(self, pixel_values: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """`(batch, channels, height, width)` to an image in float32."""
        size = tuple(cells * points for cells, points in zip(grid, self.patch_size, strict=True))
        return resize(in_float32(pixel_values), size)


class PatchSampling(nn.Module):
    """Each token embeds the pixels at a grid of points in its RoI, as a vision transformer embeds a patch.

    Args:
        patch_size (pair of `int`): Rows and columns of points.
        num_channels, hidden_size (`int`): Channels of the image and of tokens.
        padding_mode (`str`): "border" or "zeros", the values at points outside the image.
        norm (`nn.Module`, *optional*): The norm of the embedded patches.
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
        self, tokens: torch.Tensor, rois: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embed the patches of RoIs, `(batch, tokens, 4)` or a batch of 1 for all images. `features` are the image,
        `(batch, channels, height, width)`, or patches that were cut already, `(batch, tokens, channels * rows *
        columns)`. Return the embeddings, which are added to the tokens, `(batch, tokens, hidden_size)`, and the
        points, `(batch, tokens, rows * columns, 2)`."""
        points, patches = points_in(rois, self.patch_size), features
        if features.dim() == 4:
            sampled = sample_features(features, points, self.padding_mode)
            # Channels before points, as the weights of a convolution.
            patches = sampled.transpose(2, 3).flatten(2)
        tokens = self.norm(self.projection(patches.to(self.projection.weight.dtype)))
        return tokens, points.expand(tokens.shape[0], -1, -1, -1)
