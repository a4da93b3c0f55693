"""`frugalvit features`: features in the layers of models, beside each other, or a backbone's feature maps."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from .attention import patch_grid
from .common.image_files import find_images, read_images
from .common.loading import load_image_classifier
from .common.views import prepare_images, restore_images
from .dense import write_dense_features
from .options.features import parse
from .pictures import check_picture_path, draw_maps, save_figure


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.dense:
        write_dense_features(arguments)
        return
    names = arguments.names or [Path(model).name for model in arguments.places]
    if len(names) != len(arguments.places) or len(set(names)) != len(names):
        raise ValueError(f"--names has {len(set(names))} different names for {len(arguments.places)} models.")
    if arguments.limit < 1:
        raise ValueError(f"--limit is {arguments.limit}, expected at least 1.")
    check_picture_path(arguments.picture)

    paths = find_images(arguments.image, arguments.limit)
    images = [image for _, image in itertools.islice(read_images(paths), arguments.limit)]
    maps, seen = {}, None
    for name, folder in zip(names, arguments.places, strict=True):
        model, image_processor = load_image_classifier(folder, arguments.device, arguments.trust_remote_code)
        pixel_values = prepare_images(image_processor, images)
        if seen is None:
            seen = restore_images(image_processor, pixel_values)
        for part, alone in parts(name, model).items():
            maps[part] = feature_maps(alone, pixel_values.to(model.device))
    save_figure(draw_features(seen, maps, arguments.layers), arguments.picture)
    print(f"Drew {arguments.picture}.")


def parts(name: str, model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """A dict of a model by its name, or of a ViT and its agent by theirs."""
    if model.config.model_type != "bootstrapped_vit":
        return {name: model}
    return {f"{name}, ViT": model.vit, f"{name}, agent": model.agent}


@torch.no_grad()
def feature_maps(model: PreTrainedModel, pixel_values: torch.Tensor) -> list[torch.Tensor]:
    """Compute the lengths of a model's feature vectors at every position, after each layer.

    Args:
        model (`PreTrainedModel`): Returns hidden states, tokens of patches or feature maps.
        pixel_values (`torch.Tensor`): `(batch, channels, height, width)`.

    Returns:
        `list[torch.Tensor]`: `(batch, rows, columns)` for each layer.

    Raises:
        ValueError: if the model's tokens lie on no grid.
    """
    states = model(pixel_values, output_hidden_states=True).hidden_states[1:]
    return [_lengths(features, patch_grid(model.config), type(model).__name__) for features in states]


def _lengths(features: torch.Tensor, grid: tuple[int, int] | None, name: str) -> torch.Tensor:
    if features.ndim == 4:
        return features.float().norm(dim=1).cpu()
    positions = grid[0] * grid[1] if grid else 0
    if not 0 < positions <= features.shape[1]:
        raise ValueError(f"The tokens of {name} are no patches of the image; expected a ViT or a convolutional model.")
    return features[:, -positions:].float().norm(dim=-1).unflatten(1, grid).cpu()


def draw_features(
    images: torch.Tensor, maps: Mapping[str, Sequence[torch.Tensor]], layers: Sequence[int] | None = None
) -> Figure:
    """Draw images and features of layers (tables 5 and 6 of Zhang et al.). The colors of a panel go from its smallest
    to its largest value.

    Args:
        images (`torch.Tensor`): `(batch, channels, height, width)`, 0 to 1.
        maps (`Mapping`): The maps of `feature_maps`, by the name of the model.
        layers (sequence of `int`, *optional*): Layers to draw, from 1; all if not given.

    Returns:
        `matplotlib.figure.Figure`: Not known to pyplot; show it in a notebook or save it with `save_figure`.

    Raises:
        ValueError: if a model has no such layer.
    """
    depth = min(map(len, maps.values()))
    layers = list(layers or range(1, depth + 1))
    if wrong := [layer for layer in layers if not 1 <= layer <= depth]:
        raise ValueError(f"--layers has {wrong[0]}, expected 1 to {depth}.")
    rows = [(index, name) for index in range(len(images)) for name in maps]
    pictures = list(images)
    return draw_maps(
        [pictures[index] for index, _ in rows],
        [[maps[name][layer - 1][index] for layer in layers] for index, name in rows],
        headings=["Input", *(f"Layer {layer}" for layer in layers)],
        captions=[name for _, name in rows],
        legend="Length of the feature vectors, in each panel from its smallest (dark) to its largest value.",
    )
