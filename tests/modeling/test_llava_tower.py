"""The tower that the original code base of LLaVA reads."""

from types import SimpleNamespace

import pytest
import torch

from drawn import noise
from frugalvit.modeling.llava_tower import SparseFormerVisionTower
from tiny import make_llava, make_tower


@pytest.fixture
def tower_folder(tmp_path):
    make_tower(make_llava()).save_pretrained(tmp_path / "tower")
    return str(tmp_path / "tower")


def tower_arguments(**arguments):
    return SimpleNamespace(**{"mm_vision_select_layer": -2, "mm_vision_select_feature": "patch", **arguments})


@pytest.mark.parametrize("feature", ["patch", "cls_patch"])
def test_gives_what_the_original_tower_gives(tower_folder, feature):
    arguments = tower_arguments(mm_vision_select_feature=feature)
    tower = SparseFormerVisionTower(tower_folder, arguments, delay_load=True)
    assert not tower.is_loaded
    assert (tower.hidden_size, tower.num_patches, tower.select_layer) == (64, 7, -2)
    tower.load_model()
    weights = tower.vision_tower
    tower.load_model()
    assert tower.is_loaded and tower.vision_tower is weights
    assert not any(parameter.requires_grad for parameter in tower.parameters())
    pixel_values = tower.image_processor.preprocess(noise(), return_tensors="pt")["pixel_values"]
    crop = tower.image_processor.crop_size
    assert pixel_values.shape[-2:] == (32, 32) == (crop["height"], crop["width"])
    features = tower(pixel_values.half())
    assert features.dtype == torch.float16 and features.shape == (1, 7 + (feature == "cls_patch"), 64)
    with torch.no_grad():
        states = weights(pixel_values, output_hidden_states=True).hidden_states[-2]
    torch.testing.assert_close(tower(pixel_values), states[:, int(feature == "patch") :])
    listed = tower([pixel_values[0], pixel_values[0]])
    assert len(listed) == 2 and torch.equal(listed[1], tower(pixel_values))
    assert tower.dummy_feature.shape == (1, 64)
    assert (tower.dtype, tower.device) == (torch.float32, torch.device("cpu"))


@torch.no_grad()
def test_has_the_tokens_that_are_set(tmp_path):
    tower = make_tower(make_llava(), 9, elastic_token_counts=[4, 6, 9])
    tower.set_num_tokens(4)
    tower.save_pretrained(tmp_path / "tower")
    tower = SparseFormerVisionTower(str(tmp_path / "tower"), tower_arguments(), delay_load=True)
    assert tower.num_patches == 4
    tower.load_model()
    assert tower(torch.zeros(1, 3, 32, 32)).shape == (1, 4, 64)
    tower.vision_tower.set_num_tokens(6)
    assert tower.num_patches == 6 == tower(torch.zeros(1, 3, 32, 32)).shape[1]


def test_loads_at_once_where_it_is_to_be_tuned(tower_folder):
    assert SparseFormerVisionTower(tower_folder, tower_arguments()).is_loaded
    arguments = tower_arguments(unfreeze_mm_vision_tower=True)
    assert SparseFormerVisionTower(tower_folder, arguments, delay_load=True).is_loaded
    with pytest.raises(ValueError, match="mm_vision_select_feature is 'cls', expected"):
        SparseFormerVisionTower(tower_folder, tower_arguments(mm_vision_select_feature="cls"))
