"""Readers of vision transformers of other libraries and of this package; each returns an `Anatomy`."""

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
