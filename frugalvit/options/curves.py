"""Options of `frugalvit curves`."""

import argparse

from ..common.command_line import CommandParser


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit curves",
        description="Losses and scores of training runs over epochs, as a table of the last epochs and as a picture.",
    )
    parser.add_argument("runs", nargs="+", metavar="FOLDER", help="--output of runs, finished or not")
    parser.add_argument("--names", nargs="+", help="of the runs (default: their folders')")
    parser.add_argument("--picture", metavar="FILE", help="draw into this .png, .pdf or .svg")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
