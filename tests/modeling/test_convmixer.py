"""Tests of ConvMixers with trained and with frozen spatial filters."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from frugalvit import ConvMixerConfig, ConvMixerForImageClassification, ConvMixerModel
from kinds import KINDS


FROZEN = ("random", "impulse", "box")


@torch.no_grad()
@pytest.mark.parametrize("kernel_size", [3, 8])
def test_follows_the_definition(kernel_size, make_model, pixel_values):
    model = make_model("base", "convmixer", kernel_size=kernel_size)

    def norm(layer, x):
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)

    patches = model.embeddings.projection
    x = norm(model.embeddings.norm, F.gelu(F.conv2d(pixel_values, patches.weight, patches.bias, stride=4)))
    low = (kernel_size - 1) // 2
    for layer in model.layers:
        spatial, channel = layer.spatial_mixing, layer.channel_mixing
        padded = F.pad(x, (low, kernel_size - 1 - low) * 2)
        y = F.conv2d(padded, spatial.weight, spatial.bias, groups=32)
        y = norm(layer.spatial_norm, y)
        x = norm(layer.channel_norm, F.gelu(F.conv2d(x + y, channel.weight, channel.bias)))
    outputs = model(pixel_values)
    assert outputs.last_hidden_state.shape == (2, 32, 8, 8)
    torch.testing.assert_close(outputs.last_hidden_state, x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs.pooler_output, x.mean((2, 3)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel_size", [3, 8])
@pytest.mark.parametrize("spatial_filters", ["trained", *FROZEN])
def test_filters_are_initialized_by_their_kind(spatial_filters, kernel_size):
    torch.manual_seed(0)
    config = KINDS["convmixer"].config(hidden_size=256, kernel_size=kernel_size, spatial_filters=spatial_filters)
    filters = torch.cat([layer.spatial_mixing.weight for layer in ConvMixerModel(config).layers]).flatten(1)
    norms, size = filters.norm(dim=1), kernel_size**2
    # Filters of every kind have the same root mean square as uniform values from -1 / kernel_size to 1 / kernel_size.
    assert norms.square().mean().item() == pytest.approx(1 / 3, rel=0.1)
    if spatial_filters in ("trained", "random"):
        assert filters.abs().max() <= 1 / kernel_size and abs(filters.mean().item()) < 0.05 / kernel_size
    elif spatial_filters == "impulse":
        assert ((filters != 0).sum(1) == 1).all() and len(filters.argmax(1).unique()) == size
    else:
        assert (filters == filters[0, 0]).all() and filters[0, 0] > 0


@pytest.mark.parametrize("spatial_filters", ["trained", *FROZEN])
def test_frozen_filters_and_their_biases_are_never_trained(spatial_filters, pixel_values, tmp_path):
    torch.manual_seed(0)
    model = ConvMixerForImageClassification(KINDS["convmixer"].config(spatial_filters=spatial_filters))
    model.save_pretrained(tmp_path)
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).requires_grad_(True).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(pixel_values, labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    for name, tensor in model.state_dict().items():
        frozen = spatial_filters != "trained" and "spatial_mixing" in name
        assert torch.equal(tensor, before[name]) == frozen, name


def test_parameters_of_table_4():
    # Each layer has spatial and channel mixing, both with biases, and two BatchNorms.
    for name, width, kernel_size in (("convmixer-256-k3", 256, 3), ("convmixer-512-k8", 512, 8)):
        with torch.device("meta"):
            model = ConvMixerForImageClassification(ConvMixerConfig.from_variant(name))
        layer = width * (kernel_size**2 + 1) + width * (width + 1) + 4 * width
        assert model.num_parameters() == width * (12 + 1 + 2) + 8 * layer + width * 10 + 10
