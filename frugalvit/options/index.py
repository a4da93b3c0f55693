"""Options of `frugalvit index`."""

import argparse

from ..common.command_line import (
    CommandParser,
    add_device_argument,
    add_exact_argument,
    add_skip_argument,
    add_trust_argument,
    add_worker_argument,
    positive,
)
from .shared import add_two_towers_arguments


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit index",
        description="Embed a folder of images with the image side of a CLIP or SigLIP. A command that was killed goes "
        "on where it stopped; images that came or changed since are added when it runs again.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="images, in folders of folders, too")
    add_two_towers_arguments(parser)
    parser.add_argument("--output", metavar="INDEX", required=True, help="folder of embeddings and file names")
    parser.add_argument("--batch-size", type=positive, default=64, help="default: %(default)s")
    add_worker_argument(parser)
    add_exact_argument(parser)
    add_skip_argument(parser)
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
