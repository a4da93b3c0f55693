"""Pictures: the right panels, boxes and points at the right pixels, files that are whole or absent."""

import numpy as np
import torch
from PIL import Image

from frugalvit.pictures import draw_rois, save_figure


def make_rois(batch: int = 1, tokens: int = 4, steps: int = 4) -> list[torch.Tensor]:
    left_top = torch.rand(steps, batch, tokens, 2, generator=torch.Generator().manual_seed(0)) * 0.5
    return list(torch.cat([left_top, left_top + 0.3], dim=-1))


def make_points(batch: int = 1) -> list[torch.Tensor]:
    return list(torch.rand(5, batch, 4, 9, 2, generator=torch.Generator().manual_seed(1)))


def test_boxes_and_points_are_in_pixels_of_the_image():
    rois = torch.tensor([[[0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 1.0, 1.0]]])
    points = torch.tensor([[[[0.25, 0.5], [0.5, 0.125]], [[0.75, 1.0], [0.0, 0.0]]]])
    _, boxes, dots = draw_rois(torch.rand(1, 3, 48, 80), [rois], [points]).axes
    paths = [path.vertices for path in boxes.collections[0].get_paths()]
    corners = [[*path.min(axis=0), *path.max(axis=0)] for path in paths]
    np.testing.assert_allclose(corners, [[0, 0, 80, 48], [20, 24, 60, 48]])
    np.testing.assert_allclose(dots.collections[0].get_offsets(), [[20, 24], [40, 6], [60, 48], [0, 0]])
    left, right, bottom, top = boxes.images[0].get_extent()
    assert (left, right, bottom, top) == (0, 80, 48, 0)


def test_saved_picture_is_large_and_not_blank(tmp_path):
    save_figure(draw_rois(torch.rand(1, 3, 32, 32), make_rois(), make_points()), tmp_path / "rois.png")
    with Image.open(tmp_path / "rois.png") as picture:
        assert picture.width > 1500
        assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 100
    assert [file.name for file in tmp_path.iterdir()] == ["rois.png"]
