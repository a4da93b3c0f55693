"""Tests of margins and of merged cells that keep their parts, in benchmarks/content_placement.py."""

import math
from unittest import mock

import content_placement
import pytest
import torch

from frugalvit import PatchSparseFormerConfig, PatchSparseFormerModel
from frugalvit.modeling import modeling_patch_sparseformer
from frugalvit.modeling.layers import resize
from frugalvit.modeling.placement import choose_cells, cut_patches


@pytest.mark.parametrize("grid", [(4, 4), (5, 3)])
def test_a_margin_is_the_price_of_an_exchange(grid):
    rows, columns = grid
    generator = torch.Generator().manual_seed(0)
    scores = [torch.rand(9, *shape, generator=generator) for shape in ((rows // 2, columns // 2), grid)]
    # The coarse scores of the first image are 0. Their product with an infinite margin must not be NaN.
    scores[0][0] = 0
    exchanged = []
    for margin in (1.0, 2.0, math.inf):
        cells = content_placement.choose_by_margin(margin, scores, grid)
        exchanged.append((cells < scores[0][0].numel()).sum().item())
        assert margin > 1 or torch.equal(cells, choose_cells(scores, grid))
    assert exchanged[0] > exchanged[1] > exchanged[2] == 0


@torch.no_grad()
def test_merged_cells_get_their_parts():
    config = PatchSparseFormerConfig(
        image_size=112,
        patch_size=14,
        num_latent_tokens=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        placement="content",
    )
    with mock.patch.multiple(modeling_patch_sparseformer, **content_placement.WITH_PARTS):
        embeddings = PatchSparseFormerModel(config).eval().embeddings
    pixel_values = torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    # The upper half of the images has no detail, so blocks of this half are merged.
    pixel_values[:, :, :56] /= 100
    before = embeddings(pixel_values, 16)
    # The first number of each merged cell's embedding changes by the first number of its last part's embedding.
    embeddings.placement.parts[0, 3 * config.hidden_size] = 1
    changes = (embeddings(pixel_values, 16).tokens - before.tokens)[:, 1:]
    parts = embeddings.projection(cut_patches(resize(pixel_values, (56, 56)), (14, 14)))[..., 0]
    expected = torch.zeros_like(changes)
    for image, token in (before.areas > 1).nonzero().tolist():
        right, bottom = (4 * before.rois[image, token, 2:]).round().int().tolist()
        expected[image, token, 0] = parts[image, bottom - 1, right - 1]
    assert expected.any()
    torch.testing.assert_close(changes, expected)
