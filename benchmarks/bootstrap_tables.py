"""The tables of the bootstrapping paper at the scale of CIFAR-10: one command a table.

    python benchmarks/bootstrap_tables.py tokens    # table 2: fewer and more tokens, continued, more pixels
    python benchmarks/bootstrap_tables.py losses    # table 3: what to align, what to inherit
    python benchmarks/bootstrap_tables.py blocks    # supplement, table 1: truncate, tune, freeze
    python benchmarks/bootstrap_tables.py choices   # where paper, code and ours differ

Runs are kept under --runs-dir and found again, so that a killed command goes on, and seeds can be run side by side
before all of them are put together. Writes bootstrap_TABLE.json.
"""

import json
from pathlib import Path

from transformers import AutoModelForImageClassification

import frugalvit
from frugalvit.training import bootstrap, train
from shared import (
    STUDENT,
    add_precision_argument,
    add_run_arguments,
    folder_name,
    last_accuracies,
    make_parser,
    print_rows,
    run_training,
    wanted_rows,
    write_table,
)


# Rows: name -> arguments of the command besides the shared ones. "{16 tokens}" is the folder of that row's run.
TABLES = {
    "tokens": {
        "8 tokens": ["--num-latent-tokens", "7"],
        "16 tokens": [],
        "32 tokens": ["--num-latent-tokens", "31"],
        "16 tokens, continued": ["--student", "{16 tokens}"],
        "16 to 32 tokens, continued": ["--student", "{16 tokens}", "--num-latent-tokens", "31"],
        "16 tokens at 48 px, continued": ["--student", "{16 tokens}", "--image-size", "48"],
    },
    "losses": {
        "bootstrapping": [],
        "with classification loss": ["--label-loss-weight", "1"],
        "with classification loss, weight 10": ["--label-loss-weight", "10"],
        "with tokens aligned": ["--token-loss-weight", "2"],  # ours
        "without reusing weights": ["--no-inherit-blocks"],
        "KL distillation, temperature 3": ["--loss", "kl", "--temperature", "3"],
        "KL distillation, temperature 5": ["--loss", "kl", "--temperature", "5"],
        "supervised from scratch": "train",
    },
    "blocks": {
        "default: truncate 2, tune 2 of 4": [],
        "all frozen: truncate 2, tune 0 of 4": ["--tune", "0"],
        "all tunable: truncate 2, tune 4 of 4": ["--tune-all"],
        "without truncation, tune 2 of 6": ["--truncate", "0"],
        "without truncation, tune 4 of 6": ["--truncate", "0", "--tune", "4"],
    },
    "choices": {
        "ours": [],
        "equal initial RoIs left equal, as paper and code do": ["--no-break-ties"],
        "RoIs encoded as the paper prints it, not as its code does": [
            *("--config-overrides", f"{STUDENT},roi_encoding=paper")
        ],
    },
}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--rows", nargs="+", help="names of rows to run (default: all)")
    parser.add_argument("--teacher", default="checkpoints/cifar10-vit", help="default: %(default)s")
    parser.add_argument("--images", type=int, default=4000, help="embedded training images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="of every run but continued ones (default: %(default)s)")
    parser.add_argument("--continued-epochs", type=int, default=2, help="of continued runs (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="default: %(default)s")
    add_precision_argument(parser, "no")
    add_run_arguments(parser, "runs/bootstrap_tables")
    arguments = parser.parse_args()

    teacher_accuracy = run(arguments, "16 tokens", [], arguments.seeds[0])["best"]["teacher_accuracy"]
    rows = []
    for name in wanted_rows(arguments, TABLES[arguments.table]):
        extra = TABLES[arguments.table][name]
        measured = [run(arguments, name, extra, seed) for seed in arguments.seeds]
        folder = folder_of(arguments, name, arguments.seeds[0])
        model = AutoModelForImageClassification.from_pretrained(folder)
        counted = frugalvit.count_macs(model, model.config.image_size)
        rows.append(
            {
                "row": name,
                **(accuracies := last_accuracies(measured)),
                "of_teacher": accuracies["accuracy"] / teacher_accuracy,
                "tokens": model.config.num_latent_tokens + model.config.num_prefix_tokens,
                "parameters": model.num_parameters(),
                "macs_with_attention": counted.macs_with_attention,
            }
        )
        print_rows(rows)

    settings = ("images", "epochs", "continued_epochs", "learning_rate", "seeds", "mixed_precision")
    write_table(
        arguments.results_dir / f"bootstrap_{arguments.table}.json",
        {name: getattr(arguments, name) for name in settings},
        rows,
        data=f"CIFAR-10, {arguments.images} embedded training and 2,000 embedded test images, 32 px",
        teacher={"name": Path(arguments.teacher).name, "accuracy": teacher_accuracy},
    )


def folder_of(arguments, name: str, seed: int) -> Path:
    """The folder of a run; equal runs of different tables share one."""
    if name in ("bootstrapping", "default: truncate 2, tune 2 of 4", "ours"):
        name = "16 tokens"
    return arguments.runs_dir / folder_name(name, seed)


def run(arguments, name: str, extra: list[str] | str, seed: int) -> dict:
    """Results of a row's run with a seed, trained now or before."""
    folder = folder_of(arguments, name, seed)
    shared = [
        *("--train-split", f"train[:{arguments.images}]", "--seed", str(seed)),
        *("--batch-size", "64", "--mixed-precision", arguments.mixed_precision),
    ]
    if extra == "train":
        argv = [*shared, "--epochs", str(arguments.epochs), *scratch_arguments(arguments)]
        return run_training(train, folder, argv)
    continued = "--student" in extra
    extra = [part.replace("{16 tokens}", str(folder_of(arguments, "16 tokens", seed))) for part in extra]
    epochs = arguments.continued_epochs if continued else arguments.epochs
    # The paper continues at a quarter of the first learning rate.
    rate = arguments.learning_rate / 4 if continued else arguments.learning_rate
    argv = [
        *(*shared, "--teacher", arguments.teacher, "--recipe", "paper", "--config-overrides", STUDENT),
        *("--epochs", str(epochs), "--learning-rate", str(rate), *extra),
    ]
    return run_training(bootstrap, folder, argv)


def scratch_arguments(arguments) -> list[str]:
    """The same architecture under supervision from random weights, with the recipe's own augmentation."""
    teacher = AutoModelForImageClassification.from_pretrained(arguments.teacher)
    config = frugalvit.SparseFormerForImageClassification.from_teacher(teacher).config
    fields = ("image_size", "num_latent_tokens", "hidden_size", "num_hidden_layers", "num_attention_heads")
    fields += ("intermediate_size", "focusing_hidden_size", "layer_norm_eps")
    sizes = ",".join(f"{field}={json.dumps(getattr(config, field))}" for field in fields)
    return [
        *("--model-type", "sparseformer", "--config-overrides", f"{sizes},{STUDENT}"),
        *("--warmup-epochs", "1", "--learning-rate", str(arguments.learning_rate)),
        *("--image-std", "0.25", "0.25", "0.25"),
    ]


if __name__ == "__main__":
    main()
