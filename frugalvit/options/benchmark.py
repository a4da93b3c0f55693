"""Options of `frugalvit benchmark`."""

import argparse

from ..common.choices import DTYPES
from ..common.command_line import CommandParser, add_device_argument, add_trust_argument, positive


ROUNDS = "timed passes of each model, of smaller batches in proportion more (default: %(default)s)"


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit benchmark",
        description="Measure images a second of models in one run, in which they take turns, and their "
        "multiply-accumulates a second as a share of those of a large product of matrices. Of a CLIP or a LLaVA, the "
        "image side is measured. Weights are random: nothing is downloaded for the papers' variants.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        default=["vit-base", "augreg-base-49-224"],
        metavar="NAME|FOLDER",
        help="names that `frugalvit info` lists, folders, exported ones too, hub ids, vit-base and vit-large of "
        "Transformers (patches of 16, 224 pixels), timm:NAME (default: vit-base augreg-base-49-224); ratios are to "
        "the first",
    )
    parser.add_argument(
        "--batch-size", type=positive, nargs="+", default=[1, 8], help="images at a time (default: 1 8)"
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="default: float32")
    parser.add_argument("--compile", action="store_true", help="measure each model compiled by torch.compile, too")
    parser.add_argument("--rounds", type=positive, default=10, help=ROUNDS)
    add_device_argument(parser)
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", help="write the rows, with versions and device, into this .json")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
