"""Check that a model's outputs are finite, and compute the standard error of a share of images, such as accuracy."""

import numpy as np
import torch


def check_scores(scores: torch.Tensor | np.ndarray, what: str = "scores"):
    """Raise a ValueError if scores, logits or embeddings are not finite. Metrics would hide such values."""
    scores = torch.as_tensor(scores)
    if not scores.isfinite().all():
        lost = int((~scores.isfinite()).flatten(1).any(1).sum())
        raise ValueError(
            f"The model's {what} of {lost} in a batch of {len(scores)} are not finite; it diverged or is damaged."
        )


def share_error(share: float, count: int) -> float:
    """Return the standard error of a share of `count` images: half the width of the Wilson interval for one standard
    deviation. The usual formula, sqrt(share * (1 - share) / count), would return 0 for shares of 0 and 1."""
    return (share * (1 - share) / count + 1 / (4 * count**2)) ** 0.5 / (1 + 1 / count)
