"""Questions of tests to every training: a run that is interrupted, and what is said of a wrong argument."""

import importlib

import pytest
from trainings import SHORT, command_words, run_command
from transformers import TrainerCallback

from frugalvit.cli import main
from frugalvit.training.trainer import ImageTrainer


# Numbers in a log that no other run has: times, and those that `Trainer` counts from where a run goes on.
MEASURED = ("_per_second", "runtime", "total_flos", "train_loss")


def make(command: str, output_dir, **options):
    """The trainer of a training of this name."""
    module = importlib.import_module(f"frugalvit.training.{command}")
    words = command_words(**SHORT | {"output_dir": output_dir} | options)
    return module.make_trainer(*module.make_parser().parse(words))


class Interrupt(TrainerCallback):
    """Ctrl-C while a step is under way, the first of which is 0."""

    def __init__(self, trainer, step: int):
        self.trainer, self.step = trainer, step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            self.trainer.interruption.note(2, None)


def records(trainer) -> list[dict]:
    """A trainer's log without times."""
    history = trainer.state.log_history
    return [{name: value for name, value in each.items() if not name.endswith(MEASURED)} for each in history]


def check_resumes(command: str, folder, step: int, **options):
    """A run that Ctrl-C ends in this step, in the middle of an epoch, and that begins again, ends as one that runs
    through, bit by bit."""
    whole = run_command(command, folder / "whole", **options)
    stopped = make(command, folder / "again", **options)
    assert step % (stopped.num_examples(stopped.get_train_dataloader()) // stopped.args.train_batch_size)
    stopped.add_callback(Interrupt(stopped, step))
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert (folder / "again" / f"checkpoint-{step + 1}").is_dir()
    steps, training_step = [], ImageTrainer.training_step

    def note(self, *arguments, **others):
        steps.append(self.state.global_step)
        return training_step(self, *arguments, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageTrainer, "training_step", note)
        again = run_command(command, folder / "again", **options)
    # A sharpness-aware step computes two gradients.
    assert [*dict.fromkeys(steps)] == [*range(step + 1, whole.state.global_step)]
    assert records(again) == records(whole)
    files = [folder / name / "model.safetensors" for name in ("whole", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    return again


def error_of(command: str, output_dir, capsys, **options) -> str:
    """Return what `frugalvit` says of a wrong call, in one line; no model is left behind."""
    words, command = command_words(**SHORT | {"output_dir": output_dir} | options), command.replace("_", "-")
    try:
        code = main([command, *words])
    except SystemExit as end:
        code = end.code
    before, start, said = capsys.readouterr().err.rpartition(f"frugalvit {command}: error: ")
    assert code in (1, 2) and start and "Traceback" not in before
    # On a line of its own, behind the bar of a training.
    assert not before or before.endswith("\n")
    said = said.splitlines()[0]
    assert not (output_dir / "model.safetensors").exists()
    return said
