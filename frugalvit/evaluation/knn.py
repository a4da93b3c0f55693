"""Accuracy of the nearest neighbors: how good a model's features are without any training."""

import argparse
import functools

import torch
import torch.nn.functional as F

from ..common.metrics import accuracies
from .embeddings import LabeledFeatures, evaluate_features


# Temperature of the neighbors' weights, as in DINO.
TEMPERATURE = 0.07
# Similarities that are in memory at a time.
MOST_SIMILARITIES = 2**24


def run(arguments: argparse.Namespace) -> dict[str, object]:
    return evaluate_features(arguments, functools.partial(neighbor_accuracy, neighbors=arguments.neighbors))


def neighbor_accuracy(train: LabeledFeatures, test: LabeledFeatures, neighbors: int = 20) -> dict[str, object]:
    """`neighbors`, `accuracy` and `top5_accuracy` of `neighbor_scores`."""
    scores = neighbor_scores(train, test.features, neighbors)
    return {"neighbors": neighbors, **accuracies().compute(predictions=scores, references=test.labels)}


@torch.inference_mode()
def neighbor_scores(train: LabeledFeatures, features: torch.Tensor, neighbors: int = 20) -> torch.Tensor:
    """Scores of each class from the votes of the nearest labeled images.

    Args:
        train (`LabeledFeatures`): The labeled images that vote.
        features (`torch.Tensor`): `(images, embedding_size)`, float32.
        neighbors (`int`, *optional*, defaults to 20): Number of nearest images that vote.

    Returns:
        `torch.Tensor`: `(images, classes)`, each row sums to 1.

    Raises:
        ValueError: if there are fewer labeled images than neighbors.
    """
    if len(train) < neighbors:
        raise ValueError(
            f"{neighbors} neighbors are to vote among {len(train)} labeled images; give fewer by --neighbors, or more "
            "images."
        )
    known, classes = F.normalize(train.features, dim=1), int(train.labels.max()) + 1
    scores = []
    for chunk in F.normalize(features, dim=1).split(max(MOST_SIMILARITIES // len(known), 1)):
        similarity, nearest = (chunk @ known.mT).topk(neighbors)
        votes = torch.zeros(len(chunk), classes)
        scores.append(votes.scatter_add_(1, train.labels[nearest], (similarity / TEMPERATURE).softmax(1)))
    return torch.cat(scores)
