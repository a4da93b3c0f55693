"""Models whose linear layers bitsandbytes keeps in 8 bits compute nearly as in float32."""

import pytest
import torch
from transformers import BitsAndBytesConfig

import frugalvit
from kinds import KINDS
from tiny import IMAGE, make_llava, make_vit


SEGMENTER = frugalvit.PatchSparseFormerForSemanticSegmentation


def in_8_bits(model, folder):
    model.save_pretrained(folder)
    small = type(model).from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True)).eval()
    assert any(parameter.dtype == torch.int8 for parameter in small.parameters())
    return small


def llava():
    model = make_llava()
    tower = frugalvit.PatchSparseFormerVisionModel.from_teacher(model.model.vision_tower, 16)
    return frugalvit.swap_vision_tower(model, tower)


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, "segmenter", "llava"])
def test_every_family(kind, make_model, pixel_values, tmp_path):
    inputs = {"pixel_values": pixel_values}
    if kind == "llava":
        model, inputs["input_ids"] = llava(), torch.tensor([[2, *[IMAGE] * 16, 3, 4]] * 2)
    else:
        model = (
            make_model(SEGMENTER, "patches") if kind == "segmenter" else make_model("classifier", kind, num_labels=64)
        )
    logits = [each(**inputs).logits.flatten(1) for each in (model, in_8_bits(model, tmp_path))]
    assert torch.cosine_similarity(*logits).min() > 0.999


def test_weights_in_8_bits_are_neither_inherited_nor_initialized(tmp_path):
    teacher = in_8_bits(make_vit(), tmp_path)
    for method in (frugalvit.PatchSparseFormerForImageClassification.from_teacher, frugalvit.impulse_init_):
        with pytest.raises(ValueError, match="its weights are torch.int8; load it without a quantization_config"):
            method(teacher)
