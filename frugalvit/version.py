"""The version, in a module of its own, which setuptools reads without importing anything else."""

__version__ = "0.1.0"
