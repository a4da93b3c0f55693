"""Cells of a quadtree, chosen for each image: fine where it has something to show, coarse where it has not.

A few large cells cover the image, and those whose split is worth most are split into four. All images of a batch have
as many splits, so that no loop runs over images or cells. Mixed resolutions of patches are older (Ronen et al.,
*Vision Transformers with Mixed-Resolution Tokenization*, 2023; *Adaptive Patch Transformer*, 2026, splits by entropy
and a threshold); here a number of tokens is kept, and both ends are the teacher, on the coarsest and finest grid.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from .layers import in_float32


# Bins of gray of the entropy rule, from -BOUND to BOUND of normalized pixels.
BINS = 16
BOUND = 2.5
# By how much each cell's worth is less than that of the cell before it which is worth as much: ties are decided alike
# everywhere, and no cell is worth as much as the one that it is a part of.
TIE = 2.0**-20


def grid_rois(grid: tuple[int, int]) -> torch.Tensor:
    """RoIs that are the cells of a grid, `(cells, 4)` as left, top, right, bottom, in row order."""
    rows, columns = grid
    top, left = torch.meshgrid(torch.arange(rows) / rows, torch.arange(columns) / columns, indexing="ij")
    return torch.stack([left, top, left + 1 / columns, top + 1 / rows], dim=-1).flatten(0, 1)


def cells_of(grids: list[tuple[int, int]]) -> torch.Tensor:
    """RoIs of the cells of all grids, coarsest first, `(cells, 4)` as left, top, right, bottom."""
    return torch.cat([grid_rois(grid) for grid in grids])


def cut_patches(images: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Cut images `(batch, channels, rows * height, columns * width)` into patches as a patch embedding takes them,
    channels first, `(batch, rows, columns, channels * height * width)`."""
    height, width = patch_size
    patches = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3)


def split_in_four(cells: torch.Tensor) -> torch.Tensor:
    """Values of cells, `(batch, rows, columns)`, for each of the four that they are split into."""
    return cells.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)


def lost_detail(image: torch.Tensor, patch_size: tuple[int, int], num_levels: int) -> list[torch.Tensor]:
    """The loss of a cell that is shown by the points of a patch: the mean squared difference from the image, `(batch,
    channels, height, width)`, where a cell of the finest grid has a patch's points. Return `(batch, rows, columns)` of
    each grid, coarsest first, without the finest, which loses nothing."""
    window = [2 * points for points in patch_size]
    losses: list[torch.Tensor] = []
    image = image.mean(dim=1, keepdim=True)
    for _ in range(num_levels - 1):
        coarse = F.avg_pool2d(image, 2)
        shown = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        loss = F.avg_pool2d((image - shown).square(), window)
        # What differs within a point and what differs between points add up.
        losses.insert(0, loss if not losses else loss + F.avg_pool2d(losses[0], 2))
        image = coarse
    return [loss.squeeze(1) for loss in losses]


def entropy(image: torch.Tensor, patch_size: tuple[int, int], num_levels: int) -> list[torch.Tensor]:
    """Entropy of the gray values in a cell, in bits; arguments and shapes as those of `lost_detail`."""
    gray = image.mean(dim=1, keepdim=True)
    edges = torch.linspace(-BOUND, BOUND, BINS + 1, device=gray.device)[1:-1]
    # The share of pixels below each edge; between two edges lies their difference.
    finest = F.avg_pool2d((gray < edges.view(-1, 1, 1)).to(gray.dtype), patch_size)
    below = [finest]
    for _ in range(num_levels - 1):
        below.insert(0, F.avg_pool2d(below[0], 2))
    found = []
    for shares in below[:-1]:
        first = shares[:, :1]
        probability = torch.cat([shares, torch.ones_like(first)], 1) - torch.cat([torch.zeros_like(first), shares], 1)
        found.append(-(probability * probability.clamp(min=1e-9).log2()).sum(1))
    return found


def worth_of(
    rule: str,
    image: torch.Tensor,
    patch_size: tuple[int, int],
    num_levels: int,
    attention: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The worth of splitting each cell, by a `placement_rule`; arguments and shapes as those of `lost_detail`.
    `"learned"` needs shares of a teacher's attention that fall on the cells of the finest grid, `(batch, rows,
    columns)`."""
    image = in_float32(image)
    if rule == "entropy":
        return entropy(image, patch_size, num_levels)
    losses = lost_detail(image, patch_size, num_levels)
    if rule != "detail":
        losses = [loss.sqrt() for loss in losses]
    if rule != "learned":
        # Times the cell's area, in cells of the finest grid.
        return [loss * 4 ** (num_levels - 1 - level) for level, loss in enumerate(losses)]
    worths = []
    within = attention
    for loss in reversed(losses):
        # Of the four cells that one is split into.
        within = 4 * F.avg_pool2d(within.unsqueeze(1), 2).squeeze(1)
        worths.insert(0, loss * within)
    return worths


def choose_cells(worths: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """Choose the cells that are left when those worth most are split: numbers of cells, `(batch, num_tokens)` int64,
    those of the coarsest grid first, row by row. `worths` are `(batch, rows, columns)` of each grid but the finest,
    coarsest first. A cell counts no more than the one that it is a part of, so that they are a tree."""
    batch, rows, columns = worths[0].shape
    sizes = [worth[0].numel() for worth in worths]
    num_splits = (num_tokens - sizes[0]) // 3
    ordered = []
    above = None
    place = 0
    for worth, size in zip(worths, sizes, strict=True):
        # From a positive number on, so that a factor below 1 makes it smaller.
        worth = in_float32(worth).clamp(min=1e-20)
        if above is not None:
            worth = torch.minimum(worth, split_in_four(above))
        numbers = torch.arange(place + 1, place + size + 1, device=worth.device).view(worth.shape[1:])
        above = worth * (1 - TIE * numbers)
        ordered.append(above.flatten(1))
        place += size
    # All are put in order, not only as many as there are splits: a program may be given any number of them.
    order = torch.cat(ordered, dim=1).topk(place).indices
    is_split = (torch.arange(place, device=order.device) < num_splits).to(torch.float32)
    splits = torch.zeros(order.shape, device=order.device).scatter(1, order, is_split.expand_as(order))
    is_there = torch.ones_like(worths[0], dtype=torch.float32)
    left = []
    for split, worth in zip(splits.split(sizes, dim=1), worths, strict=True):
        split = split.view(worth.shape)
        left.append((is_there - split).flatten(1))
        is_there = split_in_four(split)
    left = torch.cat([*left, is_there.flatten(1)], dim=1)
    # In the order of their numbers.
    ranks = torch.arange(left.shape[1], 0, -1, device=left.device)
    return (left * ranks).topk(left.shape[1]).indices[:, :num_tokens]


class AttentionForecast(nn.Module):
    """Predicts how much a teacher attends to each cell of the finest grid, from the pixels of the cells around it.

    An embedding of patches to few channels, then convolutions that see seven cells far each way. It costs about as
    much as half a token. Before training, it predicts the same for all cells.
    """

    WIDTH = 32

    def __init__(self, patch_size: tuple[int, int], num_channels: int):
        super().__init__()
        self.embedding = nn.Conv2d(num_channels, self.WIDTH, patch_size, stride=patch_size)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(self.WIDTH, self.WIDTH, 3, padding=dilation, dilation=dilation) for dilation in (1, 2, 4)
        )
        self.head = nn.Conv2d(self.WIDTH, 1, 1)

    def draw(self, std: float):
        """Draw weights that predict even attention."""
        for convolution in (self.embedding, *self.convolutions):
            init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            init.zeros_(convolution.bias)
        init.zeros_(self.head.weight)
        init.zeros_(self.head.bias)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """`(batch, channels, height, width)`, where a cell has a patch's points, to logits `(batch, rows, columns)` in
        float32."""
        states = self.embedding(image.to(self.embedding.weight.dtype))
        for convolution in self.convolutions:
            states = states + convolution(F.gelu(states))
        return in_float32(self.head(F.gelu(states))).squeeze(1)


class ContentPlacement(nn.Module):
    """Chooses each image's cells."""

    def __init__(self, config: PatchSparseFormerConfig):
        super().__init__()
        self.rule = config.placement_rule
        self.patch_size = pair(config.patch_size)
        self.random_share = config.placement_random_share
        self.forecast = None
        if self.rule == "learned":
            # It learns from a teacher alone: other trainings would wait for its gradients.
            self.forecast = AttentionForecast(self.patch_size, config.num_channels).requires_grad_(False)

    def forward(self, levels: list[torch.Tensor], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose `num_tokens` cells, given the images at the resolution of each grid, coarsest first, in float32.
        Return them as `choose_cells` does, and the logits of the `AttentionForecast`, None without one."""
        logits = attention = None
        if self.forecast is not None:
            logits = self.forecast(levels[-1])
            attention = logits.detach().flatten(1).softmax(1).view_as(logits)
        with torch.no_grad():
            worths = worth_of(self.rule, levels[-1], self.patch_size, len(levels), attention)
            if self.training and self.random_share:
                worths = self.scramble(worths)
            return choose_cells(worths, num_tokens), logits

    def scramble(self, worths: list[torch.Tensor]) -> list[torch.Tensor]:
        """Replace the worths of `random_share` of the images by random ones, of which larger cells have more."""
        chosen = torch.rand(len(worths[0]), 1, 1, device=worths[0].device) < self.random_share
        return [
            torch.where(chosen, torch.rand_like(worth) * 2.0 ** (len(worths) - level), worth)
            for level, worth in enumerate(worths)
        ]

    def patches(self, levels: list[torch.Tensor], cells: torch.Tensor) -> torch.Tensor:
        """Return the patches of cells, `(batch, num_tokens)`, see `cut_patches`: `(batch, num_tokens, pixels)`."""
        images = torch.arange(cells.shape[0], device=cells.device).unsqueeze(1)
        found = None
        place = 0
        for level in levels:
            grid = cut_patches(level, self.patch_size)
            rows, columns = grid.shape[1:3]
            count = rows * columns
            # Of cells of other grids any patch; few copies of these cost less than one of all cells.
            number = (cells - place).clamp(0, count - 1)
            here = grid[images, number // columns, number % columns]
            found = here if found is None else torch.where((cells >= place).unsqueeze(-1), here, found)
            place += count
        return found
