"""Tests of benchmarks/linear_probe.py."""

import torch
import torch.nn.functional as F

import linear_probe


def test_linear_probe_is_the_minimum():
    """The loss has zero gradient at the fitted weights. If the features are scaled and shifted, a new probe gives the
    same logits as the first probe."""
    generator, penalty = torch.Generator().manual_seed(0), 0.01
    labels = torch.randint(3, (60,), generator=generator)
    features = torch.randn(60, 8, generator=generator) + torch.eye(3, 8)[labels]
    probe = linear_probe.LinearProbe(features, labels, 3, penalty)
    inputs = (features - features.mean(0)) / features.std(0, correction=0)
    weight, bias = probe.linear.weight, probe.linear.bias
    loss = F.cross_entropy(inputs @ weight.T + bias, labels) + penalty / 2 * weight.square().sum()
    gradients = torch.autograd.grad(loss, [weight, bias])
    assert max(gradient.abs().max() for gradient in gradients) < 1e-4
    scaled = torch.logspace(-2, 2, 8) * features + 5
    assert torch.allclose(linear_probe.LinearProbe(scaled, labels, 3, penalty)(scaled), probe(features), atol=0.01)
