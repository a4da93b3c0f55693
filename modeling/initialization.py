"""In-place initializations of attention in vision transformers of several libraries, for training on little data."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.utils.logging import tqdm

from .impulse import (
    attention_map,
    draw_offsets,
    impulse_matrix,
    interior_mass,
    mimetic_factors,
    pinv_offsets,
    rotate_head,
    sincos_position_encoding,
    solve_adam,
    solve_closed_form,
    solve_pinv,
)


SOLVERS = ("closed_form", "adam", "adam_bounded", "pinv")
PSEUDO_INPUTS = ("pe", "uniform", "pe+uniform")
VALUE_INITS = ("default", "mimetic")


@dataclass
class HeadReport:
    """Measurements of a head after initialization. The attention map is that of the layer's pseudo input, which
    `impulse_init_` describes.

    Args:
        layer, head (`int`): Indices of the layer and the head.
        offset (pair of `int`):
            Rows and columns from a position to its target; (0, 0) for initializations without impulses.
        error (`float`): Mean squared error of the attention map (eq. 8 of Zheng et al., arXiv 2404.01139).
        peak_rate (`float`): Fraction of the interior positions whose largest attention is at their target. A position
            is interior if its target lies on the grid.
        mass (`float`): Attention at the target, averaged over the interior positions.
        query_norm, key_norm (`float`): Frobenius norms of the query and key weights.
    """

    layer: int
    head: int
    offset: tuple[int, int]
    error: float
    peak_rate: float
    mass: float
    query_norm: float
    key_norm: float


@dataclass
class InitializationReport:
    """A `HeadReport` for every head of every layer."""

    heads: list[HeadReport] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """Return the mean of a field of `HeadReport`, for example `"mass"`, over all heads."""
        return sum(getattr(head, name) for head in self.heads) / len(self.heads)

    def __str__(self) -> str:
        names = ("error", "peak_rate", "mass", "query_norm", "key_norm")
        return f"{len(self.heads)} heads; means: {', '.join(f'{name} {self.mean(name):.3g}' for name in names)}"


@dataclass
class BlockParts:
    """An encoder block, the norm before its attention, and the linear projections of its attention."""

    block: nn.Module
    norm: nn.Module
    num_heads: int
    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module

    @property
    def head_dim(self) -> int:
        return len(self.query.weight) // self.num_heads

    def head(self, projection: nn.Module, head: int) -> torch.Tensor:
        """Return a view of a head's rows in the weight of `query` or `key`, `(head_dim, hidden_size)`."""
        return projection.weight[head * self.head_dim : (head + 1) * self.head_dim]


@dataclass
class TransformerParts:
    """The parts of a vision transformer that initializations read and write.

    Args:
        layers (list of `BlockParts`): The blocks.
        positions (`torch.Tensor`): Positions of [CLS], registers and patches, `(prefix + patches, hidden_size)`.
        learns_positions (`bool`): Whether the positions are trained.
        grid (pair of `int`): Rows and columns of patches.
        pre_norm (`nn.Module`, *optional*): Norm before the first block.
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
    """Return the parts of a plain vision transformer that adds position embeddings to its patches. Raise a ValueError
    for other models."""
    if isinstance(model, TransformerParts):
        return model
    try:
        from frugalvit.modeling.hosts import read_anatomy
    except ModuleNotFoundError as error:
        raise ImportError(
            "Initializing the attention of a model needs the package frugalvit; its README says how to install it."
        ) from error
    anatomy = read_anatomy(model)
    anatomy.require_plain("initialize")
    for reason, applies in (
        ("it adds no positions to its tokens", anatomy.position_table is None),
        ("it rotates queries and keys by their positions", anatomy.rotary is not None),
        ("it normalizes queries and keys", anatomy.blocks[0].attention.query_norm is not None),
    ):
        if applies:
            raise ValueError(f"Cannot initialize {type(model).__name__}: {reason}.")
    layers = []
    for block in anatomy.blocks:
        attention = block.attention
        layers.append(
            BlockParts(
                block.module,
                block.attention_norm,
                attention.num_heads,
                query=attention.query,
                key=attention.key,
                value=attention.value,
                output=attention.output,
            )
        )
    positions = anatomy.position_table
    return TransformerParts(layers, positions, positions.requires_grad, anatomy.grid, pre_norm=anatomy.pre_norm)


def parts_of_layers(model: nn.Module, grid: tuple[int, int]) -> TransformerParts:
    """Return the parts of a `ViTModel` of this package or of Transformers. `grid` is the number of rows and the number
    of columns of patches in an image."""
    layers = []
    for layer in model.layers:
        attention = layer.attention
        layers.append(
            BlockParts(
                layer,
                layer.layernorm_before,
                model.config.num_attention_heads,
                query=attention.q_proj,
                key=attention.k_proj,
                value=attention.v_proj,
                output=attention.o_proj,
            )
        )
    positions = model.embeddings.position_embeddings
    return TransformerParts(layers, positions[0], positions.requires_grad, grid)


def is_drawn(model: nn.Module) -> bool:
    """Return whether the attention weights of a `ViTModel` (of this package or of Transformers) are new. Weights are
    not new if they were loaded (with Transformers' mark `_is_hf_initialized`) or will be loaded (on the meta device).
    """
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
    offsets: torch.Tensor | Callable[[int], torch.Tensor] | None = None,
) -> InitializationReport:
    """Initialize queries and keys in place, so that the attention map of each head is a random impulse filter (Zheng
    et al., arXiv 2404.01139).

    The defaults differ from the paper. The paper's method is `solver="adam", value_init="default"` as printed, and
    `solver="adam_bounded", value_init="default"` in the authors' code. See docs/impulse_initialization.md.

    A pseudo input stands in for the input that a layer gets in training. The solvers compute query and key weights for
    which the attention map of the pseudo input approximates the impulse filter. The pseudo input passes through the
    LayerNorm of the layer. Pseudo inputs contain no [CLS] and no registers. Biases of queries and keys become zero.

    Args:
        model (`nn.Module`): A plain vision transformer that adds positions to its tokens, see docs/models.md.
        kernel_size (`int`, *optional*, defaults to 3):
            Height and width of the filters. Each head gets an impulse at one position of the kernel.
        solver (`str`, *optional*, defaults to `"closed_form"`):
            `"closed_form"` is our solution, which is not from a paper. `"adam"` is Algorithm 1 as printed, which
            saturates the softmax. `"adam_bounded"` is Algorithm 1 with weights rescaled every 100 steps, as in the
            authors' code. Algorithm 1 takes seconds to minutes for each layer. `"pinv"` is the code of the NeurIPS
            2025 version, in which the offsets are not random.
        pseudo_input (`str` or pair of `str`, *optional*, defaults to `"pe"`):
            Pseudo input of all layers, or a pair: the pseudo input of the first layer and that of all other layers
            (table 6). `"pe"` is the positions, `"uniform"` is noise from -1 to 1, and `"pe+uniform"` is the sum of
            positions and noise.
        per_layer (`bool`, *optional*, defaults to `True`): Whether layers differ in offsets and weights.
        value_init (`str`, *optional*, defaults to `"mimetic"`):
            `"mimetic"` initializes values and output projections as `mimetic_init_` does. `"default"` does not change
            them.
        mass (`float`, *optional*, defaults to 0.2):
            Attention at the target, above 0 and below 1, for `solver="closed_form"`. With `None`, maps are as sharp
            as those of Algorithm 1. The default had the highest accuracy among 0.1, 0.2, 0.5 and 0.9
            (`results/impulse_solvers.json`).
        positions (`str`, *optional*, defaults to `"sincos"`):
            `"sincos"` sets learned positions of patches to the sinusoidal encoding, and learned positions of other
            tokens to zero. `"keep"` does not change positions.
        steps (`int`, *optional*, defaults to 10,000): Steps of Algorithm 1.
        generator (`torch.Generator`, *optional*): Random number generator on the CPU.
        offsets (`torch.Tensor` or `Callable`, *optional*):
            Rows and columns from a patch to the patch that a head attends to: `(heads, 2)` integers for all layers, or
            a function from a layer's index to such integers. By default, offsets are drawn from the kernel.

    Returns:
        `InitializationReport`: A report on every head.

    Raises:
        ValueError: if the model is not a plain vision transformer with added positions, or an argument is invalid.
    """
    first_and_later = (pseudo_input, pseudo_input) if isinstance(pseudo_input, str) else tuple(pseudo_input)
    _check("solver", solver, SOLVERS)
    _check("value_init", value_init, VALUE_INITS)
    if len(first_and_later) != 2:
        raise ValueError(
            f"`pseudo_input` is {pseudo_input!r}, expected one name, or two names for the first and the later layers."
        )
    for kind in first_and_later:
        _check("pseudo_input", kind, PSEUDO_INPUTS)
    if mass is not None and not 0 < mass < 1:
        raise ValueError(f"`mass` is {mass}, expected a number above 0 and below 1, or None.")
    if solver == "pinv" and kernel_size != 3:
        raise ValueError(f"`kernel_size` is {kernel_size}, expected 3 for `solver='pinv'`.")
    vit = read_parts(model)
    if not 1 <= kernel_size < 2 * min(vit.grid):
        grid = " x ".join(map(str, vit.grid))
        raise ValueError(
            f"`kernel_size` is {kernel_size}, expected 1 to {2 * min(vit.grid) - 1} on a grid of {grid} patches."
        )

    given_offsets = None
    if offsets is not None:
        layers = enumerate(vit.layers)
        given_offsets = [
            check_offsets(offsets(index) if callable(offsets) else offsets, layer.num_heads) for index, layer in layers
        ]

    # All arguments are valid, so the model may be changed from here on.
    _set_positions(vit, positions)
    inputs = {kind: _pseudo_input(kind, vit, generator) for kind in dict.fromkeys(first_and_later)}
    # Offsets are drawn before the solver draws random numbers, so that they do not depend on the solver.
    if given_offsets is not None:
        all_offsets = given_offsets
    elif solver == "pinv":
        all_offsets = [pinv_offsets(layer.num_heads) for layer in vit.layers]
    else:
        all_offsets = [draw_offsets(kernel_size, layer.num_heads, generator) for layer in vit.layers]
    iterates = solver in ("adam", "adam_bounded")
    solve = functools.partial(solve_closed_form, mass=mass)
    if solver == "pinv":
        solve = functools.partial(solve_pinv, generator=generator)
    report = InitializationReport()
    solved_kind = solved_inputs = None
    bar = tqdm(vit.layers, desc="Algorithm 1, layers", leave=False, disable=None if iterates else True)
    for index, layer in enumerate(bar):
        kind = first_and_later[min(index, 1)]
        normalized = _normalize(layer.norm, inputs[kind])
        offsets = all_offsets[index if per_layer else 0]
        if per_layer or kind != solved_kind:
            solved_kind = kind
            targets = [impulse_matrix(*vit.grid, offset).to(normalized) for offset in offsets]
            # If a layer has the same input as the layer before, the solutions for equal offsets are reused.
            if solved_inputs is None or not torch.equal(solved_inputs, normalized):
                solved_inputs = normalized
                solved = {}
            if iterates:
                queries, keys = solve_adam(
                    normalized,
                    torch.stack(targets),
                    layer.head_dim,
                    steps=steps,
                    generator=generator,
                    renormalize_every=100 if solver == "adam_bounded" else None,
                )
                heads = list(zip(queries, keys, strict=True))
            else:
                heads = []
                for offset, target in zip(offsets, targets, strict=True):
                    if offset not in solved:
                        solved[offset] = solve(normalized, target, layer.head_dim)
                    heads.append(rotate_head(*solved[offset], generator))
        for head, (query, key) in enumerate(heads):
            layer.head(layer.query, head).copy_(query.T)
            layer.head(layer.key, head).copy_(key.T)
        _zero_biases(layer)
        _set_values(layer, value_init, generator)
        report.heads += _describe(index, layer, normalized, vit.grid, offsets)
    return report


@torch.no_grad()
def mimetic_init_(
    model: nn.Module,
    positions: str = "sincos",
    generator: torch.Generator | None = None,
    value_init: str = "mimetic",
) -> InitializationReport:
    """Initialize attention in place as in trained transformers: mimetic initialization (Trockman & Kolter 2023).

    The product of query and key weights becomes 0.7 Z + 0.7 I for each head, reduced to rank `head_dim`. The product
    of value and output weights becomes 0.4 Z - 0.4 I for each layer. Z is random, and I is the identity. Learned
    positions become the sinusoidal encoding. With this encoding, the identity in the query-key product makes attention
    local. Biases of queries and keys become zero. Arguments, returns and errors are those of `impulse_init_`.
    """
    _check("value_init", value_init, VALUE_INITS)
    vit = read_parts(model)
    _set_positions(vit, positions)
    for layer in vit.layers:
        width = layer.query.weight.shape[1]
        for head in range(layer.num_heads):
            left, right = mimetic_factors(width, 0.7, 0.7, generator)
            layer.head(layer.query, head).copy_(left[:, : layer.head_dim].T)
            layer.head(layer.key, head).copy_(right[: layer.head_dim])
        _zero_biases(layer)
        _set_values(layer, value_init, generator)
    return _report(vit)


def trunc_normal_init_(
    model: nn.Module,
    std: float = 0.02,
    generator: torch.Generator | None = None,
    value_init: str = "default",
) -> InitializationReport:
    """Initialize all linear layers of the blocks in place, as timm does. Weights are drawn from a normal distribution
    with standard deviation `std` that is truncated at -2 and 2. Biases become zero.

    With `value_init="mimetic"`, values and output projections are initialized as in `mimetic_init_`. Other arguments,
    returns and errors are those of `impulse_init_`.
    """

    def draw(weight: torch.Tensor, bias: torch.Tensor | None):
        nn.init.trunc_normal_(weight, std=std, generator=generator)
        if bias is not None:
            bias.zero_()

    return _init_linears(model, draw, generator, value_init)


def kaiming_uniform_init_(
    model: nn.Module, generator: torch.Generator | None = None, value_init: str = "default"
) -> InitializationReport:
    """Initialize weights and biases of the blocks' linear layers in place, uniformly in +-1 / sqrt(inputs), PyTorch's
    default. Arguments are those of `trunc_normal_init_`."""

    def draw(weight: torch.Tensor, bias: torch.Tensor | None):
        bound = weight.shape[1] ** -0.5
        weight.uniform_(-bound, bound, generator=generator)
        if bias is not None:
            bias.uniform_(-bound, bound, generator=generator)

    return _init_linears(model, draw, generator, value_init)


@torch.no_grad()
def _init_linears(model: nn.Module, draw, generator: torch.Generator | None, value_init: str):
    _check("value_init", value_init, VALUE_INITS)
    vit = read_parts(model)
    for layer in vit.layers:
        for module in layer.block.modules():
            if isinstance(module, nn.Linear):
                draw(module.weight, module.bias)
            elif isinstance(module, nn.MultiheadAttention):
                # open_clip's queries, keys and values have one weight, which belongs to no `nn.Linear`.
                draw(module.in_proj_weight, module.in_proj_bias)
        _set_values(layer, value_init, generator)
    return _report(vit)


INITIALIZATIONS = {
    "impulse": impulse_init_,
    "mimetic": mimetic_init_,
    "trunc_normal": trunc_normal_init_,
    "kaiming_uniform": kaiming_uniform_init_,
}


def initialize_attention_(model: nn.Module, initialization: str = "impulse", **options) -> InitializationReport:
    """Apply an initialization of `INITIALIZATIONS` by its name, for example `initialize_attention_(vit, "mimetic")`.
    `options` are further arguments of the initialization's function."""
    _check("initialization", initialization, INITIALIZATIONS)
    return INITIALIZATIONS[initialization](model, **options)


def start_attention_(model: nn.Module | TransformerParts, config, positions: str = "sincos") -> InitializationReport:
    """Initialize the attention of a new model as its `config`, an `AttentionStartConfig`, specifies. `positions` is an
    argument of `impulse_init_`."""
    options = dict(config.initialization_options)
    if config.initialization in ("impulse", "mimetic"):
        options["positions"] = positions
    elif config.initialization == "trunc_normal":
        options.setdefault("std", getattr(config, "initializer_range", 0.02))
    return initialize_attention_(model, config.initialization, **options)


def check_offsets(offsets: torch.Tensor, num_heads: int) -> list[tuple[int, int]]:
    """Return a layer's offsets as pairs. Raise a ValueError if `offsets` are not `(num_heads, 2)` integers."""
    pairs = torch.as_tensor(offsets)
    if pairs.shape != (num_heads, 2) or pairs.is_floating_point():
        raise ValueError(
            f"`offsets` of a layer are {pairs.dtype} of shape {tuple(pairs.shape)}, expected integers of shape "
            f"({num_heads}, 2), a row and a column for each head."
        )
    return [(row, column) for row, column in pairs.tolist()]


def _check(name: str, value, known):
    if value not in known:
        raise ValueError(f"`{name}` is {value!r}, expected one of {', '.join(map(repr, known))}.")


def _set_positions(vit: TransformerParts, positions: str):
    _check("positions", positions, ("sincos", "keep"))
    if positions == "sincos" and vit.learns_positions:
        encoding = sincos_position_encoding(*vit.grid, vit.positions.shape[1])
        vit.positions.zero_()
        vit.patch_positions.copy_(encoding)


def _pseudo_input(kind: str, vit: TransformerParts, generator: torch.Generator | None) -> torch.Tensor:
    """Return the pseudo input `kind`, `(patches, hidden_size)` in float32, before the LayerNorm of a layer."""
    positions = vit.patch_positions.float()
    if vit.pre_norm is not None:
        positions = _normalize(vit.pre_norm, positions)
    if kind == "pe":
        return positions
    noise = torch.empty(positions.shape).uniform_(-1, 1, generator=generator).to(positions)
    return noise + positions if kind == "pe+uniform" else noise


def _normalize(norm: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(norm).float()(inputs)


def _zero_biases(layer: BlockParts):
    for projection in (layer.query, layer.key):
        if projection.bias is not None:
            projection.bias.zero_()


def _set_values(layer: BlockParts, value_init: str, generator: torch.Generator | None):
    if value_init == "mimetic":
        left, right = mimetic_factors(layer.value.weight.shape[1], 0.4, -0.4, generator)
        layer.value.weight.copy_(left.T)
        layer.output.weight.copy_(right.T)


def _report(vit: TransformerParts) -> InitializationReport:
    """Return a report in which the target of each position is the position itself."""
    report = InitializationReport()
    for index, layer in enumerate(vit.layers):
        inputs = _normalize(layer.norm, _pseudo_input("pe", vit, None))
        report.heads += _describe(index, layer, inputs, vit.grid, [(0, 0)] * layer.num_heads)
    return report


def _describe(index: int, layer: BlockParts, inputs: torch.Tensor, grid, offsets) -> list[HeadReport]:
    reports = []
    for head, offset in enumerate(offsets):
        query = layer.head(layer.query, head).float().T
        key = layer.head(layer.key, head).float().T
        attention = attention_map(inputs, query, key)
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
            )
        )
    return reports
