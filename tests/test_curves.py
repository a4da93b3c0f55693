"""`frugalvit curves`: lines are what runs wrote, in a table and in a picture."""

import json

import pytest

from frugalvit.cli import main
from frugalvit.curves import best_epoch, curves_of, draw_curves, read_epochs


def write_run(folder, accuracies):
    folder.mkdir()
    records = []
    for epoch, accuracy in enumerate(accuracies, 1):
        records.append({"step": 10 * epoch, "loss": 0.5, "learning_rate": 1e-3})
        records.append(
            {"epoch": epoch, "step": 10 * epoch, "train_loss": 2 / epoch, "loss": 3 / epoch, "accuracy": accuracy}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_draws_and_prints(tmp_path, capsys):
    runs = [write_run(tmp_path / "plain", [0.1, 0.25]), write_run(tmp_path / "cb", [0.2, 0.3, 0.375])]
    picture = tmp_path / "curves.png"
    assert main(["curves", *map(str, runs), "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "epoch", "best", "epoch", "train_loss", "loss", "accuracy"]
    assert lines[2].split() == ["plain", "2", "2", "1", "1.5", "0.25"] and lines[3].split()[-1] == "0.375"
    assert picture.stat().st_size > 5000

    panels = draw_curves({run.name: read_epochs(str(run)) for run in runs}).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["training loss", "evaluation loss", "accuracy"]
    plain, best, cb, _ = panels[2].get_lines()
    assert [*best.get_xdata(), *best.get_ydata()] == [2, 0.25]
    assert list(plain.get_ydata()) == [0.1, 0.25] and list(cb.get_xdata()) == [1, 2, 3]
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == ["plain", "cb"]


def test_draws_whatever_a_recipe_measures(tmp_path):
    record = {"epoch": 1, "train_loss": 1.0, "images_per_second": 9.0, "teacher_accuracy": 0.9, "own_score": 2.0}
    best = record | {"epoch": 2, "alignment": 0.8, "alignment_9": 0.7, "accuracy_9": 0.1}
    assert curves_of({"run": [record, best]}) == ["train_loss", "alignment", "own_score", "alignment_9", "accuracy_9"]
    assert best_epoch([best | {"epoch": 1}, best | {"alignment": 0.9}, best | {"epoch": 3}]) == 2
    assert best_epoch([record]) is None
    figure = draw_curves({"run": [record, best]})
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:5] == ["training loss", "cosine with the teacher", "own score", "alignment 9", "accuracy 9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no"], "'no' has no metrics.jsonl"),
        (["run", "--names", "a", "b"], "--names has 2 different names for 1 runs"),
        (["run", "other/../run"], "--names has 1 different names for 2 runs"),
        (["begun"], "No epoch of 'begun' is done yet"),
        (["run", "--picture", "curves.txt"], "expected a file name ending in"),
        (["half"], "line 1 of 'half/metrics.jsonl' is no JSON"),
        (["words"], "An epoch in 'words/metrics.jsonl' is none that a training wrote: it is not"),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", [0.5])
    write_run(tmp_path / "begun", [])
    (tmp_path / "other").mkdir()
    for name, text in {"half": '{"train_loss": 1', "words": '{"epoch": 1, "train_loss": "low"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    assert main(["curves", *arguments]) == 1
    assert message in capsys.readouterr().err
