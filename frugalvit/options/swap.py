"""Options of `frugalvit swap`."""

import argparse

from ..common.choices import DTYPES, QUANTIZATIONS
from ..common.command_line import CommandParser, add_device_map_argument, add_skip_argument, positive


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit swap",
        description="Write a LLaVA, a PaliGemma or another model that reads images and texts whose vision tower is a "
        "SparseFormer that was bootstrapped from the tower it replaces (`frugalvit bootstrap --teacher LLAVA`), with "
        "a processor that inserts as many image tokens. The language model stays as it is.",
    )
    parser.add_argument("--model", required=True, metavar="LLAVA", help="folder or hub id (@revision, too)")
    parser.add_argument("--vision-model", required=True, metavar="FOLDER", help="what `frugalvit bootstrap` wrote")
    parser.add_argument("--output", required=True, metavar="OUT", help="folder to write")
    parser.add_argument("--num-tokens", type=int, metavar="COUNT", help="latent tokens (default: the tower's own)")
    parser.add_argument(
        "--image-grid",
        type=positive,
        metavar="ROWS",
        help="rows, and columns, of the grid of a Gemma 3 or a LLaVA-OneVision (default: as before): fewer make fewer "
        "image tokens",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the weights that are written (default: %(default)s)"
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="write the language model's weights so, which needs bitsandbytes wherever it is loaded (pip install "
        "'frugalvit[quantize]')",
    )
    parser.add_argument(
        "--dataset",
        nargs="+",
        metavar="DATA",
        help="let the projector read channels with the mean and the standard deviation that they had, measured on "
        "these images (id, folder or parquet files; without labels, nothing is trained)",
    )
    parser.add_argument("--images", type=positive, default=1000, help="how many of --dataset (default: %(default)s)")
    add_skip_argument(parser)
    add_device_map_argument(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a model folder")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
