"""`frugalvit quickstart` on a few photographs: the whole of it, cut short."""

import json
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoModelForImageClassification

from frugalvit import compare, quickstart
from frugalvit.common.data import load_images
from frugalvit.common.resources import shipped_images


# Of a whole run.
RESULTS = Path(__file__).parents[1] / "results" / "quickstart.json"


def test_makes_a_student_a_table_and_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quickstart, "QUICK_SIZES", (4, 8, 1))
    monkeypatch.setattr(quickstart, "BATCH_SIZE", 4)
    monkeypatch.setattr(quickstart, "TOKENS", [16, 64])
    monkeypatch.setattr(quickstart, "RESOLUTIONS", [56])
    monkeypatch.setattr(compare, "BATCH_SIZES", (1, 2))
    monkeypatch.setattr(quickstart, "BATCH_SIZES", (1, 2))
    out = tmp_path / "out"
    quickstart.main(["--output", str(out), "--quick", "--seed", "3"])

    results, whole = (json.loads(path.read_text(encoding="utf-8")) for path in (out / "results.json", RESULTS))
    assert results.keys() == whole.keys() and {*results["rows"][0]} == {*whole["rows"][0]} - {"memory"}
    assert (results["photographs"], results["held_back"], results["seed"]) == (4, 8, 3)
    teacher, smaller, few, many = results["rows"]
    assert [row["tokens"] for row in results["rows"]] == [257, 17, 17, 65]
    assert [row["method"] for row in (teacher, smaller, few)] == ["teacher", "teacher at lower resolution", "student"]
    # The student begins near its teacher.
    assert teacher["accuracy"] > 0.5 and teacher["cosine"] > many["cosine"] > 0.9 > smaller["cosine"]
    student = AutoModelForImageClassification.from_pretrained(out / "student")
    assert student.config.trained_token_counts == (16, 64)
    with Image.open(out / "rois.png") as picture:
        assert picture.width > 500 and len(picture.convert("L").getcolors(256)) > 20
    assert (out / "comparison.png").is_file()

    printed = capsys.readouterr().out
    assert "learns from 4 photographs" in printed and "on 8 photographs that were held back" in printed
    table, _, after = printed[printed.index("3/3") :].partition("± is a standard error")
    assert ["student, 16 tokens" in line for line in table.splitlines()].count(True) == 1
    commands = [line.split()[1] for line in after.splitlines() if line.startswith("  frugalvit ")]
    assert commands == ["bootstrap", "compare", "predict"]

    with pytest.raises(ValueError, match="neither empty nor"):
        quickstart.main(["--output", str(out)])


def test_photographs_that_ship_are_enough_and_those_to_learn_from_have_no_labels():
    train, test = (load_images([str(shipped_images("caltech101") / f"{part}.parquet")]) for part in ("train", "test"))
    assert len(train) >= quickstart.SIZES[0] and train.column_names == ["image"]
    assert len(test) == quickstart.SIZES[1] and test.features["label"].num_classes == 101
    assert not {image["bytes"] for image in train["image"]} & {image["bytes"] for image in test["image"]}


def test_a_wheel_says_where_the_files_are(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "TEACHER", "caltech101-vit-not-in-the-wheel")
    with pytest.raises(ValueError, match="lies in a clone of the repository"):
        quickstart.main(["--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
