"""Configuration of a SparseFormer whose tokens embed patches, as its teacher does."""

import math
from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Size, SparseFormerBaseConfig, at_least, pair, rate


def cell_stretch(grid: tuple[int, int], image_size: tuple[int, int]) -> float:
    """Absolute log of the aspect ratio of a grid's cells; 0 for squares."""
    return abs(math.log(image_size[0] * grid[1] / (image_size[1] * grid[0])))


def nearest_grid(num_cells: int, image_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns, of those with `num_cells` cells, whose cells are most nearly square."""
    grids = [(rows, num_cells // rows) for rows in range(1, num_cells + 1) if num_cells % rows == 0]
    return min(grids, key=lambda grid: cell_stretch(grid, image_size))


def choose_grid(num_cells: int, image_size: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of the grid whose cells are most nearly square in images of this height and width.

    Raises:
        ValueError: if cells would be more than twice as long one way as the other; the message names counts that fit.
    """
    if num_cells < 1:
        raise ValueError(f"`num_latent_tokens` is {num_cells}, expected at least 1.")
    most = math.log(2) + 1e-6
    grid = nearest_grid(num_cells, image_size)
    if cell_stretch(grid, image_size) > most:
        counts = sorted(range(1, 4 * num_cells + 8), key=lambda count: abs(count - num_cells))
        fitting = [count for count in counts if cell_stretch(nearest_grid(count, image_size), image_size) <= most]
        raise ValueError(
            f"{num_cells} tokens make no grid of cells that are nearly square in images of {image_size[0]} x "
            f"{image_size[1]} pixels; {', '.join(map(str, sorted(fitting[:3])))} do."
        )
    return grid


def coarsest_grid(image_size: tuple[int, int], most: int = 4) -> tuple[int, int]:
    """Return the rows and columns of the grid whose cells are most nearly square, of those with up to `most` cells and
    at least half as many."""
    sides = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most + 1)]
    grids = [grid for grid in sides if most <= 2 * math.prod(grid) <= 2 * most]
    # Of equally square ones that with more cells.
    return min(grids, key=lambda grid: (round(cell_stretch(grid, image_size), 6), -math.prod(grid)))


@strict
class PatchSparseFormerConfig(SparseFormerBaseConfig):
    r"""
    Configuration of a SparseFormer that inherits its teacher's patch embedding: each token embeds a cell of the image
    as the teacher embeds a patch, so that a new student is its teacher at a lower resolution. Further fields are
    `SparseFormerBaseConfig`'s.

    Args:
        patch_size (`int` or pair of `int`, *optional*, defaults to 16): Height and width of a cell in pixels.
        extra_norms (sequence of `str`, *optional*, defaults to `()`):
            As in `SparseFormerBaseConfig`, and `"patch"`, of embedded cells before positions are added; `"embedding"`,
            of all tokens before the encoder (CLIP).
        token_grid (`int` or pair of `int`, *optional*):
            Rows and columns of the cells of `placement="grid"`. By default those with `num_latent_tokens` cells that
            are most nearly square in an image of `image_size`.
        placement (`str`, *optional*, defaults to `"grid"`):
            Where tokens look: in the cells of a `"grid"`, or, by `"content"`, in those of a quadtree that is chosen
            for each image. Trees have the coarsest grid's cells and three more a split; counts are rounded down.
        placement_rule (`str`, *optional*, defaults to `"detail"`):
            Which cells are split. `"detail"`: those that lose most at the resolution of a patch, the mean squared
            difference times the area. `"contrast"`: the same with the root of the difference. `"entropy"`: those with
            the largest entropy of gray. `"learned"`: the root times a teacher's attention, which convolutions predict.
        placement_grid (`int` or pair of `int`, *optional*):
            The coarsest grid of trees in images of `image_size`; up to four nearly square cells by default.
        num_placement_levels (`int`, *optional*):
            Number of sizes of a tree's cells, at least two. By default until cells have no more pixels than a patch.
        placement_random_share (`float`, *optional*, defaults to 0.0):
            Share of images that have a random tree while training.
        teacher_config (`dict`, *optional*): Configuration of a teacher of Transformers, for `to_plain_vit`.
    """

    model_type = "patch_sparseformer"
    embeds_patches = True

    known_norms = SparseFormerBaseConfig.known_norms | {"patch", "embedding"}

    patch_size: Size = at_least(1)(default=16)
    token_grid: Size | None = at_least(1)(default=None)
    placement: Literal["grid", "content"] = "grid"
    placement_rule: Literal["detail", "contrast", "entropy", "learned"] = "detail"
    placement_grid: Size | None = at_least(1)(default=None)
    num_placement_levels: int | None = at_least(2)(default=None)
    placement_random_share: float | int = rate(default=0.0)
    teacher_config: dict | None = None

    def __post_init__(self, **kwargs):
        height, width = pair(self.patch_size)
        # One number where both are alike: heads of Transformers divide by a backbone's `patch_size`.
        self.patch_size = height if height == width else (height, width)
        if self.placement == "content":
            self.placement_grid = pair(self.placement_grid or coarsest_grid(pair(self.image_size)))
            self.num_latent_tokens = self.tokens_of_tree(self.num_latent_tokens)
            if self.elastic_token_counts:
                self.elastic_token_counts = sorted({*map(self.tokens_of_tree, self.elastic_token_counts)})
            if self.num_tokens is not None:
                self.num_tokens = self.tokens_of_tree(self.num_tokens)
        else:
            self.token_grid = pair(self.token_grid or choose_grid(self.num_latent_tokens, pair(self.image_size)))
        super().__post_init__(**kwargs)

    @property
    def feature_stride(self) -> tuple[int, int]:
        """Height and width in pixels of a cell of feature maps."""
        return pair(self.patch_size)

    def cell_grids(self, image_size: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Return the grids of a tree's cells, coarsest first, each as rows and columns, in images of this height and
        width; the configuration's by default."""
        own = pair(self.image_size)
        rows, columns = self.placement_grid
        height, width = image_size or own
        if own[0] * width != own[1] * height:
            # An image of another shape has cells of about the same shape.
            rows, columns = coarsest_grid((height, width), rows * columns)
        levels = self.num_placement_levels
        if levels is None:
            patch_height, patch_width = pair(self.patch_size)
            # Two at least, as there is nothing to choose in one.
            finer = max(height / (rows * patch_height), width / (columns * patch_width), 2)
            levels = 1 + math.ceil(math.log2(finer) - 1e-9)
        return [(rows << level, columns << level) for level in range(levels)]

    def tokens_of_tree(self, num_tokens: int, image_size: tuple[int, int] | None = None) -> int:
        """Round a count of tokens down to one that a tree can have; `image_size` as in `cell_grids`.

        Raises:
            ValueError: if the coarsest grid has more cells.
        """
        grids = self.cell_grids(image_size)
        base = math.prod(grids[0])
        if num_tokens < base:
            raise ValueError(
                f"{num_tokens} tokens are fewer than the {base} cells of the coarsest grid, {grids[0][0]} x "
                f"{grids[0][1]}; expected {base} or more, or give a coarser `placement_grid`."
            )
        return min(base + (num_tokens - base) // 3 * 3, math.prod(grids[-1]))

    def round_tokens(self, num_tokens: int) -> int:
        """Return the count of latent tokens that the model computes with when `num_tokens` are asked for; errors as of
        `grid_of` and `tokens_of_tree`."""
        if self.placement == "content":
            return self.tokens_of_tree(num_tokens)
        return math.prod(self.grid_of(num_tokens))

    def grid_of(self, num_tokens: int) -> tuple[int, int]:
        """Return the rows and columns of the grid of `num_tokens` tokens; errors as of `choose_grid`."""
        if num_tokens == self.num_latent_tokens:
            return self.token_grid
        return choose_grid(num_tokens, pair(self.image_size))

    def validate_placement(self):
        """Tokens fill their grid, and a grid is no tree's."""
        if self.placement == "content":
            if self.token_grid is not None:
                raise ValueError(f"`token_grid` is {self.token_grid} with `placement='content'`; leave it out.")
            return
        if math.prod(self.token_grid) != self.num_latent_tokens:
            raise ValueError(
                f"`token_grid`={self.token_grid} has {math.prod(self.token_grid)} cells, expected "
                f"`num_latent_tokens`={self.num_latent_tokens}."
            )
        for count in filter(None, (*(self.elastic_token_counts or ()), self.num_tokens)):
            self.grid_of(count)


@strict
class PatchSparseFormerProjectionConfig(PatchSparseFormerConfig):
    """Configuration of `PatchSparseFormerVisionModelWithProjection`, which `AutoModel` tells by its `model_type`.
    `projection_dim` and `projection_bias` as in `SparseFormerProjectionConfig`."""

    model_type = "patch_sparseformer_projection"

    projection_dim: int = at_least(1)(default=512)
    projection_bias: bool = False


__all__ = ["PatchSparseFormerConfig", "PatchSparseFormerProjectionConfig"]
