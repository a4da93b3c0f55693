"""Tests of CLIP and SigLIP with a SparseFormer: Transformers, open_clip, and conversion between these libraries."""

import copy
import functools

import open_clip
import pytest
import torch
import torch.nn.functional as F
from processes import compute_without_frugalvit
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForZeroShotImageClassification,
    CLIPConfig,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
)
from vision_transformers import KINDS

from frugalvit import (
    OpenClipVisual,
    SparseFormerCLIPModel,
    SparseFormerSiglipModel,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
    from_open_clip,
    to_open_clip,
)
from tiny import SMALL, randomize, word_tokenizer


WORDS = ["[PAD]", "a", "photo", "of", "this", "is", "cat", "dog", "ship", ".", "[UNK]"]
# Only CLIP's texts have a begin and an end token.
CLIP_WORDS = [*WORDS, "[BOS]", "[EOS]"]
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION |= {"image_size": 32, "patch_size": 4}
CLIP_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP_TEXT |= {"vocab_size": len(CLIP_WORDS), "max_position_embeddings": 16, "eos_token_id": len(CLIP_WORDS) - 1}
# open_clip multiplies the width by a ratio to get the intermediate size. In floating point, 56 * (61 / 56) is less
# than 61, so these sizes test rounding.
SIGLIP_TEXT = {"hidden_size": 56, "intermediate_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4}
SIGLIP_TEXT |= {"vocab_size": len(WORDS), "projection_size": 64}
SIGLIP_TEXT |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
TEXTS = ["a photo of a cat", "this is a ship.", "dog"]


def make_teacher(name: str) -> CLIPModel | SiglipModel:
    torch.manual_seed(0)
    if name == "clip":
        return randomize(CLIPModel(CLIPConfig(text_config=CLIP_TEXT, vision_config=VISION, projection_dim=24)))
    model = randomize(SiglipModel(SiglipConfig(text_config=SIGLIP_TEXT, vision_config=VISION)))
    with torch.no_grad():
        model.logit_scale.fill_(2.3)
        model.logit_bias.fill_(-3.7)
    return model


class Towers:
    """`teacher` is a CLIP or SigLIP. `model`, saved in `folder`, has a SparseFormer as vision model."""

    def __init__(self, name: str, folder):
        self.name, self.folder = name, folder
        self.is_siglip = name != "clip"
        self.model_class = SparseFormerSiglipModel if self.is_siglip else SparseFormerCLIPModel
        vision_class = SparseFormerVisionModel if self.is_siglip else SparseFormerVisionModelWithProjection
        self.teacher = make_teacher(name)
        fields = SMALL | {"num_latent_tokens": 6, "elastic_token_counts": [4, 6], "image_mean": 0.5, "image_std": 0.5}
        self.vision_model = randomize(vision_class.from_teacher(self.teacher, **fields))
        self.model = self.put_into(self.teacher)
        self.model.save_pretrained(folder)
        self.pixel_values = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    def put_into(self, teacher):
        put = SparseFormerSiglipModel.from_siglip if self.is_siglip else SparseFormerCLIPModel.from_clip
        return put(teacher, self.vision_model)

    def tokenize(self, texts: list[str], length: int | None = None) -> dict[str, torch.Tensor]:
        # SigLIP's tokenizer makes no attention mask, because SigLIP was trained to attend to padding.
        options = {"model_max_length": 64, "model_input_names": ["input_ids"]} if self.is_siglip else {}
        tokenizer = word_tokenizer(WORDS if self.is_siglip else CLIP_WORDS, **options)
        padding = "max_length" if length or self.is_siglip else True
        return dict(tokenizer(texts, padding=padding, max_length=length, truncation=True, return_tensors="pt"))

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return self.tokenize(TEXTS[:2]) | {"pixel_values": self.pixel_values}


@pytest.fixture(scope="module")
def make_towers(tmp_path_factory):
    return functools.cache(lambda name: Towers(name, tmp_path_factory.mktemp(name) / "model"))


@pytest.fixture(params=["clip", "siglip"])
def towers(request, make_towers) -> Towers:
    return make_towers(request.param)


class AsVisionModel(nn.Module):
    """Vision model that ignores the additional arguments of `CLIPModel` and `SiglipModel`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values, **_):
        return self.model(pixel_values)


@torch.no_grad()
def test_images_and_texts_are_compared_as_the_teacher_compares_them(towers):
    """Outputs equal those of `CLIPModel` or `SiglipModel`. Text embeddings equal the teacher's bit by bit."""
    teacher, model, inputs = make_teacher(towers.name), towers.model, towers.inputs
    texts = {key: value for key, value in inputs.items() if key != "pixel_values"}
    expected = teacher.get_text_features(**texts)
    given = model.get_text_features(**texts)
    assert torch.equal(given.pooler_output, expected.pooler_output)
    teacher.vision_model = AsVisionModel(towers.vision_model.base_model)
    if towers.name == "clip":
        teacher.visual_projection = towers.vision_model.visual_projection
    given, expected = (each(**inputs, return_loss=True) for each in (model, teacher))
    for output in ("text_embeds", "image_embeds", "logits_per_image", "logits_per_text", "loss"):
        torch.testing.assert_close(given[output], expected[output], rtol=0, atol=1e-5)
    assert expected.logits_per_text.std() > 0.1
    # Unlike the teacher, the SparseFormer accepts images of any size.
    assert model.get_image_features(torch.randn(1, 3, 40, 56), output_rois=True).pooler_output.isfinite().all()


@torch.no_grad()
def test_loads_with_and_without_the_package(towers, tmp_path):
    expected = towers.model(**towers.inputs).logits_per_image
    for auto_class in (AutoModel, AutoModelForZeroShotImageClassification):
        loaded, report = auto_class.from_pretrained(towers.folder, output_loading_info=True)
        assert type(loaded) is towers.model_class
        assert not any(report.values())
        assert torch.equal(loaded(**towers.inputs).logits_per_image, expected)
    for given in compute_without_frugalvit(tmp_path, towers.folder, "AutoModel", towers.inputs):
        assert torch.equal(given, expected)


def open_clip_model(name: str, model_class=None, quick_gelu: bool = False, **text) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"context_length": 16, "width": 32, "heads": 4, "layers": 2}
    if name == "clip":
        vision = {"image_size": 32, "patch_size": 4, "width": 64, "layers": 3, "head_width": 16}
        text = {**sizes, "vocab_size": len(CLIP_WORDS), **text}
        model = (model_class or open_clip.CLIP)(24, vision, text, quick_gelu=quick_gelu)
    else:
        vision = {"timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"}
        sizes |= {"vocab_size": len(WORDS), "mlp_ratio": 3.7362, "no_causal_mask": True, "proj_bias": True}
        text = sizes | {"pool_type": "last", "norm_kwargs": {"eps": 1e-6}} | text
        logits = {"init_logit_scale": 2.3, "init_logit_bias": -3.7}
        model = (model_class or open_clip.CustomTextCLIP)(64, vision, text, quick_gelu=quick_gelu, **logits)
    preprocessing = {"size": 32, "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    open_clip.model.set_model_preprocess_cfg(model, preprocessing | {"resize_mode": "squash"})
    return randomize(model)


def swapped(clip: nn.Module, vision_model: nn.Module) -> nn.Module:
    clip.visual = OpenClipVisual(copy.deepcopy(vision_model))
    return clip


@torch.no_grad()
def test_a_sparseformer_is_a_visual_tower_of_open_clip(towers):
    clip, pixel_values = open_clip_model(towers.name), towers.pixel_values
    ids = towers.tokenize(TEXTS, 16)["input_ids"]
    texts = clip.encode_text(ids, normalize=True)
    clip = swapped(clip, towers.vision_model)
    embedded = towers.vision_model(pixel_values)["pooler_output" if towers.is_siglip else "image_embeds"]
    expected = F.normalize(embedded, dim=-1)
    torch.testing.assert_close(clip.encode_image(pixel_values, normalize=True), expected)
    bias = clip.logit_bias if towers.is_siglip else 0
    logits = clip.logit_scale.exp() * expected @ texts.T + bias
    torch.testing.assert_close(clip.get_logits(pixel_values, ids)[0], logits)
    assert open_clip.transform.PreprocessCfg(**clip.visual.preprocess_cfg).resize_mode == "squash"
    clip.lock_image_tower()
    assert not any(parameter.requires_grad for parameter in clip.visual.parameters())
    for fields in ({"resample": 0}, {"resize_size": 40}):
        clip.visual.model.config.update({"resample": 3, "resize_size": 32} | fields)
        with pytest.raises(ValueError, match="which open_clip cannot express"):
            OpenClipVisual(clip.visual.model).preprocess_cfg  # noqa: B018


@torch.no_grad()
def test_a_student_of_open_clips_siglip_is_a_visual_tower_of_open_clip():
    clip = KINDS["open_clip-timm-siglip"].make()
    student = SparseFormerVisionModel.from_teacher(clip, 6, image_mean=0.5, image_std=0.5, **SMALL)
    pixel_values = torch.randn(2, 3, 32, 32)
    expected = student(pixel_values).pooler_output
    clip.visual = OpenClipVisual(student)
    assert torch.equal(clip.encode_image(pixel_values), expected)


CONVERTED = {
    "CLIP": ("clip", {}),
    "CLIP, custom text": (
        "clip",
        {"model_class": open_clip.CustomTextCLIP, "pool_type": "eos", "eos_id": CLIP_WORDS.index("[EOS]")},
    ),
    "SigLIP": ("siglip", {}),
    "SigLIP 2": ("siglip", {"act_kwargs": {"approximate": "tanh"}}),
}


@pytest.mark.parametrize("case", CONVERTED)
@torch.no_grad()
def test_converts_to_transformers_and_back(case, make_towers):
    name, options = CONVERTED[case]
    towers = make_towers(name)
    pixel_values, ids = towers.pixel_values, towers.tokenize(TEXTS, 16)["input_ids"]
    clip = swapped(open_clip_model(name, **options), towers.vision_model)
    model = from_open_clip(clip)
    again = to_open_clip(model)
    assert type(model) is towers.model_class
    text, logits = clip.encode_text(ids), clip.get_logits(pixel_values, ids)[0]
    for given, expected in (
        (model.get_text_features(ids).pooler_output, text),
        (again.encode_text(ids), text),
        (model(ids, pixel_values).logits_per_image, logits),
        (again.get_logits(pixel_values, ids)[0], logits),
    ):
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    assert logits.std() > 0.1
