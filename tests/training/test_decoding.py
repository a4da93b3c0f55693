"""Test that images of every kind are read the same way for training, evaluation and prediction."""

import os
import re
import tracemalloc

import datasets
import numpy as np
import pytest
from PIL import Image

from frugalvit.training import data
from frugalvit.training.data import readable_images
from frugalvit.training.masks import MaskReader
from frugalvit.training.preprocessing import CorruptImageError, decode_image


GRADIENT = np.linspace(0, 255, 64).reshape(8, 8).round()
GRAY = GRADIENT.astype(np.uint8)
COLOR = np.stack([GRAY, GRAY[::-1], GRAY.T], axis=-1)
HALF = np.concatenate([COLOR, np.full((8, 8, 1), 128, np.uint8)], axis=-1)
TURNED = Image.Exif()
TURNED[0x0112] = 6


@pytest.mark.parametrize(
    ("image", "ending", "expected", "options"),
    [
        (GRAY, "png", GRAY, {}),
        ((257 * GRADIENT).astype(np.uint16), "png", GRAY, {}),
        # A dark 16-bit image stays dark: its values are not stretched to the full range.
        (GRAY.astype(np.uint16), "png", GRAY // 129, {}),
        (GRADIENT.astype(np.int32), "tif", GRAY, {}),
        ((GRADIENT / 255).astype(np.float32), "tif", GRAY, {}),
        ((257 * GRADIENT).astype(np.float32), "tif", GRAY, {}),
        (COLOR, "bmp", COLOR, {}),
        (HALF, "png", 127 + COLOR * (128 / 255), {}),
        (np.stack([GRAY, np.zeros_like(GRAY)], -1), "png", np.full((8, 8), 255), {}),
        (COLOR, "png", np.rot90(COLOR, -1), {"exif": TURNED}),
        (Image.fromarray(COLOR).convert("CMYK"), "tif", COLOR, {}),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, np.ndarray) else str(value)[:8],
)
def test_an_image_is_read_the_same_everywhere(image, ending, expected, options, tmp_path):
    file = tmp_path / f"image.{ending}"
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, **options)
    expected = expected if expected.ndim == 3 else expected[..., None].repeat(3, axis=2)
    for read in (
        decode_image({"path": str(file), "bytes": None}, 0),
        decode_image({"path": None, "bytes": file.read_bytes()}, 0),
    ):
        assert read.mode == "RGB"
        np.testing.assert_allclose(np.asarray(read).astype(float), expected, atol=1)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_images_of_many_bits_are_not_copied_many_times(dtype, tmp_path):
    """Several threads read images at once, and a small file may contain a large image, so memory must stay low."""
    Image.fromarray(np.zeros((512, 512), dtype)).save(tmp_path / "image.tif")
    tracemalloc.start()
    decode_image({"path": str(tmp_path / "image.tif")}, 0)
    bytes_per_pixel = tracemalloc.get_traced_memory()[1] / 512**2
    tracemalloc.stop()
    assert bytes_per_pixel < 10


def test_files_that_are_no_images_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(CorruptImageError, match="it is no file but a device, a pipe or a folder"):
        decode_image({"path": str(tmp_path / "pipe.png"), "bytes": None}, 0)
    for values in ([-1.0, 1.0], [np.nan, 1.0], [0.0, np.inf]):
        Image.fromarray(np.array([values], dtype=np.float32)).save(tmp_path / "image.tif")
        with pytest.raises(CorruptImageError, match="Image 5 .* expected none below 0 or above"):
            decode_image({"path": str(tmp_path / "image.tif"), "bytes": None}, 5)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_never_reaches_another_program(tmp_path, monkeypatch):
    ghostscript = tmp_path / "bin" / "gs"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(ghostscript.parent), prepend=os.pathsep)
    file = tmp_path / "photo.jpg"
    file.write_bytes(POSTSCRIPT)
    for read in (
        lambda: decode_image({"path": str(file)}, 0),
        lambda: decode_image({"path": None, "bytes": POSTSCRIPT}, 0),
        lambda: MaskReader(4)({"path": None, "bytes": POSTSCRIPT}, 0, (20, 20)),
    ):
        with pytest.raises(ValueError):
            read()
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def damaged(tmp_path) -> datasets.Dataset:
    """Write six files. Three of them cannot be read as images: a truncated JPEG, a truncated PNG and a text file."""
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    for name in ("a.jpg", "cut.jpg", "b.png", "cut.png", "text.png", "c.jpg"):
        Image.fromarray(noise).save(file := tmp_path / name)
        content = file.read_bytes()
        if name.startswith("cut"):
            file.write_bytes(content[: len(content) // 2])
        elif name.startswith("text"):
            file.write_text("a text")
    paths = [str(tmp_path / name) for name in ("a.jpg", "cut.jpg", "b.png", "cut.png", "text.png", "c.jpg")]
    images = datasets.Dataset.from_dict({"image": paths, "label": [*range(6)]})
    return images.cast_column("image", datasets.Image(decode=False))


def test_all_unreadable_images_are_named_at_once(damaged, capsys, monkeypatch):
    names = r"/cut.jpg \(.*/cut.png \(.*/text.png \("
    with pytest.raises(ValueError, match=f"^3 of 6 images of train cannot be read: .*{names}.*skip_corrupt"):
        readable_images(damaged, name="train")
    assert readable_images(damaged, True, "train")["label"] == [0, 2, 5]
    assert re.search(f"^3 of 6 images of train left out: .*{names}", capsys.readouterr().err)
    with pytest.raises(ValueError, match="None of the 3 images"):
        readable_images(damaged.select([1, 3, 4]), True)
    # If there are more than `MOST_DECODED` images, only their headers are read, because decoding takes long.
    monkeypatch.setattr(data, "MOST_DECODED", 5)
    assert readable_images(damaged, True)["label"] == [0, 1, 2, 3, 5]
    assert "headers are checked" in capsys.readouterr().err


def test_masks_are_checked_with_their_images(damaged):
    images = damaged.select([0, 2, 5])
    masks = [damaged[index]["image"] for index in (2, 3, 0)]
    images = images.add_column("mask", masks).cast_column("mask", datasets.Image(decode=False))
    assert readable_images(images, True)["label"] == [0, 5]
