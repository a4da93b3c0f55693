"""One spelling of options for all commands: hyphens, `--output` for what is written, `--json` as a switch. Underscores
and earlier spellings are taken, too."""

import argparse
import re
import sys


# How Accelerate shares a model out among devices.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
# Earlier names of options.
EARLIER = {"--output-dir": "--output"}
_OPTION = re.compile(r"--[A-Za-z][\w-]*")


def spelled(option: str) -> str:
    """An option's name as help and messages have it, for example `--batch-size` of `--batch_size`."""
    option = option.replace("_", "-")
    return EARLIER.get(option, option)


class OneSpelling:
    """Mixed into an `argparse.ArgumentParser`: options are listed in one spelling and taken in all."""

    def add_argument(self, *names, **kwargs):
        if names and names[0].startswith("--"):
            kwargs.setdefault("dest", names[0].lstrip("-").replace("-", "_"))
            names = dict.fromkeys(spelled(name) for name in names)
        return super().add_argument(*names, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        args = [_respelled(text, following) for text, following in zip(args, [*args[1:], ""], strict=False)]
        return super().parse_known_args(args, namespace)


class CommandParser(OneSpelling, argparse.ArgumentParser):
    """The parser of commands that are no recipes."""


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def add_device_argument(parser: argparse.ArgumentParser):
    parser.add_argument("--device", help="cpu, cuda, mps (default: an accelerator if there is one)")


def add_device_map_argument(parser: argparse.ArgumentParser):
    parser.add_argument(
        "--device-map",
        choices=DEVICE_MAPS,
        help="share the model out among the accelerators, the memory and the disk, as Accelerate does",
    )


def add_trust_argument(parser: argparse.ArgumentParser):
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a model")


def add_skip_argument(parser: argparse.ArgumentParser):
    parser.add_argument("--skip-corrupt", action="store_true", help="leave out what cannot be read, and say so")


def add_worker_argument(parser: argparse.ArgumentParser):
    parser.add_argument("--num-workers", type=int, default=0, help="processes that decode images")


def _respelled(text: str, following: str) -> str:
    name, equals, value = str(text).partition("=")
    if not _OPTION.fullmatch(name):
        return text
    # `--json` once took a file name.
    if name == "--json" and (value or following).endswith(".json"):
        name = "--output"
    return f"{spelled(name)}{equals}{value}"
