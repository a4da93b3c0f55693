"""One model with any number of tokens: chosen in a call, kept in the configuration, or by how sure each image is."""

import copy

import pytest
import torch

import frugalvit
from frugalvit.modeling.focusing import initial_rois


COUNTS = {"bootstrapped": [4, 6, 9], "patches": [4, 9, 16]}


@pytest.fixture(params=list(COUNTS))
def elastic(request, make_model):
    """Function that makes a tiny elastic model of a class, of those of a kind by its name without a prefix."""

    def make(ending: str, **fields):
        counts = COUNTS[request.param]
        prefix = "PatchSparseFormer" if request.param == "patches" else "SparseFormer"
        model_class = getattr(frugalvit, f"{prefix}{ending}")
        return make_model(
            model_class, request.param, num_latent_tokens=counts[-1], elastic_token_counts=counts, **fields
        )

    return make


def first(outputs) -> torch.Tensor:
    if "feature_maps" in outputs:
        return outputs.feature_maps[-1]
    return outputs.logits if "logits" in outputs else outputs[0]


@pytest.mark.parametrize("ending", ["Model", "ForImageClassification", "VisionModelWithProjection", "Backbone"])
@torch.no_grad()
def test_a_count_is_the_model_that_was_cut_to_it(ending, elastic, pixel_values, tmp_path):
    model = elastic(ending)
    *smaller, largest = model.config.elastic_token_counts
    found = {count: first(model(pixel_values, num_tokens=count)) for count in (*smaller, largest)}
    assert torch.equal(found[largest], first(model(pixel_values)))
    for count in smaller:
        assert not torch.equal(found[count], found[largest])
        cut = copy.deepcopy(model)
        cut.resize_tokens(count)
        assert cut.config.num_latent_tokens == count
        assert torch.equal(first(cut(pixel_values)), found[count])
        # What is set is saved, and all weights with it.
        model.set_num_tokens(count)
        assert torch.equal(first(model(pixel_values)), found[count])
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        torch.testing.assert_close(first(loaded(pixel_values)), found[count])
        torch.testing.assert_close(first(loaded(pixel_values, num_tokens=largest)), found[largest])
    model.set_num_tokens(None)
    assert torch.equal(first(model(pixel_values)), found[largest])


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
def test_images_of_a_batch_have_counts_of_their_own(fields, attention, make_model):
    """Each image's result is its own, whatever the others' counts are."""
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


class TestPrefixes:
    """The first tokens of a model with the paper's focusing stage are those of a smaller model."""

    def test_every_prefix_covers_the_image(self):
        points = torch.cartesian_prod(torch.linspace(0, 1, 21), torch.linspace(0, 1, 21))
        for counts in ([4, 9, 16], [5, 12], [9, 16, 25, 36, 49, 64]):
            rois = initial_rois(counts[-1], counts[:-1])
            for count in counts:
                low, high = rois[:count, None, :2], rois[:count, None, 2:]
                assert ((points >= low) & (points <= high)).all(-1).any(0).all()
            assert torch.equal(rois[: counts[0]], initial_rois(counts[0]))


def test_cutting_a_grid_leaves_one_count(make_model):
    """Smaller grids would be interpolated from another one than was trained."""
    model = make_model("base", "patches", num_latent_tokens=16, elastic_token_counts=[4, 9, 16])
    model.resize_tokens(9)
    assert model.config.elastic_token_counts is None


class TestAdaptive:
    @pytest.fixture
    def images(self) -> torch.Tensor:
        return torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification"])
    def test_sure_images_stop(self, problem_type, elastic, images):
        model = elastic("ForImageClassification", problem_type=problem_type)
        counts = model.config.elastic_token_counts
        with torch.no_grad():
            logits = {count: model(images, num_tokens=count).logits for count in counts}
        probabilities = torch.softmax if problem_type == "single_label_classification" else lambda x, _: x.sigmoid()
        sure = {count: probabilities(found, -1).amax(-1) for count, found in logits.items()}
        # Some images are done at once, and some go through all.
        confidence = sure[counts[0]].median().item()
        found = model.classify_adaptively(images, confidence, counts)
        assert len(set(found.num_tokens.tolist())) > 1
        for index, count in enumerate(found.num_tokens.tolist()):
            torch.testing.assert_close(found.logits[index], logits[count][index], atol=1e-5, rtol=1e-5)
            earlier = counts[: counts.index(count)]
            assert all(sure[other][index] < confidence for other in earlier)
            assert count == counts[-1] or sure[count][index] >= confidence

    def test_ends(self, elastic, images):
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
