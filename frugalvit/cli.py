"""The `frugalvit` command: finds the module that a command names and turns user errors into one clear line.

Every command's module has `main(argv)`. It is imported only when it runs, after its options were read: they are in a
module of `options/` beside it, which imports little.
"""

import argparse
import difflib
import importlib.util
import os
import sys
from types import ModuleType

from .common.interruptions import SIGNALS, ended_by_signals, ending_of
from .common.threads import bound_spinning
from .version import __version__


# Command -> module, help line.
COMMANDS = {
    "quickstart": ("frugalvit.quickstart", "make a ViT several times faster on photographs, in minutes"),
    "predict": ("frugalvit.predict", "label images and draw where the tokens look"),
    "info": ("frugalvit.info", "list tokens, parameters and multiply-accumulates of models"),
    "bootstrap": ("frugalvit.training.bootstrap", "turn a ViT into a SparseFormer with fewer tokens, without labels"),
    "train": ("frugalvit.training.train", "train an image classifier from scratch"),
    "joint": ("frugalvit.training.joint", "train a ViT together with a convolutional agent"),
    "segment": ("frugalvit.training.segment", "fine-tune a model for semantic segmentation"),
    "benchmark": ("frugalvit.benchmark", "measure images a second of models, side by side"),
    "budget": ("frugalvit.budget", "measure each number of a model's tokens, name the largest within a budget"),
    "calibrate": ("frugalvit.calibrate", "find from which confidence on few tokens suffice, with a promise"),
    "compare": ("frugalvit.compare", "set models beside their teacher and what the teacher can do with less"),
    "curves": ("frugalvit.curves", "draw how trainings went"),
    "attention": ("frugalvit.attention", "measure and draw how a vision transformer attends"),
    "features": ("frugalvit.features", "draw what the layers of models make of images"),
    "evaluate": (
        "frugalvit.evaluate",
        "measure classifiers, features, segmentation, zero-shot, retrieval, ScienceQA",
    ),
    "convert": ("frugalvit.convert", "convert checkpoints of reference implementations"),
    "demo": ("frugalvit.demo", "serve a page to look with: labels, tokens, features, attention"),
    "align-llava": ("frugalvit.training.align_llava", "let a LLaVA learn to read a SparseFormer, in minutes"),
    "swap": ("frugalvit.swap", "give a LLaVA a SparseFormer as its vision tower"),
    "index": ("frugalvit.index", "embed a folder of images with a CLIP, once"),
    "search": ("frugalvit.search", "find images of an index by words or by an image"),
    "export": (
        "frugalvit.export",
        "write a model for OpenVINO, ONNX Runtime or a browser, compared first",
    ),
    "publish": ("frugalvit.publish", "upload a model to the hub, in half the bytes, after looking at everything"),
}


def options_of(command: str) -> ModuleType:
    """The module of a command's options, with `make_parser()` and `parse(argv)`, which ends the process if options are
    wrong."""
    module = COMMANDS[command][0]
    package, _, name = module.rpartition(".")
    options = f"{package}.options.{name}"
    return importlib.import_module(options if importlib.util.find_spec(options) else module)


def usage() -> str:
    """The text of `frugalvit --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: frugalvit [--version] [--debug] [--print-completion SHELL] COMMAND ...",
            "",
            "Vision transformers that need less: fewer tokens, less data, no extra parameters.",
            "",
            "commands:",
            *lines,
            "",
            "A model is named by its folder, its hub id (owner/name@revision, too) or, if it ships, its own name.",
            "`frugalvit COMMAND --help` explains one. --debug (or FRUGALVIT_DEBUG=1) shows where an error arose.",
            "--print-completion bash, zsh or tcsh prints a script by which the shell completes options.",
        ]
    )


def completion(shell: str) -> str:
    """A script by which a shell completes commands and options.

    Raises:
        ValueError: if shtab is not installed, or does not know the shell.
    """
    try:
        import shtab
    except ImportError:
        raise ValueError("--print-completion is shtab's: pip install 'frugalvit[completion]'.") from None
    if shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(f"--print-completion is {shell!r}, expected one of {', '.join(shtab.SUPPORTED_SHELLS)}.")
    parser = argparse.ArgumentParser(prog="frugalvit")
    commands = parser.add_subparsers(dest="command")
    for name, (_, text) in COMMANDS.items():
        options = options_of(name).make_parser()
        for action in options._actions:
            if action.metavar in ("FILE", "FOLDER", "DIR", "MODEL", "IMAGE", "OUT", "DATA"):
                action.complete = shtab.FILE
        commands.add_parser(name, help=text, parents=[options], add_help=False)
    return shtab.complete(parser, shell)


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv (`list[str]`, *optional*): Arguments after the program's name; those of the process if not given.

    Returns:
        `int`: Exit code: 0, 1 after an error, 2 after wrong usage, 130 after Ctrl-C, 143 after SIGTERM.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("FRUGALVIT_DEBUG", "0") not in ("", "0")
    if "--debug" in argv:
        argv.remove("--debug")
        debug = True

    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"frugalvit {__version__}")
        return 0
    if argv[0] == "--print-completion":
        try:
            print(completion(*argv[1:2] or [""]))
        except ValueError as error:
            print(f"frugalvit: error: {error}", file=sys.stderr)
            return 2
        return 0
    command, *rest = argv
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}."
        print(f"frugalvit: error: there is no command {command!r}; {hint}", file=sys.stderr)
        return 2

    # What a terminal has no letters for, it is told in escapes.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    received = []
    try:
        options_of(command).parse(rest)
        bound_spinning()
        with ended_by_signals() as received:
            code = importlib.import_module(COMMANDS[command][0]).main(rest)
            sys.stdout.flush()
        return code or 0
    except BrokenPipeError:
        # The reader, for example `head`, has seen enough; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:
        number = ending_of(error, received)
        if debug or (number is None and isinstance(error, SystemExit)):
            raise
        if number is None:
            from .training.components.arguments import reason

            if not (message := reason(error)):
                raise
    if number is not None:
        print(f"\nfrugalvit {command}: {SIGNALS[number]}", file=sys.stderr)
        return 128 + number
    # After the handler nothing holds progress bars, and the message has a line of its own.
    print(f"frugalvit {command}: error: {message}", file=sys.stderr)
    return 1
