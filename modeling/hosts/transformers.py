"""Vision transformers of Transformers and of this package, read by structure: no model file is imported.

Families differ in how they pool and interpolate (`_FAMILIES`), and name the same parts differently (the tables below
it).
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from ...configuration.configuration_base import is_sparseformer, pair, set_image_size
from ..layers import pool_tokens
from ..vit import interpolate_positions
from .anatomy import (
    MLP,
    Anatomy,
    Attention,
    AttentionPooling,
    Block,
    GridPositions,
    NotAPlainViT,
    Projection,
    Rotary,
    activation_name,
    check_patches,
    find,
    split_linear,
)


@dataclass(frozen=True)
class Family:
    """How a family pools, projects and interpolates its tokens."""

    pooling: str | None = "cls"  # of its base model; None for that of its configuration
    classifier_pooling: str | None = None  # of its classifier, if it is another
    output: str | None = None  # the pooled token; None for pooling `last_hidden_state`
    any_size: bool = False  # takes images of any size unasked
    interpolation: dict = field(default_factory=dict)  # arguments of `GridPositions`


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

_ATTENTION_NORMS = ("layernorm_before", "layer_norm1", "norm1", "rms_norm1")
_MLP_NORMS = ("layernorm_after", "layer_norm2", "norm2", "rms_norm2")
_ATTENTIONS = ("attention", "self_attn")
_OUTPUTS = ("o_proj", "out_proj", "projection_layer")
_MLPS = ("mlp", "ffn")
_UPS = ("fc1", "up_proj")
_DOWNS = ("fc2", "down_proj")
_ACTIVATIONS = ("activation", "activation_fn", "act_fn")
_FINAL_NORMS = ("layernorm", "post_layernorm", "norm", "rms_norm")
_PRE_NORMS = ("pre_layrnorm", "pre_layernorm")
_PATCHES = ("patch_embeddings", "patch_embedding", "patch_embed", "patch_projection")
_POSITIONS = ("position_embeddings", "position_embedding")
# In the order in which they join.
_FRONT = ("cls_token", "class_embedding", "cls_register_token", "distillation_token", "register_tokens")
# Towers for images in models of several.
_TOWERS = ("vision_model", "vision_tower", "visual")


def tower_of(model: nn.Module) -> nn.Module:
    """The part of a model that sees images and holds the list of blocks; the base model of one without towers."""
    if hasattr(model, "embeddings"):
        return model
    for name in ("model", *_TOWERS):
        part = model._modules.get(name)
        if part is not None and (name != "model" or any(tower in part._modules for tower in _TOWERS)):
            return tower_of(part)
    base = getattr(model, "base_model", model)
    return model if base is model else tower_of(base)


def read(model: nn.Module, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a model, or its tower for images, into an `Anatomy`. Raise a ValueError if the model reads text alone."""
    tower = tower_of(model)
    # Idefics3's tower has left the former as it was, and says the latter.
    modalities = getattr(tower, "input_modalities", ())
    if getattr(tower, "main_input_name", None) == "input_ids" and "image" not in modalities:
        raise ValueError(f"{type(model).__name__} reads text; expected a model that sees images.")
    anatomy = Anatomy(tower)
    if is_sparseformer(tower.config):
        anatomy.num_class_tokens = tower.config.num_class_tokens
        anatomy.num_register_tokens = tower.config.num_register_tokens
    else:
        tokens = [getattr(getattr(tower, "embeddings", None), name, None) for name in _FRONT]
        anatomy.front = [token for token in tokens if token is not None]
    if anatomy.front:
        # A distillation token counts as a register.
        counts = [token.numel() // token.shape[-1] for token in anatomy.front]
        anatomy.num_class_tokens = getattr(tower.config, "num_cls_tokens", counts[0])
        anatomy.num_register_tokens = sum(counts) - anatomy.num_class_tokens
    with anatomy.noting("obstacle"):
        model_type = tower.config.model_type
        if model_type not in _FAMILIES:
            raise NotAPlainViT(f"its model type {model_type!r} is not known")
        if hasattr(tower, "out_features"):
            raise NotAPlainViT("it is a backbone, which returns maps; give its base model")
        _read_plain(model, tower, _FAMILIES[model_type], anatomy, image_size)
    return anatomy


def _read_plain(
    model: nn.Module, tower: nn.Module, family: Family, anatomy: Anatomy, image_size: tuple[int, int] | None
):
    holders = (tower, getattr(tower, "encoder", None), getattr(tower, "model", None))
    blocks = next(blocks for holder in holders if (blocks := find(holder, ["layers", "layer"])) is not None)
    anatomy.blocks = [read_block(block) for block in blocks]
    anatomy.pre_norm = find(tower, _PRE_NORMS)
    anatomy.norm = find(tower, _FINAL_NORMS)
    if (rope := getattr(tower, "rope_embeddings", None)) is not None:
        # DINOv3's: coordinates 2 center - 1, angles 2 pi times that.
        channels = torch.arange(anatomy.blocks[0].attention.head_dim)
        anatomy.rotary = Rotary(float(rope.base), (4 * torch.pi,) * 2, (-2 * torch.pi,) * 2, channels)
    interpolates = _read_grid(tower.config, tower.embeddings, family, anatomy, image_size)
    with anatomy.noting("patch_obstacle"):
        anatomy.patch_norm = find(tower.embeddings, ["rms_norm"])
        anatomy.patch_embedding = _read_patches(tower)
    if isinstance(classifier := getattr(model, "classifier", None), nn.Linear):
        anatomy.classifier = classifier
    anatomy.projection = getattr(model, "visual_projection", None)
    with anatomy.noting("embedding_obstacle"):
        if getattr(model, "distillation_classifier", None) is not None:
            raise NotAPlainViT("it averages two classifiers; give its base model")
        anatomy.pooling = family.pooling or tower.config.pooling
        if anatomy.classifier is not None and family.classifier_pooling:
            anatomy.pooling = family.classifier_pooling
            if anatomy.pooling == "latent_mean":
                # CLIP's classifier reads tokens that were not normalized.
                anatomy.norm = None
        elif anatomy.pooling == "attention":
            head = getattr(tower, "head", None)
            anatomy.pooling = "mean" if head is None else "attention"
            anatomy.pooling_head = None if head is None else read_head(head)
        anatomy.class_tokens = list(tower.config.summary_idxs) if family.output == "summary" else None
    call = _caller(tower, interpolates)
    project = anatomy.projection or nn.Identity()
    is_pooled = family.output and anatomy.pooling == (family.pooling or tower.config.pooling)

    def embed(images: torch.Tensor) -> torch.Tensor:
        outputs = call(tower, images)
        if is_pooled:
            return project(outputs[family.output])
        tokens = outputs.last_hidden_state
        return project(pool_tokens(tokens, anatomy.pooling, nn.Identity(), anatomy.num_prefix_tokens, [0]))

    anatomy.embed = embed
    if anatomy.classifier is not None:
        anatomy.run_classifier = lambda images: call(model, images).logits


def _read_grid(
    config, embeddings: nn.Module, family: Family, anatomy: Anatomy, image_size: tuple[int, int] | None
) -> bool:
    """Read the size of images and positions; returns whether the model has to be told to interpolate these."""
    rows, columns = pair(config.patch_size)
    # NaFlex takes images of any shape; the square one is its own.
    own = pair(config.image_size if hasattr(config, "image_size") else int(config.num_patches**0.5) * rows)
    is_native = getattr(config, "is_native", False)
    can_interpolate = "interpolate_pos_encoding" in inspect.signature(embeddings.forward).parameters
    takes_size = family.any_size or is_native or can_interpolate
    anatomy.image_size = image_size if image_size and takes_size else own
    anatomy.grid = (anatomy.image_size[0] // rows, anatomy.image_size[1] // columns)
    tables = [table for name in _POSITIONS if (table := getattr(embeddings, name, None)) is not None]
    if tables:
        table = tables[0].weight if isinstance(tables[0], nn.Embedding) else tables[0]
        grid = (own[0] // rows, own[1] // columns)
        if hasattr(embeddings, "max_rows"):
            grid = (embeddings.max_rows, embeddings.max_cols)
        anatomy.patch_positions = GridPositions(table, grid, **family.interpolation)
    elif is_native:
        anatomy.patch_positions = functools.partial(sincos_positions, config.hidden_size)
    return can_interpolate and anatomy.image_size != own


def read_block(module: nn.Module) -> Block:
    """Read a block of any family. Raise a NotAPlainViT if it is no plain pre-norm block."""
    scales = [
        getattr(getattr(module, f"layer_scale{i}", None), "lambda1", getattr(module, name, None))
        for i, name in ((1, "lambda_1"), (2, "lambda_2"))
    ]
    if hasattr(module, "mlp_scale"):
        # A SparseFormer's.
        scales = [module.attention_scale, module.mlp_scale]
    attention = read_attention(find(module, _ATTENTIONS))
    mlp = _read_mlp(find(module, _MLPS))
    return Block(module, find(module, _ATTENTION_NORMS), attention, find(module, _MLP_NORMS), mlp, *scales)


def read_attention(module: nn.Module) -> Attention:
    """Read an attention with four linear layers. Raise a NotAPlainViT if it normalizes all heads together."""
    norms = [find(module, [name]) for name in ("q_norm", "k_norm", "output_norm")]
    if norms[0] is not None and len(norms[0].weight) != module.head_dim:
        raise NotAPlainViT("it normalizes the queries and keys of all heads together")
    linears = [module.q_proj, module.k_proj, module.v_proj, find(module, _OUTPUTS)]
    return Attention(*linears, linears[0].out_features // module.head_dim, *norms)


def _read_mlp(module: nn.Module) -> MLP:
    activation = activation_name(find(module, _ACTIVATIONS))
    return MLP(
        find(module, _UPS), find(module, _DOWNS), activation, find(module, ["gate_proj"]), find(module, ["norm"])
    )


def sincos_positions(hidden_size: int, grid: tuple[int, int], theta: float = 10000.0) -> torch.Tensor:
    """Positions that AIMv2 computes for the patches of a grid, sines and cosines of columns, then of rows,
    `(rows * columns, hidden_size)` in float64."""
    quarter = hidden_size // 4
    frequencies = theta ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = (torch.arange(count, dtype=torch.float64) for count in grid)
    y, x = (axis.reshape(-1, 1) * frequencies for axis in torch.meshgrid(rows, columns, indexing="ij"))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


def _read_patches(tower: nn.Module) -> nn.Conv2d | Projection:
    module = find(tower.embeddings, _PATCHES)
    projection = find(module, ["projection"]) or module
    if not isinstance(projection, nn.Linear):
        return check_patches(projection)
    size = pair(tower.config.patch_size)
    if not hasattr(tower, "input_conditioner"):
        # SigLIP 2 NaFlex takes the pixels of a patch in a row, channels last.
        return Projection(projection.weight.unflatten(1, (*size, -1)).permute(0, 3, 1, 2), projection.bias)
    # C-RADIO has channels first, and normalizes pixels before that.
    weight = projection.weight.unflatten(1, (-1, *size))
    bias = projection.bias
    conditioner = find(tower, ["input_conditioner"])
    if conditioner is not None and (conditioner.norm_mean.any() or (conditioner.norm_std != 1).any()):
        weight = weight / conditioner.norm_std.to(weight)
        shift = -torch.einsum("ochw,cij->o", weight, conditioner.norm_mean.to(weight))
        bias = shift if bias is None else bias + shift
    return Projection(weight, bias)


def read_head(head: nn.Module) -> AttentionPooling:
    """Read the attention pooling of SigLIP, AIMv2 or a SparseFormer."""
    if hasattr(head, "probe"):
        attention = head.attention
        if isinstance(attention, nn.MultiheadAttention):
            linears = split_linear(3, attention.in_proj_weight, attention.in_proj_bias)
            attention = Attention(*linears, attention.out_proj, attention.num_heads)
        else:
            attention = read_attention(attention)
        return AttentionPooling(head.probe.view(1, -1), attention, head.layernorm, head.mlp and _read_mlp(head.mlp))
    # AIMv2 learns the query itself, without a projection.
    query = Projection(torch.eye(head.cls_token.shape[-1]).to(head.cls_token))
    attention = Attention(query, head.k_proj, head.v_proj, head.output_proj, head.num_heads)
    return AttentionPooling(head.cls_token[0], attention)


def _caller(tower: nn.Module, interpolates: bool) -> Callable:
    """Return a function that calls a model, of which `tower` is a part, with images."""
    options = {"interpolate_pos_encoding": True} if interpolates else {}
    if tower.config.model_type == "vit_mae":
        return lambda model, images: _call_unmasked(model, images, options)
    if isinstance(getattr(tower.embeddings, "patch_embedding", None), nn.Linear):
        return lambda model, images: model(**_as_patches(images, tower.config.patch_size))
    return lambda model, images: model(pixel_values=images, **options)


def _call_unmasked(model: nn.Module, images: torch.Tensor, options: dict):
    """Call a ViTMAE without a mask. It masks most patches and shuffles the rest by noise that it sorts; with noise in
    ascending order, it keeps all of them in their order."""
    config = model.config
    ratio = config.mask_ratio
    patches = (images.shape[2] // config.patch_size) * (images.shape[3] // config.patch_size)
    config.mask_ratio = 0.0
    try:
        return model(images, noise=torch.arange(patches, device=images.device).expand(len(images), -1), **options)
    finally:
        config.mask_ratio = ratio


def _as_patches(images: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """Images as the inputs of SigLIP 2 NaFlex: patches in row order, their pixels before their channels, and grids."""
    patches = F.unfold(images, size, stride=size).mT.unflatten(-1, (-1, size * size)).mT.flatten(2)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int32, device=images.device),
        "spatial_shapes": torch.tensor([[images.shape[2] // size, images.shape[3] // size]] * len(images)),
    }


def has_positions(model: nn.Module) -> bool:
    """Whether a Transformers model adds positions to its patches that `resize_positions_` can resize."""
    embeddings = getattr(getattr(model, "base_model", model), "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    return isinstance(positions, torch.Tensor) and hasattr(embeddings, "interpolate_pos_encoding")


@torch.no_grad()
def resize_positions_(model: nn.Module, image_size: int) -> nn.Module:
    """Give a ViT the positions for images of another size, in place: learned ones are interpolated bicubically, fixed
    ones computed anew.

    Args:
        model (`nn.Module`): A Transformers ViT or DeiT, or a `ViTImpulseInit` model.
        image_size (`int`): Height and width in pixels, a multiple of the patch size.

    Returns:
        The model; its configuration says the new size.

    Raises:
        ValueError: if its patches do not divide `image_size`.
    """
    embeddings = model.base_model.embeddings
    patches = embeddings.patch_embeddings
    positions = embeddings.position_embeddings
    if any(image_size % patch for patch in patches.patch_size):
        raise ValueError(f"Images of {image_size} pixels do not divide into patches of {patches.patch_size}.")
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
