"""Linear probes: logistic regression on the features of a frozen model."""

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm


# Candidates for the weight of the L2 penalty, in descending order.
PENALTIES = (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
# To choose the penalty, one of every `HELD_BACK` images of each class is used for validation.
HELD_BACK = 5


class LinearProbe(nn.Module):
    """Multinomial logistic regression on standardized features, fitted by L-BFGS.

    The loss is the mean cross-entropy plus `penalty / 2` times the squared norm of the weights. `labels` are class
    indices `(images,)` or shares of classes `(images, classes)`. `start` is a probe with initial weights.
    """

    def __init__(
        self,
        features: torch.Tensor,
        labels: torch.Tensor,
        classes: int,
        penalty: float,
        start: "LinearProbe | None" = None,
        max_iter: int = 200,
    ):
        super().__init__()
        self.penalty = penalty
        self.mean = features.mean(0)
        self.std = features.std(0, correction=0).clamp(min=1e-6)
        self.linear = nn.Linear(features.shape[1], classes, device=features.device)
        if start is None:
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)
        else:
            self.linear.load_state_dict(start.linear.state_dict())
        self._fit((features - self.mean) / self.std, labels, max_iter)

    @torch.no_grad()
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map features `(…, embedding_size)` to scores `(…, classes)`."""
        return self.linear((features - self.mean) / self.std)

    @torch.enable_grad()
    def _fit(self, inputs: torch.Tensor, labels: torch.Tensor, max_iter: int):
        optimizer = torch.optim.LBFGS(self.parameters(), max_iter=max_iter, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(self.linear(inputs), labels)
            value = value + self.penalty / 2 * self.linear.weight.square().sum()
            value.backward()
            return value

        optimizer.step(loss)


def fit_probe(features: torch.Tensor, labels: torch.Tensor, seed: int = 0) -> LinearProbe:
    """Fit a linear probe to all images. The penalty is chosen by the accuracy on held-back images. If several
    penalties have the highest accuracy, the largest of these penalties is chosen. `seed` determines which images are
    held back."""
    if len(labels.unique()) < 2:
        raise ValueError(f"All {len(labels)} labeled images are of one class; expected at least two.")
    classes, held_back = int(labels.max()) + 1, choose_held_back(labels, seed)
    probe, accuracy = None, {}
    for penalty in tqdm(PENALTIES, desc="penalty", leave=False, disable=None):
        probe = LinearProbe(features[~held_back], labels[~held_back], classes, penalty, probe)
        right = probe(features[held_back]).argmax(1) == labels[held_back]
        accuracy[penalty] = right.double().mean().item()
    return LinearProbe(features, labels, classes, max(accuracy, key=accuracy.get))


def choose_held_back(labels: torch.Tensor, seed: int) -> torch.Tensor:
    """Choose images of each class at random, and return a mask of the chosen images, `(images,)` bool. Of a class with
    n images, n / `HELD_BACK` images (rounded down) are chosen, but at least one image. Of a class with only one image,
    no image is chosen."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_back = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        if len(members) > 1:
            held_back[members[min(len(members), HELD_BACK) - 1 :: HELD_BACK]] = True
    return held_back
