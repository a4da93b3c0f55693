"""Pictures of the places where tokens look, and of segmentations."""

import io
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from .common.files import check_file_path, whole_file


# What the margin adds on each side, as a share of the image; boxes that reach farther run off the picture.
MIN_MARGIN, MAX_MARGIN = 0.02, 0.15

# More boxes than this that overlap are not told apart.
MOST_BOXES = 16

# Lengths in inches, font sizes in points.
EDGE, GAP, HEADING, CAPTION, LEGEND = 0.1, 0.08, 0.24, 0.26, 0.2
HEADING_SIZE, CAPTION_SIZE, LEGEND_SIZE = 8.5, 8, 7
TEXT_COLOR, LEGEND_COLOR, OUTLINE_COLOR, MARGIN_COLOR = "#333333", "#808080", "#c8c8c8", "#f2f2f2"

# Hues of one lightness (LCh 54, 70): each stands out as much as any other on a faded gray image.
TOKEN_COLORS = LinearSegmentedColormap.from_list(
    "tokens",
    ["#ea405c", "#d25f1b", "#a17c00", "#5e8f00", "#009849", "#009c8f", "#009acf", "#0091f6", "#3e7cf5", "#b75bcd"],
)


# Lines of one figure, told apart by color-blind eyes too (Okabe & Ito).
LINE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def draw_rois(
    images: torch.Tensor | Sequence[torch.Tensor],
    rois: Sequence[torch.Tensor],
    sampling_points: Sequence[torch.Tensor] = (),
    *,
    captions: Sequence[str] | None = None,
    all_steps: bool = False,
    panel_size: float = 2.1,
) -> Figure:
    """Draw where the tokens look, one row an image: the image, token RoIs of the first, third and last focusing step,
    and the last sampling points (figure 3 of the bootstrapping paper), or the RoIs after every adjustment (figures 1
    and 2 of its supplement).

    RoIs are relative to what the model saw. If the image processor cropped the image, draw on the cropped view, which
    `restore_images` of `common/views.py` makes from the pixel values. If more than 16 tokens overlap, 16 of them are
    drawn. A token keeps its color in all panels. RoIs may leave the image: a light margin, the same in all panels,
    shows up to 0.15 image sides beyond each edge.

    Args:
        images (`torch.Tensor` of shape `(batch, channels, height, width)`, or a sequence of images):
            Values from 0 to 1; 1 or 3 channels.
        rois (sequence of `torch.Tensor`):
            `outputs.rois` of a model called with `output_rois=True`: `(batch, tokens, 4)` after every adjustment.
        sampling_points (sequence of `torch.Tensor`, *optional*):
            `outputs.sampling_points`: `(batch, tokens, points, 2)` of every sampling. The last is drawn.
        captions (sequence of `str`, *optional*): A line of text for each image, for example its predicted label.
        all_steps (`bool`, *optional*, defaults to `False`): Draw the RoIs after every adjustment.
        panel_size (`float`, *optional*, defaults to 2.1): Width of a panel in inches.

    Returns:
        `matplotlib.figure.Figure`: Not known to pyplot; show it in a notebook or save it with `save_figure`.

    Raises:
        ValueError: if images, RoIs, points and captions do not fit each other.
    """
    images = [_to_array(image) for image in images]
    steps = [_to_numpy(step) for step in rois]
    points = [_to_numpy(sampling_points[-1])] if len(sampling_points) else []
    if not images:
        raise ValueError("Got no images, expected at least one.")
    for name, values in (("RoIs", steps), ("sampling points", points), ("captions", [captions] if captions else [])):
        if sizes := [len(value) for value in values if len(value) != len(images)]:
            raise ValueError(f"Got {name} of {sizes[0]} images, expected those of the {len(images)} images given.")

    shown = range(len(steps)) if all_steps or len(steps) <= 3 else (0, 2, len(steps) - 1)
    headings = ["Input", *(_heading(step, len(steps)) for step in shown), *["Last sampling points"] * len(points)]
    margin = _margin([steps[step] for step in shown] + points)
    count = (steps or points or [np.empty((1, 0))])[0].shape[1]
    drawn = _drawn_tokens(steps, count)
    which = "One color per token" if len(drawn) == count else f"{len(drawn)} of {count} tokens, one color each"
    legend = f"{which}; light gray lies outside the image."
    figure, panels = _make_panels(images, headings, panel_size, legend, captions)
    for row, image in enumerate(images):
        for column, axes in enumerate(panels[row]):
            _draw_image(axes, image, margin, faded=column > 0)
            if 0 < column <= len(shown):
                _draw_boxes(axes, steps[shown[column - 1]][row][drawn], image.shape)
            elif column > 0:
                _draw_points(axes, points[0][row][drawn], image.shape)
    return figure


def draw_segmentation(
    images: torch.Tensor | Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    predictions: Sequence[torch.Tensor],
    class_names: Sequence[str],
    *,
    rois: torch.Tensor | None = None,
    token_maps: torch.Tensor | None = None,
    ignore_index: int = 255,
    panel_size: float = 2.1,
) -> Figure:
    """Draw the segmentation of images, one row each: the image, the true classes, the predicted ones and, for a
    SparseFormer, the token RoIs and the token with the largest share of each pixel.

    Args:
        images (`torch.Tensor` of shape `(batch, channels, height, width)`, or a sequence of images):
            Values from 0 to 1; 1 or 3 channels.
        masks, predictions (sequences of `torch.Tensor`): `(height, width)` class numbers, at any resolution.
        class_names (sequence of `str`): For the legend.
        rois (`torch.Tensor`, *optional*): `outputs.rois[-1]`, `(batch, tokens, 4)`.
        token_maps (`torch.Tensor`, *optional*): `outputs.token_maps`, `(batch, tokens, height, width)`.
        ignore_index (`int`, *optional*, defaults to 255): Class number that does not count; it stays white.
        panel_size (`float`, *optional*, defaults to 2.1): Width of a panel in inches.

    Returns:
        `matplotlib.figure.Figure`: As of `draw_rois`.

    Raises:
        ValueError: if images, masks and other arguments do not fit each other.
    """
    images = [_to_array(image) for image in images]
    if not images:
        raise ValueError("Got no images, expected at least one.")
    parts = {"masks": masks, "predictions": predictions, "RoIs": rois, "token maps": token_maps}
    for name, values in parts.items():
        if values is not None and len(values) != len(images):
            raise ValueError(f"Got {name} of {len(values)} images, expected those of the {len(images)} images given.")
    headings = ["Input", "Truth", "Prediction"]
    headings += ["Token RoIs"] * (rois is not None) + ["Token with the largest share"] * (token_maps is not None)
    colors = _class_colors(len(class_names))
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in colors]
    columns = min(2 * len(headings), len(class_names))
    legend_rows = -(-len(class_names) // columns)
    # Legends are filled column by column, and read row by row.
    order = [index for column in range(columns) for index in range(column, len(class_names), columns)]
    figure, panels = _make_panels(images, headings, panel_size, "", legend_height=LEGEND * legend_rows)
    figure.legend(
        [handles[index] for index in order],
        [class_names[index] for index in order],
        loc="lower center",
        ncols=columns,
        fontsize=LEGEND_SIZE,
        labelcolor=TEXT_COLOR,
        frameon=False,
        handlelength=1,
        borderaxespad=0,
    )
    for row, (image, (picture, *others)) in enumerate(zip(images, panels, strict=True)):
        _draw_image(picture, image, MIN_MARGIN, faded=False)
        for axes, classes in zip(others[:2], (masks[row], predictions[row]), strict=True):
            classes = torch.as_tensor(classes).cpu().numpy()
            known = (classes < len(colors)) & (classes != ignore_index)
            painted = np.where(known[..., None], colors[np.where(known, classes, 0)], 1.0)
            _draw_map(axes, painted, image.shape)
        others = others[2:]
        if rois is not None:
            boxes = _to_numpy(rois[row])
            _draw_image(others[0], image, MIN_MARGIN, faded=True)
            _draw_boxes(others[0], boxes[_drawn_tokens([boxes[None]], len(boxes))], image.shape)
        if token_maps is not None:
            shares = _to_numpy(token_maps[row])
            tokens = TOKEN_COLORS(np.linspace(0, 1, len(shares)))[:, :3]
            _draw_map(others[-1], tokens[shares.argmax(0)], image.shape)
    return figure


def draw_maps(
    images: Sequence[torch.Tensor],
    maps: Sequence[Sequence[torch.Tensor]],
    headings: Sequence[str],
    captions: Sequence[str] | None,
    legend: str,
    panel_size: float = 1.3,
) -> Figure:
    """Draw images, one row each, and maps beside them. A map of numbers is drawn in colors from its smallest to its
    largest value, a map of colors as it is.

    Args:
        images (sequence of `torch.Tensor`): `(channels, height, width)`, 0 to 1; 1 or 3 channels. One that stands in
            several rows on end is drawn in the first of them.
        maps (sequence of sequences of `torch.Tensor`): `(rows, columns)` each, or of colors from 0 to 1 `(3, rows,
            columns)`, as many for every image.
        headings (sequence of `str`): Headings of the columns, the image's first.
        captions (sequence of `str`, *optional*): A line of text for each row.
        legend (`str`): A line that explains the maps.
        panel_size (`float`, *optional*, defaults to 1.3): Width of a panel in inches.

    Returns:
        `matplotlib.figure.Figure`: As of `draw_rois`.
    """
    repeated = [False, *(image is before for before, image in itertools.pairwise(images))]
    images = [_to_array(image) for image in images]
    figure, panels = _make_panels(images, headings, panel_size, legend, captions)
    for image, again, (picture, *others), row in zip(images, repeated, panels, maps, strict=True):
        if again:
            picture.set_xlim(-MIN_MARGIN * image.shape[1], (1 + MIN_MARGIN) * image.shape[1])
            picture.set_axis_off()
        else:
            _draw_image(picture, image, MIN_MARGIN, faded=False)
        for axes, values in zip(others, row, strict=True):
            values = _to_numpy(values)
            if values.ndim == 3:
                colors = values.transpose(1, 2, 0)
            else:
                low, high = values.min(), values.max()
                colors = matplotlib.colormaps["magma"]((values - low) / max(high - low, 1e-12))[..., :3]
            _draw_map(axes, colors, image.shape)
    return figure


def _class_colors(count: int) -> np.ndarray:
    """`(count, 3)`; neighbors differ."""
    if count <= 20:
        return np.array([matplotlib.colormaps["tab20"].colors[(7 * index) % 20] for index in range(count)])
    # Steps of the golden ratio around the hues, in three lightnesses.
    index = np.arange(count)
    hue, value = index * 0.618034 % 1, np.array([0.95, 0.7, 0.45])[index % 3]
    return matplotlib.colors.hsv_to_rgb(np.stack([hue, np.full(count, 0.65), value], axis=1))


def _draw_map(axes: Axes, colors: np.ndarray, shape: Sequence[int]) -> None:
    """`(height, width, 3)` over the place of an image."""
    height, width = shape[:2]
    axes.imshow(colors, extent=(0, width, height, 0), interpolation="nearest")
    axes.set_xlim(-MIN_MARGIN * width, (1 + MIN_MARGIN) * width)
    axes.set_ylim((1 + MIN_MARGIN) * height, -MIN_MARGIN * height)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _make_panels(
    images: Sequence[np.ndarray],
    headings: Sequence[str],
    panel_size: float,
    legend: str,
    captions: Sequence[str] | None = None,
    legend_height: float = LEGEND,
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a row of panels for each image, headings above and captions below."""
    heights = [panel_size * image.shape[0] / image.shape[1] for image in images]
    caption_height = CAPTION if captions else 0
    width = 2 * EDGE + len(headings) * (panel_size + GAP) - GAP
    height = 2 * EDGE + HEADING + sum(heights) + len(images) * (caption_height + GAP) - GAP + legend_height
    figure = Figure(figsize=(width, height), dpi=200, facecolor="white")
    FigureCanvasAgg(figure)

    panels = []
    bottom = height - EDGE - HEADING
    for row in range(len(images)):
        bottom -= heights[row]
        lefts = [EDGE + column * (panel_size + GAP) for column in range(len(headings))]
        size = (panel_size / width, heights[row] / height)
        panels.append([figure.add_axes((left / width, bottom / height, *size)) for left in lefts])
        if captions:
            _write_caption(panels[row][0], captions[row], width)
        bottom -= caption_height + GAP
    for axes, heading in zip(panels[0], headings, strict=True):
        axes.set_title(heading, fontsize=HEADING_SIZE, color=TEXT_COLOR, pad=4)
    figure.text(1 - EDGE / width, EDGE / height, legend, ha="right", va="bottom", size=LEGEND_SIZE, color=LEGEND_COLOR)
    return figure, panels


def label_lines(axes: Axes, colors: Mapping[str, str], place: str) -> None:
    """A legend of colored names."""
    handles = [Line2D([], [], color=color, linewidth=1.6) for color in colors.values()]
    axes.legend(handles, colors, loc=place, fontsize=7, frameon=False, labelcolor=TEXT_COLOR, handlelength=1.2)


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    """Write a figure to a file whose ending names the format; it appears complete or not at all.

    WebP is lossless where that is smaller, as it is for maps of few colors, else of quality 90.

    Args:
        figure (`matplotlib.figure.Figure`): The figure.
        path (`str` or `os.PathLike`): For example `rois.png`, `.webp`, `.jpg`, `.pdf` or `.svg`.

    Raises:
        ValueError: if Matplotlib does not write the format.
        FileNotFoundError: if the folder does not exist.
    """
    path = check_picture_path(path)
    with whole_file(path) as aside:
        if path.suffix.lower() == ".webp":
            aside.write_bytes(min((_as_webp(figure, quality=90), _as_webp(figure, lossless=True)), key=len))
        else:
            figure.savefig(aside)


def _as_webp(figure: Figure, **options) -> bytes:
    figure.savefig(picture := io.BytesIO(), format="webp", pil_kwargs={"method": 6, **options})
    return picture.getvalue()


def check_picture_path(path: str | os.PathLike) -> Path:
    """The path, if a picture can be written there; raises as `save_figure` does."""
    path = Path(path)
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"Cannot write {str(path)!r}: expected a file name ending in one of {', '.join(formats)}.")
    return check_file_path(path)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    # Boxes can run far off, or to infinity in half precision; all that matters is that they are outside.
    return np.nan_to_num(torch.as_tensor(tensor).detach().float().cpu().numpy()).clip(-100, 100)


def _to_array(image: torch.Tensor) -> np.ndarray:
    """`(channels, height, width)` to `(height, width, 3)`."""
    image = torch.as_tensor(image).detach().float().cpu()
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise ValueError(
            f"Got an image of shape {tuple(image.shape)}, expected (channels, height, width) with 1 or 3 channels."
        )
    return image.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()


def _drawn_tokens(steps: Sequence[np.ndarray], count: int) -> list[int]:
    """The indices of the tokens to draw: all, or, if many overlap, some that are evenly spread."""
    areas = (np.prod(step[..., 2:] - step[..., :2], axis=-1).sum(axis=1).mean() for step in steps)
    covered = max(areas, default=0)
    shown = count if covered < 1.5 else min(count, MOST_BOXES)
    return np.linspace(0, count - 1, shown).round().astype(int).tolist()


def _heading(step: int, num_steps: int) -> str:
    return f"Token RoIs, step {step + 1}" + (" (last)" if step == num_steps - 1 > 0 else "")


def _margin(values: Sequence[np.ndarray]) -> float:
    """Share of the image's sides that the margin needs for RoIs and points beyond the image, within limits."""
    beyond = max([max(-value.min(), value.max() - 1) for value in values], default=0)
    return float(np.clip(beyond + MIN_MARGIN, MIN_MARGIN, MAX_MARGIN))


def _draw_image(axes: Axes, image: np.ndarray, margin: float, faded: bool) -> None:
    """The image, or a pale gray one to draw on, with its margin; axes count pixels from the upper left corner."""
    height, width = image.shape[:2]
    if faded:
        luminance = image @ np.array([0.299, 0.587, 0.114])
        image = np.repeat(0.57 + 0.43 * luminance[..., None], 3, axis=2)
        axes.set_facecolor(MARGIN_COLOR)
    # Interpolation keeps images of 32 pixels recognizable.
    axes.imshow(image.clip(0, 1), extent=(0, width, height, 0), interpolation="bicubic")
    axes.add_patch(Rectangle((0, 0), width, height, fill=False, edgecolor=OUTLINE_COLOR, linewidth=0.4))
    axes.set_xlim(-margin * width, (1 + margin) * width)
    axes.set_ylim((1 + margin) * height, -margin * height)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _draw_boxes(axes: Axes, rois: np.ndarray, shape: Sequence[int]) -> None:
    """RoIs `(tokens, 4)` as boxes, the smaller ones on top, each in the color of its token."""
    left, top, right, bottom = rois.T * np.array([[shape[1]], [shape[0]]] * 2)
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    order = np.argsort(-np.abs((right - left) * (bottom - top)))
    colors = TOKEN_COLORS(np.linspace(0, 1, len(rois)))
    boxes = PolyCollection(
        corners[order],
        facecolors="none",
        edgecolors=colors[order],
        linewidths=1.5 * min(1, (16 / len(rois)) ** 0.35),
        joinstyle="miter",
    )
    axes.add_collection(boxes, autolim=False)


def _draw_points(axes: Axes, points: np.ndarray, shape: Sequence[int]) -> None:
    """Sampling points `(tokens, points, 2)`, in the colors of their tokens."""
    x, y = points.reshape(-1, 2).T * np.array([[shape[1]], [shape[0]]])
    colors = TOKEN_COLORS(np.linspace(0, 1, len(points))).repeat(points.shape[1], axis=0)
    diameter = 3.8 * min(1, (128 / len(x)) ** 0.3)
    axes.scatter(x, y, s=diameter**2, c=colors, edgecolors="white", linewidths=0.1 * diameter)


def _write_caption(axes: Axes, caption: str, width: float) -> None:
    """One line under the first panel that may extend below the whole row, cut where the figure ends."""
    characters = int(width * 72 / (0.62 * CAPTION_SIZE))
    caption = " ".join(caption.split())
    caption = caption if len(caption) <= characters else caption[: characters - 1] + "…"
    axes.annotate(
        caption,
        parse_math=False,
        xy=(0, 0),
        xycoords=("data", "axes fraction"),
        xytext=(0, -4),
        textcoords="offset points",
        verticalalignment="top",
        fontsize=CAPTION_SIZE,
        color=TEXT_COLOR,
    )
