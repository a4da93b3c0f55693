"""Options of `frugalvit predict`."""

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
from .shared import add_token_arguments


# Images that are drawn, and those of a picture.
MAX_DRAWN, PAGE = 32, 8


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit predict",
        description="Print the top labels of images; with --rois, draw where the tokens of a SparseFormer look.",
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="image files, folders, patterns such as 'photos/*.jpg', .parquet files",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="model folder, hub id (@revision, too) or name of one that ships (default: cifar10-sparseformer)",
    )
    parser.add_argument("--image-column", help="of parquet files, where names and types do not tell")
    parser.add_argument("--top", type=positive, default=5, help="labels for each image (default: 5)")
    parser.add_argument("--limit", type=positive, help="take only this many images")
    parser.add_argument(
        "--rois",
        metavar="FILE",
        help="draw the input, the token RoIs of the first, third and last focusing step and the last sampling points "
        f"(at most {MAX_DRAWN} images, {PAGE} a picture) into this .png, .pdf or .svg, further ones numbered",
    )
    parser.add_argument("--all-steps", action="store_true", help="draw the RoIs of every focusing step")
    parser.add_argument("--json", action="store_true", help="print JSON, an image after the other")
    add_skip_argument(parser)
    add_worker_argument(parser)
    add_exact_argument(parser)
    add_token_arguments(parser)
    parser.add_argument("--batch-size", type=positive, default=32, help="images at a time (default: 32)")
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.all_steps and not arguments.rois:
        parser.error("argument --all-steps: name the picture with --rois FILE")
    if arguments.rois and arguments.confidence is not None:
        parser.error("argument --rois: images of one picture have the same number of tokens; leave --confidence out")
    return arguments
