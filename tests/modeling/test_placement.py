"""Tests of placement by content: choosing cells, cutting patches, and pooling tokens by area."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit import PatchSparseFormerConfig, PatchSparseFormerForImageClassification
from frugalvit.modeling.layers import AttentionPooling, Pooler, resize
from frugalvit.modeling.placement import (
    cells_of,
    choose_cells,
    cut_patches,
    lost_detail,
    merge_in_four,
    pick_patches,
    split_in_four,
)
from tiny import PATCHES


TINY = PATCHES | {"num_labels": 3, "pooling": "mean", "num_class_tokens": 0}
grids = st.tuples(st.integers(2, 7), st.integers(2, 7))


def finer(grid: tuple[int, int], levels: int) -> list[tuple[int, int]]:
    return [(grid[0] << level, grid[1] << level) for level in range(levels)]


def image(batch: int = 2, size: tuple[int, int] = (32, 32), seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


def levels_of(pixels: torch.Tensor, grid: tuple[int, int], patch_size=(4, 4), levels: int = 2) -> list[torch.Tensor]:
    shown = [resize(pixels, (rows * patch_size[0], columns * patch_size[1])) for rows, columns in finer(grid, levels)]
    return [merge_in_four(shown[0], grid, patch_size), *shown]


def model_of(placement: str = "content", **fields) -> PatchSparseFormerForImageClassification:
    torch.manual_seed(0)
    return PatchSparseFormerForImageClassification(
        PatchSparseFormerConfig(**TINY | {"placement": placement} | fields)
    ).eval()


@settings(deadline=None)
@given(grids, st.integers(2, 3), st.integers(0, 3), st.integers(0, 1000))
def test_cells_tile_the_image_and_blocks_with_the_highest_scores_are_split(grid, levels, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(grid[0] // 2, grid[1] // 2), *finer(grid, levels)]
    split_scores = [torch.rand(3, *shape, generator=generator) for shape in shapes[:-1]]
    if ties:
        # If `ties` is 1, each score is rounded down to 0, 1 or 2, so many scores are equal. If `ties` is 2 or 3, all
        # scores are 0.
        split_scores = [(scores * (3 if ties == 1 else 0)).floor() for scores in split_scores]
    cells = choose_cells(split_scores, grid)
    assert cells.shape == (3, math.prod(grid)) and (cells.diff(dim=1) > 0).all()
    rois, areas = cells_of(finer(grid, levels))
    sides = rois[:, 2:] - rois[:, :2]
    torch.testing.assert_close(sides.prod(1) * math.prod(grid), areas)
    torch.testing.assert_close(areas[cells].mean(1), torch.ones(3))
    # Each cell of the finest grid lies in exactly one chosen cell.
    finest = rois[-math.prod(shapes[-1]) :]
    centers = (finest[:, :2] + finest[:, 2:]) / 2
    chosen = rois[cells][:, :, None]
    inside = ((centers > chosen[..., :2]) & (centers < chosen[..., 2:])).all(-1)
    assert (inside.sum(1) == 1).all()
    if ties == 3:
        # With equal scores, no block is merged and no cell is split.
        assert (areas[cells] == 1).all()
    elif not ties:
        # A block that stays whole has no higher score than any block that is split.
        blocks = split_scores[0].flatten(1)
        for scores, chosen in zip(blocks, cells, strict=True):
            whole = torch.zeros(len(scores), dtype=torch.bool).index_fill(0, chosen[chosen < len(scores)], True)
            assert not whole.any() or whole.all() or scores[whole].max() <= scores[~whole].min()


@settings(deadline=None)
@given(grids)
def test_merging_reverses_splitting(grid):
    values = torch.rand(2, grid[0] // 2, grid[1] // 2)
    split = split_in_four(values, grid, float("nan"))
    assert split.shape == (2, *grid)
    torch.testing.assert_close(merge_in_four(split, grid), values)


def test_lost_detail_is_the_difference_from_the_image():
    pixels = image()
    blocks, cells = (F.avg_pool2d(pixels, factor) for factor in (4, 2))
    gray = pixels.mean(1, keepdim=True)
    losses = lost_detail([blocks, cells, pixels], (4, 4), (4, 4))
    for shown, rows, loss in zip((blocks, cells), (2, 4), losses, strict=True):
        shown = F.interpolate(shown.mean(1, keepdim=True), (32, 32), mode="nearest")
        torch.testing.assert_close(loss, F.adaptive_avg_pool2d((gray - shown).square(), rows).squeeze(1))


def test_small_cells_lie_where_the_image_has_detail():
    pixels = torch.zeros(1, 3, 32, 32)
    pixels[:, :, 16:24, 8:16] = image(1, (8, 8))
    (rois,) = model_of()(pixels, output_rois=True).rois
    smallest = rois[rois[..., 2] - rois[..., 0] < 0.2]
    torch.testing.assert_close(smallest.amin(0)[:2], torch.tensor([0.25, 0.5]))
    torch.testing.assert_close(smallest.amax(0)[2:], torch.tensor([0.5, 0.75]))


def test_a_token_has_the_patch_of_its_cell():
    levels = levels_of(image(2, (40, 36)), (5, 2), (4, 3))
    patches = pick_patches(levels, (4, 3), torch.tensor([[1, 2, 51], [0, 11, 12]]))
    assert patches.shape == (2, 3, 36)
    torch.testing.assert_close(patches[0, 0].view(3, 4, 3), levels[0][0, :, 4:, :3])
    torch.testing.assert_close(patches[0, 1], cut_patches(levels[1], (4, 3))[0, 0, 0])
    torch.testing.assert_close(patches[0, 2], cut_patches(levels[2], (4, 3))[0, 9, 3])
    torch.testing.assert_close(patches[1, 2], cut_patches(levels[2], (4, 3))[1, 0, 0])


@settings(deadline=None, max_examples=30)
@given(st.integers(4, 90), st.integers(4, 90), st.sampled_from([1, 2, 6, 9, 12, 20, 25, 36]))
def test_images_of_any_size_and_shape(height, width, count):
    model = model_of(num_latent_tokens=36)
    outputs = model(image(1, (height, width)), num_tokens=count, output_rois=True, output_hidden_states=True)
    (rois,) = outputs.rois
    assert rois.shape[1] == count == outputs.hidden_states[-1].shape[1]
    assert (rois[..., 2:] - rois[..., :2]).prod(-1).sum().item() == pytest.approx(1, abs=1e-5)
    assert outputs.logits.isfinite().all()


def test_an_image_of_even_detail_has_the_cells_of_the_grid():
    grid, content = model_of("grid"), model_of()
    content.load_state_dict(grid.state_dict(), strict=False)
    even = image(1, (2, 2)).repeat(1, 1, 16, 16)
    for count in (4, 9, 16):
        assert torch.equal(content(even, num_tokens=count).logits, grid(even, num_tokens=count).logits)


def test_set_placement_changes_the_cells_of_a_trained_model():
    model = model_of("grid", elastic_token_counts=[9, 16])
    pixels = image(2)
    pixels[:, :, :, :24] = 0
    expected = model(pixels).logits
    model.set_placement("content")
    outputs = model(torch.stack([pixels[0], pixels[0].flip(2)]), output_rois=True)
    assert not torch.equal(*outputs.rois[-1]) and not torch.allclose(model(pixels).logits, expected)
    model.train()(pixels).logits.sum().backward()
    embeddings = model.sparseformer.embeddings
    assert embeddings.position_embeddings.grad.abs().sum() > 0
    # A second call of `set_placement("content")` keeps the placement module and its weights.
    placement = embeddings.placement
    model.set_placement("content")
    assert embeddings.placement is placement
    model.eval().set_placement("grid")
    assert torch.equal(model(pixels).logits, expected)


def test_each_call_can_choose_a_placement(monkeypatch):
    monkeypatch.setattr("frugalvit.modeling.placement.MARGIN", 1.0)
    grid, content, both = (model_of(placement) for placement in ("grid", "content", "grid_then_content"))
    grid.load_state_dict(content.state_dict(), strict=False)
    both.load_state_dict(content.state_dict())
    pixels = image(3)
    pixels[:, :, :, :24] = 0
    on_grid, by_content = grid(pixels).logits, content(pixels).logits
    assert not torch.allclose(on_grid, by_content)
    assert torch.equal(content(pixels, placement="grid").logits, on_grid)
    assert torch.equal(both(pixels).logits, on_grid)
    assert torch.equal(both(pixels, placement="content").logits, by_content)
    counts = torch.tensor([4, 16, 4])
    expected = content(pixels, num_tokens=counts).logits
    assert torch.equal(both(pixels, num_tokens=counts, placement="content").logits, expected)
    # The forecast of a grid is the forecast that chooses cells.
    forecasts = [
        each.sparseformer(pixels, output_attention_forecast=True).attention_forecast for each in (both, content)
    ]
    torch.testing.assert_close(*forecasts)
    for model, placement in ((grid, "content"), (both, "elsewhere")):
        with pytest.raises(ValueError, match=f"`placement` is '{placement}', expected 'grid'"):
            model(pixels, placement=placement)


def test_a_larger_margin_merges_fewer_blocks(monkeypatch):
    """Models for content alone have no margin."""
    content, both = (model_of(name).sparseformer for name in ("content", "grid_then_content"))
    both.load_state_dict(content.state_dict())
    # Detail is spread unevenly, so the scores of blocks differ.
    pixels = image(64) * torch.linspace(0, 1, 32) ** 2
    merged = []
    for margin in (1.0, 1.5, 1e6):
        monkeypatch.setattr("frugalvit.modeling.placement.MARGIN", margin)
        rois = [model(pixels, placement="content", output_rois=True).rois[-1] for model in (content, both)]
        areas = [((each[..., 2:] - each[..., :2]).prod(-1) * each.shape[1]).round(decimals=3) for each in rois]
        assert margin > 1 or torch.equal(*rois)
        merged.append([(each > 1).sum().item() for each in areas])
    (of_content, first), (_, second), (_, last) = merged
    assert all(counts[0] == of_content for counts in merged) and first > second > last == 0


def test_only_the_second_look_is_placed_by_content():
    model = model_of("grid_then_content", elastic_token_counts=[4, 16])
    pixels = image(3)
    pixels[:, :, :, :24] = 0
    first = model(pixels, num_tokens=4).logits
    confidence = first.softmax(-1).amax(-1).sort().values[1].item()
    found = model.classify_adaptively(pixels, confidence)
    second = found.num_tokens == 16
    assert second.sum() == 1
    assert torch.equal(found.logits[~second], first[~second])
    torch.testing.assert_close(found.logits[second], model(pixels[second], placement="content").logits)
    # A call can choose the placement of each look.
    found = model.classify_adaptively(pixels, confidence, [4, 16], ["grid", "grid"])
    torch.testing.assert_close(found.logits[second], model(pixels[second]).logits)
    with pytest.raises(ValueError, match=r"`placements` has 1 values, expected one for each of \[4, 16\]"):
        model.classify_adaptively(pixels, confidence, [4, 16], ["grid"])


@pytest.mark.parametrize("pooling", ["mean", "latent_mean", "cls_and_latent_mean", "attention", "latent_attention"])
@pytest.mark.parametrize("norm_last", [False, True])
def test_a_token_of_three_times_the_area_counts_as_three_tokens_in_pooling(pooling, norm_last):
    fields = {
        "pooling": pooling,
        "num_class_tokens": int("latent" in pooling),
        "final_norm": "after_pooling" if norm_last else "before_pooling",
    }
    torch.manual_seed(0)
    config = PatchSparseFormerConfig(**TINY | fields)
    pooler = Pooler(config)
    norm = torch.nn.LayerNorm(32)
    head = None
    if "attention" in pooling:
        head = AttentionPooling(config).eval()
        torch.nn.init.normal_(head.probe)
    tokens = torch.randn(2, config.num_class_tokens + 4, 32)
    several = torch.cat([tokens, tokens[:, -1:], tokens[:, -1:]], dim=1)
    areas = torch.tensor([[1.0, 1.0, 1.0, 3.0]]).expand(2, -1) * 4 / 6
    pooled = pooler(tokens, norm, head, areas)
    torch.testing.assert_close(pooled, pooler(several, norm, head))
    # Pooling adds the logarithms of areas to attention scores by a mask. FlashAttention accepts no such mask, so
    # pooling uses another implementation.
    config._attn_implementation = "flash_attention_2"
    torch.testing.assert_close(pooler(tokens, norm, head, areas), pooled)


def test_a_forecast_is_even_before_training_and_moves_small_cells():
    model = model_of().sparseformer
    pixels = image(2)
    outputs = model(pixels, output_attention_forecast=True, output_rois=True)
    assert outputs.attention_forecast.shape == (2, 8, 8) and not outputs.attention_forecast.any()
    assert model(pixels).attention_forecast is None
    with pytest.raises(ValueError, match="`output_attention_forecast` is True, expected False"):
        model(pixels, num_tokens=torch.tensor([16, 16]), output_attention_forecast=True)
    model.embeddings.placement.forecast.register_forward_hook(
        lambda module, args, logits: logits.index_fill(1, torch.tensor([6, 7]), 20.0)
    )
    rois = model(pixels, output_rois=True).rois[-1]
    smallest = rois[(rois[..., 3] - rois[..., 1]) < 0.2]
    assert len(smallest) and (smallest[:, 1] >= 0.75).all()
