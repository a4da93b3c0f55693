"""Pictures: the right panels, boxes and points at the right pixels, files that are whole or absent."""

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.pictures import (
    MAX_MARGIN,
    MIN_MARGIN,
    draw_rois,
    save_figure,
)


def make_rois(batch: int = 1, tokens: int = 4, steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    left_top = torch.rand(steps, batch, tokens, 2, generator=generator) * 0.5
    return list(torch.cat([left_top, left_top + 0.3], dim=-1))


def make_points(batch: int = 1, tokens: int = 4, points: int = 9, steps: int = 5) -> list[torch.Tensor]:
    return list(torch.rand(steps, batch, tokens, points, 2, generator=torch.Generator().manual_seed(1)))


def headings(figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def corners(axes) -> np.ndarray:
    """Left, top, right, bottom of the drawn boxes, the smallest last."""
    paths = axes.collections[0].get_paths()
    return np.array([[*path.vertices.min(axis=0), *path.vertices.max(axis=0)] for path in paths])


def render(figure) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3]


@pytest.mark.parametrize(
    "steps, all_steps, expected",
    [
        (0, False, []),
        (1, False, ["step 1"]),
        (5, False, ["step 1", "step 3", "step 5 (last)"]),
        (5, True, ["step 1", "step 2", "step 3", "step 4", "step 5 (last)"]),
    ],
)
def test_panels(steps, all_steps, expected):
    figure = draw_rois(torch.rand(2, 3, 32, 32), make_rois(2, steps=steps), make_points(2), all_steps=all_steps)
    expected = ["Input", *(f"Token RoIs, {step}" for step in expected), "Last sampling points"]
    assert headings(figure) == expected
    assert len(figure.axes) == 2 * len(expected)


def test_boxes_and_points_are_in_pixels_of_the_image():
    rois = torch.tensor([[[0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 1.0, 1.0]]])
    points = torch.tensor([[[[0.25, 0.5], [0.5, 0.125]], [[0.75, 1.0], [0.0, 0.0]]]])
    _, boxes, dots = draw_rois(torch.rand(1, 3, 48, 80), [rois], [points]).axes
    np.testing.assert_allclose(corners(boxes), [[0, 0, 80, 48], [20, 24, 60, 48]])
    np.testing.assert_allclose(dots.collections[0].get_offsets(), [[20, 24], [40, 6], [60, 48], [0, 0]])
    left, right, bottom, top = boxes.images[0].get_extent()
    assert (left, right, bottom, top) == (0, 80, 48, 0)


def test_box_is_painted_over_its_part_of_the_image():
    # A black square on white, and a RoI around it.
    image = torch.ones(1, 3, 100, 100)
    image[..., 30:50, 20:60] = 0
    figure = draw_rois(image, [torch.tensor([[[0.2, 0.3, 0.6, 0.5]]])])
    pixels = render(figure).astype(float) / 255
    axes = figure.axes[1]
    corner = np.round(axes.transData.transform([[20, 30], [60, 50]])).astype(int)
    (left, right), (top, bottom) = corner[:, 0], len(pixels) - corner[:, 1]
    color = axes.collections[0].get_edgecolors()[0, :3]
    colored = np.abs(pixels - color).max(axis=2) < 0.1
    rows, columns = np.nonzero(colored)
    assert abs(rows.min() - top) <= 3 and abs(rows.max() - bottom) <= 3
    assert abs(columns.min() - left) <= 3 and abs(columns.max() - right) <= 3
    # Inside lies the faded square, around it white.
    np.testing.assert_allclose(pixels[(top + bottom) // 2, (left + right) // 2], 0.57, atol=0.05)
    np.testing.assert_allclose(pixels[top - 12, left - 12], 1, atol=0.05)


@pytest.mark.parametrize(
    "roi, margin",
    [
        ([0.1, 0.1, 0.9, 0.9], MIN_MARGIN),
        ([-0.08, 0.1, 0.9, 0.9], 0.08 + MIN_MARGIN),
        ([float("-inf"), 0.1, float("inf"), 0.9], MAX_MARGIN),
    ],
)
def test_margin_shows_what_leaves_the_image(roi, margin):
    figure = draw_rois(torch.rand(1, 3, 20, 40), [torch.tensor([[roi]])])
    for axes in figure.axes:
        np.testing.assert_allclose(axes.get_xlim(), (-40 * margin, 40 * (1 + margin)), rtol=1e-5)
        np.testing.assert_allclose(axes.get_ylim(), (20 * (1 + margin), -20 * margin), rtol=1e-5)
    assert np.isfinite(render(figure)).all()


@pytest.mark.parametrize(("side", "count"), [(1 / 8, 64), (0.5, 16)])
def test_of_many_tokens_that_overlap_some_are_drawn(side, count):
    corner = torch.stack(torch.meshgrid(*[torch.arange(8) / 8] * 2, indexing="ij"), dim=-1).view(1, 64, 2)
    figure = draw_rois(torch.rand(1, 3, 8, 8), [torch.cat([corner, corner + side], dim=-1)])
    assert len(figure.axes[1].collections[0].get_paths()) == count
    assert ("16 of 64 tokens" in figure.get_supxlabel()) == (count == 16)


def test_saved_picture_is_large_and_not_blank(tmp_path):
    path = tmp_path / "rois.png"
    save_figure(draw_rois(torch.rand(1, 3, 32, 32), make_rois(), make_points()), path)
    with Image.open(path) as picture:
        assert picture.width > 1500
        colors = {color for _, color in picture.convert("RGB").getcolors(picture.width * picture.height)}
    assert len(colors) > 100
    assert {"#ea405c", "#b75bcd"} <= {"#{:02x}{:02x}{:02x}".format(*color) for color in colors}
    assert [file.name for file in tmp_path.iterdir()] == ["rois.png"]


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("rois.xyz", ValueError, "ending in one of"),
        ("missing/rois.png", OSError, "there is no folder '.*missing'"),
        ("folder.png", ValueError, "is a folder"),
    ],
)
def test_unwritable_paths(tmp_path, name, error, message):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(error, match=message):
        save_figure(draw_rois(torch.rand(1, 3, 32, 32), make_rois()), tmp_path / name)
