"""Options of `frugalvit attention`."""

import argparse

from ..common.choices import INITIALIZATIONS, SUBSET
from ..common.command_line import CommandParser, add_device_argument, add_trust_argument


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit attention",
        description="Attention maps averaged over images, as numbers (entropy, the neighbor that a head attends to "
        "most and how much, stable rank of the activations) and as a picture with the upper left corner enlarged.",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model folders or hub ids (@revision, too)")
    parser.add_argument("--names", nargs="+", help="of the models (default: their folders')")
    parser.add_argument(
        "--initialization",
        nargs="+",
        default=[],
        choices=INITIALIZATIONS,
        help="also the first model's architecture before training, with attention newly drawn in these ways",
    )
    parser.add_argument(
        "--start",
        action="store_true",
        help="also each model as its training began, by the seed and arguments in its folder's run.json",
    )
    parser.add_argument("--layers", nargs="+", type=int, help="from 1 (default: the first, a middle and the last one)")
    parser.add_argument("--heads", nargs="+", type=int, default=[1], help="to draw, from 1 (default: 1)")
    parser.add_argument("--average-heads", action="store_true", help="draw the average of all heads instead")
    parser.add_argument("--picture", metavar="FILE", help="draw into this .png, .pdf or .svg")
    parser.add_argument("--entropy", metavar="FILE", help="draw the heads' entropy by layer into this file")
    parser.add_argument("--output", metavar="FILE", help="write the numbers into this .json")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead of a table")
    parser.add_argument(
        "--image", nargs="+", metavar="FILE", help="images, folders, parquet files instead of --dataset"
    )
    parser.add_argument("--dataset", nargs="+", default=[SUBSET], help=f"as in training (default: {SUBSET})")
    parser.add_argument("--split", default="train", help="default: train")
    parser.add_argument("--images", type=int, default=64, help="images to average over (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the initializations (default: 0)")
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
