"""`frugalvit evaluate`: the scores of a model on a task."""

import argparse
import importlib
import json
import math
from pathlib import Path

from .common.choices import DTYPES, OPEN_CLIP, QUANTIZATIONS
from .common.command_line import (
    CommandParser,
    add_device_map_argument,
    add_image_arguments,
    add_limit_argument,
    add_loop_arguments,
    add_part_arguments,
    add_skip_argument,
    add_token_arguments,
    add_training_images_arguments,
    add_worker_argument,
    positive,
)
from .common.files import check_file_path, write_json
from .common.prompts import SCIENCEQA_PROMPT
from .common.tables import format_table


# How answers on ImageNet's relatives are judged, see `evaluation.imagenet`.
PROTOCOLS = {
    "labels": "the data set's labels",
    "imagenet-v2": "ImageNet-V2, with folders named 0 to 999",
    "imagenet-real": "ImageNet's validation images with the ReaL labels",
    "imagenet-a": "ImageNet-A, comparing its 200 classes alone",
}


def add_classification_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--protocol",
        choices=list(PROTOCOLS),
        default="labels",
        help="; ".join(f"{name}: {text}" for name, text in PROTOCOLS.items()) + " (default: %(default)s)",
    )
    parser.add_argument("--attack", choices=["fgsm"], help="fast gradient sign method, step 1/255 of the color range")
    parser.add_argument("--occlude", choices=["center"], help="hide the middle quarter of each image")
    add_token_arguments(parser)
    add_image_arguments(parser)
    parser.add_argument(
        "--class-names", nargs="+", metavar="NAME", help="names or numbers in the model of the labels 0, 1, …"
    )


def add_knn_arguments(parser: argparse.ArgumentParser) -> None:
    add_image_arguments(parser)
    add_training_images_arguments(parser)
    parser.add_argument("--neighbors", type=positive, default=20, help="number of voters (default: %(default)s)")


def add_linear_arguments(parser: argparse.ArgumentParser) -> None:
    add_image_arguments(parser)
    add_training_images_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="chooses the held-back images (default: %(default)s)")


def add_segmentation_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataset",
        nargs="+",
        required=True,
        help="datasets hub id, parquet files or folder of them, or a folder with images/ and annotations/",
    )
    add_part_arguments(parser)
    parser.add_argument("--mask-column", help="where there are several")
    parser.add_argument("--ignored-labels", type=int, nargs="+", default=[], help="labels to ignore besides 255")
    parser.add_argument("--reduce-labels", action="store_true", help="ignore 0 and count from 1")
    parser.add_argument("--window", type=positive, nargs="+", help="side, or height and width, of a sliding window")
    add_limit_argument(parser)
    add_skip_argument(parser)
    add_loop_arguments(parser, batch_size=16)


def add_vision_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vision-model", metavar="FOLDER", help="SparseFormer in the place of the CLIP's image side")


def add_zero_shot_arguments(parser: argparse.ArgumentParser) -> None:
    add_vision_model_argument(parser)
    parser.add_argument("--classes", metavar="FILE", help="class names, one a line, or `imagenet`")
    parser.add_argument(
        "--templates",
        metavar="FILE",
        default="imagenet",
        help="sentences with {} for the name, one a line, or open_clip's `imagenet` (80, default) or `simple` (7)",
    )
    add_image_arguments(parser)


def add_retrieval_arguments(parser: argparse.ArgumentParser) -> None:
    add_vision_model_argument(parser)
    parser.add_argument("--dataset", required=True, metavar="FILE", help="Karpathy's .json of COCO or Flickr30k")
    parser.add_argument("--image-folder", type=Path, required=True, help="folder of the images")
    parser.add_argument("--split", default="test", help="default: test")
    add_limit_argument(parser)
    add_worker_argument(parser)
    add_loop_arguments(parser)


def add_scienceqa_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataset",
        nargs="+",
        required=True,
        help="hub id (derek-thomas/ScienceQA) or parquet files with image, question, choices, answer and hint",
    )
    parser.add_argument("--split", help="default: test; files given directly are one part, train")
    parser.add_argument("--prompt", default=SCIENCEQA_PROMPT, help="default: LLaVA 1.5's, with {image} and {question}")
    parser.add_argument("--limit", type=positive, help="take only the first questions")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: %(default)s)")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="the language model (needs frugalvit[quantize])")
    add_device_map_argument(parser)
    add_loop_arguments(parser, batch_size=8)


FOLDER = "folder or hub id (@revision, too)"
EMBEDS = f"SparseFormer, vision transformer or CLIP: {FOLDER}, or {OPEN_CLIP}MODEL:PRETRAINED"
CLIP = f"CLIP or SigLIP: {FOLDER}, {OPEN_CLIP}MODEL:PRETRAINED, or exported folder"
# Name: function that adds options, help for --model, description.
TASKS = {
    "classification": (add_classification_arguments, FOLDER, "Top-1 and top-5 accuracy of an image classifier."),
    "knn": (
        add_knn_arguments,
        EMBEDS,
        "Accuracy of nearest neighbors by a model's features. The most similar labeled images vote, by cosine, with "
        "weights exp(cosine / 0.07) (DINO, Caron et al. 2021).",
    ),
    "linear": (
        add_linear_arguments,
        EMBEDS,
        "Accuracy of a linear classifier on a model's frozen features. Logistic regression on standardized features, "
        "whose penalty is chosen on a fifth of the training images.",
    ),
    "segmentation": (
        add_segmentation_arguments,
        FOLDER,
        "Mean IoU, mean accuracy and pixel accuracy of a semantic segmentation model.",
    ),
    "zero-shot": (
        add_zero_shot_arguments,
        CLIP,
        "Zero-shot accuracy of a CLIP. Images are compared with the mean embedding of sentences about each class "
        "(Radford et al. 2021).",
    ),
    "retrieval": (
        add_retrieval_arguments,
        CLIP,
        "Recall of images by text and of text by images. In percent at 1, 5 and 10, among all images and captions.",
    ),
    "scienceqa": (
        add_scienceqa_arguments,
        FOLDER,
        "Accuracy of a LLaVA on ScienceQA's multiple-choice questions. An answer that names no option is wrong.",
    ),
}


def make_parser() -> CommandParser:
    parser = CommandParser(prog="frugalvit evaluate", description="Evaluate a model on a task.")
    tasks = parser.add_subparsers(title="tasks", dest="task", required=True, metavar="TASK")
    for name, (add_arguments, model, description) in TASKS.items():
        task = tasks.add_parser(name, help=description.partition(".")[0], description=description)
        task.add_argument("--model", required=True, metavar="FOLDER", help=model)
        add_arguments(task)
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
