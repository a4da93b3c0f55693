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


# How answers on ImageNet's relatives are judged, see `evaluation.imagenet`.
PROTOCOLS = {
    "labels": "the data set's labels",
    "imagenet-v2": "ImageNet-V2, with folders named 0 to 999",
    "imagenet-real": "ImageNet's validation images with the ReaL labels",
    "imagenet-a": "ImageNet-A, comparing its 200 classes alone",
}


def make_parser() -> CommandParser:
    parser = CommandParser(prog="frugalvit evaluate", description="Evaluate a model on a task.")
    tasks = parser.add_subparsers(title="tasks", dest="task", required=True, metavar="TASK")

    def add_task(name: str, description: str, model: str = "model folder or hub id (@revision, too)"):
        task = tasks.add_parser(name, help=description.partition(".")[0], description=description)
        task.add_argument("--model", required=True, metavar="FOLDER", help=model)
        return task

    add_classification_arguments(add_task("classification", "Top-1 and top-5 accuracy of an image classifier."))
    embeds = f"SparseFormer, ViT or CLIP (folder or hub id, @revision, too), or {OPEN_CLIP}MODEL:PRETRAINED"
    knn = add_task(
        "knn",
        "Accuracy of nearest neighbors by a model's features. Top-1 and top-5: the most similar labeled images vote, "
        "by cosine, with weights exp(cosine / 0.07) (DINO, Caron et al. 2021).",
        embeds,
    )
    add_image_arguments(knn)
    add_training_images_arguments(knn)
    knn.add_argument("--neighbors", type=positive, default=20, help="number of voters (default: %(default)s)")
    linear = add_task(
        "linear",
        "Accuracy of a linear classifier on a model's frozen features. Top-1 and top-5: logistic regression on "
        "standardized features, whose penalty is chosen on a fifth of the training images.",
        embeds,
    )
    add_image_arguments(linear)
    add_training_images_arguments(linear)
    linear.add_argument("--seed", type=int, default=0, help="chooses the held-back images (default: %(default)s)")
    add_segmentation_arguments(
        add_task("segmentation", "Mean IoU, mean accuracy and pixel accuracy of a semantic segmentation model.")
    )
    clip = f"CLIP or SigLIP (folder or hub id, @revision, too), {OPEN_CLIP}MODEL:PRETRAINED, or exported CLIP"
    zero_shot = add_task(
        "zero-shot",
        "Zero-shot accuracy of a CLIP. Top-1 and top-5: images are compared with the mean embedding of sentences "
        "about each class (Radford et al. 2021).",
        clip,
    )
    add_zero_shot_arguments(zero_shot)
    retrieval = add_task(
        "retrieval",
        "Recall of images by text and of text by images. At 1, 5 and 10, in percent: of the captions of each image "
        "(one suffices) among all captions, and of the image of each caption among all images.",
        clip,
    )
    add_retrieval_arguments(retrieval)
    scienceqa = add_task(
        "scienceqa",
        "Accuracy of a LLaVA on ScienceQA's multiple-choice questions. Of all, of those with and of those without an "
        "image; an answer that names no option counts as wrong.",
    )
    add_scienceqa_arguments(scienceqa)
    return parser


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
    parser.add_argument(
        "--reduce-labels",
        action="store_true",
        help="ignore 0 and count from 1 (default: as in the model's image processor)",
    )
    parser.add_argument(
        "--window", type=positive, nargs="+", help="side, or height and width, of a sliding window in pixels"
    )
    add_limit_argument(parser)
    add_skip_argument(parser)
    add_loop_arguments(parser, batch_size=16)


def add_vision_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vision-model", metavar="FOLDER", help="SparseFormer in the place of the CLIP's image side")


def add_zero_shot_arguments(parser: argparse.ArgumentParser) -> None:
    add_vision_model_argument(parser)
    parser.add_argument(
        "--classes", metavar="FILE", help="names of the labels, one a line, or `imagenet` (default: the data set's)"
    )
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
    add_exact_argument(parser)
    add_loop_arguments(parser)


def add_scienceqa_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataset",
        nargs="+",
        required=True,
        help="hub id (derek-thomas/ScienceQA) or parquet files with image, question, choices, answer and hint",
    )
    parser.add_argument("--split", help="default: test; files given directly are one part, train")
    parser.add_argument(
        "--prompt", default=SCIENCEQA_PROMPT, help="with {image} and {question} (default: LLaVA 1.5's)"
    )
    parser.add_argument("--limit", type=positive, help="take only the first questions")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: %(default)s)")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="the language model (needs frugalvit[quantize])")
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
