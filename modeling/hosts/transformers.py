"""Reader of vision transformers of Transformers and of this package.

Modules are found by their names, and no model file is imported. `_FAMILIES` has what differs between model families.
The tuples below `_FAMILIES` have the names of modules.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from ...configuration.configuration_base import pair, set_image_size
from ..vit import interpolate_positions
from .anatomy import (
    MLP,
    Anatomy,
    Attention,
    AttentionPooling,
    Block,
    GridPositions,
    NotAPlainViT,
    PatchEmbedding,
    Pooling,
    Projection,
    Rotary,
    activation_name,
    find,
    split_linear,
)


def _call_unmasked(model: nn.Module, pixel_values: torch.Tensor, **options):
    """Call a ViTMAE model without a mask.

    ViTMAE sorts patches by noise and masks most patches. Ascending noise keeps the order of the patches, and a mask
    ratio of 0 keeps all patches.
    """
    config = model.config
    mask_ratio = config.mask_ratio
    num_patches = (pixel_values.shape[2] // config.patch_size) * (pixel_values.shape[3] // config.patch_size)
    noise = torch.arange(num_patches, device=pixel_values.device).expand(len(pixel_values), -1)
    config.mask_ratio = 0.0
    try:
        return model(pixel_values, noise=noise, **options)
    finally:
        config.mask_ratio = mask_ratio


def _call_with_patches(model: nn.Module, pixel_values: torch.Tensor):
    """Call a SigLIP 2 NaFlex model with the patches of images, in row-major order and with channels last."""
    patch_size = getattr(model.config, "vision_config", model.config).patch_size
    patches = F.unfold(pixel_values, patch_size, stride=patch_size).mT
    patches = patches.unflatten(-1, (-1, patch_size * patch_size)).mT.flatten(2)
    grid = [pixel_values.shape[2] // patch_size, pixel_values.shape[3] // patch_size]
    return model(
        pixel_values=patches,
        pixel_attention_mask=torch.ones(patches.shape[:2], dtype=torch.int32, device=pixel_values.device),
        spatial_shapes=torch.tensor([grid] * len(pixel_values)),
    )


@dataclass(frozen=True)
class Family:
    """How a model family takes images, pools its tokens and interpolates its position embeddings.

    Args:
        pooling (`str`, *optional*): `Pooling.mode` of the base model. If None, `config.pooling` is used.
        classifier_pooling (`str`, *optional*): `Pooling.mode` of the classifier, if it differs from `pooling`.
        output (`str`, *optional*): Name of the output with the pooled tokens. If None, `last_hidden_state` is pooled.
        any_size (`bool`): Whether `forward` takes images of any size without further arguments.
        interpolation (`dict`): Keyword arguments of `GridPositions`.
        call (`Callable`): Function that calls a model with the keyword argument `pixel_values`.
    """

    pooling: str | None = "cls"
    classifier_pooling: str | None = None
    output: str | None = None
    any_size: bool = False
    interpolation: dict = field(default_factory=dict)
    call: Callable = nn.Module.__call__


_FAMILIES = {
    "vit": Family(),
    "vit_msn": Family(),
    "vit_mae": Family(call=_call_unmasked),
    "deit": Family(),
    "ijepa": Family("mean"),
    "pixio": Family("class_mean", output="pooler_output", any_size=True),
    "dinov2": Family(classifier_pooling="cls_and_latent_mean", any_size=True),
    "dinov2_with_registers": Family(
        classifier_pooling="cls_and_latent_mean", any_size=True, interpolation={"antialias": True}
    ),
    "dinov3_vit": Family(any_size=True),
    "clip_vision_model": Family(classifier_pooling="latent_mean", output="pooler_output"),
    "siglip_vision_model": Family("attention", "mean", "pooler_output"),
    "siglip2_vision_model": Family(
        "attention",
        "mean",
        "pooler_output",
        any_size=True,
        interpolation={"mode": "bilinear", "antialias": True},
        call=_call_with_patches,
    ),
    "aimv2_vision_model": Family("attention", "mean", "pooler_output"),
    "radio": Family(output="summary", any_size=True, interpolation={"mode": "bilinear", "crops": True}),
    "internvl_vision": Family(any_size=True),
    "idefics3_vision": Family("mean", any_size=True, interpolation={"mode": "nearest"}),
    "smolvlm_vision": Family("mean", any_size=True, interpolation={"mode": "nearest"}),
    "vit_context_broadcast": Family(),
    "vit_impulse_init": Family(None, output="pooler_output"),
}

# Names of the parts of a block. Each model family uses one name of each tuple.
_ATTENTION_NORMS = ("layernorm_before", "layer_norm1", "norm1", "rms_norm1")
_MLP_NORMS = ("layernorm_after", "layer_norm2", "norm2", "rms_norm2")
_ATTENTIONS = ("attention", "self_attn")
_OUTPUTS = ("o_proj", "out_proj", "projection_layer")
_MLPS = ("mlp", "ffn")
_UPS = ("fc1", "up_proj")
_DOWNS = ("fc2", "down_proj")
_ACTIVATIONS = ("activation", "activation_fn", "act_fn")
# Names of the parts of a model outside of its blocks.
_FINAL_NORMS = ("layernorm", "post_layernorm", "norm", "rms_norm")
_PRE_NORMS = ("pre_layrnorm", "pre_layernorm")
_PATCHES = ("patch_embeddings", "patch_embedding", "patch_embed", "patch_projection")
_POSITIONS = ("position_embeddings", "position_embedding")
# Names of class tokens and of register tokens. A distillation token counts as a register token.
_CLASS_TOKENS = ("cls_token", "class_embedding", "cls_register_token")
_REGISTER_TOKENS = ("distillation_token", "register_tokens")


def read(model: nn.Module, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a model or its vision tower into an `Anatomy`. Raise a ValueError if the model takes no images."""
    tower = model.get_encoder("image")
    if not hasattr(tower, "embeddings"):
        tower = tower.base_model
    config = tower.config
    # The vision tower of Idefics3 has the wrong `main_input_name` "input_ids", but the right `input_modalities`.
    modalities = getattr(tower, "input_modalities", ())
    if getattr(tower, "main_input_name", None) == "input_ids" and "image" not in modalities:
        raise ValueError(f"{type(model).__name__} takes texts alone, expected a model that takes images.")
    # SparseFormers have their class tokens and registers in `latents`.
    embeddings = getattr(tower, "embeddings", getattr(tower, "latents", None))
    class_tokens = [token for name in _CLASS_TOKENS if (token := getattr(embeddings, name, None)) is not None]
    registers = [token for name in _REGISTER_TOKENS if (token := getattr(embeddings, name, None)) is not None]
    num_class_tokens, num_tokens = (
        sum(token.numel() // token.shape[-1] for token in tokens)
        for tokens in (class_tokens, class_tokens + registers)
    )
    # C-RADIO has its class tokens and registers in one tensor.
    num_class_tokens = getattr(config, "num_cls_tokens", num_class_tokens)
    prefix = {
        "prefix_tokens": class_tokens + registers,
        "num_class_tokens": num_class_tokens,
        "num_register_tokens": num_tokens - num_class_tokens,
    }
    try:
        if config.model_type not in _FAMILIES:
            raise NotAPlainViT(f"its model type {config.model_type!r} is not known")
        if hasattr(tower, "out_features"):
            raise NotAPlainViT("it is a backbone, which returns feature maps; pass its base model")
        holders = (tower, getattr(tower, "encoder", None), getattr(tower, "model", None))
        modules = next(modules for holder in holders if (modules := find(holder, ["layers", "layer"])) is not None)
        blocks = [read_block(module) for module in modules]
    except NotAPlainViT as error:
        return Anatomy(tower, **prefix, unsupported_reason=str(error))
    family = _FAMILIES[config.model_type]
    embedding, options = _read_embedding(tower, family, image_size)
    pooling = _read_pooling(model, tower, family, num_tokens, options)
    return Anatomy(tower, blocks, **prefix, **embedding, **pooling, pre_norm=find(tower, _PRE_NORMS))


def _read_embedding(tower: nn.Module, family: Family, image_size: tuple[int, int] | None) -> tuple[dict, dict]:
    """Return the fields of an `Anatomy` that describe the image size, patches and positions, and the keyword arguments
    that the model needs to interpolate its positions."""
    config = tower.config
    embeddings = tower.embeddings
    patch_size = pair(config.patch_size)
    if hasattr(config, "image_size"):
        own_size = pair(config.image_size)
    else:
        # SigLIP 2 NaFlex has no image size, but a square grid of positions. The image size is computed as the number
        # of grid rows times the patch size.
        own_size = pair(int(config.num_patches**0.5) * patch_size[0])
    can_interpolate = "interpolate_pos_encoding" in inspect.signature(embeddings.forward).parameters
    is_native = getattr(config, "is_native", False)
    if image_size is None or not (family.any_size or can_interpolate or is_native):
        image_size = own_size
    options = {"interpolate_pos_encoding": True} if can_interpolate and image_size != own_size else {}

    module = find(embeddings, _PATCHES)
    projection = find(module, ["projection"]) or module
    if isinstance(projection, nn.Linear):
        projection = _read_linear_patches(tower, projection)
    positions = next((table for name in _POSITIONS if (table := getattr(embeddings, name, None)) is not None), None)
    if positions is not None:
        table = positions.weight if isinstance(positions, nn.Embedding) else positions
        grid = (own_size[0] // patch_size[0], own_size[1] // patch_size[1])
        if hasattr(embeddings, "max_rows"):
            grid = (embeddings.max_rows, embeddings.max_cols)
        positions = GridPositions(table, grid, **family.interpolation)
    elif is_native:
        positions = functools.partial(sincos_positions, config.hidden_size)
    rotary = None
    if rope := getattr(tower, "rope_embeddings", None):
        # In DINOv3, the coordinate of a patch is 2 * center - 1. The angle is 2 pi * coordinate * frequency.
        scale = (4 * torch.pi, 4 * torch.pi)
        shift = (-2 * torch.pi, -2 * torch.pi)
        head_dim = config.hidden_size // config.num_attention_heads
        rotary = Rotary(float(rope.base), scale, shift, torch.arange(head_dim))
    fields = {
        "image_size": image_size,
        "grid": (image_size[0] // patch_size[0], image_size[1] // patch_size[1]),
        "patches": PatchEmbedding(projection, find(embeddings, ["rms_norm"])),
        "patch_positions": positions,
        "rotary": rotary,
    }
    return fields, options


def _read_linear_patches(tower: nn.Module, projection: nn.Linear) -> Projection:
    size = pair(tower.config.patch_size)
    if not hasattr(tower, "input_conditioner"):
        # SigLIP 2 NaFlex flattens the pixels of a patch with channels last.
        return Projection(projection.weight.unflatten(1, (*size, -1)).permute(0, 3, 1, 2), projection.bias)
    # C-RADIO flattens the pixels of a patch with channels first. Its pixel normalization is merged into the weights.
    weight = projection.weight.unflatten(1, (-1, *size))
    bias = projection.bias
    conditioner = find(tower, ["input_conditioner"])
    if conditioner is not None and (conditioner.norm_mean.any() or (conditioner.norm_std != 1).any()):
        weight = weight / conditioner.norm_std.to(weight)
        shift = -torch.einsum("ochw,cij->o", weight, conditioner.norm_mean.to(weight))
        bias = shift if bias is None else bias + shift
    return Projection(weight, bias)


def _read_pooling(model: nn.Module, tower: nn.Module, family: Family, num_prefix_tokens: int, options: dict) -> dict:
    """Return the fields of an `Anatomy` that describe the final norm, pooling, projection and classifier. `options`
    are keyword arguments of the model."""
    norm = find(tower, _FINAL_NORMS)
    projection = getattr(model, "visual_projection", None)
    classifier = getattr(model, "classifier", None)
    if not isinstance(classifier, nn.Linear):
        classifier = None
    mode = family.pooling or tower.config.pooling
    class_tokens = list(tower.config.summary_idxs) if family.output == "summary" else None
    pooling = Pooling(mode, class_tokens)
    head = getattr(tower, "head", None)
    if classifier is not None and family.classifier_pooling:
        pooling = Pooling(family.classifier_pooling, class_tokens)
        if pooling.mode == "latent_mean":
            # CLIP's classifier pools tokens without the final norm.
            norm = None
    elif mode == "attention":
        # SigLIP and AIMv2 can be configured without a pooling head. The mean of the tokens is used in this case.
        pooling = Pooling("mean") if head is None else Pooling("attention", head=read_head(head))
    reason = None
    if getattr(model, "distillation_classifier", None) is not None:
        reason = "it averages two classifiers; pass its base model"
    has_pooled_output = family.output is not None and pooling.mode == mode

    def embed(pixel_values: torch.Tensor) -> torch.Tensor:
        outputs = family.call(tower, pixel_values=pixel_values, **options)
        if has_pooled_output:
            embedding = outputs[family.output]
        elif pooling.mode == "cls":
            embedding = outputs.last_hidden_state[:, 0]
        else:
            first = 0 if pooling.mode == "mean" else num_prefix_tokens
            embedding = outputs.last_hidden_state[:, first:].mean(dim=1)
            if pooling.mode == "cls_and_latent_mean":
                embedding = torch.cat([outputs.last_hidden_state[:, 0], embedding], dim=1)
        return embedding if projection is None else projection(embedding)

    def run_classifier(pixel_values: torch.Tensor) -> torch.Tensor:
        return family.call(model, pixel_values=pixel_values, **options).logits

    return {
        "norm": norm,
        "pooling": pooling,
        "projection": projection,
        "classifier": classifier,
        "embed": embed,
        "run_classifier": None if classifier is None else run_classifier,
        "unsupported_embedding_reason": reason,
    }


def read_block(module: nn.Module) -> Block:
    """Read a transformer block. Raise `NotAPlainViT` if it is not a plain pre-norm block."""
    if hasattr(module, "mlp_scale"):
        # Only SparseFormer blocks use the names `attention_scale` and `mlp_scale` for layer scale.
        attention_scale = module.attention_scale
        mlp_scale = module.mlp_scale
    else:
        attention_scale = getattr(getattr(module, "layer_scale1", None), "lambda1", getattr(module, "lambda_1", None))
        mlp_scale = getattr(getattr(module, "layer_scale2", None), "lambda1", getattr(module, "lambda_2", None))
    attention = find(module, _ATTENTIONS)
    query_norm = find(attention, ["q_norm"])
    if query_norm is not None and len(query_norm.weight) != attention.head_dim:
        raise NotAPlainViT("it normalizes the queries and keys of all heads together")
    mlp = find(module, _MLPS)
    return Block(
        module,
        attention_norm=find(module, _ATTENTION_NORMS),
        attention=Attention(
            query=attention.q_proj,
            key=attention.k_proj,
            value=attention.v_proj,
            output=find(attention, _OUTPUTS),
            num_heads=attention.q_proj.out_features // attention.head_dim,
            query_norm=query_norm,
            key_norm=find(attention, ["k_norm"]),
            output_norm=find(attention, ["output_norm"]),
        ),
        mlp_norm=find(module, _MLP_NORMS),
        mlp=MLP(
            up=find(mlp, _UPS),
            down=find(mlp, _DOWNS),
            activation=activation_name(find(mlp, _ACTIVATIONS)),
            gate=find(mlp, ["gate_proj"]),
            norm=find(mlp, ["norm"]),
        ),
        attention_scale=attention_scale,
        mlp_scale=mlp_scale,
    )


def sincos_positions(hidden_size: int, grid: tuple[int, int], theta: float = 10000.0) -> torch.Tensor:
    """Return AIMv2's fixed position embeddings of the patches of a grid, `(rows * columns, hidden_size)` float64. An
    embedding has the sines and cosines of the column, then the sines and cosines of the row."""
    quarter = hidden_size // 4
    frequencies = theta ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = (torch.arange(count, dtype=torch.float64) for count in grid)
    y, x = (axis.reshape(-1, 1) * frequencies for axis in torch.meshgrid(rows, columns, indexing="ij"))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


def read_head(head: nn.Module) -> AttentionPooling:
    """Read the attention pooling of SigLIP, AIMv2 or a SparseFormer."""
    if not hasattr(head, "probe"):
        # AIMv2 has no query projection, because it learns the query. An identity matrix replaces the projection.
        query = Projection(torch.eye(head.cls_token.shape[-1]).to(head.cls_token))
        attention = Attention(query, head.k_proj, head.v_proj, head.output_proj, head.num_heads)
        return AttentionPooling(head.cls_token[0], attention)
    module = head.attention
    if isinstance(module, nn.MultiheadAttention):
        query, key, value = split_linear(3, module.in_proj_weight, module.in_proj_bias)
        attention = Attention(query, key, value, module.out_proj, module.num_heads)
    else:
        num_heads = module.q_proj.out_features // module.head_dim
        attention = Attention(module.q_proj, module.k_proj, module.v_proj, module.o_proj, num_heads)
    mlp = None
    if head.mlp is not None:
        mlp = MLP(head.mlp.fc1, head.mlp.fc2, activation_name(find(head.mlp, _ACTIVATIONS)))
    return AttentionPooling(head.probe.view(1, -1), attention, head.layernorm, mlp)


def has_positions(model: nn.Module) -> bool:
    """Whether `resize_positions_` supports a Transformers model."""
    embeddings = getattr(getattr(model, "base_model", model), "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    return isinstance(positions, torch.Tensor) and hasattr(embeddings, "interpolate_pos_encoding")


@torch.no_grad()
def resize_positions_(model: nn.Module, image_size: int) -> nn.Module:
    """Change the image size of a ViT in place. Learned position embeddings are interpolated bicubically. Sinusoidal
    position embeddings are computed for the new size.

    Args:
        model (`nn.Module`): A Transformers ViT or DeiT, or a `ViTImpulseInit` model.
        image_size (`int`): Height and width in pixels, a multiple of the patch size.

    Returns:
        The model, with `image_size` in its configuration.

    Raises:
        ValueError: if `image_size` is not a multiple of the patch size.
    """
    embeddings = model.base_model.embeddings
    patches = embeddings.patch_embeddings
    positions = embeddings.position_embeddings
    if any(image_size % patch for patch in patches.patch_size):
        raise ValueError(
            f"`image_size` is {image_size}, expected a multiple of the patch size, {patches.patch_size} pixels."
        )
    grid = [image_size // patch for patch in patches.patch_size]
    old = [image // patch for image, patch in zip(patches.image_size, patches.patch_size, strict=True)]
    if hasattr(embeddings, "grid"):
        embeddings.grid = tuple(grid)
    if isinstance(positions, nn.Parameter):
        embeddings.position_embeddings = nn.Parameter(interpolate_positions(positions, old, grid))
    else:
        embeddings.position_embeddings = embeddings.sincos_positions().to(positions)
    patches.num_patches = grid[0] * grid[1]
    embeddings.image_size = patches.image_size = (image_size, image_size)
    set_image_size(model.config, image_size)
    return model
