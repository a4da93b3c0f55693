"""Checks for the tests of all training commands."""

import importlib
import signal
from collections.abc import Callable

import pytest
from trainings import SHORT, command_words, run_command
from transformers import TrainerCallback

from frugalvit.cli import main
from frugalvit.training.trainer import ImageTrainer


# Suffixes of logged names whose values differ between equal runs: times, and sums that `Trainer` resets on resuming.
MEASURED = ("_per_second", "runtime", "total_flos", "train_loss")


def parse(command: str, output_dir, **options) -> tuple:
    """Return a training command's module and the dataclasses of its parsed arguments."""
    module = importlib.import_module(f"frugalvit.training.{command}")
    words = command_words(**SHORT | {"output_dir": output_dir} | options)
    return module, module.make_parser().parse(words)


def make(command: str, output_dir, **options):
    """Build the trainer of a training command."""
    module, groups = parse(command, output_dir, **options)
    return module.make_trainer(*groups)


class At(TrainerCallback):
    """Callback that calls a function with the step's number, counted from 0, at the beginning of each step."""

    def __init__(self, do: Callable[[int], object]):
        self.do = do

    def on_step_begin(self, args, state, control, **_):
        self.do(state.global_step)


def records(trainer) -> list[dict]:
    """Return a trainer's log without the values whose names end with a suffix in `MEASURED`."""
    history = trainer.state.log_history
    return [{name: value for name, value in each.items() if not name.endswith(MEASURED)} for each in history]


def check_resumes(command: str, folder, step: int, **options):
    """Check that an interrupted and resumed run has the same weights and log as an uninterrupted run. The interruption
    is during step `step`."""
    whole = run_command(command, folder / "whole", **options)
    stopped = make(command, folder / "again", **options)
    assert step % (stopped.num_examples(stopped.get_train_dataloader()) // stopped.args.train_batch_size)
    stopped.add_callback(At(lambda now: now == step and signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert (folder / "again" / f"checkpoint-{step + 1}").is_dir()
    steps = []
    training_step = ImageTrainer.training_step

    def note(self, *arguments, **others):
        steps.append(self.state.global_step)
        return training_step(self, *arguments, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageTrainer, "training_step", note)
        again = run_command(command, folder / "again", **options)
    # A sharpness-aware step calls `training_step` twice, so repeated step numbers are removed.
    assert [*dict.fromkeys(steps)] == [*range(step + 1, whole.state.global_step)]
    assert records(again) == records(whole)
    files = [folder / name / "model.safetensors" for name in ("whole", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    return again


def error_of(command: str, output_dir, capsys, **options) -> str:
    """Run a command with wrong arguments. Return its error message, and check that no model was saved."""
    words = command_words(**SHORT | {"output_dir": output_dir} | options)
    command = command.replace("_", "-")
    try:
        code = main([command, *words])
    except SystemExit as end:
        code = end.code
    before, start, message = capsys.readouterr().err.rpartition(f"frugalvit {command}: error: ")
    assert code in (1, 2) and start and "Traceback" not in before
    # The error must start on a new line, not after a progress bar.
    assert not before or before.endswith("\n")
    message = message.splitlines()[0]
    assert not (output_dir / "model.safetensors").exists()
    return message
