"""Places of tokens: the cells of a grid, of which blocks of four become one where an image has little to show, and
others become four where it has more.

Every block that is merged pays for one cell that is split, so that all images of a batch have as many tokens, no loop
runs over images or cells, and an image that shows as much everywhere has the grid itself. Mixed resolutions of patches
are older (Ronen et al., *Vision Transformers with Mixed-Resolution Tokenization*, 2023; *Adaptive Patch Transformer*,
2026, splits by entropy and a threshold).
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from .layers import in_float32


# By how much each cell's worth is less than that of the cell before it which is worth as much: ties are decided alike
# everywhere, and no cell is worth as much as the one that it is a part of.
TIE = 2.0**-20
# Any grid of even numbers of rows and columns, all of whose cells are in a block of four.
EVEN = (2, 2)


def grid_rois(grid: tuple[int, int]) -> torch.Tensor:
    """RoIs that are the cells of a grid, `(cells, 4)` as left, top, right, bottom, in row order."""
    rows, columns = grid
    top, left = torch.meshgrid(torch.arange(rows) / rows, torch.arange(columns) / columns, indexing="ij")
    return torch.stack([left, top, left + 1 / columns, top + 1 / rows], dim=-1).flatten(0, 1)


def cells_of(grids: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """RoIs, `(cells, 4)`, and areas, `(cells,)`, 1 for a cell of the first grid: of its blocks of four, then of the
    cells of all grids."""
    rois = [grid_rois(grid) for grid in grids]
    blocks = without_middle(rois[0].mT.unflatten(1, grids[0]), grids[0])
    first = blocks[:2, ::2, ::2]
    last = blocks[2:, 1::2, 1::2]
    rois.insert(0, torch.cat([first, last]).flatten(1).mT)
    areas = [each.new_full((len(each),), 4.0**-level) for level, each in enumerate(rois, start=-1)]
    return torch.cat(rois), torch.cat(areas)


def cut_patches(images: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Cut images `(batch, channels, rows * height, columns * width)` into patches as a patch embedding takes them,
    channels first, `(batch, rows, columns, channels * height * width)`."""
    height, width = patch_size
    patches = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3)


def pick_patches(levels: list[torch.Tensor], patch_size: tuple[int, int], cells: torch.Tensor) -> torch.Tensor:
    """Return the patches of cells, `(batch, tokens)`, numbered through all levels, see `cut_patches`: `(batch, tokens,
    pixels)`."""
    images = torch.arange(cells.shape[0], device=cells.device).unsqueeze(1)
    found = None
    place = 0
    for level in levels:
        patches = level.unfold(2, patch_size[0], patch_size[0]).unfold(3, patch_size[1], patch_size[1])
        rows, columns = patches.shape[2:4]
        # Of cells of other levels any patch; few copies of these cost less than one of all cells.
        number = (cells - place).clamp(0, rows * columns - 1)
        here = patches[images, :, number // columns, number % columns].flatten(2)
        found = here if found is None else torch.where((cells >= place).unsqueeze(-1), here, found)
        place += rows * columns
    return found


def middle(count: int) -> int:
    """The row or column of an odd grid that is in no block of four, next to its middle or in it."""
    return 2 * ((count + 1) // 4)


def without_middle(values: torch.Tensor, grid: tuple[int, int], patch_size: tuple[int, int] = (1, 1)) -> torch.Tensor:
    """Leave out the middle row and column of odd grids: values of cells, each of `patch_size` values, `(…, rows,
    columns)`."""
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
    """Average values of cells, see `without_middle`, for blocks of four with as many values each as a cell."""
    values = without_middle(values, grid, patch_size)
    # A third of the time of average pooling.
    rows = values[..., ::2, :] + values[..., 1::2, :]
    return (rows[..., ::2] + rows[..., 1::2]) / 4


def split_in_four(values: torch.Tensor, grid: tuple[int, int] = EVEN, fill: float = 0.0) -> torch.Tensor:
    """Values of cells, `(batch, rows, columns)`, for each of the four that they are split into, in a grid whose cells
    that are in no block have the value `fill`."""
    values = values.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    for axis, count in enumerate(grid, start=1):
        if count % 2:
            start = middle(count)
            parts = values.narrow(axis, 0, start), values.narrow(axis, start, count - 1 - start)
            values = torch.cat([parts[0], torch.full_like(values.narrow(axis, 0, 1), fill), parts[1]], dim=axis)
    return values


def detail(level: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Mean square of the gray values in each cell, `(batch, rows, columns)` float32."""
    return F.avg_pool2d(level.mean(1, keepdim=True).square(), patch_size).squeeze(1)


def lost_detail(levels: list[torch.Tensor], grid: tuple[int, int], patch_size: tuple[int, int]) -> list[torch.Tensor]:
    """Detail that cells lose when they are shown with the points of a patch: the mean square of the finest level in a
    cell minus that of its own level, `(batch, rows, columns)` of each level but the finest, which loses nothing.
    `levels` as of `ContentPlacement`."""
    finest = detail(levels[-1], patch_size)
    losses: list[torch.Tensor] = []
    for level in reversed(levels[:-1]):
        finest = merge_in_four(finest, grid if level is levels[0] else EVEN)
        losses.insert(0, (finest - detail(level, patch_size)).clamp(min=0))
    return losses


def choose_cells(split_scores: list[torch.Tensor], grid: tuple[int, int]) -> torch.Tensor:
    """Choose as many cells as a grid has: numbers of cells, `(batch, rows * columns)` int64, those of blocks first,
    row by row, then those of the grid and of finer ones. As many blocks or cells as there are blocks are split,
    those with the largest `split_scores`, `(batch, rows, columns)` of blocks, the grid and each finer grid but the
    finest. A cell counts no more than the one that it is a part of."""
    sizes = [worth[0].numel() for worth in split_scores]
    grids = [grid] + [EVEN] * (len(split_scores) - 1)
    ordered: list[torch.Tensor] = []
    above = None
    place = 0
    for worth, size, shape in zip(split_scores, sizes, [grid, *grids], strict=False):
        # From a positive number on, so that a factor below 1 makes it smaller.
        worth = in_float32(worth).clamp(min=1e-20)
        if above is not None:
            worth = torch.minimum(worth, split_in_four(above, shape, float("inf")))
        numbers = torch.arange(place + 1, place + size + 1, device=worth.device).view(worth.shape[1:])
        above = worth * (1 - TIE * numbers)
        ordered.append(above.flatten(1))
        place += size
    order = torch.cat(ordered, dim=1).topk(sizes[0]).indices
    splits = torch.zeros(order.shape[0], place, device=order.device).scatter(1, order, 1.0)
    is_there = torch.ones_like(split_scores[0], dtype=torch.float32)
    left: list[torch.Tensor] = []
    for split, worth, shape in zip(splits.split(sizes, dim=1), split_scores, grids, strict=True):
        split = split.view(worth.shape)
        left.append((is_there - split).flatten(1))
        is_there = split_in_four(split, shape, 1.0)
    left = torch.cat([*left, is_there.flatten(1)], dim=1)
    # In the order of their numbers.
    ranks = torch.arange(left.shape[1], 0, -1, device=left.device)
    return (left * ranks).topk(grid[0] * grid[1]).indices


class AttentionForecast(nn.Module):
    """Predicts how much a teacher attends to each cell of a grid, from the pixels of the cells around it.

    An embedding of patches to few channels, then convolutions that see seven cells far each way. Before training, it
    predicts the same for all cells.
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
        """`(batch, channels, height, width)`, where a cell has a patch's points, to logits `(batch, rows, columns)` in
        float32."""
        states = self.embedding(image.to(self.embedding.weight.dtype))
        for convolution in self.convolutions:
            states = states + convolution(F.gelu(states))
        return in_float32(self.head(F.gelu(states))).squeeze(1)


class ContentPlacement(nn.Module):
    """Chooses each image's cells: splitting one is worth the root of the detail that it loses, times a teacher's
    attention to it."""

    def __init__(self, config: PatchSparseFormerConfig):
        super().__init__()
        self.patch_size = pair(config.patch_size)
        # It learns from a teacher alone: other trainings would wait for its gradients.
        self.forecast = AttentionForecast(self.patch_size, config.num_channels).requires_grad_(False)

    def forward(self, levels: list[torch.Tensor], grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose as many cells as `grid` has, given the images in the resolution of its blocks of four, of its cells
        and of one finer grid or more, `(batch, channels, height, width)` float32 each. Return them as `choose_cells`
        does, and the logits of the `AttentionForecast` for the first of the finer grids."""
        logits = self.forecast(levels[2])
        with torch.no_grad():
            finer = logits.flatten(1).softmax(1).view_as(logits)
            cells = 4 * merge_in_four(finer)
            shares = [4 * merge_in_four(cells, grid), cells, finer]
            losses = lost_detail(levels, grid, self.patch_size)
            while len(shares) < len(losses):
                shares.append(split_in_four(shares[-1]) / 4)
            split_scores = [loss.sqrt() * share for loss, share in zip(losses, shares, strict=False)]
            return choose_cells(split_scores, grid), logits
