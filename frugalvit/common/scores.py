"""A model's scores, of which commands that measure nothing need no metric."""

import numpy as np
import torch


def negative_log_likelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum over images of minus the logarithm of the probability of all right classes together, the
    cross-entropy if one is right, for `logits` `(batch, classes)` and `labels` `(batch,)` or, filled up with -1,
    `(batch, several)`."""
    labels = labels[:, None] if labels.ndim == 1 else labels
    chosen = logits.gather(1, labels.clamp(min=0)).masked_fill(labels < 0, -torch.inf)
    return (logits.logsumexp(1) - chosen.logsumexp(1)).sum()


def check_scores(scores: torch.Tensor | np.ndarray, what: str = "scores"):
    """Raise a ValueError if a model's scores, logits or embeddings are not finite: no measure notices."""
    scores = torch.as_tensor(scores)
    if not scores.isfinite().all():
        lost = int((~scores.isfinite()).flatten(1).any(1).sum())
        raise ValueError(
            f"The model's {what} of {lost} in a batch of {len(scores)} are not finite; it diverged or is damaged."
        )
