"""`frugalvit evaluate`: the scores of a model on a task."""

import importlib
import json
from pathlib import Path

from .command_line import (
    CommandParser,
    add_dataset_arguments,
    add_device_map_argument,
    add_limit_argument,
    add_loop_arguments,
    add_part_arguments,
    add_reading_arguments,
    add_training_images_arguments,
    positive,
)
from .training.choices import DTYPES, OPEN_CLIP
from .training.files import check_file_path, write_json
from .training.text import format_table


FOLDER = "folder or hub id (@revision, too)"
EMBEDS = f"SparseFormer, vision transformer or CLIP: {FOLDER}, or {OPEN_CLIP}MODEL:PRETRAINED"
CLIP = f"CLIP or SigLIP: {FOLDER}"
IMAGES = [add_dataset_arguments, add_limit_argument, add_reading_arguments]
# Name: kind of model, default of --batch-size, options, description.
TASKS = {
    "classification": (
        FOLDER,
        64,
        [*IMAGES, "--num-tokens", "--attack", "--occlude", "--class-names"],
        "Top-1 and top-5 accuracy of an image classifier.",
    ),
    "knn": (
        EMBEDS,
        64,
        [*IMAGES, add_training_images_arguments, "--neighbors"],
        "Accuracy of nearest neighbors by a model's features. The most similar labeled images vote, by cosine, with "
        "weights exp(cosine / 0.07) (DINO, Caron et al. 2021).",
    ),
    "segmentation": (
        FOLDER,
        16,
        [
            add_part_arguments,
            add_limit_argument,
            add_reading_arguments,
            "--dataset",
            "--mask-column",
            "--ignored-labels",
            "--reduce-labels",
            "--window",
        ],
        "Mean IoU, mean accuracy and pixel accuracy of a semantic segmentation model.",
    ),
    "zero-shot": (
        CLIP,
        64,
        [*IMAGES, "--vision-model", "--classes", "--templates"],
        "Zero-shot accuracy of a CLIP. Images are compared with the mean embedding of sentences about each class "
        "(Radford et al. 2021).",
    ),
    "retrieval": (
        CLIP,
        64,
        [
            add_limit_argument,
            add_reading_arguments,
            "--vision-model",
            "--dataset",
            "--image-folder",
            "--split",
        ],
        "Recall of images by text and of text by images. In percent at 1, 5 and 10, among all images and captions.",
    ),
    "scienceqa": (
        FOLDER,
        8,
        [add_limit_argument, add_device_map_argument, "--dataset", "--split", "--dtype"],
        "Accuracy of a LLaVA on ScienceQA's multiple-choice questions. An answer that names no option is wrong.",
    ),
}
OPTIONS = {
    "--attack": {"choices": ["fgsm"], "help": "fast gradient sign method, step 1/255 of the color range"},
    "--class-names": {"nargs": "+", "metavar": "NAME", "help": "names or numbers in the model of the labels 0, 1, …"},
    "--classes": {"metavar": "FILE", "help": "class names, one a line, or `imagenet` (default: the data set's)"},
    "--dataset": {
        "nargs": "+",
        "required": True,
        "help": "hub id, parquet files, folder with images/ and annotations/, or, of captions, Karpathy's .json",
    },
    "--dtype": {"choices": DTYPES, "default": "float32", "help": "of the weights (default: %(default)s)"},
    "--ignored-labels": {"type": int, "nargs": "+", "default": [], "help": "labels to ignore besides 255"},
    "--image-folder": {"type": Path, "required": True, "help": "folder of the images"},
    "--mask-column": {"help": "where there are several"},
    "--neighbors": {"type": positive, "default": 20, "help": "number of voters (default: %(default)s)"},
    "--num-tokens": {"type": int, "help": "latent tokens of a SparseFormer (default: the model's own)"},
    "--occlude": {"choices": ["center"], "help": "hide the middle quarter of each image"},
    "--reduce-labels": {"action": "store_true", "help": "ignore 0 and count from 1"},
    "--split": {"help": "default: test"},
    "--templates": {"default": "imagenet", "help": "file of sentences with {}, one a line, or `imagenet` (default)"},
    "--vision-model": {"metavar": "FOLDER", "help": "SparseFormer in the place of the CLIP's image side"},
    "--window": {"type": positive, "metavar": "PIXELS", "help": "side of a sliding window"},
}


def make_parser() -> CommandParser:
    parser = CommandParser(prog="frugalvit evaluate", description="Evaluate a model on a task.")
    tasks = parser.add_subparsers(title="tasks", dest="task", required=True, metavar="TASK")
    for name, (model, batch_size, options, description) in TASKS.items():
        task = tasks.add_parser(name, help=description.partition(".")[0], description=description)
        task.add_argument("--model", required=True, metavar="FOLDER", help=model)
        for option in options:
            if callable(option):
                option(task)
            else:
                task.add_argument(option, **OPTIONS[option])
        add_loop_arguments(task, batch_size)
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    if arguments.output:
        check_file_path(arguments.output)
    task = importlib.import_module(f"frugalvit.evaluation.{arguments.task.replace('-', '_')}")
    results = {"task": arguments.task, **task.run(arguments)}
    if arguments.output:
        write_json(arguments.output, results)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print(format_table([{"measure": name, "value": value} for name, value in results.items()]))
