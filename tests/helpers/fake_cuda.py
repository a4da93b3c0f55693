"""A CUDA device on a machine that has none: shapes, dtypes and devices are as they would be, and values do not exist.

Tensors on the CPU stay real. A tensor that is moved to "cuda" or made there becomes a fake one (`FakeTensorMode`),
which cannot meet one of the CPU. A value that is read back, for which a real device would make the CPU wait, is True
or a number of choice.
"""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_iter, tree_map_only


class FakeCuda(FakeTensorMode):
    """`waits` counts what was read back, by the line of this package that read it; floating point numbers were
    `number`, integers 0."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.waits = Counter()
        self.nested = False
        self.number = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.nested and not any(_is_on_cuda(leaf) for leaf in tree_iter((args, kwargs))):
            return function(*args, **kwargs)
        if function is torch.ops.aten._local_scalar_dense.default:
            self._wait()
            return self._value(args[0].dtype)
        if self.nested:
            return super().__torch_dispatch__(function, types, args, kwargs)
        self.nested = True
        try:
            args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
            output = super().__torch_dispatch__(function, types, args, kwargs)
        finally:
            self.nested = False
        if any(isinstance(leaf, FakeTensor) and leaf.device.type == "cpu" for leaf in tree_iter(output)):
            self._wait()
        return tree_map_only(FakeTensor, self._read, output)

    def _value(self, dtype: torch.dtype) -> bool | int | float:
        return self.number if dtype.is_floating_point else True if dtype == torch.bool else 0

    def _read(self, tensor: FakeTensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return real.fill_(self._value(tensor.dtype))

    def _fake(self, tensor: torch.Tensor) -> FakeTensor:
        return tensor if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)

    def _wait(self):
        frame = sys._getframe()
        while frame and not frame.f_globals["__name__"].startswith("frugalvit."):
            frame = frame.f_back
        self.waits[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "elsewhere"] += 1


def _is_on_cuda(leaf) -> bool:
    return isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == "cuda")


_backward, _grad, _deepcopy = torch.Tensor.backward, torch.autograd.grad, torch.Tensor.__deepcopy__


def backward(loss: torch.Tensor, *args, **kwargs):
    """`loss.backward()` node by node in Python, as PyTorch's own asks the driver about the device."""
    if not isinstance(loss, FakeTensor):
        return _backward(loss, *args, **kwargs)
    nodes, uses = [loss.grad_fn], Counter()
    for node in nodes:
        following = [other for other, _ in node.next_functions if other is not None]
        nodes += [other for other in dict.fromkeys(following) if other not in uses]
        uses.update(following)
    gradients = {node: [None] * max(len(node._input_metadata), 1) for node in nodes}
    gradients[loss.grad_fn][0] = torch.ones_like(loss)
    ready = [loss.grad_fn]
    with torch.no_grad():
        while ready:
            node = ready.pop()
            given = gradients.pop(node)
            if all(gradient is None for gradient in given):
                results = [None] * len(node.next_functions)
            else:
                # A torch.autograd.Function is no callable; what it returns for what is no tensor comes last.
                results = node.apply(*given) if isinstance(node, BackwardCFunction) else node(*given)
                results = results if isinstance(results, tuple) else (results,)
            for (other, position), result in zip(node.next_functions, results, strict=False):
                if other is None:
                    continue
                if result is not None:
                    result = _validated(result, other._input_metadata[position])
                    earlier = gradients[other][position]
                    gradients[other][position] = result if earlier is None else earlier + result
                uses[other] -= 1
                if not uses[other]:
                    ready.append(other)


def grad(loss: torch.Tensor, leaf: torch.Tensor) -> tuple[torch.Tensor]:
    """`torch.autograd.grad` of one loss by one leaf."""
    if not isinstance(loss, FakeTensor):
        return _grad(loss, leaf)
    backward(loss)
    return (leaf.grad,)


def _validated(gradient: torch.Tensor, metadata) -> torch.Tensor:
    """A gradient as the node that takes it expects it, as PyTorch's engine makes it."""
    assert gradient.device == metadata.device, (gradient.device, metadata.device)
    return gradient.sum_to_size(metadata.shape).to(metadata.dtype)


def deepcopy(tensor: torch.Tensor, memo: dict) -> torch.Tensor:
    """`copy.deepcopy`, which looks for the tensor's memory."""
    if not isinstance(tensor, FakeTensor):
        return _deepcopy(tensor, memo)
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    return memo[id(tensor)]


def swap_tensors(own: torch.Tensor, other: torch.Tensor):
    """Without PyTorch's checks, some of which fake tensors fail: `module.to` keeps the module's parameters."""
    own.__class__, other.__class__ = other.__class__, own.__class__
    own.__dict__, other.__dict__ = other.__dict__, own.__dict__
    torch._C._swap_tensor_impl(own, other)


@contextmanager
def fake_cuda():
    """Inside, this machine seems to have one CUDA device; gives its `FakeCuda`."""
    device = torch.device("cuda", 0)
    values = {
        "torch.cuda.is_available": True,
        "torch.cuda.is_initialized": True,
        "torch.cuda.is_bf16_supported": True,
        "torch.cuda._lazy_init": None,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda.set_device": None,
        "torch.cuda.get_device_name": "fake CUDA",
        "torch.cuda.manual_seed_all": None,
        "torch.cuda.get_rng_state_all": [],
        "torch.cuda.synchronize": None,
        "torch.accelerator.is_available": True,
        "torch.accelerator.current_accelerator": device,
        "torch.accelerator.synchronize": None,
        "torch._subclasses.fake_tensor.init_gpu_context": None,
    }
    mode = FakeCuda()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        # Before CUDA seems to be there, which this asks.
        stack.enter_context(mode)
        for name, value in values.items():
            stack.enter_context(mock.patch(name, lambda *args, value=value, **kwargs: value))
        stack.enter_context(mock.patch("torch.Tensor.backward", backward))
        stack.enter_context(mock.patch("torch.autograd.grad", grad))
        stack.enter_context(mock.patch("torch.Tensor.__deepcopy__", deepcopy))
        stack.enter_context(mock.patch("torch.Tensor.pin_memory", lambda tensor, *args: tensor))
        stack.enter_context(mock.patch("torch.utils.swap_tensors", swap_tensors))
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        yield mode
