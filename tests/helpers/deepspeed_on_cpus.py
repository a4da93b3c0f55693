"""Run a training with DeepSpeed on CPUs, a combination that Accelerate does not support.

    torchrun --nproc-per-node 2 deepspeed_on_cpus.py MODULE ARGUMENTS

MODULE is the full name of a training module, such as frugalvit.training.bootstrap.
"""

import importlib
import sys

import deepspeed
from accelerate import PartialState
from accelerate.utils import DistributedType


if __name__ == "__main__":
    PartialState(cpu=True)
    deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    PartialState._shared_state |= {"distributed_type": DistributedType.DEEPSPEED, "_cpu": False}
    module, *sys.argv[1:] = sys.argv[1:]
    importlib.import_module(module).main()
