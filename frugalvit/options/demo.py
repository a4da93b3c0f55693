"""Options of `frugalvit demo`."""

import argparse

from ..common.command_line import CommandParser, add_device_argument, add_trust_argument


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit demo",
        description="Serve a page on this machine: choose a model and an image, see labels, the RoIs of tokens at "
        "every step, sampling points, features, feature maps and attention.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folders or hub ids (@revision, too) of image classifiers and SparseFormer backbones (default: the "
        "classifiers that ship)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: this machine alone)")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
