"""Masks beside images: which files are masks, how their folders are called, and which way up they lie."""

import numpy as np
import pytest
from PIL import Image

from frugalvit.common.decoding import decode_image
from frugalvit.common.masks import MaskError, MaskReader, load_masked_images, load_masked_splits, masked_split_names
from frugalvit.training.segment import MaskedImageArguments


def draw(path, size=(8, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size).save(path)


@pytest.mark.parametrize(
    ("folders", "evaluated", "count"),
    [
        (("training", "validation"), "validation", 3),
        (("train", "val"), "validation", 3),
        (("train2017", "val2017"), "validation", 3),
        (("Train", "Test", "Valid"), "validation", 2),
        (("training", "testing"), "test", 3),
    ],
)
def test_the_splits_of_folders_are_called_as_elsewhere(folders, evaluated, count, tmp_path):
    for kind in ("images", "annotations"):
        for folder, images in zip(folders, (4, 3, 2), strict=False):
            for number in range(images):
                draw(tmp_path / kind / folder / f"{number}.png")
    data = MaskedImageArguments(dataset=[str(tmp_path)])
    train, evaluation, *_ = load_masked_splits(data)
    assert data.evaluated == evaluated and (len(train), len(evaluation)) == (4, count)
    # A folder's own name is understood, too.
    assert len(load_masked_images(str(tmp_path), f"{folders[0]}[:2]")) == 2
    assert set(masked_split_names(str(tmp_path))) <= {"train", "validation", "test"}


@pytest.mark.parametrize(
    "stray",
    [
        "masks/train/0.json",
        "masks/train/0.txt",
        "masks/train/0.xml",
        "masks/train/0.jpg",
        "masks/train/.0.png",
        "masks/train/@eaDir/0.png",
        "masks/train/Thumbs.db",
        "images/train/Thumbs.db",
        "images/train/desktop.ini",
        "images/train/notes.txt",
        "images/train/0.json",
        "images/.ipynb_checkpoints/0.png",
        "images/@eaDir/0.png",
        "images/readme.txt",
        "annotations/instances.json",
        "annotations/train/0.xml",
    ],
)
@pytest.mark.parametrize("split", ["train", "."])
def test_masks_and_images_are_images_alone(stray, split, tmp_path):
    for number in range(2):
        draw(tmp_path / "images" / split / f"{number}.png")
        draw(tmp_path / "masks" / split / f"{number}.png")
    file = tmp_path / stray.replace("/train/", f"/{split}/")
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix in (".jpg", ".png"):
        draw(file)
    else:
        file.write_text("{}")
    table = load_masked_images(str(tmp_path), "train")
    assert [record["path"].rpartition("/")[2] for record in table["mask"]] == ["0.png", "1.png"]
    assert all("/masks/" in record["path"] for record in table["mask"])


MASK = np.arange(48, dtype=np.uint8).reshape(6, 8)


def encoded(tmp_path, pixels, name, orientation=None):
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / name, exif=exif)
    return {"path": str(tmp_path / name), "bytes": None}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_masks_lie_as_their_images_do(orientation, tmp_path):
    """The image's channels are its mask's numbers, so that both can be compared."""
    image = encoded(tmp_path, MASK[..., None].repeat(3, -1), "image.png", orientation)
    upright = decode_image(image, 0)
    expected, keys = np.asarray(upright)[..., 0], (upright.size, upright.info["orientation"])
    read = MaskReader(48)
    # A mask that is turned as its image is, says so.
    tagged = encoded(tmp_path, MASK, "tagged.png", orientation)
    assert np.array_equal(read(tagged, 0, *keys), expected)
    # What says nothing is known by its size, or refused.
    for pixels in (MASK, np.ascontiguousarray(expected)):
        mask = encoded(tmp_path, pixels, "mask.png")
        if orientation in (2, 3, 4):
            with pytest.raises(MaskError, match=rf"EXIF orientation {orientation}.* Write both as they are"):
                read(mask, 0, *keys)
        else:
            assert np.array_equal(read(mask, 0, *keys), expected)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_square_masks_of_turned_images_are_refused(orientation, tmp_path):
    image = decode_image(encoded(tmp_path, MASK[:6, :6, None].repeat(3, -1), "image.png", orientation), 0)
    mask = encoded(tmp_path, np.ascontiguousarray(MASK[:6, :6]), "mask.png")
    with pytest.raises(MaskError, match="does not tell whether it is to be"):
        MaskReader(48)(mask, 0, image.size, image.info["orientation"])
