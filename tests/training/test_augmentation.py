"""Views are functions of (seed, epoch, image index), and show what they say."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import rand_augment_transform
from torchvision.transforms import InterpolationMode, v2

from frugalvit.common.views import ImageFormat, random_seed, seeded, seeded_by_torch
from frugalvit.training.components.augmentation import BootstrapView, Mix, SmallDataView


@pytest.fixture
def picture():
    """Smooth colors, 48 x 40, so that interpolations differ little."""
    y, x = np.mgrid[0:40, 0:48]
    return Image.fromarray(np.stack([x * 5, y * 6, 128 + 60 * np.sin(x / 6)], axis=2).astype(np.uint8))


def test_seeds_are_fixed_and_spread():
    assert random_seed(0, 0, 0, 0) == 556823690  # a run of another version or machine has the same views
    seeds = {random_seed(*key) for key in np.ndindex(2, 8, 500, 2)}
    assert len(seeds) == 2 * 8 * 500 * 2
    assert 0.49 < np.mean(list(seeds)) / 2**32 < 0.51


def test_seeded_leaves_no_trace():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with pytest.raises(RuntimeError), seeded(1, 2):
        torch.rand(5)
        raise RuntimeError
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("size", "padding_mode"), [((32, 32), "reflect"), ((48, 64), "reflect"), ((48, 64), "constant")]
)
def test_padded_crop_and_flip_are_those_of_torchvision(size, padding_mode, picture):
    """Images are cropped before they are resized for the model."""
    view = SmallDataView(ImageFormat(size), crop_size=32, padding_mode=padding_mode, randaugment_layers=0)
    crop = [v2.Resize((32, 32)), v2.RandomCrop(32, 4, padding_mode=padding_mode), v2.RandomHorizontalFlip()]
    reference, seen = v2.Compose([*crop, v2.Resize(size), v2.PILToTensor()]), set()
    for index in range(50):
        with seeded(0, index):
            pixels = view(picture)["pixel_values"]
        with seeded(0, index):
            assert torch.equal(pixels, reference(picture))
        seen.add(pixels.numpy().tobytes())
    assert len(seen) > 30


def test_small_data_view_is_torchvisions_recipe(picture):
    image_format = ImageFormat((32, 32))
    view = SmallDataView(image_format, crop="resized", scale=(0.3, 1), flip=0.5, erasing=1.0)
    reference = v2.Compose(
        [
            v2.RandomResizedCrop(32, (0.3, 1)),
            v2.RandomHorizontalFlip(),
            v2.RandAugment(interpolation=InterpolationMode.BILINEAR, fill=[128] * 3),
            v2.PILToTensor(),
            v2.RandomErasing(1.0, value=[128] * 3),
        ]
    )
    for index in range(20):
        with seeded(1, index):
            pixels = view(picture)["pixel_values"]
        with seeded(1, index):
            assert torch.equal(pixels, reference(picture))


def test_timms_augmentations_are_deits(picture):
    """rand-m9-mstd0.5-inc1 and erased pixels that are noise once they are normalized, as a function of the seed."""
    image_format = ImageFormat((32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    options = {"padding": 0, "flip": 0, "augmentation": "timm"}
    image = picture.resize((32, 32))
    randaugment = rand_augment_transform(
        "rand-m9-mstd0.5-inc1", {"translate_const": 14, "img_mean": (102, 128, 153), "interpolation": 2}
    )
    view, erases = (SmallDataView(image_format, **options, erasing=erasing) for erasing in (0, 1))
    for index in range(20):
        with seeded(1, index):
            pixels = view(image)["pixel_values"]
        with seeded(1, index):
            assert torch.equal(view(image)["pixel_values"], pixels)
        with seeded(1, index):
            torch.rand(())  # of the flip
            with seeded_by_torch():
                assert np.array_equal(np.asarray(randaugment(image)), pixels.permute(1, 2, 0).numpy())
    still = SmallDataView(image_format, **options, randaugment_layers=0, erasing=1)
    before = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    noise = []
    for index in range(60):
        with seeded(2, index):
            pixels = still(image)["pixel_values"]
        assert pixels.dtype == torch.uint8
        changed = (pixels != before).any(0)
        assert 0.01 < changed.float().mean() < 0.4
        noise.append(image_format.normalize(pixels[None])[0][:, changed])
    noise = torch.cat(noise, dim=1)
    assert abs(noise.mean()) < 0.05 and noise.std().item() == pytest.approx(1, abs=0.1)
    with seeded(3):
        assert erases(image)["pixel_values"].dtype == torch.uint8


def test_numbers_of_timm_leave_no_trace():
    random.seed(0), np.random.seed(0)
    expected = random.random(), np.random.rand()
    random.seed(0), np.random.seed(0)
    with seeded(1), seeded_by_torch():
        first = random.random(), np.random.rand()
    assert (random.random(), np.random.rand()) == expected != first


def test_padding_beyond_the_image_is_refused():
    with pytest.raises(ValueError, match="--crop-padding is 8, expected less"):
        SmallDataView(ImageFormat((8, 8)), padding=8)


def test_student_and_teacher_see_one_part():
    # Red and green tell where a pixel is.
    y, x = np.mgrid[0:200, 0:200]
    image = Image.fromarray(np.stack([x, y, 0 * x], axis=2).astype(np.uint8))
    student, teacher = ImageFormat((32, 32)), ImageFormat((64, 48), mean=(0.4,) * 3)
    view = BootstrapView(student, teacher)
    flips, areas = 0, []
    for index in range(60):
        with seeded(index):
            pixels = {name: value.float() for name, value in view(image).items()}
        assert view.formats == {"pixel_values": student, "teacher_pixel_values": teacher}
        small = F.interpolate(pixels["teacher_pixel_values"][None], (32, 32), mode="bilinear", antialias=True)[0]
        assert (small - pixels["pixel_values"]).abs()[:2].mean() < 1.5
        left, right = pixels["pixel_values"][0].mean(0)[[0, -1]]
        top, bottom = pixels["pixel_values"][1].mean(1)[[0, -1]]
        flips += int(left > right)
        areas.append(float((right - left).abs() * (bottom - top) / (200 * 31 / 32) ** 2))
    assert 18 < flips < 42
    assert 0.45 < min(areas) < 0.6 and 0.85 < max(areas) < 1.05


def test_one_tensor_where_student_and_teacher_take_the_same(picture):
    view = BootstrapView(ImageFormat((32, 32)), ImageFormat((32, 32), resize=36))
    assert view(picture).keys() == {"pixel_values"}


def batch_of(count, start=0, size=8):
    generator = torch.Generator().manual_seed(5)
    pixels, labels = torch.rand(32, 3, size, size, generator=generator), torch.arange(32) % 3
    part = slice(start, start + count)
    index = torch.arange(32)[part]
    return {"pixel_values": pixels[part], "labels": labels[part], "index": index, "epoch": torch.ones_like(index)}


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0), (0, 1.0), (0.8, 1.0)])
def test_mixing_against_brute_force(mixup, cutmix):
    before, after = batch_of(32), batch_of(32)
    Mix(3, mixup, cutmix, label_smoothing=0.1, seed=4)(after)
    blended = 0
    for i in range(32):
        own, other, mixed = before["pixel_values"][i], before["pixel_values"][i ^ 1], after["pixel_values"][i]
        share = (mixed - other) / (own - other)
        own_target, other_target = (F.one_hot(before["labels"][j], 3) * 0.9 + 0.1 / 3 for j in (i, i ^ 1))
        kept = share.mean()
        torch.testing.assert_close(
            after["targets"][i], kept * own_target + (1 - kept) * other_target, atol=2e-3, rtol=0
        )
        if share.std() < 0.01:
            blended += 1
        else:
            assert torch.isclose(share, share.round(), atol=1e-3).all()
    assert blended == 32 if not cutmix else blended < 32
    assert blended > 8 or not mixup
    torch.testing.assert_close(after["targets"].sum(1), torch.ones(32))


def test_mixing_does_not_depend_on_the_batch():
    whole, mix = batch_of(32), Mix(3, 0.8, 1.0)
    mix(whole)
    for start in range(0, 32, 8):
        part = batch_of(8, start)
        mix(part)
        assert torch.equal(part["pixel_values"], whole["pixel_values"][start : start + 8])
        assert torch.equal(part["targets"], whole["targets"][start : start + 8])
    other = batch_of(32)
    other["epoch"] += 1
    mix(other)
    assert not torch.equal(other["pixel_values"], whole["pixel_values"])


def test_label_smoothing_alone():
    batch = batch_of(4)
    Mix(3, label_smoothing=0.3)(batch)
    assert torch.equal(batch["pixel_values"], batch_of(4)["pixel_values"])
    torch.testing.assert_close(batch["targets"][1], torch.tensor([0.1, 0.8, 0.1]))
