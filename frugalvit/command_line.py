"""Shared command-line options. Each command defines a dataclass of options, which `CommandParser` parses."""

import argparse
import inspect
from dataclasses import dataclass
from typing import TypeVar

from .training.arguments import NOT_NEGATIVE, POSITIVE, ArgumentParser, CheckedArguments, DatasetArguments, argument


AnyOptions = TypeVar("AnyOptions")


class CommandParser(ArgumentParser):
    """A parser for a command's dataclass of options. The dataclass's docstring is the command's description. A field
    with `positional` in its metadata is a positional argument. A boolean field is a switch without a value."""

    def __init__(self, options: type, prog: str):
        super().__init__([options], prog, takes_config=False, description=inspect.getdoc(options))

    def add_argument(self, *names: str, positional: bool = False, **settings):
        if positional:
            names = [names[0].removeprefix("--")]
            if not settings.pop("required", False):
                settings["nargs"] = "*" if "nargs" in settings else "?"
        if settings.get("const") is True:
            # If a switch took a value, it would consume the positional argument that follows the switch.
            settings = {name: value for name, value in settings.items() if name not in ("type", "nargs", "const")}
            settings["action"] = "store_true"
            if settings["default"]:
                # The switch is on by default, so the help shows only `--no_…`.
                settings["help"] = argparse.SUPPRESS
        return super().add_argument(*names, **settings)


def read_options(options: type[AnyOptions], prog: str, argv: list[str] | None) -> AnyOptions:
    """Parse a command line into an instance of the command's dataclass."""
    return CommandParser(options, prog).parse(argv)[0]


@dataclass(kw_only=True)
class DeviceOptions(CheckedArguments):
    device: str | None = argument(None, "cpu, cuda, mps, … Default: an accelerator if there is one.")
    trust_remote_code: bool = argument(False, "Run code that comes with a model.")


@dataclass(kw_only=True)
class ReadingOptions(CheckedArguments):
    skip_corrupt: bool = argument(False, "Leave out images that cannot be read, and print their names.")
    num_workers: int = argument(0, "Threads that decode images; 0 for one a CPU.")

    expected = {"num_workers": NOT_NEGATIVE}


@dataclass(kw_only=True)
class SplitOptions(CheckedArguments, DatasetArguments):
    split: str | None = argument(None, "Split, or a slice such as test[:1000]. Default: test, validation or train.")
    limit: int | None = argument(None, "Take only the first images.")

    expected = {"limit": POSITIVE}


@dataclass(kw_only=True)
class TokenOptions(CheckedArguments):
    num_tokens: int | None = argument(None, "Latent tokens of a SparseFormer, without [CLS]. Default: the model's.")

    expected = {"num_tokens": POSITIVE}


@dataclass(kw_only=True)
class OutputOptions(CheckedArguments):
    """Options of a command that writes a model folder."""

    output: str = argument(help="Folder to write; must not exist or be empty.", metavar="FOLDER")
    overwrite: bool = argument(False, "Replace the output folder if it is a model folder.")
