"""Vision transformers of other libraries and of this package, read into one `Anatomy`."""

from .anatomy import MLP, Anatomy, Attention, Block, GridPositions, read_anatomy, register_reader, split_linear


__all__ = [
    "MLP",
    "Anatomy",
    "Attention",
    "Block",
    "GridPositions",
    "read_anatomy",
    "register_reader",
    "split_linear",
]
