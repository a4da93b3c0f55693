"""Linear layers on a CPU, with weights packed once for oneDNN's matrix products, as TorchInductor's freezing does it
after minutes of compilation. On AMD's CPUs, this is much faster than PyTorch's default (MKL)."""

import functools
import timeit

import torch
import torch.nn.functional as F
from torch import nn


# Speedup from which on packing is worth a second copy of the weights.
WORTHWHILE = 1.1


class PackedLinear(nn.Linear):
    """A linear layer on the CPU, in float32 or bfloat16, that computes with a packed copy of its weight wherever no
    gradient is needed. The weight itself stays. If it changes or moves, the layer computes as any other."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.training = linear.training
        self.packed = pack(self.weight.detach())
        self.packed_from = self.state_of_weight()

    def state_of_weight(self) -> tuple[int, int, list[float]]:
        """A value that changes with the weight; a sample of every row shows changes by `.data` or NumPy, which have no
        version."""
        sample = self.weight.detach().flatten()[:: max(min(self.weight.shape) - 1, 1)]
        return self.weight.data_ptr(), self.weight._version, sample.tolist()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not self.fits(input):
            return super().forward(input)
        return multiply(input, self.packed, self.bias)

    def fits(self, input: torch.Tensor) -> bool:
        """Whether the packed weight is current, and the product is in its dtype."""
        if torch.is_autocast_enabled("cpu") or input.device.type != "cpu" or input.dtype != self.weight.dtype:
            return False
        return input.numel() > 0 and self.packed_from == self.state_of_weight()

    def __getstate__(self) -> dict:
        # Packed weights cannot be copied; a copy computes as any other layer.
        return self.__dict__ | {"packed": None, "packed_from": None}


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack a weight, `(out_features, in_features)`, for oneDNN's products."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def multiply(input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `F.linear` with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


@functools.cache
def packing_pays(dtype: torch.dtype) -> bool:
    """Measure whether packed products are `WORTHWHILE` times as fast on this machine; takes some 50 ms."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    # The tokens of an image, and a layer of a small model.
    input = torch.ones(64, 384, dtype=dtype)
    weight = torch.ones(1536, 384, dtype=dtype)
    try:
        packed = pack(weight)
        with torch.inference_mode():
            plain = min(timeit.repeat(lambda: F.linear(input, weight), number=1, repeat=20))
            return plain > WORTHWHILE * min(timeit.repeat(lambda: multiply(input, packed, None), number=1, repeat=20))
    # Some builds of PyTorch lack these operators, and some CPUs such products.
    except (AttributeError, RuntimeError):
        return False


def pack_linear_layers(model: nn.Module) -> int:
    """Pack a model's linear layers for inference, in place, where it is on a CPU that is faster so, and return their
    number. The packed weights take as much memory again."""
    count = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and packing_pays(child.weight.dtype):
                setattr(module, name, PackedLinear(child))
                count += 1
    return count
