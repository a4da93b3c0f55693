"""Test loading of images and labels from Parquet files and the shipped CIFAR-10 subset, and errors for bad sources."""

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from drawn import encode, save
from frugalvit.training.arguments import DataArguments
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import class_names, load_images, load_splits, sample, split_names
from frugalvit.training.preprocessing import decode_image


NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PICTURE = {"bytes": encode(np.zeros((8, 8, 3), np.uint8)), "path": None}


def value(images, index):
    """Return an image's red value divided by 10. In files of `write_parquet`, this is the index of the image."""
    return np.asarray(decode_image(images[index]["image"], index))[0, 0, 0] / 10


@pytest.mark.parametrize(("split", "count"), [("train", 12_000), ("test", 2_000)])
def test_embedded_subset(split, count):
    images = load_images(SUBSET, split)
    assert len(images) == count and images.column_names == ["image", "label"] and class_names(images) == NAMES
    assert np.bincount(images["label"]).tolist() == [count // 10] * 10
    assert images[0]["image"]["bytes"][:2] == b"\xff\xd8" and split in split_names(SUBSET)
    assert len(sample(images, 5, 0)) == 5 and sample(images, count, 0) is images


def test_files_patterns_and_folders_of_parquet(write_parquet, tmp_path):
    (tmp_path / "photos").mkdir()
    files = [write_parquet("photos/part-0 [a].parquet", 4), write_parquet("photos/part-1.parquet", 6)]
    for source, count in ((files[0], 4), (files, 10), (str(tmp_path / "photos"), 10)):
        images = load_images(source)
        assert (len(images), class_names(images), split_names(source)) == (count, ["even", "odd"], ["train"])
    assert len(load_images(files, "train[:3]")) == 3 and value(load_images(files), 5) == 1
    # The names of a folder's files determine its splits.
    (tmp_path / "csv" / "data").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_parquet(f"csv/data/{name}.parquet", 2)
    folder = str(tmp_path / "csv")
    assert {split: len(load_images(folder, split)) for split in split_names(folder)} == {"train": 4, "test": 2}


def test_files_with_different_class_names_are_refused(write_parquet, tmp_path):
    """Without a check, `datasets` would apply the first file's class names to the labels of all files."""
    (tmp_path / "set").mkdir()
    files = [write_parquet("set/train-0.parquet"), write_parquet("set/test-0.parquet", names=("odd", "even"))]
    for source in (str(tmp_path / "set"), files):
        with pytest.raises(ValueError, match=r"column label has the classes .*odd, even \(2\)"):
            load_images(source)
    data = DataArguments(dataset=files[:1], eval_dataset=files[1:])
    with pytest.raises(ValueError, match=r"even, odd \(2\) .* odd, even \(2\)"):
        load_splits(data, learns_labels=True)
    # If training does not learn from labels, each part keeps its own class names.
    assert [class_names(part) for part in load_splits(data)[:2]] == [["even", "odd"], ["odd", "even"]]
    data.class_names = ["a", "b"]
    assert class_names(load_splits(data)[0]) == ["a", "b"]


def test_parquet_that_datasets_did_not_write(write_parquet, tmp_path):
    file = str(tmp_path / "plain.parquet")
    table = pq.read_table(write_parquet(count=6)).replace_schema_metadata(None)
    pq.write_table(table.append_column("size", pa.array(range(6))), file)
    images = load_images(file)
    assert class_names(images) == ["0", "1"] and images["label"][:3] == [0, 1, 0] and value(images, 3) == 3
    assert class_names(load_images(file, class_names=["a", "b", "c"])) == ["a", "b", "c"]
    assert class_names(load_images(file, label_column="size")) == list("012345")
    with pytest.raises(ValueError, match="go up to 1, expected less than 1 "):
        load_images(file, class_names=["a"])
    with pytest.raises(ValueError, match="have no names; give them with class_names"):
        load_images(file, streaming=True)


@pytest.mark.parametrize(
    ("labels", "options", "names", "numbers"),
    [
        ([True, False, True], {}, ["0", "1"], [1, 0, 1]),
        (["b", "a", "c"], {}, ["a", "b", "c"], [1, 0, 2]),
        (pa.array(["b", None, "a"], pa.large_string()), {}, ["a", "b"], [1, None, 0]),
        (["b", "a", "c"], {"class_names": ["c", "b", "a"]}, ["c", "b", "a"], [1, 2, 0]),
        (["b", "a", "c"], {"default_names": ["c", "b", "a", "d"]}, ["c", "b", "a", "d"], [1, 2, 0]),
        (["b", "a", "c"], {"class_names": ["a", "b"]}, r"Not all labels are among the classes a, b \(2\) .*c", None),
    ],
)
def test_labels_are_numbers_or_texts(labels, options, names, numbers, tmp_path):
    pq.write_table(pa.table({"image": [PICTURE] * 3, "label": labels}), tmp_path / "a.parquet")
    if numbers is None:
        with pytest.raises(ValueError, match=names):
            load_images(str(tmp_path / "a.parquet"), **options)
    else:
        images = load_images(str(tmp_path / "a.parquet"), **options)
        assert class_names(images) == names and [record["label"] for record in images] == numbers


def test_columns_of_bytes_or_paths(tmp_path):
    Image.new("RGB", (8, 8), (30, 0, 0)).save(tmp_path / "a.png")
    columns = {"photo": [(tmp_path / "a.png").read_bytes()], "file": [str(tmp_path / "a.png")]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for column in (None, "photo", "file"):
        for streaming in (False, True):
            images = load_images(str(tmp_path / "a.parquet"), image_column=column, streaming=streaming)
            assert value(list(images), 0) == 3 and class_names(images) is None


def test_bad_sources_are_one_clear_error(write_parquet, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    parquet = write_parquet()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no parquet")
    (tmp_path / "empty").mkdir()
    save(tmp_path / "western" / "a.png")
    (tmp_path / "western" / "metadata.jsonl").write_bytes('{"file_name": "a.png", "label": "café"}'.encode("latin-1"))
    save(tmp_path / "latin" / "caf\udce9.png")
    for source, options, message in (
        ("nobody/nothing", {}, "expected a hub id, a folder of images"),
        (str(tmp_path / "empty"), {}, "Cannot load .*empty.*: it has no images, and 0 zip files"),
        (str(tmp_path / "western"), {}, "western/metadata.jsonl' is not UTF-8"),
        (str(tmp_path / "latin"), {}, r"caf\\udce9.png is not UTF-8; rename it"),
        (str(tmp_path / "broken.parquet"), {}, "Cannot load .*: Parquet magic bytes not found"),
        (parquet, {"image_column": "picture"}, r"no column 'picture' \(--image-column\); it has image, label"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            load_images(source, **options)
        assert "\n" not in str(error.value)
