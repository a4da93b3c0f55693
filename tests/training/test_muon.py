"""Muon: its orthogonalization, whose parameters it takes, and that it goes on where it stopped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from frugalvit.training.components.muon import Muon, orthogonalize, split_matrices
from frugalvit.training.components.optimizers import parameter_groups
from tiny import make_vit


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 3), st.integers(2, 40), st.integers(2, 40), st.sampled_from([1e-4, 1.0, 1e4]), st.integers(0, 99)
)
def test_singular_values_come_near_one_and_directions_stay(count, rows, columns, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    left, right = (torch.linalg.qr(torch.randn(count, n, rank, generator=generator))[0] for n in (rows, columns))
    values = 0.1 + 0.9 * torch.rand(count, rank, generator=generator)
    result = orthogonalize(scale * left * values[:, None] @ right.mT)
    inside = left.mT @ result @ right
    assert ((inside.diagonal(dim1=1, dim2=2) > 0.5) & (inside.diagonal(dim1=1, dim2=2) < 1.25)).all()
    torch.testing.assert_close(inside, torch.diag_embed(inside.diagonal(dim1=1, dim2=2)), rtol=0, atol=1e-3)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))


def steps(model, optimizer, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(32, 12, generator=generator)
        nn.functional.mse_loss(model(inputs), inputs[:, :3].sin()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_update_has_the_size_of_adamws():
    model = nn.Linear(64, 64, bias=False)
    before = model.weight.detach().clone()
    optimizer = Muon([{"params": [model.weight], "weight_decay": 0.5, "matrices": True}], lr=0.01)
    model.weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    gradient = model.weight.grad.clone()
    optimizer.step()
    change = model.weight.detach() - (1 - 0.01 * 0.5) * before
    # AdamW's updates have a root mean square of about 0.2 times the learning rate (Liu et al. 2025).
    assert change.square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.15)
    assert (change * gradient).sum() < 0


def test_saved_state_goes_on_to_the_same_weights(tmp_path):
    straight, halted = network(), network()
    options = {"lr": 0.01, "betas": (0.8, 0.9)}
    one, two = (Muon(split_matrices(model, *parameter_groups(model, 0.1)), **options) for model in (straight, halted))
    for seed in (1, 2):
        steps(straight, one, 3, seed)
    steps(halted, two, 3, 1)
    torch.save(two.state_dict(), tmp_path / "optimizer.pt")
    resumed = Muon(split_matrices(halted, *parameter_groups(halted, 0.1)), lr=1.0)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    steps(halted, resumed, 3, 2)
    for ours, theirs in zip(halted.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_muon_takes_the_matrices_of_the_blocks():
    model = make_vit()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    split = split_matrices(model, *parameter_groups(model, 0.05))
    taken = {names[id(p)] for group in split if group.get("matrices") for p in group["params"]}
    assert len(taken) == 6 and all(name.startswith("vit.layers.0.") and name.endswith("weight") for name in taken)
    rest = {
        names[id(p)]: group["weight_decay"] for group in split if not group.get("matrices") for p in group["params"]
    }
    assert taken | rest.keys() == set(names.values()) and not taken & rest.keys()
    assert rest["classifier.weight"] == 0.05 and rest["vit.embeddings.cls_token"] == 0
