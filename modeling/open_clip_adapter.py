"""SparseFormers in open_clip: the visual tower of an open_clip model, and whole models from and to Transformers.

Nothing here imports open_clip but `to_open_clip`, which builds one of its models.
"""

import math

import torch
from torch import nn
from transformers import CLIPImageProcessor, ViTImageProcessor

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer_base import is_sparseformer
from .hosts.anatomy import Obstacle
from .hosts.open_clip import read_block
from .inheritance import block_weights
from .modeling_sparseformer import SparseFormerVisionModel, SparseFormerVisionModelWithProjection
from .modeling_sparseformer_clip import (
    SparseFormerCLIPConfig,
    SparseFormerCLIPModel,
    SparseFormerSiglipConfig,
    SparseFormerSiglipModel,
)


# open_clip's names of PIL's resampling filters.
_RESAMPLE = {"bilinear": 2, "bicubic": 3, "random": 3}

# Activations of text sides that open_clip has, and what it gives to their classes.
_ACTIVATIONS = {"gelu": None, "gelu_pytorch_tanh": {"approximate": "tanh"}, "quick_gelu": None}


class OpenClipVisual(nn.Module):
    """A SparseFormer with the interface of open_clip's visual towers: `clip.visual = OpenClipVisual(model)`.

    Args:
        model (`SparseFormerVisionModelWithProjection`, of a SigLIP `SparseFormerVisionModel`):
            Bootstrapped from the tower that it replaces.
        output_tokens (`bool`, *optional*, defaults to `False`):
            Return the latent tokens after the final LayerNorm beside the embedding, as open_clip's towers do.

    Raises:
        ValueError: if the model gives no embedding: it neither projects what it pools nor pools by SigLIP's head.
    """

    def __init__(
        self, model: SparseFormerVisionModelWithProjection | SparseFormerVisionModel, output_tokens: bool = False
    ):
        super().__init__()
        config = getattr(model, "config", None)
        projects = isinstance(getattr(model, "visual_projection", None), nn.Linear)
        is_siglip = getattr(config, "pooling", None) == "attention" and model.base_model is model
        if not projects and not is_siglip:
            raise ValueError(
                f"Got a {type(model).__name__}, expected a SparseFormerVisionModelWithProjection, or a "
                "SparseFormerVisionModel that was bootstrapped from a SigLIP and pools by attention."
            )
        self.model = model
        self.output_tokens = output_tokens
        self.image_size = pair(config.image_size)
        self.output_dim = config.projection_dim if projects else config.hidden_size
        mean, std = (
            tuple(value) if isinstance(value, (list, tuple)) else (value,) * config.num_channels
            for value in (config.image_mean, config.image_std)
        )
        self.image_mean, self.image_std = mean, std
        self.preprocess_cfg = {
            "size": self.image_size,
            "mode": "RGB",
            "mean": mean,
            "std": std,
            "interpolation": {2: "bilinear", 3: "bicubic"}.get(config.resample, "bicubic"),
            "resize_mode": "squash" if config.resize_size is None else "shortest",
            "fill_color": 0,
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Images `(batch, 3, height, width)` to embeddings `(batch, output_dim)`, not normalized, and with
        `output_tokens` the latent tokens `(batch, tokens, hidden_size)`."""
        outputs = self.model(x)
        embedding = outputs.image_embeds if hasattr(self.model, "visual_projection") else outputs.pooler_output
        if not self.output_tokens:
            return embedding
        return embedding, outputs.last_hidden_state[:, self.model.config.num_prefix_tokens :]

    def lock(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False):
        """Freeze all but the last groups: the projection and SigLIP's pooling head, the last block with the final
        LayerNorm, the blocks before it, the focusing stage."""
        self.requires_grad_(False)
        base = self.model.base_model
        heads = (base.pooling_head, getattr(self.model, "visual_projection", None))
        head = [parameter for module in heads if module is not None for parameter in module.parameters()]
        inherited = {*base.layers.parameters(), *base.layernorm.parameters(), *head}
        groups = [
            [parameter for parameter in base.parameters() if parameter not in inherited],
            *(list(layer.parameters()) for layer in base.layers[:-1]),
            [*base.layers[-1].parameters(), *base.layernorm.parameters()],
            head,
        ]
        for parameter in (parameter for group in groups[len(groups) - unlocked_groups :] for parameter in group):
            parameter.requires_grad = True

    def set_grad_checkpointing(self, enable: bool = True):
        """Trade time for memory in training."""
        # Transformers has renamed it.
        kind = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
        getattr(self.model, f"{kind}_checkpointing_{'enable' if enable else 'disable'}")()

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that optimizers should not decay, besides biases and norms."""
        return {f"model.{name}" for name in self.model.no_weight_decay()}


def open_clip_image_processor(model: nn.Module) -> CLIPImageProcessor | ViTImageProcessor:
    """Return the image processor of Transformers that prepares images as an open_clip model, or its visual tower,
    takes them.

    Raises:
        ValueError: if the model resizes images to fit inside a padded square.
    """
    wanted = getattr(model, "visual", model).preprocess_cfg
    height, width = pair(wanted["size"])
    normalization = {
        "image_mean": list(wanted["mean"]),
        "image_std": list(wanted["std"]),
        "resample": _RESAMPLE[wanted.get("interpolation") or "bicubic"],
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
    """Convert an open_clip model whose visual tower is an `OpenClipVisual` into a model of Transformers.

    Args:
        clip (`nn.Module`):
            open_clip's `CLIP`, or a `CustomTextCLIP` with a text tower of the same kind, or of a SigLIP where the
            logits have a bias.

    Returns:
        The model, in evaluation mode, with copies of the weights.

    Raises:
        ValueError: if a side is of another kind, or the text side does what that of Transformers' CLIP, or SigLIP,
            does not (another direction of attention or pooling, another kind of block).
    """
    if not isinstance(visual := getattr(clip, "visual", None), OpenClipVisual):
        raise ValueError(
            f"The visual tower is a {type(visual).__name__}, expected an OpenClipVisual: set `clip.visual` to one, "
            "with a SparseFormer that was bootstrapped from the tower that is there."
        )
    text, projects = getattr(clip, "text", clip), hasattr(visual.model, "visual_projection")
    is_siglip = getattr(clip, "logit_bias", None) is not None
    text_config = _siglip_text_config(clip, text) if is_siglip else _clip_text_config(clip, text)
    if is_siglip == projects:
        expected = "SigLIP a SparseFormerVisionModel" if is_siglip else "CLIP a SparseFormerVisionModelWithProjection"
        raise ValueError(
            f"The visual tower holds a {type(visual.model).__name__}, that of a {expected}; bootstrap it from the "
            "tower that it replaces."
        )
    weights, vision_config = _text_weights(clip, text), visual.model.config.to_dict()
    if is_siglip:
        model = SparseFormerSiglipModel(SparseFormerSiglipConfig(text_config=text_config, vision_config=vision_config))
        weights |= {f"head.{kind}": tensor for kind, tensor in text.text_projection.state_dict().items()}
        model.logit_bias.copy_(clip.logit_bias)
    else:
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
    return model.eval()


def _clip_text_config(clip: nn.Module, text: nn.Module) -> dict:
    """Fields of `CLIPTextConfig`."""
    pooling = _text_pooling(clip, text)
    if pooling not in ("argmax", "eos"):
        _refuse_text(clip, f"it pools by {pooling!r}, CLIP at the end of the text ('argmax' or 'eos')")
    if text.attn_mask is None:
        _refuse_text(clip, "its attention is bidirectional, that of CLIP causal")
    if not isinstance(text.text_projection, nn.Parameter):
        _refuse_text(clip, "its projection is no matrix without bias")
    fields = _text_fields(clip, text)
    eos = getattr(text, "eos_id", getattr(text, "text_eos_id", 2))
    return {
        **fields,
        "projection_dim": text.text_projection.shape[1],
        # Transformers takes the highest token id of a text for its end where the configuration says 2.
        "eos_token_id": 2 if pooling == "argmax" else eos,
        "bos_token_id": fields["vocab_size"] - 2,
        "pad_token_id": 0,
    }


def _siglip_text_config(clip: nn.Module, text: nn.Module) -> dict:
    """Fields of `SiglipTextConfig`."""
    pooling = _text_pooling(clip, text)
    if pooling != "last":
        _refuse_text(clip, f"its logits have a bias, as those of SigLIP, which pools by 'last', and it by {pooling!r}")
    if text.attn_mask is not None:
        _refuse_text(clip, "its attention is causal, that of SigLIP bidirectional")
    if getattr(text, "use_pad_mask", False):
        _refuse_text(clip, "its attention leaves out padding, that of SigLIP does not")
    if not isinstance(text.text_projection, nn.Linear):
        _refuse_text(clip, "its projection is no linear layer with bias, as that of SigLIP is")
    # The tokenizer knows its special tokens, the model need not.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {**_text_fields(clip, text), "projection_size": text.text_projection.out_features, **tokens}


def _text_pooling(clip: nn.Module, text: nn.Module) -> str:
    if not hasattr(text, "transformer") or not hasattr(text, "positional_embedding"):
        _refuse_text(clip, f"a {type(text).__name__} is no text transformer of open_clip")
    if getattr(text, "cls_emb", None) is not None:
        _refuse_text(clip, "it appends a [CLS], which CLIP and SigLIP have not")
    return getattr(text, "pool_type", getattr(text, "text_pool_type", "argmax"))


def _text_fields(clip: nn.Module, text: nn.Module) -> dict:
    """Fields that Transformers' text configurations share."""
    block = text.transformer.resblocks[0]
    try:
        hidden_act = read_block(block).mlp.activation
    except Obstacle as obstacle:
        _refuse_text(clip, str(obstacle))
    vocab_size, hidden_size = text.token_embedding.weight.shape
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": block.mlp.c_fc.out_features,
        "num_hidden_layers": len(text.transformer.resblocks),
        "num_attention_heads": block.attn.num_heads,
        "max_position_embeddings": len(text.positional_embedding),
        "hidden_act": hidden_act,
        "layer_norm_eps": text.ln_final.eps,
    }


def _text_weights(clip: nn.Module, text: nn.Module) -> dict[str, torch.Tensor]:
    """Weights under the names that Transformers' text models share."""
    weights = {
        "embeddings.token_embedding.weight": text.token_embedding.weight,
        "embeddings.position_embedding.weight": text.positional_embedding,
        "final_layer_norm.weight": text.ln_final.weight,
        "final_layer_norm.bias": text.ln_final.bias,
    }
    for index, block in enumerate(text.transformer.resblocks):
        for name, tensor in block_weights(read_block(block)).items():
            weights[f"encoder.layers.{index}.{_to_clip(name)}"] = tensor
    return weights


def _refuse_text(clip: nn.Module, reason: str):
    raise ValueError(f"Cannot convert the text side of {type(clip).__name__}: {reason}.")


def _to_clip(name: str) -> str:
    """The name of a weight of a plain block in Transformers' CLIP."""
    name = name.replace("attention.o_proj", "self_attn.out_proj").replace("attention.", "self_attn.")
    return name.replace("layernorm_before", "layer_norm1").replace("layernorm_after", "layer_norm2")


@torch.no_grad()
def to_open_clip(model: SparseFormerCLIPModel | SparseFormerSiglipModel) -> nn.Module:
    """Convert a CLIP or SigLIP of Transformers with a SparseFormer into a model of open_clip, which must be installed.

    Args:
        model (`SparseFormerCLIPModel` or `SparseFormerSiglipModel`): The model to convert.

    Returns:
        open_clip's `CLIP`, of a SigLIP its `CustomTextCLIP`, in evaluation mode, with copies of the weights; its
        `visual` is an `OpenClipVisual`.

    Raises:
        ValueError: if it is another model, or the text side has an activation that open_clip's has not.
    """
    import open_clip

    sides = getattr(model, "config", None)
    if not (hasattr(sides, "text_config") and is_sparseformer(getattr(sides, "vision_config", None))):
        raise ValueError(
            f"Got a {type(model).__name__}, expected a SparseFormerCLIPModel or a SparseFormerSiglipModel, which "
            "`from_clip` makes of a CLIP or SigLIP and a SparseFormer."
        )
    config, is_siglip = model.config.text_config, hasattr(model, "logit_bias")
    if config.hidden_act not in _ACTIVATIONS:
        raise ValueError(
            f"The text side's activation is {config.hidden_act!r}; open_clip has {', '.join(_ACTIVATIONS)}."
        )
    text = {
        "context_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "layers": config.num_hidden_layers,
        # Of the product with the width, open_clip drops the fraction.
        "mlp_ratio": (config.intermediate_size + 0.5) / config.hidden_size,
        "norm_kwargs": {"eps": config.layer_norm_eps},
        "act_kwargs": _ACTIVATIONS[config.hidden_act],
    }
    if is_siglip:
        text |= {"no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
    elif config.eos_token_id != 2:
        text |= {"pool_type": "eos", "eos_id": config.eos_token_id}
    clip = (open_clip.CustomTextCLIP if is_siglip else open_clip.CLIP)(
        embed_dim=config.projection_size if is_siglip else model.config.projection_dim,
        # A tower to be replaced.
        vision_cfg={"layers": 1, "width": 64, "head_width": 64, "patch_size": 16, "image_size": 16},
        text_cfg=text,
        quick_gelu=config.hidden_act == "quick_gelu",
        init_logit_scale=math.log(1 / 0.07),
        init_logit_bias=0.0 if is_siglip else None,
    )
    weights = _open_clip_text_weights(model)
    if is_siglip:
        weights |= {f"text_projection.{kind}": value for kind, value in model.text_model.head.state_dict().items()}
        weights = {f"text.{name}": tensor for name, tensor in weights.items()}
        weights["logit_bias"] = model.logit_bias.squeeze()
        vision = SparseFormerVisionModel(model.vision_model.config)
    else:
        weights["text_projection"] = model.text_projection.weight.mT
        vision = SparseFormerVisionModelWithProjection(model.vision_model.config)
        vision.visual_projection.load_state_dict(model.visual_projection.state_dict())
    weights["logit_scale"] = model.logit_scale.squeeze()
    vision.base_model.load_state_dict(model.vision_model.state_dict())
    clip.visual = OpenClipVisual(vision)
    missing = clip.load_state_dict(weights, strict=False).missing_keys
    if wrong := [name for name in missing if not name.startswith("visual.")]:
        raise RuntimeError(f"open_clip's model has weights that were not converted: {wrong}.")
    return clip.to(model.logit_scale).eval()


def _open_clip_text_weights(model: SparseFormerCLIPModel | SparseFormerSiglipModel) -> dict[str, torch.Tensor]:
    """Weights of a text side under the names of open_clip's `TextTransformer`, but the projection."""
    theirs = model.text_model.state_dict()
    weights = {
        "token_embedding.weight": theirs["embeddings.token_embedding.weight"],
        "positional_embedding": theirs["embeddings.position_embedding.weight"],
        "ln_final.weight": theirs["final_layer_norm.weight"],
        "ln_final.bias": theirs["final_layer_norm.bias"],
    }
    names = {"self_attn.out_proj": "attn.out_proj", "layer_norm1": "ln_1", "layer_norm2": "ln_2"}
    names |= {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    for index in range(model.config.text_config.num_hidden_layers):
        prefix, block = f"encoder.layers.{index}.", f"transformer.resblocks.{index}."
        for kind in ("weight", "bias"):
            fused = [theirs[f"{prefix}self_attn.{projection}_proj.{kind}"] for projection in "qkv"]
            weights[f"{block}attn.in_proj_{kind}"] = torch.cat(fused)
            for name, renamed in names.items():
                weights[f"{block}{renamed}.{kind}"] = theirs[f"{prefix}{name}.{kind}"]
    return weights
