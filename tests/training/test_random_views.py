"""Test random views of images: crops, flips, RandAugment and erasing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2

from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training.train import SmallDataView
from frugalvit.training.views import BootstrapView, seeded


ARGUMENTS = {"crop": "padded", "crop_padding": 4, "padding_mode": "reflect", "crop_size": None, "flip": 0.0}
# A pixel's red value is its column, and its green value is its row.
Y, X = np.mgrid[0:200, 0:200]
PICTURE = Image.fromarray(np.stack([X, Y, 0 * X], axis=2).astype(np.uint8))


def test_views_of_little_data_are_cropped_flipped_augmented_and_erased():
    def views(**options):
        randaugment = options.pop("randaugment_layers", 0)
        erasing, args = options.pop("erasing", 0.0), SimpleNamespace(**ARGUMENTS | options)
        view, found = SmallDataView(ImageFormat((32, 24)), args, randaugment, erasing=erasing), []
        for index in range(20):
            with seeded(index):
                found.append(view(PICTURE)["pixel_values"])
        return torch.stack(found).float()

    whole = v2.functional.pil_to_tensor(v2.functional.resize(PICTURE, [32, 24]))
    assert (views(crop_padding=0) == whole).all() and (views(crop_padding=0, flip=1.0) == whole.flip(-1)).all()
    for padding_mode in ("reflect", "constant"):
        padded = views(padding_mode=padding_mode)
        # Constant padding is black, so the first row of some views has no green. Reflected rows have green.
        assert len(padded.unique(dim=0)) > 15 and (padded[:, 1, 0].amax(1) == 0).any() == (padding_mode == "constant")
    erased = views(crop_padding=0, erasing=1.0)
    assert (erased.permute(0, 2, 3, 1)[(erased != whole).any(1)] == 128).all()
    assert ((erased != whole).any(1).float().mean((1, 2)) > 0.01).all()
    parts = views(crop="resized", crop_scale=(0.3, 0.5))
    areas = (parts[:, 0, 16, -1] - parts[:, 0, 16, 0]) * (parts[:, 1, -1, 12] - parts[:, 1, 0, 12]) / 200**2
    assert areas.min() > 0.25 and areas.max() < 0.55 and len(views(randaugment_layers=2).unique(dim=0)) == 20
    with pytest.raises(ValueError, match="crop_padding is 8, expected less"):
        SmallDataView(ImageFormat((8, 8)), SimpleNamespace(**ARGUMENTS | {"crop_padding": 8}))


def test_student_and_teacher_see_one_part():
    student, teacher = ImageFormat((32, 32)), ImageFormat((64, 48), mean=(0.4,) * 3)
    view, flips, areas = BootstrapView(student, teacher), 0, []
    assert view.formats == {"pixel_values": student, "teacher_pixel_values": teacher}
    for index in range(60):
        with seeded(index):
            pixels = {name: value.float() for name, value in view(PICTURE).items()}
        small = F.interpolate(pixels["teacher_pixel_values"][None], (32, 32), mode="bilinear", antialias=True)[0]
        assert (small - pixels["pixel_values"]).abs()[:2].mean() < 1.5
        left, right = pixels["pixel_values"][0].mean(0)[[0, -1]]
        top, bottom = pixels["pixel_values"][1].mean(1)[[0, -1]]
        flips += int(left > right)
        areas.append(float((right - left).abs() * (bottom - top) / (200 * 31 / 32) ** 2))
    assert 18 < flips < 42 and 0.45 < min(areas) < 0.6 and 0.85 < max(areas) < 1.05
