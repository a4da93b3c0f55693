"""LLaVA with a SparseFormer as its vision tower."""

import pytest
import torch
from processes import compute_without_frugalvit, run_without_frugalvit
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaProcessor,
    SiglipVisionConfig,
)

from drawn import noise
from frugalvit import (
    SparseFormerLlavaForConditionalGeneration,
    SparseFormerLlavaProcessor,
    matching_processor,
    swap_vision_tower,
)
from tiny import IMAGE, WORDS, make_llava, make_processor, make_tower


def count_image_tokens(inputs) -> int:
    return int((inputs["input_ids"] == IMAGE).sum())


def swapped(tokens=7, **fields):
    llava = make_llava(**fields)
    model = swap_vision_tower(llava, make_tower(llava, tokens))
    return model, matching_processor(make_processor(llava), model)


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
    # Two inherited blocks left after the penultimate: the state before the last block, without [CLS].
    states = tower(pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:]
    torch.testing.assert_close(torch.stack(list(features)), model.model.multi_modal_projector(states))
    assert model.config.image_seq_length == 7
    assert model.model.language_model is llava.model.language_model


@pytest.mark.parametrize(
    ("layers", "ours", "strategy"), [(-2, -2, "default"), (4, -3, "full"), ([-2, 6], [-2, -1], "full")]
)
@torch.no_grad()
def test_layers_are_counted_from_the_end_of_the_tower(layers, ours, strategy):
    model, processor = swapped(vision_feature_layer=layers, vision_feature_select_strategy=strategy)
    assert model.config.vision_feature_layer == ours
    inputs = processor(images=noise(), text="<image> what is this ?", return_tensors="pt")
    assert count_image_tokens(inputs) == 7 + (strategy == "full") == model.config.image_seq_length
    assert model(**inputs).logits.isfinite().all()


@pytest.mark.nightly
@torch.no_grad()
def test_a_siglips_tower_is_replaced_where_all_tokens_are_read():
    llava = make_llava(SiglipVisionConfig, vision_feature_layer=-1, vision_feature_select_strategy="full")
    tower = make_tower(llava)
    model = swap_vision_tower(llava, tower)
    processor = matching_processor(make_processor(llava), model)
    inputs = processor(images=noise(), text="<image> what is this ?", return_tensors="pt")
    assert count_image_tokens(inputs) == 7 == model.config.image_seq_length
    assert model(**inputs).logits.isfinite().all()
    (features,) = model.get_image_features(inputs["pixel_values"]).pooler_output
    states = tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(features, model.model.multi_modal_projector(states))
    # It has no [CLS] to leave out.
    with pytest.raises(Exception, match='"default"` leaves out .* this SparseFormer has none; choose "full"'):
        swap_vision_tower(make_llava(SiglipVisionConfig), tower)


@pytest.mark.parametrize("tokens", [1, 48])
@torch.no_grad()
def test_the_processor_inserts_as_many_tokens_as_the_tower_gives(tokens, tmp_path):
    model, processor = swapped(tokens)
    processor.save_pretrained(tmp_path)
    for made, size in ((processor, (48, 40)), (AutoProcessor.from_pretrained(tmp_path), (7, 90))):
        inputs = made(images=noise(size), text="what is <image> this ?", return_tensors="pt")
        assert count_image_tokens(inputs) == tokens
        assert model(**inputs).logits.shape == (1, tokens + 4, len(WORDS))


@torch.no_grad()
def test_batches_several_images_and_left_padding():
    model, processor = swapped()
    prompts = ["<image> what is this ?", "what is <image> and <image> ?"]
    images = [[noise(seed=0)], [noise(seed=1), noise(seed=2)]]
    batch = processor(images=images, text=prompts, padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0
    logits = model(**batch).logits
    for index, (prompt, pictures) in enumerate(zip(prompts, images, strict=True)):
        alone = model(**processor(images=pictures, text=prompt, return_tensors="pt")).logits
        torch.testing.assert_close(logits[index, -alone.shape[1] :], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("cache", [None, "static"])
def test_generates(cache):
    model, processor = swapped()
    inputs = processor(images=[noise(), noise(seed=1)], text=["<image> what ?"] * 2, return_tensors="pt")
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    answers = model.generate(**inputs, **options)
    # Greedy choice, step by step and without a cache.
    ids = inputs["input_ids"]
    with torch.no_grad():
        for _ in range(4):
            logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(answers, ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava") / "model"
    model, processor = swapped()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@torch.no_grad()
def test_a_saved_model_loads_with_and_without_the_package(folder, tmp_path):
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(model) is SparseFormerLlavaForConditionalGeneration
    assert not any(report.values())
    inputs = dict(AutoProcessor.from_pretrained(folder)(images=noise(), text="<image> what ?", return_tensors="pt"))
    expected = swapped()[0](**inputs).logits
    assert torch.equal(model(**inputs).logits, expected)
    for given in compute_without_frugalvit(tmp_path, folder, "AutoModelForImageTextToText", inputs):
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)


def test_the_loss_reaches_all_parts():
    model, processor = swapped()
    inputs = processor(images=noise(), text="<image> what is this ? cat", return_tensors="pt")
    labels = torch.where(inputs["input_ids"] == IMAGE, -100, inputs["input_ids"])
    model.train()(**inputs, labels=labels).loss.backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    for part in ("vision_tower.stem", "multi_modal_projector", "language_model.layers.0"):
        assert any(name.startswith(f"model.{part}") for name in learned)


# Tokens an image


COUNTS = [4, 6, 9]


def elastic(**fields):
    llava = make_llava(**fields)
    model = swap_vision_tower(llava, make_tower(llava, COUNTS[-1], elastic_token_counts=COUNTS))
    return model, matching_processor(make_processor(llava), model)


@pytest.mark.parametrize("strategy", ["default", "full"])
@torch.no_grad()
def test_each_image_of_a_prompt_has_tokens_of_its_own(strategy):
    model, processor = elastic(vision_feature_select_strategy=strategy)
    pictures = [noise(seed=seed) for seed in range(3)]
    text = ["what is <image> and <image> ?", "<image> what ?"]
    inputs = processor(
        images=[pictures[:2], pictures[2:]],
        text=text,
        num_image_tokens=[4, 9, 4],
        padding=True,
        return_tensors="pt",
    )
    assert inputs["num_image_tokens"].dtype == torch.int64 and inputs["num_image_tokens"].tolist() == [4, 9, 4]
    extra = strategy == "full"
    assert count_image_tokens(inputs) == 4 + 9 + 4 + 3 * extra
    # Each image's features in the place of its own tokens, one after the other.
    features = [
        model.get_image_features(inputs["pixel_values"][[index]], num_tokens=count).pooler_output[0]
        for index, count in enumerate([4, 9, 4])
    ]
    given = model.get_image_features(inputs["pixel_values"], num_image_tokens=inputs["num_image_tokens"])
    for one, alone in zip(given.pooler_output, features, strict=True):
        assert one.shape == alone.shape
        torch.testing.assert_close(one, alone)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    embeds[inputs["input_ids"] == IMAGE] = torch.cat(features)
    expected = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
    outputs = model(**inputs)
    torch.testing.assert_close(outputs.logits, expected)
    torch.testing.assert_close(torch.cat(outputs.image_outputs.pooler_output), torch.cat(features))


@pytest.mark.nightly
@pytest.mark.parametrize("beams", [1, 2])
def test_generates_with_the_tokens_that_are_chosen(beams):
    model, processor = elastic()
    prompts, images = ["<image> what ?", "<image> and <image> ?"], [[noise()], [noise(seed=1), noise(seed=2)]]
    options = {"max_new_tokens": 3, "do_sample": False, "num_beams": beams}
    inputs = processor(images=images, text=prompts, num_image_tokens=[9, 4, 6], padding=True, return_tensors="pt")
    answers = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    for prompt, own, counts, answer in zip(prompts, images, [[9], [4, 6]], answers, strict=True):
        alone = processor(images=own, text=prompt, num_image_tokens=counts, return_tensors="pt")
        assert torch.equal(model.generate(**alone, **options)[0, alone["input_ids"].shape[1] :], answer)


@torch.no_grad()
def test_tokens_that_are_set_are_saved(tmp_path):
    model, before = elastic()
    assert model.config.image_seq_length == 9
    model.set_num_tokens(4)
    assert model.config.image_seq_length == 4
    processor = matching_processor(before, model)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = SparseFormerLlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.config.image_seq_length == 4 and loaded.config.vision_config.num_latent_tokens == 9
    loaded_processor = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded_processor) is type(processor) is SparseFormerLlavaProcessor
    prompt = {"images": noise(), "text": "<image> what ?", "return_tensors": "pt"}
    for count, chosen in ((4, {}), (9, {"num_image_tokens": 9})):
        inputs = loaded_processor(**prompt, **chosen)
        assert count_image_tokens(inputs) == count
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    # Transformers' own class loads it, too, with the number that is set.
    assert count_image_tokens(LlavaProcessor.from_pretrained(tmp_path)(**prompt)) == 4
    model.set_num_tokens(None)
    assert model.config.image_seq_length == 9


def test_numbers_of_tokens_that_do_not_fit_are_refused():
    model, processor = elastic()
    prompt = {"images": [noise(), noise()], "text": "<image> and <image> ?", "return_tensors": "pt"}
    with pytest.raises(ValueError, match="has 1 numbers, .* each of the 2 images"):
        processor(**prompt, num_image_tokens=[4])
    with pytest.raises(ValueError, match="10"):
        model(**processor(**prompt, num_image_tokens=10))


def test_the_processor_loads_without_the_package(tmp_path):
    model, processor = elastic()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    run_without_frugalvit(tmp_path, "process", tmp_path / "model", tmp_path / "outputs")
    found = {name: int((ids == IMAGE).sum()) for name, ids in load_file(tmp_path / "outputs").items()}
    assert found == {"own": 4, "plain": 9}


def test_the_processor_prepares_images_as_the_old_one_and_pads_on_the_left():
    llava = make_llava()
    old = make_processor(llava)
    old.image_processor.image_mean = [0.1, 0.2, 0.3]
    old.image_processor.size = {"shortest_edge": 40}
    old.tokenizer.padding_side = "right"
    new = matching_processor(old, swap_vision_tower(llava, make_tower(llava)))
    prompt = {"images": noise((75, 40)), "text": "<image>", "return_tensors": "pt"}
    assert torch.equal(new(**prompt)["pixel_values"], old(**prompt)["pixel_values"])
    assert (old.tokenizer.padding_side, new.tokenizer.padding_side) == ("right", "left")
    smaller = swap_vision_tower(llava, make_tower(llava, image_size=16))
    assert matching_processor(old, smaller)(**prompt)["pixel_values"].shape == (1, 3, 16, 16)
