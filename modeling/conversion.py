"""Reads checkpoints of the SparseFormer authors' implementation (github.com/showlab/sparseformer).

Names and shapes of a checkpoint show most of the model; the variant supplies what they do not show: iterations without
stage embeddings, epsilons, padding, activations, heads, pooling and normalization.
"""

import pickle
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer import VARIANTS, SparseFormerConfig
from .modeling_sparseformer import (
    SparseFormerForImageClassification,
    SparseFormerPreTrainedModel,
    SparseFormerVisionModelWithProjection,
)


# The variants of the papers whose fields fill in what a checkpoint does not show: the one of the same width, or the
# first.
TEMPLATES = {
    "v1": ("v1-tiny", "v1-small", "v1-base"),
    "bootstrapped": ("augreg-base-49-224", "augreg-large-49-224"),
    "bootstrapped-clip": ("clip-base-49-224", "clip-large-64-224"),
}


def _both(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.weight": f"{ours}.weight", f"{theirs}.bias": f"{ours}.bias"}


# Steps of the iterated focusing layer of each generation.
FOCUSING_STEPS = {
    "bootstrapped": ("sampling", "position_encoding", "attention", "mlp", "roi_adjustment"),
    "v1": ("attention", "roi_adjustment", "sampling", "mlp"),
}
# Their names in a unit -> our names in a layer, for each step. Queries, keys and values are one tensor there.
STEP_NAMES = {
    "sampling": {
        **_both("roi_offset_module.0", "sampling.offset_layernorm"),
        "roi_offset_module.1.weight": "sampling.offset_proj.weight",
        "roi_offset_bias": "sampling.offset_bias",
        **_both("adaptive_mixing.parameter_generator.0", "sampling.mixing.layernorm"),
        **_both("adaptive_mixing.parameter_generator.1", "sampling.mixing.bottleneck"),
        **_both("adaptive_mixing.parameter_generator.2", "sampling.mixing.generator"),
        **_both("adaptive_mixing.out_proj", "sampling.mixing.out_proj"),
    },
    "position_encoding": {
        **_both("pe_transition.0", "position_encoding.layernorm"),
        **_both("pe_transition.1", "position_encoding.proj"),
    },
    "attention": {
        **_both("norm1", "layernorm_before"),
        **_both("attn.qkv", "attention.qkv_proj"),
        **_both("attn.proj", "attention.o_proj"),
    },
    "mlp": {
        **_both("norm2", "layernorm_after"),
        **_both("mlp.fc1", "mlp.fc1"),
        **_both("mlp.fc2", "mlp.fc2"),
    },
    "roi_adjustment": _both("roi_adjust_module.0", "roi_deltas.layernorm"),
}
MIXING_BIAS_NAMES = {
    "adaptive_mixing.m_beta": "sampling.mixing.channel_bias",
    "adaptive_mixing.s_beta": "sampling.mixing.point_bias",
}
# By the number of linear layers that produce the RoI deltas.
ROI_DELTA_NAMES = {
    1: {"roi_adjust_module.1.weight": "roi_deltas.out_proj.weight"},
    2: {
        **_both("roi_adjust_module.1", "roi_deltas.dense"),
        "roi_adjust_module.3.weight": "roi_deltas.out_proj.weight",
    },
}
OUTER_NAMES = {
    **_both("feat_extractor.conv1", "sparseformer.stem.convolution"),
    "initial_embedding.weight": "sparseformer.latents.token_embedding",
    "initial_roi.weight": "sparseformer.latents.initial_rois",
    **_both("norm", "sparseformer.layernorm"),
}


def load_showlab_checkpoint(path: str | Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint file of the reference implementation; nothing in it is executed.

    Args:
        path (`str` or `Path`):
            A `.safetensors` file, or one of `torch.save` (`.pth`) that holds a state dict, bare or under "model" or
            "state_dict". A prefix "state." or "module." of the names is left out.

    Returns:
        `dict`: Names to tensors.

    Raises:
        ValueError: if there is no such file, it cannot be read, or it holds no state dict.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no checkpoint file {str(path)!r}; expected a .pth or .safetensors file.")
    try:
        if path.suffix == ".safetensors":
            state_dict = load_file(path)
        else:
            state_dict = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{str(path)!r} is corrupt or holds Python objects besides tensors, which are not loaded as they could "
            "run code. Download it again, or save its state dict alone with torch.save."
        ) from error
    except Exception as error:
        # A damaged file makes the readers fail in a dozen ways, IndexError and struct.error among them.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{str(path)!r} is no readable checkpoint ({reason}). It may be truncated or of another format: download "
            "it again; expected a .pth or .safetensors file."
        ) from error

    for key in ("model", "state_dict"):
        if isinstance(state_dict, dict) and isinstance(state_dict.get(key), dict):
            state_dict = state_dict[key]
    if not isinstance(state_dict, dict):
        raise ValueError(f"{str(path)!r} holds a {type(state_dict).__name__}, expected names and tensors.")
    for prefix in ("state.", "module."):
        if any(str(name).startswith(prefix) for name in state_dict):
            # Other names beside "state." ones are inputs and outputs that were recorded with the model.
            state_dict = {
                name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)
            }
    others = [str(name) for name, tensor in state_dict.items() if not isinstance(tensor, torch.Tensor)]
    if others or not state_dict:
        raise ValueError(
            f"{str(path)!r} holds no state dict: {_listed(others) or 'nothing'} in it where tensors were expected. "
            "Save the model's state dict alone with torch.save."
        )
    return state_dict


def infer_showlab_variant(state_dict: dict[str, torch.Tensor], iterations: int | None = None) -> str:
    """The variant, of "v1", "bootstrapped" and "bootstrapped-clip", whose names fit a checkpoint best."""
    return min(TEMPLATES, key=lambda variant: sum(map(len, _differences(state_dict, variant, iterations))))


def config_from_showlab(
    state_dict: dict[str, torch.Tensor],
    variant: str | None = None,
    iterations: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    **overrides,
) -> SparseFormerConfig:
    """Return the configuration of a checkpoint of the reference implementation.

    Args:
        state_dict (`dict`): A checkpoint, as `load_showlab_checkpoint` returns it.
        variant (`str`, *optional*):
            "v1", "bootstrapped" or "bootstrapped-clip" (with a projection and QuickGELU); by default the one whose
            names the checkpoint has.
        iterations (`int`, *optional*):
            Executions of the focusing layer. By default as many as there are stage embeddings, or the variant's.
        image_size (`int` or pair of `int`, *optional*):
            Pixels, or height and width, for preprocessing; the variant's 224 by default. Images are resized to 8/7 of
            it and cropped, or resized straight to it if it is a rectangle.
        overrides: Other fields of `SparseFormerConfig` to set differently, for example `id2label`.

    Raises:
        ValueError: if the variant is unknown or contradicts the checkpoint, names are missing or unexpected, or the
            numbers contradict each other.
    """
    if variant is not None and variant not in TEMPLATES:
        raise ValueError(f"There is no variant {variant!r}; expected one of {', '.join(TEMPLATES)}.")
    if "layers.0.stage_embedding.weight" in state_dict:
        stages = len(state_dict["layers.0.stage_embedding.weight"])
        if iterations not in (None, stages):
            raise ValueError(
                f"{iterations} iterations were asked for, but the checkpoint has stage embeddings for {stages}; leave "
                "the number of iterations out."
            )
        iterations = stages
    _check_names(state_dict, variant, iterations)
    variant = variant or infer_showlab_variant(state_dict, iterations)

    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    second = 1 + _has_transition(state_dict)
    try:
        num_tokens, _ = shapes["initial_roi.weight"]
        num_embeddings, focusing_hidden_size = shapes["initial_embedding.weight"]
        stem_channels, num_channels, _, _ = shapes["feat_extractor.conv1.weight"]
        (num_coordinates,) = shapes["layers.0.roi_offset_bias"]
        _, mixed = shapes["layers.0.adaptive_mixing.out_proj.weight"]
        bottlenecks = {shapes[f"layers.{i}.adaptive_mixing.parameter_generator.1.weight"][0] for i in (0, second)}
        focusing_intermediate_size, _ = shapes["layers.0.mlp.fc1.weight"]
        last = max(_layer_indices(state_dict))
        intermediate_size, hidden_size = shapes[f"layers.{last}.mlp.fc1.weight"]
        num_outputs, _ = shapes["proj.weight"]
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"A tensor of the checkpoint has an unexpected number of dimensions ({error}); expected those of the "
            "reference implementation's image models. Was the checkpoint made for video?"
        ) from error
    fields = {
        **_fields_from_names(state_dict, variant),
        "num_latent_tokens": num_tokens,
        "num_channels": num_channels,
        "num_sampling_points": num_coordinates // 2,
        "num_mixed_points": mixed // stem_channels,
        "stem_channels": stem_channels,
        "focusing_hidden_size": focusing_hidden_size,
        "focusing_intermediate_size": focusing_intermediate_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        # One width for both layers, or a quarter of each layer's width.
        "mixing_hidden_size": bottlenecks.pop() if len(bottlenecks) == 1 else None,
        "projection_dim" if variant == "bootstrapped-clip" else "num_labels": num_outputs,
    }
    if num_tokens > 1:
        fields["shared_token_embedding"] = num_embeddings == 1
    if iterations is not None:
        fields["num_focusing_iterations"] = iterations
    template = next((name for name in TEMPLATES[variant] if VARIANTS[name]["hidden_size"] == hidden_size), None)
    template = template or TEMPLATES[variant][0]
    if iterations == 1:
        # The reference implementation gives its QuickGELU to every unit that is executed once.
        fields["focusing_hidden_act"] = VARIANTS[template].get("hidden_act", "gelu")
    if image_size is not None:
        height, width = pair(image_size)
        fields["image_size"] = height if height == width else (height, width)
        fields["resize_size"] = height * 256 // 224 if height == width else None
    return SparseFormerConfig.from_variant(template, **{**fields, **overrides})


def showlab_model_class(config: SparseFormerConfig) -> type[SparseFormerPreTrainedModel]:
    """The class for a converted model: with a projection if the configuration has one, else with a classifier."""
    if config.projection_dim is not None:
        return SparseFormerVisionModelWithProjection
    return SparseFormerForImageClassification


def convert_showlab(state_dict: dict[str, torch.Tensor], config: SparseFormerConfig) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint of the reference implementation under our names, in float32.

    Args:
        state_dict (`dict`): A checkpoint, as `load_showlab_checkpoint` returns it.
        config (`SparseFormerConfig`): Its configuration, as `config_from_showlab` returns it.

    Returns:
        `dict`: State dict of the model that `showlab_model_class(config)` builds.

    Raises:
        ValueError: if names or shapes do not fit the configuration.
    """
    names = _names(config, _has_transition(state_dict))
    if problems := _named(sorted(names.keys() - state_dict.keys()), sorted(state_dict.keys() - names.keys())):
        raise ValueError(f"The checkpoint does not fit the configuration: {problems}.")

    origins, converted = {}, {}
    for theirs, ours in names.items():
        tensor = state_dict[theirs].detach().float()
        if "qkv_proj" in ours:
            parts = {ours.replace("qkv", letter): part for letter, part in zip("qkv", tensor.chunk(3), strict=False)}
        elif ours.endswith("point_bias"):
            parts = {ours: tensor.unsqueeze(-1)}
        else:
            parts = {ours: tensor}
        for name, part in parts.items():
            converted[name], origins[name] = part.clone(), theirs
    if not _has_transition(state_dict):
        # The reference implementation has no transition between layers of one width.
        converted["sparseformer.transition.weight"] = torch.eye(config.hidden_size)
        converted["sparseformer.transition.bias"] = torch.zeros(config.hidden_size)

    with torch.device("meta"):
        expected = showlab_model_class(config)(config).state_dict()
    wrong = [
        f"{origins.get(name, 'the transition that is not there')} is {tuple(converted[name].shape)}, expected "
        f"{tuple(tensor.shape)} (as {name})"
        for name, tensor in expected.items()
        if converted[name].shape != tensor.shape
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors of the checkpoint contradict the others in shape: {_listed(wrong)}. Was the "
            "checkpoint changed by hand?"
        )
    return {name: converted[name].contiguous() for name in expected}


def _layer_indices(state_dict: dict[str, torch.Tensor]) -> set[int]:
    return {int(match[1]) for name in state_dict if (match := re.match(r"layers\.(\d+)\.", name))}


def _has_transition(state_dict: dict[str, torch.Tensor]) -> bool:
    return any(name in state_dict for name in _both("layers.1.0", ""))


def _fields_from_names(state_dict: dict[str, torch.Tensor], variant: str) -> dict:
    """Fields of the configuration that the names show, if the checkpoint is of that variant. One name of a part stands
    for the whole part."""
    separate = variant != "v1"
    num_layers = max(_layer_indices(state_dict), default=0) - _has_transition(state_dict) - separate
    return {
        "num_hidden_layers": max(num_layers, 1),
        "mixing_bias": any(name.endswith(tuple(MIXING_BIAS_NAMES)) for name in state_dict),
        "num_roi_delta_layers": 1 + any("roi_adjust_module.3." in name for name in state_dict),
        "transition_layer_norm": any(name in state_dict for name in _both("layers.1.1", "")),
    }


def _names(config: SparseFormerConfig, transition: bool) -> dict[str, str]:
    """A dict from the authors' name of every tensor to ours, with `qkv_proj` for three projections in one."""
    names = dict(OUTER_NAMES)
    if config.use_cls_token:
        names["cls_embedding.weight"] = "sparseformer.latents.cls_token"
    if config.projection_dim is None:
        names |= _both("proj", "classifier")
    else:
        names["proj.weight"] = "visual_projection.weight"
    if config.stage_embedding and config.num_focusing_iterations > 1:
        names["layers.0.stage_embedding.weight"] = "sparseformer.focusing_layer.stage_embedding"
    if transition:
        names |= _both("layers.1.0", "sparseformer.transition")
        if config.transition_layer_norm:
            names |= _both("layers.1.1", "sparseformer.transition_layernorm")

    focusing = FOCUSING_STEPS[config.generation]
    layers = [("focusing_layer", focusing)]
    cortex = [("attention", "mlp")] * config.num_hidden_layers
    if config.final_focusing_is_block:
        cortex[0] = focusing
    else:
        layers.append(("final_focusing_layer", ("sampling", "position_encoding")))
    layers += [(f"layers.{i}", steps) for i, steps in enumerate(cortex)]
    for i, (layer, steps) in enumerate(layers):
        for step in steps:
            step_names = dict(STEP_NAMES[step])
            if step == "sampling" and config.mixing_bias:
                step_names |= MIXING_BIAS_NAMES
            if step == "roi_adjustment":
                step_names |= ROI_DELTA_NAMES[config.num_roi_delta_layers]
            index = i + (transition and i > 0)
            names |= {
                f"layers.{index}.{theirs}": f"sparseformer.{layer}.{ours}" for theirs, ours in step_names.items()
            }
    return names


def _differences(state_dict: dict[str, torch.Tensor], variant: str, iterations: int | None):
    """Names that the checkpoint lacks to be of that variant, and names that it has beyond."""
    fields = _fields_from_names(state_dict, variant)
    if iterations is not None:
        fields["num_focusing_iterations"] = iterations
    names = _names(SparseFormerConfig.from_variant(TEMPLATES[variant][0], **fields), _has_transition(state_dict))
    return sorted(names.keys() - state_dict.keys()), sorted(state_dict.keys() - names.keys())


def _check_names(state_dict: dict[str, torch.Tensor], variant: str | None, iterations: int | None):
    best = infer_showlab_variant(state_dict, iterations)
    missing, unexpected = _differences(state_dict, best, iterations)
    if not state_dict.keys() & OUTER_NAMES.keys():
        raise ValueError(
            f"This is no SparseFormer checkpoint: it has {len(state_dict)} tensors ({_listed(sorted(state_dict))}), "
            "expected names such as initial_roi.weight and layers.0.adaptive_mixing.out_proj.weight."
        )
    if any("tuo_proj" in name for name in state_dict):
        raise ValueError(
            "The checkpoint has the names of v1's training code (tuo_proj); expected one of the authors' releases "
            "named ..._converted.pth (github.com/showlab/sparseformer, release v2.0.0-refactor)."
        )
    if variant is not None and variant != best:
        own_missing, own_unexpected = _differences(state_dict, variant, iterations)
        fits = "fits" if not missing + unexpected else "fits best"
        raise ValueError(
            f"The checkpoint is not of variant {variant!r}: {_named(own_missing, own_unexpected)}. It {fits} "
            f"{best!r}: give that variant, or leave it out."
        )
    if missing or unexpected:
        hint = "Check that the file is complete and comes from github.com/showlab/sparseformer"
        if missing == ["layers.0.stage_embedding.weight"]:
            hint += "; if its focusing layer is executed once, it has no stage embedding: give 1 as the iterations"
        raise ValueError(f"The checkpoint does not fit variant {best!r}: {_named(missing, unexpected)}. {hint}.")


def _named(missing: list[str], unexpected: list[str]) -> str:
    parts = [("missing", missing), ("unexpected", unexpected)]
    return "; ".join(f"{len(names)} {kind} ({_listed(names)})" for kind, names in parts if names)


def _listed(names: list[str], shown: int = 4) -> str:
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")
