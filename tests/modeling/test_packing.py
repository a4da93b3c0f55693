"""Tests of packed linear layers: products, gradients, changed weights, and the choice of layers."""

import copy

import pytest
import torch
from torch import nn

from frugalvit import Classifier
from frugalvit.modeling import packing
from frugalvit.modeling.packing import PackedLinear, pack_linear_layers


pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="This PyTorch has no oneDNN.")


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 40)


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def called(monkeypatch) -> list:
    """Return a list to which each call of `packing.multiply` appends its arguments."""
    called = []
    multiply = packing.multiply
    monkeypatch.setattr(packing, "multiply", lambda *given: called.append(given) or multiply(*given))
    return called


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_products_of_the_layer(bias, inputs, called):
    linear = nn.Linear(24, 40, bias=bias)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        for given in (inputs, inputs[0], inputs[0, 0], inputs.mT.contiguous().mT):
            torch.testing.assert_close(packed(given), linear(given), rtol=1e-5, atol=1e-6)
        assert len(called) == 4
        # oneDNN's packed product does not support an empty batch, so the layer uses its own weight.
        assert packed(inputs[:0]).shape == (0, 5, 40)


def test_gradients_and_autocast_are_those_of_the_layer(linear, inputs, called):
    packed = PackedLinear(linear)
    packed(inputs).square().sum().backward()
    assert packed.weight.grad.abs().max() > 0
    assert packed.weight is linear.weight and [*packed.state_dict()] == ["weight", "bias"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed(inputs), linear(inputs)) and packed(inputs).dtype == torch.bfloat16
    assert not called


def scale(packed: nn.Linear):
    packed.weight.mul_(2)


def add(packed: nn.Linear):
    # peft changes weights through `.data` when it merges adapters.
    packed.weight.data += 1


def change_a_row(packed: nn.Linear):
    packed.weight.detach().numpy()[-3] = 1


def change_a_column(packed: nn.Linear):
    packed.weight.detach().numpy()[:, -3] = 1


@pytest.mark.parametrize("shape", [(384, 1536), (1536, 384), (384, 384), (384, 101)], ids=str)
@pytest.mark.parametrize("change", [scale, add, change_a_row, change_a_column, nn.Linear.double, copy.deepcopy])
@torch.no_grad()
def test_a_changed_layer_computes_with_its_new_weight(change, shape, called):
    packed = PackedLinear(nn.Linear(*shape))
    changed = change(packed) or packed
    inputs = torch.randn(2, shape[0]).to(changed.weight.dtype)
    torch.testing.assert_close(changed(inputs), nn.functional.linear(inputs, changed.weight, changed.bias))
    assert not called


@torch.inference_mode()
def test_weights_made_under_inference_mode_are_not_packed(inputs, called, monkeypatch):
    """Weights made under `torch.inference_mode` have no version counter, so a change could not be detected."""
    monkeypatch.setattr(packing, "packing_pays", lambda dtype: True)
    linear = nn.Linear(24, 40)
    assert pack_linear_layers(nn.Sequential(linear)) == 0
    for layer in (PackedLinear(linear), copy.deepcopy(PackedLinear(linear))):
        layer.weight[3, 5] += 1
        assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
    assert not called


@pytest.mark.parametrize("pays", [True, False])
def test_a_classifier_packs_its_layers_where_that_is_faster(pays, monkeypatch):
    monkeypatch.setattr(packing, "packing_pays", lambda dtype: pays)
    classify = Classifier("cifar10-sparseformer", device="cpu")
    kinds = {type(module) for module in classify.model.modules() if isinstance(module, nn.Linear)}
    assert kinds == ({PackedLinear} if pays else {nn.Linear})
    # Layers of other classes, and layers on other devices, are not packed.
    others = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.MultiheadAttention(4, 2))
    assert pack_linear_layers(others) == 0
