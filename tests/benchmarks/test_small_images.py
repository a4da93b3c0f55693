"""Tests of benchmarks/small_images.py."""

import json

import caltech101
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


def test_only_equal_trainings_are_averaged_over_seeds():
    first = {"method": "with labels", "rate": 2e-5, "epochs": 1, "pixels": 84, "seed": 0, "accuracy": 0.5}
    others = [{"method": "as it is"}, {"rate": 1e-4}, {"epochs": 6}, {"pixels": 56}]
    rows = [first, first | {"seed": 1, "accuracy": 0.6}, *(first | other | {"accuracy": 0.9} for other in others)]
    assert caltech101.fine_tuned_accuracies(rows, 84) == [0.5, 0.6]
