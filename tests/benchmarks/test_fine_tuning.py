"""Tests of benchmarks/fine_tuning.py on few images."""

import json

import datasets
import fine_tuning
import pytest
from transformers import ViTImageProcessor
from vision_transformers import of_transformers

from drawn import noise


@pytest.mark.filterwarnings("ignore")
def test_each_row_is_measured_once(tmp_path, monkeypatch):
    of_transformers("ViT", "ForImageClassification", num_labels=3)().save_pretrained(tmp_path / "teacher")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "teacher")
    records = {"image": [noise(seed=seed) for seed in range(16)], "label": [0, 1, 2, 3] * 4}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[*"abcd"])})
    datasets.Dataset.from_dict(records, features).to_parquet(images := tmp_path / "images.parquet")
    monkeypatch.setattr(fine_tuning, "NEW_CLASSES", 2)
    words = ["--teacher", tmp_path / "teacher", "--clothing", images, images, "--caltech", images, images]
    words += ["--tokens", 4, "--images", 6, "--runs-dir", tmp_path / "runs", "--results-dir", tmp_path]
    for _ in range(2):
        fine_tuning.main([*map(str, words)])
        monkeypatch.setattr(fine_tuning, "fine_tune", None)
    rows = json.loads((tmp_path / "fine_tuning.json").read_text())["rows"]
    found = [(row["data"], row["method"], row["model"]) for row in rows]
    models = ("teacher", "student, 4 tokens")
    assert found == [
        (data, method, model) for data in ("clothing", "caltech") for method in fine_tuning.METHODS for model in models
    ]
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
