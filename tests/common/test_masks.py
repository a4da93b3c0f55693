"""Masks beside images: which files are masks, how their folders are called, which way up they lie; views of both."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from drawn import encode, scene, write_scenes
from frugalvit.common.decoding import CorruptImageError, ImageError, decode_image
from frugalvit.common.masks import (
    MaskReader,
    load_masked_images,
    load_masked_splits,
    masked_split_names,
)
from frugalvit.common.views import ImageFormat, seeded
from frugalvit.training.augmentation import SegmentationEvalView, SegmentationView
from frugalvit.training.segment import MaskedDataArguments


def draw(path, size=(8, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size).save(path)


@pytest.mark.parametrize(
    ("folders", "evaluated", "count"),
    [
        (("training", "validation"), "validation", 3),
        (("Train", "Test", "Valid"), "validation", 2),
        (("training", "testing"), "test", 3),
    ],
)
def test_the_splits_of_folders_are_called_as_elsewhere(folders, evaluated, count, tmp_path):
    for kind in ("images", "annotations"):
        for folder, images in zip(folders, (4, 3, 2), strict=False):
            for number in range(images):
                draw(tmp_path / kind / folder / f"{number}.png")
    data = MaskedDataArguments(dataset=[str(tmp_path)])
    train, evaluation, *_ = load_masked_splits(data)
    assert data.evaluated == evaluated and (len(train), len(evaluation)) == (4, count)
    # A folder's own name is understood, too.
    assert len(load_masked_images(str(tmp_path), f"{folders[0]}[:2]")) == 2
    assert set(masked_split_names(str(tmp_path))) <= {"train", "validation", "test"}


@pytest.mark.parametrize(
    "stray",
    ["masks/train/0.json", "masks/train/0.jpg", "masks/train/.0.png", "masks/train/@eaDir/0.png"]
    + ["images/train/Thumbs.db", "images/.ipynb_checkpoints/0.png", "images/readme.txt", "annotations/train/0.xml"],
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
def test_masks_are_turned_as_their_own_exif_says(orientation, tmp_path):
    """The image's channels are its mask's numbers, so that both can be compared."""
    upright = decode_image(encoded(tmp_path, MASK[..., None].repeat(3, -1), "image.png", orientation), 0)
    mask = MaskReader(48)(encoded(tmp_path, MASK, "mask.png", orientation), 0, upright.size)
    assert np.array_equal(mask, np.asarray(upright)[..., 0])


NEAREST = ImageFormat((24, 32), mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255), resample=0)


def read(table, index: int, read_mask=None) -> tuple[Image.Image, torch.Tensor]:
    image = Image.open(io.BytesIO(table[index]["image"]["bytes"]))
    return image, (read_mask or MaskReader(4))(table[index]["mask"], index, image.size)


class TestData:
    def test_parquet(self, scenes):
        table = load_masked_images(scenes, "train[:5]")
        assert table.column_names == ["image", "mask"] and len(table) == 5
        assert np.array_equal(read(table, 3)[1], scene(3)[1])

    @pytest.mark.parametrize(("masks", "split"), [("annotations", "training"), ("masks", "")])
    def test_folder_of_pairs(self, masks, split, tmp_path):
        for folder in ("images", masks):
            (tmp_path / folder / split).mkdir(parents=True)
        for seed in range(3):
            image, mask = scene(seed)
            Image.fromarray(image).save(tmp_path / "images" / split / f"{seed}.jpg", quality=95)
            Image.fromarray(mask).save(tmp_path / masks / split / f"{seed}.png")
        table = load_masked_images(str(tmp_path), split or "train")
        assert len(table) == 3
        mask = MaskReader(4)(table[2]["mask"], 2, (52, 40))
        assert np.array_equal(mask, scene(2)[1])
        (tmp_path / masks / split / "1.png").unlink()
        with pytest.raises(ValueError, match="1.jpg has no mask in "):
            load_masked_images(str(tmp_path), split or "train")
        if split:
            with pytest.raises(ValueError, match="has no split 'test' with images; it has train"):
                load_masked_images(str(tmp_path), "test")

    def test_slices_of_a_folder(self, tmp_path):
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / ".DS_Store").write_text("")
        for seed in range(8):
            Image.fromarray(scene(seed)[0]).save(tmp_path / "images" / f"{seed}.png")
            Image.fromarray(scene(seed)[1]).save(tmp_path / "masks" / f"{seed}.png")

        def names(split: str) -> str:
            return "".join(record["path"][-5] for record in load_masked_images(str(tmp_path), split)["image"])

        assert [names("train"), names("train[:75%]"), names("train[75%:]")] == ["01234567", "012345", "67"]
        for split, message in (("test", "has no split 'test' with"), ("train[8:]", r"no split 'train\[8:\]' with")):
            with pytest.raises(ValueError, match=message):
                load_masked_images(str(tmp_path), split)

    def test_columns_that_do_not_tell(self, tmp_path):
        def three(columns):
            columns["other"] = columns["annotation"]

        path = write_scenes(tmp_path / "three.parquet", change=three)
        with pytest.raises(ValueError, match="image, annotation, other; expected one"):
            load_masked_images(path, "train")
        assert len(load_masked_images(path, "train", mask_column="other")) == 12
        with pytest.raises(ValueError, match="image, annotation, other; expected one"):
            load_masked_images(path, "train", mask_column="mask")

    def test_labels_that_do_not_count(self):
        mask = {"bytes": encode(np.array([[0, 1, 2, 255]], np.uint8)), "path": None}
        assert MaskReader(3)(mask, 0, (4, 1)).tolist() == [[0, 1, 2, 255]]
        assert MaskReader(2, ignored_labels=[2])(mask, 0, (4, 1)).tolist() == [[0, 1, 255, 255]]
        binary = {"bytes": encode(np.array([[True, False]])), "path": None}
        assert MaskReader(2)(binary, 0, (2, 1)).tolist() == [[1, 0]]
        with pytest.raises(ValueError, match=r"are \[300\], .* 0 to 255"):
            MaskReader(2, ignored_labels=[300])
        assert MaskReader(2, reduce_labels=True)(mask, 0, (4, 1)).tolist() == [[255, 0, 1, 255]]

    @pytest.mark.parametrize(
        ("mask", "size", "error", "message"),
        [
            (encode(np.zeros((4, 5), np.uint8)), (5, 5), ImageError, "image 7 is .* L with 5 x 4 pixels, .* 5 x 5"),
            (encode(np.full((4, 5), 3, np.uint8)), (5, 4), ImageError, r"labels \[3\], the classes are 0 to 2"),
            (encode(np.full((4, 5), 300, np.uint16)), (5, 4), ImageError, r"has the labels \[300\]"),
            (encode(np.zeros((4, 5, 3), np.uint8)), (5, 4), ImageError, "mode RGB with .* expected one channel"),
            (b"no image", (5, 4), CorruptImageError, "mask of image 7 of the data set cannot be read"),
        ],
        ids=["size", "label", "16 bits", "color", "corrupt"],
    )
    def test_bad_masks(self, mask, size, error, message):
        with pytest.raises(error, match=message):
            MaskReader(3)({"bytes": mask, "path": None}, 7, size)


class TestViews:
    @given(seed=st.integers(0, 2**31), scale=st.sampled_from([(0.5, 2.0), (0.3, 0.4), (2.0, 3.0)]))
    def test_image_and_mask_move_together(self, seed, scale):
        view = SegmentationView(NEAREST, MaskReader(4), scale, distort=0.0)
        image, mask = scene(seed % 10)
        with seeded(seed):
            sample = view(Image.fromarray(image), torch.from_numpy(mask))
        pixels, labels = sample["pixel_values"], sample["labels"]
        assert pixels.shape == (3, 24, 32) and labels.shape == (24, 32)
        assert pixels.dtype == labels.dtype == torch.uint8 and type(pixels) is type(labels) is torch.Tensor
        counts = labels != 255
        assert counts.any()
        assert torch.equal(pixels[0][counts], 60 * labels[counts])
        assert not pixels[:, ~counts].any()  # what pads is of the mean color

    @given(
        size=st.tuples(st.integers(9, 60), st.integers(9, 60)),
        have=st.tuples(st.integers(20, 120), st.integers(20, 120)),
        axis=st.integers(0, 1),
    )
    def test_masks_are_centered_as_smooth_images_are(self, size, have, axis):
        """Image and mask are ramps here. The difference of their means is the shift, in pixels of the original."""
        ramp = np.indices(have)[axis].astype(np.uint8) * 2
        view = SegmentationEvalView(ImageFormat(size, resample=2), MaskReader(255))
        sample = view(Image.fromarray(np.repeat(ramp[..., None], 3, axis=2)), torch.from_numpy(ramp))
        shift = (sample["pixel_values"][0].float() - sample["labels"].float()).mean().item() / 2
        assert abs(shift) <= 0.75

    def test_is_a_function_of_the_seed(self):
        view = SegmentationView(ImageFormat((24, 32)), MaskReader(4))
        image, mask = scene(0)
        samples = []
        for key in (0, 0, 1):
            with seeded(key):
                samples.append(view(Image.fromarray(image), torch.from_numpy(mask)))
        assert all(torch.equal(samples[0][name], samples[1][name]) for name in samples[0])
        assert not torch.equal(samples[0]["pixel_values"], samples[2]["pixel_values"])

    def test_crops_avoid_a_single_class(self):
        image, mask = np.zeros((200, 200, 3), np.uint8), np.zeros((200, 200), np.uint8)
        mask[:, 100:] = 1
        shares = {}
        for max_share in (0.75, 1.0):
            view = SegmentationView(ImageFormat((32, 32)), MaskReader(4), (2.0, 2.0), max_share)
            single = 0
            for seed in range(40):
                with seeded(seed):
                    labels = view(Image.fromarray(image), torch.from_numpy(mask))["labels"]
                single += len(labels.unique()) == 1
            shares[max_share] = single
        assert shares[0.75] < shares[1.0]

    def test_evaluation_sees_all(self):
        image, mask = scene(0)
        sample = SegmentationEvalView(NEAREST, MaskReader(4))(Image.fromarray(image), torch.from_numpy(mask))
        assert torch.equal(sample["pixel_values"][0], 60 * sample["labels"])
        assert sample["labels"].shape == (24, 32)
