"""The `frugalvit` command. It runs `main(argv)` of a command's module and prints user errors in one line."""

import difflib
import importlib
import importlib.metadata
import itertools
import sys

from .training.arguments import run_program
from .training.choices import OPEN_CLIP
from .training.files import split_revision


# Module and one-line help of each command. The module is imported when the command runs.
COMMANDS = {
    "quickstart": ("frugalvit.quickstart", "make a ViT several times faster on photographs, in minutes"),
    "predict": ("frugalvit.predict", "label images and draw where the tokens look"),
    "info": ("frugalvit.info", "list tokens, parameters, multiply-accumulates and speed of models"),
    "bootstrap": ("frugalvit.training.bootstrap", "turn a ViT into a SparseFormer with fewer tokens, without labels"),
    "train": ("frugalvit.training.train", "train an image classifier, from scratch or further"),
    "joint": ("frugalvit.training.joint", "train a ViT together with a convolutional agent"),
    "segment": ("frugalvit.training.segment", "fine-tune a model for semantic segmentation"),
    "align-llava": ("frugalvit.training.align_llava", "train a LLaVA's projector to read a SparseFormer, in minutes"),
    "swap": ("frugalvit.swap", "give a LLaVA a SparseFormer as its vision tower"),
    "compare": ("frugalvit.compare", "compare models with their teacher, and with the teacher on smaller images"),
    "evaluate": ("frugalvit.evaluate", "measure accuracy, features, segmentation, zero-shot, retrieval, ScienceQA"),
    "export": ("frugalvit.export", "write a model for OpenVINO, ONNX Runtime or a browser, and compare both"),
    "publish": ("frugalvit.publish", "check a model and upload it to the hub, in half the bytes"),
}


USAGE = """usage: frugalvit [--version] [--debug] COMMAND ...

Vision transformers that need less: fewer tokens, less data, no extra parameters.

commands:
{commands}

A model is named by its folder, its hub id (owner/name@revision, too) or, if it ships, its own name.
`frugalvit COMMAND --help` lists its options. --debug (or FRUGALVIT_DEBUG=1) prints an error's traceback."""


MODEL_OPTIONS = ("--model", "--teacher", "--student", "--vision-model", "--vision_model")


def check_model_names(words: list[str]):
    """Raise a ValueError if a model does not exist. This check runs before slow imports."""
    # An option and its value may also be one word, `--model=NAME`.
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, name in itertools.pairwise(parts):
        if option in MODEL_OPTIONS and not name.startswith(OPEN_CLIP):
            split_revision(name, must_exist=True)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Return its exit code: 0 for success, 1 after an error, 2 after wrong usage, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    if debug:
        argv.remove("--debug")
    if not argv or argv[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<11}  {text}" for name, (_, text) in COMMANDS.items())
        print(USAGE.format(commands=commands), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"frugalvit {importlib.metadata.version('frugalvit')}")
        return 0
    command, *rest = argv
    if command not in COMMANDS:
        close = ", ".join(difflib.get_close_matches(command, COMMANDS, n=1) or COMMANDS)
        print(f"frugalvit: error: there is no command {command!r}; did you mean {close}?", file=sys.stderr)
        return 2

    def run() -> int | None:
        check_model_names(rest)
        return importlib.import_module(COMMANDS[command][0]).main(rest)

    return run_program(run, f"frugalvit {command}", debug)
