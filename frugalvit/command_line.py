"""Parsers and options that commands share. Options have hyphens; underscores are taken, too."""

import argparse
import re
import sys

from .training.choices import DEVICE_MAPS, SUBSET


_OPTION = re.compile(r"--[A-Za-z][\w-]*")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help texts with every default said once."""

    def _get_help_string(self, action: argparse.Action) -> str:
        says = "default" in action.help.lower() or action.default in (None, False, "", [], argparse.SUPPRESS)
        return action.help if says else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """The parser of commands that train nothing, whose errors are one line. Underscores in options are hyphens."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")

    def parse_known_args(self, args=None, namespace=None):
        words = []
        for text in sys.argv[1:] if args is None else args:
            name, equals, value = str(text).partition("=")
            words.append(f"{name.replace('_', '-')}{equals}{value}" if _OPTION.fullmatch(name) else text)
        return super().parse_known_args(words, namespace)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def probability(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 1")
    return value


def add_device_argument(parser: argparse.ArgumentParser):
    parser.add_argument("--device", help="cpu, cuda, mps (default: an accelerator if there is one)")


def add_device_map_argument(parser: argparse.ArgumentParser):
    parser.add_argument("--device-map", choices=DEVICE_MAPS, help="share the model among devices, as Accelerate does")


def add_trust_argument(parser: argparse.ArgumentParser):
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a model")


def add_skip_argument(parser: argparse.ArgumentParser):
    parser.add_argument("--skip-corrupt", action="store_true", help="leave out what cannot be read, and say so")


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-tokens", type=int, metavar="COUNT", help="latent tokens of a SparseFormer, without [CLS]"
    )
    parser.add_argument(
        "--confidence", type=probability, metavar="SCORE", help="few tokens first, more for images of a lower score"
    )


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    images = f"datasets hub id, image folder, parquet files or folder of them, or {SUBSET} (default)"
    parser.add_argument("--dataset", nargs="+", default=[SUBSET], help=images)
    add_part_arguments(parser)
    parser.add_argument("--label-column", help="where types do not tell")


def add_part_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-config", help="configuration of a hub data set with several")
    parser.add_argument("--split", help="default: test, else validation, else train")
    parser.add_argument("--image-column", help="where names and types do not tell")


def add_limit_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=positive, help="take only the first images")


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    add_skip_argument(parser)
    parser.add_argument("--num-workers", type=int, default=0, help="threads that decode images (default: one a CPU)")


def add_loop_arguments(parser: argparse.ArgumentParser, batch_size: int = 64) -> None:
    parser.add_argument("--batch-size", type=positive, default=batch_size, help="default: %(default)s")
    parser.add_argument("--output", metavar="FILE", help="write the results into this .json, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_device_argument(parser)
    add_trust_argument(parser)


def add_training_images_arguments(parser: argparse.ArgumentParser):
    """Add the options that `read_labeled_parts` reads besides those of `add_dataset_arguments`."""
    parser.add_argument("--train-split", default="train", help="to learn from (default: %(default)s)")
    parser.add_argument("--eval-dataset", nargs="+", help="to judge by (default: --dataset)")
