"""Run by tests as a program: `several_processes.py JOBS` runs recipes in forked processes, as torchrun does, but
imports once for all of them.

JOBS is a JSON file with a list of jobs: `module`, `arguments`, how many `processes` run it, and the exit codes `ends`
that they should have. `environment` is theirs; with FSDP in it, the model is sharded. The standard error of process
RANK goes to the file `log` with `.RANK` added, and the epoch and labels of its batches, if these are to be
`listed`, go to one with `.RANK.batches`. `stops` ends each after so many optimizer steps. `fails` is
what happens to process 1 after one step, `killed`, or to those of its DataLoader, `worker killed`, `worker raises`.
`killed` is where every process kills itself: `epoch`, in the second one, `checkpoint`, that of the ninth step, or
`best model`, while it is written.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

import datasets
import peft  # noqa: F401 (by Accelerate, when it unwraps a model; once, rather than in every process)
import torch._dynamo  # noqa: F401 (likewise, in the first step)
import transformers
from accelerate import state
from accelerate.utils import DistributedType

from frugalvit.training import bootstrap, train  # noqa: F401 (likewise)
from frugalvit.training.components import checkpoints
from frugalvit.training.components.arguments import run_as_program
from frugalvit.training.components.augmentation import SmallDataView
from frugalvit.training.components.checkpoints import TrainingState
from frugalvit.training.components.loaders import TrainingLoader


# `datasets` waits for Arrow's threads after each pass over a stream of parquet: 5 seconds, too long for tests.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.1


def allow_fsdp_on_cpu():
    """Accelerate 1.15 takes DDP on CPUs whatever is asked for; PyTorch's FSDP2 works there."""
    start = state.AcceleratorState.__init__

    def start_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        start(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = start_with_fsdp


def die(*_):
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


KILLS = {"epoch": killed_in_mid_epoch, "checkpoint": killed_in_checkpoint, "best model": killed_in_best_model}


def after_steps(steps: int, act):
    def count(self, name, value):
        if name == "step" and value > steps:
            act()
        object.__setattr__(self, name, value)

    TrainingState.__setattr__ = count


def list_batches(path: str):
    epoch = TrainingLoader.epoch

    def listed(self, number, start=0):
        for batch in epoch(self, number, start):
            with open(path, "a") as file:
                print(number, *batch["labels"].tolist(), file=file)
            yield batch

    TrainingLoader.epoch = listed


def stop():
    raise ValueError("It was to stop.")


def fail(self, image):
    raise ValueError("A worker cannot go on.\nReally not.")


def run(job: dict, rank: int, port: int):
    """Ends the process."""
    processes, program = str(job["processes"]), importlib.import_module(f"frugalvit.{job['module']}")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= job.get("environment", {})
    if "ACCELERATE_USE_FSDP" in os.environ:
        allow_fsdp_on_cpu()
    if job.get("listed"):
        list_batches(f"{job['log']}.{rank}.batches")
    if job.get("stops"):
        after_steps(job["stops"], stop)
    if "killed" in job:
        KILLS[job["killed"]]()
    if rank == 1 and "fails" in job:
        if job["fails"] == "killed":
            after_steps(1, die)
        else:
            SmallDataView.__call__ = die if job["fails"] == "worker killed" else fail
    os.dup2(os.open(f"{job['log']}.{rank}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    run_as_program(lambda: program.main(job["arguments"]), f"frugalvit {job['module'].rpartition('.')[2]}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    # What is imported is no garbage, and looking at it would copy it into every process.
    gc.freeze()
    for job in json.load(open(sys.argv[1])):  # noqa: SIM115
        port, children = free_port(), []
        for rank in range(job["processes"]):
            children.append(os.fork())
            if not children[-1]:
                run(job, rank, port)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if ends != job["ends"]:
            sys.exit(f"{job} ended with {ends}:\n" + open(f"{job['log']}.0").read())  # noqa: SIM115
