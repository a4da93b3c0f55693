"""Choices for a student with an inherited start: a ViT-S/14's on Caltech-101, one change a row.

    python benchmarks/caltech101_choices.py --train TRAIN --test TEST

The teacher is that of `benchmarks/caltech101.py teacher`, in the same --runs-dir. Each student sees one crop of each
training image, without labels, as those of `caltech101.py students` do, and differs from "as it is" in one thing:
rates, the blocks that are tuned or left out, what is aligned, points of a patch, and parts of `trial_students.py` that
the model family does not have. Runs are found again. Writes caltech101_choices.json.
"""

import argparse
import json
from contextlib import ExitStack

from caltech101 import BATCH_SIZE, CANVAS, averages, measure_student, shared_arguments
from trial_students import TRIALS, load_trial, resampled_patches, students_with

from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images
from frugalvit.common.files import write_json
from frugalvit.common.tables import format_table
from frugalvit.training import bootstrap
from shared import add_run_arguments, folder_name, run_training, write_table


# Arguments of `frugalvit bootstrap` besides the shared ones. The rate of inherited weights is relative to 1e-3.
CHOICES = {
    "as it is": [],
    "rate 5e-6": ["--inherited-learning-rate", "0.005"],
    "rate 5e-5": ["--inherited-learning-rate", "0.05"],
    "rate 1e-4": ["--inherited-learning-rate", "0.1"],
    "first 4 blocks tuned": ["--tune", "4"],
    "first 8 blocks tuned": ["--tune", "8"],
    **{f"first {count} left out": ["--truncate", str(count)] for count in (1, 2, 3, 4)},
    "tokens aligned": ["--token-loss-weight", "1"],
    "distributions aligned": ["--loss", "kl"],
    "7 x 7 points": ["--config-overrides", "patch_size=7"],
    "28 x 28 points": ["--config-overrides", "patch_size=28"],
    **{trial: [] for trial in TRIALS},
}
# What is tried with how many tokens.
STUDENTS = {
    16: [*CHOICES],
    36: [
        *("as it is", "rate 5e-5", "first 1 left out", "first 2 left out", "first 3 left out", "first 4 left out"),
        *("one context token", "four context tokens", "second look, half as large, moving"),
    ],
}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="parquet file or folder of training images")
    parser.add_argument("--test", required=True, help="of test images")
    parser.add_argument("--tokens", type=int, nargs="+", choices=STUDENTS, default=[*STUDENTS], help="default: all")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="bf16", help="default: %(default)s")
    add_run_arguments(parser, "runs/caltech101")
    arguments = parser.parse_args()

    rows = []
    for tokens in arguments.tokens:
        for choice in STUDENTS[tokens]:
            runs = [train_student(arguments, choice, tokens, seed) for seed in arguments.seeds]
            about = {"student": choice, "tokens": tokens, "macs": runs[0]["macs"]}
            rows.append(about | averages(runs, ("cosine",)) | {"seeds": len(runs)})
            print(json.dumps(rows[-1]), flush=True)
    print(format_table(rows))
    settings = {"batch_size": BATCH_SIZE, "canvas": CANVAS, "mixed_precision": arguments.mixed_precision}
    write_table(
        arguments.results_dir / "caltech101_choices.json",
        settings | {"tokens": arguments.tokens, "seeds": arguments.seeds},
        rows,
        data="Caltech-101, 6,982 training and 1,695 test images, 224 px, one view each",
    )


def train_student(arguments, choice: str, tokens: int, seed: int) -> dict:
    """Train and measure a student, now or before."""
    folder = arguments.runs_dir / f"choice-{tokens}tokens-{folder_name(choice, seed)}"
    measured_file = folder / "choice.json"
    if measured_file.is_file():
        return json.loads(measured_file.read_text(encoding="utf-8"))
    steps = len(load_images([arguments.train], "train")) // BATCH_SIZE
    argv = [
        *shared_arguments(arguments, arguments.runs_dir / "teacher", arguments.train, seed),
        *("--focusing", "inherited", "--epochs", "1", "--steps-per-epoch", str(steps)),
        *("--num-latent-tokens", str(tokens), "--view-epochs", "2", *CHOICES[choice]),
    ]
    if choice != "tokens aligned":
        # It keeps no tokens.
        cache = arguments.runs_dir / f"cache-seed{seed}"
        argv += ["--teacher-cache", str(cache)]
    trial = choice if choice in TRIALS else None
    with ExitStack() as changed:
        changed.enter_context(students_with(trial))
        if choice == "7 x 7 points":
            changed.enter_context(resampled_patches())
        run_training(bootstrap, folder, argv)
    (measured,) = measure_student(arguments, *load_trial(folder, trial))
    write_json(measured_file, measured)
    return measured


if __name__ == "__main__":
    main()
