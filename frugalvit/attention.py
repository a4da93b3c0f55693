"""`frugalvit attention`: the attention of vision transformers' heads, before and after training."""

import argparse
import copy
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm
from transformers import AutoModelForImageClassification, PreTrainedModel

from .common.data import load_images
from .common.decoding import decode_image
from .common.files import check_file_path, read_json, write_json
from .common.image_files import find_images, read_images
from .common.loading import load_image_classifier
from .common.tables import format_table
from .common.views import prepare_images
from .configuration.configuration_base import pair
from .modeling.impulse import impulse_matrix, interior_mass, kernel_offsets
from .modeling.initialization import initialize_attention_
from .modeling.modeling_bootstrapped_vit import BootstrappedViTForImageClassification
from .options.attention import parse
from .pictures import LEGEND_COLOR, LEGEND_SIZE, LINE_COLORS, TEXT_COLOR, check_picture_path, label_lines, save_figure


# The corner of the maps that is enlarged, as in the paper's figures, and how far from a position a head's favorite
# neighbor is looked for.
CORNER, REACH = 48, 2


@dataclass
class LayerStatistics:
    """Statistics of a layer, averaged over images.

    Args:
        layer (`int`): Its number, from 1.
        stable_rank (`float`): Stable rank of the layer's output, see `stable_rank`.
        entropy (`list[float]`): Entropy of each head's attention, averaged over queries, in nats; at most log(tokens).
        offset (list of pairs of `int`): The relative position (dy, dx), at most two away, to which each head attends
            most; empty where tokens lie on no grid.
        mass (`list[float]`): Attention to that position, averaged over the tokens that have it within the grid.
        maps (`torch.Tensor`): `(heads, tokens, tokens)` attention of queries (rows) to keys, [CLS] and the like first;
            `None` for convolutional layers.
    """

    layer: int
    stable_rank: float
    entropy: list[float] = field(default_factory=list)
    offset: list[tuple[int, int]] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    maps: torch.Tensor | None = field(default=None, repr=False)

    def numbers(self) -> dict[str, object]:
        """Return all fields but the maps, for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "maps"}


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    names = arguments.names or [Path(model).name for model in arguments.models]
    if len(names) != len(arguments.models) or len(set(names)) != len(names):
        raise ValueError(f"--names has {len(set(names))} different names for {len(arguments.models)} models.")
    if arguments.images < 1:
        raise ValueError(f"--images is {arguments.images}, expected at least 1.")
    for path in filter(None, (arguments.picture, arguments.entropy)):
        check_picture_path(path)
    if arguments.output:
        check_file_path(arguments.output)

    if arguments.image:
        images = [
            image for _, image in islice(read_images(find_images(arguments.image, arguments.images)), arguments.images)
        ]
    else:
        images = load_images(arguments.dataset, arguments.split)
        images = [decode_image(images[index]["image"], index) for index in range(min(arguments.images, len(images)))]
    measured = {}
    for name, model, image_processor in _models(arguments, names):
        batches = [
            prepare_images(image_processor, images[start : start + 32]).to(model.device)
            for start in range(0, len(images), 32)
        ]
        measured[name] = measure_attention(model, tqdm(batches, desc=name, leave=False, disable=None))

    num_layers = min(map(len, measured.values()))
    layers = arguments.layers or sorted({1, (num_layers + 1) // 2, num_layers})
    if wrong := [layer for layer in layers if not 1 <= layer <= num_layers]:
        raise ValueError(f"--layers has {wrong[0]}, expected 1 to {num_layers}.")
    numbers = {name: [layer.numbers() for layer in layers] for name, layers in measured.items()}
    numbers = {"images": len(images), "models": numbers}
    if arguments.output:
        write_json(arguments.output, numbers)
    print(json.dumps(numbers, indent=2) if arguments.json else format_table(_rows(measured, layers)))
    if arguments.picture:
        save_figure(
            draw_attention(measured, layers, None if arguments.average_heads else arguments.heads), arguments.picture
        )
    if arguments.entropy:
        save_figure(draw_entropy(measured), arguments.entropy)


def _models(arguments: argparse.Namespace, names: Sequence[str]):
    """Names, models and image processors to compare, those before training first."""
    loaded = [
        (name, *load_image_classifier(model, arguments.device, arguments.trust_remote_code))
        for name, model in zip(names, arguments.models, strict=True)
    ]
    _, first, image_processor = loaded[0]
    for name in arguments.initialization:
        torch.manual_seed(arguments.seed)
        fresh = AutoModelForImageClassification.from_config(copy.deepcopy(first.config))
        initialize_attention_(fresh, name)
        yield f"{name}, before training", fresh.eval().to(first.device), image_processor
    for folder, (name, model, image_processor) in zip(arguments.models, loaded, strict=True):
        if arguments.start:
            start = own_start(folder, model, arguments.trust_remote_code)
            yield f"{name}, at its start", start.eval().to(model.device), image_processor
        yield name, model, image_processor


def own_start(folder: str, model: PreTrainedModel, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a model of `frugalvit train` or `frugalvit joint` as it was before training. It is drawn again with the
    run's seed and options, so that the two differ by training alone.

    Args:
        folder (`str`): The run's folder, or that of one of the two models of a run of `frugalvit joint`.
        model (`PreTrainedModel`): The trained model.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Run code that comes with the model that the run went on from, whatever the run was told.

    Raises:
        ValueError: if the folder has no `run.json` of such a run.
    """
    # They take seconds to import, and few ask for a start.
    from .training import joint
    from .training.components.classifiers import starting_model
    from .training.options import train

    folder, makers = Path(folder), {train.PROG: starting_model, joint.PROG: joint.starting_twins}
    known, file = " or ".join(makers), folder / "run.json"
    if folder.name in joint.PARTS and not file.is_file():
        file, makers = folder.parent / "run.json", {joint.PROG: joint.starting_twins}
    run = read_json(file, {"command": str | None, "arguments": dict}) if file.is_file() else {}
    command = run.get("command") or ""
    make = next((maker for prog, maker in makers.items() if command.startswith(f"{prog} ")), None)
    if make is None:
        raise ValueError(
            f"--start: {folder} has no run.json of {known}, so that its start is not known; compare with a new "
            "draw by --initialization."
        )
    # A folder does not say whom to trust; its user does.
    try:
        start = make(run["arguments"] | {"trust_remote_code": trust_remote_code}, model.config)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"--start: the arguments in {file} are none that {known} takes ({error}).") from error
    if not isinstance(start, BootstrappedViTForImageClassification):
        return start
    return start.agent if isinstance(model, type(start.agent)) else start.vit


def _rows(measured: dict[str, list[LayerStatistics]], layers: Sequence[int]) -> list[dict[str, object]]:
    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    return [
        {
            "model": name,
            "layer": statistics[layer - 1].layer,
            "stable rank": statistics[layer - 1].stable_rank,
            "entropy": mean(statistics[layer - 1].entropy),
            "mass at a neighbor": mean(statistics[layer - 1].mass),
            "neighbors": " ".join(f"({dy:+d},{dx:+d})" for dy, dx in statistics[layer - 1].offset) or "-",
        }
        for name, statistics in measured.items()
        for layer in layers
    ]


def stable_rank(matrices: torch.Tensor) -> torch.Tensor:
    """Stable rank of matrices, `(…, rows, columns)` to `(…)`, from 1 to the rank: the sum of the squared singular
    values divided by the largest one (Remark 1 of Zheng et al.)."""
    values = torch.linalg.svdvals(matrices.float()).square()
    return values.sum(-1) / values.amax(-1)


@torch.no_grad()
def measure_attention(model: PreTrainedModel, batches: Iterable[torch.Tensor]) -> list[LayerStatistics]:
    """Measure the attention of a model's layers to images, and the stable rank of their outputs.

    Args:
        model (`PreTrainedModel`): A vision transformer of Transformers or of this package. For a convolutional model,
            only the stable rank is measured.
        batches (iterable of `torch.Tensor`): Pixel values `(batch, channels, height, width)`.

    Returns:
        `list[LayerStatistics]`: One a layer.

    Raises:
        ValueError: if there are no images, the model returns no hidden states, or some are not finite.
    """
    implementation = getattr(model.config, "_attn_implementation", None)
    attends = hasattr(model.config, "num_attention_heads")
    if attends:
        model.set_attn_implementation("eager")
    wanted = {"output_attentions": True} if attends else {}
    count, sums = 0, {}
    try:
        for pixel_values in batches:
            count += len(pixel_values)
            outputs = model(pixel_values, output_hidden_states=True, **wanted)
            for layer, states in enumerate(outputs.hidden_states[1:]):
                # A feature map's positions are its tokens.
                tokens = states.flatten(2).mT if states.ndim == 4 else states
                if not tokens.isfinite().all():
                    raise ValueError(
                        f"Layer {layer} of this {type(model).__name__} returns NaN or infinite values: it diverged, "
                        "or its weights are damaged."
                    )
                _add(sums, (layer, "rank"), stable_rank(tokens).sum())
            for layer, weights in enumerate((attends and outputs.attentions) or ()):
                # Windows of an image count as one.
                weights, share = weights.float(), len(pixel_values) / len(weights)
                _add(sums, (layer, "maps"), share * weights.sum(0))
                _add(sums, (layer, "entropy"), share * torch.special.entr(weights).sum(-1).mean(-1).sum(0))
    finally:
        if attends:
            model.set_attn_implementation(implementation)
    if not count:
        raise ValueError("Got no images, expected at least one.")
    if not sums:
        raise ValueError(
            f"{type(model).__name__} returns no hidden states of layers; expected a vision model that does."
        )
    grid = patch_grid(model.config)
    means = {key: value.cpu() / count for key, value in sums.items()}
    layers = 1 + max(layer for layer, _ in means)
    return [_statistics(layer, means, grid) for layer in range(layers)]


def _add(sums: dict, key, value: torch.Tensor):
    sums[key] = sums[key] + value if key in sums else value


def patch_grid(config) -> tuple[int, int] | None:
    """Rows and columns of patches, if tokens are patches, else None."""
    patch = getattr(config, "patch_size", None)
    if patch is None:
        return None
    return tuple(size // patch for size, patch in zip(pair(config.image_size), pair(patch), strict=True))


def _statistics(layer: int, means: dict, grid: tuple[int, int] | None) -> LayerStatistics:
    statistics = LayerStatistics(layer + 1, means[layer, "rank"].item())
    if (layer, "maps") in means:
        statistics.maps = means[layer, "maps"]
        statistics.entropy = means[layer, "entropy"].tolist()
        positions = grid[0] * grid[1] if grid else 0
        if 0 < positions <= statistics.maps.shape[-1]:
            among_patches = statistics.maps[:, -positions:, -positions:]
            offsets = [offset for offset in kernel_offsets(2 * REACH + 1) if impulse_matrix(*grid, offset).any()]
            masses = torch.stack(
                [interior_mass(among_patches, impulse_matrix(*grid, offset)) for offset in offsets], dim=1
            )
            best = masses.max(dim=1)
            statistics.mass = best.values.tolist()
            statistics.offset = [offsets[index] for index in best.indices.tolist()]
    return statistics


def draw_attention(
    measured: dict[str, list[LayerStatistics]], layers: Sequence[int], heads: Sequence[int] | None = (1,)
) -> Figure:
    """Draw attention maps, a row for each layer. For each model and head there are the whole map and its upper left
    corner, 48 queries and keys, enlarged (figures 3 to 6 of Zheng et al.). The colors of a map reach up to its largest
    values, but at least up to ten times uniform attention.

    Args:
        measured (`dict`): The statistics of `measure_attention`, by the name of the model.
        layers (sequence of `int`): Layers to draw, from 1.
        heads (sequence of `int`, *optional*, defaults to `(1,)`): Heads to draw, from 1; `None` draws their average.

    Returns:
        `matplotlib.figure.Figure`: Not known to pyplot; show it in a notebook or save it with `save_figure`.

    Raises:
        ValueError: if a model has no attention maps, or no such head.
    """
    for name, statistics in measured.items():
        maps = statistics[layers[0] - 1].maps
        if maps is None:
            raise ValueError(f"{name} has no attention to draw; expected a vision transformer.")
        if wrong := [head for head in heads or () if not 1 <= head <= len(maps)]:
            raise ValueError(f"{name} has no head {wrong[0]}, expected 1 to {len(maps)}.")
    columns = [(name, head) for name in measured for head in heads or [None]]
    panel, gap, left, top = 1.5, 0.08, 0.3, 0.42
    group = 2 * panel + gap
    width = left + len(columns) * (group + 3 * gap)
    corner = f"{CORNER}\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}{CORNER}"
    legend = f"Rows are queries, columns keys; beside each map its upper left {corner} corner."
    # Characters are about half as wide as high.
    lines = textwrap.wrap(legend, int((width - left) * 72 / (0.5 * LEGEND_SIZE)))
    bottom = 0.32 + 0.13 * len(lines)
    height = top + len(layers) * (panel + gap) + bottom
    figure = Figure(figsize=(width, height), dpi=200, facecolor="white")
    FigureCanvasAgg(figure)
    for row, layer in enumerate(layers):
        y = height - top - (row + 1) * panel - row * gap
        figure.text(
            0.5 * left / width,
            (y + panel / 2) / height,
            f"layer {layer}",
            rotation=90,
            ha="center",
            va="center",
            size=8,
            color=TEXT_COLOR,
        )
        for column, (name, head) in enumerate(columns):
            maps = measured[name][layer - 1].maps
            weights = (maps.mean(0) if head is None else maps[head - 1]).numpy()
            corner = min(CORNER, len(weights))
            darkest = max(np.quantile(weights, 0.998), 10 / len(weights))
            x = left + column * (group + 3 * gap)
            for part, shown in enumerate((weights, weights[:corner, :corner])):
                box = ((x + part * (panel + gap)) / width, y / height, panel / width, panel / height)
                axes = figure.add_axes(box)
                smoothing = "nearest" if part else "antialiased"
                axes.imshow(shown, cmap="magma_r", vmin=0, vmax=darkest, interpolation=smoothing)
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set(color="#d04020" if part else "#c8c8c8", linewidth=0.8 if part else 0.4)
                if part == 0 and corner < len(weights):
                    axes.add_patch(
                        Rectangle((-0.5, -0.5), corner, corner, fill=False, edgecolor="#d04020", linewidth=0.8)
                    )
                if row == 0 and part == 0:
                    title = f"{name}, head {head}" if len(columns) > len(measured) else name
                    axes.set_title(title, loc="left", fontsize=8, color=TEXT_COLOR, pad=4, parse_math=False)
    style = {"va": "center", "size": LEGEND_SIZE, "color": LEGEND_COLOR}
    scale_y, scale = bottom - 0.16, 0.8
    figure.text(left / width, scale_y / height, "attention: 0", ha="left", **style)
    bar = figure.add_axes(((left + 0.62) / width, (scale_y - 0.04) / height, scale / width, 0.08 / height))
    bar.imshow(np.linspace(0, 1, 64)[None], cmap="magma_r", aspect="auto")
    bar.set(xticks=[], yticks=[])
    bar.spines[:].set(color="#c8c8c8", linewidth=0.4)
    figure.text((left + 0.68 + scale) / width, scale_y / height, "the largest of the map", ha="left", **style)
    style["va"] = "bottom"
    figure.text(left / width, 0.06 / height, "\n".join(lines), ha="left", **style)
    return figure


def draw_entropy(measured: dict[str, list[LayerStatistics]]) -> Figure:
    """Draw the entropy of attention by layer: a dot for every head, a line through the layers' means, and that of
    uniform attention. High entropy is dense attention (section 3 of Hyeon-Woo et al.).

    Args:
        measured (`dict`): The statistics of `measure_attention`, by the name of the model.

    Returns:
        `matplotlib.figure.Figure`: Not known to pyplot; show it in a notebook or save it with `save_figure`.

    Raises:
        ValueError: if a model has no attention.
    """
    figure = Figure(figsize=(4.2, 2.8), dpi=200, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes, colors = figure.subplots(), {}
    for place, (name, statistics) in enumerate(measured.items()):
        if not statistics[0].entropy:
            raise ValueError(f"{name} has no attention to draw; expected a vision transformer.")
        color = colors[name] = LINE_COLORS[place % len(LINE_COLORS)]
        shift = 0.06 * (place - (len(measured) - 1) / 2)
        numbers = [layer.layer + shift for layer in statistics]
        for number, layer in zip(numbers, statistics, strict=True):
            axes.scatter([number] * len(layer.entropy), layer.entropy, s=7, color=color, alpha=0.5, linewidths=0)
        axes.plot(numbers, [np.mean(layer.entropy) for layer in statistics], color=color, linewidth=1.4)
    uniform = {math.log(layer.maps.shape[-1]) for statistics in measured.values() for layer in statistics}
    if len(uniform) == 1:
        axes.axhline(uniform.pop(), color=LEGEND_COLOR, linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(
            "uniform",
            (1, axes.get_lines()[-1].get_ydata()[0]),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=LEGEND_SIZE,
            color=LEGEND_COLOR,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer", fontsize=8, color=TEXT_COLOR)
    axes.set_ylabel("entropy of attention, nats", fontsize=8, color=TEXT_COLOR)
    axes.tick_params(labelsize=7, colors=TEXT_COLOR)
    axes.spines[["top", "right"]].set_visible(False)
    label_lines(axes, colors, "best")
    return figure
