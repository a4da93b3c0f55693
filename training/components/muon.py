"""Muon: momentum, orthogonalized, for the matrices of a network's body; AdamW for all the rest.

torch.optim.Muon and timm's calculate in bfloat16, which CPUs without such instructions emulate, hundreds of times
slower than float32.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import nn


# Five steps of an odd quintic polynomial bring singular values from (0, 1] to 0.7..1.2 (Jordan et al. 2024).
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of matrices, `(…, rows, columns)` float32, near 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    wide = matrices.size(-2) <= matrices.size(-1)
    x = matrices if wide else matrices.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.mT


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) with updates of AdamW's size (Liu et al. 2025), so both share a learning rate.

    Args:
        groups (`Iterable[dict]`): Parameter groups; those with `"matrices": True` hold matrices alone and get Muon.
        lr (`float`, *optional*, defaults to 1e-3): Learning rate.
        betas (pair of `float`, *optional*, defaults to `(0.9, 0.999)`): AdamW's decays.
        eps (`float`, *optional*, defaults to 1e-8): AdamW's epsilon.
        momentum (`float`, *optional*, defaults to 0.95): Muon's decay.
    """

    def __init__(
        self,
        groups: Iterable[dict],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
    ):
        groups = [{"matrices": False, "momentum": momentum, **group} for group in groups]
        # Not fused: a fused AdamW takes over what a gradient scaler does, which Muon's part would miss.
        super().__init__(groups, lr=lr, betas=betas, eps=eps)

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["matrices"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["matrices"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict):
        updates = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, gradient = self.state[parameter], parameter.grad.float()
            if not state:
                # AdamW's loading looks for a step.
                state["step"], state["momentum_buffer"] = torch.zeros(()), torch.zeros_like(gradient)
            state["step"] += 1
            average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            # Nesterov's look ahead.
            updates[parameter.shape].append((parameter, gradient.lerp(average, group["momentum"])))
        for shape, pairs in updates.items():
            parameters, gradients = zip(*pairs, strict=True)
            size = 0.2 * max(shape) ** 0.5
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, orthogonalize(torch.stack(gradients)).unbind(), alpha=-size * group["lr"])


def split_matrices(model: nn.Module, decayed: dict, kept: dict) -> list[dict]:
    """Split the groups of `parameter_groups` for `Muon`: the matrices of the model's body are a group of their own.

    A classifier's weights, filters and embeddings stay with AdamW.
    """
    body = {id(parameter) for parameter in getattr(model, "base_model", model).parameters() if parameter.ndim == 2}
    parts = {True: [], False: []}
    for parameter in decayed["params"]:
        parts[id(parameter) in body].append(parameter)
    return [decayed | {"params": parts[True], "matrices": True}, decayed | {"params": parts[False]}, kept]
