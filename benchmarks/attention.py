"""Draw attention maps, the entropy of attention, and feature maps, and measure stable ranks.

    python benchmarks/attention.py maps MODEL --initialization impulse mimetic trunc_normal
    python benchmarks/attention.py maps RUN --start --layers 1 4
    python benchmarks/attention.py maps RUN OTHER --images image.png --average-heads
    python benchmarks/attention.py entropy RUN OTHER
    python benchmarks/attention.py features RUN OTHER --images image.png another.png
    python benchmarks/attention.py ranks cifar10-convmixer

- `maps` draws attention maps, averaged over images (figures 3 to 6 of Zheng et al., tables 3 and 4 of Zhang et al.).
  --initialization adds untrained models with the first model's architecture. --start adds the initial model of each
  run.
- `entropy` draws the entropy of each head's attention (section 3 of Hyeon-Woo et al.).
- `features` draws the norms of feature vectors (tables 5 and 6 of Zhang et al.).
- `ranks` measures the stable rank of each layer's input and of the last layer's output (remark 1 of Zheng et al.).
"""

import copy
import math
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate.utils import set_seed
from matplotlib.figure import Figure
from PIL import Image
from transformers import AutoModelForImageClassification, PreTrainedModel

from frugalvit.attention import LayerStatistics, measure_attention, patch_grid, stable_rank
from frugalvit.modeling.initialization import INITIALIZATIONS, initialize_attention_
from frugalvit.pictures import save_figure
from frugalvit.training import joint, train
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import load_images
from frugalvit.training.loading import load_model
from frugalvit.training.models import build_model
from frugalvit.training.preprocessing import decode_image
from shared import add_results_argument, make_parser, write_table


# Beside each attention map, the corner with the first `CORNER` queries and keys is drawn enlarged.
CORNER = 48
STYLE = {"dpi": 200, "facecolor": "white", "layout": "constrained"}


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=["maps", "entropy", "features", "ranks"])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders or hub ids of classifiers")
    parser.add_argument("--names", nargs="+", help="names of the models (default: their folders')")
    parser.add_argument(
        "--initialization", nargs="+", default=[], choices=INITIALIZATIONS, help="fresh starts of the first model"
    )
    parser.add_argument("--start", action="store_true", help="add each run's model before training")
    parser.add_argument("--layers", nargs="+", type=int, help="from 1 (default: the first, a middle and the last one)")
    parser.add_argument("--head", type=int, default=1, help="to draw, from 1 (default: %(default)s)")
    parser.add_argument("--average-heads", action="store_true", help="draw the average of all heads instead")
    parser.add_argument("--images", nargs="+", metavar="FILE", help=f"default: 64 of {SUBSET}")
    add_results_argument(parser)
    arguments = parser.parse_args(argv)
    names = arguments.names or [Path(model).name for model in arguments.models]
    if arguments.images:
        images = [Image.open(file).convert("RGB") for file in arguments.images]
    else:
        images = [decode_image(record["image"], n) for n, record in enumerate(load_images(SUBSET, "train[:64]"))]

    if arguments.what == "ranks":
        found = {name: stable_ranks(model, processor, images) for name, model, processor in models(arguments, names)}
        write_table(arguments.results_dir / "stable_rank.json", {"images": len(images)}, [found])
        return
    measure = feature_maps if arguments.what == "features" else measure_attention
    measured = {}
    for name, model, image_processor in models(arguments, names):
        pixel_values = image_processor(images, return_tensors="pt")["pixel_values"]
        measured[name] = measure(model.eval(), pixel_values.split(32))
    depth = min(map(len, measured.values()))
    layers = arguments.layers or sorted({1, (depth + 1) // 2, depth})
    if not 1 <= min(layers) <= max(layers) <= depth:
        parser.error(f"--layers has {layers}, expected 1 to {depth}")
    if arguments.what == "features":
        figure = draw_features(images, measured, arguments.layers or range(1, depth + 1))
    else:
        head = None if arguments.average_heads else arguments.head
        figure = draw_entropy(measured) if arguments.what == "entropy" else draw_maps(measured, layers, head)
    save_figure(figure, arguments.results_dir / f"{arguments.what}.png")


@torch.no_grad()
def stable_ranks(model: PreTrainedModel, image_processor, images: Sequence[Image.Image]) -> list[float]:
    """Return the stable rank of the hidden states `(positions, channels)` at each layer, averaged over images."""
    pixel_values = image_processor(images, return_tensors="pt")["pixel_values"]
    states = model.eval()(pixel_values, output_hidden_states=True).hidden_states
    return [stable_rank(each.flatten(2) if each.ndim == 4 else each).mean().item() for each in states]


def models(arguments, names: Sequence[str]) -> Iterator[tuple[str, PreTrainedModel, object]]:
    """Yield the models to draw, each with a name and an image processor. A bootstrapped ViT is drawn without its
    agent, except by `features`, which draws the ViT and the agent separately."""
    loaded = [load_model(model, "image-classification", "cpu") for model in arguments.models]
    for initialization in arguments.initialization:
        torch.manual_seed(0)
        fresh = AutoModelForImageClassification.from_config(copy.deepcopy(loaded[0][0].config))
        initialize_attention_(fresh, initialization)
        yield f"{initialization}, before training", fresh, loaded[0][1]
    for folder, name, (model, image_processor) in zip(arguments.models, names, loaded, strict=True):
        found = {f"{name}, at its start": own_start(Path(folder), model)} if arguments.start else {}
        for each, part in (found | {name: model}).items():
            if part.config.model_type != "bootstrapped_vit":
                yield each, part, image_processor
            elif arguments.what == "features":
                yield f"{each}, ViT", part.vit, image_processor
                yield f"{each}, agent", part.agent, image_processor
            else:
                yield each, part.vit, image_processor


def own_start(run: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Rebuild the initial model of a run from the training command in the run's model card."""
    [command] = re.findall(r"^frugalvit (?:train|joint) .*$", (run / "README.md").read_text("utf-8"), re.MULTILINE)
    _, name, *argv = shlex.split(command)
    options, _, args = {"train": train, "joint": joint}[name].make_parser().parse(argv)
    names = list(model.config.id2label.values())
    set_seed(args.seed)
    if name == "joint":
        return joint.build_twins(options, names)
    return build_model(options, args, names)[0]


def draw_maps(
    measured: Mapping[str, Sequence[LayerStatistics]], layers: Sequence[int], head: int | None = None
) -> Figure:
    """Draw attention maps: a row of panels for each layer, and in each row two panels for each model. The first panel
    is the map of one head or the mean over heads. The second panel is the upper left corner of this map. Rows of
    a map are queries, and columns are keys. The color scale ends at the 99.8th percentile or at ten times uniform
    attention, whichever is larger."""
    figure = Figure(figsize=(3.3 * len(measured), 1.6 * len(layers) + 0.3), **STYLE)
    axes = figure.subplots(len(layers), 2 * len(measured), squeeze=False)
    for panels, layer in zip(axes, layers, strict=True):
        panels[0].set_ylabel(f"layer {layer}", fontsize=8)
        for (name, of_layers), pair in zip(measured.items(), panels.reshape(-1, 2), strict=True):
            maps = of_layers[layer - 1].maps
            if maps is None or (head or 1) > len(maps):
                raise ValueError(f"{name} has {0 if maps is None else len(maps)} heads to draw, not head {head or 1}.")
            weights = maps.mean(0) if head is None else maps[head - 1]
            largest = max(weights.flatten().quantile(0.998).item(), 10 / len(weights))
            for axis, shown in zip(pair, (weights, weights[:CORNER, :CORNER]), strict=True):
                axis.imshow(shown, cmap="magma_r", vmin=0, vmax=largest)
            if layer == layers[0]:
                pair[0].set_title(name, loc="left", fontsize=8)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return figure


def draw_entropy(measured: Mapping[str, Sequence[LayerStatistics]]) -> Figure:
    """Draw the entropy of attention by layer, with a dot for each head, a line for the mean over heads, and a dotted
    line for uniform attention. High entropy means dense attention."""
    figure = Figure(figsize=(4.2, 2.8), **STYLE)
    axes = figure.subplots()
    for name, of_layers in measured.items():
        numbers = [each.layer for each in of_layers]
        [line] = axes.plot(numbers, [statistics.mean(each.entropy) for each in of_layers], label=name)
        dots = [(each.layer, entropy) for each in of_layers for entropy in each.entropy]
        axes.scatter(*zip(*dots, strict=True), s=7, alpha=0.5, color=line.get_color())
    axes.axhline(math.log(of_layers[0].maps.shape[-1]), color="gray", linestyle=":", label="uniform")
    axes.set(xlabel="layer", ylabel="entropy of attention, nats", xticks=numbers)
    axes.legend(fontsize=7, frameon=False)
    return figure


@torch.no_grad()
def feature_maps(model: PreTrainedModel, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a tensor for each layer: the norms of the layer's output vectors, `(images, rows, columns)`."""
    found = []
    for pixel_values in batches:
        states, grid = model(pixel_values, output_hidden_states=True).hidden_states[1:], patch_grid(model.config)
        if states[0].ndim == 4:
            found.append([features.norm(dim=1) for features in states])
        else:
            found.append([features[:, -math.prod(grid) :].norm(dim=-1).unflatten(1, grid) for features in states])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def draw_features(
    images: Sequence[Image.Image], maps: Mapping[str, Sequence[torch.Tensor]], layers: Sequence[int]
) -> Figure:
    """Draw each image and its feature map after each layer. Each panel has its own color scale."""
    pairs = [(index, name) for index in range(len(images)) for name in maps]
    figure = Figure(figsize=(1.4 * (len(layers) + 1), 1.5 * len(pairs)), **STYLE)
    axes = figure.subplots(len(pairs), len(layers) + 1, squeeze=False)
    for (index, name), (picture, *panels) in zip(pairs, axes, strict=True):
        picture.imshow(images[index])
        picture.set_xlabel(name, fontsize=7)
        for axis, layer in zip(panels, layers, strict=True):
            axis.imshow(maps[name][layer - 1][index], cmap="magma")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], ["Input", *(f"Layer {layer}" for layer in layers)], strict=True):
        axis.set_title(title, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
