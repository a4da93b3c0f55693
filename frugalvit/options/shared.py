"""Shared options of `export`, see `common/command_line.py`."""

from ..common.command_line import add_dataset_arguments as add_dataset_arguments
from ..common.command_line import add_model_argument as add_model_argument
from ..common.command_line import probability as probability
from ..common.command_line import require_model as require_model
