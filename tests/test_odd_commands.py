"""Commands that are given odd things do what they can, or say what is wrong in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import odd_commands


def test_end_with_a_result_or_one_line(tmp_path):
    """A sample of them; FRUGALVIT_ODD_COMMANDS=all tries all of them, for half an hour."""
    program, count = Path(odd_commands.__file__), os.environ.get("FRUGALVIT_ODD_COMMANDS", "12")
    process = subprocess.run(
        [sys.executable, program, tmp_path, *([] if count == "all" else [count])],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert not report["failures"], json.dumps(report["failures"], indent=2)
    # They are odd: many are refused.
    assert report["ended"].get("1", 0) > report["cases"] / 4
