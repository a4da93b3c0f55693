"""The tables in benchmarks/: each row makes a model for the classes of its images, and is trained once."""

import importlib
import itertools
import json
import re
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image

from frugalvit import BootstrappedViTConfig, BootstrappedViTForImageClassification
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


@pytest.mark.nightly
@pytest.mark.parametrize("table", ["impulse_tables"], indirect=True)
def test_every_row_starts(table, monkeypatch, tmp_path):
    """Rows start with one layer and few steps of Adam; the recipe's other arguments are those of the command. In large
    tables, every seventh row is tried."""
    starts = {}

    def start(recipe, folder, argv):
        assert recipe is train and folder not in starts
        small = [re.sub(r"num_hidden_layers=\d+", "num_hidden_layers=1", each) for each in argv]
        small = [f"{each},steps=2" if "solver=adam" in each else each for each in small]
        starts[folder] = built(train, small, list("abcdefghij"))
        return {"eval_accuracy": 0.5, "loss": 1.0}

    monkeypatch.setattr("shared.run_training", start)
    for name in (*table.VIT_TABLES, "convmixer"):
        starts.clear()
        known = list(table.CONVMIXER if name == "convmixer" else table.VIT_TABLES[name])
        rows = known[::7] if len(known) > 30 else known
        options = ["--seeds", "0", "--results-dir", str(tmp_path), "--rows", *rows]
        monkeypatch.setattr("sys.argv", ["impulse_tables.py", name, *options])
        table.main()
        rows = json.loads((tmp_path / f"impulse_{name}.json").read_text(encoding="utf-8"))["rows"]
        assert len(rows) == len(starts) >= 4
        for folder, model in starts.items():
            assert model(pixel_values=torch.randn(2, 3, 32, 32)).logits.isfinite().all(), folder.name


@pytest.mark.parametrize(
    ("table", "name", "options", "message"),
    [
        ("impulse_tables", "longer", ["--rows", "mimetic", "mimetics"], "There is no row 'mimetics'; the rows are: "),
        ("impulse_tables", "longer", ["--paper-recipe"], "is for whole data sets, not for cifar10-subset"),
        ("agent_tables", "gradients", ["--paper-recipe", "--dataset", "x"], "is not for gradients"),
    ],
    indirect=["table"],
)
def test_what_cannot_be_run_is_said_first(table, name, options, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("shared.run_training", lambda *_: pytest.fail("It trains."))
    folders = ["--runs-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", ["x.py", name, *options, *folders])
    with pytest.raises(SystemExit) as stop:
        table.main()
    assert message in f"{stop.value}{capsys.readouterr().err}"
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def two_labels(tmp_path):
    """Data as CIFAR-100 has them: a file for training, one for evaluation, each with labels of two kinds."""
    labels = {name: datasets.ClassLabel(names=names) for name, names in (("coarse", ["a", "b"]), ("fine", [*"cdef"]))}
    features = datasets.Features({"image": datasets.Image()} | labels)
    for split in ("train", "test"):
        records = {
            "image": [Image.new("RGB", (32, 32), (4 * n, 0, 0)) for n in range(64)],
            "coarse": [n % 2 for n in range(64)],
            "fine": [n % 4 for n in range(64)],
        }
        datasets.Dataset.from_dict(records, features).to_parquet(tmp_path / "data" / f"{split}-00000.parquet")
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("table", "name", "rows"),
    [
        # A ViT and its agent, with 4 classes; alone, as the tables have it.
        ("agent_tables", "agents", {"joint": "joint-small", "joint, Agent-B": "joint-base", "ViT alone, SAM": 6.32}),
        ("context_broadcast_tables", "positions", {"none": 21.7, "cb_hybrid at mlp_end and attention_end": 21.7}),
        ("context_broadcast_tables", "hierarchical", {"Swin, cb": 27.5, "PVT": 24.0, "PVTv2, cb": 13.5}),
        ("context_broadcast_tables", "local_vit", {"LocalViT": 5.7, "LocalViT, cb": 5.7}),
    ],
    indirect=["table"],
)
def test_the_papers_recipe(table, name, rows, two_labels, monkeypatch, tmp_path):
    """Architectures are the papers', in millions of parameters. Images have labels of two kinds."""
    sizes, settings = {}, []

    def size(recipe, folder, argv):
        with torch.device("meta"):
            sizes[folder.name] = built(recipe, argv, [*"cdef"]).num_parameters() / 1e6
        settings.append(argv)
        return {"eval_accuracy": 0.5, "eval_agent_accuracy": 0.5}

    monkeypatch.setattr("shared.run_training", size)
    monkeypatch.setattr(table, "measured_once", lambda *_: {"accuracy": 0.5}, raising=False)
    options = ["--paper-recipe", "--dataset", str(two_labels), "--label-column", "fine", "--seeds", "0"]
    monkeypatch.setattr("sys.argv", ["x.py", name, *options, "--results-dir", str(tmp_path), "--rows", *rows])
    table.main()
    for expected, (folder, given) in zip(rows.values(), sizes.items(), strict=True):
        if isinstance(expected, str):
            with torch.device("meta"):
                pair = BootstrappedViTConfig.from_variant(expected, num_labels=4)
                expected = BootstrappedViTForImageClassification(pair).num_parameters() / 1e6
        assert given == pytest.approx(expected, abs=0.05), folder
    for argv in settings:
        given = dict(itertools.pairwise(argv))
        assert given["--train_split"] == "train" and given["--label_column"] == "fine"
        assert int(given["--num_train_epochs"]) == {"agents": 240, "positions": 300, "local_vit": 150}.get(name, 120)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("table", "rows", "short", "columns"),
    [
        ("impulse_tables", ["vit-tiny-h3, 14 x 14"], {"STEPS": 2, "REPEATS": 1}, {"times_faster", "adam_seconds"}),
        ("context_broadcast_tables", [], {"BATCH_SIZE": 1, "ROUNDS": 1}, {"overhead", "operations"}),
    ],
    indirect=["table"],
)
def test_speed(table, rows, short, columns, monkeypatch, tmp_path):
    for name, value in short.items():
        monkeypatch.setattr(table, name, value)
    chosen = ["--rows", *rows] if rows else []
    monkeypatch.setattr("sys.argv", ["x.py", "speed", "--results-dir", str(tmp_path), *chosen])
    table.main()
    [file] = tmp_path.glob("*_speed.json")
    found = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert len(found) == (len(rows) or 5) and all(columns <= row.keys() for row in found)


@pytest.mark.parametrize("table", ["impulse_tables"], indirect=True)
def test_a_row_is_trained_once(table, monkeypatch, tmp_path):
    """A row with other options is another run, which leaves the first one's folder alone."""
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
    assert len(list((tmp_path / "runs").glob("*/README.md"))) == 2
    (row,) = json.loads((tmp_path / "impulse_longer.json").read_text(encoding="utf-8"))["rows"]
    assert row["row"] == "mimetic" and len(row["accuracies"]) == 1
