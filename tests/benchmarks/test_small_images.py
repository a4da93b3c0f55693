"""A teacher fine-tuned for smaller images beside a student for all of them."""

import importlib
import json
import sys
from pathlib import Path
from unittest.mock import patch

import datasets
import pytest
import torch
from PIL import Image
from vision_transformers import of_transformers


@pytest.fixture
def small_images():
    with patch.object(sys, "path", [str(Path(__file__).resolve().parents[2] / "benchmarks"), *sys.path]):
        return importlib.import_module("small_images")


@pytest.fixture
def command(tmp_path) -> list[str]:
    """The command's arguments for a tiny teacher and a few images."""
    of_transformers("ViT", "ForImageClassification", num_labels=3)().save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}})
    )
    records = {"image": [Image.new("RGB", (32, 32), (9 * n, 0, 99)) for n in range(9)], "label": [0, 1, 2] * 3}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    datasets.Dataset.from_dict(records, features).to_parquet(tmp_path / "images.parquet")
    images = str(tmp_path / "images.parquet")
    return ["train", "--teacher", str(tmp_path / "teacher"), "--train", images, "--test", images, "--sizes", "16", "8"]


def test_each_row_is_trained_once_and_an_embedding_is_aligned_without_labels(
    small_images, command, tmp_path, monkeypatch
):
    folders = ["--runs-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path)]
    trained, train_one = [], small_images.train_one

    def counted(arguments, method, rate, sizes, views):
        trained.append((method, rate, *sizes))
        return train_one(arguments, method, rate, sizes, views)

    monkeypatch.setattr(small_images, "train_one", counted)
    monkeypatch.setattr(small_images, "BATCH_SIZE", 4)
    monkeypatch.setattr("sys.argv", ["small_images.py", *command, *folders, "--steps", "2", "--label-rates", "1e-4"])
    for _ in range(2):
        small_images.main()
    as_it_is, labels, embedding, student = small_images.METHODS
    assert trained == [
        (as_it_is, 0.0, 16, 8),
        (labels, 1e-4, 16),
        (labels, 1e-4, 8),
        (embedding, 2e-5, 16),
        (embedding, 2e-5, 8),
        (student, 2e-5, 16, 8),
    ]
    rows = json.loads((tmp_path / "small_images_caltech101.json").read_text("utf-8"))["rows"]
    assert [(row["pixels"], row["tokens"]) for row in rows] == [(16, 16), (8, 4)] * 4
    [file] = (tmp_path / "runs").glob("*.pt")
    views = torch.load(file)
    assert views["pixels"].shape == (2, 4, 3, 32, 32) and views["embeddings"].shape == (2, 4, 48)
