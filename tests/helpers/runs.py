"""Checks that the tests of all training commands share."""

import importlib

import pytest
from trainings import SHORT, command_words, run_command, values_of
from transformers import TrainerCallback

from frugalvit.cli import main
from frugalvit.training.trainer import ImageTrainer


# Logged values with these suffixes differ between equal runs: times, and sums that `Trainer` resets when it resumes.
MEASURED = ("_per_second", "runtime", "total_flos", "train_loss")


def parse(command: str, output_dir, **options) -> tuple:
    """Return the module of a training command and its parsed dataclasses of arguments."""
    module = importlib.import_module(f"frugalvit.training.{command}")
    words = command_words(**SHORT | {"output_dir": output_dir} | options)
    return module, module.make_parser().parse(words)


def make(command: str, output_dir, **options):
    """Build the trainer of a training command."""
    module, groups = parse(command, output_dir, **options)
    return module.make_trainer(*groups)


def check_defaults(command: str, output_dir, make_in_python, **options):
    """Check that `make_in_python(trainer, args)` returns a trainer with the arguments of the command's trainer."""
    # None removes the values in `SHORT`, so that the defaults are compared.
    options = dict.fromkeys(("num_train_epochs", "per_device_train_batch_size", "logging_steps")) | options
    own = make(command, output_dir, **options)
    _, (*_, args) = parse(command, output_dir, **options)
    assert values_of([make_in_python(own, args).args]) == values_of([own.args])


class Interrupt(TrainerCallback):
    """Callback that simulates Ctrl-C during a step; the first step is 0."""

    def __init__(self, trainer, step: int):
        self.trainer = trainer
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            self.trainer.interruption.note(2, None)


def records(trainer) -> list[dict]:
    """Return a trainer's log without the values that `MEASURED` names."""
    history = trainer.state.log_history
    return [{name: value for name, value in each.items() if not name.endswith(MEASURED)} for each in history]


def check_resumes(command: str, folder, step: int, **options):
    """Check that a run that is interrupted within an epoch and resumed gives the weights of an uninterrupted run, bit
    by bit."""
    whole = run_command(command, folder / "whole", **options)
    stopped = make(command, folder / "again", **options)
    assert step % (stopped.num_examples(stopped.get_train_dataloader()) // stopped.args.train_batch_size)
    stopped.add_callback(Interrupt(stopped, step))
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
    # A sharpness-aware step calls `ImageTrainer.training_step` twice.
    assert [*dict.fromkeys(steps)] == [*range(step + 1, whole.state.global_step)]
    assert records(again) == records(whole)
    files = [folder / name / "model.safetensors" for name in ("whole", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    return again


def error_of(command: str, output_dir, capsys, **options) -> str:
    """Run a command with wrong arguments; return its one-line error, and check that it left no model."""
    words = command_words(**SHORT | {"output_dir": output_dir} | options)
    command = command.replace("_", "-")
    try:
        code = main([command, *words])
    except SystemExit as end:
        code = end.code
    before, start, message = capsys.readouterr().err.rpartition(f"frugalvit {command}: error: ")
    assert code in (1, 2) and start and "Traceback" not in before
    # A progress bar must not share a line with the error.
    assert not before or before.endswith("\n")
    message = message.splitlines()[0]
    assert not (output_dir / "model.safetensors").exists()
    return message
