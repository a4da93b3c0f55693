"""Insertion of Context Broadcasting into models of Transformers and timm, in place."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from safetensors.torch import load_file
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import get_checkpoint_shard_files

from ..configuration.configuration_vit_context_broadcast import ContextBroadcastPosition
from .context_broadcast import ContextBroadcast, broadcast_block, has_context_broadcast
from .hosts import read_anatomy
from .hosts.anatomy import find


# Names of the parts of a block. Each model uses one name of each tuple.
_ATTENTIONS = ("attention", "self_attn", "attn")
_MLPS = ("mlp", "ffn")
_SECOND_LINEARS = ("fc2", "down_proj", "dense2", "c_proj")
# Keys: classes of blocks whose attention returns tokens in windows. Such a block merges the windows, and passes the
# merged tokens to one of its submodules. Values: name of this submodule.
_AFTER_ATTENTION = {"SwinLayer": "drop_path", "SwinTransformerBlock": "drop_path1", "SwinTransformerV2Block": "norm1"}


def insert_context_broadcast(
    model: nn.Module,
    kind: str = "cb",
    position: str | Sequence[str] = "mlp_end",
    scale_init: float = 0.0,
    blend: bool = False,
) -> list[str]:
    """Insert Context Broadcasting into every block of a vision transformer, in place.

    Insertion changes the outputs of a trained model, so the model has to be fine-tuned. The outputs stay the
    same only with `blend=True`, or with `kind="cb_s"` and `scale_init=0`.

    The class of the model does not change. `save_pretrained` saves the arguments in `config.context_broadcast` and the
    new parameters with the model's weights. `from_pretrained` restores Context Broadcasting only in models whose
    configuration class has this field, for example `ViTContextBroadcastForImageClassification`. For other models, call
    `load_context_broadcast` after `from_pretrained`.

    Args:
        model (`nn.Module`):
            A ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP, Swin, PVT or PVTv2 of Transformers, a VisionTransformer, EVA,
            DINOv3, Swin, SwinV2 or PVTv2 of timm, or a model of this package.
        kind, scale_init, blend: Arguments of `ContextBroadcast`.
        position (`str` or list of `str`, *optional*, defaults to `"mlp_end"`):
            `"mlp_front"` is before the MLP. `"mlp_mid"` is before the second linear layer of the MLP. `"mlp_end"` is
            between the MLP and the residual sum. `"attention_end"` is between the attention and the residual sum.

    Returns:
        `list[str]`: Names of the inserted modules.

    Raises:
        ValueError: if the model has no known blocks or already has Context Broadcasting, or if an argument is invalid.
    """
    if has_context_broadcast(model):
        raise ValueError(
            f"This {type(model).__name__} already has Context Broadcasting; call `remove_context_broadcast` first."
        )
    # This instance only checks the arguments, before the model is changed.
    ContextBroadcast(kind, 1, scale_init=scale_init, blend=blend)
    positions = [position] if isinstance(position, str) else list(position)
    known = get_args(ContextBroadcastPosition)
    if not positions or len(set(positions)) < len(positions) or not {*positions} <= {*known}:
        raise ValueError(f"`position` is {position!r}, expected one or several different names of {known}.")
    anatomy = read_anatomy(model)
    if kind in ("cb_gate", "cb_hybrid") and not anatomy.num_class_tokens:
        raise ValueError(f"`kind` is {kind!r}, which needs a class token; expected 'cb' or 'cb_s' for this model.")
    blocks = find_blocks(anatomy.model)
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no blocks of a known kind; docs/models.md lists the models that work."
        )
    for block in blocks:
        has_windows = getattr(block, "window_size", 0) and type(block).__name__ not in _AFTER_ATTENTION
        if "attention_end" in positions and has_windows:
            raise ValueError(
                f"`position` is {position!r}, but 'attention_end' is not supported for {type(block).__name__}, whose "
                "attention returns windows; expected positions of the MLP."
            )
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
    _set_config(model, {"kind": kind, "position": positions, "scale_init": scale_init, "blend": blend})
    return [name for name, module in model.named_modules() if isinstance(module, ContextBroadcast)]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return a model's transformer blocks. A block is a member of a module list and has an attention and an MLP."""
    return [
        block
        for name, block in model.named_modules()
        if name.rpartition(".")[2].isdigit()
        and find(block, _ATTENTIONS) is not None
        and isinstance(find(find(block, _MLPS), _SECOND_LINEARS), nn.Linear)
    ]


def load_context_broadcast(model: nn.Module, folder: str | Path, loading_info: dict | None = None):
    """Restore Context Broadcasting in a model after `from_pretrained`. The arguments of `insert_context_broadcast` are
    read from `config.context_broadcast`, and the weights are read from `folder`. A model without
    `config.context_broadcast` does not change.

    Args:
        model (`PreTrainedModel`): The model. It is changed in place.
        folder (`str` or `Path`): The folder that the model was loaded from.
        loading_info (`dict`, *optional*):
            The second return value of `from_pretrained(…, output_loading_info=True)`. The names of the restored
            weights are removed from `loading_info["unexpected_keys"]`.

    Raises:
        ValueError: if `folder` lacks weights of Context Broadcasting.
    """
    arguments = getattr(model.config, "context_broadcast", None)
    if not isinstance(arguments, dict) or has_context_broadcast(model):
        return
    insert_context_broadcast(model, **arguments)
    names = [name for name in model.state_dict() if ".context_broadcast_" in name]
    if names:
        # For some models, `save_pretrained` saves weights under the names of older Transformers versions.
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        files = [Path(folder) / SAFE_WEIGHTS_NAME]
        if not files[0].is_file():
            files, _ = get_checkpoint_shard_files(folder, Path(folder) / SAFE_WEIGHTS_INDEX_NAME)
        weights = {}
        for file in files:
            weights |= {apply_renamings(name, renamings): weight for name, weight in load_file(file).items()}
        missing = [name for name in names if name not in weights]
        if missing:
            raise ValueError(f"{str(folder)!r} has no weight {missing[0]!r}, which Context Broadcasting needs.")
        model.load_state_dict({name: weights[name] for name in names}, strict=False)
    if loading_info is not None:
        loading_info["unexpected_keys"] = set(loading_info["unexpected_keys"]) - set(names)


def remove_context_broadcast(model: nn.Module):
    """Remove Context Broadcasting from a model and from its configuration, in place."""
    for module in list(model.modules()):
        # `insert_context_broadcast` set this attribute. The default is a class attribute.
        vars(module).pop("skips_unread_tokens", None)
        for name, child in list(module.named_children()):
            if isinstance(child, ContextBroadcast):
                child.hook.remove()
                delattr(module, name)
    _set_config(model, None)


def _set_config(model: nn.Module, arguments: dict | None):
    """Store the arguments of `insert_context_broadcast` in the model's configuration, or remove them if `arguments` is
    None. Configurations of this package have a field for each argument. Other configurations get a dict
    `context_broadcast`."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    own = next((config for config in configs if hasattr(type(config), "context_broadcast")), None)
    if own is not None and arguments is None:
        own.context_broadcast = None
    elif own is not None:
        own.context_broadcast = arguments["kind"]
        own.context_broadcast_position = arguments["position"]
        own.context_broadcast_scale_init = arguments["scale_init"]
        own.context_broadcast_blend = arguments["blend"]
    elif hasattr(model, "config") and arguments is None:
        vars(model.config).pop("context_broadcast", None)
    elif hasattr(model, "config"):
        model.config.context_broadcast = arguments


__all__ = ["insert_context_broadcast", "load_context_broadcast", "remove_context_broadcast"]
