"""Tiny ViTs, LLaVAs and PaliGemmas with random weights, and a tokenizer of a few words."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    Gemma2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionConfig,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from frugalvit import SparseFormerVisionModel


# Configuration fields of a small SparseFormer.
SMALL = {"stem_channels": 8, "num_sampling_points": 4, "num_mixed_points": 4, "num_focusing_iterations": 2}


def randomize(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """Add noise to every parameter, because some layers are initialized as the identity function."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def word_tokenizer(words: list[str], **options) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are indices of `words`. It adds [BOS] and [EOS] to texts if `words` has [BOS]."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "[BOS]" in words:
        ends = [(token, words.index(token)) for token in ("[BOS]", "[EOS]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=ends)
        options |= {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", **options)


# Configuration fields of a small SparseFormer with patches.
PATCHES = {
    "image_size": 32,
    "patch_size": 4,
    "num_latent_tokens": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
# Configuration fields of a small ViT.
VIT = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_vit(**fields) -> ViTForImageClassification:
    """Build a ViT. All calls give the same weights."""
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**VIT | {"intermediate_size": 64} | fields)).eval()


def save_vit(folder: Path, **fields) -> Path:
    """Save a ViT and its image processor."""
    make_vit(**fields).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


# Vocabulary of a small LLaVA, id of its image token, and fields of its vision tower's configuration.
WORDS = ["[PAD]", "[UNK]", "what", "is", "this", "and", "?", "cat", "dog", "ship", "<image>"]
IMAGE = WORDS.index("<image>")
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}


def make_llava(**fields) -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    language = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=32, patch_size=4, **VISION),
        text_config=LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=None, **language),
        image_token_index=IMAGE,
        **fields,
    )
    return randomize(LlavaForConditionalGeneration(config))


def make_tower(llava, tokens=7, **fields):
    tower = llava.model.vision_tower
    fields = SMALL | {"image_mean": 0.5, "image_std": 0.5} | fields
    return randomize(SparseFormerVisionModel.from_teacher(tower, tokens, **fields))


def make_processor(llava) -> LlavaProcessor:
    image_processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    strategy = llava.config.vision_feature_select_strategy
    return LlavaProcessor(
        image_processor,
        word_tokenizer(WORDS, padding_side="left", extra_special_tokens={"image_token": "<image>"}),
        patch_size=4,
        num_additional_image_tokens=1,
        vision_feature_select_strategy=strategy,
    )


# Vocabulary size of a PaliGemma. It is large, because the processor adds location and segmentation tokens.
PALIGEMMA_TOKENS = 1300


def make_paligemma() -> PaliGemmaForConditionalGeneration:
    torch.manual_seed(0)
    language = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = PaliGemmaConfig(
        vision_config=SiglipVisionConfig(image_size=32, patch_size=4, vision_use_head=False, **VISION),
        text_config=Gemma2Config(
            vocab_size=PALIGEMMA_TOKENS,
            num_key_value_heads=1,
            head_dim=8,
            pad_token_id=0,
            eos_token_id=None,
            **language,
        ),
        image_token_index=IMAGE,
        vocab_size=PALIGEMMA_TOKENS,
        projection_dim=32,
        hidden_size=32,
    )
    return randomize(PaliGemmaForConditionalGeneration(config))


def make_paligemma_processor() -> PaliGemmaProcessor:
    return PaliGemmaProcessor(
        SiglipImageProcessor(size={"height": 32, "width": 32}, image_seq_length=64),
        word_tokenizer(
            [*WORDS, "[BOS]", "[EOS]"], padding_side="left", extra_special_tokens={"image_token": "<image>"}
        ),
    )


def save_to_swap(folder: Path, model, **fields) -> list[str]:
    """Save a LLaVA or PaliGemma with its processor, and a SparseFormer. Return options that name the saved models."""
    processor = make_processor(model) if model.config.model_type == "llava" else make_paligemma_processor()
    for part in (model, processor):
        part.save_pretrained(folder / model.config.model_type)
    make_tower(model, **fields).save_pretrained(folder / "tower")
    return ["--model", str(folder / model.config.model_type), "--vision-model", str(folder / "tower")]
