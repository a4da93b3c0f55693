"""SparseFormers whose tokens embed patches are a family of their own."""

import pytest
import torch
from transformers import AutoModelForImageClassification
from vision_transformers import KINDS as TEACHERS

import frugalvit
from kinds import PATCH_SPARSEFORMERS, SPARSEFORMERS


@pytest.mark.parametrize("config_class", [frugalvit.SparseFormerCLIPConfig, frugalvit.SparseFormerLlavaConfig])
@pytest.mark.parametrize("kind", ["patches", "bootstrapped"])
def test_towers_are_read_by_their_model_type(kind, config_class, make_config):
    own = make_config(kind, projection_dim=None)
    vision = config_class(vision_config=own.to_dict()).vision_config
    assert type(vision) is type(own) and vision.to_dict() == own.to_dict()


@pytest.mark.parametrize(("shared", "own"), list(zip(SPARSEFORMERS, PATCH_SPARSEFORMERS, strict=True)))
def test_classes_make_those_of_the_configuration(shared, own, make_config, tmp_path):
    config = make_config("patches")
    model = shared(config)
    assert type(model) is own and isinstance(model, shared) and own.config_class is type(config)
    assert type(shared(make_config("bootstrapped"))) is shared
    model.save_pretrained(tmp_path)
    assert type(own.from_pretrained(tmp_path)) is own
    with pytest.raises(ValueError, match="configuration of a patch_sparseformer, expected that of a sparseformer"):
        shared.from_pretrained(tmp_path)


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


def test_students_of_its_classes_inherit_patches():
    teacher = TEACHERS["vit"].make()
    student = frugalvit.PatchSparseFormerModel.from_teacher(teacher, 4)
    assert type(student) is frugalvit.PatchSparseFormerModel
    assert type(frugalvit.SparseFormerModel.from_teacher(teacher, 4)) is frugalvit.SparseFormerModel
    with pytest.raises(ValueError, match="`focusing` is 'paper'; tokens of PatchSparseFormerModel embed patches"):
        frugalvit.PatchSparseFormerModel.from_teacher(teacher, 4, focusing="paper")


def test_a_configuration_of_another_model(make_config, tmp_path):
    make_config("bootstrapped").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="configuration of a sparseformer, expected that of a patch_sparseformer"):
        frugalvit.PatchSparseFormerConfig.from_pretrained(tmp_path)
