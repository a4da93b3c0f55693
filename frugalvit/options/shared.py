"""Options that several commands share."""

import argparse

from ..common.choices import CALIBRATED, OPEN_CLIP, SUBSET
from ..common.command_line import (
    CommandParser,
    add_device_argument,
    add_exact_argument,
    add_skip_argument,
    add_trust_argument,
    add_worker_argument,
    positive,
)


def add_model_argument(parser: argparse.ArgumentParser, help: str, metavar: str = "MODEL"):
    """Add the one model of a command, `--model`; `require_model` checks that it is there.

    As in earlier versions, it may be given by its place, too.
    """
    parser.add_argument("--model", metavar=metavar, help=help)
    parser.add_argument("by_place", nargs="?", metavar=metavar, help=argparse.SUPPRESS)


def require_model(parser: CommandParser, arguments: argparse.Namespace):
    """Set `model` of the arguments, by name or by place; end the process with an error if it is missing or given
    twice."""
    by_place = vars(arguments).pop("by_place")
    if arguments.model is None and by_place is None:
        parser.error("the following arguments are required: --model")
    if arguments.model is not None and by_place is not None:
        parser.error(f"there is no argument {by_place!r}; the model is {arguments.model!r}")
    arguments.model = by_place if arguments.model is None else arguments.model


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-tokens",
        type=int,
        metavar="COUNT",
        help="latent tokens of a SparseFormer, [CLS] not counted (default: the model's own)",
    )
    parser.add_argument(
        "--confidence",
        type=probability_or_calibrated,
        help="few tokens first, and those images again with more whose likeliest label has a lower score, 0 to 1, or "
        f"`{CALIBRATED}`, what `frugalvit calibrate` found",
    )


def probability_or_calibrated(text: str) -> float | str:
    """A number from 0 to 1, or `CALIBRATED`, for argparse."""
    return text if text == CALIBRATED else probability(text)


def probability(text: str) -> float:
    """A number from 0 to 1, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 1")
    return value


def add_image_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for `images_to_evaluate`, and for reading the images."""
    add_dataset_arguments(parser)
    add_limit_argument(parser)
    add_reading_arguments(parser)
    add_exact_argument(parser)
    add_loop_arguments(parser)


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options that name the images."""
    parser.add_argument(
        "--dataset",
        nargs="+",
        default=[SUBSET],
        help=f"datasets hub id, image folder, parquet files or folder of them, or {SUBSET} (default)",
    )
    add_part_arguments(parser)
    parser.add_argument("--label-column", help="where types do not tell")


def add_part_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options that name a part of a data set and the images in it."""
    parser.add_argument("--dataset-config", help="configuration of a hub data set with several")
    parser.add_argument("--split", help="default: test, else validation, else train")
    parser.add_argument("--image-column", help="where names and types do not tell")


def add_limit_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=positive, help="take only the first images")


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for reading the images."""
    add_skip_argument(parser)
    add_worker_argument(parser)


def add_loop_arguments(parser: argparse.ArgumentParser, batch_size: int = 64) -> None:
    """Add the options of every task: device, batches and output."""
    parser.add_argument("--batch-size", type=positive, default=batch_size, help="default: %(default)s")
    parser.add_argument("--output", metavar="FILE", help="write the results into this .json, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_device_argument(parser)
    add_trust_argument(parser)


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


def add_training_images_arguments(parser: argparse.ArgumentParser):
    """Add the options that `read_labeled_parts` reads besides those of `add_image_arguments`."""
    parser.add_argument("--train-split", default="train", help="to learn from (default: %(default)s)")
    parser.add_argument(
        "--eval-dataset",
        nargs="+",
        help="to judge by, where it is not a split of --dataset (default: --dataset)",
    )
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="take the images of these classes alone")


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
