"""Waiting of threads is chosen before PyTorch is imported, unless the user has chosen."""

import json
import os
import subprocess
import sys

import pytest
from frugalvit_cli import SPINS


# What a command's module sees, in the place of `frugalvit info`'s.
SEEN = """
import json, os, sys, types
import frugalvit_cli as cli
names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
cli.importlib.import_module = lambda name: print(
    json.dumps([{n: os.environ.get(n) for n in names}, "torch" in sys.modules])
) or sys.exit()
cli.main(["info"])
"""


@pytest.mark.parametrize(
    ("given", "spins", "policy"),
    [
        ({}, SPINS, None),
        ({"GOMP_SPINCOUNT": "7"}, "7", None),
        ({"OMP_WAIT_POLICY": "active"}, None, "active"),
    ],
)
def test_commands_bound_spinning_before_torch_is_imported(given, spins, policy):
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    ran = subprocess.run(
        [sys.executable, "-c", SEEN], env=inherited | given, capture_output=True, text=True, timeout=60
    )
    assert json.loads(ran.stdout) == [{"GOMP_SPINCOUNT": spins, "OMP_WAIT_POLICY": policy}, False], ran.stderr
