"""Views of images: what a recipe shows a model of an image, as a function of (seed, epoch, image index) alone.

Workers, processes and the batch that an image lands in change nothing, so a run resumes exactly and a later run can
regenerate the very same views. Geometry and color are torchvision v2 transforms under a random state that is set for
the sample and put back after it; pixels stay uint8 until a whole batch is normalized at once, on the device.
"""

import functools
import math
import random
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from transformers import PreTrainedConfig


# What a random number is for: uses that share (seed, epoch, index) must not share numbers.
VIEW, MIX, ORDER, SHUFFLE, CAPTION = range(5)


def vision_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that says which images a model takes: of a CLIP or a LLaVA that of its tower, of
    others all."""
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


@contextmanager
def seeded_by_torch():
    """Draw the random numbers of Python and NumPy, which timm takes, from torch's stream inside, and go on as before
    outside."""
    states = random.getstate(), np.random.get_state()
    seed = int(torch.randint(2**32, ()))
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@dataclass(frozen=True)
class ImageFormat:
    """The images that a model takes.

    Args:
        size (`tuple[int, int]`): Height and width in pixels.
        mean, std (`tuple[float, ...]`): Normalization of each channel, of values in 0..1.
        resample (`int`): PIL's number of the interpolation, 2 bilinear, 3 bicubic.
        resize (`int`, *optional*): Pixels of the shorter side before the center crop of evaluation; without it the
            image is resized to `size` as it is.
    """

    size: tuple[int, int]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: int = 2
    resize: int | None = None

    @classmethod
    def from_processor(cls, processor) -> "ImageFormat":
        """What a Transformers image processor says, also one that wraps timm's settings.

        Some leave the size open: SigLIP 2's for any shape (NaFlex) is taken for the largest square, one that does not
        resize (C-RADIO's) for the size that it names. One that resizes to a larger square before the crop (DeiT's) is
        taken for one that resizes the shorter side, as DeiT's authors do.

        Raises:
            ValueError: if it resizes in another way than to a size, or the shorter side before a center crop.
        """
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
        return cls(
            size=(crop["height"], crop["width"]),
            mean=_of_channels(processor.image_mean) if processor.do_normalize else (0.0, 0.0, 0.0),
            std=_of_channels(processor.image_std) if processor.do_normalize else (1.0, 1.0, 1.0),
            resample=_number_of_filter(processor.resample),
            resize=shorter,
        )

    @property
    def interpolation(self) -> InterpolationMode:
        return {0: InterpolationMode.NEAREST_EXACT, 2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}[
            self.resample
        ]

    @property
    def fill(self) -> list[int]:
        """The color that normalizes to zero, 0..255."""
        return [round(255 * value) for value in self.mean]

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """`(batch, channels, height, width)` uint8 to normalized float32, where the pixels are."""
        mean, std = (_channels(tuple(values), pixels.device) for values in (self.mean, self.std))
        return pixels.float().mul_(1 / 255).sub_(mean).div_(std)

    def convert(self, pixel_values: torch.Tensor, source: "ImageFormat") -> torch.Tensor:
        """Normalized images of another format in this one."""
        if source.size != self.size:
            pixel_values = v2.functional.resize(pixel_values, list(self.size), self.interpolation, antialias=True)
        if (source.mean, source.std) == (self.mean, self.std):
            return pixel_values
        mean, std, own_mean, own_std = (
            _channels(tuple(values), pixel_values.device) for values in (source.mean, source.std, self.mean, self.std)
        )
        return (pixel_values * std + (mean - own_mean)) / own_std


def _number_of_filter(resample: int | str) -> int:
    """PIL's number of an interpolation, which timm names."""
    names = {"nearest": 0, "bilinear": 2, "bicubic": 3}
    if (number := names.get(resample, resample)) not in names.values():
        raise ValueError(f"The model's images are resized by {resample!r}; expected PIL's {names}, by name or number.")
    return int(number)


def _of_channels(values: float | Sequence[float]) -> tuple[float, ...]:
    """One number for each channel, where a processor may have one for all."""
    return (values,) * 3 if isinstance(values, int | float) else tuple(values)


# Kept: copying numbers to an accelerator waits for it.
@functools.cache
@torch.inference_mode(False)
def _channels(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)


class View:
    """Turns an RGB `PIL.Image` into named uint8 tensors `(3, height, width)`; `formats` says how each is normalized.

    Subclasses draw from torch's random state.
    """

    formats: dict[str, ImageFormat]

    def __call__(self, image: Image.Image) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class EvalView(View):
    """No chance: resize and center crop as the image processor does."""

    def __init__(self, image_format: ImageFormat):
        self.formats = {"pixel_values": image_format}
        self.size, self.resize = image_format.size, image_format.resize
        self.interpolation = image_format.interpolation

    def __call__(self, image):
        pixels = v2.functional.pil_to_tensor(image)
        target = [self.resize] if self.resize else list(self.size)
        pixels = v2.functional.resize(pixels, target, self.interpolation, antialias=True)
        # As Transformers centers, which rounds down; torchvision's own center crop rounds to even.
        top, left = (int((have - want) / 2) for have, want in zip(pixels.shape[-2:], self.size, strict=True))
        return {"pixel_values": v2.functional.crop(pixels, top, left, *self.size)}
