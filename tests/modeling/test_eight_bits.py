"""Tests of models with 8-bit linear layers of bitsandbytes."""

import pytest
import torch
from transformers import BitsAndBytesConfig

import frugalvit
from kinds import KINDS
from tiny import IMAGE, make_llava, make_vit


SEGMENTER = frugalvit.PatchSparseFormerForSemanticSegmentation


def load_in_8_bits(model, folder):
    model.save_pretrained(folder)
    quantized = type(model).from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True)).eval()
    assert any(parameter.dtype == torch.int8 for parameter in quantized.parameters())
    return quantized


def make_swapped_llava():
    model = make_llava()
    tower = frugalvit.PatchSparseFormerVisionModel.from_teacher(model.model.vision_tower, 16)
    return frugalvit.swap_vision_tower(model, tower)


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, "segmenter", "llava"])
def test_logits_are_close_to_those_in_float32(kind, make_model, pixel_values, tmp_path):
    inputs = {"pixel_values": pixel_values}
    if kind == "llava":
        model = make_swapped_llava()
        inputs["input_ids"] = torch.tensor([[2, *[IMAGE] * 16, 3, 4]] * 2)
    elif kind == "segmenter":
        model = make_model(SEGMENTER, "patches")
    else:
        model = make_model("classifier", kind, num_labels=64)
    logits = [each(**inputs).logits.flatten(1) for each in (model, load_in_8_bits(model, tmp_path))]
    assert torch.cosine_similarity(*logits).min() > 0.999


def test_weights_in_8_bits_are_refused_by_inheritance_and_initialization(tmp_path):
    teacher = load_in_8_bits(make_vit(), tmp_path)
    for method in (frugalvit.PatchSparseFormerForImageClassification.from_teacher, frugalvit.impulse_init_):
        with pytest.raises(ValueError, match="its weights are torch.int8; load it without a quantization_config"):
            method(teacher)
