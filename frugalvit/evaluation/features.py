"""Compute embeddings of many images."""

from collections.abc import Sequence

import datasets
import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm import tqdm

from ..inference import Embedder
from ..training.data import label_numbers
from ..training.preprocessing import CorruptImageError


def extract_features(
    model: nn.Module, image_processor, images: Sequence[Image.Image], batch_size: int = 64
) -> torch.Tensor:
    """Compute embeddings of images, for example for search, clustering or classification. See `image_embedder`.

    Args:
        model (`nn.Module`): A SparseFormer, a CLIP, or a vision transformer of Transformers, timm or open_clip, with
            or without a classifier.
        image_processor: The model's image processor.
        images (sequence of `PIL.Image.Image`): At least one image.
        batch_size (`int`, *optional*, defaults to 64): Number of images in a forward pass.

    Returns:
        `torch.Tensor`: Embeddings `(images, embedding_size)`, float32 on the CPU, not normalized.
    """
    embed = Embedder(model, image_processor, batch_size=batch_size)
    return torch.from_numpy(np.stack(list(embed(images))))


def embed_images(embed: Embedder, images: datasets.Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embeddings `(images, embedding_size)` and the labels `(images,)` of the readable images."""
    found = list(tqdm(embed(images["image"]), "embed", len(images), leave=False, unit=" images", disable=None))
    read = [index for index, each in enumerate(found) if not isinstance(each, CorruptImageError)]
    if not read:
        raise ValueError(f"None of the {len(images)} images of the data set can be read.")
    features = torch.from_numpy(np.stack([found[index] for index in read]))
    return features, torch.from_numpy(label_numbers(images)[read])
