"""Compute pixel values with image processors, and convert pixel values back to images."""

from collections.abc import Sequence

import torch
from PIL import Image

from ..modeling.image_format import ImageFormat, normalization_of


# Largest ratio of an image's sides. A longer image, of which only the middle is kept, is cropped before resizing.
LONGEST = 32


def prepare_images(image_processor, images: Sequence[Image.Image]) -> torch.Tensor:
    """Return an image processor's `pixel_values` of RGB images. If the processor crops the middle of images, long
    strips are cropped first, because resizing them whole takes much memory."""
    if _keeps_middle(image_processor):
        images = [middle_of(image) for image in images]
    return image_processor(list(images), return_tensors="pt")["pixel_values"]


def _keeps_middle(image_processor) -> bool:
    """Return whether an image processor resizes the shorter side of images and crops their middle."""
    if (timm := getattr(image_processor, "data_config", None)) is not None:
        return timm.get("crop_mode") in (None, "center")
    resizes = getattr(image_processor, "do_resize", True) and getattr(image_processor, "do_center_crop", False)
    return bool(resizes and dict(image_processor.size).get("shortest_edge"))


def restore_images(image_processor, pixel_values: torch.Tensor) -> torch.Tensor:
    """Convert an image processor's pixel values back to RGB values from 0 to 1, float32 on the CPU."""
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
    """Crop an image more than `LONGEST` times as long as wide to its middle. Return other images unchanged."""
    longest = LONGEST * min(image.size)
    left, top = (max(length - longest, 0) // 2 for length in image.size)
    return image.crop((left, top, image.width - left, image.height - top)) if left or top else image
