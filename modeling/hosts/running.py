"""Functions that run the vision transformer of an `Anatomy`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from .anatomy import Anatomy, Block


@contextmanager
def record_hidden_states(anatomy: Anatomy) -> Iterator[list[torch.Tensor]]:
    """Return a context that records hidden states in a list. After each forward pass in the context, the list holds
    the tokens before the first block and after each block, each `(batch, prefix + patches, hidden_size)`."""
    hidden_states: list[torch.Tensor] = []

    def record_input(module, arguments, keywords):
        hidden_states[:] = [arguments[0] if arguments else keywords["hidden_states"]]

    def record_output(module, arguments, output):
        hidden_states.append(output[0] if isinstance(output, tuple) else output)

    handles = [anatomy.blocks[0].module.register_forward_pre_hook(record_input, with_kwargs=True)]
    handles += [block.module.register_forward_hook(record_output) for block in anatomy.blocks]
    try:
        yield hidden_states
    finally:
        for handle in handles:
            handle.remove()


def compute_hidden_states(anatomy: Anatomy, pixel_values: torch.Tensor) -> list[torch.Tensor]:
    """Return the tokens before the first block and after each block, each `(batch, prefix + patches, hidden_size)`."""
    with record_hidden_states(anatomy) as hidden_states:
        anatomy.embed(pixel_values)
    return hidden_states


def compute_feature_maps(
    anatomy: Anatomy, pixel_values: torch.Tensor, layers: Sequence[int] = (-1,)
) -> list[torch.Tensor]:
    """Return a map of normalized patch tokens for each of `layers`, `(batch, hidden_size, rows, columns)`.

    Args:
        pixel_values (`torch.Tensor`): `(batch, channels, height, width)`.
        layers (list of `int`): Indices of hidden states. Index 0 is the input of the first block.
    """
    hidden_states = compute_hidden_states(anatomy, pixel_values)
    return [as_map(anatomy, hidden_states[layer]) for layer in layers]


def as_map(anatomy: Anatomy, tokens: torch.Tensor) -> torch.Tensor:
    """Apply the final norm to tokens, `(batch, prefix + patches, hidden_size)`. Return the patch tokens as a map,
    `(batch, hidden_size, rows, columns)`."""
    patches = normalize(anatomy, tokens)[:, anatomy.num_prefix_tokens :]
    return patches.mT.unflatten(-1, anatomy.grid)


def normalize(anatomy: Anatomy, tokens: torch.Tensor) -> torch.Tensor:
    """Apply the final norm of the model to tokens, if the model has a final norm."""
    return tokens if anatomy.norm is None else anatomy.norm(tokens)


def compute_queries_and_keys(anatomy: Anatomy, block: Block, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return the queries and keys of a block, each `(batch, heads, tokens, head_dim)`, after norms and rotation.

    Args:
        block (`Block`): A block of the model.
        tokens (`torch.Tensor`): Input of the block, `(batch, prefix + patches, hidden_size)`.
    """
    attention = block.attention
    tokens = block.attention_norm(tokens)
    found = []
    for projection, norm in ((attention.query, attention.query_norm), (attention.key, attention.key_norm)):
        states = F.linear(tokens, projection.weight, projection.bias)
        states = states.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        states = states if norm is None else norm(states)
        found.append(states if anatomy.rotary is None else anatomy.rotary.rotate(states, anatomy.grid))
    return found


def make_example(anatomy: Anatomy) -> torch.Tensor:
    """Return two images of Gaussian noise as model inputs, `(2, channels, height, width)`."""
    weight = next(anatomy.model.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, anatomy.num_channels, *anatomy.image_size, generator=generator)
    return images.to(weight.device, weight.dtype)


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute difference of two tensors, divided by the largest absolute value of `expected`."""
    largest = expected.float().abs().max().clamp(min=1e-12)
    return (found.float() - expected.float()).abs().max() / largest


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode within the context. Afterwards, restore the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
