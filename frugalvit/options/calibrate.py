"""Options of `frugalvit calibrate`."""

import argparse

from ..common.command_line import (
    CommandParser,
    add_device_argument,
    add_exact_argument,
    add_trust_argument,
    positive,
)
from .shared import add_model_argument, add_part_arguments, add_reading_arguments, require_model


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit calibrate",
        description="Find from which confidence on few tokens suffice: at most so many images are to get another "
        "label than from the most tokens, or from the teacher. Or, with --cosine, with how few tokens all images have "
        "nearly the same embedding. Takes photographs without labels, of the kind that the model is going to see; of "
        "others, nothing is promised. `classify_adaptively()` uses the confidence that was found, and predict and "
        "evaluate do with --confidence calibrated.",
    )
    add_model_argument(parser, "a SparseFormer for several numbers of tokens: one that ships, a folder or a hub id")
    parser.add_argument(
        "--dataset",
        nargs="+",
        required=True,
        help="datasets hub id, image folder, parquet files or folder of them; labels are not looked at",
    )
    add_part_arguments(parser)
    parser.add_argument(
        "--images", type=positive, help="calibrate with so many, chosen at random (default: all that there are)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of this choice (default: %(default)s)")
    parser.add_argument(
        "--disagreement",
        type=between,
        default=0.02,
        help="largest share of images that get another label, or an embedding farther than --cosine (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--cosine",
        type=between,
        help="promise embeddings instead of labels: from this cosine on with that from the most tokens, two agree",
    )
    parser.add_argument("--certainty", type=between, default=0.95, help="of the promise (default: %(default)s)")
    parser.add_argument(
        "--token-counts",
        nargs="+",
        type=positive,
        metavar="COUNT",
        help="looks, one after the other until an image is sure; with --cosine, those to choose from (default: the "
        "fewest tokens, then the most; with --cosine, all that the model is made for)",
    )
    parser.add_argument(
        "--teacher",
        metavar="TEACHER",
        help="folder or hub id of the model whose labels or embeddings count (default: those from the most tokens)",
    )
    add_reading_arguments(parser)
    add_exact_argument(parser)
    parser.add_argument("--batch-size", type=positive, default=64, help="default: %(default)s")
    add_device_argument(parser)
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--output", metavar="FOLDER", help="folder for the model with what was found, in its configuration and card"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace FOLDER, which may be the model's own, if it is a model folder",
    )
    return parser


def between(text: str) -> float:
    """A number above 0 and below 1, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0 and below 1")
    return value


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    require_model(parser, arguments)
    counts = arguments.token_counts
    if counts is not None and (len(counts) < 2 or sorted({*counts}) != counts):
        parser.error(f"argument --token-counts: got {counts}, expected two or more, each larger than the one before")
    return arguments
