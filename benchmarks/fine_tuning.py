"""Compare the accuracies of a fine-tuned teacher and its fine-tuned student, which has 64, 36 or 16 tokens.

    python benchmarks/fine_tuning.py --clothing clothing-train.parquet clothing-test.parquet \\
        --caltech caltech101-train.parquet caltech101-test.parquet --results-dir results

The student is bootstrapped on Caltech-101 without the last `NEW_CLASSES` classes. Student and teacher then get a new
classifier. Transformers' `Trainer` fine-tunes them on ten classes of clothing, or on the last `NEW_CLASSES` classes of
Caltech-101. The methods of fine-tuning (`METHODS`) are:

- "all weights": All weights have the same learning rate.
- "all weights, head at 1e-3": The learning rate of the classifier is 1e-3.
- "LoRA": Only the classifier and LoRA matrices of rank 8 (`peft`) for queries and values are trained.
- "head": Only the classifier is trained.

Results are written to fine_tuning.json. If this file contains a row, the row is not measured again.
"""

import argparse
import functools
import itertools

import datasets
import torch
from caltech101 import of_classes
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from frugalvit import bootstrap
from frugalvit.training.data import class_names, load_images, sample
from shared import add_results_argument, make_parser, read_rows, write_table


NEW_CLASSES = 20
TWO_RATES = "all weights, head at 1e-3"
METHODS = ("all weights", TWO_RATES, "LoRA", "head")
# Columns that identify a row.
KEYS = ("data", "images", "learning_rate", "method", "model")


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("--clothing", nargs=2, metavar=("TRAIN", "TEST"), required=True, help="parquet files")
    parser.add_argument("--caltech", nargs=2, metavar=("TRAIN", "TEST"), required=True, help="parquet files")
    parser.add_argument("--teacher", default="checkpoints/caltech101-vit", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 36, 16], help="default: 64 36 16")
    parser.add_argument(
        "--images", type=int, nargs="+", default=[100], help="number of images to fine-tune on (default: 100)"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all")
    parser.add_argument("--test-images", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--bootstrap-images", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="default: Trainer's, %(default)s")
    parser.add_argument("--runs-dir", default="runs/fine_tuning", help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args(argv)
    path = arguments.results_dir / "fine_tuning.json"
    rows = read_rows(path)
    measured = {tuple(row[key] for key in KEYS) for row in rows}
    settings = {"test_images": arguments.test_images, "bootstrap_images": arguments.bootstrap_images, "seed": 42}
    for count, data, method, tokens in itertools.product(
        arguments.images, ("clothing", "caltech"), arguments.methods, (None, *arguments.tokens)
    ):
        model = "teacher" if tokens is None else f"student, {tokens} tokens"
        row = dict(zip(KEYS, (data, count, arguments.learning_rate, method, model), strict=True))
        if tuple(row.values()) not in measured:
            rows.append(row | fine_tune(arguments, data, count, method, tokens))
            write_table(path, settings, rows)


def fine_tune(arguments: argparse.Namespace, data: str, count: int, method: str, tokens: int | None) -> dict:
    """Fine-tune the teacher, or the student if `tokens` is given. Return the accuracy and its standard error."""
    train, test = (read(arguments, data, part) for part in range(2))
    classes = sorted(train.unique("label"))
    train, test = sample(train, count, seed=0), sample(test, arguments.test_images, seed=0)
    folder = arguments.teacher if tokens is None else student_folder(arguments)
    torch.manual_seed(42)
    model = AutoModelForImageClassification.from_pretrained(
        folder, num_labels=len(classes), ignore_mismatched_sizes=True, dtype=torch.float32
    )
    if tokens is not None:
        model.set_num_tokens(tokens)
    args = TrainingArguments(
        arguments.runs_dir,
        learning_rate=arguments.learning_rate,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    processor = AutoImageProcessor.from_pretrained(folder)
    train, test = (each.with_transform(functools.partial(prepare, processor, classes)) for each in (train, test))
    optimizer = None
    if method == TWO_RATES:
        groups = [{"params": model.base_model.parameters()}, {"params": model.classifier.parameters(), "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, weight_decay=args.weight_decay)
    trainer = Trainer(choose_weights(model, method), args, train_dataset=train, optimizers=(optimizer, None))
    trainer.train()
    prediction = trainer.predict(test)
    accuracy = (prediction.predictions.argmax(-1) == prediction.label_ids).mean().item()
    return {"accuracy": accuracy, "error": (accuracy * (1 - accuracy) / len(test)) ** 0.5}


def choose_weights(model: PreTrainedModel, method: str) -> torch.nn.Module:
    """For "LoRA", add LoRA matrices. For "head", freeze all weights except those of the classifier."""
    if method == "LoRA":
        return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]))
    if method == "head":
        model.requires_grad_(False)
        model.classifier.requires_grad_(True)
    return model


def student_folder(arguments: argparse.Namespace) -> str:
    """Bootstrap the student, or reuse the finished run. Return the folder of the student."""
    folder = f"{arguments.runs_dir}/student"
    images = load_images(arguments.caltech[0])
    seen = of_classes(images, range(len(class_names(images)))[:-NEW_CLASSES])
    seen = sample(seen, arguments.bootstrap_images, seed=0)
    bootstrap(arguments.teacher, seen.remove_columns("label"), sorted(arguments.tokens), folder, num_train_epochs=1)
    return folder


def read(arguments: argparse.Namespace, data: str, part: int) -> datasets.Dataset:
    """Load training images (part 0) or test images (part 1). From Caltech-101, load only the last
    `NEW_CLASSES` classes."""
    if data == "clothing":
        return load_images(arguments.clothing[part])
    images = load_images(arguments.caltech[part])
    return of_classes(images, range(len(class_names(images)))[-NEW_CLASSES:])


def prepare(processor, classes: list[int], batch: dict) -> dict:
    """Convert a batch of images and labels to model inputs. Labels become indices into `classes`."""
    labels = [classes.index(label) for label in batch["label"]]
    images = [datasets.Image().decode_example(record).convert("RGB") for record in batch["image"]]
    return {"pixel_values": processor(images, return_tensors="pt")["pixel_values"], "labels": labels}


if __name__ == "__main__":
    main()
