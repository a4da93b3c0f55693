"""benchmarks/linear_probe.py: the minimum of its loss, and the choice of its penalty."""

import torch
import torch.nn.functional as F

import linear_probe


def noise(images: int = 60, size: int = 8, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (images,), generator=generator)
    return torch.randn(images, size, generator=generator) + torch.eye(classes, size)[labels], labels


def test_linear_probe_is_the_minimum():
    """The gradient of the penalized mean cross-entropy is zero there, and features' scales do not matter."""
    (features, labels), penalty = noise(), 0.01
    probe = linear_probe.LinearProbe(features, labels, 3, penalty)
    inputs = (features - features.mean(0)) / features.std(0, correction=0)
    weight, bias = probe.linear.weight, probe.linear.bias
    loss = F.cross_entropy(inputs @ weight.T + bias, labels) + penalty / 2 * weight.square().sum()
    gradients = torch.autograd.grad(loss, [weight, bias])
    assert max(gradient.abs().max() for gradient in gradients) < 1e-4
    scaled = torch.logspace(-2, 2, 8) * features + 5
    assert torch.allclose(linear_probe.LinearProbe(scaled, labels, 3, penalty)(scaled), probe(features), atol=0.01)
