"""Losses of bootstrapping."""

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


# In each token's RoI, the teacher's tokens are sampled at a grid of `POINTS` x `POINTS` points.
POINTS = 4
# The attention of this share of the teacher's blocks is averaged. The blocks are the last ones, because late blocks
# attend to parts of an object.
ATTENDING_SHARE = 1 / 3


class AlignmentLoss(nn.Module):
    """Loss of bootstrapping: the distance between the embeddings of student and teacher (Gao et al. 2024, equation 5),
    plus further terms with the weights in `args`.

    Args:
        student (`PreTrainedModel`): The student.
        teacher (`Anatomy`): The teacher.
        args (`BootstrapArguments`): Kind of the distance, and weights and layers of the further terms.

    Raises:
        ValueError: If the embeddings of student and teacher differ in width, or if only one of them is projected.
    """

    def __init__(self, student: nn.Module, teacher: Anatomy, args):
        super().__init__()
        config = student.config
        projects = hasattr(student, "visual_projection")
        width = config.projection_dim if projects else config.pooled_size
        if width != teacher.embedding_size or projects != (teacher.projection is not None):
            raise ValueError(
                f"The student, a {type(student).__name__}, has {'projected ' if projects else ''}embeddings {width} "
                f"wide. Those of its teacher, a {teacher.name}, are {'projected ' if teacher.projection else ''}"
                f"{teacher.embedding_size} wide. Build the student by from_teacher, or by frugalvit.bootstrap."
            )
        self.args = args
        self.project = getattr(student, "visual_projection", nn.Identity())
        # The heads are in a tuple, so that they are not registered as modules of the loss.
        self.heads = (getattr(student, "classifier", None), teacher.classifier)
        self.align_tokens = self.align_maps = None
        if args.token_loss_weight:
            self.align_tokens = TokenAlignment(student, teacher, args.token_layers, args.token_distance)
        if args.dense_loss_weight:
            self.align_maps = MapAlignment(student, teacher, args.dense_layers)
        # For placement by content, the student learns to predict the teacher's attention.
        self.predicts_attention = config.has_patch_embedding and config.placement != "grid"
        # Whether the loss compares more of the teacher than its final embedding.
        self.reads_states = bool(self.align_tokens or self.align_maps or self.predicts_attention)
        # Arguments of the student's forward pass: `embedding_options` for the embedding alone, `options` for the loss.
        backbone = isinstance(student, BackboneMixin) and self.align_maps
        self.embedding_options = {"output_embedding": True} if backbone else {"output_tokens": False}
        self.options = dict(self.embedding_options)
        if self.align_tokens or self.align_maps:
            self.options |= {"output_tokens": True} | TokenAlignment.arguments
        if self.predicts_attention:
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
            outputs: The outputs of the student's base model, called with `options`.
            embedding (`torch.Tensor`): The teacher's embeddings, `(batch, embedding_size)` float32.
            labels (`torch.Tensor`, *optional*): Class indices, `(batch,)`.
            attention (`torch.Tensor`, *optional*): The teacher's attention, `(batch, rows, columns)`.
            tokens (`list[torch.Tensor]`, *optional*): The teacher's tokens before the first block and after each
                block, `(batch, prefix + patches, hidden_size)`.
            maps (`list[torch.Tensor]`, *optional*): The teacher's feature maps, `(batch, hidden_size, rows, columns)`.
        """
        args = self.args
        student_head, teacher_head = self.heads
        student_embedding = self.project(outputs.pooler_output).float()
        if args.loss == "cosine":
            loss = (1 - F.cosine_similarity(student_embedding, embedding)).mean()
        else:
            loss = divergence(student_head(student_embedding), teacher_head(embedding), args.temperature)
        if args.label_loss_weight:
            loss = loss + args.label_loss_weight * F.cross_entropy(student_head(student_embedding), labels)
        if self.predicts_attention and outputs.attention_forecast is not None:
            # The attention loss needs no factor, because no other loss trains the weights that predict attention.
            loss = loss + attention_loss(outputs.attention_forecast, attention)
        if self.align_tokens:
            loss = loss + args.token_loss_weight * self.align_tokens(outputs, tokens)
        if self.align_maps:
            loss = loss + args.dense_loss_weight * self.align_maps(outputs, maps)
        return loss


class MapAlignmentLoss(nn.Module):
    """Distance between feature maps of a student and of a teacher, averaged over grid cells and layers.

    A vector that all cells share does not distinguish cells. For each image, the mean of the teacher's map over all
    cells is therefore subtracted from both maps. After that, the distance at a cell is 1 minus the cosine of the two
    maps' vectors, plus `scale_weight` times the squared logarithm of the ratio of the vectors' lengths.
    """

    def __init__(self, scale_weight: float = 0.1):
        super().__init__()
        self.scale_weight = scale_weight

    def forward(self, maps: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the loss, a float32 scalar. `maps` and `targets` contain a feature map, `(batch, channels, rows,
        columns)`, for each layer. `targets` are the teacher's maps (`compute_feature_maps`). `maps` are interpolated
        to the grid of `targets`."""
        losses = []
        for found, target in zip(maps, targets, strict=True):
            found = found.float()
            target = target.float()
            if found.shape != target.shape:
                found = F.interpolate(found, target.shape[-2:], mode="bilinear")
            common = target.mean((2, 3), keepdim=True)
            found = found - common
            target = target - common
            # Small lengths are clamped, because differences from the mean are only noise in an image of one color.
            least = common.norm(dim=1).clamp(min=1e-4) / 100
            lengths = [features.norm(dim=1).clamp(min=least).log() for features in (found, target)]
            scale = (lengths[0] - lengths[1]).square().mean()
            losses.append((1 - F.cosine_similarity(found, target)).mean() + self.scale_weight * scale)
        return torch.stack(losses).mean()


class MapAlignment:
    """Compute `MapAlignmentLoss` between the feature maps of student and teacher. If the student is a backbone, its
    feature maps are used. Otherwise, the student's tokens are scattered to a map, each token to the cells in its RoI.

    Args:
        student (`PreTrainedModel`): The student.
        teacher (`Anatomy`): The teacher.
        layers (`list[int]`, *optional*): Negative indices of layers. Default: the `out_indices` of a student that is a
            backbone, or the last layer of any other student.
    """

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
                raise ValueError(f"dense_layers is {layers}, expected the layers of the backbone, {self.layers}.")
            if not config.reshape_hidden_states:
                raise ValueError("The backbone's reshape_hidden_states is False, expected True for dense_loss_weight.")
        most = min(len(student.base_model.layers), len(teacher.blocks)) + 1
        if wrong := [layer for layer in self.layers if not -most <= layer < 0]:
            raise ValueError(f"dense_layers has {wrong[0]}, expected -1, the last, to {-most}, before all blocks.")

    def teacher_maps(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the teacher's feature maps, `(batch, hidden_size, rows, columns)`, from its hidden states."""
        return [as_map(self.teacher, states[layer]) for layer in self.layers]

    def __call__(self, outputs, targets: list[torch.Tensor]) -> torch.Tensor:
        if (maps := getattr(outputs, "feature_maps", None)) is None:
            weights = assignment_weights(outputs.rois[-1], *self.teacher.grid)
            states = [self.norm(outputs.hidden_states[layer]) for layer in self.layers]
            maps = [scatter_to_grid(each[:, self.num_prefix_tokens :], weights) for each in states]
        return self.distance(maps, targets)


class TokenAlignment:
    """Hints (Romero et al. 2015) for the tokens of a SparseFormer. Gao et al. do not use this loss. The loss is the
    mean squared distance of each latent token from the mean of the teacher's tokens in the latent token's RoI,
    averaged over layers. [CLS] and registers are left out. RoIs get no gradient.

    Args:
        student (`PreTrainedModel`): The student.
        teacher (`Anatomy`): The teacher.
        layers (`list[int]`, *optional*): Indices of the student's hidden states, for example -2, the default
            `vision_feature_layer` of LLaVA. Default: all.
        distance (`str`): "normalized" compares tokens after a LayerNorm. "raw" compares tokens without a LayerNorm,
            and divides the distance by the variance of the teacher's patches. Use "raw" for a LLaVA's vision tower.
    """

    # Arguments of the student's forward pass that this loss requires.
    arguments = {"output_hidden_states": True, "output_rois": True}

    def __init__(self, student, teacher: Anatomy, layers: list[int] | None = None, distance: str = "normalized"):
        self.grid = teacher.grid
        self.num_prefix_tokens = student.config.num_prefix_tokens
        self.depths = len(student.base_model.layers) + 1
        self.layers = layers or range(self.depths)
        self.distance = distance
        if self.depths > len(teacher.blocks) + 1:
            raise ValueError("The student has more blocks than the teacher, expected token_loss_weight 0.")
        if wrong := [layer for layer in self.layers if not -self.depths <= layer < self.depths]:
            raise ValueError(f"token_layers has {wrong[0]}, expected {-self.depths} to {self.depths - 1}.")

    def __call__(self, outputs, teacher_tokens: list[torch.Tensor]) -> torch.Tensor:
        weights = self.patch_weights(outputs.rois[-1].detach())
        # The student's blocks correspond to the teacher's last blocks.
        targets = teacher_tokens[-self.depths :]
        losses = []
        for layer in self.layers:
            patches = targets[layer][:, -weights.shape[-1] :].float()
            tokens = outputs.hidden_states[layer][:, self.num_prefix_tokens :].float()
            expected = weights @ patches
            if self.distance == "normalized":
                normalized = [F.layer_norm(each, each.shape[-1:]) for each in (tokens, expected)]
                losses.append(F.mse_loss(*normalized))
            else:
                losses.append(F.mse_loss(tokens, expected) / patches.var((0, 1)).mean())
        return torch.stack(losses).mean()

    def patch_weights(self, rois: torch.Tensor) -> torch.Tensor:
        """Return the weight of each of the teacher's patches for each token, `(batch, tokens, patches)`.

        Each token's RoI contains a grid of points. At each point, the teacher's patches are interpolated bilinearly.
        The weight of a patch for a token is the patch's weight in this interpolation, averaged over the token's
        points. The weights for a token sum to 1. Points outside of the image are moved to the edge of the image.
        """
        steps = (torch.arange(POINTS, device=rois.device) + 0.5) / POINTS
        y, x = torch.meshgrid(steps, steps, indexing="ij")
        low = rois[..., None, :2]
        high = rois[..., None, 2:]
        points = low + torch.stack([x, y], dim=-1).flatten(0, 1) * (high - low)
        # Each patch has a map, which is 1 at this patch and 0 at all other patches. The map is interpolated at each
        # point. The interpolated value is the weight of this patch at the point.
        patches = self.grid[0] * self.grid[1]
        one_hot = torch.eye(patches, device=rois.device).view(1, patches, *self.grid).expand(len(rois), -1, -1, -1)
        return sample_features(one_hot, points, padding_mode="border").mean(2)


def attention_loss(logits: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence between the attention that the student predicts and the teacher's
    attention, averaged over images.

    Args:
        logits (`torch.Tensor`): Logits of the attention that the student predicts, `(batch, rows, columns)`.
        attention (`torch.Tensor`): The teacher's attention, `(batch, rows, columns)`. Its grid may differ from the
            grid of `logits`.
    """
    if attention.shape != logits.shape:
        attention = F.adaptive_avg_pool2d(attention, logits.shape[1:])
        attention = attention / attention.sum((1, 2), keepdim=True)
    return F.kl_div(logits.flatten(1).log_softmax(1), attention.flatten(1), reduction="batchmean")


def teacher_attention(teacher: Anatomy, states: list[torch.Tensor]) -> torch.Tensor:
    """Return a teacher's attention to image patches, `(batch, rows, columns)`. The attention of an image sums to 1.
    The queries are the class tokens. If there are no class tokens, the queries are all patches. Attention is averaged
    over heads and over the last third of blocks.

    Args:
        teacher (`Anatomy`): The teacher.
        states (`list[torch.Tensor]`): The inputs of the blocks, `(batch, prefix + patches, hidden_size)`.
    """
    count = max(round(ATTENDING_SHARE * len(teacher.blocks)), 1)
    pairs = list(zip(teacher.blocks, states, strict=False))[-count:]
    attention = torch.stack([attention_to_patches(teacher, block, tokens) for block, tokens in pairs]).mean(0)
    return attention.unflatten(1, teacher.grid)


def attention_to_patches(teacher: Anatomy, block, tokens: torch.Tensor) -> torch.Tensor:
    """Return a block's attention to each patch, `(batch, patches)` float32, averaged over heads and queries. The
    attention of an image sums to 1."""
    query_tokens = (
        slice(0, teacher.num_class_tokens) if teacher.num_class_tokens else slice(teacher.num_prefix_tokens, None)
    )
    queries, keys = compute_queries_and_keys(teacher, block, tokens)
    keys = keys[:, :, teacher.num_prefix_tokens :]
    scores = queries[:, :, query_tokens].float() @ keys.float().transpose(2, 3) * block.attention.head_dim**-0.5
    return scores.softmax(-1).mean((1, 2))


__all__ = ["AlignmentLoss", "MapAlignmentLoss"]
