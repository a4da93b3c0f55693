"""Check a model's outputs, and compute the error of a measured share."""

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
    """Return half the width of the Wilson interval, one standard deviation, of a share of `count` images. The usual
    standard error is 0 for shares of 0 and 1."""
    return (share * (1 - share) / count + 1 / (4 * count**2)) ** 0.5 / (1 + 1 / count)
