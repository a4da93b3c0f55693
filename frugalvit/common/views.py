"""Views of images: uint8 until a batch is normalized. The view of an image in training is a function of (seed, epoch,
image index) alone, so that a run resumes exactly."""

import functools
import math
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from transformers import PreTrainedConfig


# Longest side of a strip, in multiples of its shorter side, where only the middle is kept.
LONGEST = 32
# Purposes of random numbers: uses that share (seed, epoch, index) must not share numbers.
VIEW, MIX, CAPTION = 0, 1, 4
# PIL's numbers of the filters that torchvision resizes tensors with.
FILTERS = {0: InterpolationMode.NEAREST_EXACT, 2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}
# Image processors of Transformers whose attributes tell all that they do.
SUPPORTED = re.compile(
    "(Beit|Bit|Blip|CLIP|DeiT|DINOv3ViT|Flava|Llava|Segformer|Siglip|Siglip2|ViT)ImageProcessor(Pil)?"
)


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


@dataclass(frozen=True)
class ImageFormat:
    """Size and normalization of a model's images."""

    # Height and width in pixels.
    size: tuple[int, int]
    # Of values in 0..1.
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    # PIL's number of the interpolation.
    resample: int = 2
    # Pixels of the shorter side before the center crop of evaluation; without it the image is resized to `size`.
    resize: int | None = None
    # Whether half a pixel at the crop's edge is rounded to even, as timm does, not down.
    rounds_center: bool = False

    @classmethod
    def from_processor(cls, processor) -> "ImageFormat":
        """Read the format from the attributes of an image processor of Transformers or timm; raise a ValueError if
        training does not follow it.

        A processor that resizes to a larger square before the crop (DeiT's) is taken for one that resizes the shorter
        side, as DeiT's authors do, and one for any shape (SigLIP 2's NaFlex) for its largest square.
        """
        if (timm := getattr(processor, "data_config", None)) is not None:
            size, mode, resample = timm["input_size"][1:], timm.get("crop_mode") or "center", timm["interpolation"]
            crops = mode == "center"
            if mode not in ("center", "squash") or (crops and size[0] != size[1]):
                raise ValueError(f"The crop_mode is {mode!r} and the size {size}, expected squash, or a square.")
            resize = math.floor(min(size) / timm["crop_pct"]) if crops else None
        else:
            size, resize = _size_and_resize(processor)
            resample, crops = processor.resample, False
        number = getattr(Image.Resampling, resample.upper(), None) if isinstance(resample, str) else resample
        if number not in FILTERS:
            raise ValueError(f"Images are resized by {resample!r}, expected nearest (0), bilinear (2) or bicubic (3).")
        mean, std = _normalization(processor)
        return cls(tuple(size), mean, std, int(number), resize, rounds_center=crops)

    @property
    def interpolation(self) -> InterpolationMode:
        return FILTERS[self.resample]

    @property
    def fill(self) -> list[int]:
        """The color that normalizes to zero, or the nearest one, 0..255."""
        return [min(max(round(255 * value), 0), 255) for value in self.mean]

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalize pixels, `(batch, channels, height, width)` uint8, to float32, on their device."""
        return self._standardize(pixels.float().mul_(1 / 255))

    def _standardize(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.sub_(_channels(self.mean, pixels.device)).div_(_channels(self.std, pixels.device))

    def denormalize(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Turn normalized images back into red, green and blue, 0..1."""
        device = pixel_values.device
        return pixel_values * _channels(self.std, device) + _channels(self.mean, device)

    def convert(self, pixel_values: torch.Tensor, source: "ImageFormat") -> torch.Tensor:
        """Convert normalized images of the format `source` to this one."""
        if source.size != self.size:
            pixel_values = v2.functional.resize(pixel_values, list(self.size), self.interpolation, antialias=True)
        if (source.mean, source.std) == (self.mean, self.std):
            return pixel_values
        return self._standardize(source.denormalize(pixel_values))


def _size_and_resize(processor) -> tuple[tuple[int, int], int | None]:
    """Return height and width of an image processor's images, and the shorter side before its crop, if it crops."""
    name = type(processor).__name__
    if not SUPPORTED.fullmatch(name) or getattr(processor, "do_pad", None):
        raise ValueError(f"Training does not follow {name}, expected one like ViT's or CLIP's, without padding.")
    if patches := getattr(processor, "max_num_patches", None):
        side = math.isqrt(patches) * processor.patch_size
        return (side, side), None
    size = dict(processor.size or {})
    whole, shortest = (size.get("height"), size.get("width")), size.get("shortest_edge")
    if getattr(processor, "do_center_crop", None):
        crop = (processor.crop_size["height"], processor.crop_size["width"])
        if crop == whole:
            return crop, None
        if shortest or (whole[0] and whole[0] == whole[1]):
            return crop, int(shortest or whole[0])
    elif all(whole):
        return whole, None
    elif shortest and not processor.do_resize:
        # C-RADIO's takes images of any size.
        return (shortest, shortest), int(shortest)
    raise ValueError(f'{name} has the size {size}, expected "height" and "width", or a center crop.')


def _normalization(processor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation, of values in 0..1, by which an image processor normalizes."""
    if (timm := getattr(processor, "data_config", None)) is not None:
        return tuple(timm["mean"]), tuple(timm["std"])
    mean, std = (processor.image_mean, processor.image_std) if getattr(processor, "do_normalize", None) else (0.0, 1.0)
    # What the processor makes of 255, before it normalizes.
    white = 255 * processor.rescale_factor if getattr(processor, "do_rescale", None) else 255
    triples = ((values,) * 3 if isinstance(values, int | float) else values for values in (mean, std))
    mean, std = (tuple(value / white for value in values) for values in triples)
    return mean, std


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
    image_format = ImageFormat(tuple(pixel_values.shape[-2:]), *_normalization(image_processor))
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


# Cached: copying numbers to an accelerator waits for it.
@functools.cache
@torch.inference_mode(False)
def _channels(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)


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
