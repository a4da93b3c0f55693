"""`frugalvit evaluate`: the scores of a model on a task."""

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .common.choices import DTYPES, OPEN_CLIP
from .common.command_line import (
    CommandParser,
    add_device_map_argument,
    add_exact_argument,
    add_image_arguments,
    add_limit_argument,
    add_loop_arguments,
    add_part_arguments,
    add_reading_arguments,
    add_token_arguments,
    add_training_images_arguments,
    positive,
)
from .common.files import check_file_path, write_json
from .common.tables import format_table


FOLDER = "folder or hub id (@revision, too)"
EMBEDS = f"SparseFormer, vision transformer or CLIP: {FOLDER}, or {OPEN_CLIP}MODEL:PRETRAINED"
CLIP = f"CLIP or SigLIP: {FOLDER}"
IMAGE_SIDE = {"metavar": "FOLDER", "help": "SparseFormer in the place of the CLIP's image side"}


@dataclass
class Task:
    """A task of the command: what it measures, the kind of model, shared options, and options of its own."""

    description: str
    model: str
    shared: list[Callable]
    options: dict[str, dict] = field(default_factory=dict)


TASKS = {
    "classification": Task(
        "Top-1 and top-5 accuracy of an image classifier.",
        FOLDER,
        [add_token_arguments, add_image_arguments],
        {
            "--protocol": {
                "choices": ["labels", "imagenet-v2", "imagenet-real", "imagenet-a"],
                "default": "labels",
                "help": "right answers: the data set's labels (default), or those of one of ImageNet's relatives",
            },
            "--attack": {"choices": ["fgsm"], "help": "fast gradient sign method, step 1/255 of the color range"},
            "--occlude": {"choices": ["center"], "help": "hide the middle quarter of each image"},
            "--class-names": {
                "nargs": "+",
                "metavar": "NAME",
                "help": "names or numbers in the model of the labels 0, 1, …",
            },
        },
    ),
    "knn": Task(
        "Accuracy of nearest neighbors by a model's features. The most similar labeled images vote, by cosine, with "
        "weights exp(cosine / 0.07) (DINO, Caron et al. 2021).",
        EMBEDS,
        [add_image_arguments, add_training_images_arguments],
        {"--neighbors": {"type": positive, "default": 20, "help": "number of voters (default: %(default)s)"}},
    ),
    "linear": Task(
        "Accuracy of a linear classifier on a model's frozen features. Logistic regression on standardized features, "
        "whose penalty is chosen on a fifth of the training images.",
        EMBEDS,
        [add_image_arguments, add_training_images_arguments],
    ),
    "segmentation": Task(
        "Mean IoU, mean accuracy and pixel accuracy of a semantic segmentation model.",
        FOLDER,
        [add_part_arguments, add_limit_argument, add_reading_arguments, partial(add_loop_arguments, batch_size=16)],
        {
            "--dataset": {
                "nargs": "+",
                "required": True,
                "help": "datasets hub id, parquet files or folder of them, or a folder with images/ and annotations/",
            },
            "--mask-column": {"help": "where there are several"},
            "--ignored-labels": {"type": int, "nargs": "+", "default": [], "help": "labels to ignore besides 255"},
            "--reduce-labels": {"action": "store_true", "help": "ignore 0 and count from 1"},
            "--window": {"type": positive, "metavar": "PIXELS", "help": "side of a sliding window"},
        },
    ),
    "zero-shot": Task(
        "Zero-shot accuracy of a CLIP. Images are compared with the mean embedding of sentences about each class "
        "(Radford et al. 2021).",
        CLIP,
        [add_image_arguments],
        {
            "--vision-model": IMAGE_SIDE,
            "--classes": {"metavar": "FILE", "help": "class names, one a line, or `imagenet`"},
            "--templates": {
                "metavar": "FILE",
                "default": "imagenet",
                "help": "sentences with {} for the name, one a line (default: the 80 for ImageNet)",
            },
        },
    ),
    "retrieval": Task(
        "Recall of images by text and of text by images. In percent at 1, 5 and 10, among all images and captions.",
        CLIP,
        [add_limit_argument, add_reading_arguments, add_exact_argument, add_loop_arguments],
        {
            "--vision-model": IMAGE_SIDE,
            "--dataset": {"required": True, "metavar": "FILE", "help": "Karpathy's .json of COCO or Flickr30k"},
            "--image-folder": {"type": Path, "required": True, "help": "folder of the images"},
            "--split": {"default": "test", "help": "default: test"},
        },
    ),
    "scienceqa": Task(
        "Accuracy of a LLaVA on ScienceQA's multiple-choice questions. An answer that names no option is wrong.",
        FOLDER,
        [add_limit_argument, add_device_map_argument, partial(add_loop_arguments, batch_size=8)],
        {
            "--dataset": {
                "nargs": "+",
                "required": True,
                "help": "hub id (derek-thomas/ScienceQA) or parquet files with image, question, choices, answer, hint",
            },
            "--split": {"help": "default: test; files given directly are one part, train"},
            "--dtype": {"choices": DTYPES, "default": "float32", "help": "of the weights (default: %(default)s)"},
        },
    ),
}


def make_parser() -> CommandParser:
    parser = CommandParser(prog="frugalvit evaluate", description="Evaluate a model on a task.")
    tasks = parser.add_subparsers(title="tasks", dest="task", required=True, metavar="TASK")
    for name, task in TASKS.items():
        subparser = tasks.add_parser(name, help=task.description.partition(".")[0], description=task.description)
        subparser.add_argument("--model", required=True, metavar="FOLDER", help=task.model)
        for option, settings in task.options.items():
            subparser.add_argument(option, **settings)
        for add_arguments in task.shared:
            add_arguments(subparser)
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    if arguments.output:
        check_file_path(arguments.output)
    task = importlib.import_module(f"frugalvit.evaluation.{arguments.task.replace('-', '_')}")
    results = {"task": arguments.task, **task.run(arguments)}
    for name, value in results.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"The {name} of {arguments.model} is {value}; its weights are damaged or it diverged.")
    if arguments.output:
        write_json(arguments.output, results)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print(format_table([{"measure": name, "value": value} for name, value in results.items()]))
