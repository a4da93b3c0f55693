"""Reads checkpoints of the SparseFormer authors' implementation (github.com/showlab/sparseformer).

Names and shapes of a checkpoint show most of the model; a variant of the papers supplies what they do not show:
iterations without stage embeddings, epsilons, heads, activations and normalization.
"""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer import SparseFormerConfig, SparseFormerProjectionConfig
from .modeling_sparseformer import SparseFormerForImageClassification, SparseFormerVisionModelWithProjection


# The variants that supply the rest: the one of the same width, or the first.
TEMPLATES = {
    "v1": ("v1-tiny", "v1-small", "v1-base"),
    "bootstrapped": ("augreg-base-49-224", "augreg-large-49-224"),
    "bootstrapped-clip": ("clip-base-49-224", "clip-large-64-224"),
}


def both(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.weight": f"{ours}.weight", f"{theirs}.bias": f"{ours}.bias"}


# Steps of the iterated focusing layer of each generation.
FOCUSING_STEPS = {
    "bootstrapped": ("sampling", "position_encoding", "attention", "mlp", "roi_adjustment"),
    "v1": ("attention", "roi_adjustment", "sampling", "mlp"),
}
# Their names in a unit -> our names in a layer, by step. Queries, keys and values are one tensor there.
STEP_NAMES = {
    "sampling": {
        **both("roi_offset_module.0", "sampling.offset_layernorm"),
        "roi_offset_module.1.weight": "sampling.offset_proj.weight",
        "roi_offset_bias": "sampling.offset_bias",
        **both("adaptive_mixing.parameter_generator.0", "sampling.mixing.layernorm"),
        **both("adaptive_mixing.parameter_generator.1", "sampling.mixing.bottleneck"),
        **both("adaptive_mixing.parameter_generator.2", "sampling.mixing.generator"),
        **both("adaptive_mixing.out_proj", "sampling.mixing.out_proj"),
    },
    "position_encoding": {
        **both("pe_transition.0", "position_encoding.layernorm"),
        **both("pe_transition.1", "position_encoding.proj"),
    },
    "attention": {
        **both("norm1", "layernorm_before"),
        **both("attn.qkv", "attention.qkv_proj"),
        **both("attn.proj", "attention.o_proj"),
    },
    "mlp": {
        **both("norm2", "layernorm_after"),
        **both("mlp.fc1", "mlp.fc1"),
        **both("mlp.fc2", "mlp.fc2"),
    },
    "roi_adjustment": both("roi_adjust_module.0", "roi_deltas.layernorm"),
}
# What units of one generation have besides.
GENERATION_NAMES = {
    "bootstrapped": {
        "roi_adjustment": {
            **both("roi_adjust_module.1", "roi_deltas.dense"),
            "roi_adjust_module.3.weight": "roi_deltas.out_proj.weight",
        },
    },
    "v1": {
        "roi_adjustment": {"roi_adjust_module.1.weight": "roi_deltas.out_proj.weight"},
        "sampling": {
            "adaptive_mixing.m_beta": "sampling.mixing.channel_bias",
            "adaptive_mixing.s_beta": "sampling.mixing.point_bias",
        },
    },
}
OUTER_NAMES = {
    **both("feat_extractor.conv1", "sparseformer.stem.convolution"),
    "initial_embedding.weight": "sparseformer.latents.token_embedding",
    "initial_roi.weight": "sparseformer.latents.initial_rois",
    **both("norm", "sparseformer.layernorm"),
    **both("layers.1.0", "sparseformer.transition"),
}


def load_showlab_checkpoint(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the state dict of a checkpoint of the reference implementation, a `.safetensors` file or one of
    `torch.save`, bare or under "model" or "state_dict"; nothing in it is executed. Raise a ValueError if the file
    cannot be read, or holds no state dict."""
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            state_dict = load_file(path)
        else:
            state_dict = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file makes the readers fail in a dozen ways, IndexError and struct.error among them.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"Cannot read tensors of a .pth or .safetensors file from {str(path)!r}: {reason}") from error
    for key in ("model", "state_dict"):
        if isinstance(state_dict, dict) and isinstance(state_dict.get(key), dict):
            state_dict = state_dict[key]
    if not isinstance(state_dict, dict) or not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
        raise ValueError(f"{str(path)!r} holds no state dict. Save the model's state dict alone with torch.save.")
    return state_dict


def infer_showlab_variant(state_dict: dict[str, torch.Tensor]) -> str:
    """Return the variant of a checkpoint, "v1", "bootstrapped" or "bootstrapped-clip"."""
    if "cls_embedding.weight" not in state_dict:
        return "v1"
    return "bootstrapped" if "proj.bias" in state_dict else "bootstrapped-clip"


def config_from_showlab(
    state_dict: dict[str, torch.Tensor],
    variant: str | None = None,
    iterations: int | None = None,
    image_size: int | tuple[int, int] | None = None,
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
    """
    variant = variant or infer_showlab_variant(state_dict)
    if "layers.0.stage_embedding.weight" in state_dict:
        stages = len(state_dict["layers.0.stage_embedding.weight"])
        if iterations not in (None, stages):
            raise ValueError(f"iterations is {iterations}, but the checkpoint has stage embeddings for {stages}.")
        iterations = stages
    last = max((int(match[1]) for name in state_dict if (match := re.match(r"layers\.(\d+)\.", name))), default=0)
    generation = variant.partition("-")[0]
    # Units 0 and 2 focus, and 1 changes the width; in v1, 2 is a block, too.
    num_layers = max(last - (1 if generation == "v1" else 2), 1)
    names = showlab_names(generation, num_layers, variant == "bootstrapped-clip", iterations == 1)
    check_names(state_dict, names, f"variant {variant!r}")
    if state_dict["feat_extractor.conv1.weight"].ndim != 4:
        raise ValueError("The checkpoint's first convolution is not of images; was it made for video?")

    shapes = {name: tensor.shape for name, tensor in state_dict.items()}
    bottlenecks = {shapes[f"layers.{index}.adaptive_mixing.parameter_generator.1.weight"][0] for index in (0, 2)}
    intermediate_size, hidden_size = shapes[f"layers.{last}.mlp.fc1.weight"]
    stem_channels, num_channels = shapes["feat_extractor.conv1.weight"][:2]
    fields = {
        "num_latent_tokens": shapes["initial_roi.weight"][0],
        "num_channels": num_channels,
        "num_sampling_points": shapes["layers.0.roi_offset_bias"][0] // 2,
        "num_mixed_points": shapes["layers.0.adaptive_mixing.out_proj.weight"][1] // stem_channels,
        # One width for both units, or a quarter of each unit's width.
        "mixing_hidden_size": bottlenecks.pop() if len(bottlenecks) == 1 else None,
        "stem_channels": stem_channels,
        "focusing_hidden_size": shapes["initial_embedding.weight"][1],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "intermediate_size": intermediate_size,
        "projection_dim" if variant == "bootstrapped-clip" else "num_labels": shapes["proj.weight"][0],
    }
    if iterations is not None:
        fields["num_focusing_iterations"] = iterations
    if image_size is not None:
        height, width = pair(image_size)
        fields["image_size"] = height if height == width else (height, width)
        fields["resize_size"] = height * 256 // 224 if height == width else None
    config_class = SparseFormerProjectionConfig if "projection_dim" in fields else SparseFormerConfig
    templates = TEMPLATES[variant]
    widths = [config_class.from_variant(name).hidden_size for name in templates]
    template = templates[widths.index(hidden_size)] if hidden_size in widths else templates[0]
    return config_class.from_variant(template, **fields)


def showlab_model_class(config: SparseFormerConfig) -> type:
    """Return the class for a converted model: with a projection if the configuration has one, else a classifier."""
    is_projection = isinstance(config, SparseFormerProjectionConfig)
    return SparseFormerVisionModelWithProjection if is_projection else SparseFormerForImageClassification


def convert_showlab(state_dict: dict[str, torch.Tensor], config: SparseFormerConfig) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint of the reference implementation under the names of the model that
    `showlab_model_class(config)` builds, in float32. Raise a ValueError if names do not fit the configuration."""
    projects = isinstance(config, SparseFormerProjectionConfig)
    iterates_once = config.num_focusing_iterations == 1
    names = showlab_names(config.generation, config.num_hidden_layers, projects, iterates_once)
    check_names(state_dict, names, "the configuration")
    converted = {}
    for theirs, ours in names.items():
        tensor = state_dict[theirs].detach().float()
        if "qkv_proj" in ours:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                converted[ours.replace("qkv", letter)] = part.clone()
        elif ours.endswith("point_bias"):
            converted[ours] = tensor.unsqueeze(-1)
        else:
            converted[ours] = tensor
    return converted


def showlab_names(generation: str, num_layers: int, projects: bool, iterates_once: bool) -> dict[str, str]:
    """Return a dict from the authors' name of every tensor to ours, with `qkv_proj` for three projections in one."""
    names = dict(OUTER_NAMES)
    if generation == "v1":
        names |= both("layers.1.1", "sparseformer.transition_layernorm")
    else:
        names["cls_embedding.weight"] = "sparseformer.latents.cls_token"
        if not iterates_once:
            names["layers.0.stage_embedding.weight"] = "sparseformer.focusing_layer.stage_embedding"
    if projects:
        names["proj.weight"] = "visual_projection.weight"
    else:
        names |= both("proj", "classifier")

    focusing = FOCUSING_STEPS[generation]
    units = {"layers.0": ("focusing_layer", focusing)}
    if generation == "v1":
        units["layers.2"] = ("layers.0", focusing)
    else:
        units["layers.2"] = ("final_focusing_layer", ("sampling", "position_encoding"))
    for index in range(generation == "v1", num_layers):
        units[f"layers.{index + (2 if generation == 'v1' else 3)}"] = (f"layers.{index}", ("attention", "mlp"))
    for unit, (layer, steps) in units.items():
        for step in steps:
            for theirs, ours in (STEP_NAMES[step] | GENERATION_NAMES[generation].get(step, {})).items():
                names[f"{unit}.{theirs}"] = f"sparseformer.{layer}.{ours}"
    return names


def check_names(state_dict: dict[str, torch.Tensor], names: dict[str, str], expected: str):
    """Raise a ValueError unless a checkpoint has these names and no other."""
    missing = sorted(names.keys() - state_dict.keys())
    unexpected = sorted(state_dict.keys() - names.keys())
    if missing or unexpected:
        raise ValueError(
            f"The checkpoint does not fit {expected}: missing {listed(missing)}; unexpected {listed(unexpected)}. "
            "Expected one of the files ..._converted.pth of github.com/showlab/sparseformer, release v2.0.0-refactor."
        )


def listed(names: list[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (f", ... ({len(names)})" if len(names) > shown else "") or "none"
