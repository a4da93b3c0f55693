"""Arguments of all trainings: Transformers' own, those that every training here adds, and how a command reads them."""

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
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
from .files import RECIPES, end_on_sigterm, read_text
from .text import first_line, printable


_OPTION = re.compile(r"--[A-Za-z][\w-]*")
# What is expected of values, and whether one is that.
NOT_NEGATIVE = ("0 or more", lambda value: value >= 0)
POSITIVE = ("1 or more", lambda value: value >= 1)
RANGE = ("two positive numbers, the lower first", lambda value: len(value) == 2 and 0 < value[0] <= value[1])


def argument(default=dataclasses.MISSING, help: str = "", **metadata):
    """Return a dataclass field with a help text and, for a list, a copy of the default."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


def check_fields(arguments):
    """Raise a ValueError unless the fields of a dataclass are None or have one of their choices, which
    `HfArgumentParser` checks on command lines alone, and are as the class's `expected` says."""
    for each in dataclasses.fields(arguments):
        choices = each.metadata.get("choices")
        value = getattr(arguments, each.name)
        values = value if isinstance(value, list) else [value]
        if value is not None and choices and not {*values} <= {*choices}:
            raise ValueError(f"{each.name} is {value!r}, expected one of {', '.join(choices)}.")
    for owner in reversed(type(arguments).__mro__):
        for name, (expected, fits) in vars(owner).get("expected", {}).items():
            value = getattr(arguments, name)
            if value is not None and not fits(value):
                raise ValueError(f"{name} is {value!r}, expected {expected}.")


@dataclass
class ImageTrainingArguments(TrainingArguments):
    """`TrainingArguments` with defaults for images: evaluate and save every epoch, keep the best model."""

    output_dir: str = argument(help="Folder of the trained model, its card and the checkpoints.")
    eval_strategy: str = argument("epoch", "When to evaluate: no, steps or epoch.")
    save_strategy: str = argument("epoch", "When to save a checkpoint: no, steps or epoch.")
    per_device_eval_batch_size: int = argument(64, "Images of an evaluation step on a device.")
    save_total_limit: int | None = argument(2, "Number of checkpoints to keep.")
    load_best_model_at_end: bool = argument(True, "Keep the model that was best in evaluation.")
    logging_steps: float = argument(50, "Optimizer steps between logs.")
    report_to: str = argument("none", "Tracker, for example tensorboard or wandb.")
    remove_unused_columns: bool = False
    logging_nan_inf_filter: bool = False
    ddp_find_unused_parameters: bool | None = False
    skip_corrupt: bool = argument(False, "Replace an image that cannot be read by the next one.")
    sam_rho: float = argument(0.0, "Radius of sharpness-aware minimization around optim; 0 turns it off.")
    license: str | None = argument(None, "License of the trained model, for its card, for example apache-2.0.")
    overwrite_output_dir: bool = argument(False, "Start anew in an output_dir that is not empty.")

    def __post_init__(self):
        super().__post_init__()
        check_fields(self)
        # A training that reads it has a default of its own.
        if self.label_smoothing_factor and not type(self).label_smoothing_factor:
            raise ValueError(f"label_smoothing_factor is {self.label_smoothing_factor}, which this training has not.")
        if self.sam_rho and (self.gradient_accumulation_steps > 1 or self.fp16):
            raise ValueError("sam_rho needs gradient_accumulation_steps 1, and no fp16.")
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False
        # In one process with several devices, `Trainer` would split batches with DataParallel.
        self._n_gpu = min(self.n_gpu, 1)


@dataclass
class DatasetArguments:
    """The images of a training or a measurement."""

    dataset: list[str] = argument([SUBSET], f"Hub id, folder or zip file of images, parquet files, or {SUBSET}.")
    dataset_config: str | None = argument(None, "Configuration of a hub data set that has several.")
    image_column: str | None = argument(None, "Name of the image column, where types do not tell.")
    label_column: str | None = argument(None, "Name of the label column, where types do not tell.")


@dataclass
class DataArguments(DatasetArguments):
    """Images to train and evaluate on."""

    train_split: str = argument("train", "Split to train on; slices such as train[:1000], too.")
    eval_dataset: list[str] | None = argument(None, "Data set to evaluate on, if not another split of dataset.")
    eval_split: str | None = argument(
        None, f'Split to choose the best epoch on, or "{NO_EVALUATION}". Default: validation, or a tenth held back.'
    )
    class_names: list[str] | None = argument(None, "Names of the labels 0, 1, …, where the data set has none.")
    streaming: bool = argument(False, "Read training images as training goes; needs max_steps.")
    # Splits that were loaded to choose the best epoch and to measure it, for the card.
    evaluated: str | None = field(default=None, init=False, repr=False)
    tested: str | None = field(default=None, init=False, repr=False)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with defaults, except where the text gives the default or the default is empty."""

    def _get_help_string(self, action: argparse.Action) -> str:
        is_given = "default" in (action.help or "").lower()
        is_empty = action.default is False or action.default in (None, "", [], argparse.SUPPRESS)
        return action.help if is_given or is_empty else super()._get_help_string(action)


class OptionParser(HfArgumentParser):
    """`HfArgumentParser` whose errors are one line. An option has its field's name; hyphens in the place of the
    underscores are accepted, too, and not listed."""

    def __init__(self, dataclass_types: list[type], prog: str, **options):
        super().__init__(dataclass_types, prog=prog, allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (--help lists the arguments)\n")

    def add_argument(self, *names: str, **settings):
        # `HfArgumentParser` adds the spelling with hyphens as a second name.
        return super().add_argument(*(names[:1] if names[0].startswith("--") else names), **settings)

    def parse_known_args(self, args=None, namespace=None):
        words = []
        for text in sys.argv[1:] if args is None else args:
            name, equals, value = text.partition("=")
            words.append(f"--{name[2:].replace('-', '_')}{equals}{value}" if _OPTION.fullmatch(name) else text)
        return super().parse_known_args(words, namespace)

    def parse(self, argv: list[str] | None) -> tuple:
        """Return an instance of each dataclass; an error ends the process with code 2 and one line."""
        try:
            options = {"look_for_args_file": False, "return_remaining_strings": True}
            *parsed, rest = self.parse_args_into_dataclasses(self.read_words(argv), **options)
            if rest:
                close = difflib.get_close_matches(rest[0].partition("=")[0], self._option_string_actions, 1)
                raise ValueError(f"there is no argument {rest[0]}{f'; did you mean {close[0]}?' if close else ''}")
        except (ValueError, OSError, argparse.ArgumentError) as error:
            self.error(printable(" ".join(str(error).split())))
        return tuple(parsed[: len(self.dataclass_types)])

    def read_words(self, argv: list[str] | None) -> list[str]:
        """Return the words of the command line."""
        return list(sys.argv[1:] if argv is None else argv)


class ArgumentParser(OptionParser):
    """The parser of a training, with `--config`: a YAML file of arguments or the name of a recipe. Arguments on the
    command line replace those of the file."""

    def __init__(self, dataclass_types: list[type], prog: str):
        super().__init__(dataclass_types, prog, usage=f"{prog} [--config FILE|RECIPE] [--ARGUMENT VALUE ...]")
        self.add_argument("--config", metavar="FILE|RECIPE", help="YAML file of arguments, or the name of a recipe.")

    def read_words(self, argv: list[str] | None) -> list[str]:
        """Return the words of the command line after those of the file that `--config` names."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        found, words = finder.parse_known_args(super().read_words(argv))
        in_file = []
        for name, value in read_config(found.config, self.prog).items() if found.config else ():
            values = value if isinstance(value, list) else [value]
            texts = [json.dumps(each) if isinstance(each, dict) else str(each) for each in values]
            # null stands for the default.
            in_file += [] if value is None else [f"--{name}", *texts]
        return in_file + words


def read_config(given: str, prog: str) -> dict:
    """Read a YAML file of arguments, or the recipe of this name, for a command."""
    file = Path(given) if Path(given).is_file() else RECIPES.get(given)
    if file is None:
        close = ", ".join(difflib.get_close_matches(given, RECIPES))
        raise ValueError(f"--config {given} is no file and no recipe{close and f'; did you mean {close}?'}")
    try:
        content = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise ValueError(f"--config {given} is no YAML ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {given} holds a {type(content).__name__}, expected names and values.")
    if f"frugalvit {content.pop('command', prog.partition(' ')[2])}" != prog:
        raise ValueError(f"--config {given} is for another command than {prog}.")
    return content


def read_values(name: str, text: str) -> dict:
    """Read `"image_size=32,hidden_act=gelu"` and the like as a dict; values are JSON where they can be, else text."""
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
    """Return the message of an error that the user can mend, in one line; None for a defect of the program."""
    message = str(error).strip()
    if isinstance(error, StrictDataclassClassValidationError):
        message = str(error.__cause__)
    elif isinstance(error, StrictDataclassFieldValidationError):
        message = message.replace(f"{type(error.__cause__).__name__}: ", "", 1)
    elif isinstance(error, UnicodeEncodeError):
        message = first_line(error)
    if isinstance(error, RuntimeError) and "to be installed" in message:
        message += " TensorBoard comes with pip install 'frugalvit[track]'."
    elif isinstance(error, RuntimeError) and message.startswith("DataLoader worker (pid"):
        message += " Did memory run out? Lower dataloader_num_workers."
    elif not isinstance(error, (ValueError, OSError, StrictDataclassError, SafetensorError)):
        return None
    if message.startswith("Caught "):
        # A worker's error comes with its traceback, whose last line begins with the error's type.
        message = message.splitlines()[-1].partition(": ")[2]
    return printable(" ".join(message.split())) or type(error).__name__


def run_as_program(main: Callable, prog: str):
    """Run `main()` as a process of its own: an error that the user can mend is one line, not a traceback."""
    end_on_sigterm()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if os.environ.get("FRUGALVIT_DEBUG", "0") not in ("", "0") or not (message := user_message(error)):
            raise
    # Outside of the handler, so that progress bars are closed and the message has a line of its own.
    sys.exit(f"{prog}: error: {message}")
