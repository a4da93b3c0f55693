"""Tests of elastic models: number of tokens per call, per image and in the configuration, and adaptive inference."""

import copy

import pytest
import torch

import frugalvit
from frugalvit.modeling.focusing import initial_rois
from kinds import main_output


COUNTS = {"bootstrapped": [4, 6, 9], "patches": [4, 9, 16]}


@pytest.fixture(params=list(COUNTS))
def elastic(request, make_model):
    """Return a function that makes a tiny elastic model. `ending` is the end of the class name, such as `"Model"`."""

    def make(ending: str, **fields):
        counts = COUNTS[request.param]
        prefix = "PatchSparseFormer" if request.param == "patches" else "SparseFormer"
        model_class = getattr(frugalvit, f"{prefix}{ending}")
        return make_model(
            model_class, request.param, num_latent_tokens=counts[-1], elastic_token_counts=counts, **fields
        )

    return make


@pytest.mark.parametrize("ending", ["Model", "ForImageClassification", "VisionModelWithProjection", "Backbone"])
@torch.no_grad()
def test_a_smaller_count_equals_a_model_resized_to_it(ending, elastic, pixel_values, tmp_path):
    model = elastic(ending)
    *smaller, largest = model.config.elastic_token_counts
    found = {count: main_output(model(pixel_values, num_tokens=count)) for count in (*smaller, largest)}
    assert torch.equal(found[largest], main_output(model(pixel_values)))
    for count in smaller:
        assert not torch.equal(found[count], found[largest])
        cut = copy.deepcopy(model)
        cut.resize_tokens(count)
        assert cut.config.num_latent_tokens == count
        assert torch.equal(main_output(cut(pixel_values)), found[count])
        # A saved model keeps its number of tokens and the weights of all tokens.
        model.set_num_tokens(count)
        assert torch.equal(main_output(model(pixel_values)), found[count])
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        torch.testing.assert_close(main_output(loaded(pixel_values)), found[count])
        torch.testing.assert_close(main_output(loaded(pixel_values, num_tokens=largest)), found[largest])
    model.set_num_tokens(None)
    assert torch.equal(main_output(model(pixel_values)), found[largest])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"placement": "content", "image_size": 48, "patch_size": 4},
        {"pooling": "cls_and_latent_mean", "rope_theta": 100.0},
        {"pooling": "mean", "num_register_tokens": 2},
        {"pooling": "attention"},
    ],
    ids=str,
)
@torch.no_grad()
def test_an_image_s_logits_do_not_depend_on_the_counts_of_other_images(fields, attention, make_model):
    fields = {"num_latent_tokens": 16, "elastic_token_counts": [4, 9, 16]} | fields
    model = make_model("classifier", "patches", **fields)
    model.set_attn_implementation(attention)
    pixel_values = torch.randn(5, 3, 48, 48)
    num_tokens = torch.tensor([9, 4, 16, 4, 9])
    found = model(pixel_values, num_tokens=num_tokens, output_rois=True)
    for index, count in enumerate(num_tokens.tolist()):
        alone = model(pixel_values[index : index + 1], num_tokens=count, output_rois=True)
        torch.testing.assert_close(found.logits[index], alone.logits[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(found.rois[0][index, :count], alone.rois[0][0])


def test_initial_rois_of_every_count_cover_the_image():
    points = torch.cartesian_prod(torch.linspace(0, 1, 21), torch.linspace(0, 1, 21))
    for counts in ([4, 9, 16], [5, 12], [9, 16, 25, 36, 49, 64]):
        rois = initial_rois(counts[-1], counts[:-1])
        for count in counts:
            low, high = rois[:count, None, :2], rois[:count, None, 2:]
            assert ((points >= low) & (points <= high)).all(-1).any(0).all()
        assert torch.equal(rois[: counts[0]], initial_rois(counts[0]))


def test_a_resized_grid_has_one_count(make_model):
    """`resize_tokens(9)` removes all token counts, because they were trained with the old grid of 4 x 4 tokens."""
    model = make_model("base", "patches", num_latent_tokens=16, elastic_token_counts=[4, 9, 16])
    model.resize_tokens(9)
    assert model.config.elastic_token_counts is None


class TestAdaptive:
    @pytest.fixture
    def images(self) -> torch.Tensor:
        return torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification"])
    def test_an_image_stops_at_the_first_count_with_enough_confidence(self, problem_type, elastic, images):
        model = elastic("ForImageClassification", problem_type=problem_type)
        counts = model.config.elastic_token_counts
        with torch.no_grad():
            logits = {count: model(images, num_tokens=count).logits for count in counts}
        probabilities = torch.softmax if problem_type == "single_label_classification" else lambda x, _: x.sigmoid()
        confidences = {count: probabilities(found, -1).amax(-1) for count, found in logits.items()}
        # The threshold is the median confidence, so half of the images stop at the smallest number of tokens.
        confidence = confidences[counts[0]].median().item()
        found = model.classify_adaptively(images, confidence, counts)
        assert len(set(found.num_tokens.tolist())) > 1
        for index, count in enumerate(found.num_tokens.tolist()):
            torch.testing.assert_close(found.logits[index], logits[count][index], atol=1e-5, rtol=1e-5)
            earlier = counts[: counts.index(count)]
            assert all(confidences[other][index] < confidence for other in earlier)
            assert count == counts[-1] or confidences[count][index] >= confidence

    def test_default_counts_end_at_the_model_s_number_of_tokens(self, elastic, images):
        model = elastic("ForImageClassification")
        low, middle, high = model.config.elastic_token_counts
        confidence = model(images, num_tokens=low).logits.softmax(-1).amax(-1).median().item()
        assert set(model.classify_adaptively(images, confidence).num_tokens.tolist()) == {low, high}
        model.set_num_tokens(middle)
        assert set(model.classify_adaptively(images, confidence).num_tokens.tolist()) == {low, middle}
        model.set_num_tokens(None)
        assert set(model.classify_adaptively(images, 0.0).num_tokens.tolist()) == {low}
        assert set(model.classify_adaptively(images, 1.0).num_tokens.tolist()) == {high}
        assert set(model.classify_adaptively(images, 1.0, [low]).num_tokens.tolist()) == {low}
        with pytest.raises(ValueError, match="`confidence` is 90, expected a probability"):
            model.classify_adaptively(images, 90)
        model.config.problem_type = "regression"
        with pytest.raises(ValueError, match="a regression has none"):
            model.classify_adaptively(images, 0.5)
