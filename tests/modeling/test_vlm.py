"""Tests of Gemma 3, LLaVA-OneVision and PaliGemma with a SparseFormer as vision tower."""

import pytest
import torch
from processes import compute_without_frugalvit
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor
from vlms import IMAGE, ROWS, SIZE, VLM, VLMS

import frugalvit
import tiny
from drawn import noise
from frugalvit import SparseFormerBackbone, matching_processor, swap_vision_tower
from frugalvit.cli import main
from frugalvit.training.loading import load_model
from tiny import make_paligemma, make_paligemma_processor, make_tower


@pytest.fixture(params=["Gemma 3", pytest.param("LLaVA-OneVision", marks=pytest.mark.nightly)])
def vlm(request) -> VLM:
    return VLMS[request.param]


@pytest.fixture
def processor(vlm):
    return vlm.make_processor()


def make_inputs(processor, vlm: VLM, size=(75, 40)) -> dict:
    """Return the inputs of a prompt with an image of `size` (width, height). Some processors cut images into tiles."""
    return processor(images=noise(size), text=f"{vlm.prompt}what is this ?", return_tensors="pt")


@torch.no_grad()
def test_with_a_token_for_each_patch_answers_do_not_change(vlm, processor):
    model = swap_vision_tower(vlm.model, vlm.inherit())
    inputs = make_inputs(processor, vlm)
    expected = vlm.model(**inputs).logits
    given = model(**make_inputs(matching_processor(processor, model), vlm)).logits
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-3)
    answers = [each.generate(**inputs, max_new_tokens=4, do_sample=False) for each in (model, vlm.model)]
    assert torch.equal(*answers)


@torch.no_grad()
def test_features_of_few_tokens_equal_the_backbone_s_feature_map(vlm):
    tower = vlm.make_tower()
    model = swap_vision_tower(vlm.model, vlm.make_tower())
    new = model.model.vision_tower
    pixel_values = torch.randn(2, 3, SIZE, SIZE)
    backbone = SparseFormerBackbone(tower.config).eval()
    backbone.sparseformer.load_state_dict(tower.state_dict())
    outputs = new(pixel_values, output_hidden_states=True)
    torch.testing.assert_close(outputs.last_hidden_state, backbone(pixel_values).feature_maps[-1].flatten(2).mT)
    assert outputs.hidden_states[-2].shape == (2, ROWS**2, 32)
    model.set_num_tokens(4)
    assert new.tower(pixel_values).last_hidden_state.shape[1] == 4 + tower.config.num_prefix_tokens
    assert new(pixel_values).last_hidden_state.shape == outputs.last_hidden_state.shape


@torch.no_grad()
def test_the_command_swaps_as_the_function_does(vlm, processor, tmp_path, capsys):
    vlm.model.save_pretrained(tmp_path / "vlm")
    processor.save_pretrained(tmp_path / "vlm")
    vlm.make_tower().save_pretrained(tmp_path / "tower")
    command = ["swap", "--model", str(tmp_path / "vlm"), "--vision-model", str(tmp_path / "tower")]
    assert main([*command, "--output", str(tmp_path / "out"), "--image-grid", "4"]) == 0
    assert "7 tokens in the place of 64 patches, placed on a grid of 4 x 4" in capsys.readouterr().out
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(loaded) is getattr(frugalvit, f"SparseFormer{vlm.name}ForConditionalGeneration")
    assert type(AutoModel.from_pretrained(tmp_path / "out")).__name__ == f"SparseFormer{vlm.name}Model"
    assert not any(report.values()) and loaded.config.image_seq_length == (4 // vlm.cells) ** 2
    inputs = dict(make_inputs(AutoProcessor.from_pretrained(tmp_path / "out"), vlm))
    assert int((inputs["input_ids"] == IMAGE).sum()) >= loaded.config.image_seq_length
    expected = loaded(**inputs).logits
    torch.testing.assert_close(swap_vision_tower(vlm.model, vlm.make_tower(), 4)(**inputs).logits, expected)
    for given in compute_without_frugalvit(tmp_path, tmp_path / "out", "AutoModelForImageTextToText", inputs):
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)
    tower, image_processor = load_model(tmp_path / "out", "image-feature-extraction", "cpu")
    pixel_values = image_processor(noise((75, 40)), return_tensors="pt")["pixel_values"]
    expected = vlm.make_tower()(pixel_values).last_hidden_state
    torch.testing.assert_close(tower(pixel_values).last_hidden_state, expected)


def make_paligemma_inputs(processor) -> dict:
    inputs = dict(processor(images=[[noise()]], text=["<image>what is this ?"], return_tensors="pt"))
    # The processor adds labels. All labels are -100 (ignored), because the prompt has no answer.
    assert (inputs.pop("labels") == -100).all()
    return inputs


@torch.no_grad()
def test_paligemma_reads_the_sparseformers_tokens_also_when_loaded(tmp_path):
    paligemma = make_paligemma()
    tower, text = make_tower(paligemma), torch.tensor([[2, 3, 4, 6]])
    before = paligemma(input_ids=text).logits
    model = swap_vision_tower(paligemma, tower)
    assert torch.equal(model(input_ids=text).logits, before)
    pixel_values = torch.randn(2, 3, 32, 32)
    expected = model.model.multi_modal_projector(tower(pixel_values).last_hidden_state)
    torch.testing.assert_close(model.get_image_features(pixel_values).pooler_output, expected)
    model.set_num_tokens(4)
    model.save_pretrained(tmp_path / "model")
    matching_processor(make_paligemma_processor(), model).save_pretrained(tmp_path / "model")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    inputs = make_paligemma_inputs(AutoProcessor.from_pretrained(tmp_path / "model"))
    assert int((inputs["input_ids"] == tiny.IMAGE).sum()) == 4 == loaded.config.image_seq_length
    expected = model(**inputs).logits
    assert torch.equal(loaded(**inputs).logits, expected)
    for given in compute_without_frugalvit(tmp_path, tmp_path / "model", "AutoModelForImageTextToText", inputs):
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)
