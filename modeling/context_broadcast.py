"""Context Broadcasting: uniform attention for any vision transformer.

Hyeon-Woo et al., *Scratching Visual Transformer's Back with Uniform Attention* (ICCV 2023, arXiv 2210.08457): the mean
of all tokens is added to each token at the end of every MLP. Hooks call `ContextBroadcast`, so the names of the
model's weights do not change.

For `cb`, the position at the end of the MLP and the position before its second linear layer give the same outputs. The
reason is that a linear layer with a bias commutes with averaging. For `cb_s`, the outputs differ. A third position is
before the MLP. The supplement (2.6, "case 1") states that the MLP's weights get no gradient with this third position.
In fact, the weights get a gradient, but the loss of token i reaches the weights only through the MLP's output for
token i. With the position at the end, the loss of token i reaches the weights through the MLP's outputs for all
tokens.
"""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import nn
from transformers import initialization as init

from ..configuration.configuration_vit_context_broadcast import ContextBroadcastKind


class ContextBroadcast(nn.Module):
    """Broadcast the mean of all tokens, or the class token, to each token.

    `kind` selects the output. x_i is token i, x_0 is [CLS], and `mean` averages all tokens, including [CLS].

    - `"cb"`: (x_i + mean) / 2, without parameters (CB of the main paper);
    - `"cb_s"`: x_i + s * mean with a learned vector s (CB_S of the main paper);
    - `"cb_gate"`: x_i * (x_0 + 1) (CB_gate, supplement, section 2.7);
    - `"cb_hybrid"`: x_i * x_0 + (x_i + mean) / 2 (CB_hybrid, supplement, section 2.7).

    Args:
        kind (`str`, *optional*, defaults to `"cb"`): `"cb"`, `"cb_s"`, `"cb_gate"` or `"cb_hybrid"`.
        hidden_size (`int`, *optional*): Number of channels. It is required for `"cb_s"`.
        scale_init (`float`, *optional*, defaults to 0.0):
            Initial value of s. The paper gives no value. With 0, insertion does not change a trained model's outputs.
        blend (`bool`, *optional*, defaults to `False`):
            Whether to learn a number b, initially 0, and return (1 - b) x_i + b y_i, where y_i is the output that
            `kind` selects. The paper has no such option.
    """

    def __init__(
        self,
        kind: str = "cb",
        hidden_size: int | None = None,
        scale_init: float = 0.0,
        blend: bool = False,
    ):
        super().__init__()
        if kind not in get_args(ContextBroadcastKind):
            raise ValueError(f"`kind` is {kind!r}, expected one of {get_args(ContextBroadcastKind)}.")
        if kind == "cb_s" and blend and scale_init == 0:
            raise ValueError(
                f"`scale_init` is {scale_init}, expected another number for `kind='cb_s'` with `blend=True`: if both "
                "are 0, neither gets a gradient."
            )
        self.kind = kind
        self.scale_init = scale_init
        self.scale = nn.Parameter(torch.full((hidden_size,), float(scale_init))) if kind == "cb_s" else None
        self.blend = nn.Parameter(torch.zeros(1)) if blend else None

    def reset_parameters(self):
        if self.scale is not None:
            init.constant_(self.scale, self.scale_init)
        if self.blend is not None:
            init.zeros_(self.blend)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply Context Broadcasting to tokens, `(batch, tokens, channels)`, or to feature maps, `(batch, height,
        width, channels)`. The shape does not change."""
        if self.kind == "cb_gate":
            broadcast = torch.addcmul(hidden_states, hidden_states, hidden_states[:, :1])
        else:
            mean = hidden_states.mean(tuple(range(1, hidden_states.ndim - 1)), keepdim=True)
            if self.kind == "cb_s":
                broadcast = torch.addcmul(hidden_states, mean, self.scale.to(hidden_states.dtype))
            else:
                broadcast = torch.lerp(hidden_states, mean, 0.5)
            if self.kind == "cb_hybrid":
                broadcast = torch.addcmul(broadcast, hidden_states, hidden_states[:, :1])
        if self.blend is not None:
            broadcast = torch.lerp(hidden_states, broadcast, self.blend.to(broadcast.dtype))
        return broadcast


def has_context_broadcast(model: nn.Module) -> bool:
    """Whether a model contains a `ContextBroadcast` module."""
    return any(isinstance(module, ContextBroadcast) for module in model.modules())


def broadcast_block(
    mlp: nn.Module,
    second_linear: nn.Linear,
    attention: nn.Module,
    attention_side: str,
    positions: Sequence[str],
    kind: str,
    scale_init: float,
    blend: bool,
):
    """Insert a `ContextBroadcast` module into a block at each position in `positions`.

    Args:
        mlp (`nn.Module`): The MLP of the block.
        second_linear (`nn.Linear`): The last layer of the MLP.
        attention (`nn.Module`): The attention of the block, or a module that takes the attention's output as input.
        attention_side (`str`): `"out"` to change the output of `attention`, `"in"` to change its input.
        positions (list of `str`): Names of positions. `insert_context_broadcast` describes the names.
        kind, scale_init, blend: Arguments of `ContextBroadcast`.
    """
    width = second_linear.out_features
    places = {
        "mlp_front": (mlp, "in", width),
        "mlp_mid": (second_linear, "in", second_linear.in_features),
        "mlp_end": (mlp, "out", width),
        "attention_end": (attention, attention_side, width),
    }
    weight = second_linear.weight
    for position in positions:
        module, side, channels = places[position]
        broadcast = ContextBroadcast(kind, channels, scale_init=scale_init, blend=blend)
        broadcast.to(weight.device, weight.dtype if weight.is_floating_point() else None)
        broadcast.train(module.training)
        if side == "in":
            broadcast.hook = module.register_forward_pre_hook(_broadcast_input)
        else:
            broadcast.hook = module.register_forward_hook(_broadcast_output)
        module.add_module(f"context_broadcast_{side}", broadcast)


# The hooks are top-level functions, so that models can be copied and pickled.
def _broadcast_output(module: nn.Module, args, output):
    if isinstance(output, tuple):
        return module.context_broadcast_out(output[0]), *output[1:]
    return module.context_broadcast_out(output)


def _broadcast_input(module: nn.Module, args):
    return module.context_broadcast_in(args[0]), *args[1:]
