"""Waiting of threads that compute for each other."""

import os


# How often a thread of OpenMP looks whether the others are done before it gives its core away. It is 300,000 times
# otherwise: on a busy machine the one that is waited for then has no core.
SPINS = "20000"


def bound_spinning():
    """Let threads wait as `SPINS` says in this process and those that it starts, unless the user has chosen how.

    To be called before PyTorch is imported, whose OpenMP (libgomp, on Linux) looks once.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
