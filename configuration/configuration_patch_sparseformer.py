"""Configuration of a SparseFormer whose tokens embed patches, as its teacher does."""

import contextlib
import math

from huggingface_hub.dataclasses import strict

from .configuration_base import pair
from .configuration_sparseformer_base import SparseFormerBaseConfig, one_or_pair


# Where tokens look, and what says which cells of a tree are split.
PLACEMENTS = ("grid", "content")
PLACEMENT_RULES = ("detail", "contrast", "entropy", "learned")


def stretch_of_cells(grid: tuple[int, int], image_size: tuple[int, int]) -> float:
    """Return how far the cells of a grid are from squares: the absolute log of their aspect ratio.

    Args:
        grid (pair of `int`): Rows and columns.
        image_size (pair of `int`): Height and width in pixels.
    """
    return abs(math.log(image_size[0] * grid[1] / (image_size[1] * grid[0])))


def choose_grid(num_cells: int, image_size: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of the grid whose cells are most nearly square.

    Args:
        num_cells (`int`): Cells of the grid.
        image_size (pair of `int`): Height and width in pixels.

    Raises:
        ValueError: if cells would be more than twice as long one way as the other; the message names counts that fit.
    """

    def length(count: int) -> tuple[float, tuple[int, int]]:
        grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
        ratios = {grid: stretch_of_cells(grid, image_size) for grid in grids}
        best = min(grids, key=ratios.get)
        return ratios[best], best

    ratio, grid = length(num_cells)
    if ratio > math.log(2) + 1e-6:
        fitting = [n for n in range(1, 4 * num_cells + 8) if length(n)[0] <= math.log(2) + 1e-6]
        nearest = sorted(sorted(fitting, key=lambda n: abs(n - num_cells))[:3])
        raise ValueError(
            f"{num_cells} tokens make no grid of cells that are nearly square in images of "
            f"{image_size[0]} x {image_size[1]} pixels; {', '.join(map(str, nearest))} do."
        )
    return grid


def coarsest_grid(image_size: tuple[int, int], most: int = 4) -> tuple[int, int]:
    """Return the rows and columns of the grid whose cells are most nearly square, of those with few cells.

    Args:
        image_size (pair of `int`): Height and width in pixels.
        most (`int`, *optional*, defaults to 4): Most cells of the grid, which has at least half as many.
    """
    grids = [
        (rows, columns)
        for rows in range(1, most + 1)
        for columns in range(1, most // rows + 1)
        if 2 * rows * columns >= most
    ]
    # Of equally square ones that with more cells.
    return min(grids, key=lambda grid: (round(stretch_of_cells(grid, image_size), 6), -math.prod(grid)))


@strict
class PatchSparseFormerConfig(SparseFormerBaseConfig):
    r"""
    Configuration of a SparseFormer that inherits its teacher's patch embedding: each token embeds the pixels at a grid
    of points in its RoI as the teacher embeds a patch, so that a new student is its teacher at a lower resolution.
    Fields of the cortex are `SparseFormerBaseConfig`'s.

    Args:
        patch_size (`int` or pair of `int`, *optional*, defaults to 16):
            Rows and columns of points whose pixels a token embeds by a linear layer.
        patch_norm (`bool`, *optional*, defaults to `False`): A norm follows that layer, before positions are added.
        embedding_norm (`bool`, *optional*, defaults to `False`): A norm of all tokens before the cortex (CLIP).
        token_grid (`int` or pair of `int`, *optional*):
            Rows and columns of the cells that are the tokens' first RoIs, in row order. By default, those with
            `num_latent_tokens` cells that are most nearly square in an image of `image_size`.
        placement (`str`, *optional*, defaults to `"grid"`):
            Where tokens look: in the cells of a `"grid"`, or, by `"content"`, in those of a quadtree that is chosen
            for each image, see `frugalvit.modeling.placement`. Trees have the coarsest grid's cells and three more for
            each split; other counts are rounded down.
        placement_rule (`str`, *optional*, defaults to `"detail"`):
            Which cells of a tree are split. `"detail"`: those that lose most when they have the resolution of a patch,
            the mean squared difference times the cell's area. `"contrast"`: the same with the root of the difference.
            `"entropy"`: those whose gray values have the largest entropy. `"learned"`: the root of the difference
            times the attention of a teacher to the cell, which a few convolutions predict.
        placement_grid (`int` or pair of `int`, *optional*):
            The coarsest grid of trees in images of `image_size`; up to four nearly square cells by default.
        num_placement_levels (`int`, *optional*):
            Number of sizes of a tree's cells, at least two, each half of the one before. By default, as many as it
            takes until the smallest cells have no more pixels than a patch has points.
        placement_random_share (`float`, *optional*, defaults to 0.0):
            Share of images that have a random tree while training.
        sampling_padding_mode (`str`, *optional*, defaults to `"border"`):
            Values that a point outside the image reads: "border" or "zeros".

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, if values contradict each other, or
            if a name looks like a misspelled field; the message says what was given and what would fit.
        ValueError: if tokens make no grid, or fewer than a tree has.
    """

    model_type = "patch_sparseformer"

    patch_size: int | list[int] | tuple[int, int] = 16
    patch_norm: bool = False
    embedding_norm: bool = False
    token_grid: int | list[int] | tuple[int, int] | None = None
    placement: str = "grid"
    placement_rule: str = "detail"
    placement_grid: int | list[int] | tuple[int, int] | None = None
    num_placement_levels: int | None = None
    placement_random_share: float | int = 0.0
    sampling_padding_mode: str = "border"

    def __post_init__(self, **kwargs):
        self.patch_size = one_or_pair(self.patch_size)
        if self.feature_stride is None:
            self.feature_stride = self.patch_size
        # `validate` refuses values that make no sense.
        with contextlib.suppress(TypeError, ValueError, IndexError, ZeroDivisionError):
            if self.placement == "content":
                self._round_token_counts()
            else:
                grid = self.token_grid or choose_grid(self.num_latent_tokens, pair(self.image_size))
                self.token_grid = pair(grid)
        super().__post_init__(**kwargs)

    @property
    def map_channels(self) -> int:
        """Channels of the map that the paper's segmentation head reads: 4 x 4 pixels, see `pixels_as_features`."""
        return 16 * self.num_channels

    def _round_token_counts(self):
        self.placement_grid = pair(self.placement_grid or coarsest_grid(pair(self.image_size)))
        self.num_latent_tokens = self.tokens_of_tree(self.num_latent_tokens)
        if self.elastic_token_counts:
            self.elastic_token_counts = sorted({*map(self.tokens_of_tree, self.elastic_token_counts)})
        if self.num_tokens is not None:
            self.num_tokens = self.tokens_of_tree(self.num_tokens)

    def cell_grids(self, image_size: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Return the grids of a tree's cells, coarsest first, each as rows and columns.

        Args:
            image_size (pair of `int`, *optional*): Height and width in pixels; the configuration's if not given.
        """
        own, (rows, columns) = pair(self.image_size), self.placement_grid
        height, width = image_size or own
        if own[0] * width != own[1] * height:
            # An image of another shape has cells of about the same shape.
            rows, columns = coarsest_grid((height, width), rows * columns)
        levels, points = self.num_placement_levels, pair(self.patch_size)
        if levels is None:
            # Two at least, as there is nothing to choose in one.
            finer = max(height / (rows * points[0]), width / (columns * points[1]), 2)
            levels = 1 + math.ceil(math.log2(finer) - 1e-9)
        return [(rows << level, columns << level) for level in range(levels)]

    def tokens_of_tree(self, num_tokens: int, image_size: tuple[int, int] | None = None) -> int:
        """Round a count of tokens down to one that a tree can have.

        Args:
            num_tokens (`int`): Latent tokens.
            image_size (pair of `int`, *optional*): Height and width in pixels; the configuration's if not given.

        Raises:
            ValueError: if the coarsest grid has more cells.
        """
        grids = self.cell_grids(image_size)
        base, most = math.prod(grids[0]), math.prod(grids[-1])
        if num_tokens < base:
            raise ValueError(
                f"{num_tokens} tokens are fewer than the {base} cells of the coarsest grid, {grids[0][0]} x "
                f"{grids[0][1]}; expected {base} or more, or give a coarser `placement_grid`."
            )
        return min(base + (num_tokens - base) // 3 * 3, most)

    def round_tokens(self, num_tokens: int) -> int:
        """Return the count of latent tokens that the model computes with when `num_tokens` are asked for: that of
        `tokens_of_tree`, with its errors, if tokens are placed by content, else `num_tokens`."""
        return self.tokens_of_tree(num_tokens) if self.placement == "content" else num_tokens

    def grid_of(self, num_tokens: int) -> tuple[int, int]:
        """Return the rows and columns of the grid of `num_tokens` tokens that embed patches.

        Raises:
            ValueError: if so many tokens make no grid.
        """
        if num_tokens == self.num_latent_tokens:
            return self.token_grid
        return choose_grid(num_tokens, pair(self.image_size))

    def validate_patch_sizes(self):
        """Sizes of patches, grids and trees are positive."""
        self._check_counts("num_placement_levels")
        for name in ("patch_size", "token_grid", "placement_grid"):
            if getattr(self, name) is not None:
                self._check_sizes(name)

    def validate_placement(self):
        """Tokens fill their grid, and fields of trees are those of trees."""
        self._check_choices(
            placement=PLACEMENTS, placement_rule=PLACEMENT_RULES, sampling_padding_mode=("border", "zeros")
        )
        self._check_rates("placement_random_share")
        if self.placement == "content":
            if self.token_grid is not None:
                raise ValueError(f"`token_grid` is {self.token_grid} with `placement='content'`; leave it out.")
            if self.num_placement_levels == 1:
                raise ValueError("`num_placement_levels` is 1, expected 2 or more; `placement='grid'` has one.")
            return
        # Raises where there is none.
        grid = self.token_grid or choose_grid(self.num_latent_tokens, pair(self.image_size))
        if math.prod(grid) != self.num_latent_tokens:
            raise ValueError(
                f"`token_grid`={self.token_grid} has {math.prod(grid)} cells, expected "
                f"`num_latent_tokens`={self.num_latent_tokens}."
            )

    def validate_token_counts(self):
        """Counts of tokens increase up to the largest, and each makes a grid or a tree."""
        super().validate_token_counts()
        # Raises where there is none.
        for count in (*(self.elastic_token_counts or ()), self.default_num_tokens):
            self.grid_of(count) if self.placement == "grid" else self.tokens_of_tree(count)


__all__ = ["PatchSparseFormerConfig"]
