"""SparseFormers in open_clip: a visual tower, and conversion of models between open_clip and Transformers.

Only `to_open_clip` imports the package open_clip.
"""

import copy
import functools
import math

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, CLIPImageProcessor, ViTImageProcessor

from ..configuration.configuration_base import pair
from .hosts.anatomy import activation_name
from .image_format import ImageFormat
from .modeling_sparseformer import SparseFormerVisionModel, SparseFormerVisionModelWithProjection
from .modeling_sparseformer_clip import (
    SparseFormerCLIPConfig,
    SparseFormerCLIPModel,
    SparseFormerSiglipConfig,
    SparseFormerSiglipModel,
    image_side_fields,
)


# PIL's resampling filters for open_clip's names of interpolation modes.
RESAMPLE = {"bilinear": 2, "bicubic": 3, "random": 3}
# Parts of the names of text weights: name in open_clip, then name in Transformers. Queries, keys and values are one
# tensor in open_clip and three tensors in Transformers. "qkv" in a name on the right stands for these three.
TEXT_NAMES = {
    "transformer.resblocks.": "encoder.layers.",
    "token_embedding.": "embeddings.token_embedding.",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.": "final_layer_norm.",
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "attn.in_proj_": "self_attn.qkv_proj.",
    "attn.out_proj.": "self_attn.out_proj.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
}


class OpenClipVisual(nn.Module):
    """SparseFormer with the interface of open_clip's visual towers, for `clip.visual = OpenClipVisual(model)`.

    Args:
        model (`SparseFormerVisionModelWithProjection`, or `SparseFormerVisionModel` for a SigLIP):
            A SparseFormer that was bootstrapped from the visual tower of `clip`.
    """

    def __init__(self, model: SparseFormerVisionModelWithProjection | SparseFormerVisionModel):
        super().__init__()
        config = model.config
        self.projects = hasattr(model, "visual_projection")
        if not self.projects and (config.pooling != "attention" or model.base_model is not model):
            raise ValueError(
                f"Got a {type(model).__name__}, expected a SparseFormerVisionModelWithProjection, or a "
                "SparseFormerVisionModel that was bootstrapped from a SigLIP and pools by attention."
            )
        self.model = model
        image_format = ImageFormat.from_config(config)
        self.image_size = image_format.size
        self.output_dim = config.projection_dim if self.projects else config.hidden_size
        self.image_mean = image_format.mean
        self.image_std = image_format.std

    @functools.cached_property
    def preprocess_cfg(self) -> dict:
        """Preprocessing of images for `open_clip.image_transform_v2`.

        Raises:
            ValueError: if open_clip has no such preprocessing. `open_clip` resizes images bilinearly or bicubically to
                `image_size`, or resizes the shorter side to the length of a crop.
        """
        config = self.model.config
        interpolation = {2: "bilinear", 3: "bicubic"}.get(config.resample)
        crops = config.resize_size is not None
        if interpolation is None or (crops and {config.resize_size} != {*self.image_size}):
            raise ValueError(
                f"`resample` is {config.resample}, `resize_size` is {config.resize_size} and `image_size` is "
                f"{config.image_size}, which open_clip cannot express; expected a `resample` of 2 or 3, and a "
                "`resize_size` of None or of the side of a square `image_size`. Preprocess images with the model's "
                "image processor instead."
            )
        return {
            "size": self.image_size,
            "mode": "RGB",
            "mean": self.image_mean,
            "std": self.image_std,
            "interpolation": interpolation,
            "resize_mode": "shortest" if crops else "squash",
            "fill_color": 0,
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Embed images, `(batch, 3, height, width)`. The embeddings, `(batch, output_dim)`, are not normalized."""
        outputs = self.model(x)
        return outputs.image_embeds if self.projects else outputs.pooler_output

    def lock(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False):
        """Freeze all parameters. `unlocked_groups` must be 0, and `freeze_bn_stats` is ignored."""
        if unlocked_groups:
            raise ValueError(f"unlocked_groups is {unlocked_groups}, expected 0: the tower is frozen as a whole.")
        self.requires_grad_(False)

    def set_grad_checkpointing(self, enable: bool = True):
        """Switch gradient checkpointing on or off."""
        if enable:
            self.model.activation_checkpointing_enable()
        else:
            self.model.activation_checkpointing_disable()


def open_clip_image_processor(model: nn.Module) -> CLIPImageProcessor | ViTImageProcessor:
    """Return a Transformers image processor that is equivalent to an open_clip model's preprocessing. Raise a
    ValueError if Transformers has no such image processor."""
    wanted = getattr(model, "visual", model).preprocess_cfg
    height, width = pair(wanted["size"])
    normalization = {
        "image_mean": list(wanted["mean"]),
        "image_std": list(wanted["std"]),
        "resample": RESAMPLE[wanted.get("interpolation") or "bicubic"],
    }
    mode = wanted.get("resize_mode") or "shortest"
    if mode == "squash":
        return ViTImageProcessor(size={"height": height, "width": width}, **normalization)
    if mode != "shortest" or height != width:
        raise ValueError(
            f"The model resizes images by {mode!r} to {height} x {width}, which no image processor of Transformers "
            "does; expected 'squash', or 'shortest' to a square."
        )
    size = {"size": {"shortest_edge": height}, "crop_size": {"height": height, "width": width}}
    return CLIPImageProcessor(**size, **normalization)


@torch.no_grad()
def from_open_clip(clip: nn.Module) -> SparseFormerCLIPModel | SparseFormerSiglipModel:
    """Convert an open_clip model with an `OpenClipVisual` to Transformers. The new model is in evaluation mode and has
    copies of the weights.

    Args:
        clip (`open_clip.CLIP` or `open_clip.CustomTextCLIP`): A model whose `visual` is an `OpenClipVisual`.

    Returns:
        A `SparseFormerSiglipModel` if `clip` has a `logit_bias`, else a `SparseFormerCLIPModel`.

    Raises:
        ValueError: if `clip.visual` is not an `OpenClipVisual`, if the SparseFormer of a SigLIP has a projection, if
            the SparseFormer of a CLIP has no projection, or if the text model differs from the text models of CLIP and
            SigLIP in Transformers.
    """
    visual = getattr(clip, "visual", None)
    is_siglip = getattr(clip, "logit_bias", None) is not None
    if not isinstance(visual, OpenClipVisual) or visual.projects == is_siglip:
        raise ValueError(
            f"The visual tower of this {type(clip).__name__} is a {type(visual).__name__}, expected an OpenClipVisual "
            "of a SparseFormerVisionModelWithProjection or, in a SigLIP, of a SparseFormerVisionModel."
        )
    text = getattr(clip, "text", clip)
    has_matrix = isinstance(text.text_projection, nn.Parameter)
    block = text.transformer.resblocks[0]
    expected_side = f"Transformers' {'SigLIP' if is_siglip else 'CLIP'}"
    unlike = f"The text side of this {type(clip).__name__} differs from the text side of {expected_side}."
    has_cls = getattr(text, "cls_emb", None) is not None
    if has_matrix == is_siglip or has_cls or not isinstance(block.attn, nn.MultiheadAttention):
        raise ValueError(unlike)
    vocab_size, hidden_size = text.token_embedding.weight.shape
    text_config = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": block.mlp.c_fc.out_features,
        "num_hidden_layers": len(text.transformer.resblocks),
        "num_attention_heads": block.attn.num_heads,
        "max_position_embeddings": len(text.positional_embedding),
        "hidden_act": activation_name(block.mlp.gelu),
        "layer_norm_eps": text.ln_final.eps,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    weights = {}
    state_dict = text.state_dict()
    for theirs, ours in text_names(text).items():
        if "qkv" in ours:
            for letter, part in zip("qkv", state_dict[theirs].chunk(3), strict=True):
                weights[ours.replace("qkv", letter)] = part
        else:
            weights[ours] = state_dict[theirs]
    vision_config = image_side_fields(visual.model)
    if is_siglip:
        text_config["projection_size"] = text.text_projection.out_features
        model = SparseFormerSiglipModel(SparseFormerSiglipConfig(text_config=text_config, vision_config=vision_config))
        weights["head.weight"] = text.text_projection.weight
        weights["head.bias"] = text.text_projection.bias
        model.logit_bias.copy_(clip.logit_bias)
    else:
        pooling = getattr(text, "pool_type", getattr(text, "text_pool_type", "argmax"))
        eos_token_id = getattr(text, "eos_id", getattr(text, "text_eos_id", 2))
        # With `eos_token_id=2`, Transformers pools at the highest token id, like open_clip's "argmax".
        text_config |= {"eos_token_id": eos_token_id if pooling == "eos" else 2, "pad_token_id": 0}
        config = SparseFormerCLIPConfig(
            text_config=text_config,
            vision_config=vision_config,
            projection_dim=visual.output_dim,
            logit_scale_init_value=clip.logit_scale.item(),
        )
        model = SparseFormerCLIPModel(config)
        model.text_projection.weight.copy_(text.text_projection.mT)
        model.visual_projection.load_state_dict(visual.model.visual_projection.state_dict())
    model.text_model.load_state_dict(weights)
    model.logit_scale.copy_(clip.logit_scale.squeeze())
    model.vision_model.load_state_dict(visual.model.base_model.state_dict())
    model.eval()
    # Check that `model` and `clip` return equal embeddings for random token ids that are padded with 0.
    config = model.config.text_config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (8, config.max_position_embeddings), generator=generator)
    ids[:, ids.shape[1] // 2 :] = 0
    expected = clip.encode_text(ids.to(clip.logit_scale.device)).float().cpu()
    given = model.get_text_features(ids).pooler_output
    if not (given - expected).abs().max() < 0.01 * expected.abs().max():
        raise ValueError(unlike)
    return model


def text_names(text: nn.Module) -> dict[str, str]:
    """Map open_clip's names of text weights to Transformers' names. The final projection is left out. In Transformers'
    names, "qkv" stands for the weights of queries, keys and values, which are one tensor in open_clip."""
    names = {}
    for theirs in text.state_dict():
        if theirs.startswith(("transformer.", "token_embedding.", "positional_embedding", "ln_final.")):
            names[theirs] = theirs
            for part, ours in TEXT_NAMES.items():
                names[theirs] = names[theirs].replace(part, ours)
    return names


@torch.no_grad()
def to_open_clip(model: SparseFormerCLIPModel | SparseFormerSiglipModel) -> nn.Module:
    """Convert a Transformers CLIP or SigLIP with a SparseFormer to open_clip. The package open_clip must be installed.
    The new model is in evaluation mode and has copies of the weights.

    Args:
        model (`SparseFormerCLIPModel` or `SparseFormerSiglipModel`): The model to convert.

    Returns:
        An `open_clip.CustomTextCLIP` for a SigLIP, else an `open_clip.CLIP`. Its `visual` is an `OpenClipVisual`.
    """
    import open_clip

    config = model.config.text_config
    is_siglip = hasattr(model, "logit_bias")
    text = {
        "context_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "layers": config.num_hidden_layers,
        # open_clip computes the MLP width as `int(width * mlp_ratio)`, and `int` rounds down. Because 0.5 is added to
        # `intermediate_size`, a rounding error in the product cannot reduce the width by 1.
        "mlp_ratio": (config.intermediate_size + 0.5) / config.hidden_size,
        "norm_kwargs": {"eps": config.layer_norm_eps},
        "act_kwargs": {"approximate": "tanh"} if config.hidden_act == "gelu_pytorch_tanh" else None,
    }
    if is_siglip:
        text |= {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
    elif config.eos_token_id != 2:
        text |= {"pool_type": "eos", "eos_id": config.eos_token_id}
    clip = (open_clip.CustomTextCLIP if is_siglip else open_clip.CLIP)(
        embed_dim=config.projection_size if is_siglip else model.config.projection_dim,
        # The visual tower of `vision_cfg` is small, because an `OpenClipVisual` replaces it below.
        vision_cfg={"layers": 1, "width": 64, "head_width": 64, "patch_size": 16, "image_size": 16},
        text_cfg=text,
        quick_gelu=config.hidden_act == "quick_gelu",
        init_logit_scale=math.log(1 / 0.07),
        init_logit_bias=0.0 if is_siglip else None,
    )
    weights = {}
    state_dict = model.text_model.state_dict()
    for theirs, ours in text_names(clip.text if is_siglip else clip).items():
        if "qkv" in ours:
            weights[theirs] = torch.cat([state_dict[ours.replace("qkv", letter)] for letter in "qkv"])
        else:
            weights[theirs] = state_dict[ours]
    if is_siglip:
        weights |= {f"text_projection.{kind}": value for kind, value in model.text_model.head.state_dict().items()}
        weights = {f"text.{name}": tensor for name, tensor in weights.items()}
        weights["logit_bias"] = model.logit_bias.squeeze()
        vision = copy.deepcopy(model.vision_model)
    else:
        weights["text_projection"] = model.text_projection.weight.mT
        fields = model.vision_model.config.to_dict()
        model_type = f"{fields.pop('model_type')}_projection"
        fields["projection_dim"] = model.config.projection_dim
        vision = AutoModel.from_config(AutoConfig.for_model(model_type, **fields))
        vision.base_model.load_state_dict(model.vision_model.state_dict())
        vision.visual_projection.load_state_dict(model.visual_projection.state_dict())
    weights["logit_scale"] = model.logit_scale.squeeze()
    clip.visual = OpenClipVisual(vision)
    clip.load_state_dict(weights, strict=False)
    return clip.to(model.logit_scale).eval()
