"""Test of `frugalvit quickstart` on a few photographs."""

import json
from pathlib import Path

import pytest
from PIL import Image

from frugalvit import compare, quickstart


# This file has the results of a run without `--quick`.
RESULTS = Path(__file__).parents[1] / "results" / "quickstart.json"


def test_makes_a_student_a_table_and_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quickstart, "QUICK_NUM_IMAGES", (4, 8))
    monkeypatch.setattr(quickstart, "BATCH_SIZE", 4)
    monkeypatch.setattr(quickstart, "TOKENS", [16, 36, 64])
    monkeypatch.setattr(quickstart, "COMPARED_TOKENS", [16, 64])
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
    # With 64 tokens, the student's embeddings are close to the teacher's, because the student inherits weights.
    assert teacher["accuracy"] > 0.5 and teacher["cosine"] > many["cosine"] > 0.9 > smaller["cosine"]
    with Image.open(out / "rois.png") as picture:
        assert picture.width > 500 and len(picture.convert("L").getcolors(256)) > 20
    assert (out / "comparison.png").is_file()

    printed = capsys.readouterr().out
    commands = [line.split()[1] for line in printed.splitlines() if line.startswith("  frugalvit ")]
    assert "student, 16 tokens" in printed and commands == ["bootstrap", "compare", "predict"]
    with pytest.raises(ValueError, match="neither empty nor"):
        quickstart.main(["--output", str(out)])
