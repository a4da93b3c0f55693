"""Images from every source; bad sources."""

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images, load_table
from frugalvit.common.decoding import decode_image
from frugalvit.common.labels import class_names
from frugalvit.common.splits import load_splits
from frugalvit.training.components.arguments import DataArguments


NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def value(images, index):
    """The color of an image that `write_parquet` made, a tenth of it."""
    return np.asarray(decode_image(images[index]["image"], index))[0, 0, 0] / 10


@pytest.mark.parametrize(("split", "count"), [("train", 12_000), ("test", 2_000)])
def test_embedded_subset(split, count):
    images = load_images(SUBSET, split)
    assert len(images) == count and images.column_names == ["image", "label"]
    assert class_names(images) == NAMES
    assert np.bincount(images["label"]).tolist() == [count // 10] * 10
    assert images[0]["image"]["bytes"][:2] == b"\xff\xd8"
    assert decode_image(images[0]["image"], 0).size == (32, 32)


def test_files_patterns_and_folders_of_parquet(write_parquet, tmp_path):
    files = [write_parquet("part-0.parquet", 4), write_parquet("part-1.parquet", 6)]
    for source, count in (
        (files[0], 4),
        (files, 10),
        (str(tmp_path / "*.parquet"), 10),
        ([str(tmp_path / "*-1.parquet")], 6),
        (str(tmp_path), 10),
    ):
        images = load_images(source)
        assert (len(images), class_names(images)) == (count, ["even", "odd"])
    assert len(load_images(files, "train[:3]")) == 3
    assert value(load_images(files), 5) == 1


def test_parquet_that_datasets_did_not_write(write_parquet, tmp_path):
    table = pq.read_table(write_parquet(count=6)).replace_schema_metadata(None)
    table = table.append_column("size", pa.array(range(6)))
    pq.write_table(table, tmp_path / "plain.parquet")
    images = load_images(str(tmp_path / "plain.parquet"))
    assert class_names(images) == ["0", "1"] and images["label"][:3] == [0, 1, 0] and value(images, 3) == 3
    assert class_names(load_images(str(tmp_path / "plain.parquet"), class_names=["a", "b", "c"])) == ["a", "b", "c"]
    assert class_names(load_images(str(tmp_path / "plain.parquet"), label_column="size")) == list("012345")
    with pytest.raises(ValueError, match="1 --class-names .* up to 1"):
        load_images(str(tmp_path / "plain.parquet"), class_names=["a"])


def test_columns_of_bytes_or_paths(tmp_path):
    Image.new("RGB", (8, 8), (30, 0, 0)).save(tmp_path / "a.png")
    columns = {"data": [(tmp_path / "a.png").read_bytes()], "file": [str(tmp_path / "a.png")]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for column in columns:
        for streaming in (False, True):
            images = load_images(str(tmp_path / "a.parquet"), image_column=column, streaming=streaming)
            assert value(list(images), 0) == 3


def test_images_without_labels(write_parquet):
    assert class_names(load_images(write_parquet(labels=False))) is None


def test_a_hub_id_may_pin_a_revision(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda **arguments: asked.append(arguments))
    load_table("owner/name@v1", "train", "small")
    load_table("owner/name", "test")
    assert [(source["path"], source["name"], source.get("revision")) for source in asked] == [
        ("owner/name", "small", "v1"),
        ("owner/name", None, None),
    ]


def test_bad_sources_are_one_clear_error(write_parquet, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    parquet = write_parquet()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no parquet")
    (tmp_path / "empty").mkdir()
    two = pa.table({name: [{"bytes": b"", "path": None}] for name in ("left", "right")})
    pq.write_table(two, tmp_path / "two.parquet")
    for source, options, message in (
        ("nobody/nothing", {}, "expected a hub id, a folder of images"),
        (str(tmp_path / "none*.parquet"), {}, "There is no file .*none"),
        (str(tmp_path / "empty"), {}, "Cannot load"),
        (str(tmp_path / "broken.parquet"), {}, "Cannot load the split 'train' of .*: Parquet magic bytes not found"),
        ([parquet, SUBSET], {}, "expected one, or several parquet files"),
        (parquet, {"split": "test"}, "split 'test' of"),
        (parquet, {"image_column": "picture"}, r"no column 'picture' \(--image-column\); it has image, label"),
        (str(tmp_path / "two.parquet"), {}, "has 2 image columns among left, right; expected one"),
        (parquet, {"image_column": "label"}, "column 'label' of .* holds ClassLabel.*, expected images"),
        (parquet, {"label_column": "image"}, "column 'image' of .* holds Image.*, expected class numbers"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            load_images(source, **options)
        assert "\n" not in str(error.value)


def test_training_and_evaluation_must_agree_on_classes(write_parquet):
    train, test = write_parquet("a.parquet"), write_parquet("b.parquet", names=("odd", "even"))
    with pytest.raises(ValueError, match=r"even, odd \(2\), .* odd, even \(2\)"):
        load_splits(DataArguments(dataset=[train], eval_dataset=[test]))
    images, *_ = load_splits(DataArguments(dataset=[train], eval_dataset=[test], class_names=["a", "b"]))
    assert class_names(images) == ["a", "b"]
