"""Dataclasses of arguments that all trainings share, based on `TrainingArguments`, and their command-line parser."""

import argparse
import dataclasses
import difflib
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)
from safetensors import SafetensorError
from transformers import HfArgumentParser, TrainingArguments

from .choices import NO_EVALUATION, SUBSET
from .files import RECIPES, read_text
from .text import first_line, printable


_OPTION = re.compile(r"--[A-Za-z][\w-]*")
# Conditions on an argument's value. A condition consists of a description for messages and a function that checks a
# value.
NOT_NEGATIVE = ("0 or more", lambda value: value >= 0)
POSITIVE = ("1 or more", lambda value: value >= 1)
PIXEL_VALUES = ("class numbers from 0 to 255", lambda values: all(0 <= value <= 255 for value in values))
RANGE = ("two positive numbers, the lower first", lambda value: len(value) == 2 and 0 < value[0] <= value[1])


def argument(default=dataclasses.MISSING, help: str = "", **metadata):
    """Return a dataclass field with a help text. A default list is copied for each instance of the dataclass."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


class CheckedArguments:
    """Base class of dataclasses of arguments whose values are checked.

    Class attributes:
        expected (`dict[str, tuple[str, Callable]]`): Conditions on fields. Conditions on other fields are inherited.
    """

    expected = {}

    def __post_init__(self):
        """Raise a ValueError if a field's value is missing from the field's `choices`, or if the value violates the
        field's condition in `expected`. None is always allowed. `HfArgumentParser` only checks `choices` on the
        command line."""
        if hasattr(super(), "__post_init__"):
            super().__post_init__()
        for each in dataclasses.fields(self):
            choices = each.metadata.get("choices")
            value = getattr(self, each.name)
            values = value if isinstance(value, list) else [value]
            if value is not None and choices and not {*values} <= {*choices}:
                raise ValueError(f"{each.name} is {value!r}, expected one of {', '.join(choices)}.")
        conditions = {}
        for owner in reversed(type(self).__mro__):
            conditions |= vars(owner).get("expected", {})
        for name, (expected, fits) in conditions.items():
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise ValueError(f"{name} is {value!r}, expected {expected}.")


@dataclass
class ImageTrainingArguments(CheckedArguments, TrainingArguments):
    """`TrainingArguments` with defaults for images: evaluate and save after each epoch, and keep the best model."""

    output_dir: str = argument(help="Folder for the trained model, its card and its checkpoints.")
    eval_strategy: str = argument("epoch", "When to evaluate: no, steps or epoch.")
    save_strategy: str = argument("epoch", "When to save a checkpoint: no, steps or epoch.")
    lr_scheduler_type: str = argument("cosine", "Name of a schedule of Transformers.")
    per_device_eval_batch_size: int = argument(64, "Evaluation batch size on each device.")
    save_total_limit: int | None = argument(2, "Number of checkpoints to keep.")
    load_best_model_at_end: bool = argument(True, "Keep the checkpoint with the best metric.")
    logging_steps: float = argument(50, "Optimizer steps between logs.")
    report_to: str = argument("none", "Tracker, for example tensorboard or wandb.")
    remove_unused_columns: bool = False
    logging_nan_inf_filter: bool = False
    ddp_find_unused_parameters: bool | None = False
    skip_corrupt: bool = argument(False, "Replace an image that cannot be read by the next one.")
    license: str | None = argument(None, "License of the trained model, for its card, for example apache-2.0.")
    overwrite_output_dir: bool = argument(
        False, "Train anew in an output_dir that is not empty; the checkpoints in it are removed when training starts."
    )
    # The parsed command line, for the model card.
    command: str | None = field(default=None, init=False, repr=False)

    expected = {"label_smoothing_factor": ("0: this training has no smoothing", lambda value: not value)}

    @property
    def n_gpu(self) -> int:
        """Number of GPUs of this process, at most 1. With several GPUs, `Trainer` would use `DataParallel`."""
        return min(super().n_gpu, 1)


@dataclass
class DatasetArguments:
    """Arguments of a data set of images."""

    dataset: list[str] = argument([SUBSET], f"Hub id, folder or zip file of images, parquet files, or {SUBSET}.")
    dataset_config: str | None = argument(None, "Configuration of a hub data set that has several.")
    image_column: str | None = argument(None, "Name of the image column. Default: the only one of that type.")
    label_column: str | None = argument(None, "Name of the label column. Default: the only one of that type.")


@dataclass
class DataArguments(DatasetArguments):
    """Arguments of the images to train and evaluate on, and of their splits."""

    train_split: str = argument("train", "Split to train on, or a slice such as train[:1000].")
    eval_dataset: list[str] | None = argument(None, "Data set to evaluate on. Default: another split of dataset.")
    eval_split: str | None = argument(
        None,
        f'Split to choose the best epoch on, or "{NO_EVALUATION}". Default: validation, or a tenth of the training '
        "images, which is held back.",
    )
    class_names: list[str] | None = argument(None, "Names of the labels 0, 1, … if the data set has none.")
    streaming: bool = argument(False, "Read training images while training; needs max_steps.")
    # The split on which the best epoch was chosen (`evaluated`) and the split on which the model was tested
    # (`tested`), for the model card.
    evaluated: str | None = field(default=None, init=False, repr=False)
    tested: str | None = field(default=None, init=False, repr=False)


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` with error messages of one line. The help lists options with underscores. The parser also
    accepts hyphens instead of underscores.

    Args:
        dataclass_types (`list[type]`): Dataclasses to read.
        prog (`str`): The command, for example "frugalvit train".
        takes_config (`bool`): Add the option `--config`: a YAML file of arguments or the name of a recipe. Arguments
            on the command line override arguments in the file.
        options: Arguments of `HfArgumentParser`.
    """

    def __init__(self, dataclass_types: list[type], prog: str, takes_config: bool = True, **options):
        options |= {"prog": prog, "allow_abbrev": False, "formatter_class": argparse.HelpFormatter}
        super().__init__(dataclass_types, **options)
        self.takes_config = takes_config
        if takes_config:
            self.usage = f"{prog} [--config FILE|RECIPE] [--ARGUMENT VALUE ...]"
            self.add_argument(
                "--config", metavar="FILE|RECIPE", help="YAML file of arguments, or the name of a recipe."
            )

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (--help lists the arguments)\n")

    def add_argument(self, *names: str, **settings):
        text = settings.get("help") or ""
        if settings.get("action") == "store_false" and text != argparse.SUPPRESS:
            # `HfArgumentParser` gives `--no_…` the help text of the option that `--no_…` turns off.
            text = settings["help"] = f"Turn off: {text}"
        default = settings.get("default")
        is_empty = default is False or default in (None, "", [], argparse.SUPPRESS)
        if not is_empty and "default" not in text.lower() and text != argparse.SUPPRESS:
            settings["help"] = f"{text} (default: %(default)s)"
        # `HfArgumentParser` adds each option under two names: with underscores, then with hyphens. The second name is
        # dropped.
        return super().add_argument(*(names[:1] if names[0].startswith("--") else names), **settings)

    def parse_known_args(self, args=None, namespace=None):
        words = []
        for text in sys.argv[1:] if args is None else args:
            name, equals, value = text.partition("=")
            words.append(f"--{name[2:].replace('-', '_')}{equals}{value}" if _OPTION.fullmatch(name) else text)
        return super().parse_known_args(words, namespace)

    def parse(self, argv: list[str] | None) -> tuple:
        """Parse a command line into the dataclasses. On an error, print one line and exit with status 2."""
        given = list(sys.argv[1:] if argv is None else argv)
        try:
            words = self.read_config(given) if self.takes_config else given
            options = {"look_for_args_file": False, "return_remaining_strings": True}
            *parsed, rest = self.parse_args_into_dataclasses(words, **options)
            if rest and not rest[0].startswith("-"):
                raise ValueError(f"unexpected value {rest[0]!r}: no option takes it")
            if rest:
                close = difflib.get_close_matches(rest[0].partition("=")[0], self._option_string_actions, 1)
                raise ValueError(f"there is no argument {rest[0]}{f'; did you mean {close[0]}?' if close else ''}")
        except (ValueError, OSError, argparse.ArgumentError) as error:
            self.error(printable(" ".join(str(error).split())))
        groups = tuple(parsed[: len(self.dataclass_types)])
        if self.takes_config:
            groups[-1].command = shlex.join([*self.prog.split(), *given])
        return groups

    def read_config(self, words: list[str]) -> list[str]:
        """Return the arguments in the file of `--config`, followed by the arguments on the command line."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        found, words = finder.parse_known_args(words)
        in_file = []
        for name, value in read_yaml(found.config, self.prog).items() if found.config else ():
            values = value if isinstance(value, list) else [value]
            texts = [json.dumps(each) if isinstance(each, dict) else str(each) for each in values]
            # In the YAML file, null stands for the default.
            in_file += [] if value is None else [f"--{name}", *texts]
        return in_file + words


def read_yaml(given: str, prog: str) -> dict:
    """Read a command's arguments from `given`, a YAML file or the name of a recipe. `prog` is the command."""
    file = Path(given) if Path(given).is_file() else RECIPES.get(given)
    if file is None:
        close = ", ".join(difflib.get_close_matches(given, RECIPES))
        raise ValueError(
            f"--config is {given}, expected a YAML file or a recipe{close and f'; did you mean {close}?'}"
        )
    try:
        content = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise ValueError(f"--config {given} is not valid YAML ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {given} holds a {type(content).__name__}, expected names and values.")
    if f"frugalvit {content.pop('command', prog.partition(' ')[2])}" != prog:
        raise ValueError(f"--config {given} has arguments of another command, expected those of {prog}.")
    return content


def read_values(name: str, text: str) -> dict:
    """Parse a text such as `"image_size=32,hidden_act=gelu"` into a dict. Values that are not JSON stay strings."""
    values = {}
    for part in filter(None, re.split(r",(?=\w+=)", text)):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{name} is {text!r}, expected name=value pairs with commas between.")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return values


def user_message(error: BaseException) -> str | None:
    """Return a message of one line for an error that a user can correct, or None for an error that is a bug."""
    message = str(error).strip()
    if isinstance(error, StrictDataclassClassValidationError):
        message = str(error.__cause__)
    elif isinstance(error, StrictDataclassFieldValidationError):
        message = message.replace(f"{type(error.__cause__).__name__}: ", "", 1)
    elif isinstance(error, UnicodeEncodeError):
        message = first_line(error)
    if isinstance(error, RuntimeError) and "to be installed" in message:
        message += " To install TensorBoard: pip install 'frugalvit[track]'."
    elif isinstance(error, RuntimeError) and message.startswith("DataLoader worker (pid"):
        message += " If memory ran out, lower dataloader_num_workers."
    elif not isinstance(error, (ValueError, OSError, StrictDataclassError, SafetensorError)):
        return None
    if message.startswith("Caught "):
        # The message of an error in a worker is a traceback. The traceback's last line starts with the error's type.
        message = message.splitlines()[-1].partition(": ")[2]
    return printable(" ".join(message.split())) or type(error).__name__


def run_program(main: Callable, prog: str, debug: bool = False) -> int:
    """Run `main()` and return the exit code: the code that `main` returns (by default 0), 1 after an error, or 130
    after Ctrl-C. For an error that the user can correct, print a message of one line. With `debug`, or if the
    environment variable FRUGALVIT_DEBUG is set, raise the error instead."""
    debug = debug or os.environ.get("FRUGALVIT_DEBUG", "0") not in ("", "0")
    end_on_sigterm()
    # The terminal's encoding may not support all characters of the printed labels.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main()
        sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt:
        if debug:
            raise
        print(f"\n{prog}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_stdout_closed():
            # A program such as `head` closed the pipe. Redirect stdout, because flushing it at exit would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if debug or not (message := user_message(error)):
            raise
    # Print after the `except` block, when progress bars are closed. The message then gets its own line.
    print(f"{prog}: error: {message}", file=sys.stderr)
    return 1


def is_stdout_closed() -> bool:
    """Return whether the program that reads this program's output has ended."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def end_on_sigterm():
    """Raise SystemExit on SIGTERM, so that half-written files are removed."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
