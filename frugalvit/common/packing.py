"""Linear layers on a CPU, with weights that are laid out once for its products of matrices.

PyTorch multiplies float32 by MKL, which reads a weight as it lies; oneDNN, which comes with PyTorch, too, has products
for weights in blocks. TorchInductor's freezing uses these, after minutes of compilation. Here a layer calls the same
operators, and nothing is compiled. On a CPU of AMD, models were much faster in float32 and a little in
bfloat16; where they are not, layers stay as they are.
"""

import functools
import time

import torch
import torch.nn.functional as F
from torch import nn


# From which factor on packing is worth the memory of a second copy of the weights.
WORTHWHILE = 1.1
# The product that tells: of the tokens of an image with a layer of a small model.
ROWS, INPUTS, OUTPUTS = 64, 384, 1536


class PackedLinear(nn.Linear):
    """A linear layer that computes with a packed copy of its weight wherever no gradient is asked for.

    The weight itself stays, for what reads or saves it. If it changes or moves, the layer computes as any other.

    Args:
        linear (`nn.Linear`): On the CPU, in float32 or bfloat16. Its parameters are shared.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.training = linear.training
        self.packed = pack(self.weight.detach())
        self.packed_from = self.state_of_weight()

    def state_of_weight(self) -> tuple[int, int]:
        """A value that changes whenever the weight does."""
        return self.weight.data_ptr(), self.weight._version

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not self.fits(input):
            return super().forward(input)
        return multiply(input, self.packed, self.bias)

    def fits(self, input: torch.Tensor) -> bool:
        """Whether the packed weight is that of the layer, and the product is in its dtype."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        alike = input.device.type == "cpu" and input.dtype == dtype == self.weight.dtype
        return alike and input.numel() > 0 and self.packed_from == self.state_of_weight()

    def __getstate__(self) -> dict:
        # What oneDNN packed cannot be copied; a copy computes as any other layer.
        return self.__dict__ | {"packed": None, "packed_from": None}


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight, `(out_features, in_features)`, as oneDNN's products read it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def multiply(input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `F.linear`, with a weight of `pack`."""
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


@functools.cache
def packing_pays(dtype: torch.dtype) -> bool:
    """Whether packed products are `WORTHWHILE` times as fast on this machine; measured, for some 50 ms."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    input, weight = (torch.ones(rows, INPUTS, dtype=dtype) for rows in (ROWS, OUTPUTS))
    try:
        products = functools.partial(F.linear, input, weight), functools.partial(multiply, input, pack(weight), None)
        with torch.inference_mode():
            plain, packed = (min(_seconds(product) for _ in range(20)) for product in products)
    # PyTorch is built with and without these operators, and for CPUs that have no such products.
    except (AttributeError, RuntimeError):
        return False
    return plain > WORTHWHILE * packed


def _seconds(product) -> float:
    start = time.perf_counter()
    product()
    return time.perf_counter() - start


def pack_linear_layers(model: nn.Module) -> int:
    """Pack a model's linear layers, in place, where it is on a CPU that is faster so.

    It is for inference: with gradients, layers compute as before. The packed weights take as much memory again.

    Args:
        model (`nn.Module`): In evaluation mode.

    Returns:
        `int`: Layers that were packed.
    """
    count = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is not nn.Linear or child.weight.device.type != "cpu":
                continue
            if packing_pays(child.weight.dtype):
                setattr(module, name, PackedLinear(child))
                count += 1
    return count
