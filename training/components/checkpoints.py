"""The state of a training, and checkpoints from which it goes on bit-exactly."""

import dataclasses
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ...common.files import permit_as_usual, read_json, write_json


# Before what is measured on images to test on, where the best epoch is chosen on others.
TEST = "test_"
# What is there besides the best model, to go on from and to read.
NOT_IN_REPOSITORY = shutil.ignore_patterns("checkpoints", "logs", "runs", "metrics.jsonl", "results.json")


@dataclass
class TrainingState:
    """The state of a run, saved with every checkpoint.

    Args:
        epoch (`int`): Epochs that are done.
        step (`int`): Optimizer steps that are done.
        best (`dict`, *optional*): Record of the best epoch.
        log (`list[dict]`): The records of `metrics.jsonl`: one every `logging_steps` steps and one an epoch.
        losses (`list[float]`): Loss of each step since the epoch began.
        seconds (`float`): Time in training steps since the epoch began, in seconds.
        skipped (`int`): Images skipped since the epoch began.
    """

    epoch: int = 0
    step: int = 0
    best: dict | None = None
    log: list[dict] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    skipped: int = 0

    @property
    def epochs(self) -> list[dict]:
        """The records of whole epochs."""
        return [record for record in self.log if "train_loss" in record]

    @property
    def measured(self) -> dict:
        """The numbers of the best epoch that count, see `measured_of`."""
        return measured_of(self.best or {})


def measured_of(record: dict) -> dict:
    """An epoch's record, in which numbers on the images to test on, if there are any, replace those on the images on
    which the epoch was chosen."""
    return record | {name.removeprefix(TEST): value for name, value in record.items() if name.startswith(TEST)}


class Checkpoints:
    """Checkpoints in `folder/step-…`. Each is written aside and renamed when it is complete. The newest `limit` are
    kept."""

    def __init__(self, accelerator: Accelerator, folder: Path, limit: int = 2):
        self.accelerator, self.folder, self.limit = accelerator, folder, limit
        # Where one is written before it is whole.
        self.aside = folder / ".aside"

    def all(self) -> list[Path]:
        """The checkpoints in the folder, the newest last. Other files there are the user's, for example a copy."""
        found = {path: re.fullmatch(r"step-(\d+)", path.name, re.ASCII) for path in self.folder.glob("step-*")}
        return sorted((path for path, match in found.items() if match), key=lambda path: int(found[path][1]))

    def save(self, state: TrainingState, write: Callable[[], None]):
        """Make a checkpoint of the folder that `write` leaves in `aside`: add `state`, and move it to the others."""
        target = self.folder / f"step-{state.step:08d}"
        if self.accelerator.is_main_process:
            shutil.rmtree(self.aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        write()
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            [written] = self.aside.iterdir()
            write_json(written / "state.json", dataclasses.asdict(state))
            permit_as_usual(written)
            if target.exists():
                self.remove(target)
            os.rename(written, target)
            self.aside.rmdir()
            for old in self.all()[: -self.limit]:
                self.remove(old)

    def update(self, state: TrainingState):
        """Replace the state in the checkpoint of this step, whose weights are the same."""
        if self.accelerator.is_main_process:
            write_json(self.folder / f"step-{state.step:08d}" / "state.json", dataclasses.asdict(state))

    def remove(self, checkpoint: Path):
        # A folder that is half deleted must not look like a checkpoint.
        removed = self.folder / ".removed"
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(checkpoint, removed)
        shutil.rmtree(removed)

    def newest(self) -> Path | None:
        """Return the newest checkpoint, the same in all processes; None if there are no checkpoints."""
        return broadcast_object_list([next(reversed(self.all()), None)])[0]

    def go_back_to(self, checkpoint: Path) -> Path:
        """Remove the checkpoints that are later than this one, and return it.

        Raises:
            ValueError: if it is no checkpoint that a training wrote.
        """
        if not re.fullmatch(r"step-\d+", checkpoint.name, re.ASCII) or not checkpoint.is_dir():
            raise ValueError(f"{checkpoint} is no checkpoint of a training; expected a folder called step-….")
        if self.accelerator.is_main_process:
            for later in self.all():
                if int(later.name.removeprefix("step-")) > int(checkpoint.name.removeprefix("step-")):
                    self.remove(later)
        self.accelerator.wait_for_everyone()
        return checkpoint

    def state_of(self, checkpoint: Path | None) -> TrainingState:
        """Read a checkpoint's state, and print it; without a checkpoint, return the state at the beginning."""
        if checkpoint is None:
            return TrainingState()
        state = TrainingState(**read_json(checkpoint / "state.json"))
        if len(list(checkpoint.glob("rng_state*.pth"))) != self.accelerator.num_processes:
            self.accelerator.print(
                f"The run goes on with other random numbers than it would have had: {checkpoint} was written by "
                "another number of processes."
            )
        self.accelerator.print(f"Going on from {checkpoint}: {state.epoch} epochs and {state.step} steps are done.")
        return state

    def check_finite(self, what: str, value: float, step: int):
        """Raise a ValueError if a number of a step is not finite."""
        if math.isfinite(value):
            return
        kept = self.all()
        raise ValueError(
            f"The {what} is {value} at step {step}, the first such, so training stopped. Lower --learning-rate or "
            f"warm up longer. {f'The checkpoint {kept[-1]} is kept.' if kept else 'There is no checkpoint yet.'}"
        )
