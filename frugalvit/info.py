"""`frugalvit info`: tokens, parameters and multiply-accumulates of the papers' variants and of model folders."""

import difflib
import json
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .common.loading import check_complete, check_folder, load_image_processor, one_error, split_revision
from .common.macs import count_macs
from .common.resources import locate_model, shipped_checkpoints
from .common.tables import format_table
from .common.views import size_made_by, vision_config_of
from .configuration.configuration_base import pair
from .modeling.modeling_sparseformer import SparseFormerVisionModelWithProjection
from .options.info import parse
from .registry import configuration_classes
from .validation import model_class


# What a folder should be, for messages.
KIND = "a model to count"


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)

    names = arguments.models or [*variants(), *shipped_checkpoints()]
    rows = [describe(name) for name in tqdm(names, desc="counting", leave=False, disable=None)]
    print(json.dumps(rows, indent=2) if arguments.json else format_table(rows))


def variants() -> dict[str, type[PreTrainedConfig]]:
    """The papers' models of all families, by name, each with the class of its configuration."""
    families = [config_class for config_class in configuration_classes() if hasattr(config_class, "variants")]
    return {name: config_class for config_class in families for name in config_class.variants()}


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
    folder = _folder(name)
    if folder.is_dir():
        # Its weights' header is read, and nothing of them.
        options = {"device_map": "meta", "ignore_mismatched_sizes": True, "output_loading_info": True}
        with one_error(name, KIND):
            model, report = architecture.from_pretrained(folder, **options)
        check_complete(name, model, report, KIND)
    else:
        with one_error(name, KIND), torch.device("meta"):
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
        return size_made_by(load_image_processor(folder, False, KIND))
    return pair(vision.config.image_size)


def _folder(name: str) -> Path:
    return Path(locate_model(name)).expanduser()


def architecture_of(name: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class and the configuration of a model; arguments and errors as those of `describe`."""
    known = variants()
    if name in known:
        config = known[name].from_variant(name)
        projects = getattr(config, "projection_dim", None) is not None
        classifier = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
        return SparseFormerVisionModelWithProjection if projects else classifier, config
    folder = locate_model(name)
    if folder != name or Path(name).is_dir() or "/" in name:
        folder, revision = split_revision(folder)
        check_folder(_folder(name), KIND)
        with one_error(name, KIND):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **revision)
        return _saved_architecture(config, name), config
    close = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.5))
    hint = f"Did you mean: {close}?" if close else "`frugalvit info` lists the variants."
    raise ValueError(f"{name!r} is no variant of the papers and no model folder. {hint}")


def _saved_architecture(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    """The class that a model was saved from, ours or Transformers'."""
    try:
        found = model_class(config)
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be counted: {error}.") from error
    architecture = found.__name__
    vision = vision_config_of(config)
    if not hasattr(vision, "image_size") or not hasattr(vision, "num_channels"):
        raise ValueError(
            f"{name!r} is a {architecture}, expected a vision model with `image_size` and `num_channels`."
        )
    return found


def image_side(model: PreTrainedModel) -> PreTrainedModel:
    """The image side of a CLIP or a LLaVA; other models as they are."""
    if vision_config_of(model.config) is not model.config:
        return model.vision_model if hasattr(model, "vision_model") else model.model.vision_tower
    return model


def _count_tokens(model: PreTrainedModel, height: int, width: int) -> int | None:
    """Number of tokens after the last block, with [CLS]; `None` for a model that keeps a feature map."""
    config = model.config
    if config.model_type == "sparseformer":
        return config.default_num_tokens + config.num_prefix_tokens
    image = torch.empty(1, config.num_channels, height, width, device="meta")
    with torch.no_grad():
        hidden_states = model(image, output_hidden_states=True).hidden_states[-1]
    return hidden_states.shape[1] if hidden_states.ndim == 3 else None
