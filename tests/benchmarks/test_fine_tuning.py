"""Tests of benchmarks/fine_tuning.py with few images."""

import json

import fine_tuning
import pytest

from tiny import save_vit


@pytest.mark.filterwarnings("ignore")
def test_each_row_is_measured_once(tmp_path, write_parquet, monkeypatch):
    save_vit(tmp_path / "teacher", num_labels=3, patch_size=4)
    images = write_parquet(count=16, size=32, names=[*"abcd"])
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
