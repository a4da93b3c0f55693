"""Pictures of the places where tokens look."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from .common.files import check_file_path, whole_file


# Boxes that reach farther beyond the image, as a share of it, run off the picture.
MARGIN = 0.15
# Largest number of overlapping boxes that can be told apart.
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
    all_steps: bool = False,
) -> Figure:
    """Draw where the tokens look, one row per image: the image, token RoIs of the first, third and last focusing step,
    and the last sampling points (figure 3 of the bootstrapping paper), or the RoIs after every adjustment (figures 1
    and 2 of its supplement).

    Images are `(channels, height, width)`, 0 to 1, as the model sees them (`restore_images`); RoIs and sampling points
    are those of its output with `output_rois=True`. If more than 16 tokens overlap, 16 of them are drawn.
    """
    images = [_to_numpy(image).clip(0, 1).transpose(1, 2, 0).repeat(3 // len(image), axis=2) for image in images]
    steps = [_to_numpy(step) for step in rois]
    points = _to_numpy(sampling_points[-1]) if len(sampling_points) else None
    shown = range(len(steps)) if all_steps or len(steps) <= 3 else (0, 2, len(steps) - 1)
    headings = ["Input", *(f"Token RoIs, step {step + 1}" for step in shown)]
    if points is not None:
        headings.append("Last sampling points")
    drawn = _drawn_tokens(steps, len(steps[0][0]) if steps else len(points[0]))

    heights = [PANEL_SIZE * (image.shape[0] / image.shape[1] + 0.15) for image in images]
    width = PANEL_SIZE * len(headings)
    figure = Figure((width, sum(heights)), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(images), 1, height_ratios=heights, squeeze=False)[:, 0]
    for row, (image, part) in enumerate(zip(images, parts, strict=True)):
        if captions:
            # Characters are at most as wide as two thirds of their size.
            caption = " ".join(captions[row].split())[: int(width * 72 / (0.67 * FONT_SIZE))]
            part.suptitle(caption, x=0.01, ha="left", fontsize=FONT_SIZE, parse_math=False)
        first, *panels = part.subplots(1, len(headings), squeeze=False)[0]
        _draw_image(first, image)
        gray = 0.57 + 0.43 * image.mean(axis=2, keepdims=True).repeat(3, axis=2)
        for axes in panels:
            _draw_image(axes, gray)
        for axes, step in zip(panels, shown, strict=False):
            _draw_boxes(axes, steps[step][row][drawn], image.shape)
        if points is not None:
            _draw_points(panels[-1], points[row][drawn], image.shape)
        if row == 0:
            for axes, heading in zip((first, *panels), headings, strict=True):
                axes.set_title(heading, fontsize=FONT_SIZE)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    """Write a figure to a file whose ending names the format; it appears complete or not at all."""
    path = check_picture_path(path)
    options = {"pil_kwargs": {"quality": 90, "method": 6}} if path.suffix.lower() == ".webp" else {}
    with whole_file(path) as aside:
        figure.savefig(aside, **options)


def check_picture_path(path: str | os.PathLike) -> Path:
    """Return the path if a picture can be written there; raise as `save_figure` does otherwise."""
    path = Path(path)
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"Cannot write {str(path)!r}: expected a file name ending in one of {', '.join(formats)}.")
    return check_file_path(path)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    # Boxes can run far off, or to infinity in half precision; all that matters is that they are outside.
    return np.nan_to_num(torch.as_tensor(tensor).detach().float().cpu().numpy()).clip(-100, 100)


def _drawn_tokens(steps: Sequence[np.ndarray], count: int) -> list[int]:
    """The indices of the tokens to draw: all, or, if many overlap, some that are evenly spread."""
    areas = (np.prod(step[..., 2:] - step[..., :2], axis=-1).sum(axis=1).mean() for step in steps)
    shown = count if max(areas, default=0) < 1.5 else min(count, MOST_BOXES)
    return np.linspace(0, count - 1, shown).round().astype(int).tolist()


def _draw_image(axes: Axes, image: np.ndarray) -> None:
    """Draw an image with a margin; axes count pixels from the upper left corner."""
    height, width = image.shape[:2]
    # Interpolation keeps images of 32 pixels recognizable.
    axes.imshow(image, extent=(0, width, height, 0), interpolation="bicubic")
    axes.set(xlim=(-MARGIN * width, (1 + MARGIN) * width), ylim=((1 + MARGIN) * height, -MARGIN * height))
    axes.set_axis_off()


def _draw_boxes(axes: Axes, rois: np.ndarray, shape: Sequence[int]) -> None:
    """Draw RoIs `(tokens, 4)` as boxes in the colors of their tokens, the smaller ones on top."""
    left, top, right, bottom = rois.T * np.array([[shape[1]], [shape[0]]] * 2)
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    order = np.argsort(-np.abs((right - left) * (bottom - top)))
    edges = TOKEN_COLORS(np.linspace(0, 1, len(rois)))[order]
    axes.add_collection(PolyCollection(corners[order], facecolors="none", edgecolors=edges), autolim=False)


def _draw_points(axes: Axes, points: np.ndarray, shape: Sequence[int]) -> None:
    """Draw sampling points `(tokens, points, 2)` in the colors of their tokens."""
    x, y = points.reshape(-1, 2).T * np.array([[shape[1]], [shape[0]]])
    colors = TOKEN_COLORS(np.linspace(0, 1, len(points))).repeat(points.shape[1], axis=0)
    axes.scatter(x, y, s=4, c=colors)
