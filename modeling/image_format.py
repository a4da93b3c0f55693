"""Size and normalization of a model's images. `ImageFormat` is read from image processors or configurations."""

import functools
import math
import re
from dataclasses import dataclass

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from ..configuration.configuration_base import pair


# Map from PIL's numbers of resampling filters to torchvision's filters.
FILTERS = {0: InterpolationMode.NEAREST_EXACT, 2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}
# Image processors of Transformers whose attributes describe the preprocessing completely.
SUPPORTED = re.compile(
    "(Beit|Bit|Blip|CLIP|DeiT|DINOv3ViT|Flava|Llava|Segformer|Siglip|Siglip2|ViT)ImageProcessor(Pil)?"
)


@dataclass(frozen=True)
class ImageFormat:
    """Size and normalization of a model's images."""

    # Height and width in pixels.
    size: tuple[int, int]
    # Mean and standard deviation for the normalization of pixel values in 0..1.
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    # PIL's number of the resampling filter.
    resample: int = 2
    # Length of the shorter side in pixels before the center crop. None means no crop: images are resized to `size`.
    resize: int | None = None
    # How the position of a center crop is rounded if it lies halfway between two pixels. True rounds to the even
    # number (as timm does). False rounds down.
    rounds_center: bool = False

    @classmethod
    def from_processor(cls, processor) -> "ImageFormat":
        """Read the format from the attributes of an image processor of Transformers or timm.

        DeiT's processor resizes images to a square before the crop. The returned format resizes the shorter side, as
        DeiT's authors do. SigLIP 2 NaFlex takes images of any shape. For its processor, the returned size is the
        largest square size with at most `max_num_patches` patches.

        Raises:
            ValueError: if the processor is `None`, or if `ImageFormat` cannot describe its preprocessing.
        """
        if processor is None:
            raise ValueError(
                "The image processor is None, expected that of the model or teacher: pass processing_class, for "
                "example AutoImageProcessor.from_pretrained(…)."
            )
        if (timm := getattr(processor, "data_config", None)) is not None:
            size = timm["input_size"][1:]
            mode = timm.get("crop_mode") or "center"
            resample = timm["interpolation"]
            crops = mode == "center"
            if mode not in ("center", "squash") or (crops and size[0] != size[1]):
                raise ValueError(
                    f"`crop_mode` is {mode!r} and the size {size}, expected 'squash', or 'center' with a square."
                )
            resize = math.floor(min(size) / timm["crop_pct"]) if crops else None
        else:
            size, resize = _size_and_resize(processor)
            resample = processor.resample
            crops = False
        number = getattr(Image.Resampling, resample.upper(), None) if isinstance(resample, str) else resample
        if number not in FILTERS:
            raise ValueError(f"Images are resized by {resample!r}, expected nearest (0), bilinear (2) or bicubic (3).")
        mean, std = normalization_of(processor)
        return cls(tuple(size), mean, std, int(number), resize, rounds_center=crops)

    @classmethod
    def from_config(cls, config) -> "ImageFormat":
        """Read the format from a SparseFormer configuration. Raise a ValueError if `image_mean` is None."""
        if config.image_mean is None:
            raise ValueError(
                "`image_mean` is None, so that images cannot be normalized; pass the teacher's `image_processor` to "
                "`from_teacher`."
            )
        mean, std = (
            (value,) * config.num_channels if isinstance(value, int | float) else tuple(value)
            for value in (config.image_mean, config.image_std)
        )
        return cls(pair(config.image_size), mean, std, config.resample, config.resize_size)

    def config_fields(self) -> dict:
        """Return the format as fields of a SparseFormer configuration."""
        height, width = self.size
        return {
            "image_size": height if height == width else [height, width],
            "image_mean": self.mean,
            "image_std": self.std,
            "resample": self.resample,
            "resize_size": self.resize,
        }

    @property
    def interpolation(self) -> InterpolationMode:
        return FILTERS[self.resample]

    @property
    def fill(self) -> list[int]:
        """The color, in 0..255 for each channel, that normalization maps closest to zero."""
        return [min(max(round(255 * value), 0), 255) for value in self.mean]

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalize uint8 pixels `(batch, channels, height, width)` to float32."""
        return v2.functional.normalize(v2.functional.to_dtype(pixels, scale=True), self.mean, self.std)

    def denormalize(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Convert normalized images to RGB values in 0..1."""
        device = pixel_values.device
        return pixel_values * _channels(self.std, device) + _channels(self.mean, device)

    def convert(self, pixel_values: torch.Tensor, source: "ImageFormat") -> torch.Tensor:
        """Convert normalized images from the format `source` to this format."""
        if source.size != self.size:
            pixel_values = v2.functional.resize(pixel_values, list(self.size), self.interpolation, antialias=True)
        if (source.mean, source.std) == (self.mean, self.std):
            return pixel_values
        device = pixel_values.device
        return (source.denormalize(pixel_values) - _channels(self.mean, device)) / _channels(self.std, device)


def _size_and_resize(processor) -> tuple[tuple[int, int], int | None]:
    name = type(processor).__name__
    if not SUPPORTED.fullmatch(name) or getattr(processor, "do_pad", None):
        raise ValueError(
            f"The image processor is a {name}, which trainings cannot reproduce; expected a processor like ViT's or "
            "CLIP's, without padding."
        )
    if patches := getattr(processor, "max_num_patches", None):
        side = math.isqrt(patches) * processor.patch_size
        return (side, side), None
    size = dict(processor.size or {})
    whole = (size.get("height"), size.get("width"))
    shortest = size.get("shortest_edge")
    if getattr(processor, "do_center_crop", None):
        crop = (processor.crop_size["height"], processor.crop_size["width"])
        if crop == whole:
            return crop, None
        if shortest or (whole[0] and whole[0] == whole[1]):
            return crop, int(shortest or whole[0])
    elif all(whole):
        return whole, None
    elif shortest and not processor.do_resize:
        # C-RADIO's processor does not resize images.
        return (shortest, shortest), int(shortest)
    raise ValueError(f'{name} has the size {size}, expected "height" and "width", or a center crop.')


def normalization_of(processor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of an image processor, for pixel values in 0..1."""
    if (timm := getattr(processor, "data_config", None)) is not None:
        return tuple(timm["mean"]), tuple(timm["std"])
    mean, std = (processor.image_mean, processor.image_std) if getattr(processor, "do_normalize", None) else (0.0, 1.0)
    # Value of a white pixel (255) after rescaling and before normalization.
    white = 255 * processor.rescale_factor if getattr(processor, "do_rescale", None) else 255
    triples = ((values,) * 3 if isinstance(values, int | float) else values for values in (mean, std))
    mean, std = (tuple(value / white for value in values) for values in triples)
    return mean, std


def set_size(image_processor, image_size: int | list[int] | tuple[int, int]):
    """Change the image size of an image processor in place. The size before a center crop changes in proportion."""
    height, width = pair(image_size)
    square = {"height": height, "width": width}
    size = dict(image_processor.size)
    crop = getattr(image_processor, "crop_size", None)
    if getattr(image_processor, "do_center_crop", False):
        scale = min(height, width) / min(dict(crop).values())
        image_processor.size = {side: round(scale * pixels) for side, pixels in size.items()}
    else:
        # ConvNeXt's processor has the size key "shortest_edge" without a center crop.
        image_processor.size = {"shortest_edge": min(height, width)} if "shortest_edge" in size else square
    if crop is not None:
        image_processor.crop_size = square


# The tensors are cached, because a copy from the CPU to an accelerator waits for the accelerator.
@functools.cache
@torch.inference_mode(False)
def _channels(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)
