"""Names of models and data sets without places on this machine, for cards."""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path


def is_place(name: str) -> bool:
    return name.startswith(("/", "~", "./", "../")) or os.path.exists(name)


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not is_place(name)


def without_place(name: str) -> str:
    """Shorten the path in a name to its last part, also after a colon (`open_clip:local-dir:FOLDER`)."""
    head, colon, path = name.rpartition(":")
    return f"{head}{colon}{Path(path).name}" if is_place(path) else name


def portable_command(command: str, data_sets: Iterable[str]) -> str:
    """Remove this machine's paths from a command line; `data_sets` are its arguments that name images."""

    def portable(text: str) -> str:
        option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
        own = value in data_sets and is_place(value)
        return f"{option}{equals}{'path/to/images' if own else without_place(value)}"

    return shlex.join(map(portable, shlex.split(command)))
