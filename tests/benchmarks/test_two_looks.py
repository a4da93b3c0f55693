"""Tests of benchmarks/two_looks.py."""

import argparse
import math

import pytest
import torch
import two_looks
from transformers import ViTImageProcessor

from frugalvit.modeling import placement


@pytest.mark.parametrize("grid", [(4, 4), (5, 3)])
def test_a_margin_is_the_price_of_an_exchange(grid):
    rows, columns = grid
    generator = torch.Generator().manual_seed(0)
    scores = [torch.rand(9, *shape, generator=generator) for shape in ((rows // 2, columns // 2), grid)]
    # The coarse scores of the first image are 0. Their product with an infinite margin must not be NaN.
    scores[0][0] = 0
    expected = placement.choose_cells(scores, grid)
    exchanged = []
    for margin in (1.0, 2.0, math.inf):
        with two_looks.choosing_cells(margin):
            cells = placement.choose_cells(scores, grid)
        exchanged.append((cells < scores[0][0].numel()).sum().item())
        assert margin > 1 or torch.equal(cells, expected)
    assert exchanged[0] > exchanged[1] > exchanged[2] == 0


def test_gains_are_those_at_the_same_mean_cost():
    """The row costs 26 of 36 multiply-accumulates but 31 of 36 seconds, so its two gains differ."""
    views = two_looks.caltech101.VIEWS

    def costs(macs: float, seconds: float) -> dict[str, float]:
        return {f"{view}: {kind}": cost for view in views for kind, cost in (("macs", macs), ("seconds", seconds))}

    one_look = {
        (count, 1, name): dict.fromkeys(views, accuracy) | costs(count, count)
        for name, accuracies in {"grid": (0.5, 0.7), "content": (0.6, 0.9)}.items()
        for count, accuracy in zip((16, 36), accuracies, strict=True)
    }
    found = two_looks.compare_with_one_look(dict.fromkeys(views, 0.75) | costs(26, 31), one_look)
    for view in views:
        assert found[f"{view}: gain"] == pytest.approx(0.15)
        assert found[f"{view}: gain of content"] == pytest.approx(0.15)
        assert found[f"{view}: gain at equal time"] == pytest.approx(0.1)
        assert found[f"{view}: gain at equal time of content"] == pytest.approx(0.175)


@pytest.mark.parametrize(
    ("part", "name"), [("test", "test"), ("test", "backgrounds"), ("test", "object_images"), ("fit", "fit_images")]
)
def test_embeddings_of_other_images_are_not_reused(part, name, tmp_path, monkeypatch):
    monkeypatch.setattr(two_looks, "load_model", lambda *_: (None, ViTImageProcessor()))
    monkeypatch.setattr("caltech101.outputs_for", lambda *_: (torch.zeros(1), torch.zeros(1)))
    options = {"train": "a", "test": "b", "backgrounds": "c", "mixed_precision": "no"}
    arguments = argparse.Namespace(**options, object_images=4, fit_images=4)
    found = two_looks.embeddings(arguments, tmp_path, part)
    assert two_looks.embeddings(arguments, tmp_path, part) == found
    setattr(arguments, name, 8)
    with pytest.raises(SystemExit, match="another command"):
        two_looks.embeddings(arguments, tmp_path, part)
