"""Arguments that training commands share, and how a command line is read."""

import argparse
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import HfArgumentParser

from ...common.choices import NO_EVALUATION, SUBSET
from ...common.command_line import HelpFormatter, OneSpelling, spelled
from ...common.files import read_text
from ...common.interruptions import end_on_sigterm
from ...common.tables import printable


# Options of commands that trainers in Python call otherwise.
IN_PYTHON = {
    "batch_size": "per_device_train_batch_size",
    "checkpointing_steps": "save_steps",
    "dataset": "train_dataset",
    "epochs": "num_train_epochs",
    "eval_batch_size": "per_device_eval_batch_size",
    "eval_split": "eval_dataset",
    "num_workers": "dataloader_num_workers",
    "output": "output_dir",
}
# Arguments of whole trainings, a file each.
RECIPE_FILES = Path(__file__).parents[1] / "recipes"


def argument(default=dataclasses.MISSING, help: str = "", **metadata):
    """Return a dataclass field with a help text and, for a list, a copy of the default."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


def check(value, fits: bool, name: str, expected: str):
    """Raise a ValueError that names the argument, what was given and what was expected."""
    if not fits:
        raise ValueError(f"{spelled(f'--{name}')} is {value!r}, expected {expected}.")


def check_at_least(arguments, low, *names: str):
    """Raise a ValueError unless numbers are `low` or more, or None (not given)."""
    for name in names:
        value = getattr(arguments, name)
        check(value, value is None or low <= value < math.inf, name, f"{low} or more")


def check_share(arguments, *names: str):
    for name in names:
        check(getattr(arguments, name), 0 <= getattr(arguments, name) <= 1, name, "a number from 0 to 1")


def check_range(arguments, *names: str):
    """Raise a ValueError unless arguments are two positive numbers, the lower first, or None (not given)."""
    for name in names:
        value = getattr(arguments, name)
        fits = value is None or (len(value) == 2 and 0 < value[0] <= value[1])
        check(value, fits, name, "two positive numbers, lower first")


def read_values(argument_name: str, text: str) -> dict:
    """Read `"image_size=32,hidden_act=gelu"` and the like as a dict; values are JSON where they can be, else text."""
    values = {}
    for part in filter(None, re.split(r",(?=\w+=)", text)):
        name, equals, value = part.partition("=")
        check(part, bool(equals), argument_name, "name=value pairs with commas between")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


def write_values(values: dict) -> str:
    """Write values as text that `read_values` reads."""
    return ",".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )


@dataclass
class ImageArguments:
    """Images to train and evaluate on."""

    dataset: list[str] = argument(
        [SUBSET],
        "datasets hub id (@revision, too), folder of images (flat, in class folders, or with train/ and val/), "
        f"parquet files (wildcards too) or folder of them, or {SUBSET}.",
    )
    dataset_config: str | None = argument(None, "Configuration of a hub data set that has several.")
    train_split: str = argument("train", "Split to train on; slices such as train[:1000] too.")
    eval_dataset: list[str] | None = argument(None, "Data set to evaluate on, if not another split of --dataset.")
    eval_split: str | None = argument(
        None,
        f'Split to choose the best epoch on, or "{NO_EVALUATION}". Default: "validation", whose best is then measured '
        'on "test", or the one of the two that is there; else all of --eval-dataset, or, without one, a tenth of the '
        "training images, at most 5,000, which is held back.",
    )
    image_column: str | None = argument(None, "Name of the image column, where types do not tell.")
    class_names: list[str] | None = argument(None, "Names of the labels 0, 1, …, where the data set has none.")
    steps_per_epoch: int | None = argument(None, "Optimizer steps of an epoch. Default: all images once.")
    streaming: bool = argument(False, "Read training images as training goes; needs --steps-per-epoch.")
    shuffle_buffer: int = argument(1000, "Images among which a stream is shuffled, besides its files.")
    skip_corrupt: bool = argument(False, "Replace images that cannot be read by the next one and count them.")
    num_workers: int = argument(
        # Two cores are better left to the model.
        min(8, (os.cpu_count() or 1) - 1) if (os.cpu_count() or 1) > 2 else 0,
        "Processes that decode images, for every training process. They change nothing but speed.",
    )
    # The images on which the best epoch is chosen, None for none, and those on which it is measured, None for the
    # same, for cards; noted when they are loaded.
    evaluated: str | None = field(default=None, init=False, repr=False)
    tested: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self):
        check_at_least(self, 0, "num_workers")
        check_at_least(self, 1, "shuffle_buffer", "steps_per_epoch")


@dataclass
class DataArguments(ImageArguments):
    """Images to train and evaluate on."""

    label_column: str | None = argument(None, "Name of the label column, where types do not tell.")


@dataclass
class RunArguments:
    """How long, how and where to train."""

    output_dir: str = argument(help="Folder for the best model, results and checkpoints.")
    epochs: int = argument(100, "Epochs.")
    batch_size: int = argument(128, "Images of one optimizer step, over all processes and accumulation steps.")
    eval_batch_size: int = argument(256, "Images of one evaluation step, over all processes.")
    gradient_accumulation_steps: int = argument(1, "Parts that a batch is computed in, to save memory.")
    seed: int = argument(0, "Of initialization, order and augmentation.")
    mixed_precision: str = argument(
        "auto",
        "Arithmetic of the forward pass. auto: bf16 where the machine is fast at it, measured on CPUs, else no.",
        choices=["auto", "no", "bf16", "fp16"],
    )
    compile: bool = argument(False, "Compile the model (torch.compile).")
    max_grad_norm: float = argument(1.0, "Clip the gradient to this norm; 0 does not.")
    logging_steps: int = argument(50, "Optimizer steps between lines of metrics.jsonl.")
    checkpointing_steps: int = argument(500, "Optimizer steps between checkpoints, besides each epoch's.")
    license: str | None = argument(
        None,
        "License of the trained model, for its card, for example apache-2.0. Default: that of the model it is from.",
    )
    report_to: list[str] = argument([], "Trackers, for example tensorboard or wandb.")
    overwrite: bool = argument(False, "Start anew in an output folder that is not empty.")
    # The head of `results.json`, noted when the run starts.
    record: dict = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        check_at_least(self, 1, "epochs", "batch_size", "eval_batch_size", "gradient_accumulation_steps")
        check_at_least(self, 1, "logging_steps", "checkpointing_steps")
        check_at_least(self, 0, "seed", "max_grad_norm")


@dataclass
class OptimizerArguments:
    """An optimizer with a warm-up and a schedule."""

    learning_rate: float = argument(1e-3, "Highest learning rate.")
    weight_decay: float = argument(0.05, "Weight decay; none on biases, norms, positions and [CLS].")
    adam_beta1: float = argument(0.9, "AdamW's first decay.")
    adam_beta2: float = argument(0.999, "AdamW's second decay.")
    adam_epsilon: float = argument(1e-8, "What AdamW adds to the root of the squared gradients' mean.")
    warmup_epochs: float = argument(5.0, "Epochs of linear warm-up from 0.")
    lr_scheduler: str = argument(
        "cosine",
        "Schedule after the warm-up, as Transformers has it.",
        choices=["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"],
    )

    def __post_init__(self):
        for name in ("learning_rate", "adam_epsilon"):
            check(getattr(self, name), 0 < getattr(self, name) < math.inf, name, "a positive number")
        check_at_least(self, 0, "weight_decay", "warmup_epochs")
        for name in ("adam_beta1", "adam_beta2"):
            check(getattr(self, name), 0 <= getattr(self, name) < 1, name, "a number from 0 to below 1")


class ArgumentParser(OneSpelling, HfArgumentParser):
    """`HfArgumentParser` with a group for each dataclass, whose title is the first line of its docstring.

    `--config` reads arguments from YAML or JSON, for example the `results.json` of an earlier run, or from one of
    `recipes_of` the command, by its name. Arguments on the command line replace those of the file.
    """

    def __init__(self, dataclass_types: list[type], prog: str, description: str):
        for dataclass_type in dataclass_types:
            dataclass_type._argument_group_name = dataclass_type.__doc__.partition("\n")[0].rstrip(".")
        super().__init__(dataclass_types, prog=prog, description=description, formatter_class=HelpFormatter)
        recipes = ", ".join(recipes_of(prog))
        self.add_argument(
            "--config",
            metavar="FILE|RECIPE",
            help="YAML or JSON file of arguments, a run's results.json"
            + (f", or the name of a recipe that ships: {recipes}." if recipes else "."),
        )
        for action in self._actions:
            if isinstance(action, argparse._StoreFalseAction):
                action.help = f"Turns {spelled(f'--{action.dest}')} off."
        required = [action for action in self._actions if action.required]
        named = [f"{action.option_strings[0]} {action.dest.rpartition('_')[2].upper()}" for action in required]
        self.usage = " ".join(["%(prog)s", *named, "[OPTION ...]"])

    def parse(self, argv: list[str] | None = None) -> tuple:
        """Return an instance of each dataclass; an error ends the process with code 2 and one line."""
        argv = list(sys.argv[1:] if argv is None else argv)
        try:
            if given := _value_of("--config", argv):
                argv = self._read(given) + argv
            *parsed, _, rest = self.parse_args_into_dataclasses(
                argv, look_for_args_file=False, return_remaining_strings=True
            )
            if rest:
                raise ValueError(f"there is no argument {rest[0]}")
            return tuple(parsed)
        except (ValueError, OSError) as error:
            self.error(printable(" ".join(str(error).split())))

    def _read(self, given: str) -> list[str]:
        """The arguments of a file, or of the recipe of this name, as on a command line."""
        command, content = read_recipe(_find_file(given, recipes_of(self.prog)))
        if command is not None and f"frugalvit {command}" != self.prog:
            raise ValueError(f"--config {given} is for frugalvit {command}")
        values = {name: value if isinstance(value, list) else [value] for name, value in content.items()}
        return [
            text
            for name, value in values.items()
            if value != [None] and value
            for text in (f"--{name}", *(os.path.expanduser(str(each)) for each in value))
        ]


def fill_groups(types: list[type], options: dict) -> tuple:
    """Return an instance of each dataclass in `types`, with options by their names.

    Raises:
        TypeError: if no dataclass has such an option.
    """
    known = {each.name for kind in types for each in dataclasses.fields(kind) if each.init}
    if unknown := sorted(options.keys() - known):
        close = difflib.get_close_matches(unknown[0], known, 1)
        raise TypeError(f"There is no option {unknown[0]!r}" + (f"; did you mean {close[0]!r}?" if close else "."))
    return HfArgumentParser(types).parse_dict(options)


def as_words(name: str, value) -> list[str]:
    """An option and its value as on a command line."""
    if isinstance(value, bool):
        return [spelled(f"--{name}" if value else f"--no_{name}")]
    return [spelled(f"--{name}"), *map(str, value if isinstance(value, list) else [value])]


@functools.cache
def recipes_of(prog: str) -> dict[str, Path]:
    """The files in `recipes/` for a command, by name."""
    files = sorted(RECIPE_FILES.glob("*.yaml"))
    return {file.stem: file for file in files if f"frugalvit {read_recipe(file)[0]}" == prog}


def read_recipe(file: Path) -> tuple[str | None, dict]:
    """Read the command that a file of arguments is for, None if it names none, and the arguments.

    Raises:
        ValueError: if it is neither YAML nor JSON, or holds no names and values.
    """
    try:
        content = yaml.load(read_text(file), _Loader)  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--config {file} is neither YAML nor JSON ({error}).") from error
    command = None
    if isinstance(content, dict):
        # What a run leaves has its arguments inside.
        command = content.pop("command", None) if "arguments" not in content else None
        content = content.get("arguments", content)
    check(str(file), isinstance(content, dict), "config", "a file of names and values")
    return command, content


def _find_file(given: str, recipes: dict[str, Path]) -> Path:
    """The file that `--config` names, or the recipe, of any command, if there is no such file."""
    recipe = RECIPE_FILES / f"{given}.yaml"
    if not Path(given).is_file() and recipe.is_file():
        return recipe
    if not Path(given).is_file() and (names := difflib.get_close_matches(given, recipes)):
        raise ValueError(f"--config {given} is no file and no recipe; did you mean {', '.join(names)}?")
    return Path(given)


def _value_of(option: str, argv: list[str]) -> str | None:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(option, dest="value", nargs="?")
    return finder.parse_known_args(argv)[0].value


class _Loader(yaml.SafeLoader):
    """A YAML loader that takes `no` for a word, as YAML 1.2 does: it is the name of a precision."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), "tTfF")


def reason(error: BaseException) -> str | None:
    """The message of an error that the user can mend, in one line; None for a defect of the program."""
    if isinstance(error, StrictDataclassError) and error.__cause__:
        # It says of itself which validator found it, what it found is its cause.
        error = ValueError(str(error.__cause__))
    message = str(error)
    # What a DataLoader raises where one of its processes is gone.
    if isinstance(error, RuntimeError) and message.startswith("DataLoader worker (pid"):
        message = f"A process that decodes images died: {message} Did memory run out? Then lower --num-workers."
    # What Transformers raises where a tracker is not there.
    elif isinstance(error, RuntimeError) and "to be installed" in message:
        message = f"{message} TensorBoard comes with pip install 'frugalvit[track]'."
    elif not isinstance(error, (ValueError, OSError, StrictDataclassError, SafetensorError)):
        return None
    if message.startswith("Caught "):
        # What such a process raised comes with its traceback.
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
