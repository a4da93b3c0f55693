"""The tables in benchmarks/: each row makes a model for the classes of its images, and is trained once."""

import importlib
from pathlib import Path

import pytest
import torch

from frugalvit.training import joint, train
from frugalvit.training.models import build_model


@pytest.fixture
def table(request, monkeypatch):
    """A module of benchmarks/, whose commands find each other as when one is run."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return importlib.import_module(request.param)


def built(recipe, argv: list[str], names: list[str]):
    options, _, args = recipe.make_parser().parse(["--output_dir", "unused", *argv])
    return joint.build_twins(options, names) if recipe is joint else build_model(options, args, names)[0]


@pytest.mark.parametrize("table", ["agent_tables", "context_broadcast_tables"], indirect=True)
def test_every_row_classifies(table):
    rows = {name: row for rows in table.TABLES.values() for name, row in rows.items()}
    assert len(rows) > 15
    for name, row in rows.items():
        recipe, options = row if isinstance(row, tuple) else (train, row)
        argv = importlib.import_module("shared").row_arguments(options, epochs=6)
        model = built(recipe, argv, list("abcdefghij"))
        outputs = model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.tensor([9, 0]))
        assert outputs.logits.shape == (2, 10) and outputs.loss.isfinite(), name
