"""Tests of the papers' SparseFormers: attention interface, outputs, [CLS] in the last block, points, gradients."""

import pytest
import torch
import transformers
from torch import nn

import frugalvit
from frugalvit import SparseFormerForImageClassification, SparseFormerModel
from frugalvit.modeling.focusing import locate_sampling_points, sample_features
from kinds import SPARSEFORMERS


@pytest.fixture
def classifier(generation, make_model) -> SparseFormerForImageClassification:
    return make_model("classifier", generation)


class TestAttention:
    @torch.no_grad()
    def test_uses_a_registered_attention_function(self, classifier, pixel_values):
        calls = []

        def own_attention(module, query, key, value, attention_mask, scaling, **kwargs):
            calls.append((query.shape, module.is_causal, attention_mask, scaling))
            return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

        transformers.AttentionInterface.register("own_attention", own_attention)
        expected = classifier(pixel_values).logits
        classifier.set_attn_implementation("own_attention")
        torch.testing.assert_close(classifier(pixel_values).logits, expected, atol=1e-6, rtol=1e-6)
        config = classifier.config
        focusing = (2, config.focusing_num_attention_heads, 5, 32 // config.focusing_num_attention_heads)
        encoder = (2, config.num_attention_heads, 5 + config.num_class_tokens, 64 // config.num_attention_heads)
        # v1's first attention precedes sampling, so it is computed once for all images of a batch.
        first = (1, *focusing[1:]) if config.generation == "v1" else focusing
        # A classifier that pools [CLS] needs no other token, so [CLS] is the only query of the last block.
        last = (*encoder[:2], 1, encoder[3]) if config.pooling == "cls" else encoder
        shapes = [first, *[focusing] * 3, encoder, encoder, last]
        assert calls == [(shape, False, None, shape[-1] ** -0.5) for shape in shapes]


class TestOutputs:
    @torch.no_grad()
    def test_requested_outputs_have_their_shapes(self, generation, make_model, pixel_values):
        tokens = {"bootstrapped": 6, "v1": 5}[generation]
        adjustments = {"bootstrapped": 4, "v1": 5}[generation]
        for model_class in SPARSEFORMERS[:4]:
            model = make_model(model_class, generation)
            model.set_attn_implementation("eager")
            plain = model(pixel_values, output_tokens=True)
            for name in ("rois", "sampling_points", "hidden_states", "attentions"):
                assert getattr(plain, name) is None
            requested = ("rois", "hidden_states", "attentions")
            outputs = model(pixel_values, **{f"output_{name}": True for name in requested})
            for name in ("logits", "image_embeds", "last_hidden_state", "pooler_output"):
                if name in plain:
                    assert torch.equal(plain[name], outputs[name])
            assert [tuple(rois.shape) for rois in outputs.rois] == [(2, 5, 4)] * adjustments
            assert [tuple(points.shape) for points in outputs.sampling_points] == [(2, 5, 4, 2)] * 5
            assert {rois.dtype for rois in outputs.rois + outputs.sampling_points} == {torch.float32}
            assert [tuple(states.shape) for states in outputs.hidden_states] == [(2, tokens, 64)] * 4


class TestClsAlone:
    """The last block computes only [CLS] if no output needs other tokens."""

    @staticmethod
    def run(model, pixel_values, **arguments):
        """Return the number of tokens in the last MLP, the logits and the gradients."""
        mlp = model.base_model.layers[-1].mlp
        seen = []
        mlp.forward = lambda states: seen.append(states.shape[1]) or type(mlp).forward(mlp, states)
        logits = model(pixel_values, **arguments).logits
        del mlp.forward
        [tokens] = seen
        return tokens, logits, torch.autograd.grad(logits.square().sum(), list(model.parameters()))

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_logits_and_gradients_are_the_same(self, attention, make_model, pixel_values):
        model = make_model("classifier", "bootstrapped").train()
        model.set_attn_implementation(attention)
        cls_alone = self.run(model, pixel_values)
        all_tokens = self.run(model, pixel_values, output_tokens=True)
        assert (cls_alone[0], all_tokens[0]) == (1, 6)
        torch.testing.assert_close(cls_alone[1:], all_tokens[1:], atol=1e-4, rtol=1e-5)

    def test_requested_states_and_attentions_have_all_tokens(self, make_model, pixel_values):
        model = make_model("classifier", "bootstrapped")
        model.set_attn_implementation("eager")
        for name in ("hidden_states", "attentions"):
            assert model(pixel_values, **{f"output_{name}": True})[name][-1].shape[-2] == 6
            setattr(model.config, f"output_{name}", True)
            assert model(pixel_values)[name][-1].shape[-2] == 6

    def test_context_broadcast_reads_all_tokens(self, make_model, pixel_values):
        model = make_model("classifier", "bootstrapped")
        frugalvit.insert_context_broadcast(model)
        assert self.run(model, pixel_values)[0] == 6


def test_points_that_are_nan_give_nan_and_a_safe_backward_pass():
    """`grid_sample` must get no NaN. With NaN, its backward pass on CPUs would write outside the feature map."""
    features = torch.randn(2, 3, 8, 8, requires_grad=True)
    points = torch.rand(2, 5, 4, 2)
    points[0, 1, 2, 0] = points[1, 4, 3] = torch.nan
    points[1, 0, 0] = torch.inf
    for padding_mode in ("border", "zeros"):
        sampled = sample_features(features, points.requires_grad_(), padding_mode)
        sampled.sum().backward()
        assert sampled.isnan().all(-1).nonzero().tolist() == [[0, 1, 2], [1, 4, 3]]


def test_gradients_of_a_batch_are_the_sum_of_its_images(generation, make_model, pixel_values):
    model = make_model(SparseFormerModel, generation, drop_path_rate=0.0).train()

    def gradients(images):
        model.zero_grad()
        # The loss is scaled up so that gradients exceed v1's limit.
        (1e3 * model(images).pooler_output[:, :8]).square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    together, first, second = (gradients(images) for images in (pixel_values, pixel_values[:1], pixel_values[1:]))
    for name, gradient in together.items():
        # Biases of keys do not change the softmax, so the gradients of these biases are only rounding errors.
        if not name.endswith("k_proj.bias"):
            tolerance = 1e-3 * gradient.abs().max().item()
            torch.testing.assert_close(gradient, first[name] + second[name], atol=tolerance, rtol=0, msg=name)


def test_v1_clips_the_gradient_of_points(make_model, pixel_values, monkeypatch):
    """v1 clips gradients of sampling points to 1 / (rows of the feature map). Bootstrapped models do not clip them."""
    seen = []

    def locate(rois, offsets):
        seen.append(locate_sampling_points(rois, offsets).detach().requires_grad_())
        return seen[-1]

    monkeypatch.setattr("frugalvit.modeling.focusing.locate_sampling_points", locate)
    for generation in ("v1", "bootstrapped"):
        model = make_model(SparseFormerModel, generation).train()
        (1e4 * model(pixel_values[:1]).pooler_output[:, :8]).square().sum().backward()
        largest = max(points.grad.abs().max().item() for points in seen)
        assert largest == 1 / 8 if generation == "v1" else largest > 1
        seen.clear()
