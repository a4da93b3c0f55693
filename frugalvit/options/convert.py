"""Options of `frugalvit convert`."""

import argparse

from ..common.choices import CONVERTED_VARIANTS
from ..common.command_line import CommandParser


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit convert",
        description="`frugalvit convert`: checkpoints of reference implementations to hub repositories.",
    )
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    showlab = sources.add_parser(
        "showlab",
        help="SparseFormer checkpoints of its authors",
        description="Convert a checkpoint of github.com/showlab/sparseformer to a folder that `from_pretrained` "
        "loads. Widths, tokens, points and blocks follow from the checkpoint, the rest from the variant.",
    )
    showlab.add_argument("checkpoint", metavar="CHECKPOINT", help=".pth or .safetensors file")
    # Once the output was an argument by its place.
    showlab.add_argument("earlier_output", nargs="?", help=argparse.SUPPRESS)
    showlab.add_argument("--output", metavar="OUT", help="folder to write; must not exist or be empty")
    showlab.add_argument(
        "--variant", choices=CONVERTED_VARIANTS, help="default: the one whose names the checkpoint has"
    )
    showlab.add_argument(
        "--iterations", type=int, help="executions of the focusing layer (default: stage embeddings, or the variant's)"
    )
    showlab.add_argument(
        "--image-size",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help="side, or height and width, of the images that the model will get (default: 224): resized to 8/7 of the "
        "side and cropped, or resized straight to height and width",
    )
    showlab.add_argument("--overwrite", action="store_true", help="replace the model folder OUT")
    parser.set_defaults(error=showlab.error)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    arguments = make_parser().parse_args(argv)
    arguments.output = arguments.output or arguments.earlier_output
    if arguments.output is None:
        arguments.error("the following arguments are required: --output")
    if (size := arguments.image_size) is not None:
        if len(size) > 2:
            arguments.error(f"argument --image-size: got {len(size)} numbers, expected a side or height and width")
        arguments.image_size = size[0] if len(size) == 1 else tuple(size)
    return arguments
