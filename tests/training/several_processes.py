"""Run by test_processes.py as a program: `several_processes.py JOBS` runs recipes in forked processes, as torchrun does,
but imports once for all of them.

JOBS is a JSON file with a list of jobs, each a recipe, its arguments and how many processes run it. A job with `fsdp`
shards the model (FSDP2); one with `stop` ends with an error once so many optimizer steps are done.
"""

import importlib
import json
import os
import socket
import sys
import traceback

import torch._dynamo  # noqa: F401 (once, rather than in the first step of every process)
from accelerate import state
from accelerate.utils import DistributedType

from frugalvit.training import bootstrap, train  # noqa: F401 (likewise)
from frugalvit.training.loop import TrainingState


def allow_fsdp_on_cpu():
    """Accelerate 1.15 falls back to DDP on CPUs, where PyTorch's FSDP2 works."""
    start = state.AcceleratorState.__init__

    def start_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        start(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = start_with_fsdp


def stop_after(steps: int):
    def count(self, name, value):
        if name == "step" and value > steps:
            raise InterruptedError(f"{steps} steps are done.")
        object.__setattr__(self, name, value)

    TrainingState.__setattr__ = count


def run(job: dict, rank: int, port: int) -> int:
    processes = str(job["processes"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    if job.get("fsdp"):
        os.environ |= job["fsdp"]
        allow_fsdp_on_cpu()
    if job.get("stop"):
        stop_after(job["stop"])
    try:
        return importlib.import_module(f"frugalvit.training.{job['recipe']}").main(job["arguments"])
    except InterruptedError:
        return 3
    except BaseException:
        traceback.print_exc()
        return 1


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    for job in json.load(open(sys.argv[1])):  # noqa: SIM115
        port, children = free_port(), []
        for rank in range(job["processes"]):
            children.append(os.fork())
            if not children[-1]:
                # Not to wait for the other processes, of which one may have failed.
                os._exit(run(job, rank, port))
        ends = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
        if ends != {3 if job.get("stop") else 0}:
            sys.exit(f"{job} ended with {ends}")
