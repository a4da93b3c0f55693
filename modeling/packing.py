"""Linear layers whose weights are packed once for oneDNN's matrix products on CPUs.

Freezing in TorchInductor also packs weights, but the compilation takes minutes. On AMD CPUs, oneDNN's matrix products
are much faster than those of MKL, which PyTorch uses by default.
"""

import functools
import timeit

import torch
from torch import nn


# Smallest speedup that justifies a second copy of the weights.
MIN_SPEEDUP = 1.1


class PackedLinear(nn.Linear):
    """Linear layer on the CPU, in float32 or bfloat16, with a packed copy of its weight. The layer computes with the
    packed copy if gradients are disabled.

    The layer shares weight and bias with `linear`. If the weight is changed or moved, the layer computes without the
    packed copy. If only a few elements of the weight are changed through `.data` or NumPy, the layer may not detect
    the change. After such a change, pack the layer again.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.training = linear.training
        self.packed = None
        weight = self.weight.detach()
        # Weights made under `torch.inference_mode()` have no version counter, so a change could not be detected.
        # Other layouts than contiguous ones have no flat view.
        if weight.is_contiguous() and not weight.is_inference():
            self.packed = pack(weight)
            self.address = weight.data_ptr()
            self.version = weight._version
            # Changes through `.data` or NumPy do not increase the version, but change this view of the weight, which
            # has elements of every row and, with an odd step, of many columns.
            self.elements = weight.view(-1)[:: (min(weight.shape) - 1) | 1]
            self.packed_elements = self.elements.clone()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not self.can_use_packed(input):
            return super().forward(input)
        return multiply(input, self.packed, self.bias)

    def can_use_packed(self, input: torch.Tensor) -> bool:
        """Return whether the packed weight is up to date and has the device and dtype of `input`."""
        weight = self.weight
        if self.packed is None or weight.data_ptr() != self.address:
            # Free the copies of a weight that was replaced or moved.
            self.packed = self.elements = self.packed_elements = None
            return False
        return (
            not torch.is_autocast_enabled("cpu")
            and input.device.type == "cpu"
            and input.dtype == weight.dtype
            and input.numel() > 0
            and weight._version == self.version
            and torch.equal(self.elements, self.packed_elements)
        )

    def __getstate__(self) -> dict:
        # Packed weights cannot be copied or pickled. A copy of the layer computes without a packed weight.
        return self.__dict__ | {"packed": None, "elements": None, "packed_elements": None}


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack a contiguous weight, `(out_features, in_features)`, for oneDNN's matrix products."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def multiply(input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `F.linear` with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


@functools.cache
def packing_pays(dtype: torch.dtype) -> bool:
    """Return whether a `PackedLinear` is `MIN_SPEEDUP` times as fast as an `nn.Linear` on this CPU. The measurement
    takes about 50 ms."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    # The sizes are those of a linear layer in a small model, and of the tokens of one image.
    with torch.inference_mode(False):
        linear = nn.Linear(384, 1536, dtype=dtype)
    input = torch.ones(64, 384, dtype=dtype)
    try:
        packed = PackedLinear(linear)
        with torch.inference_mode():
            plain_time = min(timeit.repeat(lambda: linear(input), number=1, repeat=20))
            packed_time = min(timeit.repeat(lambda: packed(input), number=1, repeat=20))
    # Some builds of PyTorch lack these operators, and some CPUs do not support products with packed weights.
    except (AttributeError, RuntimeError):
        return False
    return plain_time > MIN_SPEEDUP * packed_time


def pack_linear_layers(model: nn.Module) -> int:
    """Pack the linear layers of a model on the CPU for inference, in place, if packed weights are faster. The packed
    copies take as much memory as the weights.

    Returns:
        `int`: Number of packed layers. Layers whose weights are not contiguous or were made under
            `torch.inference_mode()` are not packed.
    """
    count = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is not nn.Linear or child.weight.device.type != "cpu":
                continue
            if not packing_pays(child.weight.dtype):
                continue
            packed = PackedLinear(child)
            if packed.packed is not None:
                setattr(module, name, packed)
                count += 1
    return count
