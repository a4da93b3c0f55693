"""Tests of `draw_rois`."""

import numpy as np
import torch

from frugalvit.pictures import draw_rois


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
