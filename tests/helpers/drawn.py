"""Generated images and segmentation masks, in memory and as files."""

import io
from pathlib import Path

import datasets
import numpy as np
from PIL import Image


def encode(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def noise(size: tuple[int, int] = (48, 40), seed: int = 0) -> Image.Image:
    """Return a random image of `size` (width, height). Equal seeds give equal images."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def scene(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an image of rectangles and its mask with four classes. Pixel values are 60 times the class numbers."""
    generator = np.random.default_rng(seed)
    height, width = 40, 52
    mask = np.zeros((height, width), np.uint8)
    for label in (1, 2, 3):
        top, left = generator.integers(0, height - 12), generator.integers(0, width - 12)
        mask[top : top + generator.integers(8, 25), left : left + generator.integers(8, 25)] = label
    return np.repeat(60 * mask[:, :, None], 3, axis=2), mask


def write_scenes(path: Path) -> str:
    """Write 12 images and their masks to a parquet file and return its path."""
    scenes = [scene(seed) for seed in range(12)]
    columns = {
        "image": [{"bytes": encode(image), "path": None} for image, _ in scenes],
        "annotation": [{"bytes": encode(mask), "path": None} for _, mask in scenes],
    }
    table = datasets.Dataset.from_dict(columns)
    for column in columns:
        table = table.cast_column(column, datasets.Image())
    table.to_parquet(path)
    return str(path)


def draw(folder: Path, count: int, start: int = 0, name: str = "{}.png"):
    """Write image files. The red channel of each image is the image's index."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(start, start + count):
        Image.new("RGB", (32, 32), (index, 0, 0)).save(folder / name.format(index))


def draw_classes(folder: Path, count: int, classes=("cat", "dog"), start: int = 0):
    for label, name in enumerate(classes):
        draw(folder / name, count, start + label * count)


def save(path, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)
