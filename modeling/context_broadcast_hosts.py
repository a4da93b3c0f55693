"""Context Broadcasting in models of other libraries: put into a model that is there, taken out of it, saved with it.

Parts of models are known by `hosts`. A model of Transformers becomes one of `ContextBroadcastViTModel` and the like,
subclasses of Transformers' classes, made when they are first asked for, whose configurations list the places. Their
folders ship this file, so that they load where frugalvit is not installed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..configuration.configuration_base import CONTEXT_BROADCASTS
from .context_broadcast import (
    DATA_FORMATS,
    ContextBroadcast,
    Place,
    check_choice,
    check_class_token,
    check_positions,
    has_context_broadcast,
    place_modules,
    places_in_block,
    remove_modules,
)
from .hub import AlteredConfigMixin, AlteredModel, import_from_package


logger = logging.get_logger(__name__)

_AUTO_CLASSES = (
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
    "AutoModelForMaskedImageModeling",
    "AutoModelForZeroShotImageClassification",
    "AutoBackbone",
)
# Configurations that are registered when frugalvit is imported. That of timm's wrapper would import timm.
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
# Fields that a configuration has in addition to those of its host.
_FIELDS = (
    "context_broadcast",
    "context_broadcast_position",
    "context_broadcast_pattern",
    "context_broadcast_format",
    "context_broadcast_places",
    "context_broadcast_scale_init",
    "context_broadcast_blend",
)
# Transformers finds the image processor of this wrapper by its model type, of others by a file of their own.
_TIMM_WRAPPER = "timm_wrapper"


@dataclass(frozen=True)
class ContextBroadcastReport:
    """Report of an insertion of Context Broadcasting.

    Args:
        kind (`str`): Its kind.
        places (`list[str]`): The modules, by name, each with `.input` or `.output`.
        num_parameters (`int`): Number of parameters that were added.
        changes_outputs (`bool`): Whether a trained model computes something else from now on, until it is fine-tuned.
        is_saved (`bool`): Whether `save_pretrained` keeps it.
    """

    kind: str
    places: list[str]
    num_parameters: int
    changes_outputs: bool
    is_saved: bool

    def __str__(self) -> str:
        lines = [f"{self.kind} at {len(self.places)} places, {self.num_parameters:,} parameters:", *self.places]
        if self.changes_outputs:
            lines.append(
                "A trained model computes something else with it: fine-tune it, or insert it with `blend=True`, which "
                "starts as the model was and is learned."
            )
        if not self.is_saved:
            lines.append("It is not saved with the model: insert it again before you load a state dict.")
        return "\n  ".join(lines)


def insert_context_broadcast(
    model: nn.Module,
    kind: str = "cb",
    position: str | Sequence[str] = "mlp_end",
    pattern: str | None = None,
    data_format: str = "channels_last",
    scale_init: float = 0.0,
    blend: bool = False,
) -> ContextBroadcastReport:
    """Put Context Broadcasting into every block of a vision transformer, in place.

    A model that is trained computes something else from then on, with the gates hardly anything of use, and has to be
    fine-tuned. It stays what it was with `"cb_s"`, whose scale starts at 0, and with another kind and `blend=True`.

    A model of Transformers or of this package keeps it when it is saved: the folder loads with `AutoModel…` where
    frugalvit is imported, and with `trust_remote_code=True` elsewhere and for timm's wrapper. The class of a model of
    Transformers becomes a subclass that remembers. Pass the model that you will save, not a part of it. A model of
    timm outside of that wrapper has no configuration to keep it in: insert again before you load a state dict.

    Args:
        model (`nn.Module`):
            Transformers' ViT, DeiT, DINOv2 and DINOv3, CLIP, SigLIP (of two towers, the one for images), Swin, PVT,
            PVTv2; timm's VisionTransformer, EVA, DINOv3, Swin, SwinV2, PVTv2; SparseFormer (its cortex),
            ViTImpulseInit; or, with `pattern`, any other.
        kind (`str`, *optional*, defaults to `"cb"`): As in `ContextBroadcast`.
        position (`str` or several, *optional*, defaults to `"mlp_end"`):
            `"mlp_front"`, before the MLP; `"mlp_mid"`, between its activation and its second linear layer;
            `"mlp_end"` and `"attention_end"`, before the residual sums.
        pattern (`str`, *optional*):
            Regular expression for the whole names of modules, for example `r"blocks\\.\\d+\\.mlp"`. Their outputs are
            broadcast; for `"mlp_front"` and `"mlp_mid"`, their inputs.
        data_format (`str`, *optional*, defaults to `"channels_last"`):
            With `pattern`, whether the modules' tensors are `"channels_last"` or `"channels_first"`.
        scale_init, blend: As in `ContextBroadcast`.

    Returns:
        `ContextBroadcastReport`: The places, how many parameters came, and what to mind.

    Raises:
        ValueError: if the model is none of those or already has it, no module has such a name, or an argument makes no
            sense. The model is then as it was.
    """
    positions = check_positions(position)
    places = find_places(model, kind, positions, pattern, data_format)
    place_modules(places, kind, data_format, scale_init, blend)
    names = {module: name for name, module in model.named_modules()}
    listed = [[names[place.module], place.side, place.width, names[place.block]] for place in places]
    values = (kind, positions, pattern, data_format, listed, scale_init, blend)
    is_saved = _remember(model, dict(zip(_FIELDS, values, strict=True)))
    return ContextBroadcastReport(
        kind,
        [f"{name}.{side}" for name, side, _, _ in listed],
        (sum(place.width for place in places) if kind == "cb_s" else 0) + blend * len(places),
        changes_outputs=not (blend or (kind == "cb_s" and scale_init == 0)),
        is_saved=is_saved,
    )


def remove_context_broadcast(model: nn.Module) -> None:
    """Undo `insert_context_broadcast`: weights, outputs and class are those of the model without.

    Raises:
        ValueError: if there is none.
    """
    if not has_context_broadcast(model):
        raise ValueError(f"This {type(model).__name__} has no Context Broadcasting to remove.")
    remove_modules(model)
    _forget(model)


def _remember(model: nn.Module, fields: dict) -> bool:
    """Note in the configuration what was inserted, if the model's class builds it again from there. Return whether it
    does."""
    config = _config_of_own_tower(model)
    if config is not None and fields["context_broadcast_pattern"] is None:
        for name, value in fields.items():
            if hasattr(type(config), name):
                setattr(config, name, value)
        return True
    if isinstance(model, PreTrainedModel):
        altered = altered_class(type(model))
        if altered is None:
            logger.warning(
                f"{type(model).__name__} is no class of Transformers: saving it will not keep Context Broadcasting. "
                "Insert it again after loading."
            )
            return False
        if model.config.model_type == _TIMM_WRAPPER:
            # The model type becomes another.
            model.config.image_processor_type = "TimmWrapperImageProcessor"
        for name, value in fields.items():
            setattr(model.config, name, value)
        model.config.__class__ = altered.config_class
        model.__class__ = altered
        altered.register()
        return True
    return False


def _forget(model: nn.Module):
    config = _config_of_own_tower(model)
    if isinstance(model, ContextBroadcastMixin):
        model.__class__ = type(model).host
        model.config.__class__ = model.config_class
        for name in _FIELDS:
            vars(model.config).pop(name, None)
        if model.config.model_type == _TIMM_WRAPPER:
            vars(model.config).pop("image_processor_type", None)
    elif config is not None:
        config.context_broadcast = None


def _config_of_own_tower(model: nn.Module) -> PreTrainedConfig | None:
    """The configuration of the part of a model that builds Context Broadcasting by itself, if there is one."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in configs if hasattr(type(config), "context_broadcast")), None)


def find_places(
    model: nn.Module, kind: str, positions: Sequence[str], pattern: str | None, data_format: str
) -> list[Place]:
    """Find the places for Context Broadcasting in a model, which stays as it is."""
    check_choice("kind", kind, CONTEXT_BROADCASTS)
    check_choice("data_format", data_format, DATA_FORMATS)
    if has_context_broadcast(model):
        raise ValueError(
            f"This {type(model).__name__} already has Context Broadcasting. Call `remove_context_broadcast` first, "
            "and give all positions at once."
        )
    hosts = import_from_package("hosts", "Inserting Context Broadcasting")
    anatomy = hosts.read_anatomy(model)
    if pattern is None:
        if data_format != "channels_last":
            raise ValueError("`data_format` is for `pattern`; the blocks that are known need none.")
        places = _find_in_blocks(model, anatomy, positions)
    else:
        places = _find_matches(model, positions, pattern)
    check_class_token(kind, anatomy.num_class_tokens > 0, type(model).__name__)
    names = {module: name for name, module in model.named_modules()}
    if kind == "cb_s" and (unknown := [names[place.module] for place in places if place.width is None]):
        raise ValueError(
            f"`kind='cb_s'` needs to know how many channels {unknown[0]!r} has, and there is no linear layer or "
            "convolution in it; match one."
        )
    return places


def _find_in_blocks(model: nn.Module, anatomy, positions: Sequence[str]) -> list[Place]:
    """The places in all blocks of a model that was read."""
    places = []
    for outline in anatomy.outlines:
        block, end = outline.block, (outline.attention, "output")
        if outline.after_attention is not None:
            end = (outline.after_attention, "input")
        elif "attention_end" in positions and getattr(block, "window_size", 0):
            raise ValueError(
                f"A {type(block).__name__} attends within windows; 'attention_end' is not supported for it."
            )
        places += places_in_block(block, outline.mlp, outline.second_linear, end, positions)
    if not places:
        raise ValueError(
            f"{type(model).__name__} has no blocks that are known here (docs/models.md lists models). Name the "
            "modules to broadcast after by `pattern`."
        )
    return places


def _find_matches(model: nn.Module, positions: Sequence[str], pattern: str) -> list[Place]:
    """The places at all modules whose names match `pattern`."""
    if len(positions) > 1:
        raise ValueError(f"With `pattern`, give one position; got {list(positions)}.")
    side = "input" if positions[0] in ("mlp_front", "mlp_mid") else "output"
    names = [name for name, _ in model.named_modules() if name and re.fullmatch(pattern, name)]
    if not names:
        some = ", ".join(list(dict(model.named_modules()))[1::10][:8])
        raise ValueError(f"`pattern` is {pattern!r}, which no module's whole name matches; names are {some}, …")
    modules = [_innermost(model.get_submodule(name), 0 if side == "input" else -1) for name in names]
    return [Place(module, side, _width(module, side), module) for module in modules]


def _innermost(module: nn.Module, index: int) -> nn.Module:
    """The first or last module in a sequence: one that is added to the sequence itself would run as a part of it."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[index]
    return module


def _width(module: nn.Module, side: str) -> int | None:
    """Channels that a module takes or returns, of the first or last linear layer or convolution in it."""
    layers = [each for each in module.modules() if isinstance(each, (nn.Linear, nn.Conv2d))]
    if not layers:
        return None
    layer = layers[0 if side == "input" else -1]
    suffix = "features" if isinstance(layer, nn.Linear) else "channels"
    return getattr(layer, f"in_{suffix}" if side == "input" else f"out_{suffix}")


class ContextBroadcastMixin(AlteredModel):
    """A model of Transformers that has Context Broadcasting, as its configuration says."""

    host: type[PreTrainedModel]

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        kind, _, _, data_format, listed, scale_init, blend = (getattr(config, name) for name in _FIELDS)
        places = [Place(_locate(self, name), side, width, _locate(self, block)) for name, side, width, block in listed]
        place_modules(places, kind, data_format, scale_init, blend)

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, ContextBroadcast):
            module.reset_parameters()
        else:
            super()._init_weights(module)


def _locate(model: nn.Module, name: str) -> nn.Module:
    """The module that had a name in a model of the same family, which may have been a part of this one or the reverse.

    Raises:
        ValueError: if there is none, or more than one.
    """
    modules, wanted = dict(model.named_modules()), name
    while wanted not in modules and "." in wanted:
        wanted = wanted.partition(".")[2]
    found = [module for own, module in modules.items() if own == wanted or own.endswith(f".{name}")]
    if len(found) != 1:
        raise ValueError(
            f"Context Broadcasting stands at {name!r}, which is {len(found)} modules of {type(model).__name__}."
        )
    return found[0]


def altered_class(host: type) -> type | None:
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
    return type(name, (AlteredConfigMixin, host), body)


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
