"""Reader of vision transformers of Transformers and of this package.

Modules are found by their names, and no model file is imported. `_FAMILIES` has the pooling and interpolation of each
model family. The tuples below `_FAMILIES` have the names of modules.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from ...configuration.configuration_base import is_sparseformer, pair, set_image_size
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
    check_patches,
    find,
    pool,
    read_part,
    split_linear,
)


@dataclass(frozen=True)
class Family:
    """How a model family pools its tokens and interpolates its position embeddings.

    Args:
        pooling (`str`, *optional*): `Pooling.mode` of the base model. If None, `config.pooling` is used.
        classifier_pooling (`str`, *optional*): `Pooling.mode` of the classifier, if it differs from `pooling`.
        output (`str`, *optional*): Name of the output with the pooled tokens. If None, `last_hidden_state` is pooled.
        any_size (`bool`): Whether `forward` takes images of any size without further arguments.
        interpolation (`dict`): Keyword arguments of `GridPositions`.
    """

    pooling: str | None = "cls"
    classifier_pooling: str | None = None
    output: str | None = None
    any_size: bool = False
    interpolation: dict = field(default_factory=dict)


_FAMILIES = {
    "vit": Family(),
    "vit_msn": Family(),
    "vit_mae": Family(),
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
        "attention", "mean", "pooler_output", any_size=True, interpolation={"mode": "bilinear", "antialias": True}
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
# Names of class tokens and register tokens, in the order of the token sequence.
_PREFIX_TOKENS = ("cls_token", "class_embedding", "cls_register_token", "distillation_token", "register_tokens")
# Names of vision towers in models with several modalities.
_TOWERS = ("vision_model", "vision_tower", "visual")


def find_tower(model: nn.Module) -> nn.Module:
    """Return the vision tower of a model, or the base model if the model has no vision tower."""
    if hasattr(model, "embeddings"):
        return model
    for name in ("model", *_TOWERS):
        part = model._modules.get(name)
        if part is not None and (name != "model" or any(tower in part._modules for tower in _TOWERS)):
            return find_tower(part)
    base = getattr(model, "base_model", model)
    return model if base is model else find_tower(base)


def read(model: nn.Module, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a model or its vision tower into an `Anatomy`. Raise a ValueError if the model takes no images."""
    tower = find_tower(model)
    config = tower.config
    # The vision tower of Idefics3 has the wrong `main_input_name` "input_ids", but the right `input_modalities`.
    modalities = getattr(tower, "input_modalities", ())
    if getattr(tower, "main_input_name", None) == "input_ids" and "image" not in modalities:
        raise ValueError(f"{type(model).__name__} takes texts alone, expected a model that takes images.")
    if is_sparseformer(config):
        prefix = {"num_class_tokens": config.num_class_tokens, "num_register_tokens": config.num_register_tokens}
    else:
        embeddings = getattr(tower, "embeddings", None)
        tokens = [token for name in _PREFIX_TOKENS if (token := getattr(embeddings, name, None)) is not None]
        counts = [token.numel() // token.shape[-1] for token in tokens]
        num_class_tokens = getattr(config, "num_cls_tokens", counts[0]) if tokens else 0
        # A distillation token counts as a register token.
        num_register_tokens = sum(counts) - num_class_tokens
        prefix = {
            "prefix_tokens": tokens,
            "num_class_tokens": num_class_tokens,
            "num_register_tokens": num_register_tokens,
        }
    try:
        return _read_plain(model, tower, prefix, image_size)
    except NotAPlainViT as error:
        return Anatomy(tower, **prefix, unsupported_reason=str(error))


def _read_plain(model: nn.Module, tower: nn.Module, prefix: dict, image_size: tuple[int, int] | None) -> Anatomy:
    config = tower.config
    if config.model_type not in _FAMILIES:
        raise NotAPlainViT(f"its model type {config.model_type!r} is not known")
    if hasattr(tower, "out_features"):
        raise NotAPlainViT("it is a backbone, which returns feature maps; pass its base model")
    family = _FAMILIES[config.model_type]
    holders = (tower, getattr(tower, "encoder", None), getattr(tower, "model", None))
    modules = next(modules for holder in holders if (modules := find(holder, ["layers", "layer"])) is not None)
    blocks = [read_block(module) for module in modules]
    patch_size = pair(config.patch_size)
    if hasattr(config, "image_size"):
        own_size = pair(config.image_size)
    else:
        # SigLIP 2 NaFlex has no image size, but a square grid of positions. The image size is computed as the number
        # of grid rows times the patch size.
        own_size = pair(int(config.num_patches**0.5) * patch_size[0])
    can_interpolate = "interpolate_pos_encoding" in inspect.signature(tower.embeddings.forward).parameters
    takes_any_size = family.any_size or can_interpolate or getattr(config, "is_native", False)
    if image_size is None or not takes_any_size:
        image_size = own_size
    patches, patches_reason = read_part(_read_patches, tower)
    base_pooling = family.pooling or config.pooling
    pooling, embedding_reason = read_part(_read_pooling, model, tower, family, base_pooling)
    pooling = pooling or Pooling()
    projection = getattr(model, "visual_projection", None)
    classifier = getattr(model, "classifier", None)
    if not isinstance(classifier, nn.Linear):
        classifier = None
    norm = find(tower, _FINAL_NORMS)
    if classifier is not None and family.classifier_pooling == "latent_mean":
        # CLIP's classifier pools tokens without the final norm.
        norm = None
    call = _caller(tower, interpolates=can_interpolate and image_size != own_size)
    num_prefix_tokens = prefix["num_class_tokens"] + prefix["num_register_tokens"]
    rotary = None
    if rope := getattr(tower, "rope_embeddings", None):
        # In DINOv3, the coordinate of a patch is 2 * center - 1. The angle is 2 pi * coordinate * frequency.
        scale = (4 * torch.pi, 4 * torch.pi)
        shift = (-2 * torch.pi, -2 * torch.pi)
        rotary = Rotary(float(rope.base), scale, shift, torch.arange(blocks[0].attention.head_dim))
    has_pooled_output = family.output is not None and pooling.mode == base_pooling

    def embed(pixel_values: torch.Tensor) -> torch.Tensor:
        outputs = call(tower, pixel_values)
        if has_pooled_output:
            embedding = outputs[family.output]
        else:
            embedding = pool(outputs.last_hidden_state, pooling.mode, num_prefix_tokens)
        return embedding if projection is None else projection(embedding)

    def run_classifier(pixel_values: torch.Tensor) -> torch.Tensor:
        return call(model, pixel_values).logits

    return Anatomy(
        tower,
        blocks,
        image_size=image_size,
        grid=(image_size[0] // patch_size[0], image_size[1] // patch_size[1]),
        **prefix,
        patches=patches,
        patch_positions=_read_positions(tower, family, own_size),
        rotary=rotary,
        pre_norm=find(tower, _PRE_NORMS),
        norm=norm,
        pooling=pooling,
        projection=projection,
        classifier=classifier,
        embed=embed,
        run_classifier=None if classifier is None else run_classifier,
        unsupported_patches_reason=patches_reason,
        unsupported_embedding_reason=embedding_reason,
    )


def _read_pooling(model: nn.Module, tower: nn.Module, family: Family, mode: str) -> Pooling:
    if getattr(model, "distillation_classifier", None) is not None:
        raise NotAPlainViT("it averages two classifiers; pass its base model")
    class_tokens = list(tower.config.summary_idxs) if family.output == "summary" else None
    if family.classifier_pooling and isinstance(getattr(model, "classifier", None), nn.Linear):
        return Pooling(family.classifier_pooling, class_tokens)
    if mode != "attention":
        return Pooling(mode, class_tokens)
    head = getattr(tower, "head", None)
    # SigLIP and AIMv2 can be configured without a pooling head. The mean of the tokens is used in this case.
    return Pooling("mean") if head is None else Pooling("attention", head=read_head(head))


def _read_positions(
    tower: nn.Module, family: Family, own_size: tuple[int, int]
) -> Callable[[tuple[int, int]], torch.Tensor] | None:
    embeddings = tower.embeddings
    tables = [table for name in _POSITIONS if (table := getattr(embeddings, name, None)) is not None]
    if tables:
        table = tables[0].weight if isinstance(tables[0], nn.Embedding) else tables[0]
        patch_size = pair(tower.config.patch_size)
        grid = (own_size[0] // patch_size[0], own_size[1] // patch_size[1])
        if hasattr(embeddings, "max_rows"):
            grid = (embeddings.max_rows, embeddings.max_cols)
        return GridPositions(table, grid, **family.interpolation)
    if getattr(tower.config, "is_native", False):
        return functools.partial(sincos_positions, tower.config.hidden_size)
    return None


def read_block(module: nn.Module) -> Block:
    """Read a transformer block. Raise `NotAPlainViT` if it is not a plain pre-norm block."""
    if hasattr(module, "mlp_scale"):
        # Only SparseFormer blocks use the names `attention_scale` and `mlp_scale` for layer scale.
        attention_scale = module.attention_scale
        mlp_scale = module.mlp_scale
    else:
        attention_scale = getattr(getattr(module, "layer_scale1", None), "lambda1", getattr(module, "lambda_1", None))
        mlp_scale = getattr(getattr(module, "layer_scale2", None), "lambda1", getattr(module, "lambda_2", None))
    return Block(
        module,
        attention_norm=find(module, _ATTENTION_NORMS),
        attention=read_attention(find(module, _ATTENTIONS)),
        mlp_norm=find(module, _MLP_NORMS),
        mlp=_read_mlp(find(module, _MLPS)),
        attention_scale=attention_scale,
        mlp_scale=mlp_scale,
    )


def read_attention(module: nn.Module) -> Attention:
    """Read an attention module with four linear layers. Raise `NotAPlainViT` if a norm spans several heads."""
    query_norm = find(module, ["q_norm"])
    if query_norm is not None and len(query_norm.weight) != module.head_dim:
        raise NotAPlainViT("it normalizes the queries and keys of all heads together")
    return Attention(
        query=module.q_proj,
        key=module.k_proj,
        value=module.v_proj,
        output=find(module, _OUTPUTS),
        num_heads=module.q_proj.out_features // module.head_dim,
        query_norm=query_norm,
        key_norm=find(module, ["k_norm"]),
        output_norm=find(module, ["output_norm"]),
    )


def _read_mlp(module: nn.Module) -> MLP:
    return MLP(
        up=find(module, _UPS),
        down=find(module, _DOWNS),
        activation=activation_name(find(module, _ACTIVATIONS)),
        gate=find(module, ["gate_proj"]),
        norm=find(module, ["norm"]),
    )


def sincos_positions(hidden_size: int, grid: tuple[int, int], theta: float = 10000.0) -> torch.Tensor:
    """Return AIMv2's fixed position embeddings of the patches of a grid, `(rows * columns, hidden_size)` float64. An
    embedding has the sines and cosines of the column, then the sines and cosines of the row."""
    quarter = hidden_size // 4
    frequencies = theta ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = (torch.arange(count, dtype=torch.float64) for count in grid)
    y, x = (axis.reshape(-1, 1) * frequencies for axis in torch.meshgrid(rows, columns, indexing="ij"))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


def _read_patches(tower: nn.Module) -> PatchEmbedding:
    norm = find(tower.embeddings, ["rms_norm"])
    module = find(tower.embeddings, _PATCHES)
    projection = find(module, ["projection"]) or module
    if not isinstance(projection, nn.Linear):
        return PatchEmbedding(check_patches(projection), norm)
    size = pair(tower.config.patch_size)
    bias = projection.bias
    if not hasattr(tower, "input_conditioner"):
        # SigLIP 2 NaFlex flattens the pixels of a patch with channels last.
        weight = projection.weight.unflatten(1, (*size, -1)).permute(0, 3, 1, 2)
        return PatchEmbedding(Projection(weight, bias), norm)
    # C-RADIO flattens the pixels of a patch with channels first. Its pixel normalization is merged into the weights.
    weight = projection.weight.unflatten(1, (-1, *size))
    conditioner = find(tower, ["input_conditioner"])
    if conditioner is not None and (conditioner.norm_mean.any() or (conditioner.norm_std != 1).any()):
        weight = weight / conditioner.norm_std.to(weight)
        shift = -torch.einsum("ochw,cij->o", weight, conditioner.norm_mean.to(weight))
        bias = shift if bias is None else bias + shift
    return PatchEmbedding(Projection(weight, bias), norm)


def read_head(head: nn.Module) -> AttentionPooling:
    """Read the attention pooling of SigLIP, AIMv2 or a SparseFormer."""
    if hasattr(head, "probe"):
        module = head.attention
        if isinstance(module, nn.MultiheadAttention):
            query, key, value = split_linear(3, module.in_proj_weight, module.in_proj_bias)
            attention = Attention(query, key, value, module.out_proj, module.num_heads)
        else:
            attention = read_attention(module)
        mlp = None if head.mlp is None else _read_mlp(head.mlp)
        return AttentionPooling(head.probe.view(1, -1), attention, head.layernorm, mlp)
    # AIMv2 has no query projection, because it learns the query. An identity matrix replaces the projection.
    query = Projection(torch.eye(head.cls_token.shape[-1]).to(head.cls_token))
    attention = Attention(query, head.k_proj, head.v_proj, head.output_proj, head.num_heads)
    return AttentionPooling(head.cls_token[0], attention)


def _caller(tower: nn.Module, interpolates: bool) -> Callable:
    """Return a function `(model, pixel_values)` that calls a model with the arguments that its family needs."""
    options = {"interpolate_pos_encoding": True} if interpolates else {}
    if tower.config.model_type == "vit_mae":
        return functools.partial(_call_unmasked, **options)
    if isinstance(getattr(tower.embeddings, "patch_embedding", None), nn.Linear):
        return lambda model, pixel_values: model(**_naflex_inputs(pixel_values, tower.config.patch_size))
    return lambda model, pixel_values: model(pixel_values=pixel_values, **options)


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


def _naflex_inputs(pixel_values: torch.Tensor, patch_size: int) -> dict[str, torch.Tensor]:
    """Convert images to the inputs of SigLIP 2 NaFlex. Patches are in row-major order, with channels last."""
    patches = F.unfold(pixel_values, patch_size, stride=patch_size).mT
    patches = patches.unflatten(-1, (-1, patch_size * patch_size)).mT.flatten(2)
    grid = [pixel_values.shape[2] // patch_size, pixel_values.shape[3] // patch_size]
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int32, device=pixel_values.device),
        "spatial_shapes": torch.tensor([grid] * len(pixel_values)),
    }


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
