"""Where a training is, and checkpoints from which it goes on bit-exactly."""

import dataclasses
import json
import os
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ...common.files import disk_errors, write_json


# Before what is measured on images to test on, where the best epoch is chosen on others.
TEST = "test_"
# What each file of a checkpoint was when it was written.
CHECKSUMS = "checksums.json"


@dataclass
class TrainingState:
    """Where a run is; saved with every checkpoint.

    Args:
        epoch (`int`): Epochs that are done.
        step (`int`): Optimizer steps that are done.
        best (`dict`, *optional*): Record of the best epoch.
        log (`list[dict]`): What `metrics.jsonl` holds: a record every so many steps and one an epoch.
        losses (`list[float]`): Loss of each step since the epoch began.
        seconds (`float`): Time in training steps since the epoch began.
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
        """What the best epoch is said to reach, see `measured_of`."""
        return measured_of(self.best or {})


def measured_of(record: dict) -> dict:
    """An epoch's numbers: on the images to test on, where it was chosen on others."""
    return record | {name.removeprefix(TEST): value for name, value in record.items() if name.startswith(TEST)}


class Checkpoints:
    """Complete states under `folder/step-…`: written aside, with checksums, renamed when complete, the newest two
    kept."""

    def __init__(self, accelerator: Accelerator, folder: Path, limit: int = 2):
        self.accelerator, self.folder, self.limit = accelerator, folder, limit

    def all(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def save(self, state: TrainingState):
        """Model, optimizer, schedule, scaler and every process' random numbers by Accelerate, and `state`."""
        target, aside = self.folder / f"step-{state.step:08d}", self.folder / ".aside"
        if self.accelerator.is_main_process:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with disk_errors(self.folder.parent):
            self.accelerator.save_state(str(aside))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_json(aside / CHECKSUMS, checksums(aside))
            write_json(aside / "state.json", dataclasses.asdict(state))
            if target.exists():
                self.remove(target)
            os.rename(aside, target)
            for old in self.all()[: -self.limit]:
                self.remove(old)

    def update(self, state: TrainingState):
        """Let the checkpoint of this step, whose weights are the same, say more."""
        if self.accelerator.is_main_process:
            write_json(self.folder / f"step-{state.step:08d}" / "state.json", dataclasses.asdict(state))

    def remove(self, checkpoint: Path):
        # A folder that is half deleted must not look like a checkpoint.
        removed = self.folder / ".removed"
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(checkpoint, removed)
        shutil.rmtree(removed)

    def resume(self) -> TrainingState:
        """Load the newest checkpoint that is whole, or begin at the beginning.

        Raises:
            ValueError: if there are checkpoints and none is whole.
        """
        found = [self.newest_whole() if self.accelerator.is_main_process else None]
        newest = broadcast_object_list(found)[0]
        if newest is None:
            return TrainingState()
        self.accelerator.load_state(str(newest))
        state = TrainingState(**json.loads((newest / "state.json").read_text(encoding="utf-8")))
        self.accelerator.print(f"Going on from {newest}: {state.epoch} epochs and {state.step} steps are done.")
        return state

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


def damaged_files(checkpoint: Path) -> list[str]:
    """Files of a checkpoint that are not what was written; without checksums (earlier versions), empty ones."""
    try:
        json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        noted = checkpoint / CHECKSUMS
        expected = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else None
    except (OSError, ValueError):
        return ["state.json"]
    if expected is None:
        return [path.name for path in sorted(checkpoint.iterdir()) if path.is_file() and not path.stat().st_size]
    found = checksums(checkpoint)
    return [name for name, checksum in expected.items() if found.get(name) != checksum]
