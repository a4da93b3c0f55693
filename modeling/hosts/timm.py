"""Reader of timm's `VisionTransformer` and `Eva` (EVA-02, PE-Core, DINOv3). timm is not imported."""

import torch
from torch import nn

from ...configuration.configuration_base import pair
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
    Rotary,
    activation_name,
    find,
    read_convolution,
    split_linear,
)


# Class names of pre-norm blocks. A post-norm block, `ResPostBlock`, has the same parts, so class names are checked.
_BLOCKS = ("Block", "EvaBlock")
# Attributes of CaiT, XCiT, ConViT and VOLO. In these models, the first blocks process patch tokens without a class
# token.
_LATE_CLASS_TOKENS = ("blocks_token_only", "cls_attn_blocks", "local_up_to_layer", "post_network")


def read(model: nn.Module, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a timm model into an `Anatomy`. With `image_size`, change the image size of the model in place."""
    num_class_tokens = int(getattr(model, "cls_token", None) is not None)
    if any(hasattr(model, name) for name in _LATE_CLASS_TOKENS):
        num_class_tokens = 0
    try:
        return _read_plain(model, num_class_tokens, image_size)
    except NotAPlainViT as error:
        return Anatomy(model, num_class_tokens=num_class_tokens, unsupported_reason=str(error))


def _read_plain(model: nn.Module, num_class_tokens: int, image_size: tuple[int, int] | None) -> Anatomy:
    if len({info["reduction"] for info in getattr(model, "feature_info", ())}) > 1:
        raise NotAPlainViT("it is hierarchical or hybrid, with fewer positions from stage to stage")
    if not len(getattr(model, "blocks", ())) or not hasattr(model, "patch_embed"):
        raise NotAPlainViT("it has no list of transformer blocks after a patch embedding")
    blocks = [read_block(block) for block in model.blocks]
    position_table = getattr(model, "pos_embed", None)
    if position_table is not None and position_table.ndim != 3:
        raise NotAPlainViT("its positions are no list of vectors")
    if image_size not in (None, pair(model.patch_embed.img_size)):
        model.set_input_size(img_size=image_size)
        position_table = getattr(model, "pos_embed", None)
    grid = tuple(model.patch_embed.grid_size)
    patches, patches_reason = _read_patches(model)
    embedding_reason = None
    try:
        pooling = _read_pooling(model)
    except NotAPlainViT as error:
        pooling = Pooling()
        embedding_reason = str(error)
    head = getattr(model, "head", None)
    classifier = head if isinstance(head, nn.Linear) else None
    prefix_tokens = [getattr(model, name, None) for name in ("cls_token", "dist_token", "reg_token")]

    def embed(pixel_values: torch.Tensor) -> torch.Tensor:
        features = model.forward_features(pixel_values)
        if model.global_pool:
            return model.forward_head(features, pre_logits=True)
        if pooling.mode == "cls":
            return features[:, 0]
        return features[:, 0 if pooling.mode == "mean" else model.num_prefix_tokens :].mean(dim=1)

    return Anatomy(
        model,
        blocks,
        image_size=pair(model.patch_embed.img_size),
        grid=grid,
        num_class_tokens=num_class_tokens,
        num_register_tokens=model.num_prefix_tokens - num_class_tokens,
        prefix_tokens=[token for token in prefix_tokens if token is not None],
        patches=patches,
        patch_positions=None if position_table is None else GridPositions(position_table, grid, antialias=True),
        rotary=_read_rotary(model, grid, blocks[0].attention.head_dim),
        pre_norm=find(model, ["norm_pre"]),
        norm=find(model, ["fc_norm", "norm"]),
        pooling=pooling,
        classifier=classifier,
        embed=embed,
        run_classifier=None if classifier is None else model,
        unsupported_patches_reason=patches_reason,
        unsupported_embedding_reason=embedding_reason,
    )


def read_block(module: nn.Module) -> Block:
    """Read a transformer block. Raise `NotAPlainViT` if it is not a plain pre-norm block."""
    if type(module).__name__ not in _BLOCKS:
        raise NotAPlainViT(f"its blocks are {type(module).__name__}s, expected one of {', '.join(_BLOCKS)}")
    return Block(
        module,
        attention_norm=module.norm1,
        attention=_read_attention(module.attn),
        mlp_norm=module.norm2,
        mlp=_read_mlp(module.mlp),
        attention_scale=getattr(getattr(module, "ls1", None), "gamma", getattr(module, "gamma_1", None)),
        mlp_scale=getattr(getattr(module, "ls2", None), "gamma", getattr(module, "gamma_2", None)),
    )


def _read_attention(module: nn.Module) -> Attention:
    if find(module, ["qkv"]) is not None:
        bias = module.qkv.bias
        if getattr(module, "q_bias", None) is not None:
            # EVA has the biases of queries and values outside of the fused layer. Keys have no bias.
            bias = [module.q_bias, None, module.v_bias]
        query, key, value = split_linear(3, module.qkv.weight, bias)
    elif hasattr(module, "q_proj"):
        query = module.q_proj
        key = module.k_proj
        value = module.v_proj
    else:
        raise NotAPlainViT(f"its attention is a {type(module).__name__}, which has no projections to read")
    return Attention(
        query,
        key,
        value,
        module.proj,
        module.num_heads,
        query_norm=find(module, ["q_norm"]),
        key_norm=find(module, ["k_norm"]),
        output_norm=find(module, ["norm"]),
    )


def _read_mlp(module: nn.Module) -> MLP:
    if not isinstance(getattr(module, "fc2", None), nn.Linear):
        raise NotAPlainViT(f"its MLP is a {type(module).__name__}, whose layers are not known")
    up = module.fc1_x if hasattr(module, "fc1_g") else module.fc1
    gate = getattr(module, "fc1_g", None)
    if gate is None and up.out_features == 2 * module.fc2.in_features:
        first, second = split_linear(2, up.weight, up.bias)
        up, gate = (first, second) if module.gate_last else (second, first)
    return MLP(up, module.fc2, activation_name(module.act), gate, find(module, ["norm"]))


def _read_patches(model: nn.Module) -> tuple[PatchEmbedding | None, str | None]:
    if backbone := getattr(model.patch_embed, "backbone", None):
        return None, f"its patches are embedded by the layers of a {type(backbone).__name__}"
    return read_convolution(getattr(model.patch_embed, "proj", None), find(model.patch_embed, ["norm"]))


def _read_rotary(model: nn.Module, grid: tuple[int, int], head_dim: int) -> Rotary | None:
    rope = getattr(model, "rope", None)
    if rope is None:
        return None
    kind = type(rope).__name__
    if kind == "RotaryEmbeddingDinoV3" and rope.normalize_coords == "separate" and rope.min_period is None:
        # The coordinate of row i (of n rows) or column i (of n columns) is 2 * (i + 0.5 + offset) / n - 1. The angle
        # is 2 pi * coordinate * frequency.
        scale = (4 * torch.pi, 4 * torch.pi)
        shift = tuple(2 * torch.pi * (2 * rope.grid_offset / count - 1) for count in grid)
    elif kind == "RotaryEmbeddingCat" and rope.grid_type == "index":
        # The coordinate of row i (of n rows) or column i (of n columns) is (i + offset) / n * m, where m is the number
        # of rows or columns of the reference grid.
        reference = rope.ref_feat_shape or grid
        scale = tuple(float(count) for count in reference)
        shift = tuple((rope.grid_offset - 0.5) / count * ref for count, ref in zip(grid, reference, strict=True))
    else:
        raise NotAPlainViT(f"its rotary positions ({kind}) are not those of EVA-02 or DINOv3")
    channels = torch.arange(head_dim)
    if not rope.rotate_half:
        # Without `rotate_half`, timm rotates channel 2 * i with channel 2 * i + 1.
        channels = channels.view(-1, 2).T.flatten()
    if rope.grid_indexing == "xy":
        channels = channels.view(2, 2, -1).flip(1).flatten()
    return Rotary(float(rope.temperature), scale, shift, channels)


def _read_pooling(model: nn.Module) -> Pooling:
    if getattr(model, "head_dist", None) is not None:
        raise NotAPlainViT("it averages two classifiers")
    norm_after_pooling = find(model, ["fc_norm"])
    if norm_after_pooling is not None and find(model, ["norm"]) is not None:
        raise NotAPlainViT("it normalizes its tokens before and after pooling")
    before_norm = norm_after_pooling is not None
    includes_prefix = getattr(model, "pool_include_prefix", False)
    pool_type = getattr(model, "global_pool", None)
    if pool_type == "map" and model.attn_pool is not None:
        # `Eva` has no `pool_include_prefix`. Its attention pooling always attends to all tokens.
        attends_to_all = includes_prefix or not hasattr(model, "pool_include_prefix")
        mode = "attention" if attends_to_all or not model.num_prefix_tokens else "latent_attention"
        return Pooling(mode, before_norm=before_norm, head=_read_pooling_head(model.attn_pool))
    if pool_type == "token" or (pool_type == "" and getattr(model, "cls_token", None) is not None):
        return Pooling("cls", before_norm=before_norm)
    if pool_type in ("avg", ""):
        mode = "mean" if includes_prefix or not model.num_prefix_tokens else "latent_mean"
        return Pooling(mode, before_norm=before_norm)
    raise NotAPlainViT(f"it pools by {pool_type!r}; known are 'token', 'avg' and 'map'")


def _read_pooling_head(module: nn.Module) -> AttentionPooling:
    if module.latent_len != 1 or module.pos_embed is not None or not isinstance(module.q, nn.Linear):
        raise NotAPlainViT("its attention pooling has several queries, positions or no projection of its query")
    if find(module, ["q_norm", "k_norm"]) is not None:
        raise NotAPlainViT("its attention pooling normalizes queries and keys")
    key, value = split_linear(2, module.kv.weight, module.kv.bias)
    attention = Attention(module.q, key, value, module.proj, module.num_heads)
    norm = find(module, ["norm"])
    mlp = None if module.mlp is None else _read_mlp(module.mlp)
    if mlp is not None and norm is None:
        raise NotAPlainViT("its attention pooling has an MLP without a norm")
    return AttentionPooling(module.latent[0], attention, norm, mlp)
