"""Load a CLIP or SigLIP, with its own vision model or a SparseFormer, and embed images and texts."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from ..modeling.modeling_sparseformer_clip import SparseFormerCLIPModel, SparseFormerSiglipModel
from ..training.loading import load_model, load_pretrained
from ..training.scores import check_scores


@dataclass
class TwoTowers:
    """A CLIP or SigLIP with its tokenizer and its image processor."""

    model: PreTrainedModel
    tokenizer: object
    image_processor: object

    @property
    def device(self) -> torch.device:
        return self.model.device

    def embed_images(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Compute normalized float32 embeddings `(batch, width)` of pixel values."""
        return F.normalize(self.model.get_image_features(pixel_values).pooler_output.float(), dim=-1)

    def embed_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Compute normalized float32 embeddings `(batch, width)` of texts."""
        config = self.model.config
        lengths = {"padding": True}
        if "siglip" in config.model_type:
            # SigLIP was trained on texts padded to one length. Some SigLIP tokenizers do not store this length.
            lengths = {"padding": "max_length", "max_length": config.text_config.max_position_embeddings}
        inputs = self.tokenizer(list(texts), **lengths, truncation=True, return_tensors="pt").to(self.device)
        return F.normalize(self.model.get_text_features(**inputs).pooler_output.float(), dim=-1)


def name_models(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the names of the evaluated models as a dictionary, which becomes part of the results."""
    return {"model": arguments.model} | ({"vision_model": arguments.vision_model} if arguments.vision_model else {})


def load_two_towers(
    name: str, vision_model: str | None = None, device: str | None = None, trust_remote_code: bool = False
) -> TwoTowers:
    """Load a CLIP or SigLIP. The SparseFormer `vision_model`, if given, replaces the model's own vision model."""
    model, image_processor = load_model(name, "zero-shot-image-classification", device, trust_remote_code)
    tokenizer = load_tokenizer(name, model.config.text_config.vocab_size, trust_remote_code)
    if vision_model:
        student, image_processor = load_model(vision_model, "image-feature-extraction", device)
        is_siglip = hasattr(model, "logit_bias")
        put_into = SparseFormerSiglipModel.from_siglip if is_siglip else SparseFormerCLIPModel.from_clip
        return TwoTowers(put_into(model, student), tokenizer, image_processor)
    if model.config.model_type == "siglip2":
        raise ValueError(
            f"{name!r} is a SigLIP 2 NaFlex, which takes patches; expected a model that takes images of one size, or "
            "a SparseFormer as its image side (vision_model)."
        )
    return TwoTowers(model, tokenizer, image_processor)


def load_tokenizer(name: str, vocab_size: int, trust_remote_code: bool = False):
    """Load a CLIP's tokenizer.

    Raises:
        ValueError: If the tokenizer's files are missing. In this case, Transformers may make a tokenizer that has no
            vocabulary and maps all texts to the same tokens.
    """
    tokenizer = load_pretrained(AutoTokenizer, name, "a CLIP with a tokenizer", trust_remote_code)
    # `vocab_size` may be larger than the tokenizer's number of tokens, so only a large difference is an error.
    if len(tokenizer) < vocab_size // 10:
        raise ValueError(
            f"The tokenizer of {name!r} has {len(tokenizer):,} tokens and its model {vocab_size:,}; put its files "
            "(tokenizer.json, or vocab.json and merges.txt) beside it."
        )
    return tokenizer


@torch.inference_mode()
def embed_all_texts(towers: TwoTowers, texts: Sequence[str], batch_size: int) -> torch.Tensor:
    """Return the normalized embeddings `(texts, width)` of all texts, on the CPU."""
    starts = tqdm(range(0, len(texts), batch_size), desc="texts", leave=False, disable=None)
    embeddings = torch.cat([towers.embed_texts(texts[start : start + batch_size]).cpu() for start in starts])
    check_scores(embeddings, "embeddings")
    return embeddings
