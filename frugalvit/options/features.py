"""Options of `frugalvit features`."""

import argparse

from ..common.command_line import CommandParser, add_device_argument, add_trust_argument


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit features",
        description="Draw the intermediate features of image classifiers: a row for each image and model, a panel for "
        "each layer, which shows how long the feature vectors are at each position. Of a ViT that was trained beside "
        "an agent, both are drawn.",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model folders or hub ids (@revision, too)")
    parser.add_argument("--names", nargs="+", help="of the models (default: their folders')")
    parser.add_argument("--image", nargs="+", required=True, metavar="FILE", help="images, folders or parquet files")
    parser.add_argument("--limit", type=int, default=4, help="draw the first so many images (default: 4)")
    parser.add_argument("--layers", nargs="+", type=int, help="from 1 (default: all)")
    parser.add_argument("--picture", required=True, metavar="FILE", help="draw into this .png, .pdf or .svg")
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
