"""Run trainings in several processes: `python several_processes.py JOBS`.

This program replaces torchrun. Its processes are forks, so libraries are imported only once. JOBS is a JSON file with
a list of jobs. The keys of a job are `module` (a module of frugalvit.training), `words` (command-line arguments),
`processes` (number of processes), `environment` (environment variables, optional) and `log` (a path). The process of
rank RANK appends its standard error to the file `log`.RANK.
"""

import gc
import importlib
import json
import os
import socket
import sys

import peft  # noqa: F401 (imported before the forks, because Accelerate imports it to unwrap a model)
import torch._dynamo  # noqa: F401 (imported before the forks, because the first step imports it)
from accelerate import state
from accelerate.utils import DistributedType

from frugalvit.training import bootstrap  # noqa: F401 (imported before the forks)
from frugalvit.training.arguments import run_program


def allow_fsdp_on_cpu():
    """Make Accelerate use FSDP2 on CPUs. Without this patch, Accelerate 1.15 uses DDP on CPUs."""
    start = state.AcceleratorState.__init__

    def start_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        start(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = start_with_fsdp


def run(job: dict, rank: int, port: int):
    """Run a job in this process with rank `rank`, then exit."""
    processes = str(job["processes"])
    program = importlib.import_module(f"frugalvit.training.{job['module']}")
    if job["processes"] > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": processes}
        os.environ |= {"LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= job.get("environment", {})
    if "ACCELERATE_USE_FSDP" in os.environ:
        allow_fsdp_on_cpu()
    os.dup2(os.open(f"{job['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    raise SystemExit(run_program(lambda: program.main(job["words"]), program.PROG))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    # Without `gc.freeze`, garbage collections write to imported objects, so each fork copies the objects' memory.
    gc.freeze()
    for job in json.load(open(sys.argv[1])):  # noqa: SIM115
        port, children = free_port(), []
        for rank in range(job["processes"]):
            children.append(os.fork())
            if not children[-1]:
                run(job, rank, port)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(ends):
            sys.exit(f"{job} ended with {ends}:\n" + open(f"{job['log']}.0").read())  # noqa: SIM115
