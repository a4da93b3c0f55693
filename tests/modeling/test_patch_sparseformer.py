"""SparseFormers whose tokens embed patches are a family of their own."""

import pytest
from transformers import AutoModel

import frugalvit


@pytest.mark.parametrize("config_class", ["SparseFormerCLIPConfig", "SparseFormerLlavaConfig"])
@pytest.mark.parametrize("kind", ["patches", "bootstrapped"])
def test_towers_are_read_by_their_model_type(kind, config_class, make_config):
    own = make_config(kind)
    vision = getattr(frugalvit, config_class)(vision_config=own.to_dict()).vision_config
    assert type(vision) is type(own) and vision.to_dict() == own.to_dict()


def test_auto_model_makes_the_class_of_the_configuration(make_config, tmp_path):
    for kind in ("patches", "bootstrapped"):
        plain = make_config(kind)
        prefix = "Patch" if kind == "patches" else ""
        assert type(AutoModel.from_config(plain)).__name__ == f"{prefix}SparseFormerModel"
        projection = getattr(frugalvit, f"{prefix}SparseFormerVisionModelWithProjection")
        model = projection(
            projection.config_class.from_dict(plain.to_dict() | {"model_type": projection.config_class.model_type})
        )
        model.save_pretrained(tmp_path / kind)
        assert type(AutoModel.from_pretrained(tmp_path / kind)) is projection
