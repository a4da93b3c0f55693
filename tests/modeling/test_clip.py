"""A CLIP with a SparseFormer: in Transformers, in open_clip, and from one to the other."""

import open_clip
import pytest
import torch
import torch.nn.functional as F
from processes import compute_without_frugalvit
from transformers import (
    AutoModel,
    AutoModelForZeroShotImageClassification,
    AutoProcessor,
    CLIPConfig,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    pipeline,
)

import frugalvit
from frugalvit import OpenClipVisual, SparseFormerCLIPConfig, SparseFormerCLIPModel, from_open_clip, to_open_clip
from frugalvit.common.loading import load_vision_model
from tiny import SMALL, randomize, word_tokenizer


WORDS = ["[PAD]", "a", "photo", "of", "this", "is", "cat", "dog", "ship", ".", "[UNK]", "[BOS]", "[EOS]"]
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def clip() -> CLIPModel:
    torch.manual_seed(0)
    text = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "eos_token_id": WORDS.index("[EOS]"), **TEXT}
    vision = {"image_size": 32, "patch_size": 4, **VISION}
    return randomize(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)))


@pytest.fixture(scope="module")
def vision_model(clip):
    model = frugalvit.SparseFormerVisionModelWithProjection.from_teacher(clip, num_latent_tokens=6, **SMALL)
    return randomize(model)


@pytest.fixture(scope="module")
def model(clip, vision_model) -> SparseFormerCLIPModel:
    return SparseFormerCLIPModel.from_clip(clip, vision_model)


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    texts = word_tokenizer(WORDS)(["a photo of a cat", "this is a ship."], padding=True, return_tensors="pt")
    pixel_values = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {"input_ids": texts["input_ids"], "attention_mask": texts["attention_mask"], "pixel_values": pixel_values}


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip") / "model"
    model.save_pretrained(folder)
    image_processor = frugalvit.modeling.modeling_sparseformer_llava.clip_image_processor(model.config.vision_config)
    CLIPProcessor(image_processor, word_tokenizer(WORDS)).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_the_text_side_is_the_clips_to_the_bit(clip, model, inputs):
    texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    for name, tensor in clip.text_model.state_dict().items():
        assert torch.equal(tensor, model.text_model.state_dict()[name])
    expected = clip.get_text_features(**texts)
    given = model.get_text_features(**texts)
    assert torch.equal(given.pooler_output, expected.pooler_output)
    assert torch.equal(given.last_hidden_state, expected.last_hidden_state)


@torch.no_grad()
def test_images_and_texts_are_compared_as_a_clip_compares_them(clip, vision_model, model, inputs):
    outputs = model(**inputs, return_loss=False)
    images = vision_model(inputs["pixel_values"]).image_embeds
    torch.testing.assert_close(model.get_image_features(inputs["pixel_values"]).pooler_output, images)
    texts = clip.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
    expected = clip.logit_scale.exp() * F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T
    torch.testing.assert_close(outputs.logits_per_image, expected)
    torch.testing.assert_close(outputs.logits_per_text, expected.T)
    pairs = {**inputs, "pixel_values": inputs["pixel_values"][:2]}
    loss, targets = model(**pairs, return_loss=True).loss, torch.arange(2)
    expected = (F.cross_entropy(expected[:2], targets) + F.cross_entropy(expected[:2].T, targets)) / 2
    torch.testing.assert_close(loss, expected)


@torch.no_grad()
def test_outputs_of_both_sides_are_there(model, inputs):
    outputs = model(**inputs, output_hidden_states=True, output_rois=True)
    assert len(outputs.vision_model_output.rois) == 2
    assert len(outputs.vision_model_output.hidden_states) == 3
    assert len(outputs.text_model_output.hidden_states) == 3
    assert len(model.get_image_features(inputs["pixel_values"], output_rois=True).rois) == 2


@pytest.mark.parametrize("padding_side", ["left", "right"])
@torch.no_grad()
def test_eager_and_sdpa_agree_on_both_sides(padding_side, folder, inputs):
    ids = word_tokenizer(WORDS, padding_side=padding_side)(["a cat", "this is a photo of a dog ."], padding=True)
    inputs = {**inputs, **{name: torch.tensor(ids[name]) for name in ("input_ids", "attention_mask")}}
    outputs = [
        SparseFormerCLIPModel.from_pretrained(folder, attn_implementation=attention)(**inputs)
        for attention in ("eager", "sdpa")
    ]
    assert outputs[0].text_model_output.last_hidden_state.isfinite().all()
    torch.testing.assert_close(outputs[0].logits_per_image, outputs[1].logits_per_image, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_loads_by_auto_classes(folder, model, inputs):
    for auto_class in (AutoModel, AutoModelForZeroShotImageClassification):
        loaded = auto_class.from_pretrained(folder)
        assert type(loaded) is SparseFormerCLIPModel
        assert torch.equal(loaded(**inputs).logits_per_image, model(**inputs).logits_per_image)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["SparseFormerVisionModelWithProjection", "SparseFormerVisionModel", "SparseFormerModel"]
)
@pytest.mark.parametrize("whole", ["clip", "siglip", "llava"])
def test_vision_classes_load_from_a_whole_model(name, whole, folder, model, vision_model, inputs, tmp_path):
    """They do as `CLIPVisionModelWithProjection` does with a CLIP. Saved again, the part is a folder of its own."""
    projects = name.endswith("WithProjection")
    if whole == "llava":
        folder, model = frugalvit.checkpoint_path("cifar10-sparseformer-llava"), None
    elif whole == "siglip":
        config = frugalvit.SparseFormerSiglipConfig(
            text_config=TEXT | {"vocab_size": 9, "projection_size": 64},
            vision_config=vision_model.config.to_dict() | {"projection_dim": None},
        )
        model = randomize(frugalvit.SparseFormerSiglipModel(config))
        model.save_pretrained(folder := tmp_path / "siglip")
    if projects and whole == "siglip":
        with pytest.raises(ValueError, match="`projection_dim` .* is None"):
            getattr(frugalvit, name).from_pretrained(folder)
        return
    loaded, info = getattr(frugalvit, name).from_pretrained(folder, output_loading_info=True)
    missing = {"visual_projection.weight"} if projects and whole == "llava" else set()
    assert info["missing_keys"] == missing and info["unexpected_keys"] <= {"visual_projection.weight"}
    if model is not None:
        expected = model.get_image_features(inputs["pixel_values"]).pooler_output if projects else None
        tokens = model.vision_model(inputs["pixel_values"]).last_hidden_state
        outputs = loaded(inputs["pixel_values"])
        assert torch.equal(outputs.last_hidden_state, tokens)
        assert not projects or torch.equal(outputs.image_embeds, expected)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert again.state_dict().keys() == loaded.state_dict().keys()
    assert all(torch.equal(weight, loaded.state_dict()[key]) for key, weight in again.state_dict().items())
    assert hasattr(again, "visual_projection") == projects


def test_a_llava_takes_the_image_side_of_a_whole_clip(folder, model):
    text = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    vision = CLIPVisionConfig(image_size=32, patch_size=4, **VISION)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=8)
    llava = frugalvit.swap_vision_tower(LlavaForConditionalGeneration(config), load_vision_model(folder, "cpu")[0])
    tower, expected = llava.model.vision_tower.state_dict(), model.vision_model.state_dict()
    assert tower.keys() == expected.keys() and all(torch.equal(tower[name], expected[name]) for name in tower)


@torch.no_grad()
def test_loads_without_the_package(folder, model, inputs, tmp_path):
    expected = model(**inputs).logits_per_image
    for given in compute_without_frugalvit(tmp_path, folder, "AutoModel", inputs):
        assert torch.equal(given, expected)


def test_pipeline_labels_images_without_training(folder, model, photographs):
    classify = pipeline("zero-shot-image-classification", model=str(folder), device="cpu")
    image = photographs[0][0]
    labels = ["cat", "dog", "ship"]
    answers = {answer["label"]: answer["score"] for answer in classify(image, candidate_labels=labels)}
    inputs = AutoProcessor.from_pretrained(folder)(
        images=image, text=[f"This is a photo of {label}." for label in labels], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = model(**inputs).logits_per_image.softmax(-1)[0]
    assert [answers[label] for label in labels] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_new_model_starts_as_both_sides_do():
    torch.manual_seed(0)
    vision = frugalvit.SparseFormerConfig.from_variant("clip-base-49-224", num_hidden_layers=2, projection_dim=24)
    config = SparseFormerCLIPConfig(text_config=TEXT, vision_config=vision, projection_dim=24)
    model = SparseFormerCLIPModel(config)
    assert not model.vision_model.focusing_layer.roi_deltas.out_proj.weight.any()
    assert model.text_model.embeddings.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.visual_projection.weight.std().item() == pytest.approx(768**-0.5, rel=0.1)
    assert model.logit_scale.item() == pytest.approx(2.6592)


def test_parts_that_do_not_fit_are_refused(clip, vision_model):
    with pytest.raises(ValueError, match="Got a CLIPVisionModel as CLIP"):
        SparseFormerCLIPModel.from_clip(clip.vision_model, vision_model)
    with pytest.raises(ValueError, match="expected a SparseFormerVisionModelWithProjection"):
        SparseFormerCLIPModel.from_clip(clip, vision_model.base_model)
    narrow = frugalvit.SparseFormerVisionModelWithProjection(
        frugalvit.SparseFormerConfig(**{**vision_model.config.to_dict(), "projection_dim": 16})
    )
    with pytest.raises(ValueError, match="projects to 16 channels, the CLIP to 24"):
        SparseFormerCLIPModel.from_clip(clip, narrow)
    with pytest.raises(Exception, match="`projection_dim` is 24, that of `vision_config` 16"):
        SparseFormerCLIPConfig(vision_config=narrow.config, projection_dim=24)


# open_clip


def open_clip_model(custom_text: bool = False, quick_gelu: bool = False, **text) -> torch.nn.Module:
    torch.manual_seed(0)
    vision = {"image_size": 32, "patch_size": 4, "width": 64, "layers": 3, "head_width": 16}
    text = {"context_length": 16, "vocab_size": len(WORDS), "width": 32, "heads": 4, "layers": 2, **text}
    model_class = open_clip.CustomTextCLIP if custom_text else open_clip.CLIP
    model = randomize(model_class(24, vision, text, quick_gelu=quick_gelu))
    open_clip.model.set_model_preprocess_cfg(
        model, {"size": 32, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bicubic"}
    )
    return model


def swapped(clip) -> torch.nn.Module:
    student = frugalvit.SparseFormerVisionModelWithProjection.from_teacher(clip, num_latent_tokens=6, **SMALL)
    clip.visual = OpenClipVisual(randomize(student))
    return clip


class WordTokenizer:
    """Called as open_clip calls its own."""

    def __call__(self, texts):
        return word_tokenizer(WORDS)(texts, padding="max_length", max_length=16, return_tensors="pt")["input_ids"]


@torch.no_grad()
def test_a_sparseformer_is_a_visual_tower_of_open_clip(inputs):
    clip = open_clip_model()
    texts = clip.encode_text(WordTokenizer()(["a photo of a cat"]))
    clip = swapped(clip)
    assert torch.equal(clip.encode_text(WordTokenizer()(["a photo of a cat"])), texts)
    features = clip.encode_image(inputs["pixel_values"], normalize=True)
    expected = clip.visual.model(inputs["pixel_values"]).image_embeds
    torch.testing.assert_close(features, F.normalize(expected, dim=-1))
    clip.visual.output_tokens = True
    pooled, tokens = clip.visual(inputs["pixel_values"])
    assert pooled.shape == (3, 24) and tokens.shape == (3, 6, 64)
    clip.visual.output_tokens = False
    classifier = open_clip.build_zero_shot_classifier(
        clip, WordTokenizer(), ["cat", "dog", "ship"], ["a photo of a {}.", "this is a {}."]
    )
    assert (features @ classifier).shape == (3, 3)
    scores = clip(inputs["pixel_values"], WordTokenizer()(["a cat"]))[0] @ texts.T
    assert scores.isfinite().all()
    preprocess = open_clip.transform.image_transform_v2(
        open_clip.transform.PreprocessCfg(**clip.visual.preprocess_cfg), False
    )
    assert "Resize" in str(preprocess)


def test_groups_of_the_visual_tower_are_frozen_as_open_clip_freezes_them():
    clip = swapped(open_clip_model())
    visual = clip.visual

    def trained():
        return {name.removeprefix("model.") for name, p in visual.named_parameters() if p.requires_grad}

    clip.lock_image_tower()
    assert not trained()
    clip.lock_image_tower(unlocked_groups=1)
    assert trained() == {"visual_projection.weight"}
    clip.lock_image_tower(unlocked_groups=2)
    assert {name.split(".")[1] for name in trained() - {"visual_projection.weight"}} == {"layers", "layernorm"}
    clip.lock_image_tower(unlocked_groups=4)
    assert trained() == {name for name, _ in visual.model.named_parameters()}
    assert {"model.sparseformer.latents.initial_rois"} <= visual.no_weight_decay()
    clip.set_grad_checkpointing(True)
    visual.train()(torch.randn(2, 3, 32, 32)).sum().backward()
    assert visual.model.visual_projection.weight.grad is not None


@pytest.mark.parametrize(
    ("custom_text", "quick_gelu", "text"),
    [(False, False, {}), (False, True, {}), (True, False, {"pool_type": "eos", "eos_id": WORDS.index("[EOS]")})],
    ids=["plain", "quick-gelu", "custom-text"],
)
@torch.no_grad()
def test_converts_to_transformers_and_back(custom_text, quick_gelu, text, inputs):
    clip = swapped(open_clip_model(custom_text, quick_gelu, **text))
    ids = WordTokenizer()(["a photo of a cat", "this is a ship."])
    model = from_open_clip(clip)
    again = to_open_clip(model)
    expected = clip.encode_text(ids), clip.encode_image(inputs["pixel_values"])
    torch.testing.assert_close(model.get_text_features(ids).pooler_output, expected[0])
    torch.testing.assert_close(model.get_image_features(inputs["pixel_values"]).pooler_output, expected[1])
    torch.testing.assert_close(again.encode_text(ids), expected[0])
    torch.testing.assert_close(again.encode_image(inputs["pixel_values"]), expected[1])
    assert model.logit_scale.item() == again.logit_scale.item() == pytest.approx(clip.logit_scale.item())
    rois = model.vision_model.latents.initial_rois.clone()
    half = to_open_clip(model.half())
    assert half.token_embedding.weight.dtype == torch.float16
    assert torch.equal(half.visual.model.base_model.latents.initial_rois, rois)


UNFIT_TEXTS = {
    "bidirectional": ({"no_causal_mask": True}, "bidirectional"),
    "another pooling": ({"pool_type": "last"}, "pools by 'last'"),
    "a class token": ({"embed_cls": True}, r"appends a \[CLS\]"),
    "a projection with bias": ({"proj_bias": True}, "no matrix without bias"),
}


@pytest.mark.parametrize("name", UNFIT_TEXTS)
def test_text_sides_that_transformers_has_not_are_refused(name):
    text, message = UNFIT_TEXTS[name]
    with pytest.raises(ValueError, match=message):
        from_open_clip(swapped(open_clip_model(custom_text=True, **text)))


def test_visual_towers_of_other_kinds_are_refused(vision_model):
    with pytest.raises(ValueError, match="is a VisionTransformer, expected an OpenClipVisual"):
        from_open_clip(open_clip_model())
    with pytest.raises(ValueError, match="expected a SparseFormerVisionModelWithProjection"):
        OpenClipVisual(vision_model.base_model)


@torch.no_grad()
def test_other_models_are_not_converted(vision_model):
    with pytest.raises(ValueError, match=r"Got a SparseFormer\w+, expected a SparseFormerCLIPModel"):
        to_open_clip(vision_model)


def test_the_image_side_computes_with_the_tokens_that_are_chosen(clip, inputs, tmp_path):
    fields = {"num_latent_tokens": 6, "elastic_token_counts": [4, 6], **SMALL}
    vision_model = randomize(frugalvit.SparseFormerVisionModelWithProjection.from_teacher(clip, **fields))
    model = SparseFormerCLIPModel.from_clip(clip, vision_model)
    pixel_values = inputs["pixel_values"]
    expected = vision_model(pixel_values, num_tokens=4).image_embeds
    torch.testing.assert_close(model.get_image_features(pixel_values, num_tokens=4).pooler_output, expected)
    outputs, all_tokens = model(**inputs, num_tokens=4), model(**inputs)
    torch.testing.assert_close(outputs.image_embeds, F.normalize(expected, dim=-1))
    assert torch.equal(outputs.text_embeds, all_tokens.text_embeds)
    assert not torch.equal(outputs.image_embeds, all_tokens.image_embeds)
    model.set_num_tokens(4)
    assert torch.equal(model(**inputs).image_embeds, outputs.image_embeds)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(**inputs).image_embeds, outputs.image_embeds)
    assert torch.equal(loaded(**inputs, num_tokens=6).image_embeds, all_tokens.image_embeds)
    model.set_num_tokens(None)
    assert torch.equal(model(**inputs).image_embeds, all_tokens.image_embeds)
