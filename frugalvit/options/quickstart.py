"""Options of `frugalvit quickstart`."""

import argparse

from ..common.command_line import CommandParser


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit quickstart",
        description="Turn a ViT that comes with the repository into a SparseFormer that is several times faster, on "
        "photographs without labels, and set both beside each other on others. It takes a few minutes on two CPU "
        "cores. Writes the student, compare.json, compare.md, compare.png, rois.png and results.json.",
    )
    parser.add_argument(
        "--output", metavar="DIR", default="quickstart", help="folder for all of it (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of order and crops (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the photographs: whether it works, not how well"
    )
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.seed < 0:
        parser.error(f"argument --seed: got {arguments.seed}, expected 0 or more")
    return arguments
