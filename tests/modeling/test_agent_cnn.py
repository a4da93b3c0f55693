"""Tests of the generalized convolution (equations 1 to 6 of the paper) and of agent CNNs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from frugalvit import AgentCNNConfig, AgentCNNModel, GeneralizedConv2d
from frugalvit.modeling.generalized_convolution import generalized_conv2d, window_size
from frugalvit.modeling.modeling_bootstrapped_vit import head_products
from generalized_convolution_speed import generalized_convolution_in_matrix_form, shift_matrices


FIXTURE = load_file(Path(__file__).parents[1] / "fixtures" / "generalized_conv.safetensors")


class TestGeneralizedConvolution:
    def test_equals_the_reference_implementation(self):
        # The reference implementation stores weights as (positions, out_channels, in_channels).
        weight = FIXTURE["weight"].permute(1, 2, 0)
        torch.testing.assert_close(
            generalized_conv2d(FIXTURE["input"], weight, FIXTURE["bias"]), FIXTURE["output"], atol=1e-5, rtol=1e-4
        )

    def test_heads_of_attention_are_positions(self):
        """The convolution's weight at position i is head i's output matrix times head i's value matrix."""
        value = SimpleNamespace(weight=FIXTURE["shared_v_weight"])
        output = SimpleNamespace(weight=FIXTURE["shared_o_weight"])
        weight = head_products(SimpleNamespace(v_proj=value, o_proj=output), 9)
        convolved = generalized_conv2d(FIXTURE["shared_input"], weight, FIXTURE["shared_o_bias"])
        torch.testing.assert_close(convolved, FIXTURE["shared_output"], atol=1e-5, rtol=1e-4)

    def test_matrices_select_at_most_one_token(self):
        """Each matrix of equations 4 and 6 shifts all tokens. The matrix of the window's center is the identity."""
        matrices = shift_matrices(3, 4, 9)
        assert matrices.shape == (9, 12, 12) and set(matrices.unique().tolist()) == {0, 1}
        assert torch.equal(matrices[4], torch.eye(12)) and matrices.sum(-1).max() == 1
        tokens = torch.arange(12.0)
        assert (matrices[0] @ tokens).view(3, 4).tolist() == [[0, 0, 0, 0], [0, 0, 1, 2], [0, 4, 5, 6]]

    @settings(max_examples=60, deadline=None)
    @given(
        num_positions=st.integers(1, 27),
        height=st.integers(1, 6),
        width=st.integers(1, 6),
        channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        seed=st.integers(0, 99),
    )
    def test_equals_its_matrix_form(self, num_positions, height, width, channels, seed):
        generator = torch.Generator().manual_seed(seed)
        feature_map = torch.randn(2, channels[0], height, width, generator=generator)
        weight = torch.randn(channels[1], channels[0], num_positions, generator=generator)
        bias = torch.randn(channels[1], generator=generator)
        expected = generalized_convolution_in_matrix_form(feature_map, weight, bias)
        torch.testing.assert_close(generalized_conv2d(feature_map, weight, bias), expected, atol=1e-5, rtol=1e-5)

    def test_of_a_square_number_is_a_convolution(self):
        assert [window_size(n) for n in (1, 2, 4, 6, 9, 10, 16, 25, 26)] == [1, 3, 3, 3, 3, 5, 5, 5, 7]
        for side in (1, 3, 5):
            layer, x = GeneralizedConv2d(3, 4, side**2), torch.randn(1, 3, 5, 6)
            expected = nn.functional.conv2d(x, layer.weight.unflatten(-1, (side, side)), layer.bias, padding="same")
            torch.testing.assert_close(layer(x), expected)
            assert layer.weight.abs().max() <= 1 / (3**0.5 * side)


class TestAgentCNN:
    @pytest.mark.parametrize(
        ("variant", "maps"), [("agent-small", [14] * 6), ("agent-base-res", [28, 28, 14, 14, *[7] * 8])]
    )
    def test_maps_of_the_tables(self, variant, maps):
        """`hidden_states` has each block's map before downsampling."""
        config = AgentCNNConfig.from_variant(variant)
        with torch.device("meta"):
            model = AgentCNNModel(config).eval()
            outputs = model(torch.empty(1, 3, 224, 224), output_hidden_states=True)
        assert [states.shape[-1] for states in outputs.hidden_states[1:]] == maps
        width, positions = config.hidden_size, config.num_positions
        assert (width, positions) == ((288, 9) if "small" in variant else (384, 6))
        assert model.layers[0].convolution.weight.shape == (width, width, positions)
        assert config.intermediate_size == 4 * width

    @pytest.mark.parametrize("branch_dropout", [0.0, 0.5])
    @pytest.mark.parametrize("norm_position", ["before", "after"])
    def test_block_by_hand(self, norm_position, branch_dropout):
        torch.manual_seed(0)
        config = AgentCNNConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_positions=6,
            patch_size=4,
            image_size=16,
            norm_position=norm_position,
            branch_dropout=branch_dropout,
        )
        layer = AgentCNNModel(config).eval().layers[0]
        layer.dropout.train()
        for norm in (layer.norm1, layer.norm2):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.running_mean)
        x = torch.randn(2, 8, 4, 4)

        def mlp(states):
            tokens = states.movedim(1, -1)
            hidden = nn.functional.gelu(tokens @ layer.mlp.fc1.weight[:, :, 0, 0].T + layer.mlp.fc1.bias)
            return (hidden @ layer.mlp.fc2.weight[:, :, 0, 0].T + layer.mlp.fc2.bias).movedim(-1, 1)

        def drop(branch):
            # Dropout draws its mask in memory order. `mlp` returns a permuted view, so `contiguous` is needed.
            return nn.functional.dropout(branch.contiguous(), branch_dropout)

        torch.manual_seed(1)
        if norm_position == "before":
            expected = x + drop(layer.convolution(layer.norm1(x)))
            expected = expected + drop(mlp(layer.norm2(expected)))
        else:
            expected = x + drop(layer.norm1(layer.convolution(x)))
            expected = expected + drop(layer.norm2(mlp(expected)))
        torch.manual_seed(1)
        torch.testing.assert_close(layer(x), expected)
