"""Size and normalization of a model's images. `ImageFormat` is read from image processors or configurations."""

import functools
import math
import re
from dataclasses import dataclass

import torch
from torchvision.transforms import InterpolationMode, v2
from transformers.image_utils import torch_pil_interpolation_mapping

from ..configuration.configuration_base import pair


# Map from PIL's numbers of resampling filters to torchvision's filters.
FILTERS = {0: InterpolationMode.NEAREST_EXACT, 2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}
# Map from timm's names of resampling filters to torchvision's filters.
TIMM_FILTERS = {"nearest": FILTERS[0], "bilinear": FILTERS[2], "bicubic": FILTERS[3]}
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
    interpolation: InterpolationMode = InterpolationMode.BILINEAR
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
            return cls._from_timm(timm)
        name = type(processor).__name__
        if not SUPPORTED.fullmatch(name) or getattr(processor, "do_pad", None):
            raise ValueError(
                f"The image processor is a {name}, which trainings cannot reproduce; expected a processor like ViT's "
                "or CLIP's, without padding."
            )
        sides = dict(processor.size or {})
        whole = (sides.get("height"), sides.get("width"))
        shortest = sides.get("shortest_edge")
        size = resize = None
        if patches := getattr(processor, "max_num_patches", None):
            size = (math.isqrt(patches) * processor.patch_size,) * 2
        elif getattr(processor, "do_center_crop", None):
            crop = (processor.crop_size["height"], processor.crop_size["width"])
            if crop == whole:
                size = crop
            elif shortest or (whole[0] and whole[0] == whole[1]):
                size = crop
                resize = int(shortest or whole[0])
        elif all(whole):
            size = whole
        elif shortest and not processor.do_resize:
            # C-RADIO's processor does not resize images.
            size = (shortest, shortest)
            resize = int(shortest)
        if size is None:
            raise ValueError(f'{name} has the size {sides}, expected "height" and "width", or a center crop.')
        if processor.resample not in FILTERS:
            raise ValueError(
                f"Images are resized by {processor.resample!r}, expected nearest (0), bilinear (2) or bicubic (3)."
            )
        normalizes = getattr(processor, "do_normalize", None)
        mean, std = (processor.image_mean, processor.image_std) if normalizes else (0.0, 1.0)
        # Value of a white pixel (255) after rescaling and before normalization.
        white = 255 * processor.rescale_factor if getattr(processor, "do_rescale", None) else 255
        triples = ((values,) * 3 if isinstance(values, int | float) else values for values in (mean, std))
        mean, std = (tuple(value / white for value in values) for values in triples)
        return cls(size, mean, std, FILTERS[processor.resample], resize)

    @classmethod
    def _from_timm(cls, config: dict) -> "ImageFormat":
        size = tuple(config["input_size"][1:])
        mode = config.get("crop_mode") or "center"
        crops = mode == "center"
        if mode not in ("center", "squash") or (crops and size[0] != size[1]):
            raise ValueError(
                f"`crop_mode` is {mode!r} and the size {size}, expected 'squash', or 'center' with a square."
            )
        name = config["interpolation"]
        if name not in TIMM_FILTERS:
            raise ValueError(f"Images are resized by {name!r}, expected one of {', '.join(TIMM_FILTERS)}.")
        resize = math.floor(min(size) / config["crop_pct"]) if crops else None
        mean = tuple(config["mean"])
        std = tuple(config["std"])
        return cls(size, mean, std, TIMM_FILTERS[name], resize, rounds_center=crops)

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
        return cls(pair(config.image_size), mean, std, FILTERS[config.resample], config.resize_size)

    def config_fields(self) -> dict:
        """Return the format as fields of a SparseFormer configuration."""
        height, width = self.size
        return {
            "image_size": height if height == width else [height, width],
            "image_mean": self.mean,
            "image_std": self.std,
            "resample": int(torch_pil_interpolation_mapping[self.interpolation]),
            "resize_size": self.resize,
        }

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
