"""Options of `frugalvit info`."""

import argparse

from ..common.command_line import CommandParser


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit info",
        description="List tokens (latent and [CLS]), image size, parameters and multiply-accumulates for one image, "
        "without and with attention's two products; of a CLIP or a LLaVA, those of its image side. Nothing is "
        "downloaded or computed for the variants. Of the weights in folders, shapes are looked at, not values.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="NAME|FOLDER",
        help="variants of the papers, shipped models, folders or hub ids, owner/name@revision too "
        "(default: all variants and shipped models)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
