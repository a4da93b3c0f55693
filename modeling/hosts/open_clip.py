"""open_clip's VisionTransformer and its towers with a trunk of timm, read by structure: open_clip is not imported."""

import torch
from torch import nn

from ...configuration.configuration_base import pair
from . import timm
from .anatomy import (
    MLP,
    Anatomy,
    Block,
    GridPositions,
    Obstacle,
    Outline,
    PatchEmbedding,
    Projection,
    activation_name,
    given,
    multihead_attention,
    require_all_known,
    require_equal_width,
)


def is_open_clip(model: nn.Module) -> bool:
    """Whether a module is a visual tower of open_clip."""
    return has_trunk(model) or all(hasattr(model, name) for name in ("transformer", "class_embedding", "ln_post"))


def has_trunk(model: nn.Module) -> bool:
    """Whether a module is open_clip's adapter of a model of timm."""
    return timm.is_timm(getattr(model, "trunk", None)) and isinstance(getattr(model, "head", None), nn.Sequential)


def read(model: nn.Module) -> Anatomy:
    """The anatomy of a visual tower; its `run` is the tower itself."""
    if has_trunk(model):
        return _read_trunk(model)
    outlines = [
        Outline(block, block.mlp, block.mlp.c_proj, attention=block.attn)
        for block in model.transformer.resblocks
        if isinstance(getattr(getattr(block, "mlp", None), "c_proj", None), nn.Linear)
    ]
    anatomy = Anatomy(model, outlines, num_class_tokens=1)
    try:
        _read_plain(model, anatomy)
    except Obstacle as obstacle:
        anatomy.obstacle = str(obstacle)
    return anatomy


def _read_trunk(model: nn.Module) -> Anatomy:
    """A model of timm, whose classifier is the projection where open_clip does not add one."""
    anatomy = timm.read(model.trunk)
    anatomy.run, anatomy.run_classifier = _first_of(model), None
    added = [module for module in model.head if not isinstance(module, nn.Dropout)]
    if added and (len(added) > 1 or not isinstance(added[0], nn.Linear) or anatomy.classifier is not None):
        anatomy.embedding_obstacle = "it projects what it pools by more than one linear layer"
    elif projection := (added[0] if added else anatomy.classifier):
        anatomy.projection = Projection.of(projection)
    anatomy.classifier = None
    return anatomy


def _read_plain(model: nn.Module, anatomy: Anatomy):
    if not getattr(model.transformer, "batch_first", True):
        raise Obstacle("its blocks take the batch second; create it with batch_first=True")
    anatomy.blocks = [read_block(block) for block in model.transformer.resblocks]
    anatomy.image_size, anatomy.grid = pair(model.image_size), tuple(model.grid_size)
    anatomy.pooling = "cls" if model.pool_type == "tok" else "latent_mean"
    anatomy.pool_before_norm = bool(model.final_ln_after_pool)
    anatomy.norm, anatomy.pre_norm = model.ln_post, given(model.ln_pre)
    anatomy.positions = model.positional_embedding
    anatomy.learns_positions = model.positional_embedding.requires_grad
    # As open_clip resizes them when it loads weights.
    anatomy.front = [model.class_embedding]
    anatomy.patch_positions = GridPositions(model.positional_embedding, anatomy.grid, antialias=True)
    try:
        anatomy.patch_embedding = PatchEmbedding.of(model.conv1)
    except Obstacle as obstacle:
        anatomy.patch_obstacle = str(obstacle)
    if model.proj is not None:
        anatomy.projection = Projection(model.proj.mT)
    anatomy.run = _first_of(model)
    if getattr(model, "attn_pool", None) is not None or model.pool_type not in ("tok", "avg"):
        anatomy.embedding_obstacle = "it pools by a head of its own; known are 'tok' and 'avg'"


def _first_of(model: nn.Module):
    """The model's embedding, also where it returns tokens beside it."""

    def run(images: torch.Tensor) -> torch.Tensor:
        outputs = model(images)
        return outputs[0] if isinstance(outputs, tuple) else outputs

    return run


def read_block(module: nn.Module) -> Block:
    """A residual attention block of open_clip, of a visual or a text tower.

    Raises:
        Obstacle: if it has parameters that a plain pre-norm block has no place for.
    """
    attention = getattr(module, "attn", None)
    if not isinstance(attention, nn.MultiheadAttention):
        raise Obstacle(f"its attention is a {type(attention).__name__}, expected nn.MultiheadAttention")
    read = multihead_attention(attention)
    require_equal_width(read)
    mlp = MLP(Projection.of(module.mlp.c_fc), Projection.of(module.mlp.c_proj), activation_name(module.mlp.gelu))
    scales = [getattr(scale, "gamma", None) for scale in (module.ls_1, module.ls_2)]
    linears = [module.mlp.c_fc, module.mlp.c_proj]
    require_all_known(module, [module.ln_1, module.ln_2, attention, *linears, *scales])
    return Block(module, module.ln_1, read, module.ln_2, mlp, *scales)
