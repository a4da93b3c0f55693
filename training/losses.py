"""Losses of all trainings, as modules."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from ..modeling.dense import shares_of_tokens, spread
from ..modeling.hosts import Anatomy
from ..modeling.layers import divergence
from ..modeling.modeling_sparseformer import SparseFormerBackbone
from .components.token_alignment import TokenAlignment, distance_from_largest


@dataclass
class Targets:
    """A teacher's outputs for a batch of images, with which a student is aligned.

    Args:
        embedding (`torch.Tensor`): `(batch, embedding_size)` float32.
        attention (`torch.Tensor`, *optional*): Shares of its attention that fall on patches, `(batch, rows, columns)`.
        tokens (`list[torch.Tensor]`, *optional*):
            Tokens before the first block and after each, `(batch, prefix + patches, hidden_size)`.
        maps (`list[torch.Tensor]`, *optional*):
            Feature maps of the layers that the loss compares, `(batch, hidden_size, rows, columns)`.
    """

    embedding: torch.Tensor
    attention: torch.Tensor | None = None
    tokens: list[torch.Tensor] = field(default_factory=list)
    maps: list[torch.Tensor] = field(default_factory=list)


def foretells_attention(student: nn.Module) -> bool:
    """Whether a student learns to predict where its teacher attends."""
    config = student.config
    return config.embeds_patches and config.placement == "content" and config.placement_rule == "learned"


def forecast_loss(logits: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of a predicted attention from a teacher's, a scalar, the mean over images.

    Args:
        logits (`torch.Tensor`): The prediction, `(batch, rows, columns)` float32.
        attention (`torch.Tensor`): The teacher's shares, `(batch, rows, columns)`, of any number of rows and columns.
    """
    if attention.shape != logits.shape:
        attention = F.adaptive_avg_pool2d(attention, logits.shape[1:])
        attention = attention / attention.sum((1, 2), keepdim=True)
    return F.kl_div(logits.flatten(1).log_softmax(1), attention.flatten(1), reduction="batchmean")


class AlignmentLoss(nn.Module):
    """Loss of a student beside its teacher: the distance of their embeddings (Gao et al. 2024, equation 5), and the
    terms that `args` adds.

    Args:
        student (`SparseFormerPreTrainedModel`): The student, whose classifier or projection is read. The outputs of
            its base model are compared.
        teacher (`Anatomy`): The teacher's anatomy.
        args (`BootstrapArguments`): Names the loss and the weights of the terms.

    Raises:
        ValueError: if student and teacher lack the tokens, layers or counts that a term needs.
    """

    def __init__(self, student: nn.Module, teacher: Anatomy, args):
        super().__init__()
        self.project = getattr(student, "visual_projection", nn.Identity())
        # Not theirs to train or to save.
        self.heads = (getattr(student, "classifier", None), teacher.classifier)
        self.args, self.num_prefix_tokens = args, student.config.num_prefix_tokens
        if args.elastic_loss_weight and len(student.config.trained_token_counts) == 1:
            raise ValueError(
                "--elastic-loss-weight compares counts of tokens, and the student has one; give "
                "--elastic-token-counts."
            )
        self.align_tokens = None
        if args.token_loss_weight:
            self.align_tokens = TokenAlignment(student, teacher, args.token_layers, args.token_distance)
        self.align_maps = None
        if args.dense_loss_weight:
            maps_of = MapsOfBackbone if isinstance(student, SparseFormerBackbone) else MapsOfTokens
            self.align_maps = maps_of(student, teacher, args.dense_layers)
        self.foretells = foretells_attention(student)

    @property
    def embedding_asked_for(self) -> dict[str, bool]:
        """Arguments with which the model that learns is called, so that it returns the embedding."""
        return {"output_embedding": True} if isinstance(self.align_maps, MapsOfBackbone) else {"output_tokens": False}

    @property
    def outputs_asked_for(self) -> dict[str, bool]:
        """Arguments with which the model that learns is called, so that it returns all that the loss reads."""
        reads_tokens = self.align_tokens or self.align_maps or self.args.elastic_loss_weight
        asked = self.embedding_asked_for
        if reads_tokens:
            asked = asked | {"output_tokens": True} | TokenAlignment.arguments
        return {**asked, "output_attention_forecast": True} if self.foretells else asked

    def forward(self, outputs, targets: Targets, labels: torch.Tensor | None = None, largest=None) -> torch.Tensor:
        """Return the loss, a scalar.

        Args:
            outputs (`SparseFormerModelOutput`): Outputs of the student's base model for `outputs_asked_for`.
            targets (`Targets`): The teacher's, for the same images.
            labels (`torch.Tensor`, *optional*): `(batch,)` int64, for `args.label_loss_weight`.
            largest (`SparseFormerModelOutput`, *optional*): Outputs with the largest count of tokens, for
                `args.elastic_loss_weight`.
        """
        args, (classify, classify_teacher) = self.args, self.heads
        embedding = self.project(outputs.pooler_output).float()
        if args.loss == "cosine":
            loss = (1 - F.cosine_similarity(embedding, targets.embedding)).mean()
        else:
            loss = divergence(classify(embedding), classify_teacher(targets.embedding), args.temperature)
        if args.label_loss_weight:
            loss = loss + args.label_loss_weight * F.cross_entropy(classify(embedding), labels)
        if self.foretells:
            # Learned by weights of its own alone, so that it needs no weight.
            loss = loss + forecast_loss(outputs.attention_forecast, targets.attention)
        if self.align_tokens:
            loss = loss + args.token_loss_weight * self.align_tokens(outputs, targets.tokens)
        if self.align_maps:
            loss = loss + args.dense_loss_weight * self.align_maps(outputs, targets.maps)
        if args.elastic_loss_weight and largest is not None:
            distance = distance_from_largest(outputs, largest, self.num_prefix_tokens)
            loss = loss + args.elastic_loss_weight * distance
        return loss


class MapAlignmentLoss(nn.Module):
    """Distance of feature maps from a teacher's, averaged over cells and layers: of what distinguishes an image's
    cells, 1 minus the cosine of two vectors, and the squared log of the ratio of their lengths.

    The mean of the teacher's map over an image's cells is subtracted from both maps, as what all cells have in common
    is no help in telling them apart.

    Args:
        scale_weight (`float`, *optional*, defaults to 0.1): Weight of the term about lengths.
    """

    def __init__(self, scale_weight: float = 0.1):
        super().__init__()
        self.scale_weight = scale_weight

    def forward(self, maps: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the loss, a scalar in float32.

        Args:
            maps (sequence of `torch.Tensor`):
                Feature maps of a `SparseFormerBackbone`, one for each layer, `(batch, channels, rows, columns)`.
            targets (sequence of `torch.Tensor`):
                The teacher's, of the same layers and images, see `Anatomy.feature_maps`. If they have more cells, as
                those of larger images do, the student's are interpolated.

        Raises:
            ValueError: if there are no maps, or maps and targets differ in number, batch or channels.
        """
        shapes = [[tuple(each.shape[:2]) for each in several] for several in (maps, targets)]
        if not maps or shapes[0] != shapes[1]:
            raise ValueError(
                f"Got maps of batch and channels {shapes[0]} for a teacher's of {shapes[1]}; expected the same, one "
                "for each layer."
            )
        losses = []
        for found, target in zip(maps, targets, strict=True):
            found, target = found.float(), target.float()
            if found.shape != target.shape:
                found = F.interpolate(found, target.shape[-2:], mode="bilinear")
            common = target.mean((2, 3), keepdim=True)
            found, target = found - common, target - common
            # An image of one color has hardly any differences, whose lengths mean nothing.
            least = common.norm(dim=1).clamp(min=1e-4) / 100
            lengths = [features.norm(dim=1).clamp(min=least).log() for features in (found, target)]
            scale = (lengths[0] - lengths[1]).square().mean()
            losses.append((1 - F.cosine_similarity(found, target)).mean() + self.scale_weight * scale)
        return torch.stack(losses).mean()


class MapsOfTokens(nn.Module):
    """Distance of a student's feature maps from its teacher's, see `MapAlignmentLoss`. A student's map is that of
    `SparseFormerBackbone` without an upsampler: each cell has the state of the tokens whose RoIs cover it.

    Args:
        student (`SparseFormerPreTrainedModel`): The student, whose final norm is read.
        teacher (`Anatomy`): The teacher's anatomy, read for the images that it sees.
        layers (`list[int]`, *optional*): Layers, numbered from the last, -1, backwards; -1 alone by default.

    Raises:
        ValueError: if the student or its teacher has no such layer.
    """

    def __init__(self, student: nn.Module, teacher: Anatomy, layers: list[int] | None = None):
        super().__init__()
        self.layers, most = layers or [-1], min(len(student.base_model.layers), len(teacher.blocks)) + 1
        if wrong := [layer for layer in self.layers if not -most <= layer < 0]:
            raise ValueError(f"--dense-layers has {wrong[0]}, expected -1, the last, to {-most}, before all blocks.")
        self.num_prefix_tokens = student.config.num_prefix_tokens
        self.distance = MapAlignmentLoss()
        # Not theirs to train or to save.
        self.parts = (student.base_model.layernorm, teacher)

    def of_teacher(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """The teacher's maps, of its `states`."""
        teacher = self.parts[1]
        tokens = (teacher.normalize(states[layer])[:, -teacher.num_patches :] for layer in self.layers)
        return [each.mT.unflatten(-1, teacher.grid) for each in tokens]

    def forward(self, outputs, targets: list[torch.Tensor]) -> torch.Tensor:
        """The loss of the student's `outputs`, with hidden states and RoIs, beside the teacher's maps of the same
        images."""
        norm, teacher = self.parts
        shares = shares_of_tokens(outputs.rois[-1], *teacher.grid)
        maps = [
            spread(norm(outputs.hidden_states[layer])[:, self.num_prefix_tokens :], shares) for layer in self.layers
        ]
        return self.distance(maps, targets)


class MapsOfBackbone(MapsOfTokens):
    """Distance of the feature maps of a `SparseFormerBackbone`, which its upsamplers refine, from its teacher's.

    Args:
        student (`SparseFormerBackbone`): The student, whose `out_indices` are the layers.
        teacher (`Anatomy`), layers (`list[int]`, *optional*): As of `MapsOfTokens`.

    Raises:
        ValueError: if `layers` are not those of the backbone, or its maps are not normalized or in rows.
    """

    def __init__(self, student: nn.Module, teacher: Anatomy, layers: list[int] | None = None):
        own = [index - len(student.stage_names) for index in student.out_indices]
        if layers is not None and sorted(layers) != own:
            raise ValueError(
                f"--dense-layers are {layers}, and the backbone has maps of {own}; leave --dense-layers out, and name "
                "other layers by the backbone's out_indices."
            )
        if not (student.config.apply_layernorm and student.config.reshape_hidden_states):
            raise ValueError(
                "A backbone is aligned with apply_layernorm and reshape_hidden_states; set them to False when it has "
                "been trained."
            )
        super().__init__(student, teacher, own)

    def forward(self, outputs, targets: list[torch.Tensor]) -> torch.Tensor:
        """The loss of the backbone's `outputs` beside the teacher's maps of the same images."""
        return self.distance(outputs.feature_maps, targets)


__all__ = ["AlignmentLoss", "MapAlignmentLoss", "Targets"]
