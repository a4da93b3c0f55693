"""Images of every kind, read the same way for training, evaluation, prediction and the page."""

import io

import numpy as np
import pytest
from PIL import Image

from frugalvit.common.data import CorruptImageError, decode_image
from frugalvit.common.decoding import is_image_file, read_image
from frugalvit.predict import read_images


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
        (GRAY > 99, "png", (GRAY > 99) * 255, {}),
        ((257 * GRADIENT).astype(np.uint16), "png", GRAY, {}),
        ((257 * GRADIENT).astype(np.uint16), "tif", GRAY, {}),
        # A dark one stays dark.
        (GRAY.astype(np.uint16), "png", GRAY // 129, {}),
        (GRADIENT.astype(np.int32), "tif", GRAY, {}),
        ((257 * GRADIENT).astype(np.int32), "tif", GRAY, {}),
        ((GRADIENT / 255 * (2**31 - 1)).astype(np.int32), "tif", GRAY, {}),
        ((GRADIENT / 255).astype(np.float32), "tif", GRAY, {}),
        (GRADIENT.astype(np.float32), "tif", GRAY, {}),
        ((257 * GRADIENT).astype(np.float32), "tif", GRAY, {}),
        (COLOR, "bmp", COLOR, {}),
        (HALF, "png", 127 + COLOR * (128 / 255), {}),
        (np.stack([GRAY, np.zeros_like(GRAY)], -1), "png", np.full((8, 8), 255), {}),
        (COLOR, "png", np.rot90(COLOR, -1), {"exif": TURNED}),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, np.ndarray) else str(value)[:8],
)
def test_is_read_the_same_everywhere(image, ending, expected, options, tmp_path):
    file = tmp_path / f"image.{ending}"
    Image.fromarray(image).save(file, **options)
    expected = expected if expected.ndim == 3 else expected[..., None].repeat(3, axis=2)
    [(_, predicted)] = read_images([file])
    for read in (
        predicted,
        read_image(file),
        decode_image({"path": str(file), "bytes": None}, 0),
        decode_image({"path": None, "bytes": file.read_bytes()}, 0),
    ):
        assert read.mode == "RGB"
        np.testing.assert_allclose(np.asarray(read).astype(float), expected, atol=1)


@pytest.mark.parametrize("values", [[-1.0, 1.0], [np.nan, 1.0], [0.0, np.inf]])
def test_values_without_a_range_are_refused(values, tmp_path):
    Image.fromarray(np.array([values], dtype=np.float32)).save(tmp_path / "image.tif")
    with pytest.raises(CorruptImageError, match="Image 5 .* expected none below 0 or above"):
        decode_image({"path": str(tmp_path / "image.tif"), "bytes": None}, 5)


def test_too_many_pixels_are_known_before_they_are_decoded(monkeypatch):
    buffer = io.BytesIO()
    Image.new("1", (600, 500)).save(buffer, "PNG")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="600 x 500 pixels, expected at most 0.2 million"):
        read_image(buffer, max_pixels=200_000)


@pytest.mark.parametrize(
    ("name", "is_image"),
    [("a.jpg", True), ("a.PNG", True), ("a.tiff", True), ("a.pdf", False), ("._a.jpg", False), ("a.txt", False)],
)
def test_what_looks_like_an_image(name, is_image, tmp_path):
    assert is_image_file(tmp_path / name) == is_image
