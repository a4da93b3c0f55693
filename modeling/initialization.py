"""Initializations of attention that need less data, in place, on vision transformers that a user already has."""

import torch
import torch.nn.functional as F
from torch import nn


def sincos_position_encoding(height: int, width: int, hidden_size: int) -> torch.Tensor:
    """Sinusoidal encoding of a grid as Simple-ViT has it (Beyer et al. 2022), `(height * width, hidden_size)`.

    Frequencies are 10000^(-i / (hidden_size / 4 - 1)); the order is sin x, cos x, sin y, cos y.
    """
    if hidden_size % 4:
        raise ValueError(f"`hidden_size` is {hidden_size}, expected a multiple of 4 (sine and cosine of x and y).")
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    omega = 10000 ** -torch.linspace(0, 1, hidden_size // 4)
    x, y = x.reshape(-1, 1) * omega, y.reshape(-1, 1) * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


def _mimetic_factors(size: int, noise: float, identity: float, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of noise * Z + identity * I, with Z uniform of variance 1 / size, by a symmetrically split SVD."""
    bound = (3 / size) ** 0.5
    z = torch.empty(size, size).uniform_(-bound, bound, generator=generator)
    u, s, vt = torch.linalg.svd(noise * z + identity * torch.eye(size))
    return u * s.sqrt(), s.sqrt()[:, None] * vt


@torch.no_grad()
def mimetic_init_(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Initialize attention so that it mimics trained transformers (Trockman & Kolter 2023), in place.

    Query-key products become 0.7 Z + 0.7 I for every head, value-output products 0.4 Z - 0.4 I for every layer, and
    learned positions the sinusoidal encoding, on which the identity in the query-key product acts as locality.

    Args:
        model (`nn.Module`): A Transformers ViT or DeiT with separate query, key and value projections.
        generator (`torch.Generator`, *optional*): Source of the noise, on CPU.

    Returns:
        The model.

    Raises:
        ValueError: if the model is no such transformer.
    """
    base = getattr(model, "base_model", model)
    embeddings, layers = getattr(base, "embeddings", None), getattr(base, "layers", ())
    if not hasattr(embeddings, "position_embeddings") or not all(hasattr(layer, "attention") for layer in layers):
        raise ValueError(f"Cannot initialize {type(model).__name__}; expected a Transformers ViT or DeiT.")
    for layer in layers:
        attention = layer.attention
        width, head_dim = attention.q_proj.in_features, attention.head_dim
        for head in range(attention.num_attention_heads):
            rows = slice(head * head_dim, (head + 1) * head_dim)
            left, right = _mimetic_factors(width, 0.7, 0.7, generator)
            attention.q_proj.weight[rows] = left[:, :head_dim].T
            attention.k_proj.weight[rows] = right[:head_dim]
        left, right = _mimetic_factors(width, 0.4, -0.4, generator)
        attention.v_proj.weight.copy_(left.T)
        attention.o_proj.weight.copy_(right.T)
    patches = embeddings.patch_embeddings
    height, width = (size // patch for size, patch in zip(patches.image_size, patches.patch_size, strict=True))
    positions = embeddings.position_embeddings
    positions.zero_()
    positions[0, -height * width :] = sincos_position_encoding(height, width, positions.shape[-1])
    return model


@torch.no_grad()
def resize_positions_(model: nn.Module, image_size: int) -> nn.Module:
    """Interpolate learned positions bicubically, so that a ViT takes images of another size, in place.

    Args:
        model (`nn.Module`): A Transformers ViT or DeiT.
        image_size (`int`): Height and width in pixels, a multiple of the patch size.

    Returns:
        The model; its configuration says the new size.

    Raises:
        ValueError: if the model is no such transformer, or its patches do not divide `image_size`.
    """
    embeddings = getattr(getattr(model, "base_model", model), "embeddings", None)
    if not hasattr(embeddings, "position_embeddings") or not hasattr(embeddings, "interpolate_pos_encoding"):
        raise ValueError(
            f"Cannot resize the positions of {type(model).__name__}; expected a Transformers ViT or DeiT."
        )
    patches, positions = embeddings.patch_embeddings, embeddings.position_embeddings
    if any(image_size % patch for patch in patches.patch_size):
        raise ValueError(f"Images of {image_size} pixels do not divide into patches of {patches.patch_size}.")
    grid = [image_size // patch for patch in patches.patch_size]
    # [CLS] and the like stand before the grid and stay.
    leading = positions.shape[1] - patches.num_patches
    shape = [image // patch for image, patch in zip(patches.image_size, patches.patch_size, strict=True)]
    old = positions[:, leading:].unflatten(1, shape).permute(0, 3, 1, 2)
    new = F.interpolate(old, grid, mode="bicubic", align_corners=False).flatten(2).mT
    embeddings.position_embeddings = nn.Parameter(torch.cat([positions[:, :leading], new], dim=1))
    patches.num_patches = grid[0] * grid[1]
    embeddings.image_size = patches.image_size = (image_size, image_size)
    model.config.image_size = image_size
    return model
