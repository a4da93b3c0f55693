"""Options of `frugalvit features`."""

import argparse

from ..common.command_line import CommandParser, add_device_argument, add_trust_argument, positive


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit features",
        description="Draw the intermediate features of image classifiers: a row for each image and model, a panel for "
        "each layer, which shows how long the feature vectors are at each position. Of a ViT that was trained beside "
        "an agent, both are drawn. With --dense, write the feature maps of a SparseFormer, at its teacher's grid "
        "whatever the number of tokens, and draw their principal components as colors, beside the teacher's.",
    )
    parser.add_argument(
        "places",
        nargs="+",
        metavar="MODEL",
        help="model folders or hub ids (@revision, too); with --dense, images instead, folders or parquet files",
    )
    parser.add_argument("--names", nargs="+", help="of the models (default: their folders')")
    parser.add_argument("--image", nargs="+", metavar="FILE", help="images, folders or parquet files")
    parser.add_argument("--limit", type=int, default=4, help="look at the first so many images (default: 4)")
    parser.add_argument("--layers", nargs="+", type=int, help="from 1 (default: all; with --dense, the model's)")
    parser.add_argument("--picture", metavar="FILE", help="draw into this .png, .pdf or .svg")
    dense = parser.add_argument_group("feature maps")
    dense.add_argument("--dense", action="store_true", help="of one SparseFormer, --model")
    dense.add_argument("--model", help="its folder or hub id, of whatever it was saved as")
    dense.add_argument("--teacher", metavar="MODEL", help="compare with the maps of this vision transformer")
    dense.add_argument("--image-column", metavar="NAME", help="of parquet files with several")
    dense.add_argument("--num-tokens", type=positive, help="latent tokens (default: the model's)")
    dense.add_argument(
        "--size",
        nargs=2,
        type=positive,
        metavar=("HEIGHT", "WIDTH"),
        help="look at images of so many pixels (default: as the model's image processor makes them)",
    )
    dense.add_argument("--output", metavar="FILE", help="write the maps of the model into this .safetensors")
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    needed = ["model"] if arguments.dense else ["image", "picture"]
    if missing := [f"--{name}" for name in needed if getattr(arguments, name) is None]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    if arguments.dense and arguments.output is None and arguments.picture is None:
        parser.error("--dense writes --output, maps, or --picture, or both; give one of them")
    unread = (
        ["image", "names"] if arguments.dense else ["model", "teacher", "image_column", "num_tokens", "size", "output"]
    )
    if given := [f"--{name.replace('_', '-')}" for name in unread if getattr(arguments, name) is not None]:
        parser.error(f"{given[0]} is not read {'with' if arguments.dense else 'without'} --dense")
    return arguments
