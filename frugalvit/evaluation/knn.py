"""Accuracy of a nearest-neighbor classifier on a model's embeddings."""

import argparse

import torch
import torch.nn.functional as F

from ..inference import Embedder
from ..training.data import class_names
from ..training.metrics import accuracies
from .features import embed_images
from .images import read_labeled_parts, take_first


# Temperature of the neighbors' weights, the same as in DINO.
TEMPERATURE = 0.07


def run(arguments: argparse.Namespace) -> dict[str, object]:
    train, test, split = read_labeled_parts(arguments)
    test = take_first(test, arguments.limit)
    options = {name: getattr(arguments, name) for name in ("batch_size", "num_workers", "device")}
    options |= {"return_errors": arguments.skip_corrupt, "trust_remote_code": arguments.trust_remote_code}
    embed = Embedder(arguments.model, **options)
    known, labels = embed_images(embed, train)
    features, test_labels = embed_images(embed, test)
    scores = neighbor_scores(known, labels, features, arguments.neighbors)
    return {
        "model": arguments.model,
        "dataset": " ".join(arguments.eval_dataset or arguments.dataset),
        "train_split": arguments.train_split,
        "split": split,
        "classes": len(class_names(train)),
        "train_images": len(labels),
        "images": len(test_labels),
        "embedding_size": known.shape[1],
        "neighbors": arguments.neighbors,
        **accuracies().compute(predictions=scores, references=test_labels),
    }


@torch.inference_mode()
def neighbor_scores(
    known: torch.Tensor, labels: torch.Tensor, features: torch.Tensor, neighbors: int = 20
) -> torch.Tensor:
    """Score classes by the votes of the nearest labeled images. A vote has a weight of exp(cosine / 0.07).

    Args:
        known (`torch.Tensor`): Embeddings of the labeled images, `(labeled images, embedding_size)`.
        labels (`torch.Tensor`): Labels of the labeled images, `(labeled images,)`.
        features (`torch.Tensor`): Embeddings to classify, `(images, embedding_size)`.
        neighbors (`int`, *optional*, defaults to 20): Number of neighbors that vote.

    Returns:
        `torch.Tensor`: Scores `(images, classes)`. Each row sums to 1.
    """
    if len(known) < neighbors:
        raise ValueError(f"neighbors is {neighbors}, expected at most the {len(known)} labeled images.")
    known = F.normalize(known, dim=1)
    scores = []
    for chunk in F.normalize(features, dim=1).split(1024):
        similarity, nearest = (chunk @ known.mT).topk(neighbors)
        votes = torch.zeros(len(chunk), int(labels.max()) + 1)
        scores.append(votes.scatter_add_(1, labels[nearest], (similarity / TEMPERATURE).softmax(1)))
    return torch.cat(scores)
