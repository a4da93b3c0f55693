"""Vision transformers of other libraries and of this package, read into one `Anatomy`."""

import functools

from torch import nn

from . import open_clip, timm, transformers
from .anatomy import Anatomy


def read_anatomy(model: nn.Module | Anatomy, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a vision transformer: one of Transformers, timm, open_clip or this package, a model with a tower of one, or
    a wrapper around one.

    Nothing is copied or computed. `Anatomy.require_plain` refuses what is no plain pre-norm vision transformer,
    `Anatomy.check` compares the outputs of the anatomy with the model's.

    Args:
        model (`nn.Module` or `Anatomy`): The model; an anatomy comes back as it is.
        image_size (pair of `int`, *optional*):
            Height and width in pixels of the images that it will see, if not those of its configuration: DINOv2's says
            518 pixels, and its image processor 224.

    Raises:
        ValueError: if it is no model, or one that reads text alone.
    """
    if isinstance(model, Anatomy):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"Expected a model, got {type(model).__name__}; load it first.")
    part = _unwrap(model)
    if open_clip.is_open_clip(part):
        anatomy = open_clip.read(part)
    elif timm.is_timm(part):
        anatomy = timm.read(part)
        if anatomy.classifier is not None and hasattr(model, "config"):
            anatomy.take_labels(model.config)
    elif transformers.is_transformers(part):
        anatomy = transformers.read(part)
    else:
        anatomy = Anatomy(part, [], obstacle="it has no list of transformer blocks that is known")
    anatomy.source, anatomy.read = model, functools.partial(read_anatomy, image_size=image_size)
    if image_size is not None and tuple(image_size) != anatomy.image_size and not anatomy.obstacle:
        anatomy.see(image_size)
    return anatomy


def _unwrap(model: nn.Module) -> nn.Module:
    """The timm model inside Transformers' wrapper, the visual tower of an open_clip model, or the model itself."""
    if hasattr(model, "visual") and hasattr(model, "encode_image"):
        return model.visual
    return getattr(model, "timm_model", model)


__all__ = ["Anatomy", "read_anatomy"]
