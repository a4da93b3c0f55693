"""Test the forms of images that a training accepts, random views, and unreadable images."""

from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from trainings import Pairs, assert_equal

from drawn import draw, draw_classes
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training.data import class_names, load_images
from frugalvit.training.preprocessing import CorruptImageError, decode_image
from frugalvit.training.train import SmallDataView
from frugalvit.training.views import (
    VIEW,
    EvalView,
    StreamedViews,
    Views,
    as_images,
    collate,
    labeled_images,
    mixing,
    seeded,
)


FORMAT = ImageFormat((8, 8))
CROP = SimpleNamespace(crop="padded", crop_padding=2, crop_size=None, padding_mode="reflect", flip=0.5)
VIEW_OF_TRAINING = SmallDataView(FORMAT, CROP, randaugment_layers=2, erasing=0.5)


class Records(Pairs):
    def __getitem__(self, index):
        return {"image": self.pictures[index], "label": torch.tensor(self.labels[index])}


def make_torch_dataset(pictures, kind=Pairs):
    return kind(pictures, [index % 2 for index in range(len(pictures))], ["cat", "dog"])


def darken(record):
    return {"picture": record["picture"].point(lambda value: value // 2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.with_transform(lambda batch: batch), r"has a transform .* or call reset_format\(\)"),
        (lambda table: table.with_format("torch", columns=["kind"]), "leaves out picture; expected all columns"),
        (
            lambda table: table.to_iterable_dataset().map(darken),
            "columns of the stream are not known .* features=stream.features",
        ),
        (lambda table: table.with_format("arrow"), None),
        (lambda table: table.to_iterable_dataset().map(darken, features=table.features), None),
    ],
    ids=["transform", "columns", "map of a stream", "arrow", "map of a stream with features"],
)
def test_formats_of_data_sets_are_left_out_or_refused(change, message, tmp_path):
    draw(tmp_path, 2)
    pictures = [Image.open(tmp_path / f"{index}.png").convert("RGB") for index in range(2)]
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    images = change(datasets.Dataset.from_dict({"picture": pictures, "kind": [0, 1]}, features))
    if message:
        with pytest.raises(ValueError, match=message):
            as_images(images)
    else:
        assert [int(record["label"]) for record in as_images(images)] == [0, 1]
        decode_image(next(iter(as_images(images)))["image"], 0)


LABELED = ["decoded", "stream", "pairs", "records", "folder"]


@pytest.mark.parametrize("kind", [*LABELED, "PIL", "paths"])
def test_images_may_have_any_form(kind, tmp_path):
    """The color of each of the ten images is the image's number. The expected label follows from this number."""
    draw_classes(tmp_path / "classes", 5)
    draw(tmp_path / "flat", 10)
    paths = [str(tmp_path / "flat" / f"{index}.png") for index in range(10)]
    pictures = [Image.open(path).convert("RGB") for path in paths]
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    table = datasets.Dataset.from_dict({"picture": pictures, "kind": [i % 2 for i in range(10)]}, features)
    given = {
        "decoded": table,
        "stream": table.to_iterable_dataset(),
        "pairs": make_torch_dataset(pictures),
        "records": make_torch_dataset(pictures, Records),
        "folder": str(tmp_path / "classes"),
        "PIL": pictures,
        "paths": paths,
    }
    found = as_images(given[kind])
    records = list(found) if kind == "stream" else [found[index] for index in range(len(found))]
    colors = [np.asarray(decode_image(record["image"], 0))[0, 0, 0] for record in records]
    assert sorted(colors) == list(range(10)) and class_names(found) == (["cat", "dog"] if kind in LABELED else None)
    if kind in LABELED:
        expected = [each // 5 if kind == "folder" else each % 2 for each in colors]
        assert [record["label"] for record in records] == expected


@pytest.mark.parametrize("part", ["train", "evaluation"])
def test_an_image_without_a_label_is_refused(part, images):
    table = images.select(range(3)).remove_columns("label").add_column("label", [0, -1, 1])
    unlabeled = table.cast_column("label", images.features["label"])
    parts = {"train": images, "evaluation": images} | {part: unlabeled}
    with pytest.raises(ValueError, match=f"1 of 3 images of the split '{part}' have no label, the first is image 1"):
        labeled_images(**parts)


def loaded(views, **options) -> list[dict]:
    batches = partial(collate, formats={"pixel_values": FORMAT})
    return list(DataLoader(views, collate_fn=batches, **{"batch_size": 4} | options))


def assert_same(batches, expected):
    for batch, other in zip(batches, expected, strict=True):
        assert_equal(batch, other)


def test_a_view_is_a_function_of_seed_epoch_and_index(images):
    """A view is equal in every process and does not depend on earlier random numbers."""
    views = Views(images, VIEW_OF_TRAINING, seed=1)
    views.epoch.fill_(3)
    before = torch.get_rng_state()
    sample = views[5]
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(1, 3, 5, VIEW):
        pixels = VIEW_OF_TRAINING(decode_image(images[5]["image"], 5))["pixel_values"]
    expected = loaded(views)
    assert torch.equal(sample["pixel_values"], pixels) and expected[1]["index"].tolist() == [4, 5, 6, 7]
    assert torch.equal(FORMAT.normalize(pixels), expected[1]["pixel_values"][1])
    assert_same(loaded(views, num_workers=2), expected)
    for epoch, seed in ((2, 1), (3, 2)):
        other = Views(images, VIEW_OF_TRAINING, seed)
        other.epoch.fill_(epoch)
        assert not torch.equal(other[5]["pixel_values"], pixels)
    # The persistent workers of a data loader use the new epoch.
    loader = DataLoader(views, 8, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        views.epoch.fill_(epoch)
        assert {*torch.cat([batch["epoch"] for batch in loader]).tolist()} == {epoch}
    # The argument `classes` maps labels to the model's class numbers.
    numbers = [Views(images, EvalView(FORMAT), classes=range(9, -1, -1))[index]["labels"] for index in range(32)]
    assert numbers == [9 - label for label in images["label"]]


def stream_of(write_parquet, workers=0, epoch=0, skip_corrupt=False, corrupt=()) -> list[dict]:
    stream = load_images(write_parquet(count=12, corrupt=corrupt), streaming=True)
    views = StreamedViews(stream, VIEW_OF_TRAINING, 42, skip_corrupt)
    views.epoch.fill_(epoch)
    return loaded(views, num_workers=workers)


def test_a_stream_is_shuffled_and_its_views_are_drawn_anew_each_epoch(write_parquet):
    first, again, other = (stream_of(write_parquet, epoch=epoch) for epoch in (1, 1, 2))
    assert_same(again, first)
    assert torch.cat([batch["index"] for batch in first]).tolist() == list(range(12))
    assert not torch.equal(first[0]["pixel_values"], other[0]["pixel_values"])
    orders = [torch.cat([batch["labels"] for batch in batches]).tolist() for batches in (first, other)]
    assert orders[0] != orders[1]
    assert sum(len(batch["labels"]) for batch in stream_of(write_parquet, workers=2)) == 12


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_is_named_or_replaced(workers, write_parquet, tmp_path):
    message = r"Image \d+ of the data set cannot be read \(.+\); to leave such images out: skip_corrupt\.\s*$"
    views = Views(load_images(write_parquet(count=12, corrupt=[3, 4, 11])), VIEW_OF_TRAINING, 1)
    for read in (lambda: loaded(views, num_workers=workers), lambda: stream_of(write_parquet, workers, corrupt=[7])):
        with pytest.raises(CorruptImageError, match=message):
            read()
    views.skip_corrupt = True
    index = torch.cat([batch["index"] for batch in loaded(views, num_workers=workers)])
    # The next readable image replaces a corrupt image. Image 5 replaces images 3 and 4; image 0 replaces image 11.
    assert index.tolist() == [0, 1, 2, 5, 5, 5, 6, 7, 8, 9, 10, 0]
    found = stream_of(write_parquet, workers, skip_corrupt=True, corrupt=[3, 4, 11])
    assert sum(len(batch["labels"]) for batch in found) == 9
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(CorruptImageError, match=f"Image 0 of the data set cannot be read .*{tmp_path}/broken.jpg"):
        Views(as_images([tmp_path / "broken.jpg"]), EvalView(FORMAT))[0]
    with pytest.raises(ValueError, match="None of the 1 images of the data set can be read"):
        Views(as_images([tmp_path / "broken.jpg"]), EvalView(FORMAT), skip_corrupt=True)[0]


def test_batches_are_normalized_and_mixed_in_training_alone(images):
    """Mixing depends only on the seed, the epoch and the index of the batch's first image."""
    training, evaluation = (Views(images, EvalView(FORMAT), seed) for seed in (1, None))
    samples, known = (
        [views[index] | {"mask": torch.tensor(7)} for index in range(8)] for views in (training, evaluation)
    )
    collator = partial(collate, formats={"pixel_values": FORMAT}, mix=mixing(10, 0.8, 1.0), seed=3)
    batch, plain = collator(samples), collator(known)
    assert torch.equal(plain["pixel_values"], FORMAT.normalize(torch.stack([each["pixel_values"] for each in known])))
    assert (plain["mask"] == 7).all() and plain["labels"].dtype == torch.int64 and "epoch" not in plain
    assert not torch.equal(batch["pixel_values"], plain["pixel_values"])
    torch.testing.assert_close(batch["labels"].sum(1), torch.ones(8))
    torch.rand(3)
    assert_same([collator(samples)], [batch])
    kept = set()
    for epoch in range(20):
        mixed = collator([sample | {"epoch": epoch} for sample in samples])
        kept.add(bool((mixed["pixel_values"] == plain["pixel_values"]).flatten(1).any(1).all()))
    # CutMix leaves some pixels of each image unchanged. Mixup changes all pixels.
    assert kept == {True, False} and mixing(10, 0, 0) is None
