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
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import HfArgumentParser, TrainingArguments

from ..common.choices import NO_EVALUATION, SUBSET
from ..common.command_line import HelpFormatter
from ..common.interruptions import end_on_sigterm
from ..common.tables import printable


# Arguments of whole trainings, a file each.
RECIPES = {file.stem: file for file in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}


def argument(default=dataclasses.MISSING, help: str = "", **metadata):
    """Return a dataclass field with a help text and, for a list, a copy of the default."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


def check(arguments, fits: Callable, expected: str, *names: str):
    """Raise a ValueError that names the argument unless values fit, or are None (not given)."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not fits(value):
            raise ValueError(f"{name} is {value!r}, expected {expected}.")


def check_choices(arguments):
    """Raise a ValueError if an argument is none of its choices; `HfArgumentParser` checks those of command lines."""
    for each in dataclasses.fields(arguments):
        if choices := each.metadata.get("choices"):
            given = getattr(arguments, each.name)
            if not {*as_list(given)} <= {*choices, each.default}:
                raise ValueError(f"{each.name} is {given!r}, expected one of {', '.join(map(str, choices))}.")


def check_shares(arguments, *names: str):
    check(arguments, lambda value: 0 <= value <= 1, "a number from 0 to 1", *names)


def check_ranges(arguments, *names: str):
    fits = lambda value: len(value) == 2 and 0 < value[0] <= value[1]  # noqa: E731
    check(arguments, fits, "two positive numbers, the lower first", *names)


def check_from(arguments, low: float, *names: str):
    check(arguments, lambda value: low <= value < float("inf"), f"{low} or more", *names)


@dataclass
class ImageTrainingArguments(TrainingArguments):
    """Transformers' `TrainingArguments` with the defaults of trainings here: an evaluation and a checkpoint an epoch,
    the best model at the end, no trackers.

    Args:
        skip_corrupt (`bool`, *optional*, defaults to `False`): Replace an image that cannot be read by the next one.
        timm_optimizer (`str`, *optional*): An optimizer of timm, for example `"muon"`, instead of that of `optim`.
        sam_rho (`float`, *optional*, defaults to 0.0): Radius within which sharpness-aware minimization (Foret et al.
            2021) looks for the worst weights around those of `optim`; 0 turns it off.
        license (`str`, *optional*): License of the trained model, for its card; by default that of the model from
            which training starts.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`): Start anew in a folder that is not empty.
    """

    output_dir: str = argument(help="Folder of the trained model, its card and the checkpoints.")
    eval_strategy: str = argument("epoch", "When to evaluate: no, steps or epoch.")
    save_strategy: str = argument("epoch", "When to save a checkpoint: no, steps or epoch.")
    per_device_eval_batch_size: int = argument(64, "Images of an evaluation step on a device.")
    save_total_limit: int | None = argument(2, "Checkpoints to keep: with 1, `Trainer` removes the last at the end.")
    load_best_model_at_end: bool = argument(True, "Keep the model that was best in evaluation.")
    logging_steps: float = argument(50, "Optimizer steps between logs.")
    report_to: str = argument("none", "Tracker, for example tensorboard or wandb.")
    remove_unused_columns: bool = argument(False, "Not used: a view has no columns but those that are read.")
    logging_nan_inf_filter: bool = argument(False, "Not used: a loss that is not finite ends the run.")
    ddp_find_unused_parameters: bool | None = argument(False, "As in Transformers.")
    skip_corrupt: bool = argument(False, "Replace images that cannot be read by the next one.")
    timm_optimizer: str | None = argument(None, "An optimizer of timm, for example muon, instead of optim.")
    sam_rho: float = argument(0.0, "Radius of sharpness-aware minimization around optim; 0 turns it off.")
    license: str | None = argument(None, "License of the trained model, for its card, for example apache-2.0.")
    overwrite_output_dir: bool = argument(False, "Start anew in an output_dir that is not empty.")

    def __post_init__(self):
        super().__post_init__()
        check_choices(self)
        check_from(self, 0, "sam_rho")
        if self.sam_rho and (self.gradient_accumulation_steps > 1 or self.fp16):
            raise ValueError("sam_rho needs gradient_accumulation_steps 1, and no fp16.")
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False
        # Several devices take several processes: in one, `Trainer` would split batches of a single model.
        self._n_gpu = min(self.n_gpu, 1)


@dataclass
class DataArguments:
    """Images to train and evaluate on, by their names."""

    dataset: list[str] = argument(
        [SUBSET],
        "datasets hub id (@revision, too), folder of images (flat, in class folders, or with train/ and val/), zip "
        f"file of one, parquet files (wildcards too) or folder of them, or {SUBSET}.",
    )
    dataset_config: str | None = argument(None, "Configuration of a hub data set that has several.")
    train_split: str = argument("train", "Split to train on; slices such as train[:1000] too.")
    eval_dataset: list[str] | None = argument(None, "Data set to evaluate on, if not another split of dataset.")
    eval_split: str | None = argument(
        None,
        f'Split to choose the best epoch on, or "{NO_EVALUATION}". Default: "validation", whose best is then measured '
        'on "test", or the one of the two that is there; else all of eval_dataset, or, without one, a tenth of the '
        "training images, at most 5,000, which is held back.",
    )
    image_column: str | None = argument(None, "Name of the image column, where types do not tell.")
    class_names: list[str] | None = argument(None, "Names of the labels 0, 1, …, where the data set has none.")
    streaming: bool = argument(False, "Read training images as training goes; needs max_steps.")
    label_column: str | None = argument(None, "Name of the label column, where types do not tell.")
    # The splits that were loaded to choose the best epoch and to measure it, for the card.
    evaluated: str | None = field(default=None, init=False, repr=False)
    tested: str | None = field(default=None, init=False, repr=False)


class _Formatter(HelpFormatter):
    """Help with one of both spellings of an argument."""

    def _format_action_invocation(self, action) -> str:
        value = self._format_args(action, self._get_default_metavar_for_optional(action)) if action.nargs != 0 else ""
        return f"{action.option_strings[-1 if '-h' in action.option_strings else 0]} {value}".rstrip()


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` whose help has a group for each dataclass, and whose errors are one line.

    `--config` reads arguments from a YAML file, or from a recipe by its name; those on the command line replace them.
    """

    def __init__(self, dataclass_types: list[type], prog: str, description: str):
        for each in dataclass_types:
            each._argument_group_name = each.__doc__.partition("\n\n")[0].replace("\n", " ").rstrip(".")
        super().__init__(
            dataclass_types, prog=prog, description=description, formatter_class=_Formatter, allow_abbrev=False
        )
        self.add_argument("--config", metavar="FILE|RECIPE", help="YAML file of arguments, or the name of a recipe.")
        self.usage = f"{prog} [--config FILE|RECIPE] [--ARGUMENT VALUE ...]"

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (--help lists the arguments)\n")

    def parse(self, argv: list[str] | None = None) -> tuple:
        """Return an instance of each dataclass; an error ends the process with code 2 and one line."""
        argv = list(sys.argv[1:] if argv is None else argv)
        try:
            if given := self._given("--config", argv):
                self._set_defaults(given)
            *parsed, _, rest = self.parse_args_into_dataclasses(
                argv, look_for_args_file=False, return_remaining_strings=True
            )
            if rest:
                raise ValueError(f"there is no argument {rest[0]}{self._closest(rest[0])}")
            return tuple(parsed)
        except (ValueError, OSError, argparse.ArgumentError) as error:
            self.error(printable(" ".join(str(error).split())))

    def _set_defaults(self, given: str):
        """Take the arguments of a file, or of the recipe of this name, for defaults."""
        actions = {action.dest: action for action in self._actions if action.dest not in ("help", "config")}
        for name, value in read_config(given, self.prog).items():
            if name not in actions:
                raise ValueError(f"--config {given} has {name!r}, which is no argument{self._closest(name)}")
            action = actions[name]
            # Texts become numbers as on a command line: YAML takes 1e-3 for a text.
            values = [
                each if each is None or isinstance(each, bool | dict) else self._get_value(action, str(each))
                for each in as_list(value)
            ]
            action.required = False
            self.set_defaults(**{name: values if action.nargs == "+" and value is not None else values[0]})

    def parse_dict(self, args: dict, allow_extra_keys: bool = False) -> tuple:
        """As in Transformers, with the nearest argument in the error."""
        known = {each.name for kind in self.dataclass_types for each in dataclasses.fields(kind) if each.init}
        if not allow_extra_keys and (unknown := sorted(args.keys() - known)):
            close = difflib.get_close_matches(unknown[0], known, 1)
            raise ValueError(f"There is no argument {unknown[0]}{f'; did you mean {close[0]}?' if close else '.'}")
        return super().parse_dict(args, allow_extra_keys)

    def _closest(self, name: str) -> str:
        known = [option for action in self._actions for option in action.option_strings]
        close = difflib.get_close_matches(f"--{name.lstrip('-').partition('=')[0]}", known, 1)
        return f"; did you mean {close[0]}?" if close else ""

    @staticmethod
    def _given(option: str, argv: list[str]) -> str | None:
        finder = HfArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument(option, dest="value")
        return finder.parse_known_args(argv)[0].value


def as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def read_config(given: str, prog: str) -> dict:
    """Read a YAML file of arguments, or the recipe of this name, for a command.

    Raises:
        ValueError: if it is no YAML of names and values, or for another command.
    """
    file = RECIPES.get(given, Path(given)) if not Path(given).is_file() else Path(given)
    if not file.is_file():
        close = difflib.get_close_matches(given, RECIPES)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise ValueError(f"--config {given} is no file and no recipe{hint}")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {given} is no YAML ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {given} holds a {type(content).__name__}, expected names and values.")
    command = content.pop("command", None)
    if command is not None and f"frugalvit {command}" != prog:
        raise ValueError(f"--config {given} is for frugalvit {command}.")
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


def reason(error: BaseException) -> str | None:
    """The message of an error that the user can mend, in one line; None for a defect of the program."""
    if isinstance(error, StrictDataclassError) and error.__cause__:
        error = ValueError(str(error.__cause__))
    message = str(error)
    if isinstance(error, RuntimeError) and message.startswith("DataLoader worker (pid"):
        message = f"A process that decodes images died: {message} Did memory run out? Lower dataloader_num_workers."
    elif isinstance(error, RuntimeError) and "to be installed" in message:
        message = f"{message} TensorBoard comes with pip install 'frugalvit[track]'."
    elif not isinstance(error, (ValueError, OSError, StrictDataclassError, SafetensorError)):
        return None
    if message.startswith("Caught "):
        # A worker's error comes with its traceback.
        message = message.strip().splitlines()[-1]
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
        if os.environ.get("FRUGALVIT_DEBUG", "0") not in ("", "0") or not (message := reason(error)):
            raise
    # After the handler nothing holds progress bars, and the message has a line of its own.
    sys.exit(f"{prog}: error: {message}")
