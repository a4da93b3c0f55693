"""Runs that are killed, resumed, refused or diverge."""

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from frugalvit import SparseFormerConfig, SparseFormerForImageClassification
from frugalvit.common.interruptions import SIGNALS
from frugalvit.training import train
from frugalvit.training.components.checkpoints import Checkpoints
from frugalvit.training.components.loaders import TrainingLoader
from frugalvit.training.components.optimizers import parameter_groups
from frugalvit.training.trainer import read_losses
from tiny import make_vit


TIMES = {"images_per_second", "seconds"}


def without_times(value):
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if name not in TIMES}
    return [without_times(part) for part in value] if isinstance(value, list) else value


@pytest.mark.nightly
def test_runs_killed_at_random_leave_nothing_broken(tmp_path):
    """SIGKILL at any moment of training."""
    vit = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
    arguments = [
        *("--config-overrides", vit, "--train-split", "train[:64]", "--eval-split", "test[:50]"),
        *("--epochs", "3", "--batch-size", "16", "--warmup-epochs", "1", "--checkpointing-steps", "1"),
        *("--mixed-precision", "no"),
    ]
    program, kills = Path(__file__).with_name("killed_at_random.py"), os.environ.get("FRUGALVIT_KILLS", "3")
    process = subprocess.run(
        [sys.executable, program, tmp_path, kills, *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert int(process.stdout.split()[-1]) >= 1


def at_step(number: tuple[int, int], happens):
    """`TrainingLoader.epoch` in which something happens just before the batch of (epoch, step of the epoch)."""
    epoch = TrainingLoader.epoch

    def changed(self, epoch_number, start=0):
        for at, batch in enumerate(epoch(self, epoch_number, start), start):
            if (epoch_number, at) == number:
                happens()
            yield batch

    return changed


@pytest.mark.parametrize(
    ("sent", "raised", "code"),
    [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)],
)
def test_an_interruption_saves_the_step_and_says_how_to_go_on(
    sent, raised, code, finished_run, tiny_run, tmp_path, capfd
):
    """And goes on with the random numbers that it would have had."""
    vit = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
    options = {"config_overrides": f"{vit},hidden_dropout_prob=0.1"}
    whole = finished_run("whole", **options)
    capfd.readouterr()
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(raised) as stop:
        patch.setattr(TrainingLoader, "epoch", at_step((1, 1), lambda: os.kill(os.getpid(), sent)))
        tiny_run(**options)
    assert code is None or stop.value.code == code
    # Step 2 of the second epoch of four was under way.
    assert (tmp_path / "out" / "checkpoints" / "step-00000006").is_dir()
    said = capfd.readouterr().err
    assert said.count("The step under way is finished") == 1
    assert "step-00000006 is saved; run the same command to go on" in said
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert without_times(tiny_run(**options)["epochs"]) == without_times(whole["epochs"])


def test_sharpness_aware_steps_compute_two_gradients(tiny_run, monkeypatch):
    """The second one where the first has led, from where the weights then move."""
    seen, compute_loss = [], train.ImageClassificationTrainer.compute_loss

    def note(self, model, *arguments, **options):
        seen.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
        return compute_loss(self, model, *arguments, **options)

    monkeypatch.setattr(train.ImageClassificationTrainer, "compute_loss", note)
    tiny_run(optimizer="sam", epochs=1, steps_per_epoch=2, warmup_epochs=0)
    first, led, second, led_again = seen
    assert (led - first).norm().item() == pytest.approx(0.05, rel=1e-3)
    assert not torch.equal(first, second) and not torch.equal(led_again, second)


def test_a_run_without_a_step_begins_anew(tiny_run, tmp_path):

    def fail():
        raise RuntimeError("interrupted")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="interrupted"):
        patch.setattr(TrainingLoader, "epoch", at_step((0, 0), fail))
        tiny_run(seed=1)
    assert not (tmp_path / "out" / "checkpoints").exists()
    tiny_run(train_split="train[64:128]")


def test_a_launch_that_became_one_process_is_said(tiny_run, monkeypatch, capsys):
    """`accelerate launch --cpu --num_processes 2` leaves such an environment, and starts one process."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    tiny_run(steps_per_epoch=1, epochs=1)
    assert "one was started" in (said := capsys.readouterr().err)
    assert "torchrun --nproc-per-node 2 -m frugalvit.training.train" in said


def test_a_finished_run_is_left_as_it_is(finished_run, tiny_run, tmp_path, capsys):
    first = finished_run()
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert {**tiny_run(), "command": first["command"]} == first
    assert "2 epochs and 8 steps are done" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights


def test_a_longer_run_goes_on(finished_run, tiny_run):
    first = finished_run(steps_per_epoch=1)
    longer = tiny_run(steps_per_epoch=1, epochs=3, num_workers=1, logging_steps=3)
    assert longer["epochs"][:2] == first["epochs"] and [record["epoch"] for record in longer["epochs"]] == [1, 2, 3]
    with pytest.raises(ValueError, match="a checkpoint of 3 epochs and 3 steps, and an epoch has 4; .*--overwrite"):
        tiny_run(epochs=3)


def test_folders_of_others_are_refused(tiny_run, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file is a file; expected a folder"):
        tiny_run(name="file")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    for more in ([], ["--overwrite"]):
        with pytest.raises(ValueError, match="out is not empty and holds no run to go on with or to overwrite"):
            tiny_run(*more)
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


def test_what_fails_in_an_evaluation_costs_no_epoch(finished_run, tiny_run, tmp_path, monkeypatch, capsys):
    expected = finished_run("whole")
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate_classifier", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiny_run()
    # As the message about a corrupt image advises.
    results = tiny_run("--skip-corrupt")
    assert "0 epochs and 4 steps are done" in capsys.readouterr().out
    assert results["best"]["accuracy"] == expected["best"]["accuracy"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", ["step-backup", "step-00000009-copy", "step-00000009.old", "step-", "step-٩"])
def test_what_a_user_keeps_beside_checkpoints_is_none(name, tmp_path):
    (tmp_path / name).mkdir()
    for step in ("step-00000006", "step-100000000"):
        (tmp_path / step).mkdir()
        checkpoints = Checkpoints(Accelerator(), tmp_path)
        assert checkpoints.newest() == checkpoints.all()[-1] == tmp_path / step


@pytest.mark.parametrize("file", ["optimizer.pt", "model.safetensors"])
def test_foreign_files_of_a_checkpoint_are_said(file, finished_run, tiny_run, tmp_path):
    finished_run(steps_per_epoch=1)
    newest = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1]
    (newest / file).write_bytes(pickle.dumps(Path(file)))
    with pytest.raises(ValueError, match="cannot be read: .* Remove it to go on from an earlier one, or start anew"):
        tiny_run(steps_per_epoch=1)


@pytest.mark.parametrize("processes", [0, 2])
def test_random_numbers_that_are_not_restored_are_said(processes, finished_run, tiny_run, tmp_path, capsys):
    """They are not restored if a checkpoint was written by another number of processes."""
    finished_run(steps_per_epoch=1)
    for checkpoint in (tmp_path / "out" / "checkpoints").iterdir():
        states = checkpoint / "rng_state.pth"
        shutil.copyfile(states, checkpoint / "rng_state_1.pth") if processes else states.unlink()
    assert "other random numbers" not in capsys.readouterr().out
    tiny_run(steps_per_epoch=1)
    assert "The run goes on with other random numbers" in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_evaluation_that_is_no_number_is_an_error(value, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate_classifier", lambda *_: {"loss": value, "accuracy": 0.1})
    with pytest.raises(ValueError, match=r"The loss of epoch 1 is (nan|inf) at step 1.*step-00000001 is kept"):
        tiny_run(steps_per_epoch=1)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_weights_that_are_not_finite_reach_no_checkpoint(tiny_run, tmp_path):
    with pytest.raises(ValueError, match="weights is nan at step 1, .* There is no checkpoint yet"):
        tiny_run(learning_rate=1e38, weight_decay=10, warmup_epochs=0, steps_per_epoch=1)
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_overwriting_starts_anew(finished_run, tiny_run):
    finished_run()
    results = tiny_run("--overwrite", seed=1, epochs=1)
    assert [record["epoch"] for record in results["epochs"]] == [1] and results["arguments"]["seed"] == 1


@pytest.mark.parametrize("options", [{"train_split": "nothing"}, {"batch_size": 128}, {"model": "nowhere/at/all"}])
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
    assert read_losses(Accelerator(), losses[:2], 1, 8, checkpoints) == [1, 2]
    with pytest.raises(ValueError, match="The loss is inf at step 9, .* There is no checkpoint yet."):
        read_losses(Accelerator(), losses, 1, 10, checkpoints)


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
    decayed, kept = decayed_names(make_vit())
    assert {name.rsplit(".", 1)[1] for name in decayed} == {"weight"} and "classifier.weight" in decayed
    assert {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"} <= kept
    assert not any("norm" in name or name.endswith("bias") for name in decayed)

    model = SparseFormerForImageClassification(SparseFormerConfig.from_variant("v1-tiny", num_latent_tokens=4))
    decayed, kept = decayed_names(model)
    assert any("initial_rois" in name for name in kept) and not any("initial_rois" in name for name in decayed)
