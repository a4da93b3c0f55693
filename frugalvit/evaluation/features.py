"""Evaluate a model's embeddings of labeled images."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm import tqdm

from ..common.decoding import CorruptImageError
from ..common.labels import class_names, label_numbers
from ..inference import Embedder
from .images import read_labeled_parts, take_first


@dataclass
class LabeledFeatures:
    """Embeddings of labeled images.

    Args:
        features (`torch.Tensor`): `(images, embedding_size)`, float32, on the CPU.
        labels (`torch.Tensor`): `(images,)`, int64, from 0.
    """

    features: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


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
    embed = Embedder(model, image_processor, batch_size=batch_size)
    return torch.from_numpy(np.stack(list(embed(images))))


def embed_images(embed: Embedder, images: datasets.Dataset) -> LabeledFeatures:
    """Embed a data set's labeled images, without those that cannot be read."""
    found = list(tqdm(embed(images["image"]), "embed", len(images), leave=False, unit=" images", disable=None))
    read = [index for index, each in enumerate(found) if not isinstance(each, CorruptImageError)]
    if not read:
        raise ValueError(f"None of the {len(images)} images of the data set can be read.")
    features = torch.from_numpy(np.stack([found[index] for index in read]))
    return LabeledFeatures(features, torch.from_numpy(label_numbers(images)[read]))


def evaluate_features(
    arguments: argparse.Namespace, score: Callable[[LabeledFeatures, LabeledFeatures], dict[str, object]]
) -> dict[str, object]:
    """Embed the images that the arguments name, and return the scores that `score` computes of the features of the
    images to learn from and of the test images, after model, data sets, splits and counts."""
    train_images, test_images, split = read_labeled_parts(arguments)
    test_images = take_first(test_images, arguments.limit)
    embed = Embedder(
        arguments.model,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        return_errors=arguments.skip_corrupt,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
    )
    train, test = embed_images(embed, train_images), embed_images(embed, test_images)
    about = {"model": arguments.model, "dataset": " ".join(arguments.dataset), "train_split": arguments.train_split}
    if arguments.eval_dataset:
        about["eval_dataset"] = " ".join(arguments.eval_dataset)
    return about | {
        "split": split,
        "classes": len(class_names(train_images)),
        "train_images": len(train),
        "images": len(test),
        "skipped": len(train_images) - len(train) + len(test_images) - len(test),
        "embedding_size": train.features.shape[1],
        **score(train, test),
    }
