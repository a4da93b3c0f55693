"""Runs that are killed, resumed, refused or diverge."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification

from frugalvit import SparseFormerConfig, SparseFormerForImageClassification
from frugalvit.training import train
from frugalvit.training.loop import Checkpoints, parameter_groups, read_losses


TIMES = {"images_per_second", "seconds"}


def without_times(value):
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if name not in TIMES}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def read(path):
    return without_times(json.loads(path.read_text(encoding="utf-8")))


def test_killed_runs_resume_bit_exactly(tmp_path):
    """SIGKILL in the middle of an epoch, of writing a checkpoint and of writing the best model."""
    vit = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
    arguments = [
        *("--config_overrides", f"{vit},hidden_dropout_prob=0.1"),
        *("--train_split", "train[:64]", "--eval_split", "test[:50]"),
        *("--epochs", "3", "--batch_size", "16", "--warmup_epochs", "1"),
        *("--logging_steps", "2", "--checkpointing_steps", "3"),
    ]
    program = Path(__file__).with_name("killed_runs.py")
    subprocess.run(
        [sys.executable, program, tmp_path, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True
    )
    assert (tmp_path / "ends").read_text().split() == ["0", "-9", "-9", "-9", "0"]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == ["step-00000009", "step-00000012"]
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == names
    for name in names:
        ours, theirs = killed / "checkpoints" / name, whole / "checkpoints" / name
        assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
        assert read(ours / "state.json") == read(theirs / "state.json")
        for file in ("optimizer.bin", "scheduler.bin"):
            torch.testing.assert_close(torch.load(ours / file), torch.load(theirs / file), rtol=0, atol=0)
        random = [torch.load(folder / "random_states_0.pkl", weights_only=False) for folder in (ours, theirs)]
        assert torch.equal(*(states["torch_manual_seed"] for states in random))
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    results = [read(folder / "results.json") for folder in (killed, whole)]
    assert results[0]["epochs"] == results[1]["epochs"] and results[0]["best"] == results[1]["best"]
    logs = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (killed, whole)]
    logs = [[without_times(json.loads(line)) for line in log] for log in logs]
    assert logs[0] == logs[1] and len(logs[0]) == 3 + 6
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}


def test_runs_killed_at_random_leave_nothing_broken(tmp_path):
    """SIGKILL at any moment of training and of publishing; FRUGALVIT_KILLS=50 kills more often."""
    vit = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
    arguments = [
        *("--config_overrides", vit, "--train_split", "train[:64]", "--eval_split", "test[:50]"),
        *("--epochs", "3", "--batch_size", "16", "--warmup_epochs", "1", "--checkpointing_steps", "1"),
    ]
    program, kills = Path(__file__).with_name("killed_at_random.py"), os.environ.get("FRUGALVIT_KILLS", "5")
    process = subprocess.run(
        [sys.executable, program, tmp_path, kills, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    trained, published = map(int, (tmp_path / "ends").read_text().split())
    assert trained >= 1 and published <= int(kills)


def test_a_finished_run_is_left_as_it_is(tiny_run, tmp_path, capsys):
    first = tiny_run()
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert tiny_run() == first and "2 epochs and 8 steps are done" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights


def test_what_changes_nothing_may_change_when_resuming(tiny_run, tmp_path):
    first = tiny_run()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    # A run of an earlier version does not know of an argument.
    del record["arguments"]["distill_weight"]
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    assert tiny_run(num_workers=1, logging_steps=3, eval_batch_size=16)["epochs"] == first["epochs"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, r"holds another run \(seed is 0 there, 1 here\)\. Give another folder.*--overwrite"),
        ({"learning_rate": 0.5}, "learning_rate is 0.001 there, 0.5 here"),
        ({"epochs": 3}, "epochs is 2 there, 3 here"),
    ],
)
def test_another_run_is_refused(options, message, tiny_run, tmp_path):
    tiny_run(steps_per_epoch=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    with pytest.raises(ValueError, match=message):
        tiny_run(steps_per_epoch=1, **options)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_folders_of_others_are_refused(tiny_run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="out is not empty and holds no run to go on with; give another folder"):
        tiny_run()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file is a file; expected a folder"):
        tiny_run(name="file")
    tiny_run("--overwrite")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "results.json").exists()


def test_overwriting_starts_anew(tiny_run):
    tiny_run()
    results = tiny_run("--overwrite", seed=1, epochs=1)
    assert [record["epoch"] for record in results["epochs"]] == [1] and results["arguments"]["seed"] == 1


@pytest.mark.parametrize(
    "options",
    [
        {"train_split": "nothing"},
        {"batch_size": 128},
        {"config_overrides": "hidden_sizes=3"},
        {"model": "nowhere/at/all"},
        {"report_to": "nothing"},
    ],
)
def test_errors_leave_nothing_behind(options, tiny_run, tmp_path):
    with pytest.raises((ValueError, OSError)):
        tiny_run(**options)
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tiny_run, tmp_path):
    with pytest.raises(ValueError, match=r"The loss is (nan|inf) at step \d+, .*The checkpoint .*step-.* is kept"):
        tiny_run(learning_rate=1e19, epochs=20, checkpointing_steps=1, warmup_epochs=2, max_grad_norm=0)
    newest = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1]
    assert all(value.isfinite().all() for value in load_file(newest / "model.safetensors").values())
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_gradient_that_is_not_finite_reaches_no_checkpoint(tiny_run, tmp_path, monkeypatch):
    """The loss of its step is finite, and the weights that it leaves are not."""
    cross_entropy, calls = train.F.cross_entropy, []

    def breaks_at_step_3(logits, *arguments, **options):
        calls.append(logits)
        loss = cross_entropy(logits, *arguments, **options)
        return loss + (0 * logits).sum().sqrt() if len(calls) == 3 else loss

    monkeypatch.setattr(train.F, "cross_entropy", breaks_at_step_3)
    message = "The gradient's norm is nan at step 3, the first such, .* The checkpoint .*step-00000002 is kept"
    with pytest.raises(ValueError, match=message):
        tiny_run(checkpointing_steps=1)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_losses_that_are_read_later_tell_the_first_that_is_not_finite(tmp_path):
    losses, checkpoints = [torch.tensor(loss) for loss in (1.0, 2.0, math.inf, math.nan)], Checkpoints(None, tmp_path)
    assert read_losses(Accelerator(), losses[:2], 8, checkpoints) == [1, 2]
    with pytest.raises(ValueError, match="The loss is inf at step 9, .* There is no checkpoint yet."):
        read_losses(Accelerator(), losses, 10, checkpoints)


@pytest.mark.parametrize("max_grad_norm", [0, 1e-3])
def test_metrics_are_written_as_the_run_goes(tiny_run, tmp_path, monkeypatch, max_grad_norm):
    seen, evaluate = [], train.evaluate_classifier

    def watch(*arguments):
        seen.append((tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
        return evaluate(*arguments)

    monkeypatch.setattr(train, "evaluate_classifier", watch)
    tiny_run(logging_steps=2, max_grad_norm=max_grad_norm)
    log = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [len(lines) for lines in seen] == [2, 5] and seen[1] == log[:5] and len(log) == 6
    for line in (*log[:2], *log[3:5]):
        record = json.loads(line)
        assert record.keys() == {"step", "loss", "learning_rate", "gradient_norm", "images_per_second"}
        # Before it is clipped.
        assert record["gradient_norm"] > 0.1 and record["images_per_second"] > 0


def test_how_often_a_run_logs_changes_nothing(tiny_run):
    """Also where the gradient is not clipped, whose norm is then computed for the log alone."""
    options = {"max_grad_norm": 0, "learning_rate": 0.1}
    often, seldom = (tiny_run(name=f"every-{steps}", logging_steps=steps, **options)["epochs"] for steps in (1, 100))
    assert without_times(often) == without_times(seldom)


def decayed_names(model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = (
        {names[id(parameter)] for parameter in group["params"]} for group in parameter_groups(model, 0.05)
    )
    assert decayed | kept == set(names.values()) and not decayed & kept
    return decayed, kept


def test_what_decays():
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    decayed, kept = decayed_names(ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **small)))
    assert {name.rsplit(".", 1)[1] for name in decayed} == {"weight"} and "classifier.weight" in decayed
    assert {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"} <= kept
    assert not any("norm" in name or name.endswith("bias") for name in decayed)

    model = SparseFormerForImageClassification(SparseFormerConfig.from_variant("v1-tiny", num_latent_tokens=4))
    decayed, kept = decayed_names(model)
    assert any("initial_rois" in name for name in kept) and not any("initial_rois" in name for name in decayed)
