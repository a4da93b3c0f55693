"""Views of images: uint8 until a batch is normalized. The view of an image in training is a function of (seed, epoch,
image index) alone, so that a run resumes exactly."""

from collections.abc import Sequence
from contextlib import contextmanager

import torch
from PIL import Image
from torchvision.transforms import v2
from transformers import PreTrainedConfig

from ..modeling.image_format import ImageFormat, normalization_of


# Longest side of a strip, in multiples of its shorter side, where only the middle is kept.
LONGEST = 32
# Purposes of random numbers: uses that share (seed, epoch, index) must not share numbers.
VIEW, MIX, CAPTION = 0, 1, 4


def vision_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the vision configuration of a CLIP or a LLaVA; other configurations as they are."""
    vision = getattr(config, "vision_config", None)
    return vision if isinstance(vision, PreTrainedConfig) else config


def random_seed(*keys: int) -> int:
    """Mix integers into a 32-bit seed (the finalizer of SplitMix64, chained)."""
    mask, value = (1 << 64) - 1, 0
    for key in keys:
        value = (value + key + 0x9E3779B97F4A7C15) & mask
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        value ^= value >> 31
    return value >> 32


@contextmanager
def seeded(*keys: int):
    """Seed torch's CPU random numbers from `keys` inside the block, and restore their state after it."""
    state = torch.get_rng_state()
    # Not torch.manual_seed: it also seeds every accelerator and is a hundred times slower.
    torch.default_generator.manual_seed(random_seed(*keys))
    try:
        yield
    finally:
        torch.set_rng_state(state)


def prepare_images(image_processor, images: Sequence[Image.Image]) -> torch.Tensor:
    """Return the `pixel_values` that an image processor makes of RGB images; of a cropped strip, only the middle is
    resized."""
    if _keeps_middle(image_processor):
        images = [middle_of(image) for image in images]
    return image_processor(list(images), return_tensors="pt")["pixel_values"]


def _keeps_middle(image_processor) -> bool:
    """Whether an image processor resizes the shorter side of images and keeps their middle."""
    if (timm := getattr(image_processor, "data_config", None)) is not None:
        return timm.get("crop_mode") in (None, "center")
    resizes = getattr(image_processor, "do_resize", True) and getattr(image_processor, "do_center_crop", False)
    return bool(resizes and dict(image_processor.size).get("shortest_edge"))


def restore_images(image_processor, pixel_values: torch.Tensor) -> torch.Tensor:
    """Turn pixel values of an image processor back into red, green and blue, 0 to 1, float32 on the CPU."""
    image_format = ImageFormat(tuple(pixel_values.shape[-2:]), *normalization_of(image_processor))
    return image_format.denormalize(pixel_values.detach().float().cpu()).clamp(0, 1)


def size_made_by(image_processor) -> tuple[int, int]:
    """Return height and width in pixels of an image processor's images."""
    try:
        return ImageFormat.from_processor(image_processor).size
    except ValueError:
        made = image_processor([Image.new("RGB", (360, 240))], return_tensors="pt")["pixel_values"]
        return tuple(made[0].shape[-2:])


def middle_of(image: Image.Image) -> Image.Image:
    """Return the middle of a strip, `LONGEST` times as long as wide; other images as they are."""
    longest = LONGEST * min(image.size)
    left, top = (max(length - longest, 0) // 2 for length in image.size)
    return image.crop((left, top, image.width - left, image.height - top)) if left or top else image


class View:
    """Turns an RGB `PIL.Image` into named uint8 tensors `(3, height, width)`, which `formats` normalizes."""

    formats: dict[str, ImageFormat]


class EvalView(View):
    """Resize and center crop as the image processor does."""

    def __init__(self, image_format: ImageFormat):
        self.formats = {"pixel_values": image_format}
        self.size, self.resize = image_format.size, image_format.resize
        self.round = round if image_format.rounds_center else int
        self.interpolation = image_format.interpolation

    def __call__(self, image):
        pixels = v2.functional.pil_to_tensor(middle_of(image) if self.resize else image)
        target = [self.resize] if self.resize else list(self.size)
        pixels = v2.functional.resize(pixels, target, self.interpolation, antialias=True)
        # Transformers rounds down; timm, as torchvision's own center crop, to even.
        top, left = (self.round((have - want) / 2) for have, want in zip(pixels.shape[-2:], self.size, strict=True))
        return {"pixel_values": v2.functional.crop(pixels, top, left, *self.size)}
