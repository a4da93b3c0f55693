"""Check that a model's outputs are finite."""

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
