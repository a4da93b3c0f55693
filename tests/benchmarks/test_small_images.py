"""Tests of benchmarks/small_images.py."""

import json

import small_images

from tiny import save_vit


def test_each_row_is_trained_once(tmp_path, write_parquet, monkeypatch):
    save_vit(tmp_path / "teacher", num_labels=3, patch_size=4)
    images = write_parquet(count=9, size=32, names=["a", "b", "c"])
    trained, train_one = [], small_images.train_one

    def counted(arguments, method, rate, sizes, seed):
        trained.append((method, rate, *sizes))
        return train_one(arguments, method, rate, sizes, seed)

    monkeypatch.setattr(small_images, "train_one", counted)
    monkeypatch.setattr("token_merging.BATCH_SIZE", 4)
    options = {"teacher": tmp_path / "teacher", "train": images, "test": images, "rates": 1e-4}
    options |= {"runs-dir": tmp_path / "runs", "results-dir": tmp_path}
    argv = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["small_images.py", "train", "--sizes", "16", "8", *argv])
    for _ in range(2):
        small_images.main()
    untrained, *tuned, student = small_images.METHODS
    assert trained == [
        (untrained, 0.0, 16, 8),
        *((method, 1e-4, size) for method in tuned for size in (16, 8)),
        (student, 2e-5, 16, 8),
    ]
    rows = json.loads((tmp_path / "small_images_caltech101.json").read_text("utf-8"))["rows"]
    assert [(row["pixels"], row["tokens"]) for row in rows] == [(16, 16), (8, 4)] * 4
