"""Linear probes: how good a frozen model's features are for a linear classifier."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from ..common.metrics import accuracies
from .embeddings import LabeledFeatures, evaluate_features


# Weights of the penalty among which images that are held back choose, the strongest first.
PENALTIES = (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
# One image in so many of each class is held back for that choice.
HELD_BACK = 5
STEPS = 200


def run(arguments: argparse.Namespace) -> dict[str, object]:
    return evaluate_features(arguments, lambda train, test: probe_accuracy(train, test, arguments.seed))


def probe_accuracy(train: LabeledFeatures, test: LabeledFeatures, seed: int = 0) -> dict[str, object]:
    """`penalty`, `accuracy` and `top5_accuracy` of `fit_probe`."""
    probe = fit_probe(train, seed)
    measured = accuracies().compute(predictions=probe(test.features), references=test.labels)
    return {"penalty": probe.penalty, **measured}


class LinearProbe(nn.Module):
    """Multinomial logistic regression on standardized features.

    Minimizes the mean cross-entropy and `penalty / 2` times the squared norm of the weights, by L-BFGS.

    Args:
        train (`LabeledFeatures`): The images that it learns from.
        classes (`int`): Number of classes.
        penalty (`float`): Weight of the penalty.
        start (`LinearProbe`, *optional*): A probe of the same features, from whose solution this one starts.
    """

    def __init__(self, train: LabeledFeatures, classes: int, penalty: float, start: "LinearProbe | None" = None):
        super().__init__()
        self.penalty = penalty
        self.register_buffer("mean", train.features.mean(0))
        # A channel that is always the same says nothing.
        self.register_buffer("std", train.features.std(0, correction=0).clamp(min=1e-6))
        self.linear = nn.Linear(train.features.shape[1], classes)
        if start is None:
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)
        else:
            self.linear.load_state_dict(start.linear.state_dict())
        self._fit(self.standardize(train.features), train.labels)

    def standardize(self, features: torch.Tensor) -> torch.Tensor:
        return (features - self.mean) / self.std

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features `(images, embedding_size)` to scores `(images, classes)`."""
        with torch.no_grad():
            return self.linear(self.standardize(features))

    @torch.enable_grad()
    def _fit(self, inputs: torch.Tensor, labels: torch.Tensor):
        optimizer = torch.optim.LBFGS(
            self.parameters(), max_iter=STEPS, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
        )

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(self.linear(inputs), labels)
            value = value + self.penalty / 2 * self.linear.weight.square().sum()
            value.backward()
            return value

        optimizer.step(loss)


def fit_probe(train: LabeledFeatures, seed: int = 0) -> LinearProbe:
    """Fit a linear probe. Its penalty is the one of `PENALTIES` that classifies held-back images best, the strongest
    of equal ones. It is then fitted to all images.

    Args:
        train (`LabeledFeatures`): The images that it learns from.
        seed (`int`, *optional*, defaults to 0): Chooses the images that are held back.

    Raises:
        ValueError: if all images are of one class.
    """
    if len(train.labels.unique()) < 2:
        raise ValueError(f"All {len(train)} labeled images are of one class; expected at least two.")
    classes = int(train.labels.max()) + 1
    held_back = choose_held_back(train.labels, seed)
    known, asked = (LabeledFeatures(train.features[part], train.labels[part]) for part in (~held_back, held_back))
    probe, best, penalty = None, -1.0, PENALTIES[0]
    for candidate in tqdm(PENALTIES, desc="penalty", leave=False, disable=None):
        probe = LinearProbe(known, classes, candidate, probe)
        accuracy = (probe(asked.features).argmax(1) == asked.labels).double().mean().item()
        if accuracy > best:
            best, penalty = accuracy, candidate
    return LinearProbe(train, classes, penalty)


def choose_held_back(labels: torch.Tensor, seed: int) -> torch.Tensor:
    """Whether each image is held back, `(images,)` bool: one in `HELD_BACK` of each class, one of a smaller class, but
    never its only one."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]
    chosen = [
        torch.arange(size) % HELD_BACK == min(size, HELD_BACK) - 1
        for size in labels.unique(return_counts=True)[1].tolist()
    ]
    held_back = torch.zeros(len(labels), dtype=torch.bool)
    held_back[order[torch.cat([part if len(part) > 1 else ~part for part in chosen])]] = True
    return held_back
