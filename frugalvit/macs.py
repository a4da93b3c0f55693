"""Multiply-accumulates of a model for one image."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .configuration.configuration_base import pair
from .modeling.context_broadcast import ContextBroadcast


class Macs(NamedTuple):
    """Multiply-accumulates of one forward pass over one image."""

    macs: int
    macs_with_attention: int


def count_macs(model: nn.Module, image_size: int | tuple[int, int], num_channels: int = 3) -> Macs:
    """Count the multiply-accumulates of convolutions, linear layers and matrix products for one image.

    As in the papers, each block is counted for all tokens. In use, a SparseFormer may compute fewer tokens in its last
    block, see `output_tokens` of `SparseFormerModel`.

    Args:
        model (`nn.Module`): Model of Transformers, timm or open_clip, on any device, including the meta device.
        image_size (`int` or `tuple[int, int]`): Height and width of the image in pixels.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.

    Returns:
        `Macs`: `macs` excludes the two matrix products of attention (queries with keys, weights with values), as many
        counters do. `macs_with_attention` includes these products. Both numbers include the products of a
        SparseFormer's adaptive mixing.
    """
    # Fused attention is turned off, because PyTorch's counter misses it on some devices.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _run(model, image_size, num_channels)
    flops = counter.get_flop_counts()
    attention = 0
    outermost = ()
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__ and not name.startswith(outermost):
            outermost += (f"{name}.",)
            counts = flops.get(f"{type(model).__name__}.{name}", {})
            attention += sum(count for operator, count in counts.items() if operator.__name__ in ("bmm", "baddbmm"))
    total = counter.get_total_flops()
    return Macs((total - attention) // 2, total // 2)


def count_context_broadcast(model: nn.Module, image_size: int | tuple[int, int], num_channels: int = 3) -> int:
    """Count the operations that Context Broadcasting adds for one image (the paper's tables S5 and S6). Each token and
    channel needs one operation, or two for `cb_hybrid`. `count_macs` has the same arguments, but does not count these
    operations."""
    operations = []

    def count(module: ContextBroadcast, args, output: torch.Tensor):
        operations.append(output.numel() * (2 if module.kind == "cb_hybrid" else 1))

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, ContextBroadcast)]
    try:
        _run(model, image_size, num_channels)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(operations)


@torch.no_grad()
def _run(model: nn.Module, image_size: int | tuple[int, int], num_channels: int):
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    # A SparseFormer may skip tokens in its last block. For the count, the block computes all tokens.
    skipping = [module for module in model.modules() if getattr(module, "skips_unread_tokens", False)]
    for module in skipping:
        module.skips_unread_tokens = False
    try:
        model(torch.zeros(1, num_channels, *pair(image_size), dtype=weight.dtype, device=weight.device))
    finally:
        for module in skipping:
            module.skips_unread_tokens = True
