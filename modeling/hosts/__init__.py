"""Functions that read a vision transformer of Transformers, timm, open_clip or this package into an `Anatomy`."""

from .anatomy import (
    MLP,
    Anatomy,
    Attention,
    AttentionPooling,
    Block,
    GridPositions,
    PatchEmbedding,
    Pooling,
    read_anatomy,
    register_reader,
    split_linear,
)


__all__ = [
    "MLP",
    "Anatomy",
    "Attention",
    "AttentionPooling",
    "Block",
    "GridPositions",
    "PatchEmbedding",
    "Pooling",
    "read_anatomy",
    "register_reader",
    "split_linear",
]
