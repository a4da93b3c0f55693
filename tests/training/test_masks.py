"""Test masks for segmentation: their files and folders, their values, and views of an image with its mask."""

import json
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode

from drawn import encode, save, scene
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training import segment
from frugalvit.training.masks import MaskReader, load_masked_images, load_masked_splits, masked_split_names
from frugalvit.training.segment import MaskedDataArguments, SegmentationView
from frugalvit.training.views import seeded


@pytest.mark.parametrize(
    ("folders", "evaluated", "count"),
    [(("training", "validation"), "validation", 3), (("Train", "Test", "Valid"), "validation", 2)],
)
def test_folders_of_splits_have_the_usual_names(folders, evaluated, count, tmp_path):
    for kind in ("images", "annotations"):
        for folder, images in zip(folders, (4, 3, 2), strict=False):
            for number in range(images):
                save(tmp_path / kind / folder / f"{number}.png")
    data = MaskedDataArguments(dataset=[str(tmp_path)])
    train, evaluation, *_ = load_masked_splits(data)
    assert data.evaluated == evaluated and (len(train), len(evaluation)) == (4, count)
    # A folder's own name, such as "training", is also accepted as the name of the split.
    assert len(load_masked_images(str(tmp_path), f"{folders[0]}[:2]")) == 2
    assert set(masked_split_names(str(tmp_path))) <= {"train", "validation", "test"}


@pytest.mark.parametrize("split", ["train", "."])
def test_masks_and_images_are_images_alone(split, tmp_path):
    for number in range(2):
        save(tmp_path / "images" / split / f"{number}.png")
        save(tmp_path / "masks" / split / f"{number}.png")
    for stray in (
        *("masks/train/0.json", "masks/train/0.jpg", "masks/train/.0.png", "masks/train/@eaDir/0.png"),
        *("images/train/Thumbs.db", "images/.ipynb_checkpoints/0.png", "images/readme.txt", "annotations/train/0.xml"),
    ):
        file = tmp_path / stray.replace("/train/", f"/{split}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in (".jpg", ".png"):
            save(file)
        else:
            file.write_text("{}")
    table = load_masked_images(str(tmp_path), "train")
    assert [record["path"].rpartition("/")[2] for record in table["mask"]] == ["0.png", "1.png"]
    assert all("/masks/" in record["path"] for record in table["mask"])


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (["0.npy", "1.npy"], "has the image columns image, expected .* PNG masks in annotations, masks, labels"),
        (["0.jpg", "1.jpg"], "has the image columns image, expected .* PNG masks in annotations, masks, labels"),
        (["0.png"], r"The image .*1.png has no mask in a folder annotations, masks, labels, nor labelme's"),
    ],
)
def test_images_without_pictures_of_masks_are_refused(masks, message, tmp_path):
    for name in ("images/0.png", "images/1.png", *(f"masks/{mask}" for mask in masks)):
        if name.endswith(".npy"):
            np.save(tmp_path / name, np.zeros((6, 8), np.uint8))
        else:
            save(tmp_path / name)
        (tmp_path / "masks").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=message):
        load_masked_images(str(tmp_path), "train")


NEAREST = ImageFormat((24, 32), (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255), InterpolationMode.NEAREST_EXACT)


class TestData:
    def test_parquet(self, scenes):
        table = load_masked_images(scenes, "train[:5]")
        assert table.column_names == ["image", "mask"] and len(table) == 5
        assert np.array_equal(MaskReader(4)(table[3]["mask"], 3, (52, 40)), scene(3)[1])

    def test_polygons_of_labelme_have_their_names(self, tmp_path):
        for number in range(2):
            Image.new("RGB", (52, 40), "red").save(tmp_path / f"{number}.jpg")
            corners = {left: [[left, 0], [left + 20, 0], [left + 20, 40], [left, 40]] for left in (0, 30)}
            shapes = [{"shape_type": "polygon", "points": corners[left], "label": f"at {left}"} for left in (30, 0)]
            content = {"imageHeight": 40, "imageWidth": 52, "shapes": shapes}
            (tmp_path / f"{number}.json").write_text(json.dumps(content), encoding="utf-8")
        data = MaskedDataArguments(dataset=[str(tmp_path)], eval_split="none")
        train, *_ = load_masked_splits(data)
        assert data.class_names == ["_background_", "at 0", "at 30"]
        labels = MaskReader(3)(train[0]["mask"], 0, (52, 40))
        assert (labels[:, :19] == 1).all() and (labels[:, 32:49] == 2).all() and not labels[:, 23:28].any()
        content["shapes"][0]["label"] = 3
        for text, message in (
            ("{}", "is no file of labelme's: KeyError"),
            (json.dumps(content), "is no file of labelme's: ValueError: the label 3, expected a text"),
            ("é", "' is not UTF-8 .*iconv"),
        ):
            (tmp_path / "0.json").write_text(text, encoding="latin-1")
            with pytest.raises(ValueError, match=f"0.json.*{message}"):
                load_masked_images(str(tmp_path), "train")

    def test_labels_that_do_not_count(self):
        mask = {"bytes": encode(np.array([[0, 1, 2, 255]], np.uint8)), "path": None}
        assert MaskReader(3)(mask, 0, (4, 1)).tolist() == [[0, 1, 2, 255]]
        assert MaskReader(2, ignored_labels=[2])(mask, 0, (4, 1)).tolist() == [[0, 1, 255, 255]]
        binary = {"bytes": encode(np.array([[True, False]])), "path": None}
        assert MaskReader(2)(binary, 0, (2, 1)).tolist() == [[1, 0]]
        assert MaskReader(2, reduce_labels=True)(mask, 0, (4, 1)).tolist() == [[255, 0, 1, 255]]

    def test_bad_masks(self):
        for mask, message in (
            (encode(np.full((4, 5), 3, np.uint8)), r"labels \[3\], the classes are 0 to 2"),
            (encode(np.zeros((4, 5, 3), np.uint8)), "uint8 of .* expected class numbers"),
        ):
            with pytest.raises(ValueError, match=message):
                MaskReader(3)({"bytes": mask, "path": None}, 7, (5, 4))


class TestViews:
    @given(seed=st.integers(0, 2**31), scale=st.sampled_from([(0.5, 2.0), (0.3, 0.4), (2.0, 3.0)]))
    def test_image_and_mask_move_together(self, seed, scale):
        with mock.patch.object(segment, "DISTORTION", 0.0):
            view = SegmentationView(NEAREST, MaskReader(4), scale)
        image, mask = scene(seed % 10)
        with seeded(seed):
            sample = view(Image.fromarray(image), torch.from_numpy(mask))
        pixels, labels = sample["pixel_values"], sample["labels"]
        assert pixels.shape == (3, 24, 32) and labels.shape == (24, 32)
        assert pixels.dtype == labels.dtype == torch.uint8 and type(pixels) is type(labels) is torch.Tensor
        counts = labels != 255
        assert counts.any()
        assert torch.equal(pixels[0][counts], 60 * labels[counts])
        # Padding has the mean color of the image format. In this test, the mean color is 0.
        assert not pixels[:, ~counts].any()
