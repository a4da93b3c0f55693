"""SparseFormers whose tokens embed patches are a family of their own, and were not always."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageClassification
from vision_transformers import KINDS as TEACHERS

import frugalvit
from kinds import KINDS, PATCH_SPARSEFORMERS, SPARSEFORMERS


# Fields that all configurations had when there was one for both.
FOCUSING = {
    **{"num_sampling_points": 16, "num_mixed_points": 32, "stem_channels": 48, "focusing_hidden_size": 384},
    **{"num_focusing_iterations": 0, "generation": "bootstrapped", "roi_encoding": "reference"},
    **{"focusing_num_attention_heads": 6, "focusing_intermediate_size": 1536, "focusing_hidden_act": "gelu"},
    **{"focusing_layer_norm_eps": None, "shared_token_embedding": False, "stage_embedding": True},
    **{"transition_layer_norm": False, "mixing_bias": False, "mixing_hidden_size": 128, "num_roi_delta_layers": 2},
    **{"clip_sampling_gradients": False, "glance_grid": None, "num_glance_layers": 3, "num_pyramid_levels": 1},
}
PATCHES = {
    **{"patch_size": None, "patch_norm": False, "embedding_norm": False, "token_grid": None, "placement": "grid"},
    **{"placement_rule": "detail", "placement_grid": None, "num_placement_levels": None},
    **{"placement_random_share": 0.0, "glance_grid": None, "num_glance_layers": 3, "num_pyramid_levels": 1},
}


@pytest.fixture(params=["patches", "content", "bootstrapped", "v1"])
def former(request, make_model, tmp_path):
    """A kind, a classifier of it, and a folder of that as it was when there was one configuration for both."""
    model = make_model("classifier", request.param).eval()
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    gone = PATCHES if request.param in ("bootstrapped", "v1") else FOCUSING
    values |= {"model_type": "sparseformer", "architectures": ["SparseFormerForImageClassification"], **gone}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return request.param, model, tmp_path


def test_former_folders_load(former, pixel_values, caplog):
    kind, model, folder = former
    family = KINDS[kind].classifier
    for loader in (AutoModelForImageClassification, frugalvit.SparseFormerForImageClassification, family):
        loaded = loader.from_pretrained(folder).eval()
        assert type(loaded) is family
        assert loaded.config.to_dict() == model.config.to_dict() | {"_name_or_path": str(folder)}
        with torch.no_grad():
            assert torch.equal(loaded(pixel_values).logits, model(pixel_values).logits)
    assert not [record for record in caplog.records if "You are using a model of type" in record.message]
    assert type(AutoConfig.from_pretrained(folder)) is KINDS[kind].config_class


def test_former_towers(make_config):
    own = make_config("patches", projection_dim=None).to_dict()
    for config_class in (frugalvit.SparseFormerCLIPConfig, frugalvit.SparseFormerLlavaConfig):
        config = config_class(vision_config=own | FOCUSING | {"model_type": "sparseformer"})
        assert config.vision_config.to_dict() == own


@pytest.mark.parametrize(("shared", "own"), list(zip(SPARSEFORMERS, PATCH_SPARSEFORMERS, strict=True)))
def test_classes_make_those_of_the_configuration(shared, own, make_config, tmp_path):
    config = make_config("patches")
    model = shared(config)
    assert type(model) is own and isinstance(model, shared) and own.config_class is type(config)
    assert type(shared(make_config("bootstrapped"))) is shared
    model.save_pretrained(tmp_path)
    assert type(shared.from_pretrained(tmp_path)) is type(own.from_pretrained(tmp_path)) is own


def test_with_a_patch_size_a_configuration_is_that_of_patches():
    values = {"image_size": 32, "num_latent_tokens": 16, "hidden_size": 32, "patch_size": 4}
    made = frugalvit.SparseFormerConfig(**values)
    assert type(made) is frugalvit.PatchSparseFormerConfig
    assert made.to_dict() == frugalvit.PatchSparseFormerConfig(**values).to_dict()


def test_classes_that_were_derived_elsewhere(make_config, pixel_values, tmp_path):
    class Doubled(frugalvit.SparseFormerForImageClassification):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = 2 * outputs.logits
            return outputs

    torch.manual_seed(0)
    model = Doubled(make_config("patches")).eval()
    assert isinstance(model, Doubled) and type(model).__name__ == "Doubled"
    model.save_pretrained(tmp_path)
    plain = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert type(plain) is frugalvit.PatchSparseFormerForImageClassification
    with torch.no_grad():
        assert torch.equal(2 * plain(pixel_values).logits, model(pixel_values).logits)
        assert torch.equal(model(pixel_values).logits, Doubled.from_pretrained(tmp_path).eval()(pixel_values).logits)


def test_students_of_its_classes_inherit_patches():
    teacher = TEACHERS["vit"].make()
    student = frugalvit.PatchSparseFormerModel.from_teacher(teacher, 4)
    assert type(student) is frugalvit.PatchSparseFormerModel
    assert type(frugalvit.SparseFormerModel.from_teacher(teacher, 4)) is frugalvit.SparseFormerModel
    with pytest.raises(ValueError, match="`focusing` is 'paper'; tokens of PatchSparseFormerModel embed patches"):
        frugalvit.PatchSparseFormerModel.from_teacher(teacher, 4, focusing="paper")


def test_a_configuration_of_another_model(make_config, tmp_path):
    make_config("bootstrapped").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="fields of a sparseformer, expected those of a patch_sparseformer"):
        frugalvit.PatchSparseFormerConfig.from_pretrained(tmp_path)
