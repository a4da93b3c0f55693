"""Views of images. The view of an image in training is a function of (seed, epoch, image index) alone.

It depends neither on workers and processes nor on the batch, so that a run resumes exactly and a later run can make
the very same views again. Geometry and color are torchvision's v2 transforms, under a random state that is set for the
sample and restored after it. Pixels stay uint8 until a whole batch is normalized at once, on the device.
"""

import functools
import math
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from transformers import PreTrainedConfig


# How far a view's pixels may be from the image processor's: mean levels of 255, which decide, of a test picture.
MOST_LEVELS = 1.0
# An image is decoded with so many times the pixels that are read of it, each way, or more.
ROOM = 2
# Strips are cut to so many of their shorter side where only their middle is seen.
LONGEST = 32
# What a random number is for: uses that share (seed, epoch, index) must not share numbers.
VIEW, MIX, ORDER, SHUFFLE, CAPTION = range(5)


def vision_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that is about images: that of the tower of a CLIP or a LLaVA, else all of it."""
    vision = getattr(config, "vision_config", None)
    return vision if isinstance(vision, PreTrainedConfig) else config


def random_seed(*keys: int) -> int:
    """A well mixed 32-bit seed from integers (the finalizer of SplitMix64, chained)."""
    mask, value = (1 << 64) - 1, 0
    for key in keys:
        value = (value + key + 0x9E3779B97F4A7C15) & mask
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        value ^= value >> 31
    return value >> 32


@contextmanager
def seeded(*keys: int):
    """Draw torch's CPU random numbers from the stream of `keys` inside, and go on as before outside."""
    state = torch.get_rng_state()
    # Not torch.manual_seed: it also seeds every accelerator and is a hundred times slower.
    torch.default_generator.manual_seed(random_seed(*keys))
    try:
        yield
    finally:
        torch.set_rng_state(state)


@dataclass(frozen=True)
class ImageFormat:
    """The images that a model takes.

    Args:
        size (`tuple[int, int]`): Height and width in pixels.
        mean, std (`tuple[float, ...]`): Normalization of red, green and blue, of values in 0..1.
        resample (`int`): PIL's number of the interpolation, 2 bilinear, 3 bicubic.
        resize (`int`, *optional*): Pixels of the shorter side before the center crop of evaluation; without it the
            image is resized to `size` as it is.
        reverse_channels (`bool`): Whether the model takes blue, green and red.
        rounds_center (`bool`): Whether half a pixel at the crop's edge is rounded to even, as timm does, not down.
    """

    size: tuple[int, int]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: int = 2
    resize: int | None = None
    reverse_channels: bool = False
    rounds_center: bool = False

    @classmethod
    def from_processor(cls, processor) -> "ImageFormat":
        """Return the format that a Transformers image processor makes, also one that wraps timm's settings.

        Its attributes are read and compared with what it makes of pictures. Normalization is measured, so that any
        order, offset and factor is followed. Some processors leave the size open: SigLIP 2's for any shape (NaFlex) is
        taken for the largest square, one that does not resize (C-RADIO's) for the size that it names. One that resizes
        to a larger square before the crop (DeiT's) is taken for one that resizes the shorter side, as DeiT's authors
        do.

        Raises:
            ValueError: if it resizes in another way than to a size, or the shorter side before a center crop, or does
                anything else that evaluation does not follow.
        """
        return cls._as_said(processor)._as_done(processor)

    @classmethod
    def _as_said(cls, processor) -> "ImageFormat":
        """The format that an image processor's attributes name."""
        if (timm := getattr(processor, "data_config", None)) is not None:
            size, mode = tuple(timm["input_size"][1:]), timm.get("crop_mode") or "center"
            if mode not in ("center", "squash") or (mode == "center" and size[0] != size[1]):
                raise ValueError(
                    f"The model's images are resized to {size[0]} x {size[1]} by timm's crop_mode {mode!r}, which "
                    "training does not follow; expected 'squash', or 'center' to a square."
                )
            return cls(
                size=size,
                mean=tuple(timm["mean"]),
                std=tuple(timm["std"]),
                resample=_number_of_filter(timm["interpolation"]),
                resize=math.floor(min(size) / timm["crop_pct"]) if mode == "center" else None,
                rounds_center=mode == "center",
            )
        size = dict(getattr(processor, "size", None) or {})
        if patches := getattr(processor, "max_num_patches", None):
            size = dict.fromkeys(("height", "width"), math.isqrt(patches) * processor.patch_size)
        crop = dict(processor.crop_size) if getattr(processor, "do_center_crop", None) else size
        shorter = size.get("shortest_edge")
        if crop is size and shorter is not None:
            # ConvNeXt's processor: below 384 pixels a crop from an image that is larger by a fixed share.
            crop = {"height": shorter, "width": shorter}
            share = getattr(processor, "crop_pct", None)
            shorter = None if share and shorter >= 384 else int(shorter / (share or 1))
        elif crop != size and shorter is None:
            shorter = size.get("height")
            crop = crop if shorter and shorter == size.get("width") else {}
        if not crop.keys() >= {"height", "width"}:
            raise ValueError(
                f"{type(processor).__name__} resizes images in a way that training does not follow (size {size}); "
                'expected "height" and "width", or "shortest_edge" before a center crop.'
            )
        normalizes = getattr(processor, "do_normalize", None)
        return cls(
            size=(crop["height"], crop["width"]),
            mean=_of_channels(processor.image_mean) if normalizes else (0.0, 0.0, 0.0),
            std=_of_channels(processor.image_std) if normalizes else (1.0, 1.0, 1.0),
            resample=_number_of_filter(processor.resample),
            resize=shorter,
        )

    def _as_done(self, processor) -> "ImageFormat":
        """This format, corrected by the normalization, order of channels and shorter side that a processor turns out
        to have.

        Raises:
            ValueError: if the processor's pixels still differ.
        """
        name, size = type(processor).__name__, PICTURE
        square = (min(PICTURE), min(PICTURE))
        if not getattr(processor, "do_resize", True):
            size = self.size[::-1]
        elif getattr(processor, "max_num_patches", None) or squashes_before_crop(processor):
            # What takes any shape, or is squashed before a crop, is followed on squares.
            size = square
        made = self._made_by(processor, size)
        if size == PICTURE and made.shape[1:] != (3, *self.size):
            # So is what makes other shapes of others.
            size = square
            made = self._made_by(processor, size)
        if made.shape[1:] != (3, *self.size):
            raise ValueError(
                f"{name} makes pixels of the shape {tuple(made.shape[1:])}, which training does not follow; expected "
                f"{(3, *self.size)}."
            )
        *flat, expected = made
        measured, levels = self._normalized_as(name, flat), []
        for resize in self._shorter_sides(processor):
            image_format = replace(measured, resize=resize)
            pixels = EvalView(image_format)(_test_picture(size))["pixel_values"]
            levels.append((255 * image_format.denormalize(expected) - pixels).abs().mean((1, 2)).max().item())
            if levels[-1] <= MOST_LEVELS:
                return image_format
        raise ValueError(
            f"{name} prepares images in a way that training does not follow: of a test picture its pixels differ by "
            f"{min(levels):.1f} of 255 levels from what is resized to {self.resize or self.size}, cropped in the "
            "middle, rescaled and normalized."
        )

    def _normalized_as(self, name: str, flat: Sequence[torch.Tensor]) -> "ImageFormat":
        """This format with the normalization that a processor has applied to black, white and red, unless it is the
        one that it names."""
        mean, std, reverse = _normalization(name, flat)
        values = torch.tensor([mean, std], dtype=torch.float64)
        if not reverse and torch.allclose(values, values.new_tensor([self.mean, self.std]), rtol=1e-4, atol=1e-4):
            return self
        return replace(self, mean=mean, std=std, reverse_channels=reverse)

    def _made_by(self, processor, size: tuple[int, int]) -> torch.Tensor:
        """The pixel values that a processor makes of a black, a white and a red image and of a test picture, all of
        this width and height: `(4, 3, height, width)`, float32."""
        images = [*_flat_pictures(size), _test_picture(size)]
        made = torch.as_tensor(np.asarray(processor(images, return_tensors="pt")["pixel_values"])).float()
        if getattr(processor, "max_num_patches", None) and made.ndim == 3:
            # Patches in row order, their pixels before their channels; more than a square has stay empty.
            side, rows = processor.patch_size, self.size[0] // processor.patch_size
            made = made[:, : rows * rows].reshape(len(made), rows, rows, side, side, 3)
            made = made.permute(0, 5, 1, 3, 2, 4).reshape(len(made), 3, *self.size)
        return made

    def _shorter_sides(self, processor) -> list[int | None]:
        """Lengths that the shorter side before a crop may have: the one that is named, and those that PoolFormer's and
        LeViT's processors make of it."""
        if self.resize is None:
            return [None]
        share = getattr(processor, "crop_pct", None) or 1
        return [self.resize, int(self.resize / share), int(256 / 224 * self.resize)]

    @property
    def interpolation(self) -> InterpolationMode:
        return {0: InterpolationMode.NEAREST_EXACT, 2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}[
            self.resample
        ]

    @property
    def fill(self) -> list[int]:
        """The color that normalizes to zero, or the nearest one, 0..255."""
        return [min(max(round(255 * value), 0), 255) for value in self.mean]

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalize pixels, `(batch, channels, height, width)` uint8, to float32, on their device."""
        mean, std = (_channels(tuple(values), pixels.device) for values in (self.mean, self.std))
        pixels = pixels.float().mul_(1 / 255).sub_(mean).div_(std)
        return pixels.flip(-3) if self.reverse_channels else pixels

    def denormalize(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Turn normalized images back into red, green and blue, 0..1."""
        mean, std = (_channels(tuple(values), pixel_values.device) for values in (self.mean, self.std))
        return (pixel_values.flip(-3) if self.reverse_channels else pixel_values) * std + mean

    def convert(self, pixel_values: torch.Tensor, source: "ImageFormat") -> torch.Tensor:
        """Convert normalized images of the format `source` to this one."""
        if source.size != self.size:
            pixel_values = v2.functional.resize(pixel_values, list(self.size), self.interpolation, antialias=True)
        if source.reverse_channels:
            pixel_values = pixel_values.flip(-3)
        if (source.mean, source.std) != (self.mean, self.std):
            mean, std, own_mean, own_std = (
                _channels(tuple(values), pixel_values.device)
                for values in (source.mean, source.std, self.mean, self.std)
            )
            pixel_values = (pixel_values * std + (mean - own_mean)) / own_std
        return pixel_values.flip(-3) if self.reverse_channels else pixel_values


def squashes_before_crop(processor) -> bool:
    """Whether an image processor resizes images to one size, whatever their shape, and crops from its center."""
    size = dict(getattr(processor, "size", None) or {})
    crops = getattr(processor, "do_center_crop", None) and dict(processor.crop_size) != size
    return bool(crops and "height" in size and getattr(processor, "do_resize", True))


def _number_of_filter(resample: int | str) -> int:
    """PIL's number of an interpolation, given timm's name."""
    names = {"nearest": 0, "bilinear": 2, "bicubic": 3}
    if (number := names.get(resample, resample)) not in names.values():
        raise ValueError(f"The model's images are resized by {resample!r}; expected PIL's {names}, by name or number.")
    return int(number)


def _normalization(name: str, flat: Sequence[torch.Tensor]) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
    """Mean and standard deviation of red, green and blue, of values in 0..1, and whether channels are reversed, from
    the pixel values that an image processor made of `_flat_pictures`.

    Raises:
        ValueError: if those of black and of white are the same.
    """
    low, high, red = (pixels[:, pixels.shape[-2] // 2, pixels.shape[-1] // 2].double() for pixels in flat)
    scale = high - low
    if not (scale.isfinite().all() and scale.abs().min() > 0):
        raise ValueError(f"{name} makes the same pixels of black and white, {low.tolist()}; check its image_std.")
    reverse = bool((red - low).abs().argmax() == 2)
    values = torch.stack([-low / scale, 1 / scale])
    mean, std = (values.flip(1) if reverse else values).tolist()
    return tuple(mean), tuple(std), reverse


def _of_channels(values: float | Sequence[float]) -> tuple[float, ...]:
    """One number for each channel, where a processor may have one for all."""
    return (values,) * 3 if isinstance(values, int | float) else tuple(values)


# Width and height of the picture that views and image processors are compared on.
PICTURE = (360, 240)


def _flat_pictures(size: tuple[int, int]) -> list[Image.Image]:
    """Black, white and red pictures, which show how pixels are normalized."""
    return [Image.new("RGB", size, color) for color in ("black", "white", "red")]


@functools.cache
def _test_picture(size: tuple[int, int]) -> Image.Image:
    """A picture of waves and tiles, other ones in each color."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]] * (240 / min(size))
    waves = [128 + 60 * np.sin(x / 17 + y / 31), 128 + 80 * np.cos(x / 23 - y / 13), 90 + 70 * np.sin((x + y) / 9)]
    tiles = ((x // 14 + y // 11) % 2) * 40
    return Image.fromarray((np.stack(waves, axis=2) + tiles[..., None]).clip(0, 255).astype(np.uint8))


def prepare_images(image_processor, images: Sequence[Image.Image]) -> torch.Tensor:
    """Return the `pixel_values` that an image processor makes of images. If it crops the middle of a strip, only the
    middle is resized.

    Args:
        image_processor: A Transformers image processor.
        images (sequence of `PIL.Image.Image`): RGB images.
    """
    if any(map(_is_strip, images)) and _sees_middle(image_processor):
        images = [middle_of(image) for image in images]
    return image_processor(list(images), return_tensors="pt")["pixel_values"]


def restore_images(image_processor, pixel_values: torch.Tensor) -> torch.Tensor:
    """Turn pixel values back into the images that the model saw.

    The image processor's normalization is measured, so that any factor, offset and order of channels is undone.

    Args:
        image_processor: A Transformers image processor, or a function that is called like one.
        pixel_values (`torch.Tensor`): `(batch, 3, height, width)`, which the processor made.

    Returns:
        `torch.Tensor`: float32 of the same shape on the CPU: red, green and blue, 0 to 1.

    Raises:
        ValueError: if the processor makes the same pixels of black and white.
    """
    made = image_processor(_flat_pictures(PICTURE), return_tensors="pt")["pixel_values"]
    flat = torch.as_tensor(np.asarray(made)).float()
    mean, std, reverse = _normalization(type(image_processor).__name__, flat)
    image_format = ImageFormat(tuple(pixel_values.shape[-2:]), mean, std, reverse_channels=reverse)
    return image_format.denormalize(pixel_values.detach().float().cpu()).clamp(0, 1)


def size_made_by(image_processor) -> tuple[int, int]:
    """Height and width in pixels of what an image processor makes of pictures, as they are or, where training can
    follow it, as `ImageFormat.from_processor` has them."""
    try:
        return ImageFormat.from_processor(image_processor).size
    except ValueError:
        made = image_processor([_test_picture(PICTURE)], return_tensors="pt")["pixel_values"]
        return tuple(np.asarray(made[0]).shape[-2:])


def _sees_middle(image_processor) -> bool:
    """Whether an image processor resizes, and keeps nothing of the ends of a strip."""
    if not getattr(image_processor, "do_resize", True):
        return False
    blank = Image.new("RGB", (640, 64))
    marked = blank.copy()
    for left in (0, 576):
        marked.paste("white", (left, 0, left + 64, 64))
    first, second = (image_processor(image, return_tensors="pt")["pixel_values"] for image in (blank, marked))
    return all(np.array_equal(of_blank, of_marked) for of_blank, of_marked in zip(first, second, strict=True))


def _is_strip(image: Image.Image) -> bool:
    return max(image.size) > LONGEST * min(image.size)


def middle_of(image: Image.Image) -> Image.Image:
    """The middle of a strip, `LONGEST` times as long as wide or one pixel more, so that both ends lose as much; other
    images as they are."""
    longest = LONGEST * min(image.size)
    left, top = (max(length - longest, 0) // 2 for length in image.size)
    return image.crop((left, top, image.width - left, image.height - top)) if left or top else image


# Kept: copying numbers to an accelerator waits for it.
@functools.cache
@torch.inference_mode(False)
def _channels(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)


class View:
    """Turns an RGB `PIL.Image` into named uint8 tensors `(3, height, width)`; `formats` says how each is normalized.

    Subclasses draw from torch's random state. `at_least` is the width and height of an image that suffice, see
    `read_image`. Without it, images are decoded whole. Views that draw have none, as their draws depend on the size.
    """

    formats: dict[str, ImageFormat]
    at_least: tuple[int, int] | None = None

    def __call__(self, image: Image.Image) -> dict[str, torch.Tensor]:
        raise NotImplementedError


# What PyTorch calls interpolations that look at all pixels.
_MODES = {InterpolationMode.BILINEAR: "bilinear", InterpolationMode.BICUBIC: "bicubic"}


class EvalView(View):
    """No chance: resize and center crop as the image processor does."""

    def __init__(self, image_format: ImageFormat):
        self.formats = {"pixel_values": image_format}
        self.size, self.resize = image_format.size, image_format.resize
        self.round = round if image_format.rounds_center else int
        self.interpolation = image_format.interpolation
        resized = (self.resize, self.resize) if self.resize else self.size[::-1]
        self.at_least = tuple(ROOM * length for length in resized)

    def __call__(self, image):
        shown = middle_of(image) if self.resize else image
        pixels = v2.functional.pil_to_tensor(shown)
        target = [self.resize] if self.resize else list(self.size)
        if (extent := shown.info.get("extent")) and shown is image and self.interpolation in _MODES:
            pixels = self.resize_extent(pixels, extent)
        else:
            pixels = v2.functional.resize(pixels, target, self.interpolation, antialias=True)
        # Transformers rounds down; timm, as torchvision's own center crop, to even.
        top, left = (self.round((have - want) / 2) for have, want in zip(pixels.shape[-2:], self.size, strict=True))
        return {"pixel_values": v2.functional.crop(pixels, top, left, *self.size)}

    def resize_extent(self, pixels: torch.Tensor, extent: tuple[float, float]) -> torch.Tensor:
        """Resize an image whose width and height in pixels are no whole numbers, `extent` of `read_image`."""
        width, height = extent
        rows, columns = self.size
        if self.resize:
            longer = int(self.resize * max(extent) / min(extent))
            rows, columns = (longer, self.resize) if height > width else (self.resize, longer)
        scales = (rows / height, columns / width)
        mode = _MODES[self.interpolation]
        pixels = F.interpolate(pixels[None], scale_factor=scales, mode=mode, antialias=True)
        return pixels[0, :, :rows, :columns]
