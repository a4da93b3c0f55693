"""Compute pixel values with image processors, and convert pixel values back to images."""

from collections.abc import Sequence

import torch
from PIL import Image

from ..modeling.image_format import ImageFormat, normalization_of


# Largest ratio of an image's longer side to its shorter side. `middle_of` crops images with a larger ratio.
LONGEST = 32


def prepare_images(image_processor, images: Sequence[Image.Image]) -> torch.Tensor:
    """Return the `pixel_values` that an image processor computes from RGB images. If the processor center-crops,
    very long images are cropped first, because resizing a very long image as a whole takes much memory."""
    if _keeps_middle(image_processor):
        images = [middle_of(image) for image in images]
    return image_processor(list(images), return_tensors="pt")["pixel_values"]


def _keeps_middle(image_processor) -> bool:
    """Return whether an image processor resizes images by their shorter side and then center-crops them."""
    if (timm := getattr(image_processor, "data_config", None)) is not None:
        return timm.get("crop_mode") in (None, "center")
    resizes = getattr(image_processor, "do_resize", True) and getattr(image_processor, "do_center_crop", False)
    return bool(resizes and dict(image_processor.size).get("shortest_edge"))


def restore_images(image_processor, pixel_values: torch.Tensor) -> torch.Tensor:
    """Convert an image processor's pixel values back to RGB values from 0 to 1, as float32 on the CPU."""
    image_format = ImageFormat(tuple(pixel_values.shape[-2:]), *normalization_of(image_processor))
    return image_format.denormalize(pixel_values.detach().float().cpu()).clamp(0, 1)


def size_made_by(image_processor) -> tuple[int, int]:
    """Return the height and width in pixels of an image processor's output."""
    try:
        return ImageFormat.from_processor(image_processor).size
    except ValueError:
        made = image_processor([Image.new("RGB", (360, 240))], return_tensors="pt")["pixel_values"]
        return tuple(made[0].shape[-2:])


def middle_of(image: Image.Image) -> Image.Image:
    """Center-crop an image's longer side to at most `LONGEST` times the shorter side."""
    longest = LONGEST * min(image.size)
    left, top = (max(length - longest, 0) // 2 for length in image.size)
    return image.crop((left, top, image.width - left, image.height - top)) if left or top else image
