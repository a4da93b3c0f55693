"""Tests of LLaVA with a SparseFormer as its vision tower, in Transformers and in LLaVA's original code base."""

from types import SimpleNamespace

import pytest
import torch
from processes import compute_without_frugalvit, run_without_frugalvit
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import frugalvit
from drawn import noise
from frugalvit import (
    SparseFormerLlavaForConditionalGeneration,
    SparseFormerLlavaProcessor,
    matching_processor,
    swap_vision_tower,
)
from frugalvit.modeling.llava_tower import SparseFormerVisionTower
from frugalvit.training.loading import load_model
from tiny import IMAGE, WORDS, make_llava, make_processor, make_tower


COUNTS = [4, 6, 9]


def count_image_tokens(inputs) -> int:
    return int((inputs["input_ids"] == IMAGE).sum())


def swapped(tokens=7, tower=(), **fields):
    llava = make_llava(**fields)
    model = swap_vision_tower(llava, make_tower(llava, tokens, **dict(tower)))
    return model, matching_processor(make_processor(llava), model)


def elastic(**fields):
    return swapped(COUNTS[-1], {"elastic_token_counts": COUNTS}, **fields)


@torch.no_grad()
def test_the_language_model_reads_the_sparseformers_tokens():
    llava = make_llava()
    tower = make_tower(llava)
    text = torch.tensor([[2, 3, 4, 6]])
    before = llava(input_ids=text).logits
    model = swap_vision_tower(llava, tower)
    assert torch.equal(model(input_ids=text).logits, before)
    pixel_values = torch.randn(2, 3, 32, 32)
    features = model.get_image_features(pixel_values).pooler_output
    # LLaVA leaves out [CLS]. It uses the second-to-last hidden state, which is the input of the last block.
    states = tower(pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:]
    torch.testing.assert_close(torch.stack(list(features)), model.model.multi_modal_projector(states))
    assert model.config.image_seq_length == 7
    assert model.model.language_model is llava.model.language_model


@pytest.mark.parametrize(
    ("layers", "expected", "strategy"), [(-2, -2, "default"), (4, -3, "full"), ([-2, 6], [-2, -1], "full")]
)
@torch.no_grad()
def test_layers_are_counted_from_the_end_of_the_tower(layers, expected, strategy, tmp_path):
    model, processor = swapped(vision_feature_layer=layers, vision_feature_select_strategy=strategy)
    assert model.config.vision_feature_layer == expected
    processor.save_pretrained(tmp_path)
    for each, size in ((processor, (48, 40)), (AutoProcessor.from_pretrained(tmp_path), (7, 90))):
        inputs = each(images=noise(size), text="<image> what is this ?", return_tensors="pt")
        assert count_image_tokens(inputs) == 7 + (strategy == "full") == model.config.image_seq_length
        assert model(**inputs).logits.shape == (1, inputs["input_ids"].shape[1], len(WORDS))


@torch.no_grad()
def test_a_saved_model_loads_with_and_without_the_package(tmp_path):
    before, processor = elastic()
    before.set_num_tokens(6)
    matching_processor(processor, before).save_pretrained(tmp_path / "model")
    before.save_pretrained(tmp_path / "model")
    model, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert type(model) is SparseFormerLlavaForConditionalGeneration and not any(report.values())
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    assert type(processor) is SparseFormerLlavaProcessor
    inputs = dict(processor(images=noise(), text="<image> what ?", return_tensors="pt"))
    assert count_image_tokens(inputs) == 6
    expected = before(**inputs).logits
    assert torch.equal(model(**inputs).logits, expected)
    tower, _ = load_model(tmp_path / "model", "image-feature-extraction", "cpu")
    torch.testing.assert_close(tower.state_dict(), before.model.vision_tower.state_dict())
    found = compute_without_frugalvit(tmp_path, tmp_path / "model", "AutoModelForImageTextToText", inputs)
    for given in found:
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)
    run_without_frugalvit(tmp_path, "process", tmp_path / "model", tmp_path / "prompts")
    found = {name: int((ids == IMAGE).sum()) for name, ids in load_file(tmp_path / "prompts").items()}
    assert found == {"own": 4, "plain": 6}


@pytest.mark.parametrize("strategy", ["default", "full"])
@torch.no_grad()
def test_each_image_of_a_prompt_can_have_another_number_of_tokens(strategy):
    model, processor = elastic(vision_feature_select_strategy=strategy)
    pictures = [noise(seed=seed) for seed in range(3)]
    prompt = {"images": [pictures[:2], pictures[2:]], "text": ["what is <image> and <image> ?", "<image> what ?"]}
    inputs = processor(**prompt, num_image_tokens=[4, 9, 4], padding=True, return_tensors="pt")
    assert inputs["num_image_tokens"].tolist() == [4, 9, 4]
    assert count_image_tokens(inputs) == 4 + 9 + 4 + 3 * (strategy == "full")
    # Image features replace the embeddings of the image tokens, in the order of the images.
    features = [
        model.get_image_features(inputs["pixel_values"][[index]], num_tokens=count).pooler_output[0]
        for index, count in enumerate([4, 9, 4])
    ]
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    embeds[inputs["input_ids"] == IMAGE] = torch.cat(features)
    expected = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
    torch.testing.assert_close(model(**inputs).logits, expected)
    assert "num_image_tokens" not in processor(**prompt, padding=True)
    with pytest.raises(ValueError, match="has 1 numbers, .* each of the 3 images"):
        processor(**prompt, num_image_tokens=[4])
    with pytest.raises(ValueError, match="tokens do not match, .* to the processor of the model"):
        model(**processor(**prompt, padding=True, return_tensors="pt"), num_image_tokens=4)


def test_the_shipped_model_answers_prompts_of_two_lengths_in_a_batch():
    folder = frugalvit.checkpoint_path("cifar10-sparseformer-llava")
    model, processor = (each.from_pretrained(folder) for each in (AutoModelForImageTextToText, AutoProcessor))

    def answers(images: list, prompts: list[str]) -> list[int]:
        inputs = processor(images=images, text=prompts, padding=True, return_tensors="pt")
        return model.generate(**inputs, max_new_tokens=1, do_sample=False)[:, -1].tolist()

    images = [noise((4, 4), seed).resize((32, 32)) for seed in range(8)]
    prompts = 4 * ["<image> what is this ?", "<image> what is this ? what is this ?"]
    alone = [answers([image], [prompt]) for image, prompt in zip(images, prompts, strict=True)]
    assert answers(images, prompts) == sum(alone, [])


@pytest.mark.parametrize("feature", ["patch", "cls_patch"])
@torch.no_grad()
def test_the_tower_for_the_original_code_base_returns_the_selected_features(feature, tmp_path):
    weights = make_tower(make_llava(), 9, elastic_token_counts=[4, 9])
    weights.set_num_tokens(4)
    weights.save_pretrained(tmp_path)
    arguments = SimpleNamespace(mm_vision_select_layer=-2, mm_vision_select_feature=feature)
    tower = SparseFormerVisionTower(str(tmp_path), arguments, delay_load=True)
    assert (tower.is_loaded, tower.hidden_size, tower.num_patches) == (False, 64, 4)
    tower.load_model()
    assert tower.is_loaded and not any(parameter.requires_grad for parameter in tower.parameters())
    pixel_values = tower.image_processor.preprocess(noise(), return_tensors="pt")["pixel_values"]
    assert tower(pixel_values.half()).dtype == torch.float16
    states = weights(pixel_values, output_hidden_states=True).hidden_states[-2]
    torch.testing.assert_close(tower(pixel_values), states[:, int(feature == "patch") :])
    assert torch.equal(tower([pixel_values[0]] * 2)[1], tower(pixel_values))
    arguments.mm_vision_select_feature = "cls"
    with pytest.raises(ValueError, match="mm_vision_select_feature is 'cls', expected"):
        SparseFormerVisionTower(str(tmp_path), arguments)
