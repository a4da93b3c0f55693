"""Measure tables of *Bootstrapping SparseFormers* (Gao et al.) on CIFAR-10. Each command measures one table.

    python benchmarks/bootstrap_tables.py tokens    # table 2: numbers of tokens, continued training, larger images
    python benchmarks/bootstrap_tables.py losses    # table 3: losses, and training without inherited weights
    python benchmarks/bootstrap_tables.py blocks    # supplement, table 1: truncated, tuned and frozen blocks
    python benchmarks/bootstrap_tables.py choices   # two choices in which frugalvit differs from the paper or its code
    python benchmarks/bootstrap_tables.py elastic --dataset TRAIN --eval-dataset TEST
    python benchmarks/bootstrap_tables.py compare --dataset TRAIN --eval-dataset TEST --tome CHECKOUT

`elastic` continues the training of checkpoints/cifar10-sparseformer. It trains one student for each number of tokens,
and one student for all numbers. `compare` measures these students, the teacher with smaller images or fewer patches,
and ToMe without tuning. Finished runs under --runs-dir are reused, so an interrupted command can be repeated. Seeds
can run in parallel. The output is bootstrap_TABLE.json, elastic_cifar10.json, or compare_cifar10.json and .png.
"""

import json
import statistics
from pathlib import Path

from transformers import AutoModelForImageClassification

import frugalvit
import shared
from frugalvit.baselines import load_students, load_teacher, load_teachers
from frugalvit.compare import compare
from frugalvit.training import bootstrap, train
from frugalvit.training.data import load_images
from token_merging import merging, with_random_patches


# Additional arguments of each row, by table and row name. The argument "{16 tokens}" stands for the folder of the row
# "16 tokens".
TABLES = {
    "tokens": {
        "8 tokens": ["--num_tokens", "7"],
        "16 tokens": [],
        "32 tokens": ["--num_tokens", "31"],
        "16 tokens, continued": ["--student", "{16 tokens}"],
        "16 to 32 tokens, continued": ["--student", "{16 tokens}", "--num_tokens", "31"],
        "16 tokens at 48 px, continued": ["--student", "{16 tokens}", "--image_size", "48"],
    },
    "losses": {
        "bootstrapping": [],
        "with classification loss": ["--label_loss_weight", "1"],
        "with classification loss, weight 10": ["--label_loss_weight", "10"],
        "with tokens aligned": ["--token_loss_weight", "2"],  # This row is not in the paper.
        "without reusing weights": ["--no_inherit_blocks"],
        "KL distillation, temperature 3": ["--loss", "kl", "--temperature", "3"],
        "KL distillation, temperature 5": ["--loss", "kl", "--temperature", "5"],
        "supervised from scratch": "train",
    },
    "blocks": {
        "default: truncate 2, tune 2 of 4": [],
        "all frozen: truncate 2, tune 0 of 4": ["--tune", "0"],
        "all tunable: truncate 2, tune 4 of 4": ["--tune_all"],
        "without truncation, tune 2 of 6": ["--truncate", "0"],
        "without truncation, tune 4 of 6": ["--truncate", "0", "--tune", "4"],
    },
    "choices": {
        "ours": [],
        "equal initial RoIs left equal, as paper and code do": ["--no_break_ties"],
        "RoIs encoded as the paper prints it, not as its code does": [
            "--config_overrides",
            f"{shared.STUDENT},roi_encoding=paper",
        ],
    },
}

# Rows of the table "elastic": the numbers of latent tokens for which a student is trained, by row name.
COUNTS = [3, 7, 11, 15]
ELASTIC = {**{f"{count} tokens": [count] for count in COUNTS}, "all numbers": COUNTS}


def main():
    parser = shared.make_parser(__doc__)
    parser.add_argument("table", choices=[*TABLES, "elastic", "compare"])
    parser.add_argument("--rows", nargs="+", help="names of rows to run (default: all)")
    parser.add_argument("--teacher", default="checkpoints/cifar10-vit", help="default: %(default)s")
    parser.add_argument("--images", type=int, default=4000, help="embedded training images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of new runs (default: 3)")
    parser.add_argument("--continued-epochs", type=int, default=2, help="of continued runs (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="default: %(default)s")
    shared.add_precision_argument(parser, "no")
    shared.add_data_arguments(parser)
    parser.add_argument("--tome", help="checkout of ToMe, for compare")
    parser.add_argument("--rounds", type=int, default=20, help="timed passes of compare (default: %(default)s)")
    shared.add_run_arguments(parser, "runs/bootstrap_tables")
    arguments = parser.parse_args()
    if arguments.table in ("elastic", "compare"):
        {"elastic": train_elastic, "compare": compare_elastic}[arguments.table](arguments)
        return

    teacher_accuracy = run(arguments, "16 tokens", [], arguments.seeds[0])["eval_teacher_accuracy"]
    rows = []
    for name in shared.wanted_rows(arguments, TABLES[arguments.table]):
        extra = TABLES[arguments.table][name]
        measured = [run(arguments, name, extra, seed) for seed in arguments.seeds]
        folder = folder_of(arguments, name, arguments.seeds[0])
        model = AutoModelForImageClassification.from_pretrained(folder)
        counted = frugalvit.count_macs(model, model.config.image_size)
        rows.append(
            {
                "row": name,
                **(accuracies := shared.last_accuracies(measured)),
                "of_teacher": accuracies["accuracy"] / teacher_accuracy,
                "tokens": model.config.num_latent_tokens + model.config.num_prefix_tokens,
                "parameters": model.num_parameters(),
                "macs_with_attention": counted.macs_with_attention,
            }
        )
        settings = ("images", "epochs", "continued_epochs", "learning_rate", "seeds", "mixed_precision")
        shared.write_table(
            arguments.results_dir / f"bootstrap_{arguments.table}.json",
            {name: getattr(arguments, name) for name in settings},
            rows,
            data=f"CIFAR-10, {arguments.images} embedded training and 2,000 embedded test images, 32 px",
            teacher={"name": Path(arguments.teacher).name, "accuracy": teacher_accuracy},
        )


def folder_of(arguments, name: str, seed: int) -> Path:
    """Return the folder of a run. Rows with the default arguments share one folder in all tables."""
    if name in ("bootstrapping", "default: truncate 2, tune 2 of 4", "ours"):
        name = "16 tokens"
    return arguments.runs_dir / shared.folder_name(name, seed)


def run(arguments, name: str, extra: list[str] | str, seed: int) -> dict:
    folder = folder_of(arguments, name, seed)
    common = [
        *("--train_split", f"train[:{arguments.images}]", "--seed", str(seed)),
        *("--per_device_train_batch_size", "64", *shared.precision_arguments(arguments)),
    ]
    if extra == "train":
        return shared.run_training(train, folder, [*common, *scratch_arguments(arguments)])
    continued = "--student" in extra
    extra = [part.replace("{16 tokens}", str(folder_of(arguments, "16 tokens", seed))) for part in extra]
    epochs = arguments.continued_epochs if continued else arguments.epochs
    # As in the paper, continued training has a quarter of the first training's learning rate.
    rate = arguments.learning_rate / 4 if continued else arguments.learning_rate
    warmup = 0 if continued else 1 / epochs
    argv = [
        *(*common, "--teacher", arguments.teacher, "--focusing", "paper", "--config_overrides", shared.STUDENT),
        *("--preset", "paper"),
        *("--num_train_epochs", str(epochs), "--learning_rate", str(rate), "--warmup_steps", str(warmup), *extra),
    ]
    return shared.run_training(bootstrap, folder, argv)


def scratch_arguments(arguments) -> list[str]:
    """Return the arguments for supervised training of the student's architecture from random weights."""
    teacher = AutoModelForImageClassification.from_pretrained(arguments.teacher)
    config = frugalvit.SparseFormerForImageClassification.from_teacher(teacher).config
    fields = ("image_size", "num_latent_tokens", "hidden_size", "num_hidden_layers", "num_attention_heads")
    fields += ("intermediate_size", "focusing_hidden_size", "layer_norm_eps")
    sizes = ",".join(f"{field}={json.dumps(getattr(config, field))}" for field in fields)
    return [
        *("--model_type", "sparseformer", "--config_overrides", f"{sizes},{shared.STUDENT}"),
        *("--num_train_epochs", str(arguments.epochs), "--warmup_steps", str(1 / arguments.epochs)),
        *("--learning_rate", str(arguments.learning_rate), "--image_std", "0.25", "0.25", "0.25"),
    ]


def train_elastic(arguments):
    rows = []
    for name, counts in ELASTIC.items():
        results = [run_elastic(arguments, name, seed) for seed in arguments.seeds]
        for count in counts:
            metric = "eval_accuracy" if len(counts) == 1 else f"eval_accuracy_{count}"
            accuracies = [result[metric] for result in results]
            row = {"student": name, "num_tokens": count, "accuracy": statistics.mean(accuracies)}
            row |= {"spread": shared.spread(accuracies), "accuracies": accuracies}
            rows.append(row | {"teacher_accuracy": results[0]["eval_teacher_accuracy"]})
    data = f"CIFAR-10, {' '.join(arguments.dataset)}, 32 px"
    shared.write_table(arguments.results_dir / "elastic_cifar10.json", {"seeds": arguments.seeds}, rows, data=data)


def run_elastic(arguments, name: str, seed: int) -> dict:
    argv = [
        *("--teacher", arguments.teacher, "--student", "checkpoints/cifar10-sparseformer"),
        *shared.data_arguments(arguments),
        *("--eval_split", "train" if arguments.eval_dataset else "test", "--crop_scale", "0.8", "1"),
        *("--token_loss_weight", "2", "--num_tokens", *map(str, ELASTIC[name])),
        *("--per_device_train_batch_size", "64", "--warmup_steps", "0.1", "--num_train_epochs", "1"),
        *("--learning_rate", "1e-3", "--seed", str(seed)),
    ]
    return shared.run_training(bootstrap, arguments.runs_dir / shared.folder_name(name, seed), argv)


def compare_elastic(arguments):
    """Compare the teacher with the students that were trained with the first seed of `arguments.seeds`. The teacher
    runs on full-size images, on smaller images, on random patches, and with ToMe."""
    seed = arguments.seeds[0]
    baselines = load_teachers(arguments.teacher, "ViT", [16, 24])
    baselines += [with_random_patches(*load_teacher(arguments.teacher), count, seed) for count in (16, 36)]
    for name in ELASTIC:
        method = "one student for all numbers" if name == "all numbers" else "one student for each number"
        baselines += load_students(
            str(arguments.runs_dir / shared.folder_name(name, seed)), method, f"student, {name}"
        )
    if arguments.tome:
        baselines += [merging(*load_teacher(arguments.teacher), arguments.tome, merged) for merged in (4, 8, 12)]
    images = load_images(arguments.eval_dataset or arguments.dataset, "train" if arguments.eval_dataset else "test")
    rows = compare(baselines, images, rounds=arguments.rounds)
    shared.write_comparison(arguments, "compare_cifar10", len(images), rows, "CIFAR-10, test images, 32 px")


if __name__ == "__main__":
    main()
