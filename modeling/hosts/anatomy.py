"""An `Anatomy`: all that the methods of this package need to know of a vision transformer of any library.

A reader of this folder (`transformers.py`, `timm.py`, `open_clip.py`) finds the parts of a model; nothing is copied,
so that weights can be written to. An `Anatomy` can also run what was read: `check` compares that with the model
itself, as equal names do not make equal computations.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from ..layers import rotary_table, rotate_half


def pool_tokens(
    tokens: torch.Tensor,
    pooling: str,
    norm: Callable[[torch.Tensor], torch.Tensor],
    num_prefix_tokens: int,
    class_tokens: Sequence[int] = (),
    norm_last: bool = False,
    attend: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Pool tokens after the last block to one embedding of each image.

    Args:
        tokens (`torch.Tensor`): `(batch, prefix + other tokens, hidden_size)`.
        pooling (`str`): `pooling` of a `SparseFormerConfig`.
        norm (`Callable`): The final norm.
        num_prefix_tokens (`int`): Class and register tokens, in front of the others.
        class_tokens (sequence of `int`): The class tokens that are pooled.
        norm_last (`bool`): Whether means are taken before the norm.
        attend (`Callable`, *optional*): Attention pooling, `(batch, tokens, hidden_size)` to `(batch, hidden_size)`.

    Returns:
        `torch.Tensor`: `(batch, hidden_size)`, or of several parts side by side a multiple of it.
    """
    if pooling in ("cls", "class_mean"):
        tokens = torch.stack([tokens[:, index] for index in class_tokens], dim=1)
    elif pooling in ("latent_mean", "latent_attention"):
        tokens = tokens[:, num_prefix_tokens:]
    if pooling == "cls":
        return norm(tokens).flatten(1)
    if pooling == "cls_and_latent_mean":
        tokens = norm(tokens)
        return torch.cat([tokens[:, 0], tokens[:, num_prefix_tokens:].mean(dim=1)], dim=1)
    reduce = attend if pooling in ("attention", "latent_attention") else functools.partial(torch.mean, dim=1)
    return norm(reduce(tokens)) if norm_last else reduce(norm(tokens))


# Largest difference between what was read and what the model computes, relative to its largest value.
TOLERANCE = 1e-4

_ACTIVATIONS = {
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_pytorch_tanh",
    "GELUTanhActivation": "gelu_pytorch_tanh",
    "GeluTanh": "gelu_pytorch_tanh",
    "PytorchGELUTanh": "gelu_pytorch_tanh",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
_RMS_NORMS = ("RMSNorm", "RmsNorm", "Aimv2RMSNorm")
# Names of parameters that no plain block has, and what they are for.
_FOREIGN = {
    "proj_l": "it mixes attention heads with each other (talking heads)",
    "proj_w": "it mixes attention heads with each other (talking heads)",
    "relative_position_bias": "it adds relative position biases to its attention",
    "rel_pos": "it adds relative position biases to its attention",
    "attention_biases": "it adds relative position biases to its attention",
    "gate": "it gates the output of its attention",
}


class Obstacle(ValueError):
    """The reason why a model is no plain vision transformer."""


@dataclass
class Projection:
    """A linear map, as views of a model's weights.

    Args:
        weight (`torch.Tensor`): `(out, in)`.
        bias (`torch.Tensor`, *optional*): `(out,)`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, linear: nn.Linear) -> "Projection":
        return cls(linear.weight, linear.bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weight, self.bias)


@dataclass
class PatchEmbedding:
    """A linear map of each patch's pixels to its token.

    Args:
        weight (`torch.Tensor`): `(hidden_size, channels, patch height, patch width)`.
        bias (`torch.Tensor`, *optional*): `(hidden_size,)`.
        norm (`nn.Module`, *optional*): The norm of the tokens, before positions are added.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    norm: nn.Module | None = None

    @classmethod
    def of(cls, module: nn.Module | None, norm: nn.Module | None = None) -> "PatchEmbedding":
        """The embedding by a convolution.

        Raises:
            Obstacle: if the module is no convolution, or its patches overlap or leave gaps.
        """
        if module is None:
            raise Obstacle("it has no embedding of patches that is known")
        if not isinstance(module, nn.Conv2d):
            raise Obstacle(f"its patches are embedded by a {type(module).__name__}, expected one convolution")
        if module.stride != module.kernel_size or module.padding not in ((0, 0), "valid"):
            raise Obstacle(
                f"its patches overlap or leave gaps (kernel {module.kernel_size}, stride {module.stride}, padding "
                f"{module.padding})"
            )
        if module.dilation != (1, 1) or module.groups != 1:
            raise Obstacle("its patches are embedded by a dilated or grouped convolution")
        if norm is not None:
            norm_type(norm)
        return cls(module.weight, module.bias, norm)

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return tuple(self.weight.shape[2:])

    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Pixels `(batch, channels, height, width)`, multiples of the patch, to tokens, row by row,
        `(batch, patches, hidden_size)`."""
        tokens = F.conv2d(pixel_values.to(self.weight.dtype), self.weight, self.bias, stride=self.patch_size)
        return _normalize(self.norm, tokens.flatten(2).mT)


@dataclass
class GridPositions:
    """Positions that are added to tokens, interpolated for other grids as a model's own library does it.

    Args:
        table (`torch.Tensor`): `(in front + rows * columns, hidden_size)`, with leading axes of 1 or without.
        grid (pair of `int`): Rows and columns.
        mode (`str`, *optional*, defaults to `"bicubic"`): `"bilinear"` or `"nearest"`, the one at a cell's corner.
        antialias (`bool`, *optional*, defaults to `False`): Whether it is low-pass filtered for smaller grids.
        crops (`bool`, *optional*, defaults to `False`): Whether a grid that is no square has the corner of a square.
    """

    table: torch.Tensor
    grid: tuple[int, int]
    mode: str = "bicubic"
    antialias: bool = False
    crops: bool = False

    @property
    def num_front(self) -> int:
        """Tokens in front that have positions of their own."""
        return self.table.shape[-2] - self.grid[0] * self.grid[1]

    @property
    def front(self) -> torch.Tensor:
        """`(tokens in front, hidden_size)`."""
        return self.table.flatten(0, -2)[: self.num_front]

    def __call__(self, grid: tuple[int, int]) -> torch.Tensor:
        """`(rows * columns, hidden_size)` of the patches of a grid."""
        rows, columns = grid
        table = self.table.flatten(0, -2)[self.num_front :]
        if (rows, columns) == tuple(self.grid):
            return table
        maps = table.float().unflatten(0, self.grid).permute(2, 0, 1).unsqueeze(0)
        size = (max(grid),) * 2 if self.crops else (rows, columns)
        corners = None if self.mode == "nearest" else False
        maps = F.interpolate(maps, size, mode=self.mode, align_corners=corners, antialias=self.antialias)
        return maps[0, :, :rows, :columns].flatten(1).mT.to(table.dtype)


@dataclass
class SincosPositions:
    """Positions that a model computes for every grid, sines and cosines of columns, then of rows, as AIMv2 has them.

    Args:
        hidden_size (`int`): A multiple of 4.
        theta (`float`, *optional*, defaults to 10,000): Base of the frequencies.
    """

    hidden_size: int
    theta: float = 10000.0
    num_front = 0

    def __call__(self, grid: tuple[int, int]) -> torch.Tensor:
        """`(rows * columns, hidden_size)` of the patches of a grid, in float64."""
        quarter = self.hidden_size // 4
        frequencies = self.theta ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
        rows, columns = (torch.arange(count, dtype=torch.float64) for count in grid)
        y, x = (axis.reshape(-1, 1) * frequencies for axis in torch.meshgrid(rows, columns, indexing="ij"))
        return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


@dataclass
class Attention:
    """Multi-head attention, as wide as the tokens.

    Args:
        query, key, value, output (`Projection`): `(hidden_size, hidden_size)` each.
        num_heads (`int`): Heads.
        query_norm, key_norm (`nn.Module`, *optional*): Norms of each head's queries and keys, before they are rotated.
        output_norm (`nn.Module`, *optional*): The norm before the output projection.
    """

    query: Projection
    key: Projection
    value: Projection
    output: Projection
    num_heads: int
    query_norm: nn.Module | None = None
    key_norm: nn.Module | None = None
    output_norm: nn.Module | None = None

    @property
    def head_dim(self) -> int:
        return len(self.query.weight) // self.num_heads

    def __call__(
        self, tokens: torch.Tensor, queries: torch.Tensor | None = None, rotate: Callable | None = None
    ) -> torch.Tensor:
        """Tokens `(batch, tokens, hidden_size)`, asked by themselves or by `queries`, to the shape of what asks."""
        query, key = self.queries_and_keys(tokens, queries, rotate)
        value = self._heads(self.value, tokens)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.output(_normalize(self.output_norm, mixed))

    def queries_and_keys(
        self, tokens: torch.Tensor, queries: torch.Tensor | None = None, rotate: Callable | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of tokens, `(batch, heads, tokens, head_dim)` each."""
        query = _normalize(self.query_norm, self._heads(self.query, tokens if queries is None else queries))
        key = _normalize(self.key_norm, self._heads(self.key, tokens))
        return (query, key) if rotate is None else (rotate(query), rotate(key))

    def _heads(self, projection: Projection, states: torch.Tensor) -> torch.Tensor:
        return projection(states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


@dataclass
class MLP:
    """`down(norm(activation(up(x))))`, or, with a gate, `down(norm(activation(gate(x)) * up(x)))`.

    Args:
        up, down (`Projection`): `(intermediate_size, hidden_size)` and its reverse.
        activation (`str`): One of Transformers' names.
        gate (`Projection`, *optional*): As `up`.
        norm (`nn.Module`, *optional*): Before `down`.
    """

    up: Projection
    down: Projection
    activation: str
    gate: Projection | None = None
    norm: nn.Module | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        activate, inner = ACT2FN[self.activation], self.up(tokens)
        inner = activate(inner) if self.gate is None else activate(self.gate(tokens)) * inner
        return self.down(_normalize(self.norm, inner))


@dataclass
class Block:
    """A pre-norm transformer block: attention and MLP, each of normalized tokens and added to them.

    Args:
        module (`nn.Module`): The model's own.
        attention_norm, mlp_norm (`nn.Module`): LayerNorm or RMSNorm.
        attention (`Attention`), mlp (`MLP`): The two branches.
        attention_scale, mlp_scale (`torch.Tensor`, *optional*): Layer scale, `(hidden_size,)`.
    """

    module: nn.Module
    attention_norm: nn.Module
    attention: Attention
    mlp_norm: nn.Module
    mlp: MLP
    attention_scale: torch.Tensor | None = None
    mlp_scale: torch.Tensor | None = None

    def __call__(self, tokens: torch.Tensor, rotate: Callable | None = None) -> torch.Tensor:
        branch = self.attention(self.attention_norm(tokens), rotate=rotate)
        tokens = tokens + (branch if self.attention_scale is None else self.attention_scale * branch)
        branch = self.mlp(self.mlp_norm(tokens))
        return tokens + (branch if self.mlp_scale is None else self.mlp_scale * branch)

    @property
    def linears(self) -> list[nn.Linear]:
        return [module for module in self.module.modules() if isinstance(module, nn.Linear)]


@dataclass
class Outline:
    """The places of a block where modules can be inserted; blocks of hierarchical transformers have them, too.

    Args:
        block (`nn.Module`): The block.
        mlp, second_linear (`nn.Module`): Its MLP, and the layer that takes that back to the width of the tokens.
        attention (`nn.Module`, *optional*): Returns what attention adds to the tokens.
        after_attention (`nn.Module`, *optional*): Instead of it, what is given that.
    """

    block: nn.Module
    mlp: nn.Module
    second_linear: nn.Linear
    attention: nn.Module | None = None
    after_attention: nn.Module | None = None


@dataclass
class Rotary:
    """Rotary positions of patches (Su et al. 2021, arXiv 2104.09864), each axis on its own.

    A patch whose center is at `(y, x)`, 0 to 1 across the image, has the angles `(scale * center + shift) * f` with
    f = theta^(-i / n), i = 0, …, n - 1, n = head_dim / 4. EVA-02 (Fang et al. 2023, arXiv 2303.11331) and DINOv3
    (Siméoni et al. 2025, arXiv 2508.10104) differ in `scale` and `shift` alone, and in which channels rotate together.

    Args:
        theta (`float`): Base of the frequencies.
        scale, shift (pair of `float`): From centers to coordinates, y first.
        channels (`torch.Tensor`): `(head_dim,)`, the model's channels in the order in which channel i rotates with
            channel i + head_dim / 2, first the n pairs of y, then those of x.
    """

    theta: float
    scale: tuple[float, float]
    shift: tuple[float, float]
    channels: torch.Tensor

    @property
    def fields(self) -> dict:
        """The rotation as fields of a `SparseFormerConfig`."""
        return {"rope_theta": self.theta, "rope_scale": list(self.scale), "rope_shift": list(self.shift)}


@dataclass
class AttentionPooling:
    """One learned query that attends to all tokens, as in SigLIP and AIMv2.

    Args:
        probe (`torch.Tensor`): `(1, hidden_size)`, the input of `attention.query`.
        attention (`Attention`): The attention of the probe to the tokens.
        norm (`nn.Module`, *optional*), mlp (`MLP`, *optional*): A branch that reads the output and is added to it.
    """

    probe: torch.Tensor
    attention: Attention
    norm: nn.Module | None = None
    mlp: MLP | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        pooled = self.attention(tokens, self.probe.expand(len(tokens), -1, -1))
        return (pooled if self.mlp is None else pooled + self.mlp(self.norm(pooled)))[:, 0]


@dataclass
class Anatomy:
    """A vision transformer, part by part.

    Args:
        model (`nn.Module`): The model, without wrappers and towers for text.
        outlines (`list[Outline]`): Outlines of its blocks, in order.
        blocks (`list[Block]`): The same, in full.
        image_size, grid (pairs of `int`): Height and width, in pixels and in patches.
        num_class_tokens, num_register_tokens (`int`): Tokens in front of those of patches, in this order.
        pooling (`str`): How tokens become the embedding, as in `SparseFormerConfig`.
        pool_before_norm (`bool`): Whether tokens are pooled first and normalized after that.
        class_tokens (`list[int]`, *optional*): Which of several class tokens are side by side in it; all by default.
        norm (`nn.Module`, *optional*): The final one.
        pre_norm (`nn.Module`, *optional*): The norm of the tokens before the first block.
        positions (`torch.Tensor`, *optional*): Added to the tokens, `(tokens, hidden_size)`, those in front first
            where they have some; a view of a parameter if `learns_positions`.
        rotary (`Rotary`, *optional*): Rotates queries and keys of patches.
        patch_embedding (`PatchEmbedding`, *optional*): Images to patches' tokens.
        front (`list[torch.Tensor]`): Class tokens and registers without positions, `(…, hidden_size)` each.
        patch_positions (`GridPositions` or `SincosPositions`, *optional*):
            Added to patches, for a grid of any size, and to those in `front` that have some.
        patch_obstacle (`str`, *optional*): Why tokens before the first block are not read, plain as its blocks are.
        pooling_head (`AttentionPooling`, *optional*): For attention pooling.
        classifier (`nn.Linear`, *optional*): Takes the embedding to logits.
        labels (`dict`): `id2label` and `label2id` where the model has names.
        projection (`Projection`, *optional*): Part of the embedding, what a CLIP projects its pooled tokens by.
        run (`Callable`): Images to the model's own embedding, `(batch, embedding_size)`.
        run_classifier (`Callable`, *optional*): Images to its own logits.
        obstacle (`str`, *optional*): Why this is no plain vision transformer; then there are outlines alone.
        embedding_obstacle (`str`, *optional*): Why it has no embedding to align, plain as its blocks are.
        source (`nn.Module`, *optional*): The model as it was given, with its wrappers.
        read (`Callable`, *optional*): Reads another such model.
    """

    model: nn.Module
    outlines: list[Outline]
    blocks: list[Block] = field(default_factory=list)
    image_size: tuple[int, int] = (0, 0)
    grid: tuple[int, int] = (0, 0)
    num_class_tokens: int = 0
    num_register_tokens: int = 0
    pooling: str = "cls"
    pool_before_norm: bool = False
    class_tokens: list[int] | None = None
    norm: nn.Module | None = None
    pre_norm: nn.Module | None = None
    positions: torch.Tensor | None = None
    learns_positions: bool = False
    rotary: Rotary | None = None
    patch_embedding: PatchEmbedding | None = None
    front: list[torch.Tensor] = field(default_factory=list)
    patch_positions: GridPositions | SincosPositions | None = None
    patch_obstacle: str | None = None
    pooling_head: AttentionPooling | None = None
    classifier: nn.Linear | None = None
    labels: dict = field(default_factory=dict)
    projection: Projection | None = None
    run: Callable[[torch.Tensor], torch.Tensor] | None = None
    run_classifier: Callable[[torch.Tensor], torch.Tensor] | None = None
    obstacle: str | None = None
    embedding_obstacle: str | None = None
    source: nn.Module | None = None
    read: Callable[[nn.Module], "Anatomy"] | None = None

    def __post_init__(self):
        self._placement = _placement(self.model)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def take_labels(self, config):
        """The names of classes that a Transformers configuration has; `label2id` is None where it was given the
        other alone."""
        names = dict(config.id2label)
        label2id = config.label2id or {name: index for index, name in names.items()}
        self.labels = {"id2label": names, "label2id": dict(label2id)}

    def require_plain(self, purpose: str, embeds: bool = False):
        """Raise a ValueError that says why this model does not serve `purpose`, unless it is a plain vision
        transformer and, with `embeds`, has an embedding."""
        if reason := self.obstacle or (self.embedding_obstacle if embeds else None):
            raise self.refusal(purpose, reason)

    def require_patches(self, purpose: str):
        """Raise a ValueError that says why this model does not serve `purpose`, unless the tokens before the first
        block were read, too."""
        if self.patch_embedding is None:
            raise self.refusal(purpose, self.obstacle or self.patch_obstacle)

    def refusal(self, purpose: str, reason: str) -> ValueError:
        """The error that says that this model does not serve `purpose`, and why."""
        return ValueError(
            f"Cannot {purpose} {self.name}: {reason}. Expected a plain pre-norm vision transformer of Transformers, "
            "timm or open_clip; docs/models.md lists them."
        )

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
        if self.patch_embedding is not None:
            return self.patch_embedding.patch_size
        return tuple(pixels // count for pixels, count in zip(self.image_size, self.grid, strict=True))

    def see(self, image_size: tuple[int, int]):
        """Change `image_size` and `grid` to those of other images. The model itself interpolates its positions for
        them, so that `positions` is None from here on."""
        sizes = zip(image_size, self.grid, self.image_size, strict=True)
        self.grid = tuple(round(pixels * count / own) for pixels, count, own in sizes)
        self.image_size, self.positions = tuple(image_size), None

    @property
    def embedding_size(self) -> int:
        """Channels of the embedding."""
        if self.projection is not None:
            return len(self.projection.weight)
        if self.pooling == "cls_and_latent_mean":
            return 2 * self.hidden_size
        if self.pooling == "cls":
            return len(self.class_tokens or range(self.num_class_tokens)) * self.hidden_size
        return self.hidden_size

    @property
    def device(self) -> torch.device:
        return self.blocks[0].attention.query.weight.device

    def front_tokens(self) -> torch.Tensor:
        """Class tokens and registers as they join, `(prefix tokens, hidden_size)`: their own positions added, before
        `pre_norm`."""
        self.require_patches("read the tokens of")
        tokens = [token.reshape(-1, self.hidden_size) for token in self.front]
        tokens = torch.cat(tokens) if tokens else self.patch_embedding.weight.new_zeros(0, self.hidden_size)
        if self.patch_positions is None or not (count := self.patch_positions.num_front):
            return tokens
        return torch.cat([tokens[:count] + self.patch_positions.front, tokens[count:]])

    def positions_of(self, grid: tuple[int, int]) -> torch.Tensor | None:
        """Return the positions that are added to the patches of a grid, `(rows * columns, hidden_size)`, interpolated
        or computed as the model's own library does it; None for a model that adds none.

        Args:
            grid (pair of `int`): Rows and columns.
        """
        self.require_patches("read the positions of")
        if self.patch_positions is None:
            return None
        weight = self.patch_embedding.weight
        return self.patch_positions(tuple(grid)).to(weight.device, weight.dtype)

    def tokens(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Compute the tokens that the first block gets, `(batch, prefix + patches, hidden_size)`, from the parts that
        were read, for images of any size."""
        self.require_patches("read the tokens of")
        patches = self.patch_embedding(pixel_values)
        grid = (pixels // side for pixels, side in zip(pixel_values.shape[2:], self.patch_size, strict=True))
        if (positions := self.positions_of(tuple(grid))) is not None:
            patches = patches + positions
        front = self.front_tokens().expand(len(patches), -1, -1)
        return _normalize(self.pre_norm, torch.cat([front, patches], dim=1))

    def resized(self, image_size: tuple[int, int]) -> "ResizedAnatomy":
        """Return an `Anatomy` of the same weights for images of another size, also if the model insists on its own.

        All is computed from what was read, with positions for the new grid (`positions_of`). Rotary angles belong to
        places in the image: those of a patch's center stay as they are.

        Args:
            image_size (pair of `int`): Height and width in pixels, multiples of the patch.

        Raises:
            ValueError: if they are not, or if the tokens before the first block are not read.
        """
        self.require_patches("resize the images of")
        (height, width), (patch_height, patch_width) = image_size, self.patch_size
        if height % patch_height or width % patch_width or height < patch_height or width < patch_width:
            raise ValueError(
                f"Cannot resize the images of {self.name} to {height} x {width} pixels: they do not divide into "
                f"patches of {patch_height} x {patch_width}. Give multiples of those."
            )
        grid = (height // patch_height, width // patch_width)
        parts = {each.name: getattr(self, each.name) for each in fields(Anatomy)}
        if grid != self.grid:
            parts |= {"positions": self._table_of(grid), "learns_positions": False}
        return ResizedAnatomy(**parts | {"image_size": (height, width), "grid": grid}, origin=self)

    @torch.no_grad()
    def _table_of(self, grid: tuple[int, int]) -> torch.Tensor | None:
        """`positions` of another grid."""
        positions = self.positions_of(grid)
        if positions is None or not self.patch_positions.num_front:
            return positions
        return torch.cat([self.patch_positions.front, positions])

    def embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the model's own embedding, which bootstrapping aligns, `(batch, embedding_size)`. A classifier's is
        the one that it reads, a CLIP's is projected and not normalized, any other model's is pooled."""
        return self.run(pixel_values)

    def patch_tokens(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The patches' tokens after the last block, normalized if the model does, `(batch, patches, hidden_size)`."""
        return self.normalize(self.states(pixel_values)[-1])[:, self.num_prefix_tokens :]

    def feature_maps(
        self, pixel_values: torch.Tensor, layers: Sequence[int] = (-1,), normalized: bool = True
    ) -> list[torch.Tensor]:
        """The patches' tokens where they lie in the image, `(batch, hidden_size, rows, columns)`, before the first
        block, layer 0, and after each; normalized by the final norm, if there is one."""
        states = self.states(pixel_values)
        chosen = [self.normalize(states[layer]) if normalized else states[layer] for layer in layers]
        return [each[:, self.num_prefix_tokens :].mT.unflatten(-1, self.grid) for each in chosen]

    def normalize(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens after the last block, by the final norm, if there is one."""
        return _normalize(self.norm, tokens)

    def states(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        """Tokens before the first block and after each, `(batch, prefix + patches, hidden_size)`."""
        with self.watch() as states:
            self.run(pixel_values)
        return states

    @contextmanager
    def watch(self) -> Iterator[list[torch.Tensor]]:
        """Inside, `states` of the last run are in the list that is yielded."""
        states: list[torch.Tensor] = []

        def begin(module, arguments, keywords):
            states[:] = [arguments[0] if arguments else keywords["hidden_states"]]

        def note(module, arguments, output):
            states.append(output[0] if isinstance(output, tuple) else output)

        handles = [self.blocks[0].module.register_forward_pre_hook(begin, with_kwargs=True)]
        handles += [block.module.register_forward_hook(note) for block in self.blocks]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def pool(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens after the last block, `(batch, prefix + patches, hidden_size)`, to the embedding, as it was read."""
        pooled = pool_tokens(
            tokens,
            self.pooling,
            self.normalize,
            self.num_prefix_tokens,
            self.class_tokens or range(self.num_class_tokens),
            self.pool_before_norm,
            self.pooling_head,
        )
        return pooled if self.projection is None else self.projection(pooled)

    def rotation(self, dtype: torch.dtype = torch.float32, kept: torch.Tensor | None = None) -> Callable | None:
        """Rotates the patches among queries or keys, `(batch, heads, prefix + patches, head_dim)`; only those `kept`,
        `(batch, patches)`, if given."""
        if self.rotary is None:
            return None
        rotary, order = self.rotary, self.rotary.channels.to(self.device)
        centers = self.patch_centers()
        if kept is not None:
            # One axis for all heads.
            centers = centers[kept].unsqueeze(1)
        cos, sin = rotary_table(centers, rotary.theta, rotary.scale, rotary.shift, len(order))

        def rotate(states: torch.Tensor) -> torch.Tensor:
            front, patches = states[:, :, : self.num_prefix_tokens], states[:, :, self.num_prefix_tokens :]
            patches = rotate_half(patches[..., order], cos.to(dtype), sin.to(dtype))[..., order.argsort()]
            return torch.cat([front, patches], dim=2)

        return rotate

    def patch_centers(self) -> torch.Tensor:
        """`(patches, 2)` as y, x, 0 to 1 across the image."""
        axes = [(torch.arange(count, device=self.device) + 0.5) / count for count in self.grid]
        return torch.cartesian_prod(*axes)

    def example(self) -> torch.Tensor:
        """Two images of noise, normalized, as the model takes them."""
        generator = torch.Generator().manual_seed(0)
        weight = self.blocks[0].attention.query.weight
        return torch.randn(2, 3, *self.image_size, generator=generator).to(weight.device, weight.dtype)

    @torch.no_grad()
    def discrepancies(self) -> dict[str, torch.Tensor]:
        """The differences that `check` looks at, by the problem that each would show: the largest difference relative
        to the largest value."""
        with evaluating(self.model):
            images, found = self.example(), {}
            with self.watch() as states:
                embedding = self.run(images)
            tokens, rotate = states[0], self.rotation(states[0].dtype)
            for index, (block, expected) in enumerate(zip(self.blocks, states[1:], strict=True)):
                tokens = block(tokens, rotate)
                name = f"its block {index} ({type(block.module).__name__})"
                found[f"{name} computes something else than a plain pre-norm block"] = difference(tokens, expected)
            if self.embedding_obstacle is None:
                found["it embeds an image in another way each time"] = difference(self.embed(images), embedding)
                found["it pools its tokens in another way"] = difference(self.pool(tokens), embedding)
                if self.classifier is not None:
                    logits = self.run_classifier(images)
                    found["its classifier reads something else"] = difference(self.classifier(embedding), logits)
        return found

    @torch.no_grad()
    def token_discrepancy(self) -> torch.Tensor:
        """The largest difference of `tokens` from the input of the model's first block, relative to the largest
        value."""
        with evaluating(self.model):
            images = self.example()
            return difference(self.tokens(images), self.states(images)[0])

    def check(self, purpose: str = "read"):
        """Raise a ValueError unless the parts that were read compute what the model does, on two images of noise, in
        float32."""
        self._compare(purpose, Anatomy.discrepancies)

    @torch.no_grad()
    def attention_discrepancies(self) -> dict[str, torch.Tensor]:
        """The differences that `check_attention` looks at: how far the output of each attention of the running model
        is from the one that its queries, keys and values give, relative to the largest value.

        `discrepancies` cannot tell in a block of fresh weights, where attention adds little to the tokens.
        """
        modules = {outline.block: outline.attention for outline in self.outlines}
        found: dict[str, torch.Tensor] = {}

        def compare(module, arguments, keywords, output, name: str, attention: Attention):
            tokens = arguments[0] if arguments else next(iter(keywords.values()))
            output = output[0] if isinstance(output, tuple) else output
            if getattr(module, "batch_first", True) is False:
                tokens, output = tokens.transpose(0, 1), output.transpose(0, 1)
            found[f"{name} attends otherwise than by the products of its queries and keys"] = difference(
                attention(tokens), output
            )

        handles = [
            modules[block.module].register_forward_hook(
                functools.partial(compare, name=f"its block {index}", attention=block.attention),
                # Before the hook of Context Broadcasting, if there is one.
                prepend=True,
                with_kwargs=True,
            )
            for index, block in enumerate(self.blocks)
            if modules.get(block.module) is not None
        ]
        try:
            with evaluating(self.model):
                self.run(self.example())
        finally:
            for handle in handles:
                handle.remove()
        return found

    def check_attention(self, purpose: str = "read the attention of"):
        """Raise a ValueError unless the model's attention returns what its queries, keys and values give, on two
        images of noise, in float32."""
        self._compare(purpose, Anatomy.attention_discrepancies)

    def check_tokens(self, purpose: str = "read the tokens of"):
        """Raise a ValueError unless `tokens` returns the input of the model's first block, on two images of noise, in
        float32."""
        self.require_patches(purpose)
        problem = "its tokens before the first block are something else than patches, positions and tokens in front"
        self._compare(purpose, lambda anatomy: {problem: anatomy.token_discrepancy()})

    def _compare(self, purpose: str, discrepancies: "Callable[[Anatomy], dict[str, torch.Tensor]]"):
        anatomy = self
        if any(parameter.dtype != torch.float32 for parameter in self.model.parameters()):
            anatomy = self.read(copy.deepcopy(self.source).float())
        try:
            found = discrepancies(anatomy)
        # Modules that do something else with tokens fail in more ways than can be listed.
        except Exception as error:
            message = " ".join(str(error).split())
            raise self.refusal(purpose, f"it does not run as a plain vision transformer ({message})") from error
        for problem, value in found.items():
            if not value < TOLERANCE:
                raise ValueError(
                    f"Cannot {purpose} {self.name}: {problem} with the same weights (largest relative difference "
                    f"{value:.1e})."
                )


@dataclass
class ResizedAnatomy(Anatomy):
    """A vision transformer that sees images of another size, as `Anatomy.resized` returns it.

    Args:
        origin (`Anatomy`): The anatomy at the model's own size, which `check` and `check_tokens` compare with the
            model.
    """

    origin: Anatomy | None = None

    def __post_init__(self):
        self.run = self._run
        self.run_classifier = None if self.classifier is None else self._run_classifier
        self.read = self._read
        self._placement, self._moved = self.origin._placement, None
        self._watching: list[list[torch.Tensor]] = []

    def resized(self, image_size: tuple[int, int]) -> "ResizedAnatomy":
        return self.origin.resized(image_size)

    @contextmanager
    def watch(self) -> Iterator[list[torch.Tensor]]:
        states: list[torch.Tensor] = []
        self._watching.append(states)
        try:
            yield states
        finally:
            self._watching[:] = [each for each in self._watching if each is not states]

    def states(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        with self.watch() as states:
            self._last_state(pixel_values)
        return states

    def check(self, purpose: str = "read"):
        self.origin.check(purpose)

    def check_tokens(self, purpose: str = "read the tokens of"):
        self.origin.check_tokens(purpose)

    def _run(self, pixel_values: torch.Tensor) -> torch.Tensor:
        self.require_plain("embed images with", embeds=True)
        tokens = self._last_state(pixel_values)
        return self._parts().pool(tokens)

    def _run_classifier(self, pixel_values: torch.Tensor) -> torch.Tensor:
        embedding = self._run(pixel_values)
        return self._parts().classifier(embedding)

    def _last_state(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Tokens after the last block; those before and after each go to who watches."""
        if tuple(pixel_values.shape[2:]) != self.image_size:
            got, expected = (" x ".join(map(str, size)) for size in (pixel_values.shape[2:], self.image_size))
            raise ValueError(f"Got images of {got} pixels, expected {expected}. Resize them, or ask for `resized`.")
        parts = self._parts()
        tokens = parts.tokens(pixel_values)
        rotate, states = parts.rotation(tokens.dtype), [tokens]
        for block in parts.blocks:
            tokens = block(tokens, rotate)
            if self._watching:
                states.append(tokens)
        for watched in self._watching:
            watched[:] = states
        return tokens

    def _parts(self) -> "ResizedAnatomy":
        """This, or what is read anew of a model that was moved or cast: parts are views of the weights that it had."""
        placement = _placement(self.model)
        if placement == self._placement:
            return self
        if self._moved is None or placement != self._moved._placement:
            self._read_again()
        return self._moved

    @torch.compiler.disable
    def _read_again(self):
        self._moved = self.read(self.source)

    def _read(self, model: nn.Module) -> "ResizedAnatomy":
        return self.origin.read(model).resized(self.image_size)


def _placement(model: nn.Module) -> tuple[torch.device, torch.dtype] | None:
    """Device and dtype of a model's first weight."""
    parameter = next(model.parameters(), None)
    return None if parameter is None else (parameter.device, parameter.dtype)


def difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Largest difference relative to the largest value."""
    found, expected = found.float(), expected.float()
    return (found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout inside; every module is then as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def activation_name(activation: nn.Module) -> str:
    """Transformers' name of an activation of any library.

    Raises:
        Obstacle: if it is not known.
    """
    name = type(activation).__name__
    if name not in _ACTIVATIONS:
        raise Obstacle(f"its activation {name} is not one of {sorted(set(_ACTIVATIONS.values()))}")
    if name == "GELU" and getattr(activation, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    return _ACTIVATIONS[name]


def norm_type(norm: nn.Module) -> str:
    """`"layer_norm"` or `"rms_norm"`.

    Raises:
        Obstacle: if it is neither.
    """
    if isinstance(norm, nn.LayerNorm):
        return "layer_norm"
    if type(norm).__name__ in _RMS_NORMS:
        return "rms_norm"
    raise Obstacle(f"it has a {type(norm).__name__} where a LayerNorm or RMSNorm is expected")


def norm_eps(norm: nn.Module) -> float:
    """The epsilon of a LayerNorm or RMSNorm of any library."""
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    return torch.finfo(torch.float32).eps if eps is None else eps


def given(module: nn.Module | None) -> nn.Module | None:
    """A module, unless it does nothing."""
    return None if isinstance(module, nn.Identity) else module


def fused_projections(linear: nn.Linear, biases: tuple | None = None) -> list[Projection]:
    """Query, key and value of one linear layer; with `biases`, of those, which may be None."""
    if biases is None:
        biases = (None,) * 3 if linear.bias is None else linear.bias.chunk(3)
    return [Projection(weight, bias) for weight, bias in zip(linear.weight.chunk(3), biases, strict=True)]


def multihead_attention(module: nn.MultiheadAttention) -> Attention:
    """The parts of PyTorch's own attention, whose projections are one parameter."""
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    projections = [Projection(*both) for both in zip(weights, biases, strict=True)]
    return Attention(*projections, Projection.of(module.out_proj), module.num_heads)


def require_all_known(module: nn.Module, known: list[object], kind: str = "block"):
    """Raise an `Obstacle` unless every parameter of a module belongs to what was read of it.

    Args:
        module (`nn.Module`): For example a block.
        known (`list`): Its parts: modules and parameters, of which None are passed over.
        kind (`str`, *optional*, defaults to `"block"`): The kind of module, for the message.
    """
    parameters = set()
    for part in known:
        if isinstance(part, nn.Module):
            parameters.update(part.parameters())
        elif part is not None:
            parameters.add(part)
    # Context Broadcasting, which changes what a block computes, is found by `Anatomy.check`.
    unknown = [
        name
        for name, parameter in module.named_parameters()
        if parameter not in parameters and "context_broadcast_" not in name
    ]
    for name in unknown:
        for word, reason in _FOREIGN.items():
            if word in name:
                raise Obstacle(reason)
    if unknown:
        raise Obstacle(
            f"its {type(module).__name__} has parameters that no plain {kind} has ({', '.join(unknown[:4])})"
        )


def require_equal_width(attention: Attention):
    """Raise an `Obstacle` unless attention is as wide as the tokens, for queries, keys and values alike."""
    width = attention.query.weight.shape[1]
    for projection in (attention.query, attention.key, attention.value, attention.output):
        if projection.weight.shape != (width, width):
            raise Obstacle(
                "its attention is not as wide as its tokens, or shares keys and values among heads "
                f"(a projection is {tuple(projection.weight.shape)}, expected {(width, width)})"
            )


def _normalize(norm: nn.Module | None, states: torch.Tensor) -> torch.Tensor:
    return states if norm is None else norm(states)
