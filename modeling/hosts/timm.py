"""timm's VisionTransformer and Eva (EVA-02, PE-Core, DINOv3), read by structure: timm is not imported."""

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
    Obstacle,
    Outline,
    PatchEmbedding,
    Projection,
    Rotary,
    activation_name,
    fused_projections,
    given,
    norm_type,
    require_all_known,
    require_equal_width,
)


# Transformers' model type for timm's models.
TIMM = "timm_wrapper"
# What models have whose class token is not in all blocks: CaiT, XCiT, ConViT, VOLO.
_LATE_CLASS_TOKENS = ("blocks_token_only", "cls_attn_blocks", "local_up_to_layer", "post_network")
# Blocks whose attention returns windows. What is added to the tokens is put together from them afterwards.
_AFTER_ATTENTION = {"SwinTransformerBlock": "drop_path1", "SwinTransformerV2Block": "norm1"}


def is_timm(model: nn.Module) -> bool:
    """Whether a module has the interface of timm's models."""
    return all(hasattr(model, name) for name in ("forward_features", "forward_head", "reset_classifier"))


def read(model: nn.Module) -> Anatomy:
    """The anatomy of a model of timm; its `run` is the model's `forward_head(…, pre_logits=True)`."""
    numbered = [module for name, module in model.named_modules() if name.rpartition(".")[2].isdigit()]
    outlines = [outline for module in numbered if (outline := _outline(module))]
    has_class_token = getattr(model, "cls_token", None) is not None
    in_front = has_class_token and not any(hasattr(model, name) for name in _LATE_CLASS_TOKENS)
    anatomy = Anatomy(model, outlines, num_class_tokens=int(in_front))
    try:
        _read_plain(model, anatomy)
    except Obstacle as obstacle:
        anatomy.obstacle = str(obstacle)
    return anatomy


def _outline(module: nn.Module) -> Outline | None:
    attention, mlp = getattr(module, "attn", None), getattr(module, "mlp", None)
    if not isinstance(attention, nn.Module) or not isinstance(getattr(mlp, "fc2", None), nn.Linear):
        return None
    after = _AFTER_ATTENTION.get(type(module).__name__)
    if after is None:
        return Outline(module, mlp, mlp.fc2, attention=attention)
    return Outline(module, mlp, mlp.fc2, after_attention=getattr(module, after))


def _read_plain(model: nn.Module, anatomy: Anatomy):
    modules = list(getattr(model, "blocks", ()))
    if len({info["reduction"] for info in getattr(model, "feature_info", ())}) > 1:
        raise Obstacle("it is hierarchical or hybrid, with fewer positions from stage to stage")
    if not modules or not hasattr(modules[0], "attn") or not hasattr(model, "patch_embed"):
        raise Obstacle("it has no list of transformer blocks after a patch embedding")
    anatomy.blocks = [read_block(module) for module in modules]
    anatomy.image_size, anatomy.grid = pair(model.patch_embed.img_size), tuple(model.patch_embed.grid_size)
    anatomy.num_register_tokens = model.num_prefix_tokens - anatomy.num_class_tokens
    anatomy.pre_norm = given(getattr(model, "norm_pre", None))
    if (positions := getattr(model, "pos_embed", None)) is not None:
        if positions.ndim != 3:
            raise Obstacle("its positions are no list of vectors")
        anatomy.positions, anatomy.learns_positions = positions[0], positions.requires_grad
    anatomy.rotary = _read_rotary(model)
    try:
        _read_front(model, anatomy)
    except Obstacle as obstacle:
        anatomy.patch_obstacle = str(obstacle)
    try:
        _read_pooling(model, anatomy)
    except Obstacle as obstacle:
        anatomy.embedding_obstacle = str(obstacle)
    head = getattr(model, "head", None)
    anatomy.classifier = head if isinstance(head, nn.Linear) else None
    anatomy.run_classifier = model

    def run(images: torch.Tensor) -> torch.Tensor:
        features = model.forward_features(images)
        # Without a pooling of its own, it pools as the anatomy says.
        return model.forward_head(features, pre_logits=True) if model.global_pool else pool_features(features)

    def pool_features(features: torch.Tensor) -> torch.Tensor:
        return features[:, 0] if anatomy.pooling == "cls" else features[:, anatomy.num_prefix_tokens :].mean(1)

    anatomy.run = run


def read_block(module: nn.Module) -> Block:
    """A `Block` or `EvaBlock` of timm.

    Raises:
        Obstacle: if it has parameters that a plain pre-norm block has no place for.
    """
    names = ("norm1", "attn", "norm2", "mlp")
    if missing := [name for name in names if not hasattr(module, name)]:
        raise Obstacle(f"its block {type(module).__name__} is no plain pre-norm block (found no {', '.join(missing)})")
    attention, known = _read_attention(module.attn)
    mlp, known_of_mlp = _read_mlp(module.mlp)
    scales = []
    for new, old in (("ls1", "gamma_1"), ("ls2", "gamma_2")):
        scales.append(getattr(getattr(module, new, None), "gamma", getattr(module, old, None)))
    require_all_known(module, [module.norm1, module.norm2, *scales, *known, *known_of_mlp])
    for norm in (module.norm1, module.norm2):
        norm_type(norm)
    return Block(module, module.norm1, attention, module.norm2, mlp, *scales)


def _read_attention(module: nn.Module) -> tuple[Attention, list]:
    if getattr(module, "qkv", None) is not None:
        # EVA's biases are parameters of their own, and keys have none.
        separate = getattr(module, "q_bias", None) is not None
        biases = (module.q_bias, None, module.v_bias) if separate else None
        projections = fused_projections(module.qkv, biases)
        known = [module.qkv, *(bias for bias in biases or () if bias is not None)]
    elif hasattr(module, "q_proj"):
        linears = [module.q_proj, module.k_proj, module.v_proj]
        projections, known = [Projection.of(linear) for linear in linears], linears
    else:
        raise Obstacle(f"its attention is a {type(module).__name__}, which has no projections to read")
    if not hasattr(module, "num_heads") or not isinstance(getattr(module, "proj", None), nn.Linear):
        raise Obstacle(f"its attention is a {type(module).__name__}, whose heads or output cannot be read")
    norms = [given(getattr(module, name, None)) for name in ("q_norm", "k_norm", "norm")]
    attention = Attention(*projections, Projection.of(module.proj), module.num_heads, *norms)
    require_all_known(module, known := [*known, module.proj, *norms])
    require_equal_width(attention)
    return attention, known


def _read_mlp(module: nn.Module) -> tuple[MLP, list]:
    if not hasattr(module, "fc2") or not isinstance(module.fc2, nn.Linear):
        raise Obstacle(f"its MLP is a {type(module).__name__}, whose layers are not known")
    down, norm, activation = (
        Projection.of(module.fc2),
        given(getattr(module, "norm", None)),
        activation_name(module.act),
    )
    if hasattr(module, "fc1_g"):
        up, gate, linears = Projection.of(module.fc1_x), Projection.of(module.fc1_g), [module.fc1_x, module.fc1_g]
    elif module.fc1.out_features == 2 * module.fc2.in_features:
        halves = zip(module.fc1.weight.chunk(2), _halves(module.fc1.bias), strict=True)
        gate, up = (Projection(*half) for half in halves)
        gate, up = (up, gate) if getattr(module, "gate_last", False) else (gate, up)
        linears = [module.fc1]
    else:
        up, gate, linears = Projection.of(module.fc1), None, [module.fc1]
    return MLP(up, down, activation, gate, norm), [*linears, module.fc2, norm]


def _halves(bias: torch.Tensor | None) -> tuple:
    return (None, None) if bias is None else bias.chunk(2)


def _read_rotary(model: nn.Module) -> Rotary | None:
    rope = getattr(model, "rope", None)
    if rope is None:
        return None
    kind, grid = type(rope).__name__, tuple(model.patch_embed.grid_size)
    if kind == "RotaryEmbeddingDinoV3" and rope.normalize_coords == "separate" and rope.min_period is None:
        # Coordinates 2 (i + 0.5 + offset) / n - 1, angles 2 pi times that.
        scale = [4 * torch.pi] * 2
        shift = [2 * torch.pi * (2 * rope.grid_offset / count - 1) for count in grid]
    elif kind == "RotaryEmbeddingCat" and rope.grid_type == "index":
        # Coordinates (i + offset) / n * reference.
        reference = rope.ref_feat_shape or grid
        scale = [float(count) for count in reference]
        shift = [(rope.grid_offset - 0.5) / count * ref for count, ref in zip(grid, reference, strict=True)]
    else:
        raise Obstacle(f"its rotary positions ({kind}) are not those of EVA-02 or DINOv3")
    attention = model.blocks[0].attn
    head_dim = attention.qkv.out_features // 3 // attention.num_heads if attention.qkv else attention.head_dim
    channels = torch.arange(head_dim)
    if not rope.rotate_half:
        # Neighbors rotate together.
        channels = channels.view(-1, 2).T.flatten()
    if rope.grid_indexing == "xy":
        channels = channels.view(2, 2, -1).flip(1).flatten()
    return Rotary(float(rope.temperature), tuple(scale), tuple(shift), channels)


def _read_front(model: nn.Module, anatomy: Anatomy):
    """Read the tokens before the first block: the embedding of patches, positions, class tokens and registers."""
    embed, positions = model.patch_embed, getattr(model, "pos_embed", None)
    projection, norm = getattr(embed, "proj", None), given(getattr(embed, "norm", None))
    if hasattr(embed, "backbone"):
        raise Obstacle(f"its patches are embedded by the layers of a {type(embed.backbone).__name__}")
    patches = PatchEmbedding.of(projection, norm)
    require_all_known(embed, [projection, norm], "embedding of patches")
    front = [getattr(model, name, None) for name in ("cls_token", "dist_token", "reg_token")]
    front = [token for token in front if token is not None]
    if positions is not None:
        anatomy.patch_positions = GridPositions(positions, anatomy.grid, antialias=True)
        if anatomy.patch_positions.num_front not in (0, anatomy.num_prefix_tokens):
            raise Obstacle(f"it has {positions.shape[-2]} positions for {anatomy.num_patches} patches")
    anatomy.front, anatomy.patch_embedding = front, patches


def _read_pooling(model: nn.Module, anatomy: Anatomy):
    if getattr(model, "head_dist", None) is not None:
        raise Obstacle("it averages two classifiers")
    norm, last = given(getattr(model, "norm", None)), given(getattr(model, "fc_norm", None))
    if norm is not None and last is not None:
        raise Obstacle("it normalizes its tokens before and after pooling")
    anatomy.norm, anatomy.pool_before_norm = norm if last is None else last, last is not None
    includes_prefix = getattr(model, "pool_include_prefix", False)
    pool = getattr(model, "global_pool", None)
    if getattr(model, "attn_pool", None) is not None and pool == "map":
        # Eva's attention pooling sees all tokens, VisionTransformer's those of patches.
        sees_all = includes_prefix or not hasattr(model, "pool_include_prefix")
        anatomy.pooling = "attention" if sees_all and anatomy.num_prefix_tokens else "latent_attention"
        anatomy.pooling_head = _read_pooling_head(model.attn_pool)
    elif pool == "token" or (pool == "" and anatomy.num_class_tokens):
        anatomy.pooling = "cls"
    elif pool in ("avg", ""):
        anatomy.pooling = "mean" if includes_prefix or not anatomy.num_prefix_tokens else "latent_mean"
    else:
        raise Obstacle(f"it pools by {pool!r}; known are 'token', 'avg' and 'map'")


def _read_pooling_head(module: nn.Module) -> AttentionPooling:
    if module.latent_len != 1 or module.pos_embed is not None or not isinstance(module.q, nn.Linear):
        raise Obstacle("its attention pooling has several queries, positions or no projection of its query")
    norms = [given(module.q_norm), given(module.k_norm)]
    if any(norms):
        raise Obstacle("its attention pooling normalizes queries and keys")
    keys, values = zip(module.kv.weight.chunk(2), _halves(module.kv.bias), strict=True)
    attention = Attention(
        Projection.of(module.q),
        Projection(*keys),
        Projection(*values),
        Projection.of(module.proj),
        module.num_heads,
    )
    require_equal_width(attention)
    mlp, known = (None, []) if module.mlp is None else _read_mlp(module.mlp)
    norm = given(module.norm)
    require_all_known(module, [module.latent, module.q, module.kv, module.proj, norm, *known])
    if mlp is not None and norm is None:
        raise Obstacle("its attention pooling has an MLP without a norm")
    return AttentionPooling(module.latent[0], attention, norm, mlp)
