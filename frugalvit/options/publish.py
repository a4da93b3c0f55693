"""Options of `frugalvit publish`."""

import argparse

from ..common.command_line import CommandParser


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit publish",
        description="Upload a trained model to the hub, in half the bytes, after everything about it has been looked "
        "at.",
    )
    parser.add_argument("model", metavar="FOLDER", help="a model, for example the output folder of a training")
    parser.add_argument("repo_id", metavar="REPO_ID", nargs="?", help="hub repository to upload to, in one commit")
    parser.add_argument("--output", metavar="OUT", help="also keep what is uploaded in this folder")
    parser.add_argument(
        "--card", metavar="FILE", help="model card to publish with it (default: the one in FOLDER, or a short one)"
    )
    parser.add_argument(
        "--results",
        metavar="RESULTS",
        help="folder of JSON files: --card is a Jinja template that takes its numbers from there",
    )
    parser.add_argument("--dry-run", action="store_true", help="look at everything, upload nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a model folder")
    parser.add_argument("--license", help="of the model, for its card, for example apache-2.0")
    parser.add_argument(
        "--no-code",
        action="store_true",
        help="leave the code out of OUT, which then loads where frugalvit is imported, as the folders of checkpoints/",
    )
    parser.add_argument(
        "--space",
        action="store_true",
        help="of an image classifier: publish a Space, the page of `frugalvit demo` with this model",
    )
    parser.add_argument("--private", action="store_true", help="make a new hub repository private")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
