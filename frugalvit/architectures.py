"""Find the class and the configuration of a model by the model's name, and load saved models."""

import difflib
import os
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

import frugalvit

from .configuration.configuration_sparseformer import SparseFormerProjectionConfig
from .exported import ExportedModule
from .modeling.modeling_sparseformer import SparseFormerVisionModelWithProjection
from .training.files import split_revision
from .training.loading import Task, load_model, load_pretrained


# Error messages describe the expected kind of model with these words.
COUNTED = "a model to count"


def variants() -> dict[str, type[PreTrainedConfig]]:
    """Return the configuration classes of the papers' models, with the models' names as keys."""
    families = [found for found in vars(frugalvit).values() if isinstance(found, type) and hasattr(found, "variants")]
    return {name: config_class for config_class in families for name in config_class.variants()}


def architecture_of(name: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the class and the configuration of a vision model.

    Args:
        name (`str`): A key of `variants()`, the name of a shipped model, a model folder or a hub id.
    """
    known = variants()
    if name in known:
        config = known[name].from_variant(name)
        if isinstance(config, SparseFormerProjectionConfig):
            return SparseFormerVisionModelWithProjection, config
        return transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)], config
    if not Path(split_revision(name)[0]).is_dir() and "/" not in name:
        close = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.5))
        hint = f"Did you mean: {close}?" if close else "`frugalvit info` lists the variants."
        raise ValueError(f"{name!r} is no variant of the papers and no model folder. {hint}")
    config = load_pretrained(AutoConfig, name, COUNTED)
    found = model_class(config)
    vision = getattr(config, "vision_config", config)
    if not hasattr(vision, "image_size") or not hasattr(vision, "num_channels"):
        raise ValueError(f"{name!r} is a {found.__name__}, expected a vision model with images of one size.")
    return found, config


def image_side(model: PreTrainedModel) -> PreTrainedModel:
    """Return the vision model inside a CLIP or a LLaVA. Any other model is returned unchanged."""
    if hasattr(model.config, "vision_config"):
        side = model.vision_model if hasattr(model, "vision_model") else model.model.vision_tower
        # A `SparseFormerGridTower` stores its SparseFormer in the attribute `tower`.
        return getattr(side, "tower", side)
    return model


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of frugalvit or Transformers that `config.architectures` names."""
    architecture = str((getattr(config, "architectures", None) or ["none"])[0])
    # frugalvit is searched first, because a newer Transformers may have a class with the same name.
    found = getattr(frugalvit, architecture, None) or getattr(transformers, architecture, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(
            f"{config.name_or_path!r} is a {architecture}, which is neither frugalvit's nor Transformers'."
        )
    return found


def load_saved_model(
    name: str | os.PathLike, device: str | torch.device = "cpu", device_map: str | None = None
) -> PreTrainedModel:
    """Load a model with the class that its configuration names. See `load_model` for arguments and errors."""
    task = Task("a model of frugalvit or Transformers", model_class, processor_class=None, needs_rgb=False)
    return load_model(name, task, device, device_map=device_map)[0]


def has_rois(model: PreTrainedModel) -> bool:
    """Return whether a model accepts `output_rois=True`."""
    if isinstance(model, ExportedModule):
        return "rois" in model.outputs
    return "rois" in getattr(model.config, "keys_to_ignore_at_inference", ())
