"""timm's VisionTransformer and Eva (EVA-02, PE-Core, DINOv3), read by structure: timm is not imported."""

import torch
from torch import nn

from ...configuration.configuration_base import pair
from ..layers import pool_tokens
from .anatomy import (
    MLP,
    Anatomy,
    Attention,
    AttentionPooling,
    Block,
    GridPositions,
    NotAPlainViT,
    Rotary,
    activation_name,
    check_patches,
    find,
    split_linear,
)


# Blocks that are pre-norm; others have the same parts (`ResPostBlock`).
_BLOCKS = ("Block", "EvaBlock")
# What models have whose class token is not in all blocks: CaiT, XCiT, ConViT, VOLO.
_LATE_CLASS_TOKENS = ("blocks_token_only", "cls_attn_blocks", "local_up_to_layer", "post_network")


def read(model: nn.Module, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a model of timm into an `Anatomy`; the model is set to images of `image_size`."""
    anatomy = Anatomy(model)
    if getattr(model, "cls_token", None) is not None:
        anatomy.num_class_tokens = 0 if any(hasattr(model, name) for name in _LATE_CLASS_TOKENS) else 1
    with anatomy.noting("obstacle"):
        _read_plain(model, anatomy, image_size)
    return anatomy


def _read_plain(model: nn.Module, anatomy: Anatomy, image_size: tuple[int, int] | None):
    blocks = list(getattr(model, "blocks", ()))
    if len({info["reduction"] for info in getattr(model, "feature_info", ())}) > 1:
        raise NotAPlainViT("it is hierarchical or hybrid, with fewer positions from stage to stage")
    if not blocks or not hasattr(model, "patch_embed"):
        raise NotAPlainViT("it has no list of transformer blocks after a patch embedding")
    anatomy.blocks = [read_block(block) for block in blocks]
    if image_size not in (None, pair(model.patch_embed.img_size)):
        model.set_input_size(img_size=image_size)
    anatomy.image_size = pair(model.patch_embed.img_size)
    anatomy.grid = tuple(model.patch_embed.grid_size)
    anatomy.num_register_tokens = model.num_prefix_tokens - anatomy.num_class_tokens
    anatomy.pre_norm = find(model, ["norm_pre"])
    anatomy.rotary = _read_rotary(model, anatomy)
    front = [getattr(model, name, None) for name in ("cls_token", "dist_token", "reg_token")]
    anatomy.front = [token for token in front if token is not None]
    if (positions := getattr(model, "pos_embed", None)) is not None:
        if positions.ndim != 3:
            raise NotAPlainViT("its positions are no list of vectors")
        anatomy.patch_positions = GridPositions(positions, anatomy.grid, antialias=True)
    with anatomy.noting("patch_obstacle"):
        if backbone := getattr(model.patch_embed, "backbone", None):
            raise NotAPlainViT(f"its patches are embedded by the layers of a {type(backbone).__name__}")
        anatomy.patch_embedding = check_patches(getattr(model.patch_embed, "proj", None))
        anatomy.patch_norm = find(model.patch_embed, ["norm"])
    with anatomy.noting("embedding_obstacle"):
        _read_pooling(model, anatomy)
    if isinstance(head := getattr(model, "head", None), nn.Linear):
        anatomy.classifier = head
        anatomy.run_classifier = model

    def embed(images: torch.Tensor) -> torch.Tensor:
        features = model.forward_features(images)
        if model.global_pool:
            return model.forward_head(features, pre_logits=True)
        return pool_tokens(features, anatomy.pooling, nn.Identity(), anatomy.num_prefix_tokens, [0])

    anatomy.embed = embed


def read_block(module: nn.Module) -> Block:
    """Read a block. Raise a NotAPlainViT if it is no plain pre-norm block."""
    if type(module).__name__ not in _BLOCKS:
        raise NotAPlainViT(f"its blocks are {type(module).__name__}s, expected one of {', '.join(_BLOCKS)}")
    scales = [
        getattr(getattr(module, new, None), "gamma", getattr(module, old, None))
        for new, old in (("ls1", "gamma_1"), ("ls2", "gamma_2"))
    ]
    attention = _read_attention(module.attn)
    return Block(module, module.norm1, attention, module.norm2, _read_mlp(module.mlp), *scales)


def _read_attention(module: nn.Module) -> Attention:
    if find(module, ["qkv"]) is not None:
        # EVA's biases are parameters of their own, and keys have none.
        separate = getattr(module, "q_bias", None) is not None
        bias = [module.q_bias, None, module.v_bias] if separate else module.qkv.bias
        linears = split_linear(3, module.qkv.weight, bias)
    elif hasattr(module, "q_proj"):
        linears = [module.q_proj, module.k_proj, module.v_proj]
    else:
        raise NotAPlainViT(f"its attention is a {type(module).__name__}, which has no projections to read")
    norms = [find(module, [name]) for name in ("q_norm", "k_norm", "norm")]
    return Attention(*linears, module.proj, module.num_heads, *norms)


def _read_mlp(module: nn.Module) -> MLP:
    if not isinstance(getattr(module, "fc2", None), nn.Linear):
        raise NotAPlainViT(f"its MLP is a {type(module).__name__}, whose layers are not known")
    up = module.fc1_x if hasattr(module, "fc1_g") else module.fc1
    gate = getattr(module, "fc1_g", None)
    if gate is None and up.out_features == 2 * module.fc2.in_features:
        halves = split_linear(2, up.weight, up.bias)
        up, gate = halves if module.gate_last else halves[::-1]
    return MLP(up, module.fc2, activation_name(module.act), gate, find(module, ["norm"]))


def _read_rotary(model: nn.Module, anatomy: Anatomy) -> Rotary | None:
    rope = getattr(model, "rope", None)
    if rope is None:
        return None
    kind = type(rope).__name__
    if kind == "RotaryEmbeddingDinoV3" and rope.normalize_coords == "separate" and rope.min_period is None:
        # Coordinates 2 (i + 0.5 + offset) / n - 1, angles 2 pi times that.
        scale = [4 * torch.pi] * 2
        shift = [2 * torch.pi * (2 * rope.grid_offset / count - 1) for count in anatomy.grid]
    elif kind == "RotaryEmbeddingCat" and rope.grid_type == "index":
        # Coordinates (i + offset) / n * reference.
        reference = rope.ref_feat_shape or anatomy.grid
        scale = [float(count) for count in reference]
        shift = [(rope.grid_offset - 0.5) / count * ref for count, ref in zip(anatomy.grid, reference, strict=True)]
    else:
        raise NotAPlainViT(f"its rotary positions ({kind}) are not those of EVA-02 or DINOv3")
    channels = torch.arange(anatomy.blocks[0].attention.head_dim)
    if not rope.rotate_half:
        # Neighbors rotate together.
        channels = channels.view(-1, 2).T.flatten()
    if rope.grid_indexing == "xy":
        channels = channels.view(2, 2, -1).flip(1).flatten()
    return Rotary(float(rope.temperature), tuple(scale), tuple(shift), channels)


def _read_pooling(model: nn.Module, anatomy: Anatomy):
    if getattr(model, "head_dist", None) is not None:
        raise NotAPlainViT("it averages two classifiers")
    norm = find(model, ["norm"])
    last = find(model, ["fc_norm"])
    if norm is not None and last is not None:
        raise NotAPlainViT("it normalizes its tokens before and after pooling")
    anatomy.norm = last or norm
    anatomy.pool_before_norm = last is not None
    includes_prefix = getattr(model, "pool_include_prefix", False)
    pool = getattr(model, "global_pool", None)
    if pool == "map" and model.attn_pool is not None:
        # Eva's attention pooling sees all tokens, VisionTransformer's those of patches.
        sees_all = includes_prefix or not hasattr(model, "pool_include_prefix")
        anatomy.pooling = "attention" if sees_all and anatomy.num_prefix_tokens else "latent_attention"
        anatomy.pooling_head = _read_pooling_head(model.attn_pool)
    elif pool == "token" or (pool == "" and anatomy.num_class_tokens):
        anatomy.pooling = "cls"
    elif pool in ("avg", ""):
        anatomy.pooling = "mean" if includes_prefix or not anatomy.num_prefix_tokens else "latent_mean"
    else:
        raise NotAPlainViT(f"it pools by {pool!r}; known are 'token', 'avg' and 'map'")


def _read_pooling_head(module: nn.Module) -> AttentionPooling:
    if module.latent_len != 1 or module.pos_embed is not None or not isinstance(module.q, nn.Linear):
        raise NotAPlainViT("its attention pooling has several queries, positions or no projection of its query")
    if find(module, ["q_norm", "k_norm"]) is not None:
        raise NotAPlainViT("its attention pooling normalizes queries and keys")
    key, value = split_linear(2, module.kv.weight, module.kv.bias)
    attention = Attention(module.q, key, value, module.proj, module.num_heads)
    mlp = module.mlp and _read_mlp(module.mlp)
    norm = find(module, ["norm"])
    if mlp is not None and norm is None:
        raise NotAPlainViT("its attention pooling has an MLP without a norm")
    return AttentionPooling(module.latent[0], attention, norm, mlp)
