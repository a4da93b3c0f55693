"""Tests of benchmarks/on_gpu.py with small models on a CPU."""

import json
from pathlib import Path

import on_gpu
import pytest


def test_an_interrupted_run_resumes(tmp_path, monkeypatch):
    """A second run measures only rows that are missing or have failed."""
    calls = []

    def measure(value, fails=False):
        calls.append(value)
        if fails:
            raise MemoryError("too large")
        return {"value": value}

    for attempt in range(2):
        rows = on_gpu.Rows(tmp_path / "on_gpu.json")
        rows.measure("papers", "first", measure, 1, batch_size=1)
        rows.measure("papers", "first", measure, 2, batch_size=2)
        rows.measure("student", "second", measure, 3, attempt == 0)
        written = json.loads((tmp_path / "on_gpu.json").read_text())["rows"]
        found = {"value": 3} if attempt else {"error": "too large"}
        assert written[-1] == {"section": "student", "row": "second"} | found
    assert calls == [1, 2, 3, 3] and len(written) == 3
    monkeypatch.setitem(on_gpu.SECONDS, "bootstrap", -1)
    rows.measure("bootstrap", "late", measure, 4)
    assert len(calls) == 4


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities of TorchVision")
def test_every_section_is_measured(tmp_path, monkeypatch):
    small = {
        "SIZES": {"tiny": ("cifar10-sparseformer", None, "cifar10-vit")},
        "IMAGE_SIZE": 32,
        "MODES": ("eager", "products"),
    }
    small |= {"BATCH_SIZES": (1, 2), "STEPS": 1, "STEP_SIZE": 2, "COUNTS": [4, 16]}
    small |= {"TEACHER": "checkpoints/cifar10-vit", "STUDENT": "checkpoints/cifar10-sparseformer"}
    for name, value in small.items():
        monkeypatch.setattr(on_gpu, name, value)
    monkeypatch.setattr("bootstrap_speed.COUNTS", [4, 16])
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("sys.argv", ["on_gpu.py", "--results-dir", str(tmp_path)])
    on_gpu.main()
    rows = json.loads((tmp_path / "on_gpu.json").read_text())["rows"]
    assert {row["section"] for row in rows} == set(on_gpu.SECONDS)
    # FlashAttention needs a GPU, so its rows fail on a CPU.
    failed = {row["row"] for row in rows if "error" in row and "flash_attention_2" not in row["row"]}
    assert not failed and len(rows) > 35
