"""Conversion of checkpoints of the SparseFormer authors' implementation (github.com/showlab/sparseformer).

Most fields of the configuration follow from the names and shapes of the checkpoint's tensors. The other fields are
taken from the papers' model variants: epsilons, attention heads, activations, image normalization and, for v1, the
number of iterations.
"""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer import SparseFormerConfig, SparseFormerProjectionConfig
from .modeling_sparseformer import SparseFormerForImageClassification, SparseFormerVisionModelWithProjection


# The papers' variants of each kind of checkpoint. If no variant has the checkpoint's width, the first variant of
# the kind is used.
TEMPLATES = {
    "v1": ("v1-tiny", "v1-small", "v1-base"),
    "bootstrapped": ("augreg-base-49-224", "augreg-large-49-224"),
    "bootstrapped-clip": ("clip-base-49-224", "clip-large-64-224"),
}
EXPECTED = "Expected one of the files ..._converted.pth of github.com/showlab/sparseformer, release v2.0.0-refactor."
# Regular expressions that convert the authors' names to this package's names. They are applied in this order. In the
# authors' `layers`, 0 and 2 are focusing layers, 1 changes the width, and the others are encoder blocks. `attn.qkv` is
# one layer for queries, keys and values.
RENAMINGS = {
    r"^proj\.": "classifier.",
    r"^feat_extractor\.conv1\.": "sparseformer.stem.convolution.",
    r"^initial_embedding\.weight$": "sparseformer.latents.token_embedding",
    r"^initial_roi\.weight$": "sparseformer.latents.initial_rois",
    r"^cls_embedding\.weight$": "sparseformer.latents.cls_token",
    r"^norm\.": "sparseformer.layernorm.",
    r"^layers\.0\.": "sparseformer.focusing_layer.",
    r"^layers\.1\.0\.": "sparseformer.transition.",
    r"^layers\.1\.1\.": "sparseformer.transition_layernorm.",
    r"\.stage_embedding\.weight$": ".stage_embedding",
    r"\.roi_offset_module\.0\.": ".sampling.offset_layernorm.",
    r"\.roi_offset_module\.1\.": ".sampling.offset_proj.",
    r"\.roi_offset_bias$": ".sampling.offset_bias",
    r"\.adaptive_mixing\.parameter_generator\.0\.": ".sampling.mixing.layernorm.",
    r"\.adaptive_mixing\.parameter_generator\.1\.": ".sampling.mixing.bottleneck.",
    r"\.adaptive_mixing\.parameter_generator\.2\.": ".sampling.mixing.generator.",
    r"\.adaptive_mixing\.m_beta$": ".sampling.mixing.channel_bias",
    r"\.adaptive_mixing\.s_beta$": ".sampling.mixing.point_bias",
    r"\.adaptive_mixing\.": ".sampling.mixing.",
    r"\.pe_transition\.0\.": ".position_encoding.layernorm.",
    r"\.pe_transition\.1\.": ".position_encoding.proj.",
    r"\.roi_adjust_module\.0\.": ".roi_deltas.layernorm.",
    # In bootstrapped models, `roi_adjust_module` has the linear layers 1 and 3. In v1, there is no layer 3.
    r"\.roi_adjust_module\.3\.": ".roi_deltas.out_proj.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.attn\.qkv\.": ".attention.qkv_proj.",
    r"\.attn\.proj\.": ".attention.o_proj.",
}
V1_RENAMINGS = {
    r"^layers\.([2-9]|\d\d)\.": lambda match: f"sparseformer.layers.{int(match[1]) - 2}.",
    r"\.roi_adjust_module\.1\.": ".roi_deltas.out_proj.",
}
BOOTSTRAPPED_RENAMINGS = {
    r"^layers\.2\.": "sparseformer.final_focusing_layer.",
    r"^layers\.([3-9]|\d\d)\.": lambda match: f"sparseformer.layers.{int(match[1]) - 3}.",
    r"\.roi_adjust_module\.1\.": ".roi_deltas.dense.",
}


def load_showlab_checkpoint(path: str | Path) -> dict[str, torch.Tensor]:
    """Load the state dict of a checkpoint of the SparseFormer authors. No code in the file is executed.

    Args:
        path (`str` or `Path`): A `.safetensors` file or a file of `torch.save`. The content of the file is a state
            dict, or a dict that has a state dict under "model" or "state_dict".

    Raises:
        ValueError: if the file cannot be read or does not hold a state dict.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise FileNotFoundError("there is no such file")
        if path.suffix == ".safetensors":
            state_dict = load_file(path)
        else:
            state_dict = torch.load(path, map_location="cpu", weights_only=True)
    # Damaged files raise many kinds of errors, for example IndexError and struct.error.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"Cannot read tensors of a .pth or .safetensors file from {str(path)!r}: {reason}") from error
    for key in ("model", "state_dict"):
        if isinstance(state_dict, dict) and isinstance(state_dict.get(key), dict):
            state_dict = state_dict[key]
    if not isinstance(state_dict, dict) or not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
        raise ValueError(f"{str(path)!r} holds no state dict. Save it by torch.save(model.state_dict(), path).")
    return state_dict


def infer_showlab_variant(state_dict: dict[str, torch.Tensor]) -> str:
    """Return the kind of a checkpoint: "v1", "bootstrapped" or "bootstrapped-clip"."""
    if "cls_embedding.weight" not in state_dict:
        return "v1"
    return "bootstrapped" if "proj.bias" in state_dict else "bootstrapped-clip"


def infer_sizes(state_dict: dict[str, torch.Tensor], variant: str) -> dict:
    """Return the configuration fields that follow from the shapes of a checkpoint's tensors."""
    last = max((int(match[1]) for name in state_dict if (match := re.match(r"layers\.(\d+)\.", name))), default=0)
    shapes = {name: tensor.shape for name, tensor in state_dict.items()}
    stem_shape = shapes["feat_extractor.conv1.weight"]
    if len(stem_shape) != 4:
        raise ValueError(
            f"The checkpoint's first convolution has a weight of shape {tuple(stem_shape)}, expected 4 axes; models "
            "for video are not supported."
        )
    bottlenecks = {shapes[f"layers.{index}.adaptive_mixing.parameter_generator.1.weight"][0] for index in (0, 2)}
    intermediate_size, hidden_size = shapes[f"layers.{last}.mlp.fc1.weight"]
    stem_channels, num_channels = stem_shape[:2]
    return {
        "num_latent_tokens": shapes["initial_roi.weight"][0],
        "num_channels": num_channels,
        "num_sampling_points": shapes["layers.0.roi_offset_bias"][0] // 2,
        "num_mixed_points": shapes["layers.0.adaptive_mixing.out_proj.weight"][1] // stem_channels,
        # If the focusing layers have different bottlenecks, None makes each bottleneck a quarter of its layer's width.
        "mixing_hidden_size": bottlenecks.pop() if len(bottlenecks) == 1 else None,
        "stem_channels": stem_channels,
        "focusing_hidden_size": shapes["initial_embedding.weight"][1],
        "hidden_size": hidden_size,
        # In v1, the second focusing layer is also the first encoder block.
        "num_hidden_layers": max(last - (1 if variant == "v1" else 2), 1),
        "intermediate_size": intermediate_size,
        "projection_dim" if variant == "bootstrapped-clip" else "num_labels": shapes["proj.weight"][0],
    }


def config_from_showlab(
    state_dict: dict[str, torch.Tensor],
    variant: str | None = None,
    iterations: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> SparseFormerConfig:
    """Return the configuration of a checkpoint of the SparseFormer authors.

    Args:
        state_dict (`dict`): Result of `load_showlab_checkpoint`.
        variant (`str`, *optional*):
            "v1", "bootstrapped" or "bootstrapped-clip" (with a projection and QuickGELU). By default, the names in
            the checkpoint determine the variant.
        iterations (`int`, *optional*):
            Number of executions of the focusing layer. For bootstrapped models, the default is the number of stage
            embeddings, or 1 without stage embeddings. For v1, the default is the number in the paper's variant.
        image_size (`int` or pair of `int`, *optional*):
            Height and width of preprocessed images in pixels. The default is 224. For a square size, images are
            resized to 8/7 of the size and cropped. For a rectangular size, images are resized without a crop.

    Raises:
        ValueError: if tensors are missing, or if `iterations` differs from the default of a bootstrapped checkpoint.
    """
    variant = variant or infer_showlab_variant(state_dict)
    if variant != "v1":
        # A focusing layer with a single iteration has no stage embedding.
        stages = len(state_dict.get("layers.0.stage_embedding.weight", [None]))
        if iterations not in (None, stages):
            raise ValueError(
                f"`iterations` is {iterations}, expected {stages}, the number of the checkpoint's stage embeddings"
                f"{' (it has none, as with one iteration)' if stages == 1 else ''}."
            )
        iterations = stages
    try:
        fields = infer_sizes(state_dict, variant)
    except (KeyError, IndexError) as error:
        raise ValueError(f"The checkpoint does not fit variant {variant!r}: missing {error}. {EXPECTED}") from error
    if iterations is not None:
        fields["num_focusing_iterations"] = iterations
    if image_size is not None:
        height, width = pair(image_size)
        fields["image_size"] = height if height == width else (height, width)
        fields["resize_size"] = height * 256 // 224 if height == width else None
    config_class = SparseFormerProjectionConfig if "projection_dim" in fields else SparseFormerConfig
    widths = {config_class.from_variant(name).hidden_size: name for name in TEMPLATES[variant]}
    return config_class.from_variant(widths.get(fields["hidden_size"], TEMPLATES[variant][0]), **fields)


def showlab_model_class(config: SparseFormerConfig) -> type:
    """Return `SparseFormerVisionModelWithProjection` for a configuration with a projection, else a classifier."""
    is_projection = isinstance(config, SparseFormerProjectionConfig)
    return SparseFormerVisionModelWithProjection if is_projection else SparseFormerForImageClassification


def convert_showlab(state_dict: dict[str, torch.Tensor], config: SparseFormerConfig) -> dict[str, torch.Tensor]:
    """Convert a checkpoint of the SparseFormer authors to a float32 state dict of `showlab_model_class(config)`.
    Raise a ValueError if the tensor names do not fit the configuration."""
    model_class = showlab_model_class(config)
    converted = {}
    for theirs, tensor in state_dict.items():
        ours = our_name(theirs, config)
        tensor = tensor.detach().float()
        if "qkv_proj" in ours:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                converted[ours.replace("qkv", letter)] = part.clone()
        else:
            converted[ours] = tensor.unsqueeze(-1) if ours.endswith("point_bias") else tensor
    with torch.device("meta"):
        expected = model_class(config).state_dict()
    missing = sorted(expected.keys() - converted.keys())
    unexpected = sorted(converted.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"The checkpoint does not fit a {config.generation} {model_class.__name__}: missing "
            f"{', '.join(missing[:3]) or 'none'}; unexpected {', '.join(unexpected[:3]) or 'none'}. {EXPECTED}"
        )
    return converted


def our_name(theirs: str, config: SparseFormerConfig) -> str:
    """Convert a tensor name of the authors to this package's name. In the result, `qkv_proj` stands for three layers:
    `q_proj`, `k_proj` and `v_proj`."""
    renamings = RENAMINGS | (V1_RENAMINGS if config.is_v1 else BOOTSTRAPPED_RENAMINGS)
    if isinstance(config, SparseFormerProjectionConfig):
        renamings[r"^proj\."] = "visual_projection."
    for pattern, ours in renamings.items():
        theirs = re.sub(pattern, ours, theirs)
    return theirs
