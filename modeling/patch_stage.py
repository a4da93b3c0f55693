"""The stage before the cortex of a SparseFormer that inherits its teacher's patch embedding.

Each token embeds the pixels in its RoI as the teacher embeds a patch. RoIs are the cells of a grid, or of a quadtree
that is chosen for each image. Positions are the teacher's, interpolated, so that a new student is its teacher at a
lower resolution.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from .cortex import cortex_norm
from .focusing import SparseFormerLatents
from .layers import in_float32
from .placement import ContentPlacement, cells_of
from .pyramid import PatchSampling, grid_rois


def resize_table(values: torch.Tensor, grid: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    """Interpolate values of the cells of a grid, `(cells, channels)`, for the cells of another one."""
    if grid == new:
        return values
    image = in_float32(values).unflatten(0, grid).permute(2, 0, 1).unsqueeze(0)
    resized = F.interpolate(image, new, mode="bicubic", antialias=True)
    return resized.squeeze(0).permute(1, 2, 0).flatten(0, 1).to(values)


class SparseFormerGridLatents(SparseFormerLatents):
    """Positions and RoIs of the cells of a grid, in the place of learned tokens."""

    def __init__(self, config: PatchSparseFormerConfig):
        super().__init__(config, config.hidden_size)
        self.grid = config.token_grid

    def draw(self, config: PatchSparseFormerConfig):
        """Draw positions, and lay RoIs out as the cells of the grid."""
        self._start(grid_rois(self.grid), config.initializer_range)

    def forward(
        self,
        batch_size: int,
        grid: tuple[int, int],
        cells: torch.Tensor | None = None,
        grids: list[tuple[int, int]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return tokens of a grid, `(1, cells, hidden_size)`, their RoIs, `(1, cells, 4)` in float32, and the prefix,
        as `SparseFormerLatents`. A program does not know the grid before it runs: it has tables of all `grids` and
        takes the `cells` of one, given by number, `(1, cells)`."""
        if cells is None:
            tokens, rois = self.on_grid(grid)
            tokens, rois = tokens.repeat(1, 1, 1), in_float32(rois).repeat(1, 1, 1)
        else:
            tokens, rois = (torch.cat(tables)[cells] for tables in zip(*map(self.on_grid, grids), strict=True))
        return tokens, rois, self.prefix(batch_size)

    def on_grid(self, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, `(cells, hidden_size)`, and RoIs, `(cells, 4)`, of a grid: tokens, and how far each RoI is
        from its cell, are interpolated."""
        if grid == self.grid:
            return self.token_embedding, self.initial_rois
        moved = self.initial_rois - grid_rois(self.grid).to(self.initial_rois)
        moved = resize_table(moved, self.grid, grid)
        return resize_table(self.token_embedding, self.grid, grid), grid_rois(grid).to(moved) + moved

    @torch.no_grad()
    def resize_grid(self, grid: tuple[int, int]):
        """Keep the tokens and RoIs of another grid in the place of the present ones."""
        tokens, rois = self.on_grid(grid)
        self.initial_rois = nn.Parameter(rois, self.initial_rois.requires_grad)
        self.token_embedding = nn.Parameter(tokens, self.token_embedding.requires_grad)
        self.grid, self.num_latent_tokens = grid, len(rois)


class SparseFormerTreeLatents(SparseFormerLatents):
    """Positions and RoIs of all cells that a tree can have, those of the coarsest grid first."""

    def __init__(self, config: PatchSparseFormerConfig):
        grids = config.cell_grids()
        super().__init__(config, config.hidden_size, num_rois=sum(map(math.prod, grids)))
        self.grids = grids
        # Cells are cut out of the image, and do not move.
        rois = self.initial_rois.data
        del self.initial_rois
        self.register_buffer("initial_rois", rois)

    def draw(self, config: PatchSparseFormerConfig):
        """Draw positions, and lay RoIs out as the cells of all grids."""
        self._start(cells_of(self.grids), config.initializer_range)

    def forward(
        self, batch_size: int, cells: torch.Tensor, grids: list[tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return tokens `(batch, tokens, hidden_size)` and RoIs `(batch, tokens, 4)` of cells of these grids, given by
        number, `(batch, tokens)`, and the prefix, as `SparseFormerLatents`."""
        tokens, rois = self.token_embedding, in_float32(self.initial_rois)
        if grids != self.grids:
            # Other grids have the positions of ours, finer ones than ours those of the finest.
            parts = tokens.split([math.prod(grid) for grid in self.grids])
            levels = [min(level, len(parts) - 1) for level in range(len(grids))]
            tables = [
                resize_table(parts[level], self.grids[level], grid) for level, grid in zip(levels, grids, strict=True)
            ]
            tokens, rois = torch.cat(tables), cells_of(grids).to(rois)
        return tokens[cells], rois[cells], self.prefix(batch_size)


class SparseFormerPatchLayer(nn.Module):
    """Adds embedded patches to the tokens, which are positions until then."""

    def __init__(self, config: PatchSparseFormerConfig):
        super().__init__()
        self.sampling = PatchSampling(
            pair(config.patch_size),
            config.num_channels,
            config.hidden_size,
            config.sampling_padding_mode,
            cortex_norm(config)(config.hidden_size) if config.patch_norm else None,
        )

    def forward(
        self, positions: torch.Tensor, rois: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, RoIs and points of all images, `(batch, tokens, …)`; arguments as of `PatchSampling`."""
        embedded, points = self.sampling(positions, rois, features)
        return positions + embedded, rois.expand(embedded.shape[0], -1, -1), points


def content_placement(config: PatchSparseFormerConfig) -> ContentPlacement:
    """Return the module that chooses the cells of each image."""
    return ContentPlacement(
        config.placement_rule, pair(config.patch_size), config.num_channels, config.placement_random_share
    )


def pixels_as_features(pixel_values: torch.Tensor) -> torch.Tensor:
    """Return an image in the place of an early convolution's map: 4 x 4 pixels are the channels of one place,
    `(batch, 16 * channels, height / 4, width / 4)`, rounded up."""
    height, width = pixel_values.shape[-2:]
    padded = F.pad(pixel_values, (0, -width % 4, 0, -height % 4), mode="replicate")
    return F.pixel_unshuffle(padded, 4)
