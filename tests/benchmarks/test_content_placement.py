"""Tests of `choose_by_margin` in benchmarks/content_placement.py."""

import math

import content_placement
import pytest
import torch

from frugalvit.modeling.placement import choose_cells


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
