"""Read images as RGB, compute their pixel values with image processors, and convert pixel values back to images."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from ..modeling.image_format import ImageFormat
from .text import first_line


# Pillow reads HEIC files if pillow_heif is installed, and JPEG XL files if pillow_jxl is installed.
with contextlib.suppress(ImportError):
    from pillow_heif import register_heif_opener

    register_heif_opener()
with contextlib.suppress(ImportError):
    import pillow_jxl  # noqa: F401

Image.init()
# Pillow would run EPS files as programs in Ghostscript, and IPTC files may contain EPS. Pillow cannot decode the other
# formats in this list.
_NOT_READ = ("EPS", "IPTC", "BUFR", "GRIB", "HDF5", "MPEG", "WMF")
FORMATS = [name for name in Image.ID if name not in _NOT_READ]
# File name extensions of images that can be read. MPO is Pillow's name for a JPEG file with several pictures.
IMAGE_ENDINGS = frozenset(end for end, name in Image.registered_extensions().items() if name in {*FORMATS, "MPO"})
# Extensions of images that cannot be read, for messages about files that are left out.
_OTHERS = ".heic .heif .hif .jxl .avif .arw .cr2 .cr3 .dng .nef .orf .raf .rw2 .eps .ps .psb .svg .wmf .emf .xcf"
UNREAD_ENDINGS = frozenset(_OTHERS.split()) - IMAGE_ENDINGS
# Largest ratio of an image's longer side to its shorter side. `middle_of` crops images with a larger ratio.
LONGEST = 32


class CorruptImageError(ValueError):
    """Raised if an image or a mask of a data set cannot be decoded."""


def open_record(record: Mapping | Image.Image | Path) -> Image.Image:
    """Open a file or an undecoded `datasets.Image` record (bytes, path or URL) without decoding its pixels. If
    `record` is a PIL image, return a copy."""
    if isinstance(record, Image.Image):
        return record.copy()
    path, encoded = (record, None) if isinstance(record, Path) else (record.get("path"), record.get("bytes"))
    if encoded is None and path is None:
        raise ValueError("it has neither bytes nor a path")
    if encoded is None and (isinstance(path, Path) or "://" not in path):
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError("it is no file but a device, a pipe or a folder")
        return Image.open(path, formats=FORMATS)
    if encoded is None:
        from datasets.utils.file_utils import xopen

        with xopen(path, "rb") as file:
            encoded = file.read()
    return Image.open(io.BytesIO(encoded), formats=FORMATS)


def decode_image(image: Mapping | Image.Image | Path, index: int | None = None, draft: bool = False) -> Image.Image:
    """Read an image of any mode as upright 8-bit RGB, with transparent parts on white.

    Args:
        image (`Mapping`, `PIL.Image.Image` or `Path`): An argument of `open_record`.
        index (`int`, *optional*): Number of the image in a data set, for messages.
        draft (`bool`, *optional*, defaults to `False`): Decode a JPEG at an eighth of its size to save time.

    Raises:
        CorruptImageError: If the image cannot be read.
    """
    try:
        with open_record(image) as opened:
            if draft:
                opened.draft(opened.mode, (1, 1))
            ImageOps.exif_transpose(opened, in_place=True)
            if opened.mode in ("F", "I") or ";16" in opened.mode:
                return to_8_bits(opened).convert("RGB")
            if opened.has_transparency_data:
                layer = opened.convert("RGBA")
                return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
            return opened.convert("RGB")
    # All exceptions are caught, because decoders raise errors of many types for broken files.
    except Exception as error:
        problem = first_line(error)
        if index is not None:
            path = f", {image['path']}" if isinstance(image, Mapping) and image.get("path") else ""
            problem = (
                f"Image {index} of the data set cannot be read ({problem}{path}); to leave such images out: "
                "skip_corrupt."
            )
        raise CorruptImageError(problem) from error


def to_8_bits(image: Image.Image) -> Image.Image:
    """Convert an image of 16 or 32 bits to 8 bits.

    The values of an image in Pillow's 32-bit modes `I` and `F` are multiplied by 255 / `full`. Candidates for `full`
    are 1 (only for `F`), 255, 65,535 and 2^31 - 1. `full` is the lowest candidate that no value exceeds by more than
    0.1%.
    """
    values = np.asarray(image)
    if ";16" in image.mode:
        # Divide by 257 and round. Adding 128 before the division could overflow 16 bits.
        scaled = values // 257 + (values % 257 > 128)
        return Image.fromarray(scaled.astype(np.uint8))
    lowest = values.min(initial=0)
    highest = values.max(initial=0)
    # The array is deleted early to save memory, because several threads may read large images at the same time.
    del values
    if not (lowest >= 0 and highest < 2**31):
        raise ValueError(f"its values go up to {highest:g}, expected none below 0 or above 2^31 - 1")
    ranges = [*([1] if image.mode == "F" else []), 255, 65_535, 2**31 - 1]
    full = next((each for each in ranges if highest <= 1.001 * each), highest)
    return image.point(lambda value: value * (255 / full) + 0.5).convert("L")


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
    image_format = ImageFormat.from_processor(image_processor)
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
