"""Not the package, which is `frugalvit/` in here: gives way to the installed one.

Python that runs beside a clone named `frugalvit` finds the clone before what is installed. Without this file it would
be a namespace package with nothing in it; with the package in it, it would be there without an install.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def _installed() -> ModuleSpec:
    beside = Path(__file__).parent.parent.resolve()
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != beside]
    for finder in sys.meta_path:
        spec = finder.find_spec("frugalvit", elsewhere if finder is PathFinder else None)
        if spec is not None and spec.origin not in (None, __file__):
            return spec
    raise ModuleNotFoundError(
        "No module named 'frugalvit': there is a clone of that name here, which is not installed (pip install -e .)",
        name="frugalvit",
    )


# Test runners import this file under other names.
if __name__ == "frugalvit":
    spec = _installed()
    sys.modules["frugalvit"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["frugalvit"])
