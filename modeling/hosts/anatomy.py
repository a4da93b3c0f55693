"""Dataclasses that describe the modules and weights of a vision transformer.

The functions `read` in `transformers.py`, `timm.py` and `open_clip.py` return an `Anatomy`. Its weights are the
model's own weights or views of them, so a change of these weights changes the model. Two weights are new tensors: the
patch embedding of C-RADIO with pixel normalization, and the query projection of AIMv2 (an identity matrix).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import rotary_table, rotate_tokens


# Keys: class names of activations in lower case, without "pytorch" and "activation". Values: keys of `ACT2FN`.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelutanh": "gelu_pytorch_tanh",
    "quickgelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}


class NotAPlainViT(ValueError):
    """Error for an unsupported model or an unsupported part of a model. The message is the reason."""


@dataclass(frozen=True, eq=False)
class Projection:
    """Linear map that is not a module, for example the query projection in a fused QKV layer."""

    weight: torch.Tensor  # Shape: (out_features, in_features).
    bias: torch.Tensor | None = None


Linear = nn.Linear | Projection


@dataclass(frozen=True, eq=False)
class GridPositions:
    """Table of position embeddings. For grids other than `grid`, the table is interpolated as in the model's library.

    Args:
        table (`torch.Tensor`): `(prefix tokens + rows * columns, hidden_size)`. Leading axes of size 1 are allowed.
        grid (pair of `int`): Number of patch rows and number of patch columns in the table.
        mode (`str`): Interpolation mode of `F.interpolate`.
        antialias (`bool`): Whether `F.interpolate` uses antialiasing.
        crops (`bool`): Whether the table is first interpolated to a square grid and then cropped to its top left part.
    """

    table: torch.Tensor
    grid: tuple[int, int]
    mode: str = "bicubic"
    antialias: bool = False
    crops: bool = False

    def __call__(self, grid: tuple[int, int]) -> torch.Tensor:
        """Return the position embeddings of the patches of a grid, `(rows * columns, hidden_size)`."""
        rows, columns = grid
        table = self.table.flatten(0, -2)[-math.prod(self.grid) :]
        if (rows, columns) == tuple(self.grid):
            return table
        maps = table.float().unflatten(0, self.grid).permute(2, 0, 1).unsqueeze(0)
        size = (max(grid), max(grid)) if self.crops else (rows, columns)
        align_corners = None if self.mode == "nearest" else False
        maps = F.interpolate(maps, size, mode=self.mode, align_corners=align_corners, antialias=self.antialias)
        return maps[0, :, :rows, :columns].flatten(1).mT.to(table.dtype)


@dataclass(frozen=True, eq=False)
class Attention:
    """Parts of multi-head attention. Queries, keys and values have the same width as the tokens."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    num_heads: int
    query_norm: nn.Module | None = None  # Norm of each head's queries, applied before rotary embeddings.
    key_norm: nn.Module | None = None
    output_norm: nn.Module | None = None  # Norm before the output projection.

    @property
    def head_dim(self) -> int:
        return len(self.query.weight) // self.num_heads


@dataclass(frozen=True, eq=False)
class MLP:
    """Parts of the MLP `down(norm(activation(up(x))))`. A gated MLP is `down(norm(activation(gate(x)) * up(x)))`."""

    up: Linear
    down: Linear
    activation: str  # A key of Transformers' `ACT2FN`.
    gate: Linear | None = None
    norm: nn.Module | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """Parts of a pre-norm transformer block: `x + attention(attention_norm(x))`, then `x + mlp(mlp_norm(x))`.

    Raises:
        NotAPlainViT: if `module` has parameters outside of the fields of `Block`, a norm that is neither LayerNorm nor
            RMSNorm, quantized weights, or queries, keys or values that are not as wide as the tokens.
    """

    module: nn.Module
    attention_norm: nn.Module
    attention: Attention
    mlp_norm: nn.Module
    mlp: MLP
    attention_scale: torch.Tensor | None = None  # Layer scale of shape (hidden_size,).
    mlp_scale: torch.Tensor | None = None

    def __post_init__(self):
        norms = (self.attention_norm, self.mlp_norm)
        for norm in norms:
            if not isinstance(norm, nn.LayerNorm) and not type(norm).__name__.lower().endswith("rmsnorm"):
                raise NotAPlainViT(f"it has a {type(norm).__name__} where a LayerNorm or RMSNorm is expected")
        tensors = [self.attention_scale, self.mlp_scale]
        for part in (*norms, *vars(self.attention).values(), *vars(self.mlp).values()):
            if isinstance(part, nn.Module):
                tensors += part.parameters()
            elif isinstance(part, Projection):
                tensors += [part.weight, part.bias]
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
        # Parameters of inserted `ContextBroadcast` modules are allowed, although no field holds them.
        unknown = [
            name
            for name, parameter in self.module.named_parameters()
            if parameter.untyped_storage().data_ptr() not in known and "context_broadcast_" not in name
        ]
        if unknown:
            raise NotAPlainViT(
                f"its {type(self.module).__name__} has parameters that no plain block has ({', '.join(unknown[:4])})"
            )
        attention = self.attention
        width = attention.query.weight.shape[1]
        for linear in (attention.query, attention.key, attention.value, attention.output):
            if not linear.weight.is_floating_point():
                raise NotAPlainViT(f"its weights are {linear.weight.dtype}; load it without a quantization_config")
            if linear.weight.shape != (width, width):
                raise NotAPlainViT("its attention is not as wide as its tokens, or shares keys and values among heads")


@dataclass(frozen=True, eq=False)
class Rotary:
    """Axial rotary position embeddings of patches (Su et al. 2021, arXiv 2104.09864).

    For each axis, the patch center c (0 to 1 across the image) gives the angles `(scale * c + shift) * f`. The
    frequencies are f = theta^(-i / n) with n = head_dim / 4 and i = 0, …, n - 1. EVA-02 (Fang et al. 2023, arXiv
    2303.11331) and DINOv3 (Siméoni et al. 2025, arXiv 2508.10104) use this formula with different arguments.

    Args:
        theta (`float`): Base of the frequencies.
        scale, shift (pair of `float`): Factor and offset of the y axis, then of the x axis.
        channels (`torch.Tensor`): `(head_dim,)`, a permutation of a head's channels. After the permutation, channel i
            rotates with channel i + head_dim / 2. The n channel pairs for y come before the n channel pairs for x.
    """

    theta: float
    scale: tuple[float, float]
    shift: tuple[float, float]
    channels: torch.Tensor

    @property
    def config_fields(self) -> dict:
        """The fields `rope_theta` and `rope_coordinates` of a SparseFormer configuration."""
        ends = [scale + shift for scale, shift in zip(self.scale, self.shift, strict=True)]
        return {"rope_theta": self.theta, "rope_coordinates": [*self.shift, *ends]}

    def rotate(self, states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Permute the channels of queries or keys, `(batch, heads, prefix + patches, head_dim)`, by `channels`. Then
        rotate the patch tokens. The patches form `grid` (rows, columns)."""
        axes = [(torch.arange(count, device=states.device) + 0.5) / count for count in grid]
        centers = torch.cartesian_prod(*axes)
        cos, sin = rotary_table(centers.unsqueeze(0), self.theta, self.scale, self.shift, states.shape[-1])
        states = states[..., self.channels.to(states.device)]
        return rotate_tokens(states, cos, sin, states.shape[2] - len(centers))


@dataclass(frozen=True, eq=False)
class PatchEmbedding:
    """Linear map from the pixels of a patch to its token."""

    projection: nn.Conv2d | Projection  # Weight of shape (hidden_size, channels, patch height, patch width).
    norm: nn.Module | None = None  # `norm` normalizes the tokens before position embeddings are added.


@dataclass(frozen=True, eq=False)
class AttentionPooling:
    """Pooling by one learned query that attends to all tokens, as in SigLIP and AIMv2."""

    probe: torch.Tensor  # Input of `attention.query`, (1, hidden_size).
    attention: Attention
    norm: nn.Module | None = None  # Norm before `mlp`.
    mlp: MLP | None = None  # The output of `mlp` is added to the output of the attention.


@dataclass(frozen=True, eq=False)
class Pooling:
    """Method that pools the tokens of a model into the image embedding.

    Args:
        mode (`str`): A value of the field `pooling` of SparseFormer configurations.
        class_tokens (list of `int`, *optional*):
            Indices of the class tokens that are pooled. By default, all class tokens are pooled.
        before_norm (`bool`): Whether the tokens are pooled before the final norm.
        head (`AttentionPooling`, *optional*): The attention pooling, for the modes that need one.
    """

    mode: str = "cls"
    class_tokens: list[int] | None = None
    before_norm: bool = False
    head: AttentionPooling | None = None


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Description of a vision transformer by its parts.

    Parts of fused layers are views of the model's weights. After the model is moved or cast, these views are outdated:
    read the model again. If `unsupported_reason` is set, `blocks` and most other fields have their default values.

    Args:
        model (`nn.Module`): The vision transformer, without wrappers and text towers.
        blocks (list of `Block`): The transformer blocks.
        image_size (pair of `int`): Height and width of the input images in pixels.
        grid (pair of `int`): Number of patch rows and number of patch columns.
        num_class_tokens (`int`): Number of class tokens before the patches.
        num_register_tokens (`int`): Number of register tokens between class tokens and patches.
        prefix_tokens (list of `torch.Tensor`): Class tokens and register tokens, each `(…, hidden_size)`.
        patches (`PatchEmbedding`, *optional*): The patch embedding.
        patch_positions (`Callable`, *optional*): Function from a grid (rows, columns) to position embeddings,
            `(rows * columns, hidden_size)`, such as `GridPositions`. None if the model adds no position embeddings.
        rotary (`Rotary`, *optional*): Rotary position embeddings of the attention.
        pre_norm, norm (`nn.Module`, *optional*): Norms before the first block and after the last block.
        pooling (`Pooling`): How the tokens are pooled.
        projection (`nn.Linear` or `Projection`, *optional*): Linear map after pooling, as in CLIP.
        classifier (`nn.Linear`, *optional*): Linear map from the embedding to logits.
        labels (`dict`): `id2label`, `label2id` and `problem_type` of the classifier.
        embed (`Callable`, *optional*): Function from images, `(batch, channels, height, width)`, to embeddings,
            `(batch, embedding_size)`. An embedding is the output of `pooling` or, in a CLIP model, the output of
            `projection` after `pooling`. Embeddings are not L2-normalized.
        run_classifier (`Callable`, *optional*): Function from images to logits.
        unsupported_reason (`str`, *optional*): Reason why the model is not a plain vision transformer.
        unsupported_patches_reason (`str`, *optional*): Reason why `patches` could not be read.
        unsupported_embedding_reason (`str`, *optional*): Reason why `pooling` or `projection` could not be read.
        source (`nn.Module`, *optional*): The model that was passed to `read_anatomy`.
    """

    model: nn.Module
    blocks: list[Block] = field(default_factory=list)
    image_size: tuple[int, int] = (0, 0)
    grid: tuple[int, int] = (0, 0)
    num_class_tokens: int = 0
    num_register_tokens: int = 0
    prefix_tokens: list[torch.Tensor] = field(default_factory=list)
    patches: PatchEmbedding | None = None
    patch_positions: Callable[[tuple[int, int]], torch.Tensor] | None = None
    rotary: Rotary | None = None
    pre_norm: nn.Module | None = None
    norm: nn.Module | None = None
    pooling: Pooling = Pooling()
    projection: Linear | None = None
    classifier: nn.Linear | None = None
    labels: dict = field(default_factory=dict)
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    run_classifier: Callable[[torch.Tensor], torch.Tensor] | None = None
    unsupported_reason: str | None = None
    unsupported_patches_reason: str | None = None
    unsupported_embedding_reason: str | None = None
    source: nn.Module | None = None

    def require_plain(self, purpose: str, embeds: bool = False, patches: bool = False):
        """Raise a ValueError with the reason if the model is not a plain vision transformer.

        Args:
            purpose (`str`): Verb for the error message, for example "bootstrap from".
            embeds (`bool`): Whether to raise the error also if `unsupported_embedding_reason` is set.
            patches (`bool`): Whether to raise the error also if `unsupported_patches_reason` is set.
        """
        reasons = [self.unsupported_reason]
        if embeds:
            reasons.append(self.unsupported_embedding_reason)
        if patches:
            reasons.append(self.unsupported_patches_reason)
        for reason in reasons:
            if reason is not None:
                raise self.unsupported_error(purpose, reason)

    def unsupported_error(self, purpose: str, reason: str) -> ValueError:
        """Return the ValueError for an unsupported model. `purpose` is a verb for the message."""
        return ValueError(
            f"Cannot {purpose} {self.name}: {reason}. Expected a plain pre-norm vision transformer of Transformers, "
            "timm or open_clip; docs/models.md lists them."
        )

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        return self.num_class_tokens + self.num_register_tokens

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        if self.patches is not None:
            return tuple(self.patches.projection.weight.shape[2:])
        return tuple(pixels // count for pixels, count in zip(self.image_size, self.grid, strict=True))

    @property
    def num_channels(self) -> int:
        """Number of channels of the images."""
        if self.patches is not None:
            return self.patches.projection.weight.shape[1]
        return next((module.in_channels for module in self.model.modules() if isinstance(module, nn.Conv2d)), 3)

    @property
    def embedding_size(self) -> int:
        """Number of channels of the embedding."""
        if self.projection is not None:
            return len(self.projection.weight)
        hidden_size = self.blocks[0].attention.query.weight.shape[1]
        if self.pooling.mode == "cls_and_latent_mean":
            return 2 * hidden_size
        if self.pooling.mode == "cls":
            return len(self.pooling.class_tokens or range(self.num_class_tokens)) * hidden_size
        return hidden_size

    @property
    def position_table(self) -> torch.Tensor | None:
        """View of the model's table of position embeddings, `(tokens, hidden_size)`. None if the model computes or
        interpolates its position embeddings."""
        if not isinstance(self.patch_positions, GridPositions) or self.patch_positions.grid != self.grid:
            return None
        return self.patch_positions.table.flatten(0, -2)


# Model classes and the readers that `register_reader` added for them.
_READERS: dict[type, Callable] = {}


def register_reader(model_class: type, reader: Callable[[nn.Module, tuple[int, int] | None], Anatomy]):
    """Register a reader for a model class. `read_anatomy` uses this reader for models of exactly this class.

    Args:
        model_class (`type`): The model class.
        reader (`Callable`): Function that takes a model and an image size (height and width, or None) and returns an
            `Anatomy`. docs/models.md has an example.
    """
    _READERS[model_class] = reader


def read_anatomy(model: nn.Module | Anatomy, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a vision transformer of Transformers, timm, open_clip or this package into an `Anatomy`.

    If the model is a wrapper or has a text tower, its vision tower is read. `register_reader` adds readers for more
    classes. If the model is not a plain pre-norm vision transformer, `Anatomy.unsupported_reason` is set.

    Args:
        model (`nn.Module` or `Anatomy`): The model. An `Anatomy` is returned unchanged.
        image_size (pair of `int`, *optional*):
            Height and width of the images in pixels, if they differ from the model's configuration. For example,
            DINOv2 is configured for 518 pixels, but its image processor returns images of 224 pixels. Models of
            Transformers interpolate position embeddings in each forward pass. The image size of timm models is changed
            in place.

    Raises:
        ValueError: if `model` is not an `nn.Module`, takes only texts, or does not take images of `image_size`.
    """
    if isinstance(model, Anatomy):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"Expected a model, got {type(model).__name__}; load it first.")
    image_size = None if image_size is None else tuple(image_size)
    # Select the vision tower of an open_clip model, the timm model in a Transformers wrapper, or the model itself.
    part = model.visual if hasattr(model, "encode_image") else getattr(model, "timm_model", model)
    if type(part) in _READERS:
        read = _READERS[type(part)]
    elif hasattr(part, "config") and hasattr(part, "base_model"):
        from .transformers import read
    elif is_timm(part):
        from .timm import read
    else:
        from .open_clip import read

    anatomy = read(part, image_size)
    labels = anatomy.labels
    if anatomy.classifier is not None and hasattr(getattr(model, "config", None), "id2label"):
        id2label = dict(model.config.id2label)
        # `label2id` is None if the configuration was created with `id2label` only.
        label2id = model.config.label2id or {name: index for index, name in id2label.items()}
        labels = {"id2label": id2label, "label2id": dict(label2id), "problem_type": model.config.problem_type}
    if not anatomy.unsupported_reason and image_size not in (None, anatomy.image_size):
        own, other = (" x ".join(map(str, size)) for size in (anatomy.image_size, image_size))
        raise ValueError(f"{anatomy.name} takes images of {own} pixels alone, got {other}.")
    return dataclasses.replace(anatomy, labels=labels, source=model)


def activation_name(activation: nn.Module | None) -> str:
    """Return the `ACT2FN` key of an activation module. Raise `NotAPlainViT` if the activation is unknown."""
    name = type(activation).__name__.lower().removeprefix("pytorch").removesuffix("activation")
    if name not in _ACTIVATIONS:
        raise NotAPlainViT(f"its activation {type(activation).__name__} is not one of {sorted(_ACTIVATIONS.values())}")
    if name == "gelu" and getattr(activation, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    return _ACTIVATIONS[name]


def find(module: nn.Module | None, names: Sequence[str]) -> nn.Module | None:
    """Return the first child module that has a name in `names` and is not an `nn.Identity`, or None."""
    parts = (getattr(module, name, None) for name in names)
    return next((part for part in parts if isinstance(part, nn.Module) and not isinstance(part, nn.Identity)), None)


def read_convolution(
    module: nn.Module | None, norm: nn.Module | None = None
) -> tuple[PatchEmbedding | None, str | None]:
    """Return `(PatchEmbedding(module, norm), None)` for a convolution that embeds patches without overlaps and gaps.
    Otherwise, return `(None, reason)`."""
    if not isinstance(module, nn.Conv2d):
        return None, f"its patches are embedded by a {type(module).__name__}, expected one convolution"
    if module.stride != module.kernel_size or module.padding not in ((0, 0), "valid"):
        return None, f"its patches overlap or leave gaps ({module})"
    return PatchEmbedding(module, norm), None


def is_timm(model: nn.Module) -> bool:
    """Whether a module has the methods of a timm model."""
    return all(hasattr(model, name) for name in ("forward_features", "forward_head", "reset_classifier"))


def split_linear(count: int, weight: torch.Tensor, bias: torch.Tensor | Sequence | None) -> list[Projection]:
    """Split a fused linear layer into equal parts.

    Args:
        count (`int`): Number of parts.
        weight (`torch.Tensor`): `(count * out, in)`.
        bias (`torch.Tensor` or list, *optional*): `(count * out,)`, or a list that has a bias or None for each part.
    """
    if bias is None:
        biases = [None] * count
    elif isinstance(bias, torch.Tensor):
        biases = bias.chunk(count)
    else:
        biases = bias
    return [Projection(part, part_bias) for part, part_bias in zip(weight.chunk(count), biases, strict=True)]
