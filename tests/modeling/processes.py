"""Processes that tests start."""

import os
import subprocess
import sys
from pathlib import Path


def run_without_frugalvit(home: Path, *arguments):
    """Run without_frugalvit.py, with an own home of the hub's caches and without a network."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))},
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
    }
    script = Path(__file__).with_name("without_frugalvit.py")
    process = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr[-4000:]
