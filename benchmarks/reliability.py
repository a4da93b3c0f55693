"""Odd commands, killed processes, corrupted files, writers at once, hostile folders, runs in several processes and the
whole suite, more of each than the tests try every time.

    python benchmarks/reliability.py commands    # 1,500 odd models, data, outputs and numbers, given to commands
    python benchmarks/reliability.py kills       # 50 trainings and 50 publishings are killed at random moments
    python benchmarks/reliability.py fuzz        # 500 configurations of each family, checkpoints and images of chance
    python benchmarks/reliability.py writers     # 200 times, five commands write one folder at once, and one is killed
    python benchmarks/reliability.py json        # 2,000 odd versions of each JSON file that a folder may bring
    python benchmarks/reliability.py hostile     # links, foreign programs, checkpoints, indexes, names, aliases
    python benchmarks/reliability.py processes   # training in two and four processes: shared out, killed, gone on with
    python benchmarks/reliability.py ends        # 50 signals at random moments, runs and workers that are stopped
    python benchmarks/reliability.py suite       # every test, in two and four processes too, and why some were skipped

They run with the packages of this environment; run `suite` in several to try several versions. Each writes its row of
reliability.json, beside those that are there.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from frugalvit.common.command_line import CommandParser
from frugalvit.common.files import write_json
from frugalvit.common.versions import origin
from shared import ROOT, add_results_argument


COMMANDS, KILLS, FUZZ, WRITERS, JSON, SIGNALS = 1500, 50, 500, 200, 2000, 50
# Files with tests of folders from elsewhere, and words in the names of these tests.
HOSTILE_FILES = (
    *("tests/common/test_files.py", "tests/common/test_tables.py", "tests/test_fuzz.py", "tests/test_index.py"),
    *("tests/test_predict.py", "tests/test_trust.py", "tests/test_attention.py", "tests/test_export.py"),
    *("tests/training/test_trainer.py", "tests/training/test_arguments.py", "tests/common/test_data_sets.py"),
    "tests/test_messages.py",
)
HOSTILE = (
    *("takes_the_place", "another_shape", "terminal", "pickle", "is_said", "is_damaged", "follows_no_link", "aliases"),
    *("classes_have", "exported", "nothing_runs", "user_keeps", "odd_json", "foreign", "odd_run", "of_another_run"),
    *("may_not", "shared_as", "archives", "broken_models"),
)
# Files with tests of what ends before its time, and words in their names.
ENDS_FILES = (
    *("tests/test_cli.py", "tests/training/test_align_llava.py", "tests/training/test_trainer.py"),
    *("tests/training/test_processes.py", "tests/training/test_segment.py"),
)
ENDS = ("signals", "interruption", "stopped", "gone_on", "end_together", "bit_exactly")
# What pytest runs, also of what is marked as `reliability`, and what the tests read from the environment.
ROWS = {
    "commands": (["tests/test_odd_commands.py", "--timeout=7200"], {"FRUGALVIT_ODD_COMMANDS": str(COMMANDS)}),
    "kills": (
        ["tests/training/test_trainer.py", "tests/training/test_processes.py", "-k", "killed", "--timeout=7200"],
        {"FRUGALVIT_KILLS": str(KILLS)},
    ),
    "fuzz": (["tests/test_fuzz.py", "--timeout=7200"], {"FRUGALVIT_FUZZ_CASES": str(FUZZ)}),
    "writers": (
        ["tests/common/test_files.py", "-k", "writers", "--timeout=7200"],
        {"FRUGALVIT_WRITERS": str(WRITERS)},
    ),
    "json": (["tests/test_fuzz.py", "-k", "json", "--timeout=7200"], {"FRUGALVIT_FUZZ_CASES": str(JSON)}),
    "hostile": ([*HOSTILE_FILES, "-k", " or ".join(HOSTILE)], {}),
    "processes": (
        ["tests/training/test_processes.py", "tests/training/test_segment.py", "-k", "processes", "--timeout=7200"],
        {},
    ),
    "ends": ([*ENDS_FILES, "-k", " or ".join(ENDS), "--timeout=7200"], {"FRUGALVIT_SIGNALS": str(SIGNALS)}),
    "suite": (["--numprocesses=auto"], {}),
}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=list(ROWS))
    add_results_argument(parser)
    arguments = parser.parse_args()

    words, environment = ROWS[arguments.row]
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "pytest", "--numprocesses=0", "-q", "-m", "", f"--junitxml={folder}/report.xml"]
            + [f"--basetemp={folder}/temporary", *words],
            cwd=ROOT,
            env=os.environ | environment,
            check=False,
        )
        row = {"row": arguments.row, **environment, **read_report(Path(folder) / "report.xml")}
        if not row["passed"] + row["failed"]:
            raise SystemExit(f"{' '.join(words)}: pytest ran no test; see above.")
        row["minutes"] = round((time.monotonic() - started) / 60, 1)
        if arguments.row == "commands":
            # Not through pytest's link to the last folder.
            [report] = Path(folder).glob("temporary/*0/report.json")
            row |= json.loads(report.read_text(encoding="utf-8"))
    row |= origin()

    path = arguments.results_dir / "reliability.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    kept = [other for other in rows if key(other) != key(row)]
    write_json(path, {"command": "python benchmarks/reliability.py ROW", "rows": [*kept, row]})
    print({name: value for name, value in row.items() if not isinstance(value, dict)})


def read_report(path: Path) -> dict:
    """Numbers of tests that passed and failed, and of those that were skipped for each reason."""
    passed, failed, reasons = 0, [], collections.Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (skipped := case.find("skipped")) is not None:
            reasons[skipped.get("message")] += 1
        else:
            passed += 1
    counts = {"passed": passed, "failed": len(failed), "skipped": reasons.total()}
    return counts | {"failed tests": failed, "reasons of skips": reasons}


def key(row: dict) -> tuple:
    return row["row"], row["versions"]["torch"], row["versions"]["transformers"]


if __name__ == "__main__":
    main()
