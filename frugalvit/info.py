"""`frugalvit info`: tokens, parameters and multiply-accumulates of the papers' variants and of model folders."""

import json
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from .architectures import COUNTED, architecture_of, image_side, variants
from .common.loading import check_complete, load_image_processor, one_error, split_revision
from .common.macs import KnownShapes, count_macs
from .common.resources import shipped_checkpoints
from .common.tables import format_table
from .common.views import size_made_by
from .configuration.configuration_base import pair
from .configuration.configuration_sparseformer_base import is_sparseformer
from .options.info import parse


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)

    names = arguments.models or [*variants(), *shipped_checkpoints()]
    rows = [describe(name) for name in tqdm(names, desc="counting", leave=False, disable=None)]
    print(json.dumps(rows, indent=2) if arguments.json else format_table(rows))


def describe(name: str) -> dict[str, object]:
    """Count the tokens, parameters and multiply-accumulates of a model.

    Args:
        name (`str`): One of `variants()`, a model that ships, a model folder or a hub id.

    Returns:
        `dict`: `name`; `tokens`, with [CLS], as the papers count, `None` for a feature map; `image_size` in pixels, an
        `int`, or height and width if they differ; `parameters`; `macs` and `macs_with_attention`, see `count_macs`.

    Raises:
        ValueError: if there is no such variant or model, or its architecture is unknown.
    """
    architecture, config = architecture_of(name)
    folder = Path(split_revision(name)[0])
    if folder.is_dir():
        # Its weights' header is read, and nothing of them.
        options = {"device_map": "meta", "ignore_mismatched_sizes": True, "output_loading_info": True}
        with one_error(name, COUNTED):
            model, report = architecture.from_pretrained(folder, **options)
        check_complete(name, model, report, COUNTED)
    else:
        with one_error(name, COUNTED), torch.device("meta"):
            model = architecture._from_config(config)
    vision = image_side(model)
    height, width = _image_size(folder, vision)
    macs = count_macs(vision, (height, width), vision.config.num_channels)
    return {
        "name": name,
        "tokens": _count_tokens(vision, height, width),
        "image_size": height if height == width else [height, width],
        "parameters": model.num_parameters(),
        "macs": macs.macs,
        "macs_with_attention": macs.macs_with_attention,
    }


def _image_size(folder: Path, vision: PreTrainedModel) -> tuple[int, int]:
    """Height and width of a model's images. For a DINOv2, the image processor beside it tells: its configuration names
    the size that its positions are for, whatever size it is used with."""
    if vision.config.model_type.startswith("dinov2") and (folder / "preprocessor_config.json").is_file():
        return size_made_by(load_image_processor(folder, False, COUNTED))
    return pair(vision.config.image_size)


def _count_tokens(model: PreTrainedModel, height: int, width: int) -> int | None:
    """Number of tokens after the last block, with [CLS]; `None` for a model that keeps a feature map."""
    config = model.config
    if is_sparseformer(config):
        return config.default_num_tokens + config.num_prefix_tokens
    image = torch.empty(1, config.num_channels, height, width, device="meta")
    with torch.no_grad(), KnownShapes():
        hidden_states = model(image, output_hidden_states=True).hidden_states[-1]
    return hidden_states.shape[1] if hidden_states.ndim == 3 else None
