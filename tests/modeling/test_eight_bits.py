"""Models whose linear layers bitsandbytes keeps in 8 bits compute nearly as in float32."""

import pytest
import torch
from transformers import BitsAndBytesConfig

from frugalvit import (
    PatchSparseFormerForImageClassification,
    PatchSparseFormerForSemanticSegmentation,
    PatchSparseFormerVisionModel,
    impulse_init_,
    swap_vision_tower,
)
from kinds import KINDS
from tiny import IMAGE, make_llava, make_vit


def in_8_bits(model, folder):
    model.save_pretrained(folder)
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return type(model).from_pretrained(folder, **options).eval()


def cosine(output: torch.Tensor, other: torch.Tensor) -> float:
    return torch.cosine_similarity(output.flatten(1), other.flatten(1)).min().item()


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "model_class"),
    [*((kind, "base") for kind in KINDS), ("patches", PatchSparseFormerForSemanticSegmentation)],
)
def test_every_family(kind, model_class, make_model, pixel_values, tmp_path):
    model = make_model(model_class, kind)
    small = in_8_bits(model, tmp_path)
    outputs = [each(pixel_values) for each in (model, small)]
    name = "logits" if "logits" in outputs[0] else "pooler_output"
    assert cosine(outputs[0][name], outputs[1][name]) > 0.999
    is_convolutional = kind in ("agent_cnn", "convmixer")
    assert is_convolutional or any(parameter.dtype == torch.int8 for parameter in small.parameters())


@torch.no_grad()
def test_a_llavas_tower(pixel_values, tmp_path):
    llava = make_llava()
    tower = PatchSparseFormerVisionModel.from_teacher(llava.model.vision_tower, 16)
    model = swap_vision_tower(llava, tower)
    small = in_8_bits(model, tmp_path)
    assert any(parameter.dtype == torch.int8 for parameter in small.model.vision_tower.parameters())
    input_ids = torch.tensor([[2, *[IMAGE] * 16, 3, 4]] * 2)
    outputs = [each(input_ids=input_ids, pixel_values=pixel_values).logits for each in (model, small)]
    assert cosine(*outputs) > 0.999


def test_weights_in_8_bits_are_neither_inherited_nor_initialized(tmp_path):
    teacher = in_8_bits(make_vit(), tmp_path)
    for method in (PatchSparseFormerForImageClassification.from_teacher, impulse_init_):
        with pytest.raises(ValueError, match="its weights are torch.int8; load it without a quantization_config"):
            method(teacher)
