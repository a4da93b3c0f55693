"""Context Broadcasting in models of Transformers and timm, in place."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from safetensors.torch import load_file
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from ..configuration.configuration_vit_context_broadcast import ContextBroadcastPosition
from .context_broadcast import ContextBroadcast, broadcast_block, has_context_broadcast
from .hosts import read_anatomy
from .hosts.anatomy import find


# Names of a block's parts in all libraries.
_ATTENTIONS = ("attention", "self_attn", "attn")
_MLPS = ("mlp", "ffn")
_SECOND_LINEARS = ("fc2", "down_proj", "dense2", "c_proj")
# Blocks whose attention returns windows: the module that is given what is put together from them.
_AFTER_ATTENTION = {"SwinLayer": "drop_path", "SwinTransformerBlock": "drop_path1", "SwinTransformerV2Block": "norm1"}


def insert_context_broadcast(
    model: nn.Module,
    kind: str = "cb",
    position: str | Sequence[str] = "mlp_end",
    scale_init: float = 0.0,
    blend: bool = False,
) -> list[str]:
    """Put Context Broadcasting into every block of a vision transformer, in place.

    A trained model computes something else from then on and has to be fine-tuned, except with `kind="cb_s"`, whose
    scale starts at 0, or `blend=True`.

    The model keeps its class. `save_pretrained` notes the arguments in `config.context_broadcast` and saves the
    parameters of `cb_s` and `blend` beside the host's, but `from_pretrained` builds the host without them: call
    `load_context_broadcast` afterwards. To publish a model, train a `ViTContextBroadcastForImageClassification`.
    Families of this package whose configuration has the field `context_broadcast` build it themselves.

    Args:
        model (`nn.Module`):
            A ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP, Swin, PVT or PVTv2 of Transformers, a VisionTransformer, EVA,
            DINOv3, Swin, SwinV2 or PVTv2 of timm, or a model of this package.
        kind, scale_init, blend: As in `ContextBroadcast`.
        position (`str` or several, *optional*, defaults to `"mlp_end"`):
            `"mlp_front"`, before the MLP; `"mlp_mid"`, between its activation and its second linear layer;
            `"mlp_end"` and `"attention_end"`, before the residual sums.

    Returns:
        `list[str]`: Names of the inserted modules.

    Raises:
        ValueError: if the model has no known blocks or already has Context Broadcasting, or an argument is invalid.
    """
    if has_context_broadcast(model):
        raise ValueError(f"This {type(model).__name__} already has Context Broadcasting.")
    # Raises before the model is changed.
    ContextBroadcast(kind, 1, scale_init=scale_init, blend=blend)
    anatomy = read_anatomy(model)
    positions = _check_positions(kind, position, anatomy.num_class_tokens > 0)
    blocks = find_blocks(anatomy.model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no blocks that are known here (docs/models.md lists models).")
    for block in blocks:
        has_windows = getattr(block, "window_size", 0) and type(block).__name__ not in _AFTER_ATTENTION
        if "attention_end" in positions and has_windows:
            raise ValueError(f"`position` 'attention_end' is not supported for {type(block).__name__}.")
    for block in blocks:
        mlp = find(block, _MLPS)
        attention = find(block, _ATTENTIONS)
        side = "out"
        if after := _AFTER_ATTENTION.get(type(block).__name__):
            attention = getattr(block, after)
            side = "in"
        second_linear = find(mlp, _SECOND_LINEARS)
        broadcast_block(mlp, second_linear, attention, side, positions, kind, scale_init=scale_init, blend=blend)
    if hasattr(anatomy.model, "skips_unread_tokens"):
        anatomy.model.skips_unread_tokens = False
    _note(model, {"kind": kind, "position": positions, "scale_init": scale_init, "blend": blend})
    return [name for name, module in model.named_modules() if isinstance(module, ContextBroadcast)]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of any library's model: those of a list that have an attention and an MLP."""
    return [
        block
        for name, block in model.named_modules()
        if name.rpartition(".")[2].isdigit()
        and find(block, _ATTENTIONS) is not None
        and isinstance(find(find(block, _MLPS), _SECOND_LINEARS), nn.Linear)
    ]


def load_context_broadcast(model: nn.Module, folder: str | Path, loading_info: dict | None = None):
    """Insert what `config.context_broadcast` notes into a model that `from_pretrained` has loaded, with its weights.

    Does nothing if nothing is noted.

    Args:
        model (`PreTrainedModel`): The model.
        loading_info (`dict`, *optional*):
            What `from_pretrained` returns with `output_loading_info=True`; names that are loaded here are taken out.

    Raises:
        ValueError: if weights of Context Broadcasting are missing.
    """
    noted = getattr(model.config, "context_broadcast", None)
    if not isinstance(noted, dict) or has_context_broadcast(model):
        return
    insert_context_broadcast(model, **noted)
    names = [name for name in model.state_dict() if ".context_broadcast_" in name]
    if names:
        # `save_pretrained` gives weights of some models their older names.
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        weights = load_file(Path(folder) / "model.safetensors")
        weights = {apply_renamings(name, renamings): weight for name, weight in weights.items()}
        if lost := [name for name in names if name not in weights]:
            raise ValueError(f"{str(folder)!r} has no weight {lost[0]!r}.")
        model.load_state_dict({name: weights[name] for name in names}, strict=False)
    if loading_info is not None:
        loading_info["unexpected_keys"] = set(loading_info["unexpected_keys"]) - set(names)


def remove_context_broadcast(model: nn.Module):
    """Undo `insert_context_broadcast`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, ContextBroadcast):
                child.hook.remove()
                delattr(module, name)
    _note(model, None)


def _check_positions(kind: str, position: str | Sequence[str], has_class_token: bool) -> list[str]:
    """Return positions as a list. Raise a ValueError if a position is unknown or repeated, or the kind needs a class
    token and there is none."""
    positions = [position] if isinstance(position, str) else list(position)
    known = get_args(ContextBroadcastPosition)
    if not positions or len(set(positions)) < len(positions) or not {*positions} <= {*known}:
        raise ValueError(f"`position` is {position!r}, expected one or several different ones of {known}.")
    if kind in ("cb_gate", "cb_hybrid") and not has_class_token:
        raise ValueError(f"`kind={kind!r}` needs a class token in front of the tokens; 'cb' and 'cb_s' do without.")
    return positions


def _note(model: nn.Module, noted: dict | None):
    """Write what was inserted into the configuration, into the fields of a family that has some."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    own = next((config for config in configs if hasattr(type(config), "context_broadcast")), None)
    if own is not None:
        own.context_broadcast = noted and noted["kind"]
        for name in ("position", "scale_init", "blend") if noted else ():
            setattr(own, f"context_broadcast_{name}", noted[name])
    elif noted and hasattr(model, "config"):
        model.config.context_broadcast = noted
    elif hasattr(model, "config"):
        vars(model.config).pop("context_broadcast", None)


__all__ = ["insert_context_broadcast", "load_context_broadcast", "remove_context_broadcast"]
