"""Options of `frugalvit compare`."""

import argparse

from ..common.command_line import CommandParser, add_device_argument, add_trust_argument, positive
from .shared import add_dataset_arguments, add_reading_arguments, add_training_images_arguments


# `contenders.BASELINES`, and keys of `compare.PRECISIONS`.
BASELINES = ("lower-resolution", "random-patches")
PRECISIONS = ("float32", "bf16")
QUICK = {"limit": 200, "train_limit": 1000, "rounds": 3, "precision": ["float32"], "memory": False}


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit compare",
        description="Set students beside their teacher, and beside what the teacher can do for nothing: look at "
        "smaller images, or at some of its patches. Measures accuracy, of models without a classifier that of nearest "
        "neighbors and of a linear probe, how near embeddings are to the teacher's, multiply-accumulates, images a "
        "second, in which the models take turns, and memory. Writes compare.json, compare.md and compare.png.",
    )
    parser.add_argument("teacher", metavar="TEACHER", help="folder or hub id of a vision transformer")
    parser.add_argument("students", nargs="*", metavar="STUDENT", help="folders or hub ids of SparseFormers or others")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a student that was made by the method NAME; those of one NAME are a line of the picture (repeatable)",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder for table and picture")
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=[*BASELINES, "none"],
        default=list(BASELINES),
        help="what else the teacher can do (default: both)",
    )
    parser.add_argument(
        "--resolutions",
        nargs="+",
        type=positive,
        metavar="PIXELS",
        help="of these, of the shorter side; of random patches, as many (default: with about 1/4, 2/5 and 9/16 of the "
        "patches)",
    )
    add_dataset_arguments(parser)
    add_training_images_arguments(parser)
    parser.add_argument(
        "--features", action="store_true", help="measure neighbors and a linear probe, also of classifiers"
    )
    parser.add_argument("--limit", type=positive, help="judge by so many images, chosen at random")
    parser.add_argument("--train-limit", type=positive, help="learn from so many images, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of all that is chosen at random (default: %(default)s)")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        help="in which speed is measured (default: float32 and, where the device is fast at it, bf16)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first look: as --limit 200 --train-limit 1000 --rounds 3 --precision float32 --no-memory, of which "
        "others that are given go before",
    )
    parser.add_argument(
        "--rounds", type=positive, default=10, help="timed passes of each model (default: %(default)s)"
    )
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory, in a process each"
    )
    parser.add_argument("--batch-size", type=positive, default=64, help="default: %(default)s")
    add_reading_arguments(parser)
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.quick:
        parser.set_defaults(**QUICK)
        arguments = parser.parse_args(argv)
    if "none" in arguments.baselines and len(arguments.baselines) > 1:
        parser.error(f"argument --baselines: got {' '.join(arguments.baselines)}, expected none alone or others")
    return arguments
