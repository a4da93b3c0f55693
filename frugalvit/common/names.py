"""Names of models and data sets that others may read: ids on the hub, and never places on this machine."""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


# In the place of images on this machine, as everywhere in the documentation.
OWN_IMAGES = "path/to/images"
# A path from a root or a home on; no part of an address or of words with a slash between them.
_ABSOLUTE = re.compile(r"(?<![\w:/.~-])~?/[\w./-]*\w")


def is_hub_id(name: str) -> bool:
    """Whether the hub may have something of that name, `owner/name`."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def is_place(name: str) -> bool:
    """Whether the name of a model or a data set is a place on this machine."""
    return name.startswith(("/", "~", "./", "../")) or os.path.exists(name)


def without_place(name: str) -> str:
    """A name with its path shortened to the last part; the path is all of it, or follows a colon
    (`open_clip:local-dir:FOLDER`)."""
    head, colon, path = name.rpartition(":")
    return f"{head}{colon}{Path(path).name}" if is_place(path) else name


def portable_command(command: str, data_sets: Iterable[str]) -> str:
    """A command line that others can give: without the places of files and folders on this machine.

    Args:
        command (`str`): The command line, quoted as for a shell.
        data_sets (iterable of `str`): The command's arguments that name images.
    """
    own = {name for name in data_sets if is_place(name)}

    def portable(text: str) -> str:
        if text in own:
            return OWN_IMAGES
        option, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
        return f"{option}{equals}{OWN_IMAGES if value in own else without_place(value)}"

    return shlex.join(map(portable, shlex.split(command)))


def places_in(text: str) -> list[str]:
    """Paths in a text that lead, from a root or a home on, to a folder of this machine or what it may have held."""
    paths = [match[0] for match in _ABSOLUTE.finditer(text)]
    return [
        path
        for path in paths
        if (folder := os.path.dirname(path)) != "/" and os.path.isdir(os.path.expanduser(folder))
    ]
