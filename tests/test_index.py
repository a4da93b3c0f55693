"""Search in an index that a teacher filled, as `frugalvit compare` measures it."""

import pytest
import torch

from frugalvit import compare


@pytest.mark.parametrize("queries", [4, 1024])
def test_neighbors_are_those_of_the_teachers_index(queries, monkeypatch):
    """Embeddings on a circle, one degree after another. A model that turns all of them by two degrees loses two of an
    image's ten nearest, five on each side, except at the ends; lengths do not matter."""
    monkeypatch.setattr(compare, "QUERIES", queries)
    angles = torch.arange(60.0)

    def on_circle(degrees):
        return torch.stack([degrees.deg2rad().cos(), degrees.deg2rad().sin()], dim=1)

    teacher = on_circle(angles)
    assert compare.neighbors_found(3 * teacher, teacher).tolist() == [1] * 60
    found = compare.neighbors_found(on_circle(angles + 2.1), 2 * teacher)
    expected = []
    for image in range(60):
        others = [other for other in range(60) if other != image]
        nearest = sorted(others, key=lambda other: (abs(other - image), other))
        turned = sorted(others, key=lambda other: abs(other - image - 2.1))
        expected.append(len({*nearest[:10]} & {*turned[:10]}) / 10)
    assert found[10:50].tolist() == pytest.approx(expected[10:50]) and expected[30] == 0.8
