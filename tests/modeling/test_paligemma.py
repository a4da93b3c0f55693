"""PaliGemma with a SparseFormer as its vision tower."""

import json

import pytest
import torch
from frugalvit_cli import main
from processes import compute_without_frugalvit
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    GemmaConfig,
)

from drawn import noise
from frugalvit import (
    SparseFormerPaliGemmaForConditionalGeneration,
    matching_processor,
    swap_vision_tower,
)
from frugalvit.common.loading import load_vision_model
from tiny import IMAGE, make_paligemma, make_paligemma_processor, make_tower, save_to_swap


@pytest.fixture(scope="module")
def paligemma():
    return make_paligemma()


@pytest.fixture
def swapped(paligemma):
    model = swap_vision_tower(paligemma, make_tower(paligemma))
    return model, matching_processor(make_paligemma_processor(), model)


def ask(processor, text="<image>what is this ?", images=1) -> dict:
    pictures = [[noise(seed=seed)] for seed in range(images)]
    inputs = dict(processor(images=pictures, text=[text] * images, return_tensors="pt"))
    # Those of a prompt without an answer.
    assert (inputs.pop("labels") == -100).all()
    return inputs


@torch.no_grad()
def test_the_language_model_reads_the_sparseformers_tokens():
    paligemma = make_paligemma(GemmaConfig)
    tower = make_tower(paligemma)
    text = torch.tensor([[2, 3, 4, 6]])
    before = paligemma(input_ids=text).logits
    model = swap_vision_tower(paligemma, tower)
    assert torch.equal(model(input_ids=text).logits, before)
    pixel_values = torch.randn(2, 3, 32, 32)
    features = model.get_image_features(pixel_values).pooler_output
    expected = model.model.multi_modal_projector(tower(pixel_values).last_hidden_state)
    torch.testing.assert_close(features, expected)
    assert model.model.language_model is paligemma.model.language_model
    assert features.shape[1] == 7 == model.config.image_seq_length
    model.set_num_tokens(4)
    inputs = ask(matching_processor(make_paligemma_processor(), model))
    assert int((inputs["input_ids"] == IMAGE).sum()) == 4 == model.config.image_seq_length
    assert model(**inputs).logits.isfinite().all()


@pytest.mark.nightly
@torch.no_grad()
def test_generates_as_without_a_cache(swapped):
    model, processor = swapped
    inputs = ask(processor, images=2)
    answers = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    ids, kinds = inputs["input_ids"], inputs["token_type_ids"]
    for _ in range(4):
        logits = model(input_ids=ids, token_type_ids=kinds, pixel_values=inputs["pixel_values"]).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        kinds = torch.cat([kinds, torch.ones_like(kinds[:, :1])], dim=1)
    assert torch.equal(answers, ids)


@torch.no_grad()
def test_a_saved_model_loads_with_and_without_the_package(swapped, tmp_path):
    model, processor = swapped
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    loaded, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is SparseFormerPaliGemmaForConditionalGeneration
    assert not any(report.values())
    inputs = ask(AutoProcessor.from_pretrained(folder))
    expected = model(**inputs).logits
    assert torch.equal(loaded(**inputs).logits, expected)
    assert type(AutoModel.from_pretrained(folder)).__name__ == "SparseFormerPaliGemmaModel"
    for given in compute_without_frugalvit(tmp_path, folder, "AutoModelForImageTextToText", inputs):
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)


@pytest.mark.nightly
@torch.no_grad()
def test_it_is_bootstrapped_from(paligemma, tmp_path):
    """The tower has no head, so the mean of the tokens that the language model reads is aligned."""
    save_to_swap(tmp_path, paligemma)
    teacher, _ = load_vision_model(tmp_path / "paligemma")
    pixel_values = torch.randn(1, 3, 32, 32)
    states = paligemma.model.vision_tower(pixel_values).last_hidden_state
    torch.testing.assert_close(teacher(pixel_values).last_hidden_state, states)
    command = ["bootstrap", "--teacher", str(tmp_path / "paligemma"), "--num_tokens", "5"]
    command += ["--train_split", "train[:64]", "--eval_split", "test[:16]", "--num_train_epochs", "1"]
    command += ["--config_overrides", "stem_channels=8,num_mixed_points=4", "--output_dir", str(tmp_path / "student")]
    with torch.enable_grad():
        assert main(command) == 0
    assert json.loads((tmp_path / "student" / "config.json").read_text())["pooling"] == "mean"
    assert swap_vision_tower(paligemma, load_vision_model(tmp_path / "student")[0]).config.image_seq_length == 5
