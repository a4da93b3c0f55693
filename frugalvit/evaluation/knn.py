"""Accuracy of nearest neighbors on a model's features, without any training."""

import argparse
import functools

import torch
import torch.nn.functional as F

from .features import evaluate_features


# Temperature of the neighbors' weights, as in DINO.
TEMPERATURE = 0.07


def run(arguments: argparse.Namespace) -> dict[str, object]:
    def learn(features: torch.Tensor, labels: torch.Tensor):
        return functools.partial(neighbor_scores, features, labels, neighbors=arguments.neighbors)

    return evaluate_features(arguments, learn) | {"neighbors": arguments.neighbors}


@torch.inference_mode()
def neighbor_scores(
    known: torch.Tensor, labels: torch.Tensor, features: torch.Tensor, neighbors: int = 20
) -> torch.Tensor:
    """Score each class by the votes of the nearest labeled images, weighted by exp(cosine / 0.07). Returns `(images,
    classes)`, each row sums to 1."""
    if len(known) < neighbors:
        raise ValueError(f"--neighbors is {neighbors}, expected at most the {len(known)} labeled images.")
    known, scores = F.normalize(known, dim=1), []
    for chunk in F.normalize(features, dim=1).split(1024):
        similarity, nearest = (chunk @ known.mT).topk(neighbors)
        votes = torch.zeros(len(chunk), int(labels.max()) + 1)
        scores.append(votes.scatter_add_(1, labels[nearest], (similarity / TEMPERATURE).softmax(1)))
    return torch.cat(scores)
