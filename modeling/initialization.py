"""Initializations of attention that need less data, in place, on vision transformers that a user already has."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.utils.logging import tqdm

from ..configuration.configuration_base import PSEUDO_INPUTS, SOLVERS, VALUE_INITS
from .hub import import_from_package
from .impulse import (
    attention_logits,
    draw_offsets,
    impulse_matrix,
    interior_mass,
    kernel_offsets,
    mimetic_factors,
    rotate_head,
    sincos_position_encoding,
    solve_adam,
    solve_closed_form,
    solve_pinv,
)


POSITIONS = ("sincos", "random", "keep")

# The order in which the NeurIPS 2025 code gives its heads the positions of a 3 x 3 kernel, row by row.
_PINV_ORDER = (4, 1, 5, 3, 7, 0, 2, 6, 8)


@dataclass
class HeadReport:
    """Report of a head's attention on its layer's pseudo input, after initialization.

    Args:
        layer, head (`int`): Numbers of layer and head.
        offset (pair of `int`): The target relative to a position, as (dy, dx); (0, 0), the position itself, for
            initializations without impulses.
        error (`float`): Mean squared error of the attention map (eq. 8).
        peak_rate (`float`): Share of the interior positions that attend most to their target, 0 to 1.
        mass (`float`): Attention at the target, averaged over the interior positions, 0 to 1.
        query_norm, key_norm (`float`): Frobenius norms of the head's weights.
        max_logit (`float`): Largest absolute value before the softmax.
    """

    layer: int
    head: int
    offset: tuple[int, int]
    error: float
    peak_rate: float
    mass: float
    query_norm: float
    key_norm: float
    max_logit: float


@dataclass
class InitializationReport:
    """Report of an initialization: `heads` has a `HeadReport` for every head of every layer."""

    heads: list[HeadReport] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """The mean of a number over all heads, for example `"mass"`."""
        return sum(getattr(head, name) for head in self.heads) / len(self.heads)

    def __str__(self) -> str:
        layers = len({head.layer for head in self.heads})
        names = ("error", "peak_rate", "mass", "query_norm", "key_norm", "max_logit")
        means = ", ".join(f"{name} {self.mean(name):.3g}" for name in names)
        return f"{len(self.heads)} heads in {layers} layers; means: {means}"


@dataclass
class BlockParts:
    """Parts of a block that initializations read and write: layers, or views of their weights.

    Args:
        norm (`nn.Module`): The norm before the attention.
        query, key, value, output: Each has a `weight`, `(hidden_size, hidden_size)`, and a `bias` or None.
        num_heads (`int`): Heads.
        linears (`list[nn.Linear]`): All linear layers of the block.
    """

    norm: nn.Module
    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    num_heads: int
    linears: list[nn.Linear]

    @property
    def head_dim(self) -> int:
        return len(self.query.weight) // self.num_heads

    def head(self, projection: nn.Module, head: int) -> torch.Tensor:
        """A head's rows of the weight of `query` or `key`, `(head_dim, hidden_size)`."""
        return projection.weight[head * self.head_dim : (head + 1) * self.head_dim]


@dataclass
class TransformerParts:
    """Parts of a vision transformer that initializations read and write.

    Args:
        layers (`list[BlockParts]`): Its blocks, in order.
        positions (`torch.Tensor`): `(prefix + height * width, hidden_size)`, those of [CLS] and registers first.
        learns_positions (`bool`): Whether the positions are a parameter.
        grid (pair of `int`): Height and width in patches.
        pre_norm (`nn.Module`, *optional*): The norm of tokens before the first block.
    """

    layers: list[BlockParts]
    positions: torch.Tensor
    learns_positions: bool
    grid: tuple[int, int]
    pre_norm: nn.Module | None = None

    @property
    def patch_positions(self) -> torch.Tensor:
        return self.positions[len(self.positions) - self.grid[0] * self.grid[1] :]


def read_parts(model: nn.Module | TransformerParts) -> TransformerParts:
    """Return the parts of a vision transformer whose tokens differ by the positions that are added to them.

    Raises:
        ValueError: if the model is none, does to queries and keys what these initializations leave out, or computes
            something else than a plain vision transformer with the same weights.
    """
    if isinstance(model, TransformerParts):
        return model
    if hasattr(own := getattr(model, "base_model", model), "parts_to_initialize"):
        return own.parts_to_initialize()
    anatomy = import_from_package("hosts", "Initializing a model").read_anatomy(model)
    anatomy.require_plain("initialize")
    for reason, applies in (
        ("it adds no positions to its tokens", anatomy.positions is None),
        ("it rotates queries and keys by their positions", anatomy.rotary is not None),
        ("it normalizes queries and keys", anatomy.blocks[0].attention.query_norm is not None),
    ):
        if applies:
            raise anatomy.refusal("initialize", reason)
    # A block with Context Broadcasting computes more than what was read of it, so it cannot be compared.
    if not any("ContextBroadcast" in type(module).__name__ for module in anatomy.model.modules()):
        anatomy.check("initialize")
    anatomy.check_attention("initialize")
    layers = []
    for block in anatomy.blocks:
        parts = block.attention
        projections = (parts.query, parts.key, parts.value, parts.output)
        layers.append(BlockParts(block.attention_norm, *projections, parts.num_heads, block.linears))
    return TransformerParts(
        layers, anatomy.positions, anatomy.learns_positions, anatomy.grid, pre_norm=anatomy.pre_norm
    )


def parts_of_layers(model: nn.Module) -> TransformerParts:
    """The parts that initializations need, of a base model of this package whose blocks are `PreNormLayer`s."""
    layers = []
    for layer in model.layers:
        attention = layer.attention
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        layers.append(BlockParts(layer.layernorm_before, *projections, model.config.num_attention_heads, linears))
    positions = model.embeddings.position_embeddings
    return TransformerParts(layers, positions[0], positions.requires_grad, model.embeddings.grid)


def is_drawn(model: nn.Module) -> bool:
    """Whether the attention of a base model of this package, or of Transformers' ViT, is fresh: its weights are
    neither loaded, which marks them, nor on the meta device."""
    weights = [layer.attention.q_proj.weight for layer in model.layers]
    return not any(weight.is_meta or getattr(weight, "_is_hf_initialized", False) for weight in weights)


@torch.no_grad()
def impulse_init_(
    model: nn.Module,
    kernel_size: int = 3,
    solver: str = "closed_form",
    pseudo_input: str | Sequence[str] = "pe",
    per_layer: bool = True,
    value_init: str = "mimetic",
    mass: float | None = 0.2,
    positions: str = "sincos",
    steps: int = 10_000,
    generator: torch.Generator | None = None,
    position_std: float = 0.36,
    renormalize_every: int = 100,
) -> InitializationReport:
    """Initialize queries and keys so that every head's attention map is a random impulse filter, in place (Zheng et
    al., arXiv 2404.01139).

    The defaults are not the paper's method, which is `solver="adam", value_init="default"` as printed and
    `solver="adam_bounded", value_init="default"` as its authors ran it. docs/impulse_initialization.md says what
    decided.

    Biases of queries and keys become zero. The layer's own LayerNorm is applied to the pseudo input, so a trained one
    is taken into account. [CLS] and registers take no part: attention maps are those among patches.

    Args:
        model (`nn.Module`):
            A plain vision transformer of Transformers, timm or open_clip that adds positions to its tokens, see
            docs/models.md.
        kernel_size (`int`, *optional*, defaults to 3): Size of the filters; each head gets one position of it.
        solver (`str`, *optional*, defaults to `"closed_form"`):
            `"closed_form"`, ours; `"adam"`, Algorithm 1 as the paper prints it, which saturates the softmax;
            `"adam_bounded"`, Algorithm 1 with weights of bounded length, as its authors' code has it; `"pinv"`, the
            code of the NeurIPS 2025 version, which does not draw its offsets. See `frugalvit.modeling.impulse`. Both
            of Algorithm 1 take seconds to minutes a layer. With a generator of one seed, those that draw offsets draw
            the same.
        pseudo_input (`str` or pair of `str`, *optional*, defaults to `"pe"`):
            Inputs in the place of tokens, for the first and for the following layers (table 6): `"pe"`, the positions;
            `"uniform"` in -1..1; `"gaussian"`; or `"pe+uniform"`.
        per_layer (`bool`, *optional*, defaults to `True`):
            Whether layers differ in offsets and weights; otherwise all get the same.
        value_init (`str`, *optional*, defaults to `"mimetic"`):
            `"mimetic"` sets values and output projections as `mimetic_init_` does, `"default"` leaves them alone.
        mass (`float`, *optional*, defaults to 0.2):
            For `solver="closed_form"`: attention at the target on the pseudo input, above 0 and below 1; `None` for
            the maps that Algorithm 1 reaches. The default trained best among 0.1, 0.2, 0.5 and 0.9, see
            `results/impulse_solvers.json`.
        positions (`str`, *optional*, defaults to `"sincos"`):
            Learned positions are set to the sinusoidal encoding, those of [CLS] to zero; with `"random"` to normal
            ones, which `solver="pinv"` is made for; `"keep"` solves against the given ones.
        steps (`int`, *optional*, defaults to 10,000): Steps of Algorithm 1, for both solvers by it.
        generator (`torch.Generator`, *optional*): Source of chance, on CPU.
        position_std (`float`, *optional*, defaults to 0.36):
            Standard deviation of random positions. The NeurIPS 2025 code has 0.02, in one set-up times 18.
        renormalize_every (`int`, *optional*, defaults to 100):
            For `solver="adam_bounded"`: steps between rescalings of Q and K to the length of the start, see
            `solve_adam`. The authors ran their code with 100.

    Returns:
        `InitializationReport`: The attention that came out, head by head.

    Raises:
        ValueError: if the model is none of those, attends otherwise than by the products of its queries and keys
            (rotary or relative positions, talking heads), or an argument makes no sense; the model is then as it was.
    """
    kinds = (pseudo_input, pseudo_input) if isinstance(pseudo_input, str) else tuple(pseudo_input)
    _check("solver", solver, SOLVERS)
    _check("value_init", value_init, VALUE_INITS)
    if len(kinds) != 2:
        raise ValueError(f"`pseudo_input` is {pseudo_input!r}, expected one name or two, for first and later layers.")
    for kind in kinds:
        _check("pseudo_input", kind, PSEUDO_INPUTS)
    if mass is not None and not 0 < mass < 1:
        raise ValueError(f"`mass` is {mass}, expected a number above 0 and below 1, or None.")
    numbers = {"position_std": position_std, "steps": steps, "renormalize_every": renormalize_every}
    for name, value in numbers.items():
        if value <= 0:
            raise ValueError(f"`{name}` is {value}, expected a positive number.")
    kernel_offsets(kernel_size)
    if solver == "pinv" and kernel_size != 3:
        raise ValueError(f"`kernel_size` is {kernel_size}, but `solver='pinv'` has an order for 3 x 3 kernels only.")

    vit = read_parts(model)
    if kernel_size // 2 >= min(vit.grid):
        raise ValueError(
            f"`kernel_size` is {kernel_size}, but the patches make a grid of {' x '.join(map(str, vit.grid))}, which "
            f"some impulses would leave from everywhere; expected at most {2 * min(vit.grid) - 1}."
        )
    _set_positions(vit, positions, position_std, generator)
    raw = {kind: _pseudo_input(kind, vit, generator) for kind in dict.fromkeys(kinds)}
    solve = _Solver(solver, vit.grid, mass, steps, renormalize_every, generator)
    report, heads = InitializationReport(), None
    # All before anything else is drawn, so that they do not depend on the solver.
    all_offsets = [solve.offsets(kernel_size, layer.num_heads) for layer in vit.layers]
    bar = tqdm(vit.layers, desc="Algorithm 1, layers", leave=False, disable=None if solve.iterates else True)
    for index, layer in enumerate(bar):
        inputs, offsets = _normalized(raw[kinds[min(index, 1)]], layer), all_offsets[index if per_layer else 0]
        first_of_kind = index < 2 and (index == 0 or kinds[0] != kinds[1])
        if per_layer or first_of_kind:
            heads = solve(inputs, offsets, layer.head_dim)
        for head, (query, key) in enumerate(heads):
            layer.head(layer.query, head).copy_(query.T)
            layer.head(layer.key, head).copy_(key.T)
        _zero_biases(layer)
        _set_values(layer, value_init, generator)
        report.heads += _describe(index, layer, inputs, vit.grid, offsets)
    return report


@torch.no_grad()
def mimetic_init_(
    model: nn.Module,
    positions: str = "sincos",
    generator: torch.Generator | None = None,
    value_init: str = "mimetic",
    position_std: float = 0.36,
) -> InitializationReport:
    """Initialize attention so that it mimics trained transformers (Trockman & Kolter 2023), in place.

    Query-key products become 0.7 Z + 0.7 I for every head, value-output products 0.4 Z - 0.4 I for every layer, and
    learned positions the sinusoidal encoding, on which the identity in the query-key product acts as locality. Biases
    of queries and keys become zero.

    Args:
        model (`nn.Module`): As in `impulse_init_`.
        positions (`str`, *optional*, defaults to `"sincos"`): As in `impulse_init_`.
        generator (`torch.Generator`, *optional*): Source of the noise, on CPU.
        value_init, position_std: As in `impulse_init_`.

    Returns:
        `InitializationReport`: How the heads attend, with the position itself as target.

    Raises:
        ValueError: if the model is none of those, or an argument makes no sense.
    """
    _check("value_init", value_init, VALUE_INITS)
    vit = read_parts(model)
    _set_positions(vit, positions, position_std, generator)
    report = InitializationReport()
    for index, layer in enumerate(vit.layers):
        width = layer.query.weight.shape[1]
        for head in range(layer.num_heads):
            left, right = mimetic_factors(width, 0.7, 0.7, generator)
            layer.head(layer.query, head).copy_(left[:, : layer.head_dim].T)
            layer.head(layer.key, head).copy_(right[: layer.head_dim])
        _zero_biases(layer)
        _set_values(layer, value_init, generator)
        report.heads += _describe_unstructured(index, layer, vit)
    return report


@torch.no_grad()
def trunc_normal_init_(
    model: nn.Module,
    std: float = 0.02,
    generator: torch.Generator | None = None,
    value_init: str = "default",
    positions: str = "keep",
    position_std: float = 0.36,
) -> InitializationReport:
    """Initialize all linear layers of the blocks as timm does, in place: from a normal distribution cut at 2 and -2,
    that is hardly, biases zero. Positions stay unless `positions` says otherwise. With `value_init="mimetic"`, values
    and output projections are those of `mimetic_init_`: the control of impulses with such values. Model, returns and
    errors as there."""

    def initialize(linear: nn.Linear):
        nn.init.trunc_normal_(linear.weight, std=std, generator=generator)
        if linear.bias is not None:
            linear.bias.zero_()

    return _initialize_linears(model, initialize, value_init, positions, position_std, generator)


@torch.no_grad()
def kaiming_uniform_init_(
    model: nn.Module,
    generator: torch.Generator | None = None,
    value_init: str = "default",
    positions: str = "keep",
    position_std: float = 0.36,
) -> InitializationReport:
    """Initialize all linear layers of the blocks, weights and biases, uniformly in +-1 / sqrt(inputs), PyTorch's
    default; in place. The rest as in `trunc_normal_init_`."""

    def initialize(linear: nn.Linear):
        bound = linear.in_features**-0.5
        linear.weight.uniform_(-bound, bound, generator=generator)
        if linear.bias is not None:
            linear.bias.uniform_(-bound, bound, generator=generator)

    return _initialize_linears(model, initialize, value_init, positions, position_std, generator)


def _initialize_linears(
    model: nn.Module, initialize, value_init: str, positions: str, position_std: float, generator
) -> InitializationReport:
    _check("value_init", value_init, VALUE_INITS)
    vit = read_parts(model)
    _set_positions(vit, positions, position_std, generator)
    for layer in vit.layers:
        for linear in layer.linears:
            initialize(linear)
        _set_values(layer, value_init, generator)
    report = InitializationReport()
    for index, layer in enumerate(vit.layers):
        report.heads += _describe_unstructured(index, layer, vit)
    return report


INITIALIZATIONS = {
    "impulse": impulse_init_,
    "mimetic": mimetic_init_,
    "trunc_normal": trunc_normal_init_,
    "kaiming_uniform": kaiming_uniform_init_,
}


def initialize_attention_(model: nn.Module, initialization: str = "impulse", **options) -> InitializationReport:
    """Apply one of `INITIALIZATIONS` by name, with its options; for example `initialize_attention_(vit, "mimetic")`.

    Args:
        model (`nn.Module`): The vision transformer, changed in place.
        initialization (`str`, *optional*, defaults to `"impulse"`): The name of the initialization.
        options (*optional*): Arguments of the initialization.

    Raises:
        ValueError: if there is none of that name, and what the initialization raises.
    """
    _check("initialization", initialization, INITIALIZATIONS)
    return INITIALIZATIONS[initialization](model, **options)


# Options of the initializations of attention, and the fields of an `AttentionStartConfig` that hold them.
START_FIELDS = {
    "solver": "impulse_solver",
    "kernel_size": "impulse_kernel_size",
    "mass": "impulse_mass",
    "steps": "impulse_steps",
    "renormalize_every": "impulse_renormalize_every",
    "pseudo_input": "impulse_pseudo_input",
    "per_layer": "impulse_per_layer",
    "value_init": "impulse_value_init",
    "std": "initializer_range",
    "position_std": "position_std",
}


def start_attention_(model: nn.Module | TransformerParts, config, **options) -> InitializationReport:
    """Initialize the attention of a fresh model as its configuration says, an `AttentionStartConfig`; `options` are
    further ones."""
    initialize = INITIALIZATIONS[config.initialization]
    accepted = inspect.signature(initialize).parameters
    for option, field_name in START_FIELDS.items():
        value = getattr(config, field_name, None)
        # Values that are not given are the initialization's own. A mass of None says something.
        if option in accepted and (value is not None or option == "mass"):
            options.setdefault(option, value)
    return initialize(model, **options)


class _Solver:
    """Solves for the queries and keys of a layer's heads; equal problems are solved once."""

    def __init__(
        self,
        name: str,
        grid: tuple[int, int],
        mass: float | None,
        steps: int,
        renormalize_every: int,
        generator: torch.Generator | None,
    ):
        self.name, self.grid, self.mass, self.generator = name, grid, mass, generator
        self.iterates = name in ("adam", "adam_bounded")
        self.adam = {"steps": steps, "renormalize_every": renormalize_every if name == "adam_bounded" else None}
        self.solved: list[tuple[torch.Tensor, dict]] = []

    def offsets(self, kernel_size: int, num_heads: int) -> list[tuple[int, int]]:
        if self.name == "pinv":
            order = [_PINV_ORDER[head % len(_PINV_ORDER)] for head in range(num_heads)]
            return [(position // 3 - 1, position % 3 - 1) for position in order]
        return draw_offsets(kernel_size, num_heads, self.generator)

    def __call__(self, inputs: torch.Tensor, offsets: list, head_dim: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Query and key, `(hidden_size, head_dim)`, of every head."""
        if self.iterates:
            targets = torch.stack([impulse_matrix(*self.grid, offset) for offset in offsets]).to(inputs)
            solved = solve_adam(inputs, targets, head_dim, **self.adam, generator=self.generator)
            return list(zip(*solved, strict=True))
        known = next((known for of, known in self.solved if torch.equal(of, inputs)), None)
        if known is None:
            known = {}
            self.solved.append((inputs, known))
        heads = []
        for offset in offsets:
            if (offset, head_dim) not in known:
                target = impulse_matrix(*self.grid, offset).to(inputs)
                if self.name == "pinv":
                    known[offset, head_dim] = solve_pinv(inputs, target, head_dim, self.generator)
                else:
                    known[offset, head_dim] = solve_closed_form(inputs, target, head_dim, self.mass)
            heads.append(rotate_head(*known[offset, head_dim], self.generator))
        return heads


def _check(name: str, value, known):
    if value not in known:
        raise ValueError(f"`{name}` is {value!r}, expected one of {', '.join(map(repr, known))}.")


def _set_positions(vit: TransformerParts, positions: str, std: float, generator: torch.Generator | None):
    _check("positions", positions, POSITIONS)
    if positions == "random" and not vit.learns_positions:
        raise ValueError("`positions` is 'random', but this model's are fixed; expected 'sincos' or 'keep'.")
    if positions == "random":
        vit.positions.copy_(torch.empty(vit.positions.shape).normal_(std=std, generator=generator))
    elif positions == "sincos" and vit.learns_positions:
        encoding = sincos_position_encoding(*vit.grid, vit.positions.shape[1])
        vit.positions.zero_()
        vit.patch_positions.copy_(encoding)


def _pseudo_input(kind: str, vit: TransformerParts, generator) -> torch.Tensor:
    positions = _tokens_of_positions(vit)
    if kind == "pe":
        return positions
    chance = torch.empty(positions.shape)
    chance = chance.normal_(generator=generator) if kind == "gaussian" else chance.uniform_(-1, 1, generator=generator)
    return chance.to(positions) + (positions if kind == "pe+uniform" else 0)


def _tokens_of_positions(vit: TransformerParts) -> torch.Tensor:
    """The first block's input for patches without content, `(patches, hidden_size)` in float32."""
    positions = vit.patch_positions.float()
    return positions if vit.pre_norm is None else copy.deepcopy(vit.pre_norm).float()(positions)


def _normalized(inputs: torch.Tensor, layer: BlockParts) -> torch.Tensor:
    return copy.deepcopy(layer.norm).float()(inputs)


def _zero_biases(layer: BlockParts):
    """Set the biases of queries and keys to zero."""
    for projection in (layer.query, layer.key):
        if projection.bias is not None:
            projection.bias.zero_()


def _set_values(layer: BlockParts, value_init: str, generator: torch.Generator | None):
    if value_init == "default":
        return
    left, right = mimetic_factors(layer.value.weight.shape[1], 0.4, -0.4, generator)
    layer.value.weight.copy_(left.T)
    layer.output.weight.copy_(right.T)


def _describe(index: int, layer: BlockParts, inputs: torch.Tensor, grid, offsets) -> list[HeadReport]:
    reports = []
    for head, offset in enumerate(offsets):
        query, key = (layer.head(projection, head).float().T for projection in (layer.query, layer.key))
        logits = attention_logits(inputs, query, key)
        attention = logits.softmax(-1)
        target = impulse_matrix(*grid, offset).to(attention)
        inside = target.sum(1) > 0
        peaks = attention.argmax(1) == target.argmax(1)
        reports.append(
            HeadReport(
                layer=index,
                head=head,
                offset=offset,
                error=(attention - target).square().mean().item(),
                peak_rate=peaks[inside].float().mean().nan_to_num().item(),
                mass=interior_mass(attention, target).item(),
                query_norm=query.norm().item(),
                key_norm=key.norm().item(),
                max_logit=logits.abs().max().item(),
            )
        )
    return reports


def _describe_unstructured(index: int, layer: BlockParts, vit: TransformerParts) -> list[HeadReport]:
    inputs = _normalized(_tokens_of_positions(vit), layer)
    return _describe(index, layer, inputs, vit.grid, [(0, 0)] * layer.num_heads)
