"""Losses of bootstrapping, as modules."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers.backbone_utils import BackboneMixin

from ..modeling.dense import assignment_weights, scatter_to_grid
from ..modeling.focusing import sample_features
from ..modeling.hosts import Anatomy
from ..modeling.hosts.running import as_map, compute_queries_and_keys
from ..modeling.modeling_bootstrapped_vit import divergence


# Points on each side of a token's RoI at which the teacher's tokens are read and averaged.
POINTS = 4
# Blocks, from the last, whose attention is averaged: later ones attend to parts of an object.
ATTENDING_SHARE = 1 / 3


class AlignmentLoss(nn.Module):
    """Distance of the embeddings of student and teacher (Gao et al. 2024, equation 5), and the terms that `args`, a
    `BootstrapArguments`, adds."""

    def __init__(self, student: nn.Module, teacher: Anatomy, args):
        super().__init__()
        config = student.config
        self.args = args
        self.project = getattr(student, "visual_projection", nn.Identity())
        # In a tuple, as they are neither trained nor saved with the loss.
        self.heads = (getattr(student, "classifier", None), teacher.classifier)
        self.align_tokens = self.align_maps = None
        if args.token_loss_weight:
            self.align_tokens = TokenAlignment(student, teacher, args.token_layers, args.token_distance)
        if args.dense_loss_weight:
            self.align_maps = MapAlignment(student, teacher, args.dense_layers)
        # Whether the student learns to predict where its teacher attends.
        self.forecasts = config.has_patch_embedding and config.placement == "content"
        # Arguments of the student's base model for its embedding, and for all that the loss reads.
        backbone = isinstance(student, BackboneMixin) and self.align_maps
        self.embedding_options = {"output_embedding": True} if backbone else {"output_tokens": False}
        self.options = dict(self.embedding_options)
        if self.align_tokens or self.align_maps:
            self.options |= {"output_tokens": True} | TokenAlignment.arguments
        if self.forecasts:
            self.options["output_attention_forecast"] = True

    def forward(
        self,
        outputs,
        embedding: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention: torch.Tensor | None = None,
        tokens: list[torch.Tensor] | None = None,
        maps: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the loss, a scalar.

        Args:
            outputs: The outputs of the student's base model for `options`.
            embedding: The teacher's, `(batch, embedding_size)` float32.
            labels (*optional*): Class numbers, `(batch,)`.
            attention (*optional*): The teacher's, `(batch, rows, columns)`.
            tokens (*optional*): The teacher's before the first block and after each, `(batch, prefix + patches,
                hidden_size)`.
            maps (*optional*): The teacher's feature maps, `(batch, hidden_size, rows, columns)`.
        """
        args = self.args
        classify, classify_teacher = self.heads
        found = self.project(outputs.pooler_output).float()
        if args.loss == "cosine":
            loss = (1 - F.cosine_similarity(found, embedding)).mean()
        else:
            loss = divergence(classify(found), classify_teacher(embedding), args.temperature)
        if args.label_loss_weight:
            loss = loss + args.label_loss_weight * F.cross_entropy(classify(found), labels)
        if self.forecasts and outputs.attention_forecast is not None:
            # Its weights have no other loss, so that it needs no factor.
            loss = loss + forecast_loss(outputs.attention_forecast, attention)
        if self.align_tokens:
            loss = loss + args.token_loss_weight * self.align_tokens(outputs, tokens)
        if self.align_maps:
            loss = loss + args.dense_loss_weight * self.align_maps(outputs, maps)
        return loss


class MapAlignmentLoss(nn.Module):
    """Distance of feature maps from a teacher's, averaged over cells and layers: 1 minus the cosine of two vectors,
    and `scale_weight` times the squared log of the ratio of their lengths.

    The mean of the teacher's map over an image's cells is subtracted from both maps, as what all cells have in common
    is no help in telling them apart.
    """

    def __init__(self, scale_weight: float = 0.1):
        super().__init__()
        self.scale_weight = scale_weight

    def forward(self, maps: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the loss, a scalar in float32, of feature maps `(batch, channels, rows, columns)`, one for each
        layer, beside the teacher's (`compute_feature_maps`), to whose cells they are interpolated."""
        losses = []
        for found, target in zip(maps, targets, strict=True):
            found = found.float()
            target = target.float()
            if found.shape != target.shape:
                found = F.interpolate(found, target.shape[-2:], mode="bilinear")
            common = target.mean((2, 3), keepdim=True)
            found = found - common
            target = target - common
            # An image of one color has hardly any differences, whose lengths mean nothing.
            least = common.norm(dim=1).clamp(min=1e-4) / 100
            lengths = [features.norm(dim=1).clamp(min=least).log() for features in (found, target)]
            scale = (lengths[0] - lengths[1]).square().mean()
            losses.append((1 - F.cosine_similarity(found, target)).mean() + self.scale_weight * scale)
        return torch.stack(losses).mean()


class MapAlignment:
    """`MapAlignmentLoss` of a student's feature maps. They are a backbone's outputs; any other student's map has in
    each cell the state of the tokens whose RoIs cover it. `layers` are numbered from the last, -1, backwards: -1 alone
    by default, or the `out_indices` of a backbone."""

    def __init__(self, student: nn.Module, teacher: Anatomy, layers: list[int] | None = None):
        config = student.config
        self.layers = layers or [-1]
        self.norm = student.base_model.layernorm
        self.teacher = teacher
        self.num_prefix_tokens = config.num_prefix_tokens
        self.distance = MapAlignmentLoss()
        if isinstance(student, BackboneMixin):
            self.layers = [index - len(student.stage_names) for index in student.out_indices]
            if layers and sorted(layers) != self.layers:
                raise ValueError(f"dense_layers are {layers}, and the backbone has maps of {self.layers}.")
            if not config.reshape_hidden_states:
                raise ValueError("A backbone is aligned with reshape_hidden_states.")
        most = min(len(student.base_model.layers), len(teacher.blocks)) + 1
        if wrong := [layer for layer in self.layers if not -most <= layer < 0]:
            raise ValueError(f"dense_layers has {wrong[0]}, expected -1, the last, to {-most}, before all blocks.")

    def of_teacher(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the teacher's maps."""
        return [as_map(self.teacher, states[layer]) for layer in self.layers]

    def __call__(self, outputs, targets: list[torch.Tensor]) -> torch.Tensor:
        if (maps := getattr(outputs, "feature_maps", None)) is None:
            shares = assignment_weights(outputs.rois[-1], *self.teacher.grid)
            states = [self.norm(outputs.hidden_states[layer]) for layer in self.layers]
            maps = [scatter_to_grid(each[:, self.num_prefix_tokens :], shares) for each in states]
        return self.distance(maps, targets)


class TokenAlignment:
    """Hints (Romero et al. 2015) for the tokens of a SparseFormer, not part of the paper's method: the mean squared
    distance of a token from the mean of the teacher's tokens within its RoI, averaged over `layers`, indices of the
    student's hidden states, all by default; a LLaVA reads -2. It is taken between LayerNorm-ed tokens or, with the
    `distance` "raw", which a projector behind the student needs, relative to the variance of the teacher's patches.
    [CLS] and registers take no part, and RoIs get no gradient."""

    # What the student is called with.
    arguments = {"output_hidden_states": True, "output_rois": True}

    def __init__(self, student, teacher: Anatomy, layers: list[int] | None = None, distance: str = "normalized"):
        self.grid = teacher.grid
        self.skipped = student.config.num_prefix_tokens
        self.depths = len(student.base_model.layers) + 1
        self.layers = layers or range(self.depths)
        self.distance = distance
        if self.depths > len(teacher.blocks) + 1:
            raise ValueError("The student has more blocks than the teacher; leave token_loss_weight at 0.")
        if wrong := [layer for layer in self.layers if not -self.depths <= layer < self.depths]:
            raise ValueError(f"token_layers has {wrong[0]}, expected {-self.depths} to {self.depths - 1}.")

    def __call__(self, outputs, teacher_tokens: list[torch.Tensor]) -> torch.Tensor:
        shares = self.shares_of_patches(outputs.rois[-1].detach())
        held_by_depth = teacher_tokens[-self.depths :]
        losses = []
        for layer in self.layers:
            patches = held_by_depth[layer][:, -shares.shape[-1] :].float()
            tokens = outputs.hidden_states[layer][:, self.skipped :].float()
            expected = shares @ patches
            if self.distance == "normalized":
                normalized = [F.layer_norm(each, each.shape[-1:]) for each in (tokens, expected)]
                losses.append(F.mse_loss(*normalized))
            else:
                losses.append(F.mse_loss(tokens, expected) / patches.var((0, 1)).mean())
        return torch.stack(losses).mean()

    def shares_of_patches(self, rois: torch.Tensor) -> torch.Tensor:
        """The share of each of the teacher's patches in a token, `(batch, tokens, patches)`: the mean over a grid of
        points in its RoI, within the image, at which patches are interpolated bilinearly."""
        steps = (torch.arange(POINTS, device=rois.device) + 0.5) / POINTS
        y, x = torch.meshgrid(steps, steps, indexing="ij")
        low = rois[..., None, :2]
        high = rois[..., None, 2:]
        points = low + torch.stack([x, y], dim=-1).flatten(0, 1) * (high - low)
        # Interpolating one-hot maps gives the shares for all depths and channels at once.
        patches = self.grid[0] * self.grid[1]
        one_hot = torch.eye(patches, device=rois.device).view(1, patches, *self.grid).expand(len(rois), -1, -1, -1)
        return sample_features(one_hot, points, padding_mode="border").mean(2)


def forecast_loss(logits: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of a predicted attention, `(batch, rows, columns)`, from a teacher's, of any number
    of rows and columns; the mean over images."""
    if attention.shape != logits.shape:
        attention = F.adaptive_avg_pool2d(attention, logits.shape[1:])
        attention = attention / attention.sum((1, 2), keepdim=True)
    return F.kl_div(logits.flatten(1).log_softmax(1), attention.flatten(1), reduction="batchmean")


def attended_cells(teacher: Anatomy, states: list[torch.Tensor]) -> torch.Tensor:
    """A teacher's attention to patches, `(batch, rows, columns)`, which sums to 1: that of its class tokens or, where
    there are none, of all patches, averaged over heads and the last third of its blocks, whose inputs `states` are."""
    count = max(round(ATTENDING_SHARE * len(teacher.blocks)), 1)
    pairs = list(zip(teacher.blocks, states, strict=False))[-count:]
    attention = torch.stack([attention_to_patches(teacher, block, tokens) for block, tokens in pairs]).mean(0)
    return attention.unflatten(1, teacher.grid)


def attention_to_patches(teacher: Anatomy, block, tokens: torch.Tensor) -> torch.Tensor:
    """A block's attention to each patch, `(batch, patches)` float32; sums to 1."""
    asking = slice(0, teacher.num_class_tokens) if teacher.num_class_tokens else slice(teacher.num_prefix_tokens, None)
    queries, keys = compute_queries_and_keys(teacher, block, tokens)
    keys = keys[:, :, teacher.num_prefix_tokens :]
    scores = queries[:, :, asking].float() @ keys.float().transpose(2, 3) * block.attention.head_dim**-0.5
    return scores.softmax(-1).mean((1, 2))


__all__ = ["AlignmentLoss", "MapAlignmentLoss"]
