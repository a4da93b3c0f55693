"""Classes for Transformers' models that have Context Broadcasting, and are saved and loaded with it.

`ContextBroadcastViTModel` and the like are subclasses of Transformers' classes, made when they are first asked for,
whose configurations list the places. Their folders ship this file, so that they load where frugalvit is not installed.
"""

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .context_broadcast import ContextBroadcast, Place, check_positions, place_modules
from .context_broadcast_places import find_places
from .hub import AlteredConfigMixin, AlteredModel


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
FIELDS = (
    "context_broadcast",
    "context_broadcast_position",
    "context_broadcast_pattern",
    "context_broadcast_format",
    "context_broadcast_places",
    "context_broadcast_scale_init",
    "context_broadcast_blend",
)


class ContextBroadcastMixin(AlteredModel):
    """A model of Transformers that has Context Broadcasting, as its configuration says."""

    host: type[PreTrainedModel]

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        kind, positions, pattern, data_format, listed, scale_init, blend = (
            getattr(config, name, None) for name in FIELDS
        )
        if listed is None:
            # Earlier versions did not list the places.
            places = find_places(self, kind, check_positions(positions), pattern, data_format)
        else:
            places = [
                Place(_locate(self, name), side, width, _locate(self, block)) for name, side, width, block in listed
            ]
        # Earlier versions did not have the last two fields.
        place_modules(places, kind, data_format, scale_init or 0.0, bool(blend))

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
