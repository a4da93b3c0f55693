"""Context Broadcasting: uniform attention for any vision transformer.

Hyeon-Woo et al., *Scratching Visual Transformer's Back with Uniform Attention* (ICCV 2023, arXiv 2210.08457): the mean
of all tokens is added to each of them, at the end of every MLP. The module is mathematics; `insert_context_broadcast`
puts it into a model, by hooks, so that weights keep their names.

What the positions do, where the paper's supplement (2.6) leaves room:

- For `cb`, the end of the MLP and the place before its second linear layer are the same function: `(x + mean(x)) / 2`
  is an affine combination, which a linear layer passes on, bias included. For `cb_s` they are not.
- At the front, says the supplement ("case 1"), the weights that follow in the MLP get no gradient signals. They do get
  gradients. What is missing is one path: at the end, the loss of token i reaches the weights also through the MLP of
  every other token j; at the front, only through the MLP of token i.
"""

import functools
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from .configuration_base import CONTEXT_BROADCAST_POSITIONS, CONTEXT_BROADCASTS, HubConfigMixin
from .hub import HubModel


logger = logging.get_logger(__name__)

DATA_FORMATS = ("channels_last", "channels_first")

# Blocks that are known, by class, and where their attention ends: what a module returns, or what it is given. Windows
# are put together again after the attention module.
_BLOCKS = {
    # Transformers
    "CLIPEncoderLayer": ("self_attn", "output"),
    "DINOv3ViTLayer": ("attention", "output"),
    "DeiTLayer": ("attention", "output"),
    "Dinov2Layer": ("attention", "output"),
    "Dinov2WithRegistersLayer": ("attention", "output"),
    "PvtLayer": ("attention", "output"),
    "PvtV2BlockLayer": ("attention", "output"),
    "SiglipEncoderLayer": ("self_attn", "output"),
    "Siglip2EncoderLayer": ("self_attn", "output"),
    "SwinLayer": ("drop_path", "input"),
    "ViTLayer": ("attention", "output"),
    # timm: VisionTransformer with its DeiT variants, PVTv2; Swin
    "Block": ("attn", "output"),
    "SwinTransformerBlock": ("drop_path1", "input"),
    # this package
    "PreNormLayer": ("attention", "output"),
    "SparseFormerLayer": ("attention", "output"),
}
_SECOND_LINEARS = ("fc2", "dense2", "down_proj", "weights_out")
_MASKS = ("attention_mask", "attn_mask")
_ATTRIBUTES = {"input": "context_broadcast_in", "output": "context_broadcast_out"}
_FIELDS = ("context_broadcast", "context_broadcast_position", "context_broadcast_pattern", "context_broadcast_format")


class ContextBroadcast(nn.Module):
    """Adds what all tokens have in common to each token.

    With the mean over all tokens, [CLS] and registers included, and the class token x_0:

    - `"cb"`: (x_i + mean) / 2, without parameters;
    - `"cb_s"`: x_i + s * mean with a learned vector s, which starts at 0 (the paper names no start), so that a trained
      model is unchanged at first;
    - `"cb_gate"`: x_i * (x_0 + 1);
    - `"cb_hybrid"`: x_i * x_0 + (x_i + mean) / 2. The last two need a class token in front.

    Args:
        kind (`str`, *optional*, defaults to `"cb"`): One of those.
        hidden_size (`int`, *optional*): Channels, for `"cb_s"`.
        data_format (`str`, *optional*, defaults to `"channels_last"`):
            `"channels_last"`, tokens `(batch, tokens, channels)` and maps `(batch, height, width, channels)`, or
            `"channels_first"`, maps `(batch, channels, height, width)`.

    Raises:
        ValueError: if an argument has another value, or `"cb_s"` has no `hidden_size`.
    """

    def __init__(self, kind: str = "cb", hidden_size: int | None = None, data_format: str = "channels_last"):
        super().__init__()
        _check("kind", kind, CONTEXT_BROADCASTS)
        _check("data_format", data_format, DATA_FORMATS)
        if kind == "cb_s" and hidden_size is None:
            raise ValueError("`kind='cb_s'` has a learned scale for every channel: give `hidden_size`.")
        self.kind, self.data_format = kind, data_format
        self.scale = nn.Parameter(torch.zeros(hidden_size)) if kind == "cb_s" else None
        # Of the block that this stands in, noted whenever the block runs.
        self.mask: torch.Tensor | None = None

    def reset_parameters(self):
        """Back to the start; loaded weights stay."""
        if self.scale is not None:
            init.zeros_(self.scale)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.data_format}"

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor`): `(batch, tokens, channels)`, or a map in the data format.
            mask (`torch.Tensor`, *optional*):
                Tokens that are no padding: `(batch, tokens)`, or an attention mask `(batch, heads, queries, keys)`, in
                which keys that some query sees are none; Booleans, or numbers to add. Padding stays out of the mean.

        Returns:
            `torch.Tensor`: Of the shape and dtype of `hidden_states`.

        Raises:
            ValueError: if there are no tokens to average, or a map comes where a class token is needed.
        """
        if hidden_states.ndim not in (3, 4) or (hidden_states.ndim == 3 and self.data_format == "channels_first"):
            expected = "maps" if self.data_format == "channels_first" else "(batch, tokens, channels) or maps"
            raise ValueError(f"Got a tensor of shape {tuple(hidden_states.shape)}, expected {expected}.")
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


def _check(name: str, value, known):
    if value not in known:
        raise ValueError(f"`{name}` is {value!r}, expected one of {', '.join(map(repr, known))}.")


@dataclass(frozen=True)
class ContextBroadcastReport:
    """Where Context Broadcasting went.

    Args:
        kind (`str`): Which.
        places (`list[str]`): Modules, by name, each with `.input` or `.output`.
        num_parameters (`int`): That were added, all in all.
    """

    kind: str
    places: list[str]
    num_parameters: int

    def __str__(self) -> str:
        lines = [f"{self.kind} at {len(self.places)} places, {self.num_parameters:,} parameters:", *self.places]
        return "\n  ".join(lines)


@dataclass(frozen=True)
class _Place:
    name: str
    side: str
    width: int | None
    block: str = ""


def insert_context_broadcast(
    model: nn.Module,
    kind: str = "cb",
    position: str | Sequence[str] = "mlp_end",
    pattern: str | None = None,
    data_format: str = "channels_last",
) -> ContextBroadcastReport:
    """Put Context Broadcasting into every block of a vision transformer, in place.

    A model of Transformers or of this package keeps it when it is saved: the folder loads with `AutoModel…` where
    frugalvit is imported, and with `trust_remote_code=True` elsewhere and for timm's wrapper. The class of a model of
    Transformers becomes a subclass that remembers. Pass the model that you will save, not a part of it. In timm,
    insert again before you load a state dict, as `cb` leaves no trace there.

    Args:
        model (`nn.Module`):
            Transformers' ViT, DeiT, DINOv2 and DINOv3, CLIP, SigLIP (of two towers, the one for images), Swin, PVT,
            PVTv2; timm's VisionTransformer, Swin, PVTv2; SparseFormer (its cortex), ViTImpulseInit; or, with
            `pattern`, any other.
        kind (`str`, *optional*, defaults to `"cb"`): As in `ContextBroadcast`.
        position (`str` or several, *optional*, defaults to `"mlp_end"`):
            `"mlp_front"`, before the MLP; `"mlp_mid"`, between its activation and its second linear layer;
            `"mlp_end"` and `"attention_end"`, before the residual sums.
        pattern (`str`, *optional*):
            Regular expression for the whole names of modules; what they return is broadcast, or, for `"mlp_front"` and
            `"mlp_mid"`, what they are given. `r"blocks\\.\\d+\\.mlp"`, for example.
        data_format (`str`, *optional*, defaults to `"channels_last"`):
            With `pattern`, whether the modules' tensors are `"channels_last"` or `"channels_first"`.

    Returns:
        `ContextBroadcastReport`: The places, and how many parameters came.

    Raises:
        ValueError: if the model is none of those or already has it, no module has such a name, or an argument makes no
            sense. The model is then as it was.
    """
    report = insert_modules(model, kind, position, pattern, data_format)
    positions = [position] if isinstance(position, str) else list(position)
    _remember(model, dict(zip(_FIELDS, (kind, positions, pattern, data_format), strict=True)))
    return report


def remove_context_broadcast(model: nn.Module) -> None:
    """Undo `insert_context_broadcast`: weights, outputs and class are those of the model without.

    Raises:
        ValueError: if there is none.
    """
    if not has_context_broadcast(model):
        raise ValueError(f"This {type(model).__name__} has no Context Broadcasting to remove.")
    for module in list(model.modules()):
        if (hook := vars(module).pop("context_broadcast_mask_hook", None)) is not None:
            hook.remove()
        for attribute in _ATTRIBUTES.values():
            if attribute in module._modules:
                module._modules.pop(attribute).hook.remove()
    _forget(model)


def has_context_broadcast(model: nn.Module) -> bool:
    """Whether it is in a model."""
    return any(isinstance(module, ContextBroadcast) for module in model.modules())


def insert_modules(
    model: nn.Module,
    kind: str,
    position: str | Sequence[str],
    pattern: str | None = None,
    data_format: str = "channels_last",
) -> ContextBroadcastReport:
    """`insert_context_broadcast` without what saving needs to know, for models that read it in their configuration."""
    positions = [position] if isinstance(position, str) else list(position)
    for each in positions:
        _check("position", each, CONTEXT_BROADCAST_POSITIONS)
    if len(set(positions)) != len(positions) or not positions:
        raise ValueError(f"`position` is {position!r}, expected one position or several different ones.")
    _check("kind", kind, CONTEXT_BROADCASTS)
    _check("data_format", data_format, DATA_FORMATS)
    if has_context_broadcast(model):
        raise ValueError(
            f"This {type(model).__name__} already has Context Broadcasting. Call `remove_context_broadcast` first, "
            "and give all positions at once."
        )
    if pattern is None:
        if data_format != "channels_last":
            raise ValueError("`data_format` is for `pattern`; the blocks that are known need none.")
        places = _find_places(model, positions)
    else:
        places = _find_matches(model, positions, pattern)
    if kind in ("cb_gate", "cb_hybrid") and not _has_class_token(model, places):
        raise ValueError(
            f"`kind={kind!r}` needs a class token in front of the tokens of every block, and {type(model).__name__} "
            "has none; 'cb' and 'cb_s' do without."
        )
    if kind == "cb_s" and (unknown := [place.name for place in places if place.width is None]):
        raise ValueError(
            f"`kind='cb_s'` needs to know how many channels {unknown[0]!r} has, and there is no linear layer or "
            "convolution in it; match one."
        )

    for place in places:
        module = model.get_submodule(place.name)
        weight = next(model.get_submodule(place.block).parameters(), None)
        broadcast = ContextBroadcast(kind, place.width, data_format)
        if weight is not None:
            broadcast.to(weight.device, weight.dtype if weight.is_floating_point() else None)
        broadcast.train(module.training)
        if place.side == "input":
            broadcast.hook = module.register_forward_pre_hook(_broadcast_input, with_kwargs=True)
        else:
            broadcast.hook = module.register_forward_hook(_broadcast_output)
        module.add_module(_ATTRIBUTES[place.side], broadcast)
    for name in dict.fromkeys(place.block for place in places):
        _note_masks_of(model.get_submodule(name))
    return ContextBroadcastReport(
        kind,
        [f"{place.name}.{place.side}" for place in places],
        sum(place.width for place in places) if kind == "cb_s" else 0,
    )


def _find_places(model: nn.Module, positions: Sequence[str]) -> list[_Place]:
    """Inputs and outputs of modules in all blocks that are known."""
    prefix, part = _vision_part(model)
    if getattr(part, "main_input_name", None) == "input_ids":
        raise ValueError(f"{type(model).__name__} reads text, whose tokens must not see the mean of later ones.")
    places = []
    for name, block in part.named_modules():
        known = next((base.__name__ for base in type(block).__mro__ if base.__name__ in _BLOCKS), None)
        if known is None or not name.rpartition(".")[2].isdigit():
            continue
        name, mlp = prefix + name, getattr(block, "mlp", None)
        second = next((each for each in _SECOND_LINEARS if isinstance(getattr(mlp, each, None), nn.Linear)), None)
        if second is None:
            raise ValueError(
                f"Block {name!r} ({type(block).__name__}) has no MLP whose second linear layer is known. Name modules "
                "by `pattern` instead."
            )
        attention, side = _BLOCKS[known]
        if "attention_end" in positions and side == "output" and getattr(block, "window_size", 0):
            raise ValueError(f"Block {name!r} attends within windows; 'attention_end' is not supported for it.")
        width, inner = getattr(mlp, second).out_features, getattr(mlp, second).in_features
        places += [
            {
                "mlp_front": _Place(f"{name}.mlp", "input", width, name),
                "mlp_mid": _Place(f"{name}.mlp.{second}", "input", inner, name),
                "mlp_end": _Place(f"{name}.mlp", "output", width, name),
                "attention_end": _Place(f"{name}.{attention}", side, width, name),
            }[position]
            for position in positions
        ]
    if not places:
        raise ValueError(
            f"{type(model).__name__} has no blocks that are known here ({', '.join(_BLOCKS)}). Name the modules to "
            "broadcast after by `pattern`."
        )
    return places


def _find_matches(model: nn.Module, positions: Sequence[str], pattern: str) -> list[_Place]:
    """The same for modules with matching names."""
    if len(positions) > 1:
        raise ValueError(f"With `pattern`, give one position; got {list(positions)}.")
    side = "input" if positions[0] in ("mlp_front", "mlp_mid") else "output"
    names = [name for name, _ in model.named_modules() if name and re.fullmatch(pattern, name)]
    if not names:
        some = ", ".join(list(dict(model.named_modules()))[1::10][:8])
        raise ValueError(f"`pattern` is {pattern!r}, which no module's whole name matches; names are {some}, …")
    names = [_innermost(model, name, 0 if side == "input" else -1) for name in names]
    return [_Place(name, side, _width(model.get_submodule(name), side), name) for name in names]


def _innermost(model: nn.Module, name: str, index: int) -> str:
    """The first or last module in a sequence: one that is added to the sequence itself would run as a part of it."""
    while isinstance(module := model.get_submodule(name), nn.Sequential) and len(module):
        name = f"{name}.{list(module._modules)[index]}"
    return name


def _width(module: nn.Module, side: str) -> int | None:
    """Channels that a module takes or returns, of the first or last linear layer or convolution in it."""
    layers = [each for each in module.modules() if isinstance(each, (nn.Linear, nn.Conv2d))]
    if not layers:
        return None
    layer = layers[0 if side == "input" else -1]
    suffix = "features" if isinstance(layer, nn.Linear) else "channels"
    return getattr(layer, f"in_{suffix}" if side == "input" else f"out_{suffix}")


def _vision_part(model: nn.Module, prefix: str = "") -> tuple[str, nn.Module]:
    """The part of a model of several towers, or of a wrapper, that sees images, and what its modules' names begin
    with."""
    for name in ("model", "timm_model", "vision_model", "vision_tower", "visual"):
        part = model._modules.get(name)
        if part is not None and (name != "model" or _sees(part)):
            return _vision_part(part, f"{prefix}{name}.")
    return prefix, model


def _sees(model: nn.Module) -> bool:
    return any(name in model._modules for name in ("vision_model", "vision_tower"))


def _has_class_token(model: nn.Module, places: Sequence[_Place]) -> bool:
    # PVT has one in its last stage alone.
    if any(type(model.get_submodule(place.block)).__name__ == "PvtLayer" for place in places):
        return False
    _, part = _vision_part(model)
    return any(name.rpartition(".")[2] in ("cls_token", "class_embedding") for name, _ in part.named_parameters())


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
    """Let what stands in a block know the attention mask that the block is given, if it is given one."""
    names = list(inspect.signature(block.forward).parameters)
    if (name := next((each for each in _MASKS if each in names), None)) is not None:
        note = functools.partial(_note_mask, name=name, place=names.index(name))
        block.context_broadcast_mask_hook = block.register_forward_pre_hook(note, with_kwargs=True)


# --- Saving and loading ---------------------------------------------------------------------------------------------


def _remember(model: nn.Module, fields: dict):
    """Note in the configuration what was inserted, where the model's class would build it again."""
    config = getattr(_vision_part(model)[1], "config", None)
    if _is_field_of(config) and fields["context_broadcast_pattern"] is None:
        config.context_broadcast = fields["context_broadcast"]
        config.context_broadcast_position = fields["context_broadcast_position"]
    elif isinstance(model, PreTrainedModel):
        altered = _altered(type(model))
        if altered is None:
            logger.warning(
                f"{type(model).__name__} is no class of Transformers: saving it will not keep Context Broadcasting. "
                "Insert it again after loading."
            )
            return
        for name, value in fields.items():
            setattr(model.config, name, value)
        model.config.__class__ = altered.config_class
        model.__class__ = altered
        altered.register()


def _forget(model: nn.Module):
    config = getattr(_vision_part(model)[1], "config", None)
    if isinstance(model, ContextBroadcastMixin):
        model.__class__ = type(model).host
        model.config.__class__ = model.config_class
        for name in _FIELDS:
            delattr(model.config, name)
    elif _is_field_of(config):
        config.context_broadcast = None


def _is_field_of(config) -> bool:
    return hasattr(type(config), "context_broadcast")


class ContextBroadcastConfigMixin(HubConfigMixin):
    """A configuration of Transformers that says where Context Broadcasting is inserted."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # Where this configuration was registered, its models follow when one is loaded.
        for name in self.architectures or ():
            if name.startswith("ContextBroadcast"):
                __getattr__(name).register()


class ContextBroadcastMixin(HubModel):
    """A model of Transformers that has Context Broadcasting, as its configuration says."""

    host: type[PreTrainedModel]

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        insert_modules(self, *(getattr(config, name) for name in _FIELDS))

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, ContextBroadcast):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def save_pretrained(self, save_directory, **kwargs):
        """As `HubModel`'s. Weights keep the names that they have here: those of older checkpoints of the host are not
        known to belong to this model type."""
        super().save_pretrained(save_directory, **{"save_original_format": False} | kwargs)

    def image_processor_config(self):
        """None: the host's image processor is saved beside it, as always."""

    @classmethod
    def register(cls):
        """Let Transformers' Auto classes load the class and its base model, whose code this process has."""
        transformers.AutoConfig.register(cls.config_class.model_type, cls.config_class, exist_ok=True)
        for auto_class, name in cls.auto_classes.items():
            getattr(transformers, auto_class).register(cls.config_class, __getattr__(name), exist_ok=True)


def _altered(host: type) -> type | None:
    """The subclass of a class of Transformers that keeps Context Broadcasting, if it is one."""
    if getattr(transformers, host.__name__, None) is not host or not host.__module__.startswith("transformers."):
        return None
    return __getattr__(f"ContextBroadcast{host.__name__}")


def __getattr__(name: str):
    """Classes for Transformers' models, made when first asked for: `ContextBroadcastViTModel`,
    `ContextBroadcastViTConfig` and so on."""
    host = (
        getattr(transformers, name.removeprefix("ContextBroadcast"), None) if name[:16] == "ContextBroadcast" else None
    )
    if not isinstance(host, type) or not issubclass(host, (PreTrainedConfig, PreTrainedModel)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in globals():
        globals()[name] = _alter_config(name, host) if issubclass(host, PreTrainedConfig) else _alter_model(name, host)
    return globals()[name]


def _alter_config(name: str, host: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    body = {
        "__module__": __name__,
        "__doc__": f"`{host.__name__}` of a model with Context Broadcasting.",
        "model_type": f"context_broadcast_{host.model_type}",
    }
    return type(name, (ContextBroadcastConfigMixin, host), body)


def _alter_model(name: str, host: type[PreTrainedModel]) -> type[PreTrainedModel]:
    auto_classes = {}
    for auto_class in ("AutoModel", *_AUTO_CLASSES):
        served = getattr(transformers, auto_class)._model_mapping.get(host.config_class, ())
        served = served if isinstance(served, tuple) else (served,)
        if host in served or (auto_class == "AutoModel" and served):
            chosen = host if host in served else served[0]
            auto_classes[auto_class] = f"ContextBroadcast{chosen.__name__}"
    body = {
        "__module__": __name__,
        "__doc__": f"`{host.__name__}` with Context Broadcasting.",
        "host": host,
        "config_class": __getattr__(f"ContextBroadcast{host.config_class.__name__}"),
        "auto_classes": auto_classes,
    }
    return type(name, (ContextBroadcastMixin, host), body)


_AUTO_CLASSES = (
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
    "AutoModelForMaskedImageModeling",
    "AutoModelForZeroShotImageClassification",
    "AutoBackbone",
)
# Whose configurations are registered when frugalvit is imported; that of timm's wrapper would import timm.
CONFIGURATIONS = (
    "CLIPConfig",
    "CLIPVisionConfig",
    "DINOv3ViTConfig",
    "DeiTConfig",
    "Dinov2Config",
    "Dinov2WithRegistersConfig",
    "PvtConfig",
    "PvtV2Config",
    "SiglipConfig",
    "SiglipVisionConfig",
    "SwinConfig",
    "ViTConfig",
)
