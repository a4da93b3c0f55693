"""Draw RoIs and sampling points."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from .training.files import atomic_file, check_file_path


# Width of the margin around an image, as a share of the image's side. Boxes are cut off beyond the margin.
MARGIN = 0.15
# Largest number of boxes to draw if the boxes overlap.
MOST_BOXES = 16
PANEL_SIZE = 2.1
FONT_SIZE = 8
TOKEN_COLORS = colormaps["rainbow"]


def draw_rois(
    images: Sequence[torch.Tensor],
    rois: Sequence[torch.Tensor],
    sampling_points: Sequence[torch.Tensor] = (),
    *,
    captions: Sequence[str] | None = None,
) -> Figure:
    """Draw the RoIs and sampling points of tokens (figure 3 of the bootstrapping paper).

    Each row of the figure shows an image, the RoIs of the first, third and last focusing step, and the last sampling
    points.

    Args:
        images (sequence of `torch.Tensor` of shape `(channels, height, width)`):
            The model's input images with values from 0 to 1, see `restore_images`.
        rois (sequence of `torch.Tensor` of shape `(images, tokens, 4)`):
            RoIs of each step, which the model returns with `output_rois=True`. If RoIs overlap, at most `MOST_BOXES`
            are drawn.
        sampling_points (sequence of `torch.Tensor` of shape `(images, tokens, points, 2)`, *optional*):
            Sampling points, which the model returns with the RoIs.
        captions (sequence of `str`, *optional*): Captions of the rows.
    """
    images = [_to_numpy(image).clip(0, 1).transpose(1, 2, 0).repeat(3 // len(image), axis=2) for image in images]
    steps = [_to_numpy(step) for step in rois]
    points = _to_numpy(sampling_points[-1]) if len(sampling_points) else None
    shown = range(len(steps)) if len(steps) <= 3 else (0, 2, len(steps) - 1)
    headings = ["Input", *(f"Token RoIs, step {step + 1}" for step in shown)]
    if points is not None:
        headings.append("Last sampling points")
    count = len(steps[0][0])
    areas = (np.prod(step[..., 2:] - step[..., :2], axis=-1).sum(axis=1).mean() for step in steps)
    few = count if max(areas) < 1.5 else min(count, MOST_BOXES)
    drawn = np.linspace(0, count - 1, few).round().astype(int)
    colors = TOKEN_COLORS(np.linspace(0, 1, few))

    heights = [PANEL_SIZE * (image.shape[0] / image.shape[1] + 0.15) for image in images]
    figure_width = PANEL_SIZE * len(headings)
    figure = Figure((figure_width, sum(heights)), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(images), 1, height_ratios=heights, squeeze=False)[:, 0]
    for row, (image, part) in enumerate(zip(images, parts, strict=True)):
        if captions:
            # Cut the caption to the figure's width. A character's width is at most two thirds of the font size.
            caption = " ".join(captions[row].split())[: int(figure_width * 72 / (0.67 * FONT_SIZE))]
            part.suptitle(caption, x=0.01, ha="left", fontsize=FONT_SIZE, parse_math=False)
        first, *panels = part.subplots(1, len(headings), squeeze=False)[0]
        height, width = image.shape[:2]
        gray = 0.57 + 0.43 * image.mean(axis=2, keepdims=True).repeat(3, axis=2)
        for axes in (first, *panels):
            # The origin is the upper left corner. Interpolation keeps images of 32 x 32 pixels recognizable.
            shades = image if axes is first else gray
            axes.imshow(shades, extent=(0, width, height, 0), interpolation="bicubic")
            axes.set(xlim=(-MARGIN * width, (1 + MARGIN) * width), ylim=((1 + MARGIN) * height, -MARGIN * height))
            axes.set_axis_off()
        for axes, step in zip(panels, shown, strict=False):
            left, top, right, bottom = steps[step][row][drawn].T * np.array([[width], [height]] * 2)
            corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
            # Draw small boxes last, so that large boxes do not cover them.
            order = np.argsort(-np.abs((right - left) * (bottom - top)))
            boxes = PolyCollection(corners[order], facecolors="none", edgecolors=colors[order])
            axes.add_collection(boxes, autolim=False)
        if points is not None:
            x, y = points[row][drawn].reshape(-1, 2).T * np.array([[width], [height]])
            panels[-1].scatter(x, y, s=4, c=colors.repeat(points.shape[2], axis=0))
        if row == 0:
            for axes, heading in zip((first, *panels), headings, strict=True):
                axes.set_title(heading, fontsize=FONT_SIZE)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    """Write a figure to a file atomically. The file's ending determines the format."""
    path = check_picture_path(path)
    options = {"pil_kwargs": {"quality": 90, "method": 6}} if path.suffix.lower() == ".webp" else {}
    with atomic_file(path) as aside:
        figure.savefig(aside, **options)


def check_picture_path(path: str | os.PathLike) -> Path:
    """Return the path if a picture can be written there. Otherwise raise the error that `save_figure` would raise."""
    path = Path(path)
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"Cannot write {str(path)!r}: expected a file name ending in one of {', '.join(formats)}.")
    return check_file_path(path)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    # Matplotlib cannot draw RoIs that are infinite (possible in half precision) or far outside of the image.
    return np.nan_to_num(torch.as_tensor(tensor).detach().float().cpu().numpy()).clip(-100, 100)
