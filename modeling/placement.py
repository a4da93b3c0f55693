"""Placement of a PatchSparseFormer's tokens on cells of the image. Placement by content starts from the cells of a
grid. It merges blocks of four cells with little detail, and splits cells with much detail in four.

One block is merged for every cell that is split, so that all images of a batch have the same number of tokens. An
image with the same detail everywhere keeps the grid. Earlier methods with patches of mixed resolutions are Ronen et
al., *Vision Transformers with Mixed-Resolution Tokenization*, 2023, and *Adaptive Patch Transformer*, 2026.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from .layers import in_float32


# The score of cell number n is multiplied by 1 - TIE * n. The factor breaks ties, so that all devices choose the same
# cells. It also keeps the score of each part of a cell below the score of the cell.
TIE = 2.0**-20
# Example of a grid with even numbers of rows and columns. Every cell of such a grid belongs to a block of four cells.
EVEN = (2, 2)
# Factor of the scores of blocks if only later looks at an image place tokens by content. With a larger factor, more
# blocks are split into cells of the grid. This costs less accuracy on photographs that one object fills, and gains
# less on small objects (docs/results.md, "Two looks").
MARGIN = 1.5


def grid_rois(grid: tuple[int, int]) -> torch.Tensor:
    """Return the cells of a grid in row order as RoIs, `(cells, 4)`: left, top, right, bottom."""
    rows, columns = grid
    top, left = torch.meshgrid(torch.arange(rows) / rows, torch.arange(columns) / columns, indexing="ij")
    return torch.stack([left, top, left + 1 / columns, top + 1 / rows], dim=-1).flatten(0, 1)


def cells_of(grids: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RoIs, `(cells, 4)`, and the areas, `(cells,)`, of all cells that `choose_cells` can choose.

    The blocks of four cells in `grids[0]` are first. Each block counts as one large cell. The cells of
    `grids[0]` follow, and then the cells of each finer grid. A cell of `grids[0]` has area 1, so a block has area 4.
    """
    rois = [grid_rois(grid) for grid in grids]
    blocks = without_middle(rois[0].mT.unflatten(1, grids[0]), grids[0])
    first = blocks[:2, ::2, ::2]
    last = blocks[2:, 1::2, 1::2]
    rois.insert(0, torch.cat([first, last]).flatten(1).mT)
    areas = [each.new_full((len(each),), 4.0**-level) for level, each in enumerate(rois, start=-1)]
    return torch.cat(rois), torch.cat(areas)


def cut_patches(images: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Cut images, `(batch, channels, rows * height, columns * width)`, into patches. Return the flattened patches,
    `(batch, rows, columns, channels * height * width)`, with channels first."""
    height, width = patch_size
    patches = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3)


def pick_patches(levels: list[torch.Tensor], patch_size: tuple[int, int], cells: torch.Tensor) -> torch.Tensor:
    """Return the patches of chosen cells.

    Args:
        levels (`list[torch.Tensor]`): Argument of `ContentPlacement.forward`.
        cells (`torch.LongTensor` of shape `(batch, tokens)`): Indices of cells, as `choose_cells` returns them.

    Returns:
        Patches, `(batch, tokens, channels * height * width)`, flattened as in `cut_patches`.
    """
    images = torch.arange(cells.shape[0], device=cells.device).unsqueeze(1)
    picked = None
    first = 0
    for level in levels:
        patches = level.unfold(2, patch_size[0], patch_size[0]).unfold(3, patch_size[1], patch_size[1])
        rows, columns = patches.shape[2:4]
        # Every cell gets a patch of this level. `torch.where` discards the patches of cells that belong to another
        # level. Cutting all patches of an image would take longer.
        index = (cells - first).clamp(0, rows * columns - 1)
        of_level = patches[images, :, index // columns, index % columns].flatten(2)
        picked = of_level if picked is None else torch.where((cells >= first).unsqueeze(-1), of_level, picked)
        first += rows * columns
    return picked


def middle(count: int) -> int:
    """If the number of rows `count` is odd, one row remains after blocks of 2 x 2 cells are formed. Return the index
    of this row, which is near the middle of the grid. Columns are treated in the same way."""
    return 2 * ((count + 1) // 4)


def without_middle(values: torch.Tensor, grid: tuple[int, int], patch_size: tuple[int, int] = (1, 1)) -> torch.Tensor:
    """Remove the cells that belong to no block of four (see `middle`) from values, `(…, rows * height, columns *
    width)`. Each cell has height x width values (`patch_size`)."""
    for axis, count, points in zip((-2, -1), grid, patch_size, strict=True):
        if count % 2:
            start = middle(count) * points
            rest = values.shape[axis] - start - points
            parts = values.narrow(axis, 0, start), values.narrow(axis, start + points, rest)
            values = torch.cat(parts, dim=axis)
    return values


def merge_in_four(
    values: torch.Tensor, grid: tuple[int, int] = EVEN, patch_size: tuple[int, int] = (1, 1)
) -> torch.Tensor:
    """Average the values of cells over blocks of four cells. Arguments are those of `without_middle`."""
    values = without_middle(values, grid, patch_size)
    # Adding slices takes a third of the time of `avg_pool2d`.
    rows = values[..., ::2, :] + values[..., 1::2, :]
    return (rows[..., ::2] + rows[..., 1::2]) / 4


def split_in_four(values: torch.Tensor, grid: tuple[int, int] = EVEN, fill: float = 0.0) -> torch.Tensor:
    """Repeat the value of each cell, `(batch, rows, columns)`, for the four parts of the cell. The parts are cells of
    `grid`. Cells of `grid` that belong to no block of four get the value `fill`."""
    values = values.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    for axis, count in enumerate(grid, start=1):
        if count % 2:
            start = middle(count)
            parts = values.narrow(axis, 0, start), values.narrow(axis, start, count - 1 - start)
            values = torch.cat([parts[0], torch.full_like(values.narrow(axis, 0, 1), fill), parts[1]], dim=axis)
    return values


def detail(level: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Return the mean square of gray values in each cell, `(batch, rows, columns)` float32."""
    return F.avg_pool2d(level.mean(1, keepdim=True).square(), patch_size).squeeze(1)


def lost_detail(levels: list[torch.Tensor], grid: tuple[int, int], patch_size: tuple[int, int]) -> list[torch.Tensor]:
    """Return the detail that each cell loses if it is resized to a patch: the mean square of its gray values in
    `levels[-1]`, minus the mean square of its gray values at the cell's own level.

    Args:
        levels (`list[torch.Tensor]`): Argument of `ContentPlacement.forward`.

    Returns:
        A tensor `(batch, rows, columns)` for each level except the last.
    """
    finest = detail(levels[-1], patch_size)
    losses: list[torch.Tensor] = []
    for level in reversed(levels[:-1]):
        finest = merge_in_four(finest, grid if level is levels[0] else EVEN)
        losses.insert(0, (finest - detail(level, patch_size)).clamp(min=0))
    return losses


def choose_cells(split_scores: list[torch.Tensor], grid: tuple[int, int]) -> torch.Tensor:
    """Choose cells for each image. The number of chosen cells is the number of cells in `grid`.

    At first, each block of four cells of `grid` is merged into one cell. Then the cell with the highest score is split
    in four. Splitting is repeated until there are as many cells as in `grid`. If a part of a split cell has a higher
    score than the split cell, the part's score is lowered to the split cell's score.

    Args:
        split_scores (`list[torch.Tensor]`):
            Scores of the blocks, of the grid's cells, and of the cells of each finer grid except the finest, `(batch,
            rows, columns)` each.

    Returns:
        Indices of the chosen cells in ascending order, `(batch, rows * columns)` int64. Cells are numbered in the
        order of `split_scores`: the blocks, then the cells of the grid, then the cells of each finer grid. The finest
        grid is last. The cells of each grid are numbered row by row.
    """
    sizes = [scores[0].numel() for scores in split_scores]
    grids = [grid] + [EVEN] * (len(split_scores) - 1)
    ordered: list[torch.Tensor] = []
    coarser = None
    first = 0
    for scores, size, shape in zip(split_scores, sizes, [grid, *grids], strict=False):
        # Scores are clamped to positive values, because the factor `1 - TIE * numbers` does not decrease zeros.
        scores = in_float32(scores).clamp(min=1e-20)
        if coarser is not None:
            scores = torch.minimum(scores, split_in_four(coarser, shape, float("inf")))
        numbers = torch.arange(first + 1, first + size + 1, device=scores.device).view(scores.shape[1:])
        coarser = scores * (1 - TIE * numbers)
        ordered.append(coarser.flatten(1))
        first += size
    order = torch.cat(ordered, dim=1).topk(sizes[0]).indices
    splits = torch.zeros(order.shape[0], first, device=order.device).scatter(1, order, 1.0)
    exists = torch.ones_like(split_scores[0], dtype=torch.float32)
    remaining: list[torch.Tensor] = []
    for split, scores, shape in zip(splits.split(sizes, dim=1), split_scores, grids, strict=True):
        split = split.view(scores.shape)
        remaining.append((exists - split).flatten(1))
        exists = split_in_four(split, shape, 1.0)
    remaining = torch.cat([*remaining, exists.flatten(1)], dim=1)
    # `remaining` is 1 for chosen cells and 0 for other cells. `ranks` decreases from the first cell to the last cell.
    # `topk` sorts the products in descending order, so it returns the indices of the chosen cells in ascending order.
    ranks = torch.arange(remaining.shape[1], 0, -1, device=remaining.device)
    return (remaining * ranks).topk(grid[0] * grid[1]).indices


class AttentionForecast(nn.Module):
    """Predict a teacher's attention to each cell of a grid from the pixels of the cell and of cells near it.

    A patch embedding with few channels is followed by dilated convolutions, which reach seven cells in each direction.
    Before training, the prediction is equal for all cells.
    """

    WIDTH = 32

    def __init__(self, patch_size: tuple[int, int], num_channels: int):
        super().__init__()
        self.embedding = nn.Conv2d(num_channels, self.WIDTH, patch_size, stride=patch_size)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(self.WIDTH, self.WIDTH, 3, padding=dilation, dilation=dilation) for dilation in (1, 2, 4)
        )
        self.head = nn.Conv2d(self.WIDTH, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return a logit for each cell, `(batch, rows, columns)` float32. A cell is a patch of `image`, `(batch,
        channels, height, width)`."""
        states = self.embedding(image.to(self.embedding.weight.dtype))
        for convolution in self.convolutions:
            states = states + convolution(F.gelu(states))
        return in_float32(self.head(F.gelu(states))).squeeze(1)


class ContentPlacement(nn.Module):
    """Choose the cells of each image by content, with `choose_cells`. The score of a cell is the square root of its
    `lost_detail`, multiplied by the attention that `AttentionForecast` predicts for the cell. If `config.placement` is
    `"grid_then_content"`, the scores of blocks are also multiplied by `MARGIN`."""

    def __init__(self, config: PatchSparseFormerConfig):
        super().__init__()
        self.config = config
        self.patch_size = pair(config.patch_size)
        # The forecast is frozen, because only bootstrapping trains it. Distributed training would expect a gradient
        # for each trainable parameter.
        self.forecast = AttentionForecast(self.patch_size, config.num_channels).requires_grad_(False)

    def forward(self, levels: list[torch.Tensor], grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            levels (`list[torch.Tensor]`):
                The images at three or more resolutions, `(batch, channels, height, width)` float32 each. A patch of
                `levels[0]` is a block of four cells, a patch of `levels[1]` is a cell of the grid, and a patch of each
                further level is a cell of a finer grid.
            grid (`tuple[int, int]`): Number of rows and number of columns.

        Returns:
            Indices of cells (`choose_cells`), and logits of the `AttentionForecast` for the first finer grid.
        """
        logits = self.forecast(levels[2])
        with torch.no_grad():
            finer = logits.flatten(1).softmax(1).view_as(logits)
            cells = 4 * merge_in_four(finer)
            shares = [4 * merge_in_four(cells, grid), cells, finer]
            losses = lost_detail(levels, grid, self.patch_size)
            while len(shares) < len(losses):
                shares.append(split_in_four(shares[-1]) / 4)
            split_scores = [loss.sqrt() * share for loss, share in zip(losses, shares, strict=False)]
            if self.config.placement == "grid_then_content":
                split_scores[0] = MARGIN * split_scores[0]
            return choose_cells(split_scores, grid), logits
