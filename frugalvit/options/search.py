"""Options of `frugalvit search`."""

import argparse

from ..common.command_line import CommandParser, add_device_argument, add_trust_argument, positive


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit search",
        description="Find images of an index that `frugalvit index` made. All of them are compared, by faiss where it "
        "is installed.",
    )
    parser.add_argument("index", metavar="INDEX", help="what `frugalvit index` wrote")
    parser.add_argument("query", metavar="WORDS|IMAGE", help="words, or a file with an image")
    parser.add_argument("--top", type=positive, default=12, help="images (default: %(default)s)")
    parser.add_argument("--picture", metavar="FILE", help="draw them into this .png, .pdf or .svg")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
