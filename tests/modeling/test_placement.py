"""Trees of cells: the right cells are split, and the cells that are left tile the image."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit import PatchSparseFormerConfig, PatchSparseFormerForImageClassification, PatchSparseFormerModel
from frugalvit.common.choices import PLACEMENT_RULES
from frugalvit.modeling.layers import resize
from frugalvit.modeling.placement import (
    ContentPlacement,
    cells_of,
    choose_cells,
    lost_detail,
    worth_of,
)


TINY = {
    **{"image_size": 32, "patch_size": 4, "num_latent_tokens": 16, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_labels": 3, "pooling": "mean", "num_class_tokens": 0},
}
sides = st.tuples(st.integers(1, 3), st.integers(1, 3))
TREE = {**TINY, "placement": "content"}


def grids_of(grid: tuple[int, int], num_levels: int) -> list[tuple[int, int]]:
    return [(grid[0] << level, grid[1] << level) for level in range(num_levels)]


def image(batch: int = 2, size: tuple[int, int] = (32, 32), seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(2, 4),
    st.integers(0, 30),
    st.integers(0, 3),
    st.data(),
)
def test_cells_that_are_left_are_a_tree_of_the_worthiest(grid, num_levels, splits, ties, data):
    grids = grids_of(grid, num_levels)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    worths = [torch.rand(3, *size, generator=generator) for size in grids[:-1]]
    if ties:
        # Of three values; of one.
        worths = [(worth * (3 if ties == 1 else 0)).floor() for worth in worths]
    splits = min(splits, sum(map(math.prod, grids[:-1])))
    count = math.prod(grid) + 3 * splits
    cells = choose_cells(worths, count)
    assert cells.shape == (3, count) and (cells.diff(dim=1) > 0).all()
    rois = cells_of(grids)[cells]
    # They cover the finest grid's cells, each once.
    centers = cells_of(grids[-1:])[:, :2] + cells_of(grids[-1:])[:, 2:]
    inside = (centers / 2 > rois[:, :, None, :2]) & (centers / 2 < rois[:, :, None, 2:])
    assert (inside.all(-1).sum(1) == 1).all()
    if not ties and splits:
        # What was split is worth more than what could have been split instead.
        flat, sizes = torch.cat([worth.flatten(1) for worth in worths], dim=1), [math.prod(size) for size in grids]
        for own, left in zip(flat, cells, strict=True):
            is_left = torch.zeros(sum(sizes), dtype=torch.bool).index_fill(0, left, True).split(sizes)
            exists, split = torch.ones(grid, dtype=torch.bool), []
            capped, bound, unsplit = [], torch.full(grid, torch.inf), []
            for worth, here, size in zip(own.split(sizes[:-1]), is_left, grids, strict=False):
                bound = torch.minimum(worth.view(size), bound)
                capped.append(bound)
                split.append(exists & ~here.view(size))
                unsplit.append(here.view(size))
                exists, bound = (part.repeat_interleave(2, 0).repeat_interleave(2, 1) for part in (split[-1], bound))
            least = min(bound[part].min() for bound, part in zip(capped, split, strict=True) if part.any())
            most = max(
                (bound[part].max() for bound, part in zip(capped, unsplit, strict=True) if part.any()), default=0
            )
            assert least >= most * (1 - 1e-3)


def test_lost_detail_is_the_difference_from_the_image():
    pixels = image()
    losses = lost_detail(pixels, (4, 4), 4)
    gray = pixels.mean(1, keepdim=True)
    for level, loss in enumerate(losses):
        cells = 1 << level
        shown = F.interpolate(F.adaptive_avg_pool2d(gray, 4 * cells), (32, 32), mode="nearest")
        expected = F.adaptive_avg_pool2d((gray - shown).square(), cells).squeeze(1)
        torch.testing.assert_close(loss, expected)
    assert not any(loss.any() for loss in lost_detail(torch.ones(1, 3, 32, 32), (4, 4), 4))


@pytest.mark.parametrize("rule", PLACEMENT_RULES)
def test_small_cells_lie_where_there_is_something_to_see(rule):
    pixels = torch.zeros(1, 3, 32, 32)
    pixels[:, :, 24:, 8:16] = image(1, (8, 8))
    levels = [resize(pixels, (4 * side, 4 * side)) for side, _ in grids_of((1, 1), 4)]
    placement = ContentPlacement(PatchSparseFormerConfig(**TREE, placement_rule=rule))
    placement.apply(lambda module: module.draw(0.02) if hasattr(module, "draw") else None)
    cells, _ = placement(levels, 10)
    rois = cells_of(grids_of((1, 1), 4))[cells[0]]
    smallest = rois[rois[:, 2] - rois[:, 0] < 0.2]
    assert len(smallest) == 4
    torch.testing.assert_close(smallest.amin(0)[:2], torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(smallest.amax(0)[2:], torch.tensor([0.5, 1.0]))


def test_the_rules_differ():
    pixels = image(4) * torch.linspace(0.1, 3, 32)
    attention = torch.full((4, 8, 8), 1 / 64)
    found = {rule: worth_of(rule, pixels, (4, 4), 4, attention) for rule in PLACEMENT_RULES}
    flat = {rule: torch.cat([worth.flatten(1) for worth in worths], 1) for rule, worths in found.items()}
    torch.testing.assert_close(flat["contrast"][:, 1:5] / 16, (flat["detail"][:, 1:5] / 16).sqrt())
    # Attention that is even weighs cells by their area.
    torch.testing.assert_close(flat["learned"] * 64, flat["contrast"])
    # An even share of four of sixteen bins are two bits.
    even = (torch.arange(4.0).repeat(256).view(1, 1, 32, 32) - 1.5) * 0.7
    for worth in worth_of("entropy", even.expand(1, 3, -1, -1), (4, 4), 3):
        torch.testing.assert_close(worth, torch.full_like(worth, 2.0), atol=1e-4, rtol=0)


def test_patches_are_those_of_their_cells():
    grids, pixels = grids_of((2, 2), 3), image(2, (40, 36))
    levels = [resize(pixels, (4 * rows, 3 * columns)) for rows, columns in grids]
    placement = ContentPlacement(PatchSparseFormerConfig(**TREE | {"patch_size": (4, 3)}))
    patches = placement.patches(levels, torch.tensor([[1, 7, 83], [0, 1, 2]]))
    assert patches.shape == (2, 3, 36)
    torch.testing.assert_close(patches[0, 0].view(3, 4, 3), levels[0][0, :, :4, 3:])
    torch.testing.assert_close(patches[0, 1].view(3, 4, 3), levels[1][0, :, :4, 9:])
    torch.testing.assert_close(patches[0, 2].view(3, 4, 3), levels[2][0, :, 28:, 21:])


def test_counts_are_rounded_down_to_trees():
    config = PatchSparseFormerConfig(**TREE | {"elastic_token_counts": [5, 9, 16], "num_tokens": 12})
    assert config.cell_grids() == [(2, 2), (4, 4), (8, 8)] and config.placement_grid == (2, 2)
    assert (config.num_latent_tokens, config.elastic_token_counts, config.num_tokens) == (16, [4, 7, 16], 10)
    model = PatchSparseFormerModel(config).eval()
    for asked, tokens in ((None, 10), (4, 4), (6, 4), (15, 13)):
        outputs = model(image(), num_tokens=asked, output_rois=True)
        assert outputs.last_hidden_state.shape[1] == tokens == outputs.rois[-1].shape[1]
    with pytest.raises(ValueError, match="3 tokens are fewer than the 4 cells"):
        model(image(), num_tokens=3)
    with pytest.raises(ValueError, match=r"`num_tokens` is 20, expected 1 to 16"):
        model(image(), num_tokens=20)
    model.resize_tokens(1000)
    assert model(image()).last_hidden_state.shape[1] == 64


@settings(deadline=None, max_examples=30)
@given(st.integers(4, 90), st.integers(4, 90), st.integers(8, 40))
def test_images_of_any_size_and_shape(height, width, count):
    torch.manual_seed(0)
    model = PatchSparseFormerModel(PatchSparseFormerConfig(**TREE | {"num_latent_tokens": 40})).eval()
    outputs = model(image(1, (height, width)), num_tokens=count, output_rois=True)
    (rois,) = outputs.rois
    most = math.prod(model.config.cell_grids((height, width))[-1])
    # The count is rounded down for the configuration's own images first.
    assert count - 6 < rois.shape[1] <= count or rois.shape[1] == most
    assert ((rois[..., 2] - rois[..., 0]) * (rois[..., 3] - rois[..., 1])).sum().item() == pytest.approx(1, abs=1e-5)
    assert outputs.last_hidden_state.isfinite().all()


def test_trees_differ_from_image_to_image_and_at_random_while_training():
    torch.manual_seed(0)
    model = PatchSparseFormerModel(PatchSparseFormerConfig(**TREE, placement_random_share=0.9))
    pixels = image(1).expand(8, -1, -1, -1)
    trees = [model.train(mode)(pixels, output_rois=True).rois[-1] for mode in (False, True)]
    assert (trees[0] == trees[0][:1]).all() and not (trees[1] == trees[1][:1]).all()
    pixels = image(2) * torch.linspace(0, 3, 32)
    assert not torch.equal(*model.eval()(torch.stack([pixels[0], pixels[0].mT]), output_rois=True).rois[-1])
    model.train()(pixels).last_hidden_state.sum().backward()
    assert model.embeddings.position_embeddings.grad.abs().sum() > 0


def test_a_grids_student_is_placed_by_content():
    torch.manual_seed(0)
    model = PatchSparseFormerForImageClassification(
        PatchSparseFormerConfig(**TINY | {"elastic_token_counts": [4, 9, 16]})
    ).eval()
    pixels = F.interpolate(image(2, (8, 8)), (32, 32), mode="nearest")
    expected = {count: model(pixels, num_tokens=count).logits for count in (4, 16)}
    model.place_by_content(num_levels=2)
    assert model.config.elastic_token_counts == [4, 7, 16] and model.config.cell_grids() == [(2, 2), (4, 4)]
    for count, logits in expected.items():
        torch.testing.assert_close(model(pixels, num_tokens=count).logits, logits, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="placed by content already"):
        model.place_by_content()


def test_a_forecast_is_even_before_training_and_moves_small_cells():
    torch.manual_seed(0)
    model = PatchSparseFormerModel(PatchSparseFormerConfig(**TREE, placement_rule="learned")).eval()
    pixels = image(2)
    outputs = model(pixels, output_attention_forecast=True, output_rois=True)
    assert outputs.attention_forecast.shape == (2, 8, 8) and not outputs.attention_forecast.any()
    assert model(pixels).attention_forecast is None

    def weigh(logits):
        return logits.index_fill(1, torch.tensor([6, 7]), 20.0)

    model.embeddings.placement.forecast.register_forward_hook(lambda module, args, logits: weigh(logits))
    rois = model(pixels, output_rois=True).rois[-1]
    smallest = rois[(rois[..., 3] - rois[..., 1]) < 0.2]
    assert len(smallest) and (smallest[:, 1] >= 0.75).all()
