"""`frugalvit evaluate`: the scores of a model on a task."""

import argparse
import importlib
import json
import math
from fractions import Fraction
from pathlib import Path

from .common.choices import DTYPES, OPEN_CLIP, QUANTIZATIONS
from .common.command_line import (
    CommandParser,
    add_device_map_argument,
    add_exact_argument,
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


# How answers about ImageNet's relatives are judged, see `evaluation.imagenet`.
PROTOCOLS = {
    "labels": "the data set's labels",
    "imagenet-v2": "ImageNet-V2, whose folders are named 0 to 999",
    "imagenet-real": "ImageNet's validation images with the ReaL labels; images without any do not count",
    "imagenet-a": "ImageNet-A, whose 200 classes alone are compared",
}


def make_parser() -> CommandParser:
    parser = CommandParser(prog="frugalvit evaluate", description="How good a model is on a task.")
    tasks = parser.add_subparsers(title="tasks", dest="task", required=True, metavar="TASK")
    for add in (
        add_classification,
        add_knn,
        add_linear,
        add_segmentation,
        add_zero_shot,
        add_retrieval,
        add_scienceqa,
    ):
        add(tasks)
    return parser


def add_classification(tasks) -> None:
    parser = tasks.add_parser(
        "classification",
        help="top-1 and top-5 accuracy of an image classifier",
        description="Top-1 and top-5 accuracy of an image classifier, with the model's own image processor.",
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="model folder or hub id (@revision, too)")
    parser.add_argument(
        "--protocol",
        choices=list(PROTOCOLS),
        default="labels",
        help="; ".join(f"{name}: {text}" for name, text in PROTOCOLS.items()) + " (default: %(default)s)",
    )
    parser.add_argument("--attack", choices=["fgsm"], help="attack the images by the fast gradient sign method")
    parser.add_argument(
        "--eps", type=share, default=1 / 255, help="step of the attack, of colors in 0..1 (default: 1/255)"
    )
    parser.add_argument("--occlude", choices=["center"], help="hide the middle of the images")
    parser.add_argument("--ratio", type=share, default=0.25, help="hidden share of the area (default: %(default)s)")
    add_token_arguments(parser)
    add_image_arguments(parser)
    parser.add_argument(
        "--class-names",
        nargs="+",
        metavar="NAME",
        help="names of the labels 0, 1, …, as the model has them, or its numbers, where the data set has others",
    )


def share(text: str) -> float:
    """A number above 0 and up to 1, also as a fraction, for argparse."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number or a fraction such as 1/255") from error
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected more than 0 and at most 1")
    return value


def add_feature_arguments(parser: argparse.ArgumentParser):
    """Add options for the model, the images to learn from and those to judge by."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="FOLDER",
        help="folder or hub id (@revision, too) of a SparseFormer, a vision transformer with or without classifier or "
        "a CLIP, or open_clip:MODEL:PRETRAINED",
    )
    add_image_arguments(parser)
    add_training_images_arguments(parser)


def add_two_towers_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for a CLIP and for the model that may take the place of its image side."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="FOLDER",
        help=f"folder or hub id (@revision, too) of a CLIP or SigLIP, {OPEN_CLIP}MODEL:PRETRAINED, or exported CLIP",
    )
    parser.add_argument(
        "--vision-model",
        metavar="FOLDER",
        help="SparseFormer to take the place of its image side, as `frugalvit bootstrap` wrote it",
    )


def add_knn(tasks) -> None:
    parser = tasks.add_parser(
        "knn",
        help="accuracy of the nearest neighbors of a model's features",
        description="Top-1 and top-5 accuracy of nearest neighbors: an image is of the class for which the most "
        "similar labeled images vote, by cosine, with weights exp(cosine / 0.07) (DINO, Caron et al. 2021). Nothing "
        "is trained. Features are what the model's classifier reads, or its pooled token.",
    )
    add_feature_arguments(parser)
    parser.add_argument("--neighbors", type=positive, default=20, help="that vote (default: %(default)s)")


def add_linear(tasks) -> None:
    parser = tasks.add_parser(
        "linear",
        help="accuracy of a linear classifier on a model's frozen features",
        description="Top-1 and top-5 accuracy of a linear probe: logistic regression on standardized features of the "
        "frozen model, whose penalty a fifth of the training images chooses. Features are what the model's classifier "
        "reads, or its pooled token.",
    )
    add_feature_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="of what is held back (default: %(default)s)")


def add_segmentation(tasks) -> None:
    parser = tasks.add_parser(
        "segmentation",
        help="mean IoU, mean accuracy and pixel accuracy of a semantic segmentation model",
        description="Mean IoU, mean accuracy and pixel accuracy at the resolution of the masks, of images resized to "
        "the model's size as a whole or, with --window, seen through a window that slides over them.",
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="model folder or hub id (@revision, too)")
    parser.add_argument(
        "--dataset",
        nargs="+",
        required=True,
        help="datasets hub id, parquet files or folder of them, or a folder with images/ and annotations/",
    )
    add_part_arguments(parser)
    parser.add_argument("--mask-column", help="where there are several")
    parser.add_argument("--ignored-labels", type=int, nargs="+", default=[], help="that do not count, besides 255")
    parser.add_argument(
        "--reduce-labels",
        action="store_true",
        help="0 does not count, 1 is first (default: as the model's image processor says)",
    )
    parser.add_argument(
        "--window", type=positive, nargs="+", help="pixels of a window, one number or height and width, that slides"
    )
    add_limit_argument(parser)
    add_skip_argument(parser)
    add_loop_arguments(parser, batch_size=16)


def add_zero_shot(tasks) -> None:
    parser = tasks.add_parser(
        "zero-shot",
        help="accuracy of a CLIP that has only read the names of the classes",
        description="Top-1 and top-5 accuracy of a CLIP that compares images with sentences about each class, with "
        "the mean of their embeddings (Radford et al. 2021).",
    )
    add_two_towers_arguments(parser)
    parser.add_argument(
        "--classes",
        metavar="FILE",
        help="names of the labels 0, 1, …, one a line, or `imagenet` for the 1,000 names that open_clip ships "
        "(default: the data set's own)",
    )
    parser.add_argument(
        "--templates",
        metavar="FILE",
        default="imagenet",
        help="sentences with {} for the name, one a line, or `imagenet` for the 80 that open_clip ships (default), or "
        "`simple` for its 7",
    )
    add_image_arguments(parser)


def add_retrieval(tasks) -> None:
    parser = tasks.add_parser(
        "retrieval",
        help="recall of images by text and of text by images",
        description="Recall at 1, 5 and 10, in percent, of the captions of each image among all captions (one of an "
        "image's captions suffices), and of the image of each caption among all images.",
    )
    add_two_towers_arguments(parser)
    parser.add_argument(
        "--dataset",
        nargs="+",
        required=True,
        help="Karpathy's .json of COCO or Flickr30k, or parquet files with a column of images and one of captions, a "
        "list of texts",
    )
    parser.add_argument("--image-folder", type=Path, help="where the images of a .json lie")
    parser.add_argument("--split", default="test", help="of a .json (default: test)")
    parser.add_argument("--caption-column", default="captions", help="default: captions")
    add_limit_argument(parser)
    add_worker_argument(parser)
    add_exact_argument(parser)
    add_loop_arguments(parser)


def add_scienceqa(tasks) -> None:
    parser = tasks.add_parser(
        "scienceqa",
        help="accuracy of a LLaVA on multiple-choice questions",
        description="Accuracy of a LLaVA on ScienceQA, in all and of questions with and without an image. An answer "
        "that names no option counts as wrong.",
    )
    parser.add_argument(
        "--model", required=True, metavar="FOLDER", help="folder or hub id (@revision, too) of a LLaVA"
    )
    parser.add_argument(
        "--dataset",
        nargs="+",
        required=True,
        help="hub id (derek-thomas/ScienceQA) or parquet files with the columns image, question, choices, answer and, "
        "if there is context, hint",
    )
    parser.add_argument("--split", help="default: test; files given directly are one part, train")
    parser.add_argument(
        "--prompt",
        default=SCIENCEQA_PROMPT,
        help="with {image} and {question} (default: that of LLaVA 1.5: %(default)r)",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=8, help="default: 8")
    parser.add_argument("--limit", type=positive, help="take only the first questions")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: %(default)s)")
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="hold the language model's weights so (pip install 'frugalvit[quantize]')",
    )
    add_device_map_argument(parser)
    add_loop_arguments(parser, batch_size=8)


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
