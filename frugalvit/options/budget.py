"""Options of `frugalvit budget`."""

import argparse
import functools
import math
import re

from ..common.choices import DTYPES
from ..common.command_line import CommandParser, add_device_argument, positive
from .shared import add_model_argument, require_model


SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MULTIPLES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def quantity(text: str, units: dict[str, float], example: str) -> float:
    """Read a number with its unit, as a multiple of the unit that counts 1.

    Args:
        text (`str`): For example `"20ms"`.
        units (`dict[str, float]`): Factor of each unit; that of `""` is for numbers without one.
        example (`str`): Text that was expected, for the message.

    Raises:
        argparse.ArgumentTypeError: if it is no positive number with one of the units.
    """
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?) ?([a-zA-Z]*)", text.strip())
    try:
        value = float(found[1]) * units[found[2]]
    except (TypeError, ValueError, KeyError):
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number like {example}")
    return value


seconds = functools.partial(quantity, units=SECONDS, example="20ms, 0.5s or 800us, with its unit")
number = functools.partial(quantity, units=MULTIPLES, example="200, 350M or 1.5G (k, M, G, T)")


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit budget",
        description="Measure a model on this machine with each number of tokens that it was trained for, beside its "
        "teacher, in passes that take turns, and name the largest number within a budget. Of a CLIP or a LLaVA, the "
        "image side is measured. A model for one number of tokens has one row.",
    )
    add_model_argument(parser, "a model that ships, a folder or a hub id")
    parser.add_argument(
        "--teacher",
        metavar="TEACHER",
        help="folder or hub id of a vision transformer to measure besides (default: the one that the model's training "
        "or card names, if it is on this machine)",
    )
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument("--latency", type=seconds, metavar="TIME", help="at most so long for a batch: 20ms, 0.5s")
    limits.add_argument("--images-per-second", type=number, metavar="NUMBER", help="at least so many: 200, 1k")
    limits.add_argument(
        "--macs", type=number, metavar="NUMBER", help="at most so many multiply-accumulates an image: 1G, 350M"
    )
    parser.add_argument("--batch-size", type=positive, default=1, help="images at a time (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    add_device_argument(parser)
    parser.add_argument(
        "--rounds", type=positive, default=20, help="timed passes with each number of tokens (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--output", metavar="FOLDER", help="new folder for the model, which uses the number that was found"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FOLDER if it is a model folder")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    require_model(parser, arguments)
    if arguments.output and (arguments.latency, arguments.images_per_second, arguments.macs) == (None, None, None):
        parser.error("argument --output: needs a budget, --latency, --images-per-second or --macs")
    return arguments
