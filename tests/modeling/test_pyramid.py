"""Tests of token grids: patches, rows and columns, and position embeddings."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit import PatchSparseFormerConfig, PatchSparseFormerModel
from frugalvit.modeling.placement import cut_patches
from tiny import PATCHES


sides = st.integers(1, 7)
grids = st.tuples(sides, sides)


@settings(deadline=None)
@given(grids, st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_products_with_patches_equal_a_convolution(grid, patch):
    image = torch.randn(2, 3, grid[0] * patch[0], grid[1] * patch[1], generator=torch.Generator().manual_seed(0))
    weight = torch.randn(8, 3, *patch, generator=torch.Generator().manual_seed(1))
    tokens = cut_patches(image, patch).flatten(1, 2) @ weight.flatten(1).T
    torch.testing.assert_close(tokens, F.conv2d(image, weight, stride=patch).flatten(2).mT, atol=1e-4, rtol=1e-3)


def test_the_grid_of_a_count_has_nearly_square_cells():
    for count, image_size, grid in ((64, 224, (8, 8)), (20, 224, (5, 4)), (18, (224, 448), (3, 6))):
        assert PatchSparseFormerConfig(image_size=image_size, num_latent_tokens=count).token_grid == grid


@torch.no_grad()
def test_positions_are_interpolated_to_the_grid_of_a_smaller_count():
    model = PatchSparseFormerModel(PatchSparseFormerConfig(**PATCHES))
    table = torch.nn.init.normal_(model.embeddings.position_embeddings).mT.reshape(1, 32, 4, 4)
    expected = F.interpolate(table, (2, 3), mode="bicubic", antialias=True).flatten(2).squeeze(0).mT
    model.resize_tokens(6)
    torch.testing.assert_close(model.embeddings.position_embeddings.data, expected)
