"""LLaVA with a SparseFormer as its vision tower, of Transformers and of the original code base."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from processes import compute_without_frugalvit, run_without_frugalvit
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionConfig,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    SiglipVisionConfig,
    Trainer,
    TrainingArguments,
)

import frugalvit
from frugalvit import (
    SparseFormerLlavaConfig,
    SparseFormerLlavaForConditionalGeneration,
    SparseFormerVisionModel,
    matching_processor,
    swap_vision_tower,
)
from frugalvit.cli import main
from frugalvit.common.loading import load_vision_model
from frugalvit.modeling.image_tokens import projected_tokens
from frugalvit.modeling.llava_tower import SparseFormerVisionTower
from frugalvit.modeling.modeling_sparseformer_llava import SparseFormerLlavaProcessor
from frugalvit.modeling.swap import (
    _first_linear,
    _read_by_projector,
    check_image_tokens,
    input_device,
    match_channels_,
)
from tiny import IMAGE, SMALL, WORDS, make_llava, make_paligemma, make_processor, make_tower


def picture(size=(48, 40), seed=0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


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


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize(
    ("layers", "ours"), [(-2, -2), (-1, -1), (4, -3), (6, -1), ([-2, 6], [-2, -1])], ids=["-2", "-1", "4", "6", "two"]
)
@torch.no_grad()
def test_layers_are_counted_from_the_end_of_the_tower(layers, ours, strategy):
    model, processor = swapped(vision_feature_layer=layers, vision_feature_select_strategy=strategy)
    assert model.config.vision_feature_layer == ours
    inputs = processor(images=picture(), text="<image> what is this ?", return_tensors="pt")
    assert int((inputs["input_ids"] == IMAGE).sum()) == 7 + (strategy == "full") == model.config.image_seq_length
    assert model(**inputs).logits.isfinite().all()


@torch.no_grad()
def test_a_siglips_tower_is_replaced_where_all_tokens_are_read():
    llava = make_llava(SiglipVisionConfig, vision_feature_layer=-1, vision_feature_select_strategy="full")
    tower = make_tower(llava)
    model = swap_vision_tower(llava, tower)
    processor = matching_processor(make_processor(llava), model)
    inputs = processor(images=picture(), text="<image> what is this ?", return_tensors="pt")
    assert int((inputs["input_ids"] == IMAGE).sum()) == 7 == model.config.image_seq_length
    assert model(**inputs).logits.isfinite().all()
    (features,) = model.get_image_features(inputs["pixel_values"]).pooler_output
    states = tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(features, model.model.multi_modal_projector(states))
    # It has no [CLS] to leave out.
    with pytest.raises(Exception, match='"default"` leaves out .* this SparseFormer has none; choose "full"'):
        swap_vision_tower(make_llava(SiglipVisionConfig), tower)


@pytest.mark.parametrize("tokens", [1, 5, 16, 48])
@pytest.mark.parametrize("size", [(48, 40), (7, 90), (32, 32)])
@torch.no_grad()
def test_the_processor_inserts_as_many_tokens_as_the_tower_gives(tokens, size, tmp_path):
    model, processor = swapped(tokens)
    processor.save_pretrained(tmp_path)
    for made in (processor, AutoProcessor.from_pretrained(tmp_path)):
        inputs = made(images=picture(size), text="what is <image> this ?", return_tensors="pt")
        assert int((inputs["input_ids"] == IMAGE).sum()) == tokens
        assert model(**inputs).logits.shape == (1, tokens + 4, len(WORDS))


def test_a_processor_that_does_not_fit_is_noticed_when_the_pair_is_built():
    model, _ = swapped()
    with pytest.raises(ValueError, match=r"inserts 64 tokens .* makes 7 of it"):
        check_image_tokens(make_processor(model), model)


@torch.no_grad()
def test_batches_several_images_and_left_padding():
    model, processor = swapped()
    prompts = ["<image> what is this ?", "what is <image> and <image> ?"]
    images = [[picture(seed=0)], [picture(seed=1), picture(seed=2)]]
    batch = processor(images=images, text=prompts, padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0
    logits = model(**batch).logits
    for index, (prompt, pictures) in enumerate(zip(prompts, images, strict=True)):
        alone = model(**processor(images=pictures, text=prompt, return_tensors="pt")).logits
        torch.testing.assert_close(logits[index, -alone.shape[1] :], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generates(cache):
    model, processor = swapped()
    inputs = processor(images=[picture(), picture(seed=1)], text=["<image> what ?"] * 2, return_tensors="pt")
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    answers = model.generate(**inputs, **options)
    # Greedy choice, step by step and without a cache.
    ids = inputs["input_ids"]
    with torch.no_grad():
        for _ in range(4):
            logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(answers, ids)


@torch.no_grad()
def test_compiles():
    model, processor = swapped()
    inputs = processor(images=picture(), text="<image> what ?", return_tensors="pt")
    expected = model(**inputs).logits
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**inputs).logits, expected, rtol=1e-4, atol=1e-4)


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
    inputs = dict(AutoProcessor.from_pretrained(folder)(images=picture(), text="<image> what ?", return_tensors="pt"))
    expected = swapped()[0](**inputs).logits
    assert torch.equal(model(**inputs).logits, expected)
    for given in compute_without_frugalvit(tmp_path, folder, "AutoModelForImageTextToText", inputs):
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)


def test_trains(tmp_path):
    model, processor = swapped()
    inputs = processor(images=picture(), text="<image> what is this ? cat", return_tensors="pt")
    example = {name: tensor[0] for name, tensor in inputs.items() if name != "pixel_values"}
    labels = torch.where(example["input_ids"] == IMAGE, -100, example["input_ids"])
    example = {**example, "pixel_values": inputs["pixel_values"][0], "labels": labels}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = TrainingArguments(
        *(str(tmp_path),),
        max_steps=8,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=[example] * 8)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < 0.7 * losses[0]
    for part in ("vision_tower.stem", "multi_modal_projector", "language_model.layers.0"):
        assert any(not torch.equal(before[n], t) for n, t in model.state_dict().items() if f"model.{part}" in n)


@torch.no_grad()
def test_transformers_own_llava_takes_a_sparseformer(tmp_path):
    language = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = frugalvit.SparseFormerConfig.from_variant("clip-base-49-224", num_hidden_layers=2, num_latent_tokens=5)
    text = LlamaConfig(vocab_size=len(WORDS), **language)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    model = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[2, *[IMAGE] * 5, 3]])
    pixel_values = torch.randn(1, 3, 64, 64)
    inputs = {"input_ids": ids, "pixel_values": pixel_values}
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_the_tower_takes_the_old_ones_precision():
    llava = make_llava().to(torch.bfloat16)
    model = swap_vision_tower(llava, make_tower(make_llava()))
    tower = model.model.vision_tower
    assert tower.stem.convolution.weight.dtype == torch.bfloat16
    assert tower.latents.initial_rois.dtype == torch.float32
    inputs = {"input_ids": torch.tensor([[*[IMAGE] * 7, 3]]), "pixel_values": torch.randn(1, 3, 32, 32)}
    assert model(**inputs).logits.isfinite().all()


def test_what_does_not_fit_is_refused():
    llava = make_llava()
    tower = make_tower(llava)
    with pytest.raises(ValueError, match="Got a LlamaModel, expected a LlavaForConditionalGeneration"):
        swap_vision_tower(llava.model.language_model, tower)
    with pytest.raises(ValueError, match="`image_grid` is 4, but a LlavaFor.* any number; `set_num_tokens` chooses"):
        swap_vision_tower(llava, tower, image_grid=4)
    with pytest.raises(ValueError, match="Got a CLIPVisionModel as vision model"):
        swap_vision_tower(llava, llava.model.vision_tower)
    wide = frugalvit.SparseFormerVisionModel(
        frugalvit.SparseFormerConfig(num_latent_tokens=4, hidden_size=128, num_hidden_layers=2)
    )
    with pytest.raises(ValueError, match=r"takes 64 channels, the vision model gives 128 \(1 x 128\)"):
        swap_vision_tower(llava, wide)
    with pytest.raises(Exception, match="this SparseFormer has none; choose"):
        swap_vision_tower(llava, make_tower(llava, use_cls_token=False, pooling="mean"))
    with pytest.raises(Exception, match=r"asks for -6, the SparseFormer has 5 .* -5 to 4"):
        swap_vision_tower(make_llava(vision_feature_layer=-6), tower)
    with pytest.raises(Exception, match="is a CLIPVisionConfig, expected a SparseFormerConfig"):
        SparseFormerLlavaConfig(vision_config=CLIPVisionConfig())


# Tokens an image


COUNTS = [4, 6, 9]


def elastic(**fields):
    llava = make_llava(**fields)
    model = swap_vision_tower(llava, make_tower(llava, COUNTS[-1], elastic_token_counts=COUNTS))
    return model, matching_processor(make_processor(llava), model)


def count_placeholders(inputs) -> int:
    return int((inputs["input_ids"] == IMAGE).sum())


@pytest.mark.parametrize("strategy", ["default", "full"])
@torch.no_grad()
def test_each_image_of_a_prompt_has_tokens_of_its_own(strategy):
    model, processor = elastic(vision_feature_select_strategy=strategy)
    pictures = [picture(seed=seed) for seed in range(3)]
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
    assert count_placeholders(inputs) == 4 + 9 + 4 + 3 * extra
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
    torch.testing.assert_close(projected_tokens(outputs), torch.cat(features))


@torch.no_grad()
def test_one_number_is_that_of_all_images():
    model, processor = elastic()
    images, text = [picture(), picture(seed=1)], ["<image> what ?"] * 2
    inputs = processor(images=images, text=text, num_image_tokens=6, return_tensors="pt")
    assert inputs["num_image_tokens"].tolist() == [6, 6] and count_placeholders(inputs) == 12
    logits = model(**inputs).logits
    inputs.pop("num_image_tokens")
    assert torch.equal(model(**inputs, num_image_tokens=6).logits, logits)
    # Where nothing is chosen, nothing is returned, and compiled models stay as they are.
    assert "num_image_tokens" not in processor(images=images, text=text)
    # Texts alone have no choice.
    assert "num_image_tokens" not in processor(text="what ?", num_image_tokens=6)


@pytest.mark.parametrize("beams", [1, 2])
def test_generates_with_the_tokens_that_are_chosen(beams):
    model, processor = elastic()
    prompts, images = ["<image> what ?", "<image> and <image> ?"], [[picture()], [picture(seed=1), picture(seed=2)]]
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
    prompt = {"images": picture(), "text": "<image> what ?", "return_tensors": "pt"}
    for count, chosen in ((4, {}), (9, {"num_image_tokens": 9})):
        inputs = loaded_processor(**prompt, **chosen)
        assert count_placeholders(inputs) == count
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    # Transformers' own class loads it, too, with the number that is set.
    assert count_placeholders(LlavaProcessor.from_pretrained(tmp_path)(**prompt)) == 4
    model.set_num_tokens(None)
    assert model.config.image_seq_length == 9
    with pytest.raises(ValueError, match=r"have 4 image tokens \(id 10\), the model makes 9 .* `matching_processor"):
        model(**processor(**prompt))
    with pytest.raises(ValueError, match=r"inserts 4 tokens .* makes 9 of it. `matching_processor`"):
        check_image_tokens(processor, model)


def test_numbers_of_tokens_that_do_not_fit_are_refused():
    model, processor = elastic()
    prompt = {"images": [picture(), picture()], "text": "<image> and <image> ?", "return_tensors": "pt"}
    with pytest.raises(ValueError, match="`num_image_tokens` is 10, expected 1 to 9, .* `matching_processor`"):
        processor(**prompt, num_image_tokens=10)
    with pytest.raises(ValueError, match="`num_image_tokens` has 1 numbers, expected one for each of the 2 images"):
        processor(**prompt, num_image_tokens=[4])
    plain = make_processor(model)
    unmatched = SparseFormerLlavaProcessor(plain.image_processor, plain.tokenizer, patch_size=4)
    with pytest.raises(ValueError, match="was made for no model; `matching_processor"):
        unmatched(**prompt, num_image_tokens=4)
    inputs = processor(**prompt, num_image_tokens=[4, 6])
    with pytest.raises(ValueError, match="`num_image_tokens` has 1 numbers, expected one for each of the 2 images"):
        model(**{**inputs, "num_image_tokens": torch.tensor([4])})
    # Not passed on.
    inputs.pop("num_image_tokens")
    with pytest.raises(ValueError, match="have 10 image tokens .* makes 18 .* pass on to the model what it returns"):
        model.generate(**inputs, max_new_tokens=1)


def test_the_processor_loads_without_the_package(tmp_path):
    model, processor = elastic()
    processor.save_pretrained(tmp_path / "processor")
    run_without_frugalvit(tmp_path, "process", tmp_path / "processor", tmp_path / "outputs")
    found = {name: int((ids == IMAGE).sum()) for name, ids in load_file(tmp_path / "outputs").items()}
    assert found == {"own": 4, "again": 4, "plain": 9}


@torch.no_grad()
def test_the_model_that_ships_has_a_processor_that_fits():
    folder = frugalvit.checkpoint_path("cifar10-sparseformer-llava")
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    assert type(processor) is SparseFormerLlavaProcessor
    # There is no code beside it that could be asked for.
    assert "auto_map" not in json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
    prompt = {"images": picture(), "text": "<image>", "return_tensors": "pt"}
    inputs = processor(**prompt)
    plain = LlavaProcessor.from_pretrained(folder)
    for made in (plain, matching_processor(processor, model), matching_processor(plain, model)):
        assert torch.equal(made(**prompt)["input_ids"], inputs["input_ids"])
    assert model(**inputs).logits.isfinite().all()


# The original code base


@pytest.fixture
def tower_folder(tmp_path):
    make_tower(make_llava()).save_pretrained(tmp_path / "tower")
    return str(tmp_path / "tower")


def tower_arguments(**arguments):
    return SimpleNamespace(**{"mm_vision_select_layer": -2, "mm_vision_select_feature": "patch", **arguments})


@pytest.mark.parametrize("feature", ["patch", "cls_patch"])
def test_the_original_code_bases_tower(tower_folder, feature):
    arguments = tower_arguments(mm_vision_select_feature=feature)
    tower = SparseFormerVisionTower(tower_folder, arguments, delay_load=True)
    assert not tower.is_loaded
    assert (tower.hidden_size, tower.num_patches, tower.select_layer) == (64, 7, -2)
    tower.load_model()
    weights = tower.vision_tower
    tower.load_model()
    assert tower.is_loaded and tower.vision_tower is weights
    assert not any(parameter.requires_grad for parameter in tower.parameters())
    pixel_values = tower.image_processor.preprocess(picture(), return_tensors="pt")["pixel_values"]
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
def test_the_original_code_bases_tower_has_the_tokens_that_are_set(tmp_path):
    tower = make_tower(make_llava(), COUNTS[-1], elastic_token_counts=COUNTS)
    tower.set_num_tokens(4)
    tower.save_pretrained(tmp_path / "tower")
    tower = SparseFormerVisionTower(str(tmp_path / "tower"), tower_arguments(), delay_load=True)
    assert tower.num_patches == 4
    tower.load_model()
    assert tower(torch.zeros(1, 3, 32, 32)).shape == (1, 4, 64)
    tower.vision_tower.set_num_tokens(6)
    assert tower.num_patches == 6 == tower(torch.zeros(1, 3, 32, 32)).shape[1]


@torch.no_grad()
def test_the_original_code_bases_tower_of_a_siglip_has_no_cls(tmp_path):
    make_tower(make_llava(SiglipVisionConfig)).save_pretrained(tmp_path / "tower")
    tower = SparseFormerVisionTower(str(tmp_path / "tower"), tower_arguments())
    pixel_values = tower.image_processor.preprocess(picture(), return_tensors="pt")["pixel_values"]
    states = tower.vision_tower(pixel_values, output_hidden_states=True).hidden_states[-2]
    assert states.shape == (1, 7, 64) and torch.equal(tower(pixel_values), states)


def test_the_original_code_bases_tower_loads_at_once_where_it_is_to_be_tuned(tower_folder):
    assert SparseFormerVisionTower(tower_folder, tower_arguments()).is_loaded
    arguments = tower_arguments(unfreeze_mm_vision_tower=True)
    assert SparseFormerVisionTower(tower_folder, arguments, delay_load=True).is_loaded
    with pytest.raises(ValueError, match="mm_vision_select_feature is 'cls', expected"):
        SparseFormerVisionTower(tower_folder, tower_arguments(mm_vision_select_feature="cls"))


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_swaps_as_the_function_does(dtype, tmp_path, capsys):
    llava = make_llava()
    tower = make_tower(llava)
    llava.save_pretrained(tmp_path / "llava")
    make_processor(llava).save_pretrained(tmp_path / "llava")
    tower.save_pretrained(tmp_path / "tower")
    command = ["swap", "--model", str(tmp_path / "llava"), "--vision-model", str(tmp_path / "tower"), "--dtype", dtype]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    assert f"7 tokens an image instead of 64 patches, in {dtype}" in capsys.readouterr().out
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(images=picture(), text="<image> what is this ?", return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    expected = swap_vision_tower(llava, tower).to(model.dtype)
    # In half precision, RoIs were rounded at another place.
    close = {} if dtype == "float32" else {"atol": 0.02, "rtol": 0.1}
    torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, **close)
    assert "AutoProcessor" in (tmp_path / "out" / "README.md").read_text()
    # What it is bootstrapped from is found in there.
    teacher, _ = load_vision_model(tmp_path / "llava")
    pixel_values = torch.randn(1, 3, 32, 32)
    states = make_llava().model.vision_tower(pixel_values).last_hidden_state
    torch.testing.assert_close(teacher(pixel_values).last_hidden_state, states)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize(("bits", "layer"), [("4bit", "Linear4bit"), ("8bit", "Linear8bitLt")])
def test_the_command_writes_a_quantized_language_model(bits, layer, tmp_path, capsys):
    llava = make_llava()
    llava.save_pretrained(tmp_path / "llava")
    make_processor(llava).save_pretrained(tmp_path / "llava")
    make_tower(llava).save_pretrained(tmp_path / "tower")
    command = ["swap", "--model", str(tmp_path / "llava"), "--vision-model", str(tmp_path / "tower")]
    assert main([*command, "--output", str(tmp_path / "plain")]) == 0
    assert main([*command, "--quantize", bits, "--output", str(tmp_path / "out")]) == 0
    assert f"its language model in {bits}" in capsys.readouterr().out
    plain, model = (AutoModelForImageTextToText.from_pretrained(tmp_path / name) for name in ("plain", "out"))
    # The language model alone.
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind == layer} == {n for n in kinds if "language_model" in n}
    inputs = AutoProcessor.from_pretrained(tmp_path / "out")(
        images=picture(), text="<image> what ?", return_tensors="pt"
    )
    # With gradients: without, bitsandbytes packs matrices for AVX-512, and these are too narrow.
    given, expected = (each(**inputs).logits.flatten().float() for each in (model, plain))
    assert torch.cosine_similarity(given, expected, dim=0) > 0.9


def test_an_output_with_something_in_it_is_refused_before_anything_is_loaded(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    command = ["swap", "--model", "nothing", "--vision-model", "nothing", "--output", str(tmp_path / "out")]
    assert main(command) == 1
    assert "exists and is not empty" in capsys.readouterr().err


def test_what_has_a_tower_of_another_kind_is_refused(tmp_path, capsys):
    make_tower(make_llava()).save_pretrained(tmp_path / "tower")
    Qwen2_5_VLConfig().save_pretrained(tmp_path / "qwen")
    command = ["swap", "--model", str(tmp_path / "qwen"), "--vision-model", str(tmp_path / "tower")]
    assert main([*command, "--output", str(tmp_path / "out")]) == 1
    message = "it is a qwen2_5_vl, expected a llava, in the style of LLaVA 1.5, or another of paligemma, gemma3"
    assert message in capsys.readouterr().err
    command[2] = str(frugalvit.checkpoint_path("cifar10-sparseformer-llava"))
    assert main([*command, "--output", str(tmp_path / "out")]) == 1
    assert "its tower is a SparseFormer already" in capsys.readouterr().err


@torch.no_grad()
def test_a_tower_of_another_width_and_family_has_a_new_first_layer(tmp_path):
    llava = make_llava()
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_register_tokens": 2}
    dinov2 = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(image_size=32, patch_size=4, mlp_ratio=2, **sizes))
    tower = SparseFormerVisionModel.from_teacher(dinov2.eval(), 7, **SMALL)
    with pytest.raises(ValueError, match="takes 64 channels, the vision model gives 48 .* frugalvit align-llava"):
        swap_vision_tower(llava, tower)
    model = swap_vision_tower(llava, tower, new_first_layer=True)
    projector, old = model.model.multi_modal_projector, llava.model.multi_modal_projector
    assert (projector.linear_1.in_features, old.linear_1.in_features) == (48, 64)
    assert torch.equal(projector.linear_2.weight, old.linear_2.weight)
    model.save_pretrained(tmp_path)
    processor = matching_processor(make_processor(llava), model)
    inputs = processor(images=picture(), text="<image> what is this ?", return_tensors="pt")
    # Registers are tokens, too.
    assert count_placeholders(inputs) == 7 + 2
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("make", [make_llava, make_paligemma])
def test_a_server_builds_it_of_a_configuration_from_another_process(make):
    """As vLLM: classes of remote code are made once more there, and names that a model ignores are left out."""
    llava = make()
    model = swap_vision_tower(llava, make_tower(llava))
    again = type("SparseFormerConfig", (frugalvit.SparseFormerConfig,), {"__module__": "another.process"})
    model.config.vision_config = again(**model.config.vision_config.to_dict())
    base = type(model.model)(model.config)
    assert {*base.state_dict()} == {*model.model.state_dict()}
    for built in (base, model):
        ignored = [re.compile(pattern) for pattern in built._keys_to_ignore_on_load_unexpected]
        assert not [name for name in built.state_dict() for pattern in ignored if pattern.search(name)]


def test_auto_model_is_the_model_without_its_head():
    folder = frugalvit.checkpoint_path("cifar10-sparseformer-llava")
    base = AutoModel.from_pretrained(folder)
    expected = AutoModelForImageTextToText.from_pretrained(folder).model.state_dict()
    assert type(base).__name__ == "SparseFormerLlavaModel"
    assert base.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in base.state_dict().items())


@pytest.mark.parametrize("make", [make_llava, make_paligemma])
@torch.no_grad()
def test_channels_are_matched(make):
    """The first layer of the projector returns the mean that it had before, and each channel its old spread."""
    original = make()
    old = original.model.multi_modal_projector
    before = {name: value.clone() for name, value in original.state_dict().items()}
    model = swap_vision_tower(original, make_tower(original))
    batches = [(torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32)) for _ in range(2)]
    match_channels_(model, original, batches)
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())
    assert model.model.multi_modal_projector is not old and not model.training

    def read(part, side):
        return torch.cat([_read_by_projector(part, pair[side]).flatten(0, -2) for pair in batches])

    ours, theirs = read(model, 0), read(original, 1)
    matched = (ours - ours.mean(0)) / ours.std(0, correction=0) * theirs.std(0, correction=0) + theirs.mean(0)
    given = _first_linear(model)(ours)
    torch.testing.assert_close(given, _first_linear(original)(matched), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given.mean(0), _first_linear(original)(theirs).mean(0), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="There are no images to match"):
        match_channels_(model, original, [])


def test_a_projector_without_biases_cannot_match_means():
    llava = make_llava(multimodal_projector_bias=False)
    with pytest.raises(ValueError, match="The projector has no bias to put the channels' means into"):
        match_channels_(swap_vision_tower(llava, make_tower(llava)), llava, [])


@torch.no_grad()
@pytest.mark.parametrize("options", [(), ("--device-map", "auto")])
def test_the_command_matches_channels(options, tmp_path, capsys):
    llava = make_llava()
    llava.save_pretrained(tmp_path / "llava")
    make_processor(llava).save_pretrained(tmp_path / "llava")
    make_tower(llava).save_pretrained(tmp_path / "tower")
    (tmp_path / "images").mkdir()
    for number in range(5):
        picture((40 + number, 33), number).save(tmp_path / "images" / f"{number}.png")
    command = ["swap", "--model", str(tmp_path / "llava"), "--vision-model", str(tmp_path / "tower")]
    command += ["--dataset", str(tmp_path / "images"), "--images", "4", "--output", str(tmp_path / "out")]
    assert main([*command, *options]) == 0
    assert "its channels matched on 4 images" in capsys.readouterr().out
    state, old = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict(), llava.state_dict()
    changed = {
        name for name, value in state.items() if "vision_tower" not in name and not torch.equal(value, old[name])
    }
    assert changed == {f"model.multi_modal_projector.linear_1.{part}" for part in ("weight", "bias")}


PARTS = {f"model.{name}": "cpu" for name in ("vision_tower", "multi_modal_projector", "language_model")} | {
    "lm_head": "cpu"
}
LAYERS = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")


@torch.no_grad()
@pytest.mark.parametrize(
    "device_map",
    [
        # A PaliGemma's head has the weights of the embeddings.
        PARTS | {"model.language_model": "disk", "lm_head": "disk"},
        {name: place for name, place in PARTS.items() if name != "model.language_model"}
        | {f"model.language_model.{name}": "disk" if name == "layers.0" else "cpu" for name in LAYERS}
        | {"model.vision_tower": "disk"},
        {"": "disk"},
        "auto",
    ],
    ids=["language model on disk", "layers on disk", "all on disk", "auto"],
)
@pytest.mark.parametrize("make", [make_llava, make_paligemma])
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")  # for large ones
def test_a_model_that_is_shared_out_is_swapped_as_one_that_is_not(make, device_map, tmp_path):
    original = make()
    tower = make_tower(original)
    original.save_pretrained(tmp_path / "whole")
    shared_out = type(original).from_pretrained(
        tmp_path / "whole", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    model, expected = (swap_vision_tower(each.eval(), tower) for each in (shared_out, original))
    assert input_device(model) == torch.device("cpu")
    text = torch.tensor([[IMAGE] * model.config.image_seq_length + [2, 3, 4]])
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text), "pixel_values": torch.randn(1, 3, 32, 32)}
    assert torch.equal(model(**inputs).logits, expected(**inputs).logits)
    answers = [
        each.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0) for each in (model, expected)
    ]
    assert torch.equal(*answers)
    model.save_pretrained(tmp_path / "out")
    again, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(again(**inputs).logits, expected(**inputs).logits)


def test_channels_of_an_offloaded_projector_are_not_matched(tmp_path):
    make_llava().save_pretrained(tmp_path / "llava")
    llava = LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "llava", device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    batches = [(torch.randn(1, 3, 32, 32), torch.randn(1, 3, 32, 32))]
    with pytest.raises(ValueError, match="The projector is offloaded, but is to change; choose a `device_map`"):
        match_channels_(swap_vision_tower(llava, make_tower(make_llava())), llava, batches)
