"""Cells of grids and what is sampled in them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit import PatchSparseFormerConfig, SparseFormerForSemanticSegmentation, SparseFormerModel
from frugalvit.configuration.configuration_patch_sparseformer import choose_grid
from frugalvit.modeling.pyramid import GridImage, PatchSampling, grid_rois, points_in


sides = st.integers(1, 7)
grids = st.tuples(sides, sides)
TINY = {
    **{"image_size": 32, "patch_size": 4, "num_latent_tokens": 16, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_labels": 3},
}


@settings(deadline=None)
@given(grids)
def test_cells_tile_the_image(grid):
    rois = grid_rois(grid)
    assert len(rois) == grid[0] * grid[1]
    assert ((rois[:, 2] - rois[:, 0]) * (rois[:, 3] - rois[:, 1])).sum().item() == pytest.approx(1, abs=1e-5)


@settings(deadline=None)
@given(grids, st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_points_in_cells_are_the_pixels_of_the_grids_image(grid, patch):
    images = torch.randn(2, 3, 24, 20, generator=torch.Generator().manual_seed(0))
    image = GridImage(patch)(images, grid)
    sampling = PatchSampling(patch, 3, 8, "border")
    tokens, points = sampling(None, grid_rois(grid)[None], image)
    weight = sampling.projection.weight.unflatten(1, (3, *patch))
    expected = F.conv2d(image, weight, sampling.projection.bias, stride=patch).flatten(2).mT
    torch.testing.assert_close(tokens, expected, atol=1e-4, rtol=1e-3)
    assert points.shape == (2, grid[0] * grid[1], patch[0] * patch[1], 2)
    torch.testing.assert_close(points, points_in(grid_rois(grid)[None], patch).expand(2, -1, -1, -1))


def test_counts_become_grids_of_nearly_square_cells():
    assert choose_grid(64, (224, 224)) == (8, 8)
    assert choose_grid(20, (224, 224)) in ((4, 5), (5, 4))
    assert choose_grid(18, (224, 448)) == (3, 6)
    with pytest.raises(ValueError, match="17 tokens make no grid .* 15, 16, 18 do"):
        choose_grid(17, (224, 224))


def test_tokens_are_resized_with_their_grid():
    torch.manual_seed(0)
    model = SparseFormerModel(PatchSparseFormerConfig(**TINY)).eval()
    torch.nn.init.normal_(model.latents.token_embedding)
    images = torch.randn(2, 3, 32, 32)
    before = model(images).pooler_output
    model.resize_tokens(6)
    assert model.config.token_grid == (2, 3)
    assert model(images).last_hidden_state.shape == (2, 7, 32)
    assert SparseFormerModel(model.config)(images).last_hidden_state.shape == (2, 7, 32)
    model.resize_tokens(16)
    assert model.config.num_latent_tokens == 16 and not torch.allclose(model(images).pooler_output, before)
    with pytest.raises(ValueError, match="17 tokens make no grid"):
        model.resize_tokens(17)


def test_images_are_segmented_by_patches():
    config = PatchSparseFormerConfig(**TINY, decoder_hidden_size=32)
    outputs = SparseFormerForSemanticSegmentation(config)(torch.randn(2, 3, 30, 34), output_token_maps=True)
    assert outputs.logits.shape == (2, 3, 8, 9)
    torch.testing.assert_close(outputs.token_maps.sum(1), torch.ones(2, 8, 9))
