"""Align a student's tokens with those of its teacher, or of the student with more tokens, at the places where they
look."""

import torch
import torch.nn.functional as F
from torch import nn

from ...modeling.hosts import Anatomy
from ...modeling.pyramid import sample_features


# Points on each side of a token's RoI at which the teacher's tokens are read and averaged.
POINTS = 4


class TokenAlignment:
    """Hints (Romero et al. 2015) for the tokens of a SparseFormer, not part of the paper's method.

    A token is compared with the mean of the teacher's tokens within its RoI, before the first inherited block and
    after each, or at some of these depths. The distance is the mean squared one, averaged over depths. It is taken
    between LayerNorm-ed tokens, or between tokens as they are, relative to the variance of the teacher's patches.
    [CLS] and registers take no part, and RoIs get no gradient.

    Args:
        student (`SparseFormerForImageClassification`): Has the teacher's blocks but the leading ones.
        teacher (`Anatomy`): The teacher's anatomy, read for the images that it sees.
        layers (`list[int]`, *optional*): Depths, as indices of the student's hidden states, -1 for the last; all by
            default. A LLaVA reads -2.
        distance (`str`, *optional*, defaults to `"normalized"`): `"normalized"`, between LayerNorm-ed tokens, or
            `"raw"`, which a projector behind the student needs.

    Raises:
        ValueError: if the student has more blocks than the teacher, or not such a layer.
    """

    # What the student is to be called with.
    arguments = {"output_hidden_states": True, "output_rois": True}

    def __init__(
        self, student: nn.Module, teacher: Anatomy, layers: list[int] | None = None, distance: str = "normalized"
    ):
        self.grid, self.skipped = teacher.grid, student.config.num_prefix_tokens
        self.depths = len(student.base_model.layers) + 1
        if self.depths - 1 > len(teacher.blocks):
            raise ValueError(
                f"The student has {self.depths - 1} blocks and the teacher {len(teacher.blocks)}; their tokens cannot "
                "be aligned. Leave --token-loss-weight at 0."
            )
        for layer in layers or ():
            if not -self.depths <= layer < self.depths:
                raise ValueError(
                    f"--token-layers has {layer}, the student's layers are {-self.depths} to {self.depths - 1}."
                )
        self.layers, self.distance = layers or range(self.depths), distance

    def __call__(self, outputs, teacher_tokens: list[torch.Tensor]) -> torch.Tensor:
        """The loss of the student's `outputs`; `teacher_tokens` are the teacher's `states` of the same images."""
        shares = self._shares(outputs.rois[-1].detach())
        held_by_depth = teacher_tokens[-self.depths :]
        losses = []
        for layer in self.layers:
            patches = held_by_depth[layer][:, -shares.shape[-1] :].float()
            tokens, expected = outputs.hidden_states[layer][:, self.skipped :].float(), shares @ patches
            if self.distance == "normalized":
                losses.append(F.mse_loss(_normalize(tokens), _normalize(expected)))
            else:
                losses.append(F.mse_loss(tokens, expected) / patches.var((0, 1)).mean())
        return torch.stack(losses).mean()

    def _shares(self, rois: torch.Tensor) -> torch.Tensor:
        """The share of each of the teacher's patches in a token, `(batch, tokens, patches)`: the mean over a grid of
        points in its RoI, within the image, at which patches are interpolated bilinearly."""
        steps = (torch.arange(POINTS, device=rois.device) + 0.5) / POINTS
        y, x = torch.meshgrid(steps, steps, indexing="ij")
        low, high = rois[..., None, :2], rois[..., None, 2:]
        points = low + torch.stack([x, y], dim=-1).flatten(0, 1) * (high - low)
        # Interpolating one-hot maps gives the shares for all depths and channels at once.
        patches = self.grid[0] * self.grid[1]
        one_hot = torch.eye(patches, device=rois.device).view(1, patches, *self.grid).expand(len(rois), -1, -1, -1)
        return sample_features(one_hot, points, padding_mode="border").mean(2)


def distance_from_largest(outputs, largest, num_prefix_tokens: int) -> torch.Tensor:
    """Distance between a student with few tokens and the same student with many: the mean squared difference of each
    token from the mean of those in its RoI, LayerNorm-ed, averaged over all depths.

    Args:
        outputs, largest (`SparseFormerModelOutput`): The student's outputs with few and with many tokens, with hidden
            states and RoIs.
        num_prefix_tokens (`int`): Number of [CLS] and registers, which take no part.

    Returns:
        `torch.Tensor`: A scalar; `largest` and the RoIs get no gradient from it.
    """
    shares = _overlaps(outputs.rois[-1].detach(), largest.rois[-1].detach())
    losses = []
    for few, many in zip(outputs.hidden_states, largest.hidden_states, strict=True):
        tokens, expected = few[:, num_prefix_tokens:].float(), shares @ many[:, num_prefix_tokens:].detach().float()
        losses.append(F.mse_loss(_normalize(tokens), _normalize(expected)))
    return torch.stack(losses).mean()


def _overlaps(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Shares of the other boxes in each box, `(batch, boxes, others)`: the area that one covers of the box, divided by
    the sum over all. They sum to 1 where any other box touches it, else to 0."""
    boxes, others = boxes.unsqueeze(2), others.unsqueeze(1)
    low, high = torch.maximum(boxes[..., :2], others[..., :2]), torch.minimum(boxes[..., 2:], others[..., 2:])
    areas = (high - low).clamp(min=0).prod(-1)
    return areas / areas.sum(-1, keepdim=True).clamp(min=1e-8)


def _normalize(tokens: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(tokens, tokens.shape[-1:])
