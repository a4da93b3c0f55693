"""Image files to RGB, the same way wherever this package reads one."""

import io
from pathlib import Path

import numpy as np
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from PIL import Image, ImageOps


# Endings of files that Pillow reads; those that it only writes, such as .pdf, are not among them.
IMAGE_ENDINGS = frozenset(ImageFolder.EXTENSIONS)


def is_image_file(path: Path) -> bool:
    """Whether a file looks like an image by its name; `._x.jpg`, which macOS leaves on foreign disks, does not."""
    return path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith(".")


def read_image(file: str | Path | io.BytesIO, max_pixels: int | None = None) -> Image.Image:
    """The RGB image in a file, see `to_rgb`, upright.

    Raises:
        ValueError: if it has more than `max_pixels`, which is known before they are decoded.
        Exception: whatever a broken file leads Pillow to.
    """
    with Image.open(file) as image:
        if max_pixels and image.width * image.height > max_pixels:
            raise ValueError(
                f"It has {image.width:,} x {image.height:,} pixels, expected at most {max_pixels / 1e6:g} million."
            )
        return to_rgb(ImageOps.exif_transpose(image))


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as it is meant to be seen: transparency on white, and what is no 8-bit number scaled to 8.

    16-bit numbers have a range. That of 32-bit integers and of floats is not said in a file: it is the smallest of 0
    to 1 (floats alone), 0 to 255, 0 to 65,535 and 0 to 2^31 - 1 that holds all values.

    Raises:
        ValueError: if values are negative or no numbers.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image).astype(np.float64)
        lowest, highest = values.min(initial=0), values.max(initial=0)
        if not (lowest >= 0 and highest < 2**31):
            raise ValueError(f"its values are {lowest:g} to {highest:g}, expected none below 0 or above 2^31 - 1")
        ranges = [65_535] if ";16" in image.mode else [*([1] if image.mode == "F" else []), 255, 65_535, 2**31 - 1]
        full = next((each for each in ranges if highest <= each), highest)
        return Image.fromarray((values * (255 / full)).round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
