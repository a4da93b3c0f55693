"""Vision transformers of other libraries and of this package, read into one `Anatomy`."""

from torch import nn

from .anatomy import Anatomy, is_timm, labels_of


def read_anatomy(model: nn.Module | Anatomy, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a vision transformer: one of Transformers, timm, open_clip or this package, a model with a tower of one, or
    a wrapper around one.

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
    if hasattr(part, "config") and hasattr(part, "base_model"):
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


__all__ = ["Anatomy", "read_anatomy"]
