"""Multiply-accumulates of a model for one image."""

from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..configuration.configuration_base import pair
from ..modeling.context_broadcast import ContextBroadcast


class Macs(NamedTuple):
    """Multiply-accumulates of one forward pass over one image."""

    macs: int
    macs_with_attention: int


def count_macs(model: nn.Module, image_size: int | tuple[int, int], num_channels: int = 3) -> Macs:
    """Count the multiply-accumulates of convolutions, linear layers and matrix products for one image.

    The model runs on the meta device, without computing anything; its own weights stay where they are.

    Args:
        model (`nn.Module`): A Transformers, timm or open_clip vision model that takes `(1, channels, height, width)`.
        image_size (`int` or pair of `int`): Side, or height and width, in pixels.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.

    Returns:
        `Macs`: The count for all tokens through all blocks, as in the papers; a classifier that reads [CLS] alone may
        compute less (`output_tokens` of `SparseFormerModel`). `macs` leaves out attention's two products (queries with
        keys, weights with values), as many counters do; `macs_with_attention` counts everything. SparseFormer's mixing
        products are in both.
    """
    with FlopCounterMode(display=False) as counter:
        _run_on_meta(model, image_size, num_channels)
    flops, attention, outermost = counter.get_flop_counts(), 0, ()
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__ and not name.startswith(outermost):
            outermost += (f"{name}.",)
            for operator, count in flops.get(f"{type(model).__name__}.{name}", {}).items():
                if operator.__name__ in ("bmm", "baddbmm") or "dot_product_attention" in operator.__name__:
                    attention += count
    # Nothing is counted where there are no products.
    total = sum(flops.get("Global", {}).values())
    return Macs((total - attention) // 2, total // 2)


def macs_of(model: nn.Module, image_size: int | tuple[int, int], num_channels: int = 3) -> int:
    """The `macs_with_attention` of `count_macs`. A model that the meta device cannot run (it holds weights beside its
    modules' or reads the shapes of its images) runs as it is."""
    try:
        return count_macs(model, image_size, num_channels).macs_with_attention
    except RuntimeError:
        weight = next(model.parameters())
        image = torch.zeros(1, num_channels, *pair(image_size), dtype=weight.dtype, device=weight.device)
        # Fused attention of some devices is not counted.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(image)
        return counter.get_total_flops() // 2


def count_context_broadcast(model: nn.Module, image_size: int | tuple[int, int], num_channels: int = 3) -> int:
    """Count the operations that Context Broadcasting adds for one image, as in the paper's tables S5 and S6: one per
    token and channel, two for `cb_hybrid`. `count_macs` counts none of them. Arguments as in `count_macs`."""
    operations = []

    def count(module: ContextBroadcast, args, output: torch.Tensor):
        operations.append(output.numel() * (2 if module.kind == "cb_hybrid" else 1))

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, ContextBroadcast)]
    try:
        _run_on_meta(model, image_size, num_channels)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(operations)


def _run_on_meta(model: nn.Module, image_size: int | tuple[int, int], num_channels: int):
    """Run a forward pass with one image that computes nothing."""
    tensors = {
        name: tensor.detach().to("meta") for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    image = torch.empty(1, num_channels, *pair(image_size), dtype=dtype, device="meta")
    # SparseFormers may leave out tokens of the last block that a classifier does not read; all are counted.
    skipping = [module for module in model.modules() if getattr(module, "skips_unread_tokens", False)]
    for module in skipping:
        module.skips_unread_tokens = False
    try:
        with torch.no_grad():
            torch.func.functional_call(model, tensors, (image,))
    finally:
        for module in skipping:
            module.skips_unread_tokens = True
