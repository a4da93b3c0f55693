"""Read image files as RGB. The whole package reads images with these functions."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from .text import first_line


# If they are installed, the packages teach Pillow to read HEIC and JPEG XL.
with contextlib.suppress(ImportError):
    from pillow_heif import register_heif_opener

    register_heif_opener()
with contextlib.suppress(ImportError):
    import pillow_jxl  # noqa: F401

Image.init()
# EPS is a program, which Pillow runs by Ghostscript, and an IPTC file may contain EPS. Pillow recognizes the other
# formats here but has no decoder for them.
_NOT_READ = ("EPS", "IPTC", "BUFR", "GRIB", "HDF5", "MPEG", "WMF")
FORMATS = [name for name in Image.ID if name not in _NOT_READ]
# File endings of `FORMATS`, and of MPO, which is Pillow's name of a JPEG with several pictures.
IMAGE_ENDINGS = frozenset(end for end, name in Image.registered_extensions().items() if name in {*FORMATS, "MPO"})
# File endings of other picture formats, for messages about files that are not read.
_OTHERS = ".heic .heif .hif .jxl .avif .arw .cr2 .cr3 .dng .nef .orf .raf .rw2 .eps .ps .psb .svg .wmf .emf .xcf"
UNREAD_ENDINGS = frozenset(_OTHERS.split()) - IMAGE_ENDINGS


class CorruptImageError(ValueError):
    """An image of a data set that cannot be decoded."""


def is_image_file(path: Path) -> bool:
    """Return whether a file's name is that of an image. macOS's files such as `._x.jpg` hold metadata, not images."""
    return path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith(".")


def open_record(record: Mapping | Image.Image | Path) -> Image.Image:
    """Open an image without decoding it, from an undecoded `datasets` record (bytes, path or URL) or a file. A PIL
    image is copied."""
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


def read_image(file: str | Path | io.BytesIO, max_pixels: int | None = None) -> Image.Image:
    """Read the upright RGB image in a file; raise a ValueError if it has more than `max_pixels`."""
    with Image.open(file, formats=FORMATS) as image:
        if max_pixels and image.width * image.height > max_pixels:
            size = f"{image.width:,} x {image.height:,}"
            raise ValueError(f"It has {size} pixels, expected at most {max_pixels / 1e6:g} million.")
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to upright 8-bit RGB, with transparent parts on white.

    The values of 32-bit integers and floats are scaled from the smallest range that holds them all: 0 to 1 (floats
    only), 0 to 255, 0 to 65,535 or 0 to 2^31 - 1.
    """
    ImageOps.exif_transpose(image, in_place=True)
    if ";16" in image.mode:
        values = np.asarray(image)
        # Divide each value by 257 and round it, without exceeding 16 bits in between.
        scaled = values // 257 + (values % 257 > 128)
        return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")
    if image.mode in ("F", "I"):
        values = np.asarray(image)
        lowest = values.min(initial=0)
        highest = values.max(initial=0)
        # The copy is freed early, because several threads may read large images at once.
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
    """Read an undecoded `datasets` record or a PIL image as upright RGB. Errors name the image by its `index`.

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
