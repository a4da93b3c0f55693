"""The `frugalvit` command. It runs `main(argv)` of a command's module and prints user errors in one line."""

import difflib
import importlib
import importlib.metadata
import itertools
import os
import sys
from pathlib import Path

from .training.arguments import user_message
from .training.choices import OPEN_CLIP
from .training.files import HUB_ID, end_on_sigterm, split_revision, unknown_model


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


def wrong_name(command: str, words: list[str]) -> str | None:
    """Return an error message if a model or an image does not exist. This check runs before slow imports."""
    # An option and its value may also be one word, `--model=NAME`.
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, name in itertools.pairwise(parts):
        if option in MODEL_OPTIONS and not name.startswith(OPEN_CLIP):
            try:
                found, _ = split_revision(name)
            except ValueError as error:
                return str(error)
            if not Path(found).exists() and not HUB_ID.fullmatch(found):
                return str(unknown_model(found))
    images = itertools.takewhile(lambda word: not word.startswith("-"), words) if command == "predict" else ()
    missing = [name for name in images if not any(sign in name for sign in "*?[:") and not Path(name).exists()]
    return f"there is no image {missing[0]!r}." if missing else None


def main(argv: list[str] | None = None) -> int:
    """Run a command. Return its exit code: 0 for success, 1 after an error, 2 after wrong usage, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("FRUGALVIT_DEBUG", "0") not in ("", "0")
    if "--debug" in argv:
        argv.remove("--debug")
        debug = True
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
    if message := wrong_name(command, rest):
        print(f"frugalvit {command}: error: {message}", file=sys.stderr)
        return 1
    # The terminal's encoding may not support all characters of the printed labels.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        end_on_sigterm()
        code = importlib.import_module(COMMANDS[command][0]).main(rest)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:
        # A program such as `head` closed the pipe. Redirect stdout, because flushing it at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if debug:
            raise
        print(f"\nfrugalvit {command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug or not (message := user_message(error)):
            raise
    # Print after the `except` block, when progress bars are closed. The message then gets its own line.
    print(f"frugalvit {command}: error: {message}", file=sys.stderr)
    return 1
