"""Read image files as RGB. All images of the package are read by this module."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

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


class CorruptImageError(ValueError):
    """Raised if an image or a mask of a data set cannot be decoded."""


def is_image_file(path: Path) -> bool:
    """Return whether a file name has an image extension. Hidden files, such as macOS's `._x.jpg`, do not count."""
    return path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith(".")


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


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to upright 8-bit RGB, with transparent parts on white.

    The values of an image in Pillow's 32-bit modes `I` and `F` are multiplied by 255 / `full`. Candidates for `full`
    are 1 (only for `F`), 255, 65,535 and 2^31 - 1. `full` is the lowest candidate that no value exceeds by more than
    0.1%.
    """
    ImageOps.exif_transpose(image, in_place=True)
    if ";16" in image.mode:
        values = np.asarray(image)
        # Divide by 257 and round. Adding 128 before the division could overflow 16 bits.
        scaled = values // 257 + (values % 257 > 128)
        return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")
    if image.mode in ("F", "I"):
        values = np.asarray(image)
        lowest = values.min(initial=0)
        highest = values.max(initial=0)
        # The array is deleted early to save memory, because several threads may read large images at the same time.
        del values
        if not (lowest >= 0 and highest < 2**31):
            raise ValueError(f"its values go up to {highest:g}, expected none below 0 or above 2^31 - 1")
        ranges = [*([1] if image.mode == "F" else []), 255, 65_535, 2**31 - 1]
        full = next((each for each in ranges if highest <= 1.001 * each), highest)
        return image.point(lambda value: value * (255 / full) + 0.5).convert("L").convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def decode_image(image: dict | Image.Image, index: int) -> Image.Image:
    """Read an undecoded `datasets.Image` record or a PIL image as upright RGB. Error messages contain `index`.

    Raises:
        CorruptImageError: If the image cannot be read.
    """
    try:
        with open_record(image) as opened:
            return to_rgb(opened)
    except Exception as error:
        path = f", {image['path']}" if isinstance(image, dict) and image.get("path") else ""
        problem = f"{first_line(error)}{path}"
        raise CorruptImageError(
            f"Image {index} of the data set cannot be read ({problem}); to leave such images out: skip_corrupt."
        ) from error
