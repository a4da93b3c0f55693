"""The tables in benchmarks/: each row makes a model for the classes of its images, and is trained once."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from frugalvit.training import joint, train
from frugalvit.training.components.arguments import parse_arguments


@pytest.fixture
def table(request, monkeypatch):
    """A module of benchmarks/, whose commands find each other as when one is run."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return importlib.import_module(request.param)


def built(recipe, argv: list[str], names: list[str]):
    if recipe is joint:
        groups = [joint.TwinArguments, joint.JointOptimizerArguments, joint.JointRunArguments]
        twins, *_ = parse_arguments(joint.PROG, "", [*groups, joint.RecipeArguments], argv)
        return joint.build_twins(twins, names)
    groups = [train.ModelArguments, train.RecipeArguments, train.OptimizerArguments, train.RunArguments]
    arguments, options, *_ = parse_arguments(train.PROG, "", groups, argv)
    return train.build_model(arguments, options, names)[0]


@pytest.mark.parametrize("table", ["agent_tables", "context_broadcast_tables"], indirect=True)
def test_every_row_classifies(table):
    rows = {name: row for rows in table.TABLES.values() for name, row in rows.items()}
    assert len(rows) > 15
    for name, row in rows.items():
        recipe, options = row if isinstance(row, tuple) else (train, row)
        argv = ["--output", "unused", *table.row_arguments(options)]
        model = built(recipe, argv, list("abcdefghij"))
        outputs = model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.tensor([9, 0]))
        assert outputs.logits.shape == (2, 10) and outputs.loss.isfinite(), name


@pytest.mark.parametrize("table", ["impulse_tables"], indirect=True)
def test_a_row_is_trained_once(table, monkeypatch, tmp_path):
    """With other options it is another run, which leaves the first one's folder alone."""
    trained = []
    main = train.main

    def counted(argv):
        trained.append(argv)
        return main(argv)

    monkeypatch.setattr(train, "main", counted)
    folders = ["--runs-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path)]
    command = ["impulse_tables.py", "longer", "--rows", "mimetic", "--seeds", "0", "--images", "64", "--epochs", "1"]
    command += ["--config-overrides", "hidden_size=16,num_hidden_layers=1"]
    for options, number in (([], 1), ([], 1), (["--flip", "0"], 2), ([], 2)):
        monkeypatch.setattr("sys.argv", [*command, *folders, *options])
        table.main()
        assert len(trained) == number
    assert len(list((tmp_path / "runs").iterdir())) == 2
    (row,) = json.loads((tmp_path / "impulse_longer.json").read_text(encoding="utf-8"))["rows"]
    assert row["row"] == "mimetic" and len(row["accuracies"]) == 1
