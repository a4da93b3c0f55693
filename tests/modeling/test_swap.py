"""Tests of `frugalvit swap` and `swap_vision_tower`: outputs, refused models, first layers, matched channels."""

import pytest
import timm
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    Qwen2_5_VLConfig,
)

from drawn import noise
from frugalvit import SparseFormerVisionModel, matching_processor, swap_vision_tower
from frugalvit.cli import main
from frugalvit.modeling.vision_tower import first_layer, match_channels_, record_projector_inputs
from tiny import IMAGE, SMALL, make_llava, make_paligemma, make_processor, make_tower, save_to_swap


@torch.no_grad()
def test_the_command_swaps_as_the_function_does(tmp_path, capsys):
    llava = make_llava()
    command = ["swap", *save_to_swap(tmp_path, llava), "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(command) == 0
    assert "7 tokens an image in the place of 64 patches, in bfloat16" in capsys.readouterr().out
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16 and model.model.vision_tower.latents.initial_rois.dtype == torch.float32
    inputs = AutoProcessor.from_pretrained(tmp_path / "out")(
        images=noise(), text="<image> what ?", return_tensors="pt"
    )
    tower = SparseFormerVisionModel.from_pretrained(tmp_path / "tower")
    expected = swap_vision_tower(llava, tower).bfloat16()(**inputs)
    # The tolerance allows rounding errors of bfloat16.
    torch.testing.assert_close(model(**inputs).logits, expected.logits, atol=0.02, rtol=0.1)


def test_unsupported_models_and_towers_are_refused(tmp_path, capsys):
    llava = make_llava()
    with pytest.raises(ValueError, match="Got a LlamaModel, expected a Llava"):
        swap_vision_tower(llava.model.language_model, make_tower(llava))
    with pytest.raises(ValueError, match="Got a CLIPVisionModel as vision model"):
        swap_vision_tower(llava, llava.model.vision_tower)
    with pytest.raises(ValueError, match="Got a ResNet as vision model"):
        swap_vision_tower(llava, timm.create_model("resnet10t"))
    make_tower(llava).save_pretrained(tmp_path / "tower")
    Qwen2_5_VLConfig().save_pretrained(tmp_path / "qwen")
    command = ["swap", "--model", str(tmp_path / "qwen"), "--vision-model", str(tmp_path / "tower")]
    assert main([*command, "--output", str(tmp_path / "out")]) == 1
    assert "is a qwen2_5_vl, expected one of llava" in capsys.readouterr().err


@torch.no_grad()
def test_a_tower_of_another_width_and_family_has_a_new_first_layer(tmp_path):
    llava = make_llava()
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_register_tokens": 2}
    dinov2 = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(image_size=32, patch_size=4, mlp_ratio=2, **sizes))
    tower = SparseFormerVisionModel.from_teacher(dinov2.eval(), 7, **SMALL)
    with pytest.raises(ValueError, match="has 48 channels, .* takes 64 channels.* frugalvit align-llava"):
        swap_vision_tower(llava, tower)
    model = swap_vision_tower(llava, tower, new_first_layer=True)
    projector, old = model.model.multi_modal_projector, llava.model.multi_modal_projector
    assert (projector.linear_1.in_features, old.linear_1.in_features) == (48, 64)
    assert torch.equal(projector.linear_2.weight, old.linear_2.weight)
    with pytest.raises(ValueError, match="of `model` takes 48 channels, .* of `original` takes 64 channels"):
        match_channels_(model, llava, [(torch.randn(1, 3, 32, 32), torch.randn(1, 3, 32, 32))])
    model.save_pretrained(tmp_path)
    processor = matching_processor(make_processor(llava), model)
    inputs = processor(images=noise(), text="<image> what is this ?", return_tensors="pt")
    # LLaVA uses the 2 registers like latent tokens.
    assert int((inputs["input_ids"] == IMAGE).sum()) == 7 + 2
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and torch.equal(loaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("make", [make_llava, make_paligemma])
@torch.no_grad()
def test_channels_are_matched(make):
    """The new first layer rescales each channel to the original tower's mean and standard deviation, and then applies
    the original layer."""
    original = make()
    before = {name: value.clone() for name, value in original.state_dict().items()}
    model = swap_vision_tower(original, make_tower(original))
    batches = [(torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32)) for _ in range(2)]
    match_channels_(model, original, batches)
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())

    def read(vlm, side):
        return torch.cat([record_projector_inputs(vlm, pair[side]).flatten(0, -2) for pair in batches])

    inputs = read(model, 0)
    expected = read(original, 1)
    normalized = (inputs - inputs.mean(0)) / inputs.std(0, correction=0)
    matched = normalized * expected.std(0, correction=0) + expected.mean(0)
    new, old = (first_layer(each.model.multi_modal_projector) for each in (model, original))
    torch.testing.assert_close(new(inputs), old(matched), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new(inputs).mean(0), old(expected).mean(0), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="`batches` is empty"):
        match_channels_(model, original, [])
