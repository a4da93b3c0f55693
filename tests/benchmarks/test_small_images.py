"""Tests of benchmarks/small_images.py."""

import json

import datasets
import small_images
from PIL import Image
from transformers import ViTImageProcessor
from vision_transformers import of_transformers


def test_each_row_is_trained_once(tmp_path, monkeypatch):
    of_transformers("ViT", "ForImageClassification", num_labels=3)().save_pretrained(tmp_path / "teacher")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "teacher")
    records = {"image": [Image.new("RGB", (32, 32), (9 * n, 0, 99)) for n in range(9)], "label": [0, 1, 2] * 3}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    datasets.Dataset.from_dict(records, features).to_parquet(images := str(tmp_path / "images.parquet"))
    trained, train_one = [], small_images.train_one

    def counted(arguments, method, rate, sizes, seed):
        trained.append((method, rate, *sizes))
        return train_one(arguments, method, rate, sizes, seed)

    monkeypatch.setattr(small_images, "train_one", counted)
    monkeypatch.setattr("token_merging.BATCH_SIZE", 4)
    options = {"teacher": tmp_path / "teacher", "train": images, "test": images, "label-rates": 1e-4}
    options |= {"runs-dir": tmp_path / "runs", "results-dir": tmp_path}
    argv = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["small_images.py", "train", "--sizes", "16", "8", *argv])
    for _ in range(2):
        small_images.main()
    as_it_is, labels, embedding, student = small_images.METHODS
    assert trained == [
        (as_it_is, 0.0, 16, 8),
        *((labels, 1e-4, size) for size in (16, 8)),
        *((embedding, 2e-5, size) for size in (16, 8)),
        (student, 2e-5, 16, 8),
    ]
    rows = json.loads((tmp_path / "small_images_caltech101.json").read_text("utf-8"))["rows"]
    assert [(row["pixels"], row["tokens"]) for row in rows] == [(16, 16), (8, 4)] * 4
