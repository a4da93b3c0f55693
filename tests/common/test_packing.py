"""Packed linear layers: the same products, gradients and weights as before, and no others than those that gain."""

import copy
import pickle

import pytest
import torch
from torch import nn

from frugalvit import Classifier
from frugalvit.common import packing
from frugalvit.common.packing import PackedLinear, pack_linear_layers, packing_pays


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="This PyTorch has no oneDNN, so that layers stay as they are."
)


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 40)


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


def was_packed(monkeypatch) -> list:
    """Filled when a packed product is computed."""
    called, multiply = [], packing.multiply
    monkeypatch.setattr(packing, "multiply", lambda *given: called.append(given) or multiply(*given))
    return called


@torch.no_grad()
def doubled(linear: nn.Linear) -> nn.Linear:
    linear.weight.mul_(2)
    return linear


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_the_same(bias, inputs, monkeypatch):
    linear = nn.Linear(24, 40, bias=bias)
    packed, called = PackedLinear(linear), was_packed(monkeypatch)
    with torch.inference_mode():
        for given in (inputs, inputs[0], inputs[0, 0], inputs.mT.contiguous().mT):
            torch.testing.assert_close(packed(given), linear(given), rtol=1e-5, atol=1e-6)
        assert len(called) == 4
        # Nothing is multiplied of nothing.
        assert packed(inputs[:0]).shape == (0, 5, 40)


@needs_onednn
def test_gradients_and_weights_are_those_of_the_layer(linear, inputs, monkeypatch):
    packed, called = PackedLinear(linear), was_packed(monkeypatch)
    packed(inputs).square().sum().backward()
    assert packed.weight.grad.abs().max() > 0 and not called
    assert packed.weight is linear.weight and [*packed.state_dict()] == ["weight", "bias"]


def added(linear: nn.Linear) -> nn.Linear:
    # As peft merges adapters.
    linear.weight.data += 1
    return linear


@needs_onednn
@pytest.mark.parametrize(
    "change",
    [
        doubled,
        added,
        lambda packed: packed.load_state_dict({"weight": torch.ones(40, 24), "bias": torch.ones(40)}) and packed,
        lambda packed: packed.to(torch.float64),
        copy.deepcopy,
        lambda packed: pickle.loads(pickle.dumps(packed)),
    ],
    ids=["in place", "by data", "loaded", "cast", "copied", "pickled"],
)
def test_what_changes_or_moves_computes_as_any_other_layer(change, linear, inputs, monkeypatch):
    packed = PackedLinear(linear)
    changed, called = change(packed), was_packed(monkeypatch)
    inputs = inputs.to(changed.weight.dtype)
    with torch.no_grad():
        torch.testing.assert_close(changed(inputs), nn.functional.linear(inputs, changed.weight, changed.bias))
    assert not called


@needs_onednn
@pytest.mark.parametrize("pays", [True, False])
def test_a_classifier_packs_what_it_loads_where_that_is_faster(pays, monkeypatch):
    monkeypatch.setattr(packing, "packing_pays", lambda dtype: pays)
    classify = Classifier("cifar10-sparseformer", device="cpu")
    kinds = {type(module) for module in classify.model.modules() if isinstance(module, nn.Linear)}
    assert kinds == ({PackedLinear} if pays else {nn.Linear})


@needs_onednn
@torch.no_grad()
def test_autocast_is_as_without(linear, inputs, monkeypatch):
    packed, called = PackedLinear(linear), was_packed(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed(inputs), linear(inputs)) and packed(inputs).dtype == torch.bfloat16
    assert not called


def test_layers_of_other_kinds_and_places_stay(monkeypatch):
    monkeypatch.setattr(packing, "packing_pays", lambda dtype: True)

    class Own(nn.Linear):
        """Computes something else."""

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4, device="meta"), nn.MultiheadAttention(4, 2))
    assert pack_linear_layers(model) == 0


def test_without_such_products_nothing_is_packed(monkeypatch):
    def fail(*_):
        raise RuntimeError("not implemented for this CPU")

    assert not packing_pays(torch.float16)
    packing_pays.cache_clear()
    monkeypatch.setattr(packing, "pack", fail)
    assert not packing_pays(torch.float32) and pack_linear_layers(nn.Sequential(nn.Linear(4, 4))) == 0
    packing_pays.cache_clear()
