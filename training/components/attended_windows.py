"""Where a teacher looks: the part of an image that a student's glance should find."""

import torch

from ...modeling.hosts import Anatomy
from ...modeling.pyramid import grid_rois, window_of


# Blocks, from the last, whose attention is averaged: later ones attend to parts of an object.
SHARE = 1 / 3


def attended_windows(teacher: Anatomy, states: list[torch.Tensor]) -> torch.Tensor:
    """The boxes with the mean and the variance of a teacher's attention to patches, in the last third of its blocks.

    Class tokens attend, or, where there are none, all tokens of patches.

    Args:
        teacher (`Anatomy`): Of the teacher, read for the images that it sees.
        states (`list[torch.Tensor]`): Its tokens before the first block and after each (`Anatomy.watch`).

    Returns:
        `torch.Tensor`: `(batch, 4)` float32 as left, top, right, bottom, 0 to 1 across the image.
    """
    count = max(round(SHARE * len(teacher.blocks)), 1)
    pairs = list(zip(teacher.blocks, states, strict=False))[-count:]
    weights = torch.stack([attention_to_patches(teacher, block, tokens) for block, tokens in pairs]).mean(0)
    cells = grid_rois(teacher.grid).to(weights.device).unsqueeze(0)
    return window_of(weights.unsqueeze(-1), cells).squeeze(1)


def attention_to_patches(teacher: Anatomy, block, tokens: torch.Tensor) -> torch.Tensor:
    """How much a block attends to each patch, `(batch, patches)` float32; sums to 1."""
    attention, tokens = block.attention, block.attention_norm(tokens)
    asking = slice(0, teacher.num_class_tokens) if teacher.num_class_tokens else slice(teacher.num_prefix_tokens, None)
    queries, keys = attention.queries_and_keys(tokens, rotate=teacher.rotation(tokens.dtype))
    keys = keys[:, :, teacher.num_prefix_tokens :]
    scores = queries[:, :, asking].float() @ keys.float().transpose(2, 3) * attention.head_dim**-0.5
    return scores.softmax(-1).mean((1, 2))
