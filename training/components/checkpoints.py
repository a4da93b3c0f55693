"""The state of a training, and checkpoints from which it goes on bit-exactly."""

import dataclasses
import math
import os
import re
import shutil
import typing
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ...common.files import LOCK, disk_errors, misshapen, permit_as_usual, read_json, write_json


# Before what is measured on images to test on, where the best epoch is chosen on others.
TEST = "test_"
# What is there besides the best model, to go on from and to read.
NOT_IN_REPOSITORY = shutil.ignore_patterns(
    "checkpoints", "logs", "runs", "metrics.jsonl", "results.json", "run.json", LOCK
)
# What each file of a checkpoint was when it was written.
CHECKSUMS = "checksums.json"


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
    """Checkpoints in `folder/step-…`. Each is written aside, with checksums, and renamed when it is complete. The
    newest `limit` are kept."""

    def __init__(self, accelerator: Accelerator, folder: Path, limit: int = 2):
        self.accelerator, self.folder, self.limit = accelerator, folder, limit
        # Where one is written before it is whole.
        self.aside = folder / ".aside"

    def all(self) -> list[Path]:
        """The checkpoints in the folder, the newest last. Other files there are the user's, for example a copy."""
        found = {path: re.fullmatch(r"step-(\d+)", path.name, re.ASCII) for path in self.folder.glob("step-*")}
        return sorted((path for path, match in found.items() if match), key=lambda path: int(found[path][1]))

    def save(self, state: TrainingState, write: Callable[[], None]):
        """Make a checkpoint of the folder that `write` leaves in `aside`: add checksums and `state`, and move it to
        the others."""
        target = self.folder / f"step-{state.step:08d}"
        if self.accelerator.is_main_process:
            shutil.rmtree(self.aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with disk_errors(self.folder.parent):
            write()
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            [written] = self.aside.iterdir()
            write_json(written / CHECKSUMS, checksums(written))
            write_json(written / "state.json", dataclasses.asdict(state))
            permit_as_usual(*(path for path in written.rglob("*") if path.is_file()))
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
        """The newest checkpoint that is whole, in all processes the same; None if there are no checkpoints.

        Raises:
            ValueError: if there are checkpoints and none is whole.
        """
        return broadcast_object_list([self.newest_whole() if self.accelerator.is_main_process else None])[0]

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
        state = read_state(checkpoint)
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

    def newest_whole(self) -> Path | None:
        """The newest checkpoint whose files are as they were written; None if there are no checkpoints."""
        for checkpoint in reversed(self.all()):
            if damaged := damaged_files(checkpoint):
                print(f"The checkpoint {checkpoint} is damaged ({', '.join(damaged[:3])}) and left out.")
            else:
                return checkpoint
        if self.all():
            raise ValueError(f"All checkpoints in {self.folder} are damaged; start anew with --overwrite.")
        return None


def checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of each file of a folder, by its path in there."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                checksum = zlib.crc32(block, checksum)
        found[path.relative_to(folder).as_posix()] = checksum
    return found


def read_state(checkpoint: Path) -> TrainingState:
    """Read the state of the run when it wrote a checkpoint.

    Raises:
        ValueError: if `state.json` is not what was written with this checkpoint.
    """
    file, step = checkpoint / "state.json", int(checkpoint.name.removeprefix("step-"))
    types = typing.get_type_hints(TrainingState)
    try:
        content = {"step": step} | read_json(file)
        problem = misshapen(content, {name: types[name] for name in content if name in types})
        if not problem and (unknown := content.keys() - types.keys()):
            problem = f"{min(unknown)} is no part of it"
        state = TrainingState() if problem else TrainingState(**content)
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}).") from error
    if state.step != step or len(state.losses) > step or min(state.epoch, state.seconds, state.skipped) < 0:
        problem = problem or "its numbers do not fit"
    if problem:
        raise ValueError(f"{file} is none that this program wrote ({problem}).")
    return state


def damaged_files(checkpoint: Path) -> list[str]:
    """Return the names of a checkpoint's files that have changed since they were written. Where there are no
    checksums (in checkpoints of earlier versions), return those of empty files."""
    try:
        read_state(checkpoint)
    except ValueError:
        return ["state.json"]
    noted = checkpoint / CHECKSUMS
    if not noted.exists():
        return [path.name for path in sorted(checkpoint.iterdir()) if path.is_file() and not path.stat().st_size]
    try:
        expected = read_json(noted, dict[str, int])
    except (OSError, ValueError):
        return [CHECKSUMS]
    found = checksums(checkpoint)
    return [name for name, checksum in expected.items() if found.get(name) != checksum]
