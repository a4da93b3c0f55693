"""Configuration of PatchSparseFormers."""

import itertools
import math
from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Size, SparseFormerBaseConfig, at_least, pair


Placement = Literal["grid", "content", "grid_then_content"]


@strict
class PatchSparseFormerConfig(SparseFormerBaseConfig):
    r"""
    Configuration of a SparseFormer that inherits its teacher's patch embedding. Each latent token embeds one cell of
    the image: the cell is resized to the size of a patch and embedded like a patch. An untrained student therefore
    equals its teacher at a lower resolution. Other fields are documented in `SparseFormerBaseConfig`.

    Args:
        patch_size (`int` or pair of `int`, *optional*, defaults to 16): Size of each resized cell in pixels.
        extra_norms (sequence of `str`, *optional*, defaults to `()`):
            `"patch"` for a norm of embedded cells before positions are added, `"embedding"` for a norm of all tokens
            before the encoder (CLIP), and the names that `SparseFormerBaseConfig` documents.
        token_grid (`int` or pair of `int`, *optional*):
            Numbers of rows and columns of the grid that has `num_latent_tokens` cells. By default, the cells of images
            of `image_size` are as close to squares as possible.
        placement (`str`, *optional*, defaults to `"grid"`):
            `"grid"` for tokens on the cells of a grid, or `"content"` for cells that depend on the image. With
            `"content"`, blocks of four cells with little detail are merged, and cells with much detail are split in
            four. The number of cells does not change. With `"grid_then_content"`, cells form a grid, except in later
            looks of `classify_adaptively`, which merge fewer blocks than `"content"`.
        teacher_config (`dict`, *optional*): The teacher's configuration in Transformers, for `to_plain_vit`.
    """

    model_type = "patch_sparseformer"
    has_patch_embedding = True

    known_norms = SparseFormerBaseConfig.known_norms | {"patch", "embedding"}

    patch_size: Size = at_least(1)(default=16)
    token_grid: Size | None = at_least(1)(default=None)
    placement: Placement = "grid"
    teacher_config: dict | None = None

    def __post_init__(self, **kwargs):
        height, width = pair(self.patch_size)
        # A square patch size is stored as one number, because heads in Transformers divide by `patch_size`.
        self.patch_size = height if height == width else (height, width)
        self.token_grid = pair(self.token_grid or self.grid_of(self.num_latent_tokens, "num_latent_tokens"))
        super().__post_init__(**kwargs)

    @property
    def feature_stride(self) -> tuple[int, int]:
        """Height and width of a feature map's cell in pixels."""
        return pair(self.patch_size)

    def cell_grids(self, num_tokens: int, image_size: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the grid of `num_tokens` cells, followed by finer grids. Each grid has twice the rows and columns of
        the grid before it. In images of `image_size`, cells of the finer grids are at least as large as a patch."""
        rows, columns = self.grid_of(num_tokens)
        height, width = pair(self.patch_size)
        finest = min(image_size[0] // (rows * height), image_size[1] // (columns * width))
        return [(rows << level, columns << level) for level in range(max(finest, 1).bit_length())]

    def grid_of(self, num_tokens: int, argument: str = "num_tokens") -> tuple[int, int]:
        """Return the grid of `num_tokens` cells as `(rows, columns)`. For `num_latent_tokens` cells, this is
        `token_grid`. For other numbers, cells of images of `image_size` are as close to squares as possible.

        Raises:
            ValueError: if `num_tokens` is below 1, or one side of the cells would be more than twice as long as the
                other side. The message names `argument` and suggests allowed numbers of cells.
        """
        if self.token_grid is not None and num_tokens == self.num_latent_tokens:
            return self.token_grid
        if num_tokens < 1:
            raise ValueError(f"`{argument}` is {num_tokens}, expected at least 1.")
        grid = self._squarest_grid(num_tokens)
        if grid is None:
            distances = itertools.count(1)
            counts = (count for distance in distances for count in (num_tokens - distance, num_tokens + distance))
            fitting = (count for count in counts if count > 0 and self._squarest_grid(count) is not None)
            nearest = sorted(itertools.islice(fitting, 3))
            height, width = pair(self.image_size)
            raise ValueError(
                f"`{argument}` is {num_tokens}, which makes no grid of nearly square cells in images of {height} x "
                f"{width} pixels; choose {', '.join(map(str, nearest))} or another number that does."
            )
        return grid

    def _squarest_grid(self, num_cells: int) -> tuple[int, int] | None:
        """Return the grid of `num_cells` cells that are as close to squares as possible in images of `image_size`. If
        one side of these cells is more than twice as long as the other side, return None."""
        height, width = pair(self.image_size)
        grids = [(rows, num_cells // rows) for rows in range(1, num_cells + 1) if num_cells % rows == 0]
        # Logarithms of the cells' aspect ratios.
        stretch, grid = min(
            (abs(math.log(height * columns / (width * rows))), (rows, columns)) for rows, columns in grids
        )
        return grid if stretch <= math.log(2) + 1e-6 else None

    def validate_placement(self):
        """Check that a grid exists for each number of tokens in the configuration."""
        if math.prod(self.token_grid) != self.num_latent_tokens:
            raise ValueError(
                f"`token_grid`={self.token_grid} has {math.prod(self.token_grid)} cells, expected "
                f"`num_latent_tokens`={self.num_latent_tokens}."
            )
        for count in self.elastic_token_counts or ():
            self.grid_of(count, "elastic_token_counts")
        if self.num_tokens is not None:
            self.grid_of(self.num_tokens)


@strict
class PatchSparseFormerProjectionConfig(PatchSparseFormerConfig):
    """Configuration of `PatchSparseFormerVisionModelWithProjection`. `SparseFormerProjectionConfig` documents
    `projection_dim` and `projection_bias`."""

    model_type = "patch_sparseformer_projection"

    projection_dim: int = at_least(1)(default=512)
    projection_bias: bool = False


__all__ = ["PatchSparseFormerConfig", "PatchSparseFormerProjectionConfig"]
