"""A vision transformer of any library as a record of its modules and tensors.

A reader of this folder (`transformers.py`, `timm.py`, `open_clip.py`) fills in an `Anatomy`. Nothing is copied, so
that weights can be written to, and nothing is computed: the model runs its own forward pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import rotary_table, rotate_half


# Largest difference of a student with all patches from its teacher, relative to the largest value.
TOLERANCE = 1e-4

# Transformers' names of activations, by the names of any library's classes without "Activation" and "Pytorch".
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelutanh": "gelu_pytorch_tanh",
    "quickgelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}


class NotAPlainViT(ValueError):
    """The reason why a model is no plain vision transformer."""


@dataclass
class Projection:
    """A linear map that is no layer of its own, as views of a model's weights."""

    weight: torch.Tensor  # (out, in)
    bias: torch.Tensor | None = None


Linear = nn.Linear | Projection


@dataclass
class GridPositions:
    """Positions that are added to tokens, interpolated for other grids as the model's own library does it."""

    table: torch.Tensor  # (in front + rows * columns, hidden_size), with leading axes of 1 or without
    grid: tuple[int, int]
    mode: str = "bicubic"
    antialias: bool = False
    crops: bool = False  # a grid that is no square has the corner of a square

    def __call__(self, grid: tuple[int, int]) -> torch.Tensor:
        """Positions of the patches of a grid, `(rows * columns, hidden_size)`."""
        rows, columns = grid
        table = self.table.flatten(0, -2)[-math.prod(self.grid) :]
        if (rows, columns) == tuple(self.grid):
            return table
        maps = table.float().unflatten(0, self.grid).permute(2, 0, 1).unsqueeze(0)
        size = (max(grid), max(grid)) if self.crops else (rows, columns)
        corners = None if self.mode == "nearest" else False
        maps = F.interpolate(maps, size, mode=self.mode, align_corners=corners, antialias=self.antialias)
        return maps[0, :, :rows, :columns].flatten(1).mT.to(table.dtype)


@dataclass
class Attention:
    """Multi-head attention, as wide as the tokens."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    num_heads: int
    query_norm: nn.Module | None = None  # of each head's queries, before they are rotated
    key_norm: nn.Module | None = None
    output_norm: nn.Module | None = None  # before the output projection

    @property
    def head_dim(self) -> int:
        return len(self.query.weight) // self.num_heads


@dataclass
class MLP:
    """`down(norm(activation(up(x))))`, or, with a gate, `down(norm(activation(gate(x)) * up(x)))`."""

    up: Linear
    down: Linear
    activation: str  # one of Transformers' names
    gate: Linear | None = None
    norm: nn.Module | None = None


@dataclass
class Block:
    """A pre-norm transformer block: attention and MLP, each of normalized tokens and added to them. Raises a
    NotAPlainViT for a module with parameters that are in none of its parts, norms of another kind, or attention that
    is not as wide as its tokens."""

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
        # Context Broadcasting, which may be inserted, has parameters of its own.
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

    @property
    def linears(self) -> list[nn.Linear]:
        return [module for module in self.module.modules() if isinstance(module, nn.Linear)]


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
        """The rotation as fields of a SparseFormer's configuration."""
        ends = [scale + shift for scale, shift in zip(self.scale, self.shift, strict=True)]
        return {"rope_theta": self.theta, "rope_coordinates": [*self.shift, *ends]}

    def rotate(self, states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Rotate the patches of a grid among queries or keys, `(batch, heads, prefix + patches, head_dim)`; channels
        come back in the order of `channels`."""
        axes = [(torch.arange(count, device=states.device) + 0.5) / count for count in grid]
        centers = torch.cartesian_prod(*axes)
        cos, sin = rotary_table(centers, self.theta, self.scale, self.shift, states.shape[-1])
        states = states[..., self.channels.to(states.device)]
        front, patches = states.split([states.shape[2] - len(centers), len(centers)], dim=2)
        return torch.cat([front, rotate_half(patches, cos.to(states.dtype), sin.to(states.dtype))], dim=2)


@dataclass
class AttentionPooling:
    """One learned query that attends to all tokens, as in SigLIP and AIMv2."""

    probe: torch.Tensor  # (1, hidden_size), the input of `attention.query`
    attention: Attention
    norm: nn.Module | None = None  # with `mlp`, a branch that is added to the output
    mlp: MLP | None = None


@dataclass
class Anatomy:
    """A vision transformer, part by part. Parts of fused layers are views of their weights: read a model again after
    it was moved or cast.

    The embedding, which bootstrapping aligns, is the one that a classifier reads; a CLIP's is projected and not
    normalized, any other model's is pooled.
    """

    model: nn.Module  # without wrappers and towers for text
    blocks: list[Block] = field(default_factory=list)
    image_size: tuple[int, int] = (0, 0)  # height and width
    grid: tuple[int, int] = (0, 0)  # the same in patches
    num_class_tokens: int = 0  # in front of patches
    num_register_tokens: int = 0  # between class tokens and patches
    pooling: str = "cls"  # as in a SparseFormer's configuration
    pool_before_norm: bool = False
    class_tokens: list[int] | None = None  # that are pooled, if not all
    norm: nn.Module | None = None  # after the last block
    pre_norm: nn.Module | None = None  # before the first block
    rotary: Rotary | None = None
    patch_embedding: nn.Conv2d | Projection | None = None  # weight (hidden_size, channels, patch height, patch width)
    patch_norm: nn.Module | None = None  # of embedded patches, before positions are added
    front: list[torch.Tensor] = field(default_factory=list)  # class tokens and registers, (…, hidden_size) each
    patch_positions: Callable[[tuple[int, int]], torch.Tensor] | None = None  # `GridPositions` or a function of a grid
    pooling_head: AttentionPooling | None = None
    classifier: nn.Linear | None = None
    labels: dict = field(default_factory=dict)  # `id2label`, `label2id` and `problem_type`
    projection: Linear | None = None
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None  # images to the embedding, (batch, embedding_size)
    run_classifier: Callable[[torch.Tensor], torch.Tensor] | None = None  # images to logits
    obstacle: str | None = None  # why it is no plain vision transformer and was not read
    patch_obstacle: str | None = None  # why the tokens before its first block were not read
    embedding_obstacle: str | None = None
    source: nn.Module | None = None  # the model as it was given

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @contextmanager
    def noting(self, field_name: str) -> Iterator[None]:
        """Note an `NotAPlainViT` that is raised inside in one of the fields for obstacles."""
        try:
            yield
        except NotAPlainViT as obstacle:
            setattr(self, field_name, str(obstacle))

    def require_plain(self, purpose: str, embeds: bool = False, patches: bool = False):
        """Raise a ValueError with the reason why this model does not serve `purpose`, unless it is a plain vision
        transformer and, with `embeds` and `patches`, its embedding and the tokens before its first block were read."""
        embedding_obstacle = self.embedding_obstacle if embeds else None
        patch_obstacle = self.patch_obstacle if patches else None
        if reason := self.obstacle or embedding_obstacle or patch_obstacle:
            raise self.refusal(purpose, reason)

    def refusal(self, purpose: str, reason: str) -> ValueError:
        """The error that this model does not serve `purpose`, with the reason."""
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
            return tuple(self.patch_embedding.weight.shape[2:])
        return tuple(pixels // count for pixels, count in zip(self.image_size, self.grid, strict=True))

    @property
    def num_channels(self) -> int:
        """Channels of the images."""
        if self.patch_embedding is not None:
            return self.patch_embedding.weight.shape[1]
        return next((module.in_channels for module in self.model.modules() if isinstance(module, nn.Conv2d)), 3)

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
        return next(self.model.parameters()).device

    @property
    def positions(self) -> torch.Tensor | None:
        """Positions that are added to the tokens, `(tokens, hidden_size)`, those in front first where they have some;
        a view of the model's table, which requires a gradient if it is learned. None for a model that computes or
        interpolates them."""
        if not isinstance(self.patch_positions, GridPositions) or self.patch_positions.grid != self.grid:
            return None
        return self.patch_positions.table.flatten(0, -2)

    def positions_of(self, grid: tuple[int, int]) -> torch.Tensor | None:
        """Return the positions that are added to the patches of a grid, `(rows * columns, hidden_size)`, interpolated
        or computed as the model's own library does it; None for a model that adds none."""
        if self.patch_positions is None:
            return None
        weight = next(self.model.parameters())
        return self.patch_positions(tuple(grid)).to(weight.device, weight.dtype)

    def prefix_tokens(self) -> torch.Tensor:
        """Class tokens and registers before `pre_norm`, `(prefix tokens, hidden_size)`, with their own positions."""
        self.require_plain("read the tokens of", patches=True)
        tokens = [self.patch_embedding.weight.new_zeros(0, self.hidden_size)]
        tokens = torch.cat(tokens + [token.reshape(-1, self.hidden_size) for token in self.front])
        if not isinstance(self.patch_positions, GridPositions):
            return tokens
        positions = self.patch_positions.table.flatten(0, -2)[: -math.prod(self.patch_positions.grid)]
        return torch.cat([tokens[: len(positions)] + positions, tokens[len(positions) :]])

    def feature_maps(self, pixel_values: torch.Tensor, layers: Sequence[int] = (-1,)) -> list[torch.Tensor]:
        """The patches' normalized tokens where they lie in the image, `(batch, hidden_size, rows, columns)`, before
        the first block, layer 0, and after each."""
        states = self.states(pixel_values)
        tokens = [self.normalize(states[layer])[:, self.num_prefix_tokens :] for layer in layers]
        return [each.mT.unflatten(-1, self.grid) for each in tokens]

    def normalize(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normalize tokens by the final norm, if there is one."""
        return tokens if self.norm is None else self.norm(tokens)

    def states(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        """Tokens before the first block and after each, `(batch, prefix + patches, hidden_size)`."""
        with self.record_hidden_states() as states:
            self.embed(pixel_values)
        return states

    @contextmanager
    def record_hidden_states(self) -> Iterator[list[torch.Tensor]]:
        """Inside, `states` of the last forward pass are in the list that is yielded."""
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

    def queries_and_keys(self, block: Block, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Queries and keys of the tokens before a block, `(batch, heads, tokens, head_dim)` each, rotated if the model
        does; their products are those of the block."""
        attention = block.attention
        tokens = block.attention_norm(tokens)
        found = []
        for projection, norm in ((attention.query, attention.query_norm), (attention.key, attention.key_norm)):
            states = F.linear(tokens, projection.weight, projection.bias)
            states = states.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            states = states if norm is None else norm(states)
            found.append(states if self.rotary is None else self.rotary.rotate(states, self.grid))
        return found

    def example(self) -> torch.Tensor:
        """Two images of noise, normalized, as the model takes them."""
        weight = next(self.model.parameters())
        images = torch.randn(2, self.num_channels, *self.image_size, generator=torch.Generator().manual_seed(0))
        return images.to(weight.device, weight.dtype)


# Readers of models of one's own, by class.
READERS: dict[type, Callable] = {}


def register_reader(model_class: type, reader: Callable[[nn.Module, tuple[int, int] | None], Anatomy]):
    """Let `read_anatomy`, and so every method, read models of a class by a function of the model and the size of its
    images, which returns an `Anatomy`; docs/models.md has an example."""
    READERS[model_class] = reader


def read_anatomy(model: nn.Module | Anatomy, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a vision transformer: one of Transformers, timm, open_clip or this package, a model with a tower of one, or
    a wrapper around one; or one of a class that has a reader (`register_reader`).

    Nothing is copied or computed. `Anatomy.require_plain` refuses what is no plain pre-norm vision transformer.

    Args:
        model (`nn.Module` or `Anatomy`): The model; an anatomy comes back as it is.
        image_size (pair of `int`, *optional*):
            Height and width in pixels of the images that it will see, if not those of its configuration: DINOv2's says
            518 pixels, and its image processor 224. Models of Transformers interpolate their positions at each pass;
            those of timm are set to the new size.

    Raises:
        ValueError: if it is no model, one that reads text alone, or one that takes no images of that size.
    """
    if isinstance(model, Anatomy):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"Expected a model, got {type(model).__name__}; load it first.")
    image_size = None if image_size is None else tuple(image_size)
    # The visual tower of an open_clip model, or the timm model inside Transformers' wrapper.
    part = model.visual if hasattr(model, "encode_image") else getattr(model, "timm_model", model)
    if type(part) in READERS:
        read = READERS[type(part)]
    elif hasattr(part, "config") and hasattr(part, "base_model"):
        from .transformers import read
    elif is_timm(part):
        from .timm import read
    else:
        from .open_clip import read

    anatomy = read(part, image_size)
    if anatomy is None:
        anatomy = Anatomy(part, obstacle="it has no list of transformer blocks that is known")
    if anatomy.classifier is not None and hasattr(getattr(model, "config", None), "id2label"):
        names = dict(model.config.id2label)
        # It is None where it was given the other alone.
        numbers = model.config.label2id or {name: index for index, name in names.items()}
        anatomy.labels = {"id2label": names, "label2id": dict(numbers), "problem_type": model.config.problem_type}
    anatomy.source = model
    if not anatomy.obstacle and image_size not in (None, anatomy.image_size):
        own, other = (" x ".join(map(str, size)) for size in (anatomy.image_size, image_size))
        raise ValueError(f"{anatomy.name} takes images of {own} pixels alone, got {other}.")
    return anatomy


def difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Largest difference relative to the largest value."""
    largest = expected.float().abs().max().clamp(min=1e-12)
    return (found.float() - expected.float()).abs().max() / largest


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


def activation_name(activation: nn.Module | None) -> str:
    """Transformers' name of an activation of any library. Raise a NotAPlainViT if it is not known."""
    name = type(activation).__name__.lower().removeprefix("pytorch").removesuffix("activation")
    if name not in _ACTIVATIONS:
        raise NotAPlainViT(f"its activation {type(activation).__name__} is not one of {sorted(_ACTIVATIONS.values())}")
    if name == "gelu" and getattr(activation, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    return _ACTIVATIONS[name]


def norm_type(norm: nn.Module) -> str:
    """`"layer_norm"` or `"rms_norm"`. Raise a NotAPlainViT if it is neither."""
    if isinstance(norm, nn.LayerNorm):
        return "layer_norm"
    if type(norm).__name__.lower().endswith("rmsnorm"):
        return "rms_norm"
    raise NotAPlainViT(f"it has a {type(norm).__name__} where a LayerNorm or RMSNorm is expected")


def find(module: nn.Module | None, names: Sequence[str]) -> nn.Module | None:
    """The first of a module's parts that has one of the names, unless it does nothing."""
    parts = (getattr(module, name, None) for name in names)
    return next((part for part in parts if isinstance(part, nn.Module) and not isinstance(part, nn.Identity)), None)


def check_patches(module: nn.Module | None) -> nn.Conv2d:
    """Return the convolution that embeds patches. Raise a NotAPlainViT if it is none, or its patches overlap or leave
    gaps."""
    if not isinstance(module, nn.Conv2d):
        raise NotAPlainViT(f"its patches are embedded by a {type(module).__name__}, expected one convolution")
    if module.stride != module.kernel_size or module.padding not in ((0, 0), "valid"):
        raise NotAPlainViT(f"its patches overlap or leave gaps ({module})")
    return module


def is_timm(model: nn.Module) -> bool:
    """Whether a module has the interface of timm's models."""
    return all(hasattr(model, name) for name in ("forward_features", "forward_head", "reset_classifier"))


def split_linear(count: int, weight: torch.Tensor, bias: torch.Tensor | Sequence | None) -> list[Projection]:
    """The equal parts of a fused linear layer; its bias may be one or several, each of which may be None."""
    if isinstance(bias, torch.Tensor):
        bias = bias.chunk(count)
    return [Projection(*part) for part in zip(weight.chunk(count), bias or [None] * count, strict=True)]
