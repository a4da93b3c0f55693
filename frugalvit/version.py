"""The version, read by setuptools and by the command without importing anything else."""

__version__ = "0.1.0"
