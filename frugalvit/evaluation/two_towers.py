"""CLIPs of Transformers, of open_clip and of this package, behind one interface."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import open_clip
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from ..common.exported import is_exported
from ..common.loading import (
    OPEN_CLIP,
    load_exported,
    load_image_processor,
    load_pretrained,
    load_vision_model,
    one_error,
    split_revision,
)
from ..common.scores import check_scores
from ..modeling.modeling_sparseformer_clip import SparseFormerCLIPModel, SparseFormerSiglipModel
from ..modeling.open_clip_adapter import OpenClipVisual


@dataclass
class TwoTowers:
    """A model that compares images with texts.

    Args:
        image_processor: Turns `PIL.Image` into pixel values.
        embed_images (`Callable`): Maps pixel values to embeddings `(batch, width)` of norm 1, float32.
        embed_texts (`Callable`): Maps texts to embeddings `(batch, width)` of norm 1, float32.
        device (`torch.device`): The model's device.
    """

    image_processor: object
    embed_images: Callable[[torch.Tensor], torch.Tensor]
    embed_texts: Callable[[Sequence[str]], torch.Tensor]
    device: torch.device


def name_models(arguments: argparse.Namespace) -> dict[str, str]:
    """The options of `add_two_towers_arguments` for the results."""
    return {"model": arguments.model} | ({"vision_model": arguments.vision_model} if arguments.vision_model else {})


def load_two_towers(
    name: str, vision_model: str | None = None, device: str | None = None, trust_remote_code: bool = False
) -> TwoTowers:
    """Load a CLIP or SigLIP, with a SparseFormer as its image side if one is given."""
    if is_exported(name):
        if vision_model:
            raise ValueError(f"The exported {name!r} keeps its image side; export the CLIP with the other one.")
        return _exported(name, device)
    student, image_processor = load_vision_model(vision_model, device) if vision_model else (None, None)
    if name.startswith(OPEN_CLIP):
        return _open_clip(name, student, image_processor, device)
    model = load_pretrained(name, device, trust_remote_code, "a CLIP", _clip_class)
    if student is not None:
        is_siglip = hasattr(model, "logit_bias")
        put_into = SparseFormerSiglipModel.from_siglip if is_siglip else SparseFormerCLIPModel.from_clip
        model = put_into(model, student)
    elif model.config.model_type == "siglip2":
        raise ValueError(
            f"{name!r} is a SigLIP 2 NaFlex, which takes patches; expected a model that takes images of one size, or "
            "a SparseFormer as its image side (--vision-model)."
        )
    if image_processor is None:
        hub_id, revision = split_revision(name)
        image_processor = AutoImageProcessor.from_pretrained(hub_id, trust_remote_code=trust_remote_code, **revision)
    text_config = model.config.text_config
    tokenizer = load_tokenizer(name, text_config.vocab_size, trust_remote_code)
    lengths = {"padding": True}
    if "siglip" in model.config.model_type:
        # SigLIP was trained on texts of one length, which not all of its tokenizers store.
        lengths = {"padding": "max_length", "max_length": text_config.max_position_embeddings}

    def embed_texts(texts: Sequence[str]) -> torch.Tensor:
        inputs = tokenizer(list(texts), **lengths, truncation=True, return_tensors="pt").to(model.device)
        return F.normalize(model.get_text_features(**inputs).pooler_output.float(), dim=-1)

    return TwoTowers(
        image_processor=image_processor,
        embed_images=lambda pixels: F.normalize(model.get_image_features(pixels).pooler_output.float(), dim=-1),
        embed_texts=embed_texts,
        device=model.device,
    )


def load_tokenizer(name: str, vocab_size: int, trust_remote_code: bool = False):
    """Load a CLIP's tokenizer. If its files are missing, Transformers may make one without words, to which all texts
    are the same; that is refused."""
    hub_id, revision = split_revision(name)
    with one_error(name, "a CLIP with a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(hub_id, trust_remote_code=trust_remote_code, **revision)
    # Models may have room for more.
    if len(tokenizer) < vocab_size // 10:
        raise ValueError(
            f"The tokenizer of {name!r} has {len(tokenizer):,} tokens and its model {vocab_size:,}; put its files "
            "(tokenizer.json, or vocab.json and merges.txt) beside it."
        )
    return tokenizer


def _clip_class(config) -> type:
    if not hasattr(config, "text_config") or not hasattr(config, "vision_config"):
        raise ValueError(f"it is a {config.model_type}, expected a CLIP or SigLIP, with both sides")
    return AutoModel


def _exported(name: str, device: str | None) -> TwoTowers:
    """The two programs of a CLIP."""
    vision = load_exported(name, device, "a CLIP", ["image_embeds"])
    text = load_exported(name, device, "a CLIP", ["text_embeds"], part="text_model")
    config = text.config.text_config
    tokenizer = load_tokenizer(name, config.vocab_size)
    lengths = {"padding": "max_length", "max_length": config.max_position_embeddings}

    def embed_texts(texts: Sequence[str]) -> torch.Tensor:
        inputs = tokenizer(list(texts), **lengths, truncation=True, return_tensors="pt")
        # Some tokenizers make no mask.
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        return F.normalize(text(input_ids=inputs["input_ids"], attention_mask=mask).text_embeds.float(), dim=-1)

    return TwoTowers(
        image_processor=load_image_processor(name, False, "a CLIP"),
        embed_images=lambda pixels: F.normalize(vision(pixels).image_embeds.float(), dim=-1),
        embed_texts=embed_texts,
        device=vision.device,
    )


def _open_clip(name: str, student, image_processor, device: str | None) -> TwoTowers:
    model, own_image_processor = load_vision_model(name, device)
    if student is not None:
        model.visual = OpenClipVisual(student)
    identifier = name.removeprefix(OPEN_CLIP)
    if not identifier.startswith(("hf-hub:", "local-dir:")):
        identifier = identifier.partition(":")[0]
    tokenizer = open_clip.get_tokenizer(identifier, context_length=model.context_length)
    device = model.logit_scale.device
    return TwoTowers(
        image_processor=image_processor or own_image_processor,
        embed_images=lambda pixels: model.encode_image(pixels, normalize=True).float(),
        embed_texts=lambda texts: model.encode_text(tokenizer(list(texts)).to(device), normalize=True).float(),
        device=device,
    )


@torch.inference_mode()
def embed_all_texts(towers: TwoTowers, texts: Sequence[str], batch_size: int) -> torch.Tensor:
    """Embed many texts, `(texts, width)`, on the CPU."""
    starts = tqdm(range(0, len(texts), batch_size), desc="texts", leave=False, disable=None)
    embeddings = torch.cat([towers.embed_texts(texts[start : start + batch_size]).cpu() for start in starts])
    check_scores(embeddings, "embeddings")
    return embeddings
