"""Context Broadcasting put into a model that is there, taken out of it, and noted where the model is saved."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .context_broadcast import check_positions, has_context_broadcast, place_modules, remove_modules
from .context_broadcast_classes import FIELDS, ContextBroadcastMixin, altered_class
from .context_broadcast_places import find_places
from .hosts.timm import TIMM


logger = logging.get_logger(__name__)


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
    is_saved = _remember(model, dict(zip(FIELDS, values, strict=True)))
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
        if model.config.model_type == TIMM:
            # Transformers finds this one by the model type, which becomes another; others have a file of their own.
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
        for name in FIELDS:
            vars(model.config).pop(name, None)
        if model.config.model_type == TIMM:
            vars(model.config).pop("image_processor_type", None)
    elif config is not None:
        config.context_broadcast = None


def _config_of_own_tower(model: nn.Module) -> PreTrainedConfig | None:
    """The configuration of the part of a model that builds Context Broadcasting by itself, if there is one."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in configs if hasattr(type(config), "context_broadcast")), None)
