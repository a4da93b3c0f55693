"""A SigLIP with a SparseFormer: in Transformers, in open_clip, and from one to the other."""

import copy

import open_clip
import pytest
import torch
import torch.nn.functional as F
from processes import compute_without_frugalvit
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForZeroShotImageClassification,
    AutoProcessor,
    CLIPConfig,
    CLIPModel,
    Siglip2Config,
    Siglip2Model,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
    pipeline,
)

import frugalvit
from frugalvit import (
    OpenClipVisual,
    SparseFormerCLIPModel,
    SparseFormerSiglipConfig,
    SparseFormerSiglipModel,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
    from_open_clip,
    to_open_clip,
)
from tiny import SMALL, randomize, word_tokenizer


WORDS = ["[PAD]", "a", "photo", "of", "this", "is", "cat", "dog", "ship", ".", "[UNK]"]
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
# open_clip multiplies a width by a ratio; 56 * (61 / 56) is less than 61.
TEXT = {"hidden_size": 56, "intermediate_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4, **NO_TOKENS}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}


def make_siglip(name: str = "siglip") -> SiglipModel | Siglip2Model:
    torch.manual_seed(0)
    text = {**TEXT, "vocab_size": len(WORDS), "projection_size": VISION["hidden_size"]}
    if name == "siglip":
        vision = {**VISION, "image_size": 32, "patch_size": 4}
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
    else:
        vision = {**VISION, "num_patches": 64, "patch_size": 4}
        model = Siglip2Model(Siglip2Config(text_config=text, vision_config=vision))
    model = randomize(model)
    with torch.no_grad():
        model.logit_scale.fill_(2.3)
        model.logit_bias.fill_(-3.7)
    return model


@pytest.fixture(scope="module", params=["siglip", "siglip2"])
def siglip(request) -> SiglipModel | Siglip2Model:
    return make_siglip(request.param)


@pytest.fixture(scope="module")
def vision_model() -> SparseFormerVisionModel:
    return randomize(SparseFormerVisionModel.from_teacher(make_siglip(), num_latent_tokens=6, **SMALL))


@pytest.fixture(scope="module")
def model(vision_model) -> SparseFormerSiglipModel:
    return SparseFormerCLIPModel.from_clip(make_siglip(), vision_model)


def make_tokenizer(**options):
    # Those of SigLIP make no mask: it was trained to attend to padding.
    return word_tokenizer(WORDS, model_max_length=64, model_input_names=["input_ids"], **options)


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    texts = make_tokenizer()(["a photo of a cat", "this is a ship."], padding="max_length", return_tensors="pt")
    pixel_values = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {"input_ids": texts["input_ids"], "pixel_values": pixel_values}


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip") / "model"
    model.save_pretrained(folder)
    image_processor = SiglipImageProcessor(size={"height": 32, "width": 32})
    SiglipProcessor(image_processor, make_tokenizer()).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_the_text_side_is_the_siglips_to_the_bit(siglip, vision_model, inputs):
    model = SparseFormerCLIPModel.from_clip(siglip, vision_model)
    assert type(model) is SparseFormerSiglipModel
    assert model.config.text_config.model_type == "siglip_text_model"
    for name, tensor in siglip.text_model.state_dict().items():
        assert torch.equal(tensor, model.text_model.state_dict()[name])
    expected, given = siglip.get_text_features(inputs["input_ids"]), model.get_text_features(inputs["input_ids"])
    assert torch.equal(given.pooler_output, expected.pooler_output)
    assert torch.equal(given.last_hidden_state, expected.last_hidden_state)


@torch.no_grad()
def test_sentence_transformers_embeds_texts_of_the_one_length(model, folder):
    """SigLIP was trained on texts that are padded to it, which its tokenizer may not say."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="pip install 'frugalvit[search]'")
    texts = ["a photo of a cat", "this is a ship ."]
    found = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)
    length = model.config.text_config.max_position_embeddings
    for padding, alike in (("max_length", True), (True, False)):
        lengths = {"padding": padding, "max_length": length, "truncation": True}
        inputs = make_tokenizer()(texts, **lengths, return_tensors="pt")
        expected = model.get_text_features(inputs["input_ids"]).pooler_output
        assert torch.allclose(found, expected, atol=1e-5) == alike


class AsVisionModel(nn.Module):
    """A SparseFormer called as SigLIP calls its vision model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values, **_):
        return self.model(pixel_values)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["siglip", "siglip2"])
@torch.no_grad()
def test_images_and_texts_are_compared_as_a_siglip_compares_them(name, masked, vision_model, inputs):
    """Transformers' own model, with the SparseFormer put into it, gives what is expected."""
    siglip = make_siglip(name)
    inputs = inputs | ({"attention_mask": (inputs["input_ids"] != 0).long()} if masked else {})
    given = SparseFormerCLIPModel.from_clip(siglip, vision_model)(**inputs, return_loss=True)
    siglip.vision_model = AsVisionModel(vision_model)
    expected = siglip(**inputs, return_loss=True)
    for output in ("text_embeds", "image_embeds", "logits_per_image", "logits_per_text", "loss"):
        torch.testing.assert_close(given[output], expected[output], rtol=0, atol=1e-5)
    assert expected.logits_per_text.std() > 0.1


@torch.no_grad()
def test_image_features_are_what_the_vision_model_pools(model, vision_model, inputs):
    expected = vision_model(inputs["pixel_values"]).pooler_output
    assert torch.equal(model.get_image_features(inputs["pixel_values"]).pooler_output, expected)
    # Any size, unlike the teacher.
    assert model.get_image_features(torch.randn(1, 3, 40, 56)).pooler_output.shape == (1, 64)


@torch.no_grad()
def test_outputs_of_both_sides_are_there(model, inputs):
    outputs = model(**inputs, output_hidden_states=True, output_rois=True)
    assert len(outputs.vision_model_output.rois) == 2
    assert len(outputs.vision_model_output.hidden_states) == 3
    assert len(outputs.text_model_output.hidden_states) == 3
    assert len(model.get_image_features(inputs["pixel_values"], output_rois=True).rois) == 2
    assert outputs.loss is None and len(model(**inputs, return_dict=False)) == 6


def test_the_loss_reaches_both_sides(vision_model, inputs):
    model = SparseFormerCLIPModel.from_clip(make_siglip(), vision_model).train()
    model(**inputs, return_loss=True).loss.backward()
    without = [name for name, parameter in model.named_parameters() if not parameter.grad.isfinite().all()]
    assert not without
    assert model.logit_bias.grad.item() != 0 and model.vision_model.pooling_head.probe.grad.any()


@torch.no_grad()
def test_eager_and_sdpa_agree_on_both_sides(folder, inputs):
    inputs = {**inputs, "attention_mask": (inputs["input_ids"] != 0).long()}
    outputs = [
        SparseFormerSiglipModel.from_pretrained(folder, attn_implementation=attention)(**inputs)
        for attention in ("eager", "sdpa")
    ]
    torch.testing.assert_close(outputs[0].logits_per_image, outputs[1].logits_per_image, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_loads_by_auto_classes(folder, model, inputs):
    for auto_class in (AutoModel, AutoModelForZeroShotImageClassification):
        loaded, report = auto_class.from_pretrained(folder, output_loading_info=True)
        assert type(loaded) is SparseFormerSiglipModel
        assert not any(report.values())
        assert torch.equal(loaded(**inputs).logits_per_image, model(**inputs).logits_per_image)


@torch.no_grad()
def test_loads_without_the_package(folder, model, inputs, tmp_path):
    assert not (folder / "open_clip_adapter.py").exists()
    expected = model(**inputs).logits_per_image
    for given in compute_without_frugalvit(tmp_path, folder, "AutoModel", inputs):
        assert torch.equal(given, expected)


def test_pipeline_labels_images_by_sigmoids_of_padded_texts(folder, model, photographs):
    classify = pipeline("zero-shot-image-classification", model=str(folder), device="cpu")
    image = photographs[0][0]
    labels = ["cat", "dog", "ship"]
    answers = {answer["label"]: answer["score"] for answer in classify(image, candidate_labels=labels)}
    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor) is SiglipProcessor
    texts = [f"This is a photo of {label}." for label in labels]
    inputs = processor(images=image, text=texts, padding="max_length", return_tensors="pt")
    assert inputs["input_ids"].shape == (3, 64)
    with torch.no_grad():
        expected = model(**inputs).logits_per_image.sigmoid()[0]
    assert [answers[label] for label in labels] == pytest.approx(expected.tolist(), abs=1e-5)
    assert sum(answers.values()) != pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_precision_is_the_siglips_but_for_rois(dtype, vision_model, folder, inputs):
    for model in (
        SparseFormerCLIPModel.from_clip(make_siglip().to(dtype), vision_model),
        SparseFormerSiglipModel.from_pretrained(folder, dtype=dtype),
    ):
        rois = model.vision_model.latents.initial_rois
        assert rois.dtype == torch.float32
        assert {parameter.dtype for parameter in model.parameters() if parameter is not rois} == {dtype}
        assert model(**inputs, return_loss=True).loss.isfinite()


def test_a_new_model_starts_as_both_sides_do():
    torch.manual_seed(0)
    sides = {"hidden_size": 64, "num_hidden_layers": 2}
    vision = {**sides, "use_cls_token": False, "pooling": "attention"}
    model = SparseFormerSiglipModel(SparseFormerSiglipConfig(text_config={**TEXT, **sides}, vision_config=vision))
    assert not model.vision_model.focusing_layer.roi_deltas.out_proj.weight.any()
    assert not model.text_model.encoder.layers[0].self_attn.q_proj.bias.any()
    assert model.logit_scale.exp().item() == pytest.approx(10)
    assert model.logit_bias.item() == -10


def test_the_default_configuration_is_a_base_model():
    config = SparseFormerSiglipConfig()
    assert config.text_config.projection_size == config.vision_config.hidden_size == 768
    assert (config.vision_config.pooling, config.vision_config.use_cls_token) == ("attention", False)
    with pytest.raises(Exception, match="`projection_size` of `text_config` is 32, .* 768"):
        SparseFormerSiglipConfig(text_config={"hidden_size": 32})


def test_parts_that_do_not_fit_are_refused(vision_model):
    siglip = make_siglip()
    with pytest.raises(ValueError, match="Got a SiglipVisionModel as CLIP"):
        SparseFormerCLIPModel.from_clip(siglip.vision_model, vision_model)
    clip = CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION))
    with pytest.raises(ValueError, match="Got a CLIPModel as SigLIP"):
        SparseFormerSiglipModel.from_siglip(clip, vision_model)
    with pytest.raises(ValueError, match="Got a CustomTextCLIP as SigLIP, .* `from_open_clip`"):
        SparseFormerCLIPModel.from_clip(open_clip_siglip(), vision_model)
    fields = vision_model.config.to_dict()
    projected = SparseFormerVisionModelWithProjection(frugalvit.SparseFormerConfig(**fields | {"projection_dim": 64}))
    for wrong in (siglip.vision_model, projected):
        with pytest.raises(ValueError, match=f"Got a {type(wrong).__name__} as vision model"):
            SparseFormerCLIPModel.from_clip(siglip, wrong)
    narrow = SparseFormerVisionModel(frugalvit.SparseFormerConfig(**fields | {"hidden_size": 32}))
    with pytest.raises(ValueError, match="gives 32 channels, .* 64"):
        SparseFormerCLIPModel.from_clip(siglip, narrow)


# open_clip


def open_clip_siglip(quick_gelu: bool = False, model_class=open_clip.CustomTextCLIP, bias=-3.7, **text) -> nn.Module:
    """A small SigLIP with the fields of open_clip's configurations."""
    torch.manual_seed(0)
    vision = {"timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"}
    text = {
        **{"context_length": 16, "vocab_size": len(WORDS), "width": 32, "heads": 4, "layers": 2, "mlp_ratio": 3.7362},
        **{"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}},
        **text,
    }
    model = randomize(model_class(64, vision, text, quick_gelu=quick_gelu, init_logit_scale=2.3, init_logit_bias=bias))
    open_clip.model.set_model_preprocess_cfg(
        model, {"size": 32, "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "resize_mode": "squash"}
    )
    return model


def swapped(clip: nn.Module, vision_model: nn.Module) -> nn.Module:
    clip.visual = OpenClipVisual(vision_model)
    return clip


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    texts = ["a photo of a cat", "this is a ship.", "dog"]
    return make_tokenizer()(texts, padding="max_length", max_length=16, return_tensors="pt")["input_ids"]


@torch.no_grad()
def test_a_sparseformer_is_a_visual_tower_of_an_open_clip_siglip(vision_model, inputs, ids):
    clip = open_clip_siglip()
    texts = clip.encode_text(ids, normalize=True)
    clip = swapped(clip, vision_model)
    assert clip.visual.output_dim == texts.shape[1] == 64
    expected = F.normalize(vision_model(inputs["pixel_values"]).pooler_output, dim=-1)
    images, again, scale, bias = clip(inputs["pixel_values"], ids)
    torch.testing.assert_close(images, expected)
    assert torch.equal(again, texts)
    logits = clip.get_logits(inputs["pixel_values"], ids)[0]
    torch.testing.assert_close(logits, scale * expected @ texts.T + bias)
    clip.visual.output_tokens = True
    pooled, tokens = clip.visual(inputs["pixel_values"])
    clip.visual.output_tokens = False
    assert pooled.shape == (2, 64) and tokens.shape == (2, 6, 64)
    assert clip.visual.preprocess_cfg["resize_mode"] == "squash"


def test_the_pooling_head_is_the_last_group_that_open_clip_freezes(vision_model):
    clip = swapped(open_clip_siglip(), copy.deepcopy(vision_model))

    def trained():
        return {name.removeprefix("model.") for name, p in clip.visual.named_parameters() if p.requires_grad}

    clip.lock_image_tower()
    assert not trained()
    clip.lock_image_tower(unlocked_groups=1)
    assert {name.split(".")[0] for name in trained()} == {"pooling_head"}
    clip.lock_image_tower(unlocked_groups=2)
    assert {name.split(".")[0] for name in trained()} == {"layers", "layernorm", "pooling_head"}
    clip.lock_image_tower(unlocked_groups=4)
    assert trained() == {name for name, _ in clip.visual.model.named_parameters()}
    assert {"model.latents.initial_rois", "model.pooling_head.probe"} <= clip.visual.no_weight_decay()
    clip.set_grad_checkpointing(True)
    clip.visual.train()(torch.randn(2, 3, 32, 32)).sum().backward()
    assert clip.visual.model.pooling_head.probe.grad is not None


TEXTS = {
    "SigLIP": {},
    "SigLIP 2": {"act_kwargs": {"approximate": "tanh"}},
    "quick-gelu": {"quick_gelu": True},
    "not apart": {"model_class": open_clip.CLIP},
}


@pytest.mark.parametrize("name", TEXTS)
@torch.no_grad()
def test_converts_to_transformers_and_back(name, vision_model, inputs, ids):
    clip = swapped(open_clip_siglip(**TEXTS[name]), vision_model)
    model = from_open_clip(clip)
    assert type(model) is SparseFormerSiglipModel
    again = to_open_clip(model)
    assert type(again) is open_clip.CustomTextCLIP
    expected = clip.get_logits(inputs["pixel_values"], ids)[0]
    for given in (
        model(ids, inputs["pixel_values"]).logits_per_image,
        again.get_logits(inputs["pixel_values"], ids)[0],
    ):
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1
    text = clip.encode_text(ids)
    torch.testing.assert_close(model.get_text_features(ids).pooler_output, text, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.encode_text(ids), text, rtol=0, atol=1e-5)
    assert again.logit_bias.item() == model.logit_bias.item() == clip.logit_bias.item()


@torch.no_grad()
def test_a_siglip_of_transformers_becomes_one_of_open_clip(model, inputs):
    clip = to_open_clip(model)
    logits = clip.get_logits(inputs["pixel_values"], inputs["input_ids"])[0]
    torch.testing.assert_close(logits, model(**inputs).logits_per_image, rtol=0, atol=1e-5)
    half = to_open_clip(copy.deepcopy(model).half())
    assert half.text.token_embedding.weight.dtype == torch.float16
    assert torch.equal(half.visual.model.latents.initial_rois, model.vision_model.latents.initial_rois)


UNFIT_TEXTS = {
    "causal attention": ({"no_causal_mask": False}, "its attention is causal, that of SigLIP bidirectional"),
    "CLIP's pooling": ({"pool_type": "argmax"}, "SigLIP, which pools by 'last', and it by 'argmax'"),
    "a class token": ({"embed_cls": True}, r"appends a \[CLS\]"),
    "a projection without bias": ({"proj_bias": False}, "no linear layer with bias"),
    "norms in attention": ({"qk_norm": True}, "its attention is a Attention, expected nn.MultiheadAttention"),
    "no bias of logits": ({"bias": None}, "pools by 'last', CLIP at the end"),
}


@pytest.mark.parametrize("name", UNFIT_TEXTS)
def test_text_sides_that_transformers_has_not_are_refused(name, vision_model):
    text, message = UNFIT_TEXTS[name]
    with pytest.raises(ValueError, match=message):
        from_open_clip(swapped(open_clip_siglip(**text), vision_model))


def test_a_text_side_that_leaves_out_padding_is_refused(vision_model):
    clip = swapped(open_clip_siglip(), vision_model)
    clip.text.use_pad_mask = True
    with pytest.raises(ValueError, match="its attention leaves out padding"):
        from_open_clip(clip)


def test_visual_towers_of_other_kinds_are_refused(vision_model):
    fields = {**vision_model.config.to_dict(), "projection_dim": 64}
    projected = SparseFormerVisionModelWithProjection(frugalvit.SparseFormerConfig(**fields))
    with pytest.raises(ValueError, match="holds a SparseFormerVisionModelWithProjection, that of a SigLIP"):
        from_open_clip(swapped(open_clip_siglip(), projected))
    clips_text = {"no_causal_mask": False, "proj_bias": False, "pool_type": "argmax", "bias": None}
    with pytest.raises(ValueError, match="holds a SparseFormerVisionModel, that of a CLIP"):
        from_open_clip(swapped(open_clip_siglip(**clips_text), vision_model))
    classifier = frugalvit.SparseFormerForImageClassification(vision_model.config)
    for wrong in (classifier, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=f"Got a {type(wrong).__name__}, expected a Sparse.* from a SigLIP"):
            OpenClipVisual(wrong)
