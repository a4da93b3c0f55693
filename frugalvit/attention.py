"""Measurements of a vision transformer's attention: entropy, favorite neighbors and stable ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

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

    Returns:
        `list[LayerStatistics]`: One a layer.

    Raises:
        ValueError: if there are no images, the model returns no hidden states, or some are not finite.
    """
    implementation = getattr(model.config, "_attn_implementation", None)
    attends = hasattr(model.config, "num_attention_heads")
    if attends:
        model.set_attn_implementation("eager")
    wanted = {"output_attentions": True} if attends else {}
    count, sums = 0, {}
    try:
        for pixel_values in batches:
            count += len(pixel_values)
            outputs = model(pixel_values, output_hidden_states=True, **wanted)
            for layer, states in enumerate(outputs.hidden_states[1:]):
                # A feature map's positions are its tokens.
                tokens = states.flatten(2).mT if states.ndim == 4 else states
                if not tokens.isfinite().all():
                    raise ValueError(
                        f"Layer {layer} of this {type(model).__name__} returns NaN or infinite values: it diverged, "
                        "or its weights are damaged."
                    )
                _add(sums, (layer, "rank"), stable_rank(tokens).sum())
            for layer, weights in enumerate((attends and outputs.attentions) or ()):
                # Windows of an image count as one.
                weights, share = weights.float(), len(pixel_values) / len(weights)
                _add(sums, (layer, "maps"), share * weights.sum(0))
                _add(sums, (layer, "entropy"), share * torch.special.entr(weights).sum(-1).mean(-1).sum(0))
    finally:
        if attends:
            model.set_attn_implementation(implementation)
    if not count:
        raise ValueError("Got no images, expected at least one.")
    if not sums:
        raise ValueError(
            f"{type(model).__name__} returns no hidden states of layers; expected a vision model that does."
        )
    grid = patch_grid(model.config)
    means = {key: value.cpu() / count for key, value in sums.items()}
    layers = 1 + max(layer for layer, _ in means)
    return [_statistics(layer, means, grid) for layer in range(layers)]


def _add(sums: dict, key, value: torch.Tensor):
    sums[key] = sums[key] + value if key in sums else value


def patch_grid(config) -> tuple[int, int] | None:
    """Rows and columns of patches, if tokens are patches, else None."""
    patch = getattr(config, "patch_size", None)
    if patch is None:
        return None
    return tuple(size // patch for size, patch in zip(pair(config.image_size), pair(patch), strict=True))


def _statistics(layer: int, means: dict, grid: tuple[int, int] | None) -> LayerStatistics:
    statistics = LayerStatistics(layer + 1, means[layer, "rank"].item())
    if (layer, "maps") in means:
        statistics.maps = means[layer, "maps"]
        statistics.entropy = means[layer, "entropy"].tolist()
        positions = grid[0] * grid[1] if grid else 0
        if 0 < positions <= statistics.maps.shape[-1]:
            among_patches = statistics.maps[:, -positions:, -positions:]
            offsets = [offset for offset in kernel_offsets(2 * REACH + 1) if impulse_matrix(*grid, offset).any()]
            masses = torch.stack(
                [interior_mass(among_patches, impulse_matrix(*grid, offset)) for offset in offsets], dim=1
            )
            best = masses.max(dim=1)
            statistics.mass = best.values.tolist()
            statistics.offset = [offsets[index] for index in best.indices.tolist()]
    return statistics
