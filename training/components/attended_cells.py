"""A teacher's attention to patches, which a student that chooses cells learns to predict."""

import torch

from ...modeling.hosts import Anatomy


# Blocks, from the last, whose attention is averaged: later ones attend to parts of an object.
SHARE = 1 / 3


def attended_cells(teacher: Anatomy, states: list[torch.Tensor]) -> torch.Tensor:
    """A teacher's attention to patches: that of its class tokens or, where there are none, of all patches, averaged
    over heads and over the last third of its blocks.

    Args:
        teacher (`Anatomy`): The teacher's anatomy, read for the images that it sees.
        states (`list[torch.Tensor]`): Its tokens before the first block and after each (`Anatomy.watch`).

    Returns:
        `torch.Tensor`: `(batch, patches)` float32, sums to 1.
    """
    count = max(round(SHARE * len(teacher.blocks)), 1)
    pairs = list(zip(teacher.blocks, states, strict=False))[-count:]
    return torch.stack([attention_to_patches(teacher, block, tokens) for block, tokens in pairs]).mean(0)


def attention_to_patches(teacher: Anatomy, block, tokens: torch.Tensor) -> torch.Tensor:
    """A block's attention to each patch, `(batch, patches)` float32; sums to 1."""
    attention, tokens = block.attention, block.attention_norm(tokens)
    asking = slice(0, teacher.num_class_tokens) if teacher.num_class_tokens else slice(teacher.num_prefix_tokens, None)
    queries, keys = attention.queries_and_keys(tokens, rotate=teacher.rotation(tokens.dtype))
    keys = keys[:, :, teacher.num_prefix_tokens :]
    scores = queries[:, :, asking].float() @ keys.float().transpose(2, 3) * attention.head_dim**-0.5
    return scores.softmax(-1).mean((1, 2))
