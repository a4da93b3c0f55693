"""Tests of `measure_attention`."""

import math

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from frugalvit import ViTImpulseInitConfig, ViTImpulseInitModel
from frugalvit.attention import measure_attention


SIZES = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def batches(count: int = 2) -> list[torch.Tensor]:
    return list(torch.randn(count, 3, 3, 32, 32, generator=torch.Generator().manual_seed(0)))


@torch.no_grad()
def test_statistics_are_averages_over_images():
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=5, **SIZES)).eval()
    statistics = measure_attention(model, batches())
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    outputs = model(torch.cat(batches()), output_attentions=True, output_hidden_states=True)
    for layer, (own, weights) in enumerate(zip(statistics, outputs.attentions, strict=True)):
        assert own.layer == layer + 1
        torch.testing.assert_close(own.maps, weights.mean(0))
        entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
        torch.testing.assert_close(torch.tensor(own.entropy), entropy)
        singular = torch.linalg.svdvals(outputs.hidden_states[layer + 1])
        expected = ((singular**2).sum(1) / singular[:, 0] ** 2).mean().item()
        assert own.stable_rank == pytest.approx(expected, rel=1e-4)


def test_finds_the_impulses_of_the_initialization():
    torch.manual_seed(0)
    config = ViTImpulseInitConfig(image_size=32, patch_size=4, initialization_options={"mass": 0.8}, **SIZES)
    model = ViTImpulseInitModel(config).eval()
    with torch.no_grad():
        # Without patch embeddings, attention depends only on position embeddings.
        model.embeddings.patch_embeddings.projection.weight.zero_()
    first = measure_attention(model, batches())[0]
    assert len(set(first.offset)) == 4 and all(abs(dy) <= 1 and abs(dx) <= 1 for dy, dx in first.offset)
    assert first.mass == pytest.approx([0.8] * 4, abs=0.1)
    uniform = measure_attention(ViTImpulseInitModel(config), batches())[0]
    assert max(first.entropy) < min(max(uniform.entropy), math.log(64))
    with pytest.raises(ValueError, match="no images"):
        measure_attention(model, [])
