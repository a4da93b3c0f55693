"""Places for Context Broadcasting in models of other libraries, whose parts `hosts` knows."""

import re
from collections.abc import Sequence

from torch import nn

from ..configuration.configuration_base import CONTEXT_BROADCASTS
from .context_broadcast import (
    DATA_FORMATS,
    Place,
    check_choice,
    check_class_token,
    has_context_broadcast,
    places_in_block,
)
from .hub import import_from_package


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
