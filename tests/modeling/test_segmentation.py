"""Tests of the paper's segmentation head: equations, loading from a classifier, and loss."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSemanticSegmentation

from frugalvit import (
    SparseFormerConfig,
    SparseFormerForImageClassification,
    SparseFormerForSemanticSegmentation,
    count_macs,
)
from frugalvit.modeling.layers import eager_attention_forward
from frugalvit.modeling.segmentation_head import geometric_bias
from kinds import KINDS


@pytest.fixture
def model(generation, make_model) -> SparseFormerForSemanticSegmentation:
    return make_model(SparseFormerForSemanticSegmentation, generation)


def coordinates(low: float, high: float):
    return st.floats(low, high, width=32, allow_nan=False)


class TestGeometricBias:
    @given(
        center=st.tuples(coordinates(0.0, 1.0), coordinates(0.0, 1.0)),
        size=st.tuples(coordinates(0.25, 1.0), coordinates(0.25, 1.0)),
        cells=st.tuples(st.integers(8, 40), st.integers(8, 40)),
    )
    def test_is_a_gaussian_whose_deviation_is_half_the_size(self, center, size, cells):
        (x, y), (width, height) = center, size
        roi = torch.tensor([[[x - width / 2, y - height / 2, x + width / 2, y + height / 2]]])
        bias = geometric_bias(roi, *cells)
        assert bias.shape == (1, 1, *cells) and bias.dtype == torch.float32
        for row, column in ((0, 0), (cells[0] // 2, cells[1] - 1)):
            dx, dy = (column + 0.5) / cells[1] - x, (row + 0.5) / cells[0] - y
            expected = -0.5 * ((dx / (width / 2)) ** 2 + (dy / (height / 2)) ** 2)
            assert bias[0, 0, row, column].item() == pytest.approx(expected, abs=1e-3)

    def test_degenerate_rois_are_finite(self):
        rois = [[0.3, 0.6, 0.3, 0.6], [0.7, 0.8, 0.2, 0.1], [-1e6, -1e6, -1e6, -1e6], [1e8, 0, 1e8, 1]]
        roi = torch.tensor([rois], requires_grad=True)
        bias = geometric_bias(roi, 6, 9)
        bias.sum().backward()
        assert bias.isfinite().all() and roi.grad.isfinite().all()


class TestHead:
    @torch.no_grad()
    def test_computes_equations_6_and_7(self, model, pixel_values):
        outputs = model(pixel_values, output_rois=True, output_token_maps=True)
        base = model.sparseformer(pixel_values, output_stem_features=True)
        head, cls = model.decode_head, model.config.num_class_tokens
        tokens = head.reduction(base.last_hidden_state[:, cls:])
        for block in head.blocks:
            normed, attention = block.layernorm_before(tokens), block.attention
            query, key, value = (
                projection(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            mixed, _ = eager_attention_forward(attention, query, key, value, None, attention.head_dim**-0.5)
            tokens = tokens + attention.o_proj(mixed.flatten(2))
            tokens = tokens + block.mlp(block.layernorm_after(tokens))
        tokens = head.layernorm(tokens)
        token_logits = head.classifier(tokens)
        queries = F.conv2d(base.stem_features, head.query.weight, head.query.bias, padding=1)
        bias = geometric_bias(outputs.rois[-1], *queries.shape[-2:])
        width = tokens.shape[-1]
        for image in range(2):
            for row, column in ((0, 0), (3, 5), (7, 7)):
                scores = head.key(tokens[image]) @ queries[image, :, row, column] / width**0.5
                scores = scores + head.importance(tokens[image])[:, 0] + bias[image, :, row, column]
                weights = scores.softmax(0)
                torch.testing.assert_close(outputs.token_maps[image, :, row, column], weights, atol=1e-6, rtol=1e-5)
                expected = weights @ token_logits[image]
                torch.testing.assert_close(outputs.logits[image, :, row, column], expected, atol=1e-5, rtol=1e-5)

    @torch.no_grad()
    def test_maps_have_a_quarter_of_the_image_s_size(self, model):
        for size in ((4, 4), (31, 50), (33, 64)):
            outputs = model(torch.randn(1, 3, *size), output_token_maps=True)
            quarter = tuple(-(-side // 4) for side in size)
            assert outputs.logits.shape == (1, 3, *quarter)
            torch.testing.assert_close(outputs.token_maps.sum(1), torch.ones(1, *quarter))

    @pytest.mark.parametrize(
        ("size", "parameters", "giga_macs"), [("base", 65_446_230, 25.37), ("large", 213_497_302, 66.25)]
    )
    def test_parameters_and_macs(self, size, parameters, giga_macs):
        config = SparseFormerConfig.from_variant(
            f"augreg-{size}-49-224", num_latent_tokens=256, image_size=512, resize_size=None, num_labels=150
        )
        with torch.device("meta"):
            model = SparseFormerForSemanticSegmentation(config)
        assert model.num_parameters() == parameters
        assert count_macs(model, 512).macs_with_attention / 1e9 == pytest.approx(giga_macs, abs=0.01)


def test_a_classifier_loads_as_a_segmentation_model_with_more_tokens(generation, make_model, tmp_path):
    classifier = make_model(SparseFormerForImageClassification, generation)
    classifier.save_pretrained(tmp_path)
    model = AutoModelForSemanticSegmentation.from_pretrained(tmp_path, num_labels=7)
    model.resize_tokens(40)
    assert type(model) is SparseFormerForSemanticSegmentation
    assert model.config.num_latent_tokens == 40 and model.config.num_labels == 7
    state = model.base_model.state_dict()
    for name, weight in classifier.base_model.state_dict().items():
        kept = state[name][: len(weight)] if "latents" in name else state[name]
        assert torch.equal(kept, weight), name
    assert model(torch.randn(1, 3, 40, 60)).logits.shape == (1, 7, 10, 15)


@pytest.mark.parametrize("kind", ["bootstrapped", "v1", "patches"])
def test_the_loss_is_the_mean_over_labeled_pixels(kind, make_model, pixel_values):
    model = make_model(KINDS[kind].classes[4], kind)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (2, 32, 32), generator=generator)
    labels[:, :9] = 255
    outputs = model(pixel_values, labels=labels)
    logits = F.interpolate(outputs.logits, (32, 32), mode="bilinear").log_softmax(1)
    expected = -sum(
        logits[image, labels[image, row, column], row, column]
        for image in range(2)
        for row in range(9, 32)
        for column in range(32)
    ) / (2 * 23 * 32)
    torch.testing.assert_close(outputs.loss, expected)
