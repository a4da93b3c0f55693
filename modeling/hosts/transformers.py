"""Vision transformers of Transformers and of this package, read by structure: no model file is imported.

Families name the same parts differently; the tables below have all names. Families differ in how they pool their
tokens (`_read_pooling`).
"""

import torch
from torch import nn

from ...configuration.configuration_base import pair, set_image_size
from ..layers import interpolate_positions
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
    SincosPositions,
    activation_name,
    given,
    multihead_attention,
    norm_type,
    require_all_known,
    require_equal_width,
)


_ATTENTION_NORMS = ("layernorm_before", "layer_norm1", "norm1", "rms_norm1")
_MLP_NORMS = ("layernorm_after", "layer_norm2", "norm2", "rms_norm2")
_ATTENTIONS = ("attention", "self_attn")
_MLPS = ("mlp", "ffn")
_UPS = ("fc1", "up_proj", "dense1")
_DOWNS = ("fc2", "down_proj", "dense2")
_QUERY_KEY_VALUE = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
_OUTPUTS = ("o_proj", "out_proj", "projection_layer")
_ACTIVATIONS = ("activation", "activation_fn", "act_fn", "intermediate_act_fn")
_FINAL_NORMS = ("layernorm", "post_layernorm", "norm", "rms_norm")
_PRE_NORMS = ("pre_layrnorm", "pre_layernorm")
_PATCHES = ("patch_embeddings", "patch_embedding", "patch_embed", "patch_projection")
# In the order in which they join.
_FRONT = ("cls_token", "class_embedding", "cls_register_token", "distillation_token", "register_tokens")
# How families interpolate positions for other grids, if not bicubically without antialiasing.
_INTERPOLATIONS = {
    "dinov2_with_registers": {"antialias": True},
    "idefics3_vision": {"mode": "nearest"},
    "smolvlm_vision": {"mode": "nearest"},
    "siglip2_vision_model": {"mode": "bilinear", "antialias": True},
    "radio": {"mode": "bilinear", "crops": True},
}
# Blocks whose attention returns windows. What is added to the tokens is put together from them afterwards.
_AFTER_ATTENTION = {"SwinLayer": "drop_path"}
# Towers for images in models of several, and what wrappers call the model within.
_TOWERS = ("vision_model", "vision_tower", "visual")
_HIERARCHICAL = {
    "swin",
    "swinv2",
    "pvt",
    "pvt_v2",
    "hiera",
    "mobilevit",
    "mobilevitv2",
    "segformer",
    "convnext",
    "focalnet",
}


def is_transformers(model: nn.Module) -> bool:
    """Whether a module has the interface of Transformers' models."""
    return hasattr(model, "config") and hasattr(model, "base_model")


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


def read(model: nn.Module) -> Anatomy:
    """Read a model, or its tower for images, into an `Anatomy`. `run` returns the embedding that the classifier reads
    or, without a classifier, the pooled token, projected if there is a projection.

    Raises:
        ValueError: if the model reads text alone.
    """
    tower = tower_of(model)
    # Idefics3's tower has left the former as it was, and says the latter.
    modalities = getattr(tower, "input_modalities", ())
    if getattr(tower, "main_input_name", None) == "input_ids" and "image" not in modalities:
        raise ValueError(f"{type(model).__name__} reads text; expected a model that sees images.")
    numbered = [module for name, module in tower.named_modules() if name.rpartition(".")[2].isdigit()]
    outlines = [outline for module in numbered if (outline := _outline(module))]
    anatomy = Anatomy(tower, outlines)
    embeddings = getattr(tower, "embeddings", None)
    anatomy.num_class_tokens, anatomy.num_register_tokens = _count_prefix(tower, embeddings)
    try:
        _read_plain(model, tower, embeddings, anatomy)
    except Obstacle as obstacle:
        anatomy.obstacle = str(obstacle)
    return anatomy


def _family(tower: nn.Module) -> str:
    """Its model type, also of one with Context Broadcasting."""
    return tower.config.model_type.removeprefix("context_broadcast_")


def _find(module: nn.Module | None, names: tuple[str, ...]) -> nn.Module | None:
    """The first of a module's parts that has one of the names."""
    return next((part for name in names if isinstance(part := getattr(module, name, None), nn.Module)), None)


def _outline(module: nn.Module) -> Outline | None:
    attention, mlp = _find(module, _ATTENTIONS), _find(module, _MLPS)
    second = _find(mlp, _DOWNS)
    if attention is None or not isinstance(second, nn.Linear):
        return None
    after = _AFTER_ATTENTION.get(type(module).__name__)
    if after is None:
        return Outline(module, mlp, second, attention=attention)
    return Outline(module, mlp, second, after_attention=getattr(module, after))


def _count_prefix(tower: nn.Module, embeddings: nn.Module | None) -> tuple[int, int]:
    """Class tokens, and registers with a distillation token among them."""
    if embeddings is None:
        # PVT has a class token in its last stage alone; ours have theirs beside learned tokens.
        latents = getattr(tower, "latents", None)
        return (0, 0) if latents is None else (latents.num_class_tokens, latents.num_register_tokens)
    if hasattr(embeddings, "cls_register_token"):
        return tower.config.num_cls_tokens, tower.config.num_registers
    token = getattr(embeddings, "cls_token", getattr(embeddings, "class_embedding", None))
    classes = 0 if token is None else token.shape[1] if token.ndim == 3 else 1
    extra = [getattr(embeddings, name, None) for name in ("distillation_token", "register_tokens")]
    return classes, sum(token.shape[1] for token in extra if token is not None)


def _read_plain(model: nn.Module, tower: nn.Module, embeddings: nn.Module | None, anatomy: Anatomy):
    config = tower.config
    if _family(tower) in _HIERARCHICAL:
        raise Obstacle("it is hierarchical, with fewer tokens from stage to stage")
    modules = _blocks(tower)
    if not modules or embeddings is None:
        raise Obstacle("it has no list of transformer blocks after an embedding of patches")
    anatomy.blocks = [read_block(module) for module in modules]
    _read_grid(config, embeddings, anatomy)
    anatomy.pre_norm = _find(tower, _PRE_NORMS)
    anatomy.norm = given(_find(tower, _FINAL_NORMS))
    for norm in (anatomy.pre_norm, anatomy.norm):
        if norm is not None:
            norm_type(norm)
    anatomy.rotary = _read_rotary(tower, anatomy.blocks[0].attention.head_dim)
    _read_positions(embeddings, anatomy)
    try:
        _read_front(tower, embeddings, anatomy)
    except Obstacle as obstacle:
        anatomy.patch_obstacle = str(obstacle)
    classifier = getattr(model, "classifier", None)
    if isinstance(classifier, nn.Linear):
        anatomy.classifier = classifier
        anatomy.take_labels(model.config)
    if (projection := getattr(model, "visual_projection", None)) is not None:
        anatomy.projection = Projection.of(projection)
    try:
        _read_pooling(model, tower, anatomy)
    except Obstacle as obstacle:
        anatomy.embedding_obstacle = str(obstacle)
    _set_runs(model, tower, anatomy)


def _blocks(tower: nn.Module) -> list[nn.Module]:
    for holder in (tower, getattr(tower, "encoder", None), getattr(tower, "model", None)):
        for name in ("layers", "layer"):
            if isinstance(modules := getattr(holder, name, None), nn.ModuleList) and len(modules):
                return list(modules)
    return []


def read_block(module: nn.Module) -> Block:
    """A block of any family.

    Raises:
        Obstacle: if it has parameters that a plain pre-norm block has no place for.
    """
    parts = {
        "norm before attention": _find(module, _ATTENTION_NORMS),
        "attention": _find(module, _ATTENTIONS),
        "norm before its MLP": _find(module, _MLP_NORMS),
        "MLP": _find(module, _MLPS),
    }
    if missing := [name for name, part in parts.items() if part is None]:
        raise Obstacle(f"its block {type(module).__name__} is no plain pre-norm block (found no {', '.join(missing)})")
    attention_norm, attention_module, mlp_norm, mlp_module = parts.values()
    for norm in (attention_norm, mlp_norm):
        norm_type(norm)
    attention = _read_attention(attention_module)
    mlp = _read_mlp(mlp_module)
    scales = [
        getattr(getattr(module, f"layer_scale{i}", None), "lambda1", getattr(module, f"lambda_{i}", None))
        for i in (1, 2)
    ]
    require_all_known(module, [attention_norm, mlp_norm, attention_module, mlp_module, *scales])
    return Block(module, attention_norm, attention, mlp_norm, mlp, *scales)


def _read_attention(module: nn.Module) -> Attention:
    output, linears = _find(module, _OUTPUTS), [_find(module, names) for names in _QUERY_KEY_VALUE]
    if output is None or not all(isinstance(linear, nn.Linear) for linear in linears):
        raise Obstacle(f"its attention is a {type(module).__name__}, which has no projections to read")
    norms = [given(getattr(module, name, None)) for name in ("q_norm", "k_norm", "output_norm")]
    require_all_known(module, [*linears, output, *norms])
    projections = [Projection.of(linear) for linear in (*linears, output)]
    if any(norm is not None and len(norm.weight) != module.head_dim for norm in norms[:2]):
        raise Obstacle("it normalizes the queries and keys of all heads together")
    attention = Attention(*projections, linears[0].out_features // module.head_dim, *norms)
    require_equal_width(attention)
    return attention


def _read_mlp(module: nn.Module) -> MLP:
    up, down, gate = _find(module, _UPS), _find(module, _DOWNS), getattr(module, "gate_proj", None)
    if up is None or down is None:
        raise Obstacle(f"its MLP is a {type(module).__name__}, whose layers are not known")
    norm = given(getattr(module, "norm", None))
    require_all_known(module, [up, down, gate, norm])
    activation = activation_name(_find(module, _ACTIVATIONS))
    gate = None if gate is None else Projection.of(gate)
    return MLP(Projection.of(up), Projection.of(down), activation, gate, norm)


def _read_grid(config, embeddings: nn.Module, anatomy: Anatomy):
    patch = pair(config.patch_size)
    if hasattr(config, "num_patches") and not hasattr(config, "image_size"):
        # Of NaFlex, whose images may have any shape, the square one.
        side = int(config.num_patches**0.5)
        anatomy.grid, anatomy.image_size = (side, side), (side * patch[0], side * patch[1])
        return
    image = pair(config.image_size)
    anatomy.image_size = image
    anatomy.grid = tuple(size // stride for size, stride in zip(image, patch, strict=True))


def _read_rotary(tower: nn.Module, head_dim: int) -> Rotary | None:
    rope = getattr(tower, "rope_embeddings", None)
    if rope is None:
        return None
    if not type(rope).__name__.startswith("DINOv3ViT"):
        raise Obstacle(f"its rotary positions ({type(rope).__name__}) are not those of DINOv3")
    # Coordinates 2 center - 1, angles 2 pi times that.
    scale, shift = (4 * torch.pi,) * 2, (-2 * torch.pi,) * 2
    return Rotary(float(rope.base), scale, shift, torch.arange(head_dim))


def _read_positions(embeddings: nn.Module, anatomy: Anatomy):
    positions = getattr(embeddings, "position_embeddings", getattr(embeddings, "position_embedding", None))
    if isinstance(positions, nn.Embedding):
        anatomy.positions, anatomy.learns_positions = positions.weight, positions.weight.requires_grad
    elif isinstance(positions, torch.Tensor) and positions.shape[1] - anatomy.num_patches in (
        *(0, anatomy.num_class_tokens, anatomy.num_prefix_tokens),
    ):
        anatomy.positions, anatomy.learns_positions = positions[0], positions.requires_grad


def _read_front(tower: nn.Module, embeddings: nn.Module, anatomy: Anatomy):
    """Read the tokens before the first block: the embedding of patches, positions, class tokens and registers."""
    config, module, norm = tower.config, _find(embeddings, _PATCHES), _find(embeddings, ("rms_norm",))
    projection = _find(module, ("projection",)) or module
    positions = getattr(embeddings, "position_embeddings", getattr(embeddings, "position_embedding", None))
    positions = positions.weight if isinstance(positions, nn.Embedding) else positions
    front = [token for name in _FRONT if (token := getattr(embeddings, name, None)) is not None]
    unused = [getattr(embeddings, name, None) for name in ("mask_token", "video_patch_projection")]
    require_all_known(embeddings, [projection, norm, positions, *front, *unused], "embedding of patches")
    if isinstance(projection, nn.Linear):
        patches = _patches_of_linear(projection, pair(config.patch_size), channels_last=not _is_radio(tower))
    else:
        patches = PatchEmbedding.of(projection, norm)
    if positions is not None:
        grid = (embeddings.max_rows, embeddings.max_cols) if _is_radio(tower) else anatomy.grid
        anatomy.patch_positions = GridPositions(positions, grid, **_INTERPOLATIONS.get(_family(tower), {}))
        if anatomy.patch_positions.num_front not in (0, anatomy.num_class_tokens, anatomy.num_prefix_tokens):
            raise Obstacle(f"it has {positions.shape[-2]} positions for a grid of {grid[0]} x {grid[1]} patches")
    elif getattr(config, "is_native", False):
        anatomy.patch_positions = SincosPositions(config.hidden_size)
    if isinstance(getattr(tower, "input_conditioner", None), nn.Module):
        patches = _conditioned(patches, tower.input_conditioner)
    anatomy.front, anatomy.patch_embedding = front, patches


def _is_radio(tower: nn.Module) -> bool:
    return _family(tower) == "radio"


def _patches_of_linear(linear: nn.Linear, size: tuple[int, int], channels_last: bool) -> PatchEmbedding:
    """The embedding of patches by a linear layer that takes their pixels in a row, with channels last or first."""
    if channels_last:
        return PatchEmbedding(linear.weight.unflatten(1, (*size, -1)).permute(0, 3, 1, 2), linear.bias)
    return PatchEmbedding(linear.weight.unflatten(1, (-1, *size)), linear.bias)


def _conditioned(patches: PatchEmbedding, conditioner: nn.Module) -> PatchEmbedding:
    """C-RADIO's patch embedding with the normalization of pixels before it, which is linear, too."""
    if given(conditioner) is None:
        return patches
    weight = patches.weight / conditioner.norm_std.to(patches.weight)
    bias = -torch.einsum("ochw,cij->o", weight, conditioner.norm_mean.to(weight))
    return PatchEmbedding(weight, bias if patches.bias is None else patches.bias + bias, patches.norm)


def _read_pooling(model: nn.Module, tower: nn.Module, anatomy: Anatomy):
    """Read how tokens become the embedding, which the classifier reads or a model without one returns."""
    if getattr(model, "distillation_classifier", None) is not None:
        raise Obstacle("it averages two classifiers; give its base model")
    config, family, has_cls = tower.config, _family(tower), anatomy.num_class_tokens > 0
    head = getattr(tower, "head", None)
    averages = "mean" if not anatomy.num_prefix_tokens else "latent_mean"
    if hasattr(config, "pooling"):
        anatomy.pooling = config.pooling
    elif anatomy.classifier is not None and family.startswith("dinov2"):
        anatomy.pooling = "cls_and_latent_mean"
    elif anatomy.classifier is not None and _is_tower(model):
        anatomy.pooling = averages
        if has_cls:
            # CLIP's classifier reads tokens that were not normalized.
            anatomy.norm = None
    elif family == "pixio":
        anatomy.pooling = "class_mean"
    elif family == "radio":
        anatomy.class_tokens = list(config.summary_idxs)
    elif has_cls:
        anatomy.pooling = "cls"
    elif head is not None and anatomy.classifier is None:
        anatomy.pooling, anatomy.pooling_head = "attention", _read_pooling_head(head)
    else:
        anatomy.pooling = averages


def _is_tower(model: nn.Module) -> bool:
    """Whether a model keeps its tower under such a name, as classifiers on a CLIP or SigLIP do."""
    return any(name in model._modules for name in _TOWERS)


def _read_pooling_head(head: nn.Module) -> AttentionPooling:
    if hasattr(head, "probe"):
        norm, mlp = head.layernorm, _read_mlp(head.mlp)
        require_all_known(head, [head.probe, head.attention, norm, head.mlp])
        return AttentionPooling(head.probe[0], multihead_attention(head.attention), norm, mlp)
    if not hasattr(head, "cls_token"):
        raise Obstacle(f"it pools by a {type(head).__name__}, which is neither SigLIP's nor AIMv2's")
    # AIMv2 learns the query itself, without a projection.
    width = head.cls_token.shape[-1]
    query = Projection(torch.eye(width, dtype=head.cls_token.dtype, device=head.cls_token.device))
    projections = [query, *(Projection.of(linear) for linear in (head.k_proj, head.v_proj, head.output_proj))]
    require_all_known(head, [head.cls_token, head.k_proj, head.v_proj, head.output_proj])
    return AttentionPooling(head.cls_token[0], Attention(*projections, head.num_heads))


def _set_runs(model: nn.Module, tower: nn.Module, anatomy: Anatomy):
    """Set the functions by which images become the model's own embedding and logits."""
    call, family = _caller(tower), _family(tower)
    project = anatomy.projection or (lambda pooled: pooled)

    def run(images: torch.Tensor) -> torch.Tensor:
        outputs = call(images)
        if family == "radio":
            return project(outputs.summary)
        if anatomy.pooling in ("cls", "class_mean", "attention") or hasattr(tower.config, "pooling"):
            # Transformers' ViT calls the output of an extra dense layer its pooler output.
            pooled = None if hasattr(getattr(tower, "pooler", None), "dense") else outputs.get("pooler_output")
            return project(outputs.last_hidden_state[:, 0] if pooled is None else pooled)
        tokens = outputs.last_hidden_state
        pooled = tokens[:, anatomy.num_prefix_tokens :].mean(1)
        return torch.cat([tokens[:, 0], pooled], dim=1) if anatomy.pooling == "cls_and_latent_mean" else pooled

    anatomy.run = run
    if anatomy.classifier is not None:
        call_classifier = _caller(model, tower)
        anatomy.run_classifier = lambda images: call_classifier(images).logits


def _caller(model: nn.Module, tower: nn.Module | None = None):
    """Return a function that calls a model, of which `tower` may be a part, with images."""
    tower = model if tower is None else tower
    if _family(tower) == "vit_mae":
        return lambda images: _call_unmasked(model, images)
    if _family(tower).startswith("siglip2") and isinstance(tower.embeddings.patch_embedding, nn.Linear):
        return lambda images: model(**_as_patches(images, tower.config.patch_size))
    return lambda images: model(pixel_values=images)


def _call_unmasked(model: nn.Module, images: torch.Tensor):
    """Call a ViTMAE without a mask. It masks most patches and shuffles the rest by noise that it sorts; with noise in
    ascending order, it keeps all of them in their order."""
    config, size = model.config, model.config.patch_size
    ratio, patches = config.mask_ratio, (images.shape[2] // size) * (images.shape[3] // size)
    config.mask_ratio = 0.0
    try:
        return model(images, noise=torch.arange(patches, device=images.device).expand(len(images), -1))
    finally:
        config.mask_ratio = ratio


def _as_patches(images: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """Images as the inputs of SigLIP 2 NaFlex: patches in row order, their pixels before their channels, and grids."""
    batch, channels, height, width = images.shape
    rows, columns = height // size, width // size
    patches = images.reshape(batch, channels, rows, size, columns, size).permute(0, 2, 4, 3, 5, 1)
    return {
        "pixel_values": patches.reshape(batch, rows * columns, -1),
        "pixel_attention_mask": torch.ones(batch, rows * columns, dtype=torch.int32, device=images.device),
        "spatial_shapes": torch.tensor([[rows, columns]] * batch),
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
        ValueError: if the model is no such transformer, or its patches do not divide `image_size`.
    """
    if not has_positions(model):
        raise ValueError(
            f"Cannot resize the positions of {type(model).__name__}; expected a Transformers ViT or DeiT."
        )
    embeddings = model.base_model.embeddings
    patches, positions = embeddings.patch_embeddings, embeddings.position_embeddings
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
