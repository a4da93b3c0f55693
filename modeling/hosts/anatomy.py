"""Records of the modules and tensors of vision transformers of any library.

The readers in `transformers.py`, `timm.py` and `open_clip.py` return an `Anatomy` with the model's own weights, or
views of them, so changes through the record change the model; only the patch embedding of a C-RADIO that normalizes
pixels is computed. `running.py` has functions that run a model.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import rotary_table, rotate_half


# Class names of activations in lower case, without "pytorch" and "activation", and Transformers' names.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelutanh": "gelu_pytorch_tanh",
    "quickgelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}

T = TypeVar("T")


class NotAPlainViT(ValueError):
    """Error of a reader; its message is the reason why a model or a part is unsupported."""


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map that is no module of its own; weight and bias are views of a model's weights."""

    weight: torch.Tensor  # (out, in)
    bias: torch.Tensor | None = None


Linear = nn.Linear | Projection


@dataclass(frozen=True, eq=False)
class GridPositions:
    """Positions that are added to tokens. For other grids, they are interpolated as in the model's own library.

    Args:
        table (`torch.Tensor`): `(prefix tokens + rows * columns, hidden_size)`, or the same with leading axes of 1.
        grid (pair of `int`): Rows and columns of the patches in the table.
        mode (`str`): Mode of `F.interpolate`.
        antialias (`bool`): Argument of `F.interpolate`.
        crops (`bool`): Whether the positions of a rectangular grid are the top left part of a square grid's.
    """

    table: torch.Tensor
    grid: tuple[int, int]
    mode: str = "bicubic"
    antialias: bool = False
    crops: bool = False

    def __call__(self, grid: tuple[int, int]) -> torch.Tensor:
        """Return the positions of the patches of a grid, `(rows * columns, hidden_size)`."""
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
    """Multi-head attention whose queries, keys and values are as wide as the tokens."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    num_heads: int
    query_norm: nn.Module | None = None  # normalizes each head's queries before rotation
    key_norm: nn.Module | None = None
    output_norm: nn.Module | None = None  # precedes the output projection

    @property
    def head_dim(self) -> int:
        return len(self.query.weight) // self.num_heads


@dataclass(frozen=True, eq=False)
class MLP:
    """`down(norm(activation(up(x))))`, or, with a gate, `down(norm(activation(gate(x)) * up(x)))`."""

    up: Linear
    down: Linear
    activation: str  # a name of Transformers' `ACT2FN`
    gate: Linear | None = None
    norm: nn.Module | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """A pre-norm transformer block: `x + attention(attention_norm(x))`, then `x + mlp(mlp_norm(x))`.

    Raises:
        NotAPlainViT: if `module` has parameters that belong to no field, norms of another kind, quantized weights, or
            attention that is not as wide as its tokens.
    """

    module: nn.Module
    attention_norm: nn.Module
    attention: Attention
    mlp_norm: nn.Module
    mlp: MLP
    attention_scale: torch.Tensor | None = None  # layer scale, (hidden_size,)
    mlp_scale: torch.Tensor | None = None

    def __post_init__(self):
        norms = (self.attention_norm, self.mlp_norm)
        for norm in norms:
            norm_type(norm)
        tensors = [self.attention_scale, self.mlp_scale]
        for part in (*norms, *vars(self.attention).values(), *vars(self.mlp).values()):
            if isinstance(part, nn.Module):
                tensors += part.parameters()
            elif isinstance(part, Projection):
                tensors += [part.weight, part.bias]
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
        # Parameters of inserted Context Broadcasting belong to no part, but are allowed.
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
    """Axial rotary positions of patches (Su et al. 2021, arXiv 2104.09864).

    A patch whose center is at `(y, x)`, 0 to 1 across the image, has the angles `(scale * center + shift) * f` with
    f = theta^(-i / n), i = 0, …, n - 1, n = head_dim / 4. EVA-02 (Fang et al. 2023, arXiv 2303.11331) and DINOv3
    (Siméoni et al. 2025, arXiv 2508.10104) differ only in `scale`, `shift` and the channels that rotate together.

    Args:
        theta (`float`): Base of the frequencies.
        scale, shift (pair of `float`): Map from centers to coordinates, y first.
        channels (`torch.Tensor`): `(head_dim,)`, a permutation of the model's channels after which channel i rotates
            with channel i + head_dim / 2: first the n pairs of y, then the n pairs of x.
    """

    theta: float
    scale: tuple[float, float]
    shift: tuple[float, float]
    channels: torch.Tensor

    @property
    def config_fields(self) -> dict:
        """Fields of a SparseFormer's configuration that describe this rotation."""
        ends = [scale + shift for scale, shift in zip(self.scale, self.shift, strict=True)]
        return {"rope_theta": self.theta, "rope_coordinates": [*self.shift, *ends]}

    def rotate(self, states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Rotate the patches among the tokens of queries or keys, `(batch, heads, prefix + patches, head_dim)`, and
        return the channels in the order of `channels`. The patches form `grid`."""
        axes = [(torch.arange(count, device=states.device) + 0.5) / count for count in grid]
        centers = torch.cartesian_prod(*axes)
        cos, sin = rotary_table(centers, self.theta, self.scale, self.shift, states.shape[-1])
        states = states[..., self.channels.to(states.device)]
        prefix, patches = states.split([states.shape[2] - len(centers), len(centers)], dim=2)
        return torch.cat([prefix, rotate_half(patches, cos.to(states.dtype), sin.to(states.dtype))], dim=2)


@dataclass(frozen=True, eq=False)
class PatchEmbedding:
    """The linear map from a patch's pixels to its token."""

    projection: nn.Conv2d | Projection  # weight (hidden_size, channels, patch height, patch width)
    norm: nn.Module | None = None  # precedes the addition of positions


@dataclass(frozen=True, eq=False)
class AttentionPooling:
    """One learned query that attends to all tokens, as in SigLIP and AIMv2."""

    probe: torch.Tensor  # (1, hidden_size), the input of `attention.query`
    attention: Attention
    norm: nn.Module | None = None  # precedes `mlp`
    mlp: MLP | None = None  # its output is added to the output of the attention


@dataclass(frozen=True, eq=False)
class Pooling:
    """How tokens become the embedding."""

    mode: str = "cls"  # a value of `pooling` in a SparseFormer's configuration
    class_tokens: list[int] | None = None  # indices of the pooled class tokens; None for all
    before_norm: bool = False
    head: AttentionPooling | None = None


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A vision transformer, part by part.

    Parts of fused layers are views of the model's weights, so that a model has to be read again after it was moved or
    cast. With an `unsupported_reason`, only `model` and the fields of prefix tokens are set.

    Args:
        model (`nn.Module`): The vision transformer, without wrappers and text towers.
        blocks (list of `Block`): Its transformer blocks.
        image_size (pair of `int`): Height and width of its images in pixels.
        grid (pair of `int`): Rows and columns of patches.
        num_class_tokens (`int`): Number of class tokens before the patches.
        num_register_tokens (`int`): Number of register tokens between class tokens and patches.
        prefix_tokens (list of `torch.Tensor`): Class tokens and registers, each `(…, hidden_size)`.
        patches (`PatchEmbedding`, *optional*): Its patch embedding.
        patch_positions (`Callable`, *optional*): `GridPositions`, or another function from a grid to the positions of
            its patches, `(rows * columns, hidden_size)`. None if no positions are added.
        rotary (`Rotary`, *optional*): Rotary positions of its attention.
        pre_norm, norm (`nn.Module`, *optional*): Norms before the first and after the last block.
        pooling (`Pooling`): How tokens become the embedding.
        projection (`nn.Linear` or `Projection`, *optional*): Maps the pooled tokens to a CLIP's embedding.
        classifier (`nn.Linear`, *optional*): Maps the embedding to logits.
        labels (`dict`): `id2label`, `label2id` and `problem_type` of the classifier.
        embed (`Callable`, *optional*): Maps images, `(batch, channels, height, width)`, to embeddings, `(batch,
            embedding_size)`: the projected embedding of a CLIP, not normalized, or the pooled tokens of other models.
        run_classifier (`Callable`, *optional*): Maps images to logits.
        unsupported_reason (`str`, *optional*): Reason why it is no plain vision transformer.
        unsupported_patches_reason (`str`, *optional*): Reason why `patches` were not read.
        unsupported_embedding_reason (`str`, *optional*): Reason why `pooling` or `projection` was not read.
        source (`nn.Module`, *optional*): The model that was given to `read_anatomy`.
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
        """Raise a ValueError with the reason if this model is no plain vision transformer.

        Args:
            purpose (`str`): A verb for the message, for example "bootstrap from".
            embeds, patches (`bool`): Whether its embedding, and its patch embedding, must be supported, too.
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
        """Return the error for a model that cannot be used; `purpose` is that of `require_plain`."""
        return ValueError(
            f"Cannot {purpose} {self.name}: {reason}. Expected a plain pre-norm vision transformer of Transformers, "
            "timm or open_clip; docs/models.md lists them."
        )

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def hidden_size(self) -> int:
        return self.blocks[0].attention.query.weight.shape[1]

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
        if self.pooling.mode == "cls_and_latent_mean":
            return 2 * self.hidden_size
        if self.pooling.mode == "cls":
            return len(self.pooling.class_tokens or range(self.num_class_tokens)) * self.hidden_size
        return self.hidden_size

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def position_table(self) -> torch.Tensor | None:
        """View of the model's table of positions, `(tokens, hidden_size)`, including those of prefix tokens, if any.
        None for a model that computes or interpolates its positions."""
        if not isinstance(self.patch_positions, GridPositions) or self.patch_positions.grid != self.grid:
            return None
        return self.patch_positions.table.flatten(0, -2)


# Readers that `register_reader` added, by model class.
_READERS: dict[type, Callable] = {}


def register_reader(model_class: type, reader: Callable[[nn.Module, tuple[int, int] | None], Anatomy]):
    """Register a function that reads models of a class. `read_anatomy`, which every method calls, uses it.

    Args:
        model_class (`type`): A class of models.
        reader (`Callable`): Takes a model and the height and width of its images, or None, and returns an `Anatomy`;
            docs/models.md has an example.
    """
    _READERS[model_class] = reader


def read_anatomy(model: nn.Module | Anatomy, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a vision transformer of Transformers, timm, open_clip or this package into an `Anatomy`.

    If the model is a wrapper or has a text side, its vision tower is read. `register_reader` adds further classes. A
    model that is no plain pre-norm vision transformer gets an `unsupported_reason`, see `Anatomy.require_plain`.

    Args:
        model (`nn.Module` or `Anatomy`): The model. An anatomy is returned unchanged.
        image_size (pair of `int`, *optional*):
            Height and width of its images in pixels, if they differ from its configuration: DINOv2 is configured for
            518 pixels, but its image processor makes images of 224. Models of Transformers interpolate their positions
            in each forward pass; models of timm are set to the new size.

    Raises:
        ValueError: if `model` is no model, takes texts alone, or takes no images of `image_size`.
    """
    if isinstance(model, Anatomy):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"Expected a model, got {type(model).__name__}; load it first.")
    image_size = None if image_size is None else tuple(image_size)
    # Read the visual tower of an open_clip model, the timm model in Transformers' wrapper, or else the model itself.
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
        # A configuration that was given `id2label` alone has None for `label2id`.
        label2id = model.config.label2id or {name: index for index, name in id2label.items()}
        labels = {"id2label": id2label, "label2id": dict(label2id), "problem_type": model.config.problem_type}
    if not anatomy.unsupported_reason and image_size not in (None, anatomy.image_size):
        own, other = (" x ".join(map(str, size)) for size in (anatomy.image_size, image_size))
        raise ValueError(f"{anatomy.name} takes images of {own} pixels alone, got {other}.")
    return dataclasses.replace(anatomy, labels=labels, source=model)


def read_part(read: Callable[..., T], *arguments) -> tuple[T | None, str | None]:
    """Return `(part, None)`, or `(None, reason)` if `read` raises `NotAPlainViT`."""
    try:
        return read(*arguments), None
    except NotAPlainViT as error:
        return None, str(error)


def pool(tokens: torch.Tensor, mode: str, num_prefix_tokens: int) -> torch.Tensor:
    """Pool normalized tokens, `(batch, prefix + patches, hidden_size)`, of a model that does not pool them itself."""
    if mode == "cls":
        return tokens[:, 0]
    if mode == "mean":
        return tokens.mean(dim=1)
    mean = tokens[:, num_prefix_tokens:].mean(dim=1)
    return torch.cat([tokens[:, 0], mean], dim=1) if mode == "cls_and_latent_mean" else mean


def activation_name(activation: nn.Module | None) -> str:
    """Return Transformers' name of an activation of any library. Raise a NotAPlainViT if it is unknown."""
    name = type(activation).__name__.lower().removeprefix("pytorch").removesuffix("activation")
    if name not in _ACTIVATIONS:
        raise NotAPlainViT(f"its activation {type(activation).__name__} is not one of {sorted(_ACTIVATIONS.values())}")
    if name == "gelu" and getattr(activation, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    return _ACTIVATIONS[name]


def norm_type(norm: nn.Module) -> str:
    """Return `"layer_norm"` or `"rms_norm"`. Raise a NotAPlainViT for any other module."""
    if isinstance(norm, nn.LayerNorm):
        return "layer_norm"
    if type(norm).__name__.lower().endswith("rmsnorm"):
        return "rms_norm"
    raise NotAPlainViT(f"it has a {type(norm).__name__} where a LayerNorm or RMSNorm is expected")


def find(module: nn.Module | None, names: Sequence[str]) -> nn.Module | None:
    """Return the first child module that has one of the names and is no `nn.Identity`, or None."""
    parts = (getattr(module, name, None) for name in names)
    return next((part for part in parts if isinstance(part, nn.Module) and not isinstance(part, nn.Identity)), None)


def check_patches(module: nn.Module | None) -> nn.Conv2d:
    """Return the convolution that embeds patches. Raise a NotAPlainViT if `module` is no convolution, or its patches
    overlap or leave gaps."""
    if not isinstance(module, nn.Conv2d):
        raise NotAPlainViT(f"its patches are embedded by a {type(module).__name__}, expected one convolution")
    if module.stride != module.kernel_size or module.padding not in ((0, 0), "valid"):
        raise NotAPlainViT(f"its patches overlap or leave gaps ({module})")
    return module


def is_timm(model: nn.Module) -> bool:
    """Whether a module has the interface of timm's models."""
    return all(hasattr(model, name) for name in ("forward_features", "forward_head", "reset_classifier"))


def split_linear(count: int, weight: torch.Tensor, bias: torch.Tensor | Sequence | None) -> list[Projection]:
    """Split a fused linear layer into equal parts.

    Args:
        count (`int`): Number of parts.
        weight (`torch.Tensor`): `(count * out, in)`.
        bias (`torch.Tensor` or list, *optional*): `(count * out,)`, or a bias or None for each part.
    """
    if bias is None:
        biases = [None] * count
    elif isinstance(bias, torch.Tensor):
        biases = bias.chunk(count)
    else:
        biases = bias
    return [Projection(part, part_bias) for part, part_bias in zip(weight.chunk(count), biases, strict=True)]
