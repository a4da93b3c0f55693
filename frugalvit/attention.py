"""Measurements of a vision transformer's attention: entropy, most attended neighbors and stable rank."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from .configuration.configuration_base import pair
from .modeling.impulse import impulse_matrix, interior_mass, kernel_offsets
from .training.scores import check_scores


# Neighbors are at most this many patches away, vertically and horizontally.
REACH = 2


@dataclass
class LayerStatistics:
    """Statistics of one layer, averaged over images.

    Args:
        layer (`int`): Number of the layer, from 1.
        stable_rank (`float`): Stable rank of the layer's output.
        entropy (`list[float]`): Entropy of each head's attention in nats, averaged over queries; at most log(tokens).
        maps (`torch.Tensor` of shape `(heads, queries, keys)`): Attention weights. Prefix tokens precede patch tokens.
        offset (`list[tuple[int, int]]`):
            For each head, the offset (dy, dx) of the most attended neighbor patch, at most `REACH` in each direction.
            The list is empty if the tokens do not form a grid.
        mass (`list[float]`): For each head, the mean attention of a patch to its neighbor at `offset`.
    """

    layer: int
    stable_rank: float
    entropy: list[float]
    maps: torch.Tensor = field(repr=False)
    offset: list[tuple[int, int]]
    mass: list[float]


def stable_rank(matrices: torch.Tensor) -> torch.Tensor:
    """Compute the stable rank of matrices `(…, rows, columns)`: the sum of the squared singular values, divided by the
    largest squared singular value (Remark 1 of Zheng et al.). The stable rank lies between 1 and the rank. The result
    has the shape `(…)`."""
    values = torch.linalg.svdvals(matrices.float()).square()
    return values.sum(-1) / values.amax(-1)


@torch.no_grad()
def measure_attention(model: PreTrainedModel, batches: Iterable[torch.Tensor]) -> list[LayerStatistics]:
    """Measure the attention in a model's layers and the stable rank of the layers' outputs, averaged over images.

    Args:
        model (`PreTrainedModel`): A vision transformer with attention between all tokens.
        batches (iterable of `torch.Tensor`): Pixel values `(batch, channels, height, width)`.
    """
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    count = 0
    sums = defaultdict(float)
    try:
        for pixel_values in batches:
            count += len(pixel_values)
            outputs = model(pixel_values, output_hidden_states=True, output_attentions=True)
            for layer, (states, weights) in enumerate(zip(outputs.hidden_states[1:], outputs.attentions, strict=True)):
                check_scores(states, f"hidden states of layer {layer}")
                sums["rank", layer] += stable_rank(states).sum()
                sums["maps", layer] += weights.float().sum(0)
                sums["entropy", layer] += torch.special.entr(weights.float()).sum(-1).mean(-1).sum(0)
    finally:
        model.set_attn_implementation(implementation)
    if not count:
        raise ValueError("Got no images, expected at least one.")
    means = {key: value.cpu() / count for key, value in sums.items()}
    grid = patch_grid(model.config)
    statistics = []
    for layer in range(len(means) // 3):
        rank, entropy, maps = (means[name, layer] for name in ("rank", "entropy", "maps"))
        offset, mass = favorite_neighbors(maps, grid)
        statistics.append(LayerStatistics(layer + 1, rank.item(), entropy.tolist(), maps, offset, mass))
    return statistics


def patch_grid(config) -> tuple[int, int] | None:
    """Return the numbers of patch rows and columns, or `None` if the model has no patches."""
    patch = getattr(config, "patch_size", None)
    if patch is None:
        return None
    return tuple(size // patch for size, patch in zip(pair(config.image_size), pair(patch), strict=True))


def favorite_neighbors(maps: torch.Tensor, grid: tuple[int, int] | None) -> tuple[list[tuple[int, int]], list[float]]:
    """Compute the fields `offset` and `mass` of `LayerStatistics` from attention maps `(heads, queries, keys)`.
    `grid` is the result of `patch_grid`."""
    positions = grid[0] * grid[1] if grid else 0
    if not 0 < positions <= maps.shape[-1]:
        return [], []
    impulses = {offset: impulse_matrix(*grid, offset) for offset in kernel_offsets(2 * REACH + 1)}
    impulses = {offset: matrix for offset, matrix in impulses.items() if matrix.any()}
    among_patches = maps[:, -positions:, -positions:]
    masses = torch.stack([interior_mass(among_patches, matrix) for matrix in impulses.values()], dim=1)
    best = masses.max(dim=1)
    return [list(impulses)[index] for index in best.indices.tolist()], best.values.tolist()
