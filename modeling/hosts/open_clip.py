"""open_clip's VisionTransformer and its towers with a trunk of timm, read by structure: open_clip is not imported."""

import torch
from torch import nn

from ...configuration.configuration_base import pair
from .anatomy import (
    MLP,
    Anatomy,
    Attention,
    Block,
    GridPositions,
    NotAPlainViT,
    Projection,
    activation_name,
    check_patches,
    find,
    is_timm,
    split_linear,
)


def read(model: nn.Module, image_size: tuple[int, int] | None = None) -> Anatomy | None:
    """Read a visual tower into an `Anatomy`; None if the model is no tower of open_clip."""

    def embed(images: torch.Tensor) -> torch.Tensor:
        outputs = model(images)
        # Some return tokens beside the embedding.
        return outputs[0] if isinstance(outputs, tuple) else outputs

    if is_timm(getattr(model, "trunk", None)) and isinstance(getattr(model, "head", None), nn.Sequential):
        from .timm import read as read_timm

        anatomy = read_timm(model.trunk, image_size)
        with anatomy.noting("embedding_obstacle"):
            # The projection that open_clip adds to a trunk, or the trunk's own classifier, which is one then.
            linears = [module for module in model.head if not isinstance(module, nn.Dropout)]
            linears += [] if anatomy.classifier is None else [anatomy.classifier]
            if len(linears) > 1 or not all(isinstance(linear, nn.Linear) for linear in linears):
                raise NotAPlainViT("it projects what it pools by more than one linear layer")
            anatomy.projection = linears[0] if linears else None
        anatomy.classifier = anatomy.run_classifier = None
    elif all(hasattr(model, name) for name in ("transformer", "class_embedding", "ln_post")):
        anatomy = Anatomy(model, num_class_tokens=1)
        with anatomy.noting("obstacle"):
            _read_plain(model, anatomy)
    else:
        return None
    anatomy.embed = embed
    return anatomy


def _read_plain(model: nn.Module, anatomy: Anatomy):
    if not getattr(model.transformer, "batch_first", True):
        raise NotAPlainViT("its blocks take the batch second; create it with batch_first=True")
    anatomy.blocks = [read_block(block) for block in model.transformer.resblocks]
    anatomy.image_size = pair(model.image_size)
    anatomy.grid = tuple(model.grid_size)
    anatomy.pooling = "cls" if model.pool_type == "tok" else "latent_mean"
    anatomy.pool_before_norm = bool(model.final_ln_after_pool)
    anatomy.norm = model.ln_post
    anatomy.pre_norm = find(model, ["ln_pre"])
    anatomy.front = [model.class_embedding]
    # As open_clip resizes them when it loads weights.
    anatomy.patch_positions = GridPositions(model.positional_embedding, anatomy.grid, antialias=True)
    with anatomy.noting("patch_obstacle"):
        anatomy.patch_embedding = check_patches(model.conv1)
    if model.proj is not None:
        anatomy.projection = Projection(model.proj.mT)
    if getattr(model, "attn_pool", None) is not None or model.pool_type not in ("tok", "avg"):
        anatomy.embedding_obstacle = "it pools by a head of its own; known are 'tok' and 'avg'"


def read_block(module: nn.Module) -> Block:
    """Read a residual attention block of a visual or a text tower. Raise a NotAPlainViT if it is no plain pre-norm
    block."""
    attn = getattr(module, "attn", None)
    if not isinstance(attn, nn.MultiheadAttention):
        raise NotAPlainViT(f"its attention is a {type(attn).__name__}, expected nn.MultiheadAttention")
    linears = split_linear(3, attn.in_proj_weight, attn.in_proj_bias)
    attention = Attention(*linears, attn.out_proj, attn.num_heads)
    mlp = MLP(module.mlp.c_fc, module.mlp.c_proj, activation_name(module.mlp.gelu))
    scales = [getattr(scale, "gamma", None) for scale in (module.ls_1, module.ls_2)]
    return Block(module, module.ln_1, attention, module.ln_2, mlp, *scales)
