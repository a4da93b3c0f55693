"""Windows, cells and what is sampled in them."""

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit import SparseFormerConfig, SparseFormerForSemanticSegmentation, SparseFormerModel
from frugalvit.configuration.configuration_sparseformer import choose_grid
from frugalvit.modeling.pyramid import ImagePyramid, PatchSampling, grid_rois, place_in_window, points_in, window_of


sides = st.integers(1, 7)
grids = st.tuples(sides, sides)
TINY = {
    **{"image_size": 32, "patch_size": 4, "num_latent_tokens": 16, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_labels": 3},
}
GLANCE = {"glance_grid": [2, 2], "num_glance_layers": 1, "num_pyramid_levels": 2}


@settings(deadline=None)
@given(grids)
def test_cells_tile_the_image(grid):
    rois = grid_rois(grid)
    assert len(rois) == grid[0] * grid[1]
    assert ((rois[:, 2] - rois[:, 0]) * (rois[:, 3] - rois[:, 1])).sum().item() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(
        window_of(torch.full((1, len(rois), 1), 1 / len(rois)), rois[None])[0, 0], torch.tensor([0.0, 0.0, 1.0, 1.0])
    )


@settings(deadline=None)
@given(grids, st.data())
def test_weight_that_is_even_on_some_cells_has_their_box_for_a_window(grid, data):
    bottom, right = (data.draw(st.integers(1, count)) for count in grid)
    top, left = data.draw(st.integers(0, bottom - 1)), data.draw(st.integers(0, right - 1))
    weights = torch.zeros(grid)
    weights[top:bottom, left:right] = 1
    window = window_of((weights / weights.sum()).flatten().view(1, -1, 1), grid_rois(grid)[None])[0, 0]
    expected = torch.tensor([left / grid[1], top / grid[0], right / grid[1], bottom / grid[0]])
    torch.testing.assert_close(window, expected, atol=1e-4, rtol=0)


@settings(deadline=None)
@given(grids, st.integers(0, 1000))
def test_windows_lie_in_the_image(grid, seed):
    logits = 5 * torch.randn(3, grid[0] * grid[1], 1, generator=torch.Generator().manual_seed(seed))
    window = window_of(logits.softmax(1), grid_rois(grid)[None])
    assert (window >= 0).all() and (window <= 1).all()
    assert (window[..., 2:] > window[..., :2]).all()
    placed = place_in_window(grid_rois(grid)[None], window)
    torch.testing.assert_close(placed[:, 0, :2], window[:, 0, :2])
    torch.testing.assert_close(placed[:, -1, 2:], window[:, 0, 2:])


@settings(deadline=None)
@given(grids, st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_points_in_cells_are_the_pixels_of_the_pyramids_first_image(grid, patch):
    images = torch.randn(2, 3, 24, 20, generator=torch.Generator().manual_seed(0))
    (level,) = ImagePyramid(patch, 1)(images, grid)
    sampling = PatchSampling(patch, 3, 8, "border")
    tokens, points = sampling(None, grid_rois(grid)[None], [level])
    weight = sampling.projection.weight.unflatten(1, (3, *patch))
    expected = F.conv2d(level, weight, sampling.projection.bias, stride=patch).flatten(2).mT
    torch.testing.assert_close(tokens, expected, atol=1e-4, rtol=1e-3)
    assert points.shape == (2, grid[0] * grid[1], patch[0] * patch[1], 2)
    torch.testing.assert_close(points, points_in(grid_rois(grid)[None], patch).expand(2, -1, -1, -1))


def test_smaller_rois_read_larger_images():
    sampling = PatchSampling((2, 2), 3, 8, "border")
    # Four tokens: the first image is made for cells of half of its sides.
    sides = torch.tensor([1.0, 0.5**1.5, 0.25, 0.1])
    rois = torch.stack([torch.zeros(4), torch.zeros(4), sides, sides], dim=1)[None]
    shares = torch.stack([share.flatten() for share in sampling.shares_of_levels(rois, 3)], dim=1)
    expected = torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]])
    torch.testing.assert_close(shares[:3], expected[:3], atol=1e-5, rtol=0)
    # A token that is ten times smaller than the image is between the last two.
    torch.testing.assert_close(shares[3], expected[3], atol=0.4, rtol=0)
    torch.testing.assert_close(shares.sum(1), torch.ones(4))


def test_levels_double_up_to_the_image():
    shapes = [tuple(level.shape[-2:]) for level in ImagePyramid((4, 4), 4)(torch.zeros(1, 3, 24, 40), (2, 2))]
    assert shapes == [(8, 8), (16, 16), (24, 32), (24, 40)]
    # Tokens may have more points than the image has pixels.
    levels = ImagePyramid((8, 8), 2)(torch.zeros(1, 3, 4, 4), (1, 1))
    assert [tuple(level.shape[-2:]) for level in levels] == [(8, 8)] * 2


def test_counts_become_grids_of_nearly_square_cells():
    assert choose_grid(64, (224, 224)) == (8, 8)
    assert choose_grid(20, (224, 224)) in ((4, 5), (5, 4))
    assert choose_grid(18, (224, 448)) == (3, 6)
    with pytest.raises(ValueError, match="17 tokens make no grid .* 15, 16, 18 do"):
        choose_grid(17, (224, 224))


def test_a_glance_moves_the_window_for_each_image():
    torch.manual_seed(0)
    model = SparseFormerModel(SparseFormerConfig(**TINY, **GLANCE)).eval()
    images = torch.randn(2, 3, 32, 32)
    whole = model(images, output_rois=True)
    torch.testing.assert_close(whole.rois[0], grid_rois((4, 4)).expand(2, -1, -1), atol=1e-6, rtol=0)
    # The image's edge is no dead end.
    (whole.rois[0][:, 0, 0].sum() + whole.rois[0][:, -1, 3].sum()).backward()
    assert model.glance.saliency.weight.grad.abs().max() > 0
    model.zero_grad()
    torch.nn.init.normal_(model.glance.saliency.weight, std=2.0)
    outputs = model(images, output_rois=True)
    assert len(outputs.rois) == 1
    assert not torch.allclose(outputs.rois[0][0], outputs.rois[0][1])
    assert not torch.allclose(outputs.last_hidden_state, whole.last_hidden_state)
    # What is seen in the window teaches the glance where it should be.
    outputs.pooler_output[:, 0].sum().backward()
    assert model.glance.saliency.weight.grad.abs().max() > 0


def test_tokens_are_resized_with_their_grid():
    torch.manual_seed(0)
    model = SparseFormerModel(SparseFormerConfig(**TINY, **GLANCE)).eval()
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
    config = SparseFormerConfig(**TINY, decoder_hidden_size=32)
    outputs = SparseFormerForSemanticSegmentation(config)(torch.randn(2, 3, 30, 34), output_token_maps=True)
    assert outputs.logits.shape == (2, 3, 8, 9)
    torch.testing.assert_close(outputs.token_maps.sum(1), torch.ones(2, 8, 9))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_grid": [4, 4], "patch_size": None}, "`token_grid` is .* without `patch_size`"),
        ({"token_grid": [3, 4]}, r"`token_grid`=\(3, 4\) has 12 cells, expected `num_latent_tokens`=16"),
        ({"num_latent_tokens": 17}, "17 tokens make no grid"),
        ({"num_glance_layers": 0}, "num_glance_layers"),
    ],
)
def test_configurations_that_contradict_themselves(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        SparseFormerConfig(**{**TINY, **fields})
