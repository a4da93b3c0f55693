"""Accuracy of nearest neighbors on a model's features, without any training."""

import argparse

import torch
import torch.nn.functional as F

from ..common.metrics import accuracies
from .features import LabeledFeatures, evaluate_features


# Temperature of the neighbors' weights, as in DINO.
TEMPERATURE = 0.07
# Similarities held in memory at once.
MOST_SIMILARITIES = 2**24


def run(arguments: argparse.Namespace) -> dict[str, object]:
    def score(train: LabeledFeatures, test: LabeledFeatures) -> dict[str, object]:
        scores = neighbor_scores(train, test.features, arguments.neighbors)
        measured = accuracies().compute(predictions=scores, references=test.labels)
        return {"neighbors": arguments.neighbors, **measured}

    return evaluate_features(arguments, score)


@torch.inference_mode()
def neighbor_scores(train: LabeledFeatures, features: torch.Tensor, neighbors: int = 20) -> torch.Tensor:
    """Score each class by the votes of the nearest labeled images, weighted by exp(cosine / 0.07).

    Args:
        train (`LabeledFeatures`): The labeled images.
        features (`torch.Tensor`): `(images, embedding_size)`, float32.
        neighbors (`int`, *optional*, defaults to 20): Number of voters.

    Returns:
        `torch.Tensor`: `(images, classes)`, each row sums to 1.
    """
    if len(train) < neighbors:
        raise ValueError(f"--neighbors is {neighbors}, expected at most the {len(train)} labeled images.")
    known, classes = F.normalize(train.features, dim=1), int(train.labels.max()) + 1
    scores = []
    for chunk in F.normalize(features, dim=1).split(max(MOST_SIMILARITIES // len(known), 1)):
        similarity, nearest = (chunk @ known.mT).topk(neighbors)
        votes = torch.zeros(len(chunk), classes)
        scores.append(votes.scatter_add_(1, train.labels[nearest], (similarity / TEMPERATURE).softmax(1)))
    return torch.cat(scores)
