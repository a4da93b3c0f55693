"""The tables in benchmarks/: each row makes a model for the classes of its images, and is trained once."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

from frugalvit.training import joint, train


@pytest.fixture
def table(request, monkeypatch):
    """A module of benchmarks/, whose commands find each other as when one is run."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return importlib.import_module(request.param)


def built(recipe, argv: list[str], names: list[str]):
    if recipe is joint:
        twins, *_ = joint.parse(argv)
        return joint.build_twins(twins, names)
    arguments, _, options, *_ = train.parse(argv)
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
def test_every_row_starts(table, monkeypatch, tmp_path):
    """With one layer and few steps of Adam; the recipe's other arguments are those of the command."""
    starts = {}

    def start(recipe, folder, argv):
        assert recipe is train and folder not in starts
        small = [re.sub(r"num_hidden_layers=\d+", "num_hidden_layers=1", each) for each in argv]
        small = [each.replace("solver=adam", "solver=adam,steps=2") for each in small]
        starts[folder] = built(train, ["--output", str(folder), *small], list("abcdefghij"))
        return {"epochs": [{"accuracy": 0.5, "train_loss": 1.0}], "device": "cpu"}

    monkeypatch.setattr(table, "run_recipe", start)
    for name in (*table.VIT_TABLES, "convmixer"):
        starts.clear()
        monkeypatch.setattr("sys.argv", ["impulse_tables.py", name, "--seeds", "0", "--results-dir", str(tmp_path)])
        table.main()
        rows = json.loads((tmp_path / f"impulse_{name}.json").read_text(encoding="utf-8"))["rows"]
        assert len(rows) == len(starts) >= 4
        for folder, model in starts.items():
            assert model(pixel_values=torch.randn(2, 3, 32, 32)).logits.isfinite().all(), folder.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "mimetic", "mimetics"], "There is no row 'mimetics'; the rows are: truncated normal; "),
        (["--paper-recipe"], "--paper-recipe is for whole data sets, not for cifar10-subset"),
    ],
)
@pytest.mark.parametrize("table", ["impulse_tables"], indirect=True)
def test_what_cannot_be_run_is_said_first(table, options, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(table, "run_recipe", lambda *_: pytest.fail("It trains."))
    folders = ["--runs-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", ["impulse_tables.py", "longer", *options, *folders])
    with pytest.raises(SystemExit) as stop:
        table.main()
    assert message in f"{stop.value}{capsys.readouterr().err}"
    assert not (tmp_path / "runs").exists()


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
