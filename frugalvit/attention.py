"""Measurements of a vision transformer's attention: entropy, favorite neighbors and stable ranks."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from .common.scores import check_scores
from .configuration.configuration_base import pair
from .modeling.impulse import impulse_matrix, interior_mass, kernel_offsets


# Largest distance, in patches, of the neighbor that a head attends to most.
REACH = 2


@dataclass
class LayerStatistics:
    """Statistics of a layer, averaged over images.

    Args:
        layer (`int`): Its number, from 1.
        stable_rank (`float`): Stable rank of the layer's output, see `stable_rank`.
        entropy (`list[float]`): Entropy of each head's attention, averaged over queries, in nats; at most log(tokens).
        offset (list of pairs of `int`): The relative position (dy, dx), at most two away, to which each head attends
            most; empty where tokens lie on no grid.
        mass (`list[float]`): Attention to that position, averaged over the tokens that have it within the grid.
        maps (`torch.Tensor`): `(heads, tokens, tokens)` attention of queries (rows) to keys, [CLS] and the like first;
            `None` for convolutional layers.
    """

    layer: int
    stable_rank: float
    entropy: list[float] = field(default_factory=list)
    offset: list[tuple[int, int]] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    maps: torch.Tensor | None = field(default=None, repr=False)


def stable_rank(matrices: torch.Tensor) -> torch.Tensor:
    """Stable rank of matrices, `(…, rows, columns)` to `(…)`, from 1 to the rank: the sum of the squared singular
    values divided by the largest one (Remark 1 of Zheng et al.)."""
    values = torch.linalg.svdvals(matrices.float()).square()
    return values.sum(-1) / values.amax(-1)


@torch.no_grad()
def measure_attention(model: PreTrainedModel, batches: Iterable[torch.Tensor]) -> list[LayerStatistics]:
    """Measure the attention of a model's layers to images, and the stable rank of their outputs.

    Args:
        model (`PreTrainedModel`): A vision transformer of Transformers or of this package. For a convolutional model,
            only the stable rank is measured.
        batches (iterable of `torch.Tensor`): Pixel values `(batch, channels, height, width)`.
    """
    implementation = getattr(model.config, "_attn_implementation", None)
    attends = hasattr(model.config, "num_attention_heads")
    if attends:
        model.set_attn_implementation("eager")
    wanted = {"output_attentions": True} if attends else {}
    count, sums = 0, defaultdict(float)
    try:
        for pixel_values in batches:
            count += len(pixel_values)
            outputs = model(pixel_values, output_hidden_states=True, **wanted)
            for layer, states in enumerate(outputs.hidden_states[1:]):
                # A feature map's positions are its tokens.
                tokens = states.flatten(2).mT if states.ndim == 4 else states
                check_scores(tokens, f"hidden states of layer {layer}")
                sums["rank", layer] += stable_rank(tokens).sum()
            for layer, weights in enumerate((attends and outputs.attentions) or ()):
                # Windows of an image count as one.
                weights, share = weights.float(), len(pixel_values) / len(weights)
                sums["maps", layer] += share * weights.sum(0)
                sums["entropy", layer] += share * torch.special.entr(weights).sum(-1).mean(-1).sum(0)
    finally:
        if attends:
            model.set_attn_implementation(implementation)
    if not count:
        raise ValueError("Got no images, expected at least one.")
    means, grid = {key: value.cpu() / count for key, value in sums.items()}, patch_grid(model.config)
    statistics = []
    for layer in range(sum(name == "rank" for name, _ in means)):
        statistics.append(LayerStatistics(layer + 1, means["rank", layer].item()))
        if ("maps", layer) in means:
            statistics[-1].maps = means["maps", layer]
            statistics[-1].entropy = means["entropy", layer].tolist()
            statistics[-1].offset, statistics[-1].mass = favorite_neighbors(means["maps", layer], grid)
    return statistics


def patch_grid(config) -> tuple[int, int] | None:
    """Rows and columns of patches, if tokens are patches, else None."""
    patch = getattr(config, "patch_size", None)
    if patch is None:
        return None
    return tuple(size // patch for size, patch in zip(pair(config.image_size), pair(patch), strict=True))


def favorite_neighbors(maps: torch.Tensor, grid: tuple[int, int] | None) -> tuple[list[tuple[int, int]], list[float]]:
    """The `offset` and `mass` of `LayerStatistics`, given its `maps` and the grid of patches."""
    positions = grid[0] * grid[1] if grid else 0
    if not 0 < positions <= maps.shape[-1]:
        return [], []
    impulses = {offset: impulse_matrix(*grid, offset) for offset in kernel_offsets(2 * REACH + 1)}
    impulses = {offset: matrix for offset, matrix in impulses.items() if matrix.any()}
    among_patches = maps[:, -positions:, -positions:]
    masses = torch.stack([interior_mass(among_patches, matrix) for matrix in impulses.values()], dim=1)
    best = masses.max(dim=1)
    return [list(impulses)[index] for index in best.indices.tolist()], best.values.tolist()
