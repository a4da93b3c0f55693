"""One student of CIFAR-10's teacher for any number of tokens, beside one for each number.

    python benchmarks/elastic_cifar10.py students --dataset TRAIN --eval-dataset TEST
    python benchmarks/elastic_cifar10.py compare --dataset TRAIN --eval-dataset TEST --tome CHECKOUT

All go on from the shipped student with the same views and so the same passes of the teacher: students that are cut to
a number of tokens and learn with it alone, one that learns with all numbers, and one whose smaller numbers learn from
the tokens of the largest, too. `students` trains them and writes what the last step of each reached on the test images
(elastic_cifar10.json). `compare` sets those of the first seed, but the last one, beside the teacher with smaller
images and fewer patches and beside ToMe as it is off the shelf, in accuracy over images/s (compare_cifar10.json and
.png). Numbers of tokens leave [CLS] out, as `num_tokens` does.
"""

import statistics

from frugalvit.common.data import load_images
from frugalvit.compare import compare
from frugalvit.contenders import BASELINES, load_students, load_teacher, load_teachers
from frugalvit.training import bootstrap
from shared import (
    ROOT,
    add_data_arguments,
    add_run_arguments,
    data_arguments,
    folder_name,
    make_parser,
    print_rows,
    run_training,
    spread,
    write_comparison,
    write_table,
)
from token_merging import merging


CHECKPOINTS = ROOT / "checkpoints"
# Besides [CLS].
COUNTS = [3, 7, 11, 15]
# Rows: name -> arguments of `frugalvit bootstrap` besides the shared ones.
STUDENTS = {
    **{f"{count} tokens": ["--num-latent-tokens", str(count)] for count in COUNTS},
    "all numbers": ["--elastic-token-counts", *map(str, COUNTS)],
    "all numbers, and from the largest": ["--elastic-token-counts", *map(str, COUNTS), "--elastic-loss-weight", "2"],
}
RESOLUTIONS = [16, 24]
MERGED = [4, 8, 12]


def main():
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=["students", "compare"])
    add_data_arguments(parser)
    parser.add_argument("--epochs", type=int, default=1, help="of all runs (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument("--tome", help="checkout of ToMe, for compare")
    parser.add_argument("--rounds", type=int, default=20, help="timed passes of each model (default: %(default)s)")
    add_run_arguments(parser, "runs/elastic_cifar10")
    arguments = parser.parse_args()
    {"students": train_students, "compare": compare_all}[arguments.what](arguments)


def train_students(arguments):
    """A row for each student and number of tokens."""
    rows = []
    for name, extra in STUDENTS.items():
        last = [train_student(arguments, extra, name, seed)["epochs"][-1] for seed in arguments.seeds]
        elastic = "--elastic-token-counts" in extra
        for count in COUNTS if elastic else [int(extra[-1])]:
            measure = f"accuracy_{count}" if elastic else "accuracy"
            accuracies = [result[measure] for result in last]
            rows.append(
                {
                    "student": name,
                    "num_tokens": count,
                    "accuracy": statistics.mean(accuracies),
                    "spread": spread(accuracies),
                    "accuracies": accuracies,
                    "teacher_accuracy": last[0]["teacher_accuracy"],
                }
            )
    print_rows(rows)
    write_table(
        arguments.results_dir / "elastic_cifar10.json",
        {name: getattr(arguments, name) for name in ("epochs", "learning_rate", "seeds")},
        rows,
        data=f"CIFAR-10, {' '.join(arguments.dataset)}, 32 px",
    )


def train_student(arguments, extra: list[str], name: str, seed: int) -> dict:
    """Results of a run, trained now or before."""
    argv = [
        *("--teacher", str(CHECKPOINTS / "cifar10-vit"), "--student", str(CHECKPOINTS / "cifar10-sparseformer")),
        *(*data_arguments(arguments), "--eval-split", "train" if arguments.eval_dataset else "test", "--no-compare"),
        *("--crop-scale", "0.8", "1", "--token-loss-weight", "2", "--batch-size", "64", "--warmup-epochs", "0.1"),
        *("--epochs", str(arguments.epochs), "--learning-rate", str(arguments.learning_rate), "--seed", str(seed)),
    ]
    return run_training(bootstrap, arguments.runs_dir / folder_name(name, seed), [*argv, *extra])


def compare_all(arguments):
    """Compare the students of the first seed with their teacher, with smaller images and with fewer patches."""
    teacher, seed = str(CHECKPOINTS / "cifar10-vit"), arguments.seeds[0]
    contenders = load_teachers(teacher, "ViT", BASELINES, RESOLUTIONS, seed=seed)
    *names, _ = STUDENTS
    for name in names:
        method = "one student for all numbers" if name == "all numbers" else "one student for each number"
        contenders += load_students(str(arguments.runs_dir / folder_name(name, seed)), method, f"student, {name}")
    if arguments.tome:
        contenders += [merging(*load_teacher(teacher), arguments.tome, merged) for merged in MERGED]
    images = load_images(arguments.eval_dataset or arguments.dataset, "train" if arguments.eval_dataset else "test")
    rows = compare(contenders, images, rounds=arguments.rounds, memory=False)
    write_comparison(arguments, "compare_cifar10", len(images), rows, "CIFAR-10, test images, 32 px")


if __name__ == "__main__":
    main()
