"""Trainings, one a procedure of the papers, over shared data, metrics and loop modules."""

import sys

from ..common.threads import bound_spinning


# `python -m frugalvit.training.…`, which is not found yet: a program, not a user of the library.
if sys.argv[0] == "-m":
    bound_spinning()
