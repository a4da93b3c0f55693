"""What the commands of the tables have in common: rows that are trained once and found again, means over seeds, files
that say how they were made."""

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path

from accelerate.state import AcceleratorState

from frugalvit.training.data import SUBSET
from frugalvit.training.files import write_json
from frugalvit.training.loop import versions


ROOT = Path(__file__).resolve().parents[1]
# A SparseFormer's focusing stage for images of 32 pixels, small enough for many runs.
STUDENT = "stem_channels=32,num_mixed_points=16,mixing_hidden_size=64,num_focusing_iterations=2"


def add_run_arguments(parser: argparse.ArgumentParser, runs_dir: str):
    """Which seeds, and where runs and results go."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--runs_dir", type=Path, default=Path(runs_dir), help="default: %(default)s")
    parser.add_argument("--results_dir", type=Path, default=ROOT / "results", help="default: results/")


def add_data_arguments(parser: argparse.ArgumentParser):
    """What `data_arguments` reads."""
    parser.add_argument("--dataset", nargs="+", default=[SUBSET], help=f"as in training (default: {SUBSET})")
    parser.add_argument("--eval_dataset", nargs="+", help="where --dataset is given as files")
    parser.add_argument("--class_names", nargs="+", help="where the data set has none")


def data_arguments(arguments) -> list[str]:
    """The data as a recipe's command line names it."""
    data = ["--dataset", *arguments.dataset]
    for option in ("eval_dataset", "class_names"):
        if getattr(arguments, option):
            data += [f"--{option}", *getattr(arguments, option)]
    return data


def folder_name(row: str, seed: int) -> str:
    """The folder of a row's run with a seed."""
    return f"{''.join(c if c.isalnum() else '-' for c in row)}-seed{seed}"


def run_recipe(recipe, folder: Path, argv: list[str]) -> dict:
    """Results of a recipe's run in a folder, now or, if it was the same command, before."""
    argv, file = ["--output_dir", str(folder), *argv], folder / "results.json"
    if file.is_file():
        results = json.loads(file.read_text(encoding="utf-8"))
        if results["command"] == shlex.join([*recipe.PROG.split(), *argv]):
            return results
    recipe.main(argv)
    # The next run may want another precision.
    AcceleratorState._reset_state(True)
    return json.loads(file.read_text(encoding="utf-8"))


def last_accuracies(results: list[dict]) -> dict:
    """Mean, standard deviation and values over seeds, of the last epoch: choosing an epoch by its accuracy would be
    choosing on test images."""
    accuracies = [result["epochs"][-1]["accuracy"] for result in results]
    return {"accuracy": statistics.mean(accuracies), "spread": spread(accuracies), "accuracies": accuracies}


def spread(values: list[float]) -> float | None:
    """Standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else None


def write_table(path: Path, settings: dict, rows: list[dict], **more):
    """Write a table's rows with the command that made them."""
    write_json(
        path,
        {
            "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            "settings": settings,
            **({"spread": "standard deviation over seeds"} if "seeds" in settings else {}),
            "versions": versions(),
            **more,
            "rows": rows,
        },
    )
