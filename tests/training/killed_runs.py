"""Run by test_trainer.py as a program: trains in forked processes, some of which kill themselves with SIGKILL.

`killed_runs.py FOLDER ARGUMENT…` leaves FOLDER/whole, never interrupted, and FOLDER/killed, killed in the middle of an
epoch, of writing a checkpoint and of writing the best model. It prints how each process ended.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401 (once, rather than in the first step of every process)
import transformers

from frugalvit.training import train
from frugalvit.training.components import checkpoints
from frugalvit.training.components.loaders import TrainingLoader


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_mid_epoch():
    epoch = TrainingLoader.epoch

    def interrupted(self, number, start=0):
        for at, batch in enumerate(epoch(self, number, start), start):
            if (number, at) == (1, 3):
                die()
            yield batch

    TrainingLoader.epoch = interrupted


def killed_in_checkpoint():
    rename = os.rename
    checkpoints.os.rename = lambda source, target: die() if "step-00000009" in str(target) else rename(source, target)


def killed_in_best_model():
    save_pretrained = transformers.ViTForImageClassification.save_pretrained

    def interrupted(self, folder, **kwargs):
        save_pretrained(self, folder, **kwargs)
        Path(folder, "model.safetensors").write_bytes(b"half")
        die()

    transformers.ViTForImageClassification.save_pretrained = interrupted


def forked(work) -> int:
    """Do `work` in a process of its own; returns its exit code, minus the signal that killed it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = work() or 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(arguments: list[str], prepare=None) -> int:
    """Train in a process of its own."""

    def work():
        if prepare:
            prepare()
        return train.main(arguments)

    return forked(work)


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    ends = [run([*arguments, "--output", f"{folder}/whole"])]
    for prepare in (killed_in_best_model, killed_in_mid_epoch, killed_in_checkpoint, None):
        ends.append(run([*arguments, "--output", f"{folder}/killed"], prepare))
    print(*ends, file=open(f"{folder}/ends", "w"))  # noqa: SIM115
