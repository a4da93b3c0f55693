"""Evaluate a model's embeddings of labeled images."""

import argparse
from collections.abc import Callable, Sequence

import datasets
import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm import tqdm

from ..common.decoding import CorruptImageError
from ..common.labels import class_names, label_numbers
from ..common.metrics import accuracies
from ..inference import Embedder
from .images import read_labeled_parts, take_first


def extract_features(
    model: nn.Module, image_processor, images: Sequence[Image.Image], batch_size: int = 64
) -> torch.Tensor:
    """Compute the embedding of each image (see `image_embedder`), to search, to cluster or to classify.

    Args:
        model (`nn.Module`): A SparseFormer, a vision transformer of Transformers, timm or open_clip with or without
            classifier, or a CLIP.
        image_processor: Its image processor.
        images (sequence of `PIL.Image.Image`): At least one image.
        batch_size (`int`, *optional*, defaults to 64): Images at a time.

    Returns:
        `torch.Tensor`: `(images, embedding_size)`, float32, on the CPU; not normalized.
    """
    embed = Embedder(model, image_processor, batch_size=batch_size, exact=True)
    return torch.from_numpy(np.stack(list(embed(images))))


def embed_images(embed: Embedder, images: datasets.Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings and labels of the images that can be read."""
    found = list(tqdm(embed(images["image"]), "embed", len(images), leave=False, unit=" images", disable=None))
    read = [index for index, each in enumerate(found) if not isinstance(each, CorruptImageError)]
    if not read:
        raise ValueError(f"None of the {len(images)} images of the data set can be read.")
    features = torch.from_numpy(np.stack([found[index] for index in read]))
    return features, torch.from_numpy(label_numbers(images)[read])


def evaluate_features(arguments: argparse.Namespace, learn: Callable[..., Callable]) -> dict[str, object]:
    """Embed the images that the arguments name and measure accuracies by the scores that `learn(features, labels)(
    test_features)` returns."""
    train_images, test_images, split = read_labeled_parts(arguments)
    test_images = take_first(test_images, arguments.limit)
    options = {name: getattr(arguments, name) for name in ("batch_size", "num_workers", "exact", "device")}
    options |= {"return_errors": arguments.skip_corrupt, "trust_remote_code": arguments.trust_remote_code}
    embed = Embedder(arguments.model, **options)
    features, labels = embed_images(embed, train_images)
    test_features, test_labels = embed_images(embed, test_images)
    scores = learn(features, labels)(test_features)
    return {
        "model": arguments.model,
        "dataset": " ".join(arguments.dataset),
        "train_split": arguments.train_split,
        **({"eval_dataset": " ".join(arguments.eval_dataset)} if arguments.eval_dataset else {}),
        "split": split,
        "classes": len(class_names(train_images)),
        "train_images": len(labels),
        "images": len(test_labels),
        "skipped": len(train_images) - len(labels) + len(test_images) - len(test_labels),
        "embedding_size": features.shape[1],
        **accuracies().compute(predictions=scores, references=test_labels),
    }
