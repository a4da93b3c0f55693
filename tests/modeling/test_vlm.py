"""Models that count on a grid of patches, with a SparseFormer as their vision tower."""

import json

import pytest
import torch
from frugalvit_cli import main
from processes import compute_without_frugalvit
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor
from vlms import ROWS, SIZE, VLM, VLMS

import frugalvit
from drawn import noise
from frugalvit import SparseFormerBackbone, match_channels_, matching_processor, swap_vision_tower
from frugalvit.common.exported import parts_of
from frugalvit.common.loading import load_vision_model
from frugalvit.common.views import ImageFormat
from tiny import make_llava, make_tower


@pytest.fixture(params=VLMS)
def vlm(request) -> VLM:
    return VLMS[request.param]


def ask(processor, vlm: VLM, size=(75, 40)) -> dict:
    """A prompt with an image of that width and height, which is cut into tiles where the processor does so."""
    return processor(images=noise(size), text=f"{vlm.prompt}what is this ?", return_tensors="pt")


@pytest.fixture
def processor(vlm):
    return vlm.make_processor()


def swapped(vlm: VLM, image_grid: int | None = None):
    return swap_vision_tower(vlm.model, vlm.make_tower(), image_grid)


@torch.no_grad()
def test_with_a_token_for_each_patch_it_answers_as_before(vlm, processor):
    model = swap_vision_tower(vlm.model, vlm.inherit())
    inputs = ask(processor, vlm)
    expected = vlm.model(**inputs).logits
    given = model(**ask(matching_processor(processor, model), vlm)).logits
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-3)
    answers = [each.generate(**inputs, max_new_tokens=4, do_sample=False) for each in (model, vlm.model)]
    assert torch.equal(*answers)


@torch.no_grad()
def test_few_tokens_give_what_the_backbone_gives_each_cell(vlm):
    tower, model = vlm.make_tower(), swapped(vlm)
    new = model.model.vision_tower
    pixel_values = torch.randn(2, 3, SIZE, SIZE)
    backbone = SparseFormerBackbone(tower.config).eval()
    backbone.sparseformer.load_state_dict(tower.state_dict())
    outputs = new(pixel_values, output_hidden_states=True)
    cells = backbone(pixel_values).feature_maps[-1].flatten(2).mT
    torch.testing.assert_close(outputs.last_hidden_state, cells)
    assert outputs.hidden_states[-2].shape == (2, ROWS**2, 32)
    assert next(vlm.model.lm_head.parameters()) is next(model.lm_head.parameters())
    model.set_num_tokens(4)
    assert new.tower(pixel_values).last_hidden_state.shape[1] == 4 + tower.config.num_prefix_tokens
    assert new(pixel_values).last_hidden_state.shape == outputs.last_hidden_state.shape


@pytest.mark.parametrize("image_grid", [None, 4])
@torch.no_grad()
def test_the_processor_inserts_as_many_tokens_as_the_grid_makes(image_grid, vlm, processor, tmp_path):
    model = swapped(vlm, image_grid)
    made = matching_processor(processor, model)
    tokens = ((image_grid or ROWS) // vlm.cells) ** 2
    assert model.config.image_seq_length == tokens
    made.save_pretrained(tmp_path)
    for each in (made, AutoProcessor.from_pretrained(tmp_path), matching_processor(made, model)):
        inputs = ask(each, vlm)
        assert model(**inputs).logits.isfinite().all()
    before = ask(processor, vlm)
    # Tiles are cut as before; of several, a new line follows each row.
    assert inputs["pixel_values"].shape == before["pixel_values"].shape
    # What was given stays as it was.
    assert vlm.model(**before).logits.isfinite().all()


@torch.no_grad()
def test_a_saved_model_loads_with_and_without_the_package(vlm, processor, tmp_path):
    model, folder = swapped(vlm, 4), tmp_path / "model"
    model.save_pretrained(folder)
    processor = matching_processor(processor, model)
    processor.save_pretrained(folder)
    loaded, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is type(model) is getattr(frugalvit, f"SparseFormer{vlm.name}ForConditionalGeneration")
    assert not any(report.values())
    inputs = dict(ask(AutoProcessor.from_pretrained(folder), vlm))
    expected = model(**inputs).logits
    assert torch.equal(loaded(**inputs).logits, expected)
    assert type(AutoModel.from_pretrained(folder)).__name__ == f"SparseFormer{vlm.name}Model"
    for given in compute_without_frugalvit(tmp_path, folder, "AutoModelForImageTextToText", inputs):
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)


@pytest.mark.nightly
@torch.no_grad()
def test_the_command_swaps_as_the_function_does(vlm, processor, tmp_path, capsys):
    folder, out = tmp_path / "vlm", tmp_path / "out"
    vlm.model.save_pretrained(folder)
    processor.save_pretrained(folder)
    # The tower is what a student is bootstrapped from, given a tile at a time.
    teacher, image_processor = load_vision_model(folder)
    pixel_values = torch.randn(1, 3, SIZE, SIZE)
    torch.testing.assert_close(
        teacher(pixel_values).last_hidden_state, vlm.model.model.vision_tower(pixel_values).last_hidden_state
    )
    image_format = ImageFormat.from_processor(image_processor)
    assert image_format.size == (SIZE, SIZE)
    assert image_format.mean == pytest.approx((0.4, 0.5, 0.6))
    vlm.make_tower().save_pretrained(tmp_path / "tower")
    command = ["swap", "--model", str(folder), "--vision-model", str(tmp_path / "tower"), "--output", str(out)]
    assert main([*command, "--image-grid", "4"]) == 0
    said = capsys.readouterr().out
    assert "7 tokens instead of 64 patches make a grid of 4 x 4" in said
    assert f"the language model reads {16 // vlm.cells**2} tokens" in said
    model, made = AutoModelForImageTextToText.from_pretrained(out), AutoProcessor.from_pretrained(out)
    inputs = ask(made, vlm)
    torch.testing.assert_close(model(**inputs).logits, swapped(vlm, 4)(**inputs).logits)
    assert main(["info", str(out), "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)[0]["tokens"]
        == 7 + model.config.vision_config.tower_config.num_prefix_tokens
    )
    with pytest.raises(ValueError, match="Export the SparseFormer"):
        parts_of(model)


@pytest.mark.nightly
@torch.no_grad()
def test_a_model_that_is_shared_out_is_swapped_as_one_that_is_not(tmp_path):
    vlm = VLMS["Gemma 3"]
    vlm.model.save_pretrained(tmp_path)
    places = {"model.language_model": "disk", "lm_head": "disk"}
    places |= dict.fromkeys(("model.vision_tower", "model.multi_modal_projector"), "cpu")
    shared_out = type(vlm.model).from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    model, expected = (swap_vision_tower(each.eval(), vlm.make_tower(), 4) for each in (shared_out, vlm.model))
    inputs = ask(matching_processor(vlm.make_processor(), model), vlm)
    assert torch.equal(model(**inputs).logits, expected(**inputs).logits)
    assert model.hf_device_map["model.vision_tower"] == torch.device("cpu")


def test_what_does_not_fit_is_refused():
    vlm = VLMS["Gemma 3"]
    tower, model = vlm.make_tower(), swapped(vlm)
    with pytest.raises(ValueError, match="`image_grid` is 3, expected at most 8, in steps of 2"):
        swap_vision_tower(vlm.model, tower, 3)
    with pytest.raises(ValueError, match="gemma3 has 32 channels, .* 64; bootstrap it"):
        swap_vision_tower(vlm.model, make_tower(make_llava()))
    with pytest.raises(ValueError, match="Got a SparseFormerGemma3For.*, expected a Llava-"):
        swap_vision_tower(model, tower)
    with pytest.raises(ValueError, match="Channels are matched in a LLaVA 1.5"):
        match_channels_(model, vlm.model, [])
