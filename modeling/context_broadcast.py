"""Context Broadcasting: uniform attention for any vision transformer.

Hyeon-Woo et al., *Scratching Visual Transformer's Back with Uniform Attention* (ICCV 2023, arXiv 2210.08457): the mean
of all tokens is added to each of them, at the end of every MLP. The module is mathematics; hooks put it into blocks,
so that weights keep their names. `insert_context_broadcast` puts it into models of other libraries.

Effects of the positions, where the paper's supplement (2.6) leaves room:

- For `cb`, the end of the MLP and the place before its second linear layer are the same function: `(x + mean(x)) / 2`
  is an affine combination, which a linear layer passes on, bias included. For `cb_s` they are not.
- At the front, says the supplement ("case 1"), the weights that follow in the MLP get no gradient signals. They do get
  gradients, but along one path less. At the end, the loss of token i reaches the weights also through the MLP of
  every other token j; at the front, only through the MLP of token i.
"""

import functools
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init

from ..configuration.configuration_base import CONTEXT_BROADCAST_POSITIONS, CONTEXT_BROADCASTS


DATA_FORMATS = ("channels_last", "channels_first")
_MASKS = ("attention_mask", "attn_mask")
_ATTRIBUTES = {"input": "context_broadcast_in", "output": "context_broadcast_out"}


class ContextBroadcast(nn.Module):
    """Adds what all tokens have in common to each token.

    With the mean over all tokens, [CLS] and registers included, and the class token x_0:

    - `"cb"`: (x_i + mean) / 2, without parameters (CB of the paper's method);
    - `"cb_s"`: x_i + s * mean with a learned vector s (CB_S, there);
    - `"cb_gate"`: x_i * (x_0 + 1) (CB_gate, supplement, section 2.7, where equations have no numbers);
    - `"cb_hybrid"`: x_i * x_0 + (x_i + mean) / 2 (CB_hybrid, there). The last two need a class token in front.

    All but `"cb_s"` with a scale that starts at 0 change what a trained model computes. With `blend`, a learned number
    b, which starts at 0, leads from x_i to what they make of it: (1 - b) x_i + b CB(x_i). This is ours.

    Args:
        kind (`str`, *optional*, defaults to `"cb"`): One of those.
        hidden_size (`int`, *optional*): Channels, for `"cb_s"`.
        scale_init (`float`, *optional*, defaults to 0.0):
            Start of s. The paper prints none; 0 leaves a trained model unchanged at first.
        blend (`bool`, *optional*, defaults to `False`): Blend, see above.
        data_format (`str`, *optional*, defaults to `"channels_last"`):
            `"channels_last"`, tokens `(batch, tokens, channels)` and maps `(batch, height, width, channels)`, or
            `"channels_first"`, maps `(batch, channels, height, width)`.

    Raises:
        ValueError: if an argument has another value, `"cb_s"` has no `hidden_size`, or blend and scale both start at
            0, so that neither would learn.
    """

    def __init__(
        self,
        kind: str = "cb",
        hidden_size: int | None = None,
        data_format: str = "channels_last",
        scale_init: float = 0.0,
        blend: bool = False,
    ):
        super().__init__()
        check_choice("kind", kind, CONTEXT_BROADCASTS)
        check_choice("data_format", data_format, DATA_FORMATS)
        if kind == "cb_s" and hidden_size is None:
            raise ValueError("`kind='cb_s'` has a learned scale for every channel: give `hidden_size`.")
        if kind == "cb_s" and blend and scale_init == 0:
            raise ValueError(
                "`kind='cb_s'` would never learn with `blend=True` and `scale_init=0`: each has no gradient while the "
                "other is 0. Without a blend it leaves a trained model unchanged, too; or give another `scale_init`."
            )
        self.kind, self.data_format, self.scale_init = kind, data_format, scale_init
        self.scale = nn.Parameter(torch.full((hidden_size,), float(scale_init))) if kind == "cb_s" else None
        self.blend = nn.Parameter(torch.zeros(1)) if blend else None
        # The attention mask of the block around this module, noted whenever the block runs.
        self.mask: torch.Tensor | None = None

    def reset_parameters(self):
        """Set the parameters to their start, but for those that were loaded."""
        if self.scale is not None:
            init.constant_(self.scale, self.scale_init)
        if self.blend is not None:
            init.zeros_(self.blend)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.data_format}{', blended' if self.blend is not None else ''}"

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor`): `(batch, tokens, channels)`, or a map in the data format.
            mask (`torch.Tensor`, *optional*):
                Tokens that are no padding: `(batch, tokens)`, or an attention mask `(batch, heads, queries, keys)`, in
                which keys that some query sees are none; Booleans, or numbers to add. Padding stays out of the mean.

        Returns:
            `torch.Tensor`: A tensor with the shape and dtype of `hidden_states`.

        Raises:
            ValueError: if there are no tokens to average, or a map comes where a class token is needed.
        """
        if hidden_states.ndim not in (3, 4) or (hidden_states.ndim == 3 and self.data_format == "channels_first"):
            expected = "maps" if self.data_format == "channels_first" else "(batch, tokens, channels) or maps"
            raise ValueError(f"Got a tensor of shape {tuple(hidden_states.shape)}, expected {expected}.")
        broadcast = self._broadcast(hidden_states, mask)
        return (
            broadcast if self.blend is None else torch.lerp(hidden_states, broadcast, self.blend.to(broadcast.dtype))
        )

    def _broadcast(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self.kind in ("cb_gate", "cb_hybrid"):
            if hidden_states.ndim == 4:
                raise ValueError(f"`kind={self.kind!r}` needs a class token; got a map, which has none.")
            class_token = hidden_states[:, :1]
            if self.kind == "cb_gate":
                return torch.addcmul(hidden_states, hidden_states, class_token)
        mean = self._mean(hidden_states, self.mask if mask is None else mask)
        if self.kind == "cb_s":
            scale = self.scale.to(hidden_states.dtype)
            if self.data_format == "channels_first":
                scale = scale[:, None, None]
            return torch.addcmul(hidden_states, mean, scale)
        broadcast = torch.lerp(hidden_states, mean, 0.5)
        return torch.addcmul(broadcast, hidden_states, class_token) if self.kind == "cb_hybrid" else broadcast

    def _mean(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        axes = tuple(range(2, 4)) if self.data_format == "channels_first" else tuple(range(1, hidden_states.ndim - 1))
        if mask is None:
            return hidden_states.mean(axes, keepdim=True)
        if not isinstance(mask, torch.Tensor):
            raise ValueError(
                f"Context Broadcasting cannot read a {type(mask).__name__}; use the attention implementation 'sdpa' "
                "or 'eager' where there is padding."
            )
        valid = mask if mask.dtype == torch.bool else mask > 0 if mask.ndim == 2 else mask == 0
        if valid.ndim == 4:
            valid = valid.any(dim=(1, 2))
        if valid.shape != hidden_states.shape[:2]:
            raise ValueError(f"Got a mask for {tuple(valid.shape)} tokens, expected {tuple(hidden_states.shape[:2])}.")
        weights = valid.to(hidden_states.dtype)
        weights = weights / weights.sum(1, keepdim=True)
        return torch.einsum("bt,btc->bc", weights, hidden_states)[:, None]


def check_choice(name: str, value, known):
    """Raise a ValueError that names the argument unless its value is one of the known."""
    if value not in known:
        raise ValueError(f"`{name}` is {value!r}, expected one of {', '.join(map(repr, known))}.")


@dataclass(frozen=True)
class Place:
    """A place for Context Broadcasting.

    Args:
        module (`nn.Module`): The module before or after which it is put.
        side (`str`): `"input"` or `"output"` of the module.
        width (`int`, *optional*): Channels there.
        block (`nn.Module`): The block that the module is a part of, whose attention mask counts.
    """

    module: nn.Module
    side: str
    width: int | None
    block: nn.Module


def places_in_block(
    block: nn.Module,
    mlp: nn.Module,
    second_linear: nn.Linear,
    end_of_attention: tuple[nn.Module, str],
    positions: Iterable[str],
) -> list[Place]:
    """The places of `positions` in a block, given its MLP, the MLP's second linear layer, and the module and side
    where the output of attention is that is added to the tokens."""
    width, inner = second_linear.out_features, second_linear.in_features
    known = {
        "mlp_front": Place(mlp, "input", width, block),
        "mlp_mid": Place(second_linear, "input", inner, block),
        "mlp_end": Place(mlp, "output", width, block),
        "attention_end": Place(*end_of_attention, width, block),
    }
    return [known[position] for position in positions]


def broadcast_layers(layers: Iterable[nn.Module], config, has_class_token: bool):
    """Put Context Broadcasting into layers of this package's own families, if their configuration asks for it.

    Args:
        layers (`Iterable[nn.Module]`): With `attention` and an `mlp` that ends in `fc2`.
        config (`PreTrainedConfig`): With `context_broadcast`, which is None for a plain model, and the like.
        has_class_token (`bool`): Whether a class token is in front.

    Raises:
        ValueError: if the kind needs a class token and there is none, or a position makes no sense.
    """
    kind = config.context_broadcast
    if kind is None:
        return
    positions = check_positions(config.context_broadcast_position)
    check_class_token(kind, has_class_token, "this model")
    options = {"scale_init": config.context_broadcast_scale_init, "blend": config.context_broadcast_blend}
    for layer in layers:
        end = (layer.attention, "output")
        place_modules(places_in_block(layer, layer.mlp, layer.mlp.fc2, end, positions), kind, **options)


def check_positions(position: str | Sequence[str]) -> list[str]:
    """Return positions as a list.

    Raises:
        ValueError: if one is not known or comes twice, or there are none.
    """
    positions = [position] if isinstance(position, str) else list(position)
    for each in positions:
        check_choice("position", each, CONTEXT_BROADCAST_POSITIONS)
    if len(set(positions)) != len(positions) or not positions:
        raise ValueError(f"`position` is {position!r}, expected one position or several different ones.")
    return positions


def check_class_token(kind: str, has_class_token: bool, name: str):
    """Raise a ValueError if the kind needs a class token and the model has none."""
    if kind in ("cb_gate", "cb_hybrid") and not has_class_token:
        raise ValueError(
            f"`kind={kind!r}` needs a class token in front of the tokens of every block, and {name} has none; 'cb' "
            "and 'cb_s' do without."
        )


def place_modules(
    places: Sequence[Place],
    kind: str,
    data_format: str = "channels_last",
    scale_init: float = 0.0,
    blend: bool = False,
):
    """Put a `ContextBroadcast` at each place, on its device."""
    for place in places:
        module, weight = place.module, next(place.block.parameters(), None)
        broadcast = ContextBroadcast(kind, place.width, data_format, scale_init, blend)
        if weight is not None:
            broadcast.to(weight.device, weight.dtype if weight.is_floating_point() else None)
        broadcast.train(module.training)
        if place.side == "input":
            broadcast.hook = module.register_forward_pre_hook(_broadcast_input, with_kwargs=True)
        else:
            broadcast.hook = module.register_forward_hook(_broadcast_output)
        module.add_module(_ATTRIBUTES[place.side], broadcast)
    for block in dict.fromkeys(place.block for place in places):
        _note_masks_of(block)


def remove_modules(model: nn.Module):
    """Take every `ContextBroadcast` out of a model again."""
    for module in list(model.modules()):
        if (hook := vars(module).pop("context_broadcast_mask_hook", None)) is not None:
            hook.remove()
        for attribute in _ATTRIBUTES.values():
            if attribute in module._modules:
                module._modules.pop(attribute).hook.remove()


def has_context_broadcast(model: nn.Module) -> bool:
    """Whether a module has Context Broadcasting in it."""
    return any(isinstance(module, ContextBroadcast) for module in model.modules())


# Hooks are plain functions that find what they need in the module, so that copies and pickles of a model work.
def _broadcast_output(module: nn.Module, args, output):
    if isinstance(output, tuple):
        return module.context_broadcast_out(output[0]), *output[1:]
    return module.context_broadcast_out(output)


def _broadcast_input(module: nn.Module, args, kwargs):
    if args:
        return (module.context_broadcast_in(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, kwargs | {name: module.context_broadcast_in(kwargs[name])}


def _note_mask(block: nn.Module, args, kwargs, name: str, place: int):
    mask = kwargs.get(name, args[place] if place < len(args) else None)
    for module in block.modules():
        if isinstance(module, ContextBroadcast):
            module.mask = mask


def _note_masks_of(block: nn.Module):
    """Let the `ContextBroadcast`s in a block know the attention mask that the block is given, if there is one."""
    names = list(inspect.signature(block.forward).parameters)
    if (name := next((each for each in _MASKS if each in names), None)) is not None:
        note = functools.partial(_note_mask, name=name, place=names.index(name))
        block.context_broadcast_mask_hook = block.register_forward_pre_hook(note, with_kwargs=True)
