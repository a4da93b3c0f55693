"""Vision transformers of other libraries and of this package, read into one `Anatomy`."""

from collections.abc import Callable

from torch import nn

from .anatomy import MLP, Anatomy, Attention, Block, GridPositions, is_timm, labels_of, split_linear


# Readers of models of one's own, by class.
READERS: dict[type, Callable] = {}


def register_reader(model_class: type, reader: Callable[[nn.Module, tuple[int, int] | None], Anatomy]):
    """Let `read_anatomy`, and so every method, read models of a class by a function of the model and the size of its
    images, which returns an `Anatomy`; docs/models.md has an example."""
    READERS[model_class] = reader


def read_anatomy(model: nn.Module | Anatomy, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a vision transformer: one of Transformers, timm, open_clip or this package, a model with a tower of one, or
    a wrapper around one; or one of a class that has a reader (`register_reader`).

    Nothing is copied or computed. `Anatomy.require_plain` refuses what is no plain pre-norm vision transformer.

    Args:
        model (`nn.Module` or `Anatomy`): The model; an anatomy comes back as it is.
        image_size (pair of `int`, *optional*):
            Height and width in pixels of the images that it will see, if not those of its configuration: DINOv2's says
            518 pixels, and its image processor 224. Models of Transformers interpolate their positions at each pass;
            those of timm are set to the new size.

    Raises:
        ValueError: if it is no model, one that reads text alone, or one that takes no images of that size.
    """
    if isinstance(model, Anatomy):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"Expected a model, got {type(model).__name__}; load it first.")
    image_size = None if image_size is None else tuple(image_size)
    # The visual tower of an open_clip model, or the timm model inside Transformers' wrapper.
    part = model.visual if hasattr(model, "encode_image") else getattr(model, "timm_model", model)
    if type(part) in READERS:
        read = READERS[type(part)]
    elif hasattr(part, "config") and hasattr(part, "base_model"):
        from .transformers import read
    elif is_timm(part):
        from .timm import read
    else:
        from .open_clip import read

    anatomy = read(part, image_size)
    if anatomy is None:
        anatomy = Anatomy(part, obstacle="it has no list of transformer blocks that is known")
    if part is not model and anatomy.classifier is not None and hasattr(model, "config"):
        anatomy.labels = labels_of(model.config)
    anatomy.source = model
    if not anatomy.obstacle and image_size not in (None, anatomy.image_size):
        own, other = (" x ".join(map(str, size)) for size in (anatomy.image_size, image_size))
        raise ValueError(f"{anatomy.name} takes images of {own} pixels alone, got {other}.")
    return anatomy


__all__ = [
    "MLP",
    "Anatomy",
    "Attention",
    "Block",
    "GridPositions",
    "read_anatomy",
    "register_reader",
    "split_linear",
]
