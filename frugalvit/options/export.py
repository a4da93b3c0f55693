"""Options of `frugalvit export`."""

import argparse

from ..common.choices import EXPORT_FORMATS, EXPORT_PRECISIONS
from ..common.command_line import CommandParser, positive
from .shared import add_dataset_arguments, add_model_argument, probability, require_model


# Of --num-tokens.
ALL = "all"


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit export",
        description="Write a model for another runtime: a folder with programs, preprocessing, labels and a card "
        "whose lines run where neither PyTorch nor frugalvit is installed. Before that, its outputs are compared with "
        "the original's on images that calibration has not seen. predict, evaluate, benchmark and demo take folders "
        "of this kind.",
    )
    add_model_argument(parser, "model folder or hub id, owner/name@revision too")
    parser.add_argument("--output", metavar="OUT", required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--format", choices=EXPORT_FORMATS, default="onnx", help="runtime (default: %(default)s)")
    parser.add_argument(
        "--precision",
        choices=EXPORT_PRECISIONS,
        default="float32",
        help="of products; docs/export.md has what each format takes (default: %(default)s)",
    )
    parser.add_argument(
        "--num-tokens",
        nargs="+",
        type=count_or_all,
        metavar="COUNT",
        help="latent tokens of a SparseFormer; of several numbers that the model is made for, or "
        f"`{ALL}` of them, one program, which each call gives the number (default: the model's own; of --page all)",
    )
    parser.add_argument(
        "--any-size",
        action="store_true",
        help="the program takes images of any height and width, of a SparseFormer whose tokens are no cells of trees",
    )
    parser.add_argument(
        "--output-rois", action="store_true", help="with the RoIs and sampling points of a SparseFormer"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="write a page into OUT, too, that labels images in the browser (index.html; onnxruntime-web comes from "
        "npm, once)",
    )
    parser.add_argument(
        "--onnxruntime-web", metavar="FOLDER", help="of --page: the npm package, if it is here already"
    )
    images = parser.add_argument_group("images to compare on")
    add_dataset_arguments(images)
    images.add_argument("--limit", type=positive, default=300, help="so many, at random (default: %(default)s)")
    images.add_argument("--calibration-data", nargs="+", metavar="DATA", help="of int8 (default: --dataset's train)")
    images.add_argument("--calibration-images", type=positive, default=300, help="default: %(default)s")
    images.add_argument(
        "--quick",
        action="store_true",
        help="a first try: as --limit 50 --calibration-images 100, unless these are given",
    )
    images.add_argument("--seed", type=int, default=0, help="of the choice of images (default: %(default)s)")
    parser.add_argument(
        "--float-layers",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of int8: modules whose layers stay in float32, by name or pattern (classifier, '*.mlp'); for openvino, "
        "what reads the pixels does anyway",
    )
    gate = parser.add_argument_group("what the exported model has to reach")
    gate.add_argument("--min-cosine", type=probability, help="mean cosine of outputs (default: 0.99; int8 0.97)")
    gate.add_argument("--min-agreement", type=probability, help="share of same labels (default: 0.99; int8 0.97)")
    gate.add_argument("--force", action="store_true", help="write it whatever was measured")
    parser.add_argument("--license", help="of the model, for its card (default: that of the original's card)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a model folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def count_or_all(text: str) -> int | str:
    """A number from 1 on, or `ALL`, for argparse."""
    return text if text == ALL else positive(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.quick:
        parser.set_defaults(limit=50, calibration_images=100)
        arguments = parser.parse_args(argv)
    require_model(parser, arguments)
    return arguments
