"""`frugalvit quickstart` on a few images: the whole of it, cut short."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification

from frugalvit import quickstart
from frugalvit.common import comparison, speed


# Of a whole run.
RESULTS = Path(__file__).parents[1] / "results" / "quickstart.json"


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(quickstart, "HELD_BACK_IMAGES", 100)
    monkeypatch.setattr(comparison, "LIMIT", 0.0)


def test_makes_a_repository_a_picture_and_results(tmp_path, capsys):
    out = tmp_path / "out"
    counts = ["--elastic-token-counts", "7", "15"]
    quickstart.main(["--output", str(out), "--images", "128", "--epochs", "1", "--seed", "3", *counts])
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results.keys() == {
        "teacher_accuracy",
        "student_accuracy",
        "shipped_student_accuracy",
        "teacher_tokens",
        "student_tokens",
        "teacher_images_per_second",
        "student_images_per_second",
        "seconds",
        "versions",
        "machine",
    }
    assert results.keys() == json.loads(RESULTS.read_text(encoding="utf-8")).keys()
    assert results["teacher_tokens"] == 65 and results["student_tokens"] == 16
    assert results["shipped_student_accuracy"] > 0.8 * results["teacher_accuracy"] > 0.4
    student = AutoModelForImageClassification.from_pretrained(out / "model")
    assert type(student).__name__ == "SparseFormerForImageClassification"
    names = {path.name for path in (out / "model").iterdir()}
    assert {"README.md", "model.safetensors", "modeling_sparseformer.py", "preprocessor_config.json"} <= names
    assert "checkpoints" not in names
    with Image.open(out / "rois.png") as picture:
        assert picture.width > 500 and len(picture.convert("L").getcolors(256)) > 20
    printed = capsys.readouterr().out
    # A row for each count.
    table = printed[printed.index("both models in this run") :]
    rows = [line.split() for line in table.splitlines() if line.startswith(("teacher", "student"))]
    assert [row[0] for row in rows] == ["teacher", "student", "student"] and "images/s" in table
    assert [row[2:4] for row in rows] == [["64", "65"], ["7", "8"], ["15", "16"]]

    # What a reader would ask.
    assert "128 images without labels. Each is shown 2 times: the bar counts to about 256." in printed
    assert "judged on 25 images that are held back; at the end on 100" in printed
    assert "The student has more parameters" in printed

    with pytest.raises(ValueError, match="finished quickstart"):
        quickstart.main(["--output", str(out)])


def test_what_surprises_is_explained():
    teacher = {"parameters": 3, "images/s, 1": 90.0}
    assert quickstart.explain(teacher, {"parameters": 2, "images/s, 1": 95.0}) == ""
    said = quickstart.explain(teacher, {"parameters": 4, "images/s, 1": 80.0})
    assert "has more parameters" in said and "One image at a time it is no faster" in said


def test_refuses_a_folder_with_something_else_in_it(tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="not an empty folder"):
        quickstart.main(["--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(("argument", "value"), [("--epochs", "0"), ("--images", "7"), ("--seed", "-1")])
def test_refuses_numbers_out_of_range(tmp_path, argument, value, capsys):
    with pytest.raises(SystemExit) as stop:
        quickstart.main(["--output", str(tmp_path / "out"), argument, value])
    assert stop.value.code == 2
    assert f"{argument} is {value}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_speed_is_the_median_of_interleaved_rounds(monkeypatch):
    clock = iter(range(10_000))
    calls = []
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(clock))
    batch = torch.zeros(8, 1)
    models = {"a": lambda _: calls.append("a"), "b": lambda _: calls.append("b")}
    assert speed.images_per_second(models, batch, rounds=3) == {"a": 8.0, "b": 8.0}
    assert calls == ["a", "b"] * 5
    # Passes and looks at the clock take a second each: after two rounds the limit is over, and one of them counts.
    calls.clear()
    assert speed.images_per_second(models, batch, rounds=3, limit=5) == {"a": 8.0, "b": 8.0}
    assert calls == ["a", "b"] * 2
