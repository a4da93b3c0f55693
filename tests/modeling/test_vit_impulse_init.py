"""Tests of ViTs with impulse initialization: forward pass and initialization of attention."""

import pytest
import torch
import transformers

from frugalvit import ViTImpulseInitForImageClassification, ViTImpulseInitModel
from frugalvit.modeling import modeling_vit_impulse_init
from frugalvit.modeling.initialization import initialize_attention_, start_attention_
from kinds import KINDS


CHOICES = [
    {"position_embedding": positions, "pooling": pooling}
    for positions in ("sincos", "learned")
    for pooling in ("mean", "cls")
]


class TestModel:
    @torch.no_grad()
    @pytest.mark.parametrize("fields", CHOICES, ids=str)
    def test_equals_transformers_vit(self, fields, make_model, pixel_values):
        model = make_model("classifier", "vit_impulse_init", **fields)
        config = model.config
        names = ("image_size", "patch_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_labels")
        vit = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                **{name: getattr(config, name) for name in names},
                intermediate_size=config.intermediate_size,
                layer_norm_eps=config.layer_norm_eps,
            )
        ).eval()
        state = {name: tensor for name, tensor in model.state_dict().items() if "embeddings" not in name}
        missing, unexpected = vit.load_state_dict(state, strict=False)
        assert not unexpected and all("embeddings" in name for name in missing)
        embedded = model.vit.embeddings(pixel_values)
        vit.vit.embeddings.forward = lambda *_, **__: embedded
        tokens = vit.vit(pixel_values).last_hidden_state
        torch.testing.assert_close(model.vit(pixel_values).last_hidden_state, tokens, atol=1e-5, rtol=1e-5)
        pooled = tokens[:, 0] if config.pooling == "cls" else tokens.mean(1)
        torch.testing.assert_close(model(pixel_values).logits, vit.classifier(pooled), atol=1e-5, rtol=1e-5)


@pytest.fixture
def solved(monkeypatch) -> list[str]:
    """Return a list that records the name of each attention initialization that a model runs."""
    calls = []

    def start(parts, config, **options):
        calls.append(config.initialization)
        return start_attention_(parts, config, **options)

    monkeypatch.setattr(modeling_vit_impulse_init, "start_attention_", start)
    return calls


class TestInitialization:
    def test_a_new_model_is_initialized_once(self, solved):
        ViTImpulseInitForImageClassification(KINDS["vit_impulse_init"].config())
        transformers.AutoModel.from_config(KINDS["vit_impulse_init"].config(initialization="mimetic"))
        ViTImpulseInitModel(KINDS["vit_impulse_init"].config(initialization="trunc_normal"))
        assert solved == ["impulse", "mimetic"]

    def test_loading_weights_runs_no_initialization(self, make_model, solved, pixel_values, tmp_path):
        model = make_model("classifier", "vit_impulse_init")
        solved.clear()
        model.save_pretrained(tmp_path)
        expected = model(pixel_values)
        for loaded in (
            ViTImpulseInitForImageClassification.from_pretrained(tmp_path),
            transformers.AutoModelForImageClassification.from_pretrained(tmp_path),
            # The saved model has 3 labels. Loading it with 7 labels initializes the classifier, but not the attention.
            ViTImpulseInitForImageClassification.from_pretrained(tmp_path, num_labels=7, ignore_mismatched_sizes=True),
            transformers.AutoModel.from_pretrained(tmp_path),
        ):
            tokens = loaded.base_model(pixel_values).last_hidden_state
            assert torch.equal(tokens, model.vit(pixel_values).last_hidden_state)
        assert torch.equal(loaded(pixel_values).pooler_output, model.vit(pixel_values).pooler_output)
        assert expected.logits.shape == (2, 3) and not solved

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("impulse", {"solver": "adam_bounded", "steps": 9}),
            ("impulse", {"mass": None, "value_init": "default"}),
            ("mimetic", {"value_init": "default"}),
        ],
    )
    def test_initialization_options_are_those_of_the_in_place_function(self, name, options):
        torch.manual_seed(0)
        config = KINDS["vit_impulse_init"].config(initialization=name, initialization_options=options)
        model = ViTImpulseInitModel(config)
        torch.manual_seed(0)
        expected = ViTImpulseInitModel(KINDS["vit_impulse_init"].config(initialization="trunc_normal"))
        initialize_attention_(expected, name, positions="keep", **options)
        expected = expected.state_dict()
        assert all(torch.equal(weight, expected[key]) for key, weight in model.state_dict().items())
