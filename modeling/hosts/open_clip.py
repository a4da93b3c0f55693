"""Reader of open_clip's `VisionTransformer` and of open_clip towers with a timm model. open_clip is not imported."""

import dataclasses

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
    Pooling,
    Projection,
    activation_name,
    find,
    is_timm,
    read_convolution,
    split_linear,
)


def read(model: nn.Module, image_size: tuple[int, int] | None = None) -> Anatomy:
    """Read a vision tower of open_clip into an `Anatomy`."""
    if is_timm(getattr(model, "trunk", None)) and isinstance(getattr(model, "head", None), nn.Sequential):
        return _read_with_trunk(model, image_size)
    if not all(hasattr(model, name) for name in ("transformer", "class_embedding", "ln_post")):
        return Anatomy(model, unsupported_reason="its list of transformer blocks is not known")
    try:
        return _read_plain(model)
    except NotAPlainViT as error:
        return Anatomy(model, num_class_tokens=1, unsupported_reason=str(error))


def _read_with_trunk(model: nn.Module, image_size: tuple[int, int] | None) -> Anatomy:
    from .timm import read as read_timm

    trunk = read_timm(model.trunk, image_size)
    # Layers that open_clip adds to a timm model, and the timm model's own classifier.
    linears = [module for module in model.head if not isinstance(module, nn.Dropout)]
    if trunk.classifier is not None:
        linears.append(trunk.classifier)
    reason = None
    if len(linears) > 1 or not all(isinstance(linear, nn.Linear) for linear in linears):
        reason = "it projects its pooled tokens by more than one linear layer"
    return dataclasses.replace(
        trunk,
        projection=linears[0] if linears and reason is None else None,
        classifier=None,
        embed=model,
        run_classifier=None,
        unsupported_embedding_reason=trunk.unsupported_embedding_reason or reason,
    )


def _read_plain(model: nn.Module) -> Anatomy:
    if not getattr(model.transformer, "batch_first", True):
        raise NotAPlainViT("its blocks take the batch second; create it with batch_first=True")

    def embed(pixel_values: torch.Tensor) -> torch.Tensor:
        outputs = model(pixel_values)
        # With `output_tokens`, the tower returns a tuple of the embedding and the tokens.
        return outputs[0] if isinstance(outputs, tuple) else outputs

    grid = tuple(model.grid_size)
    patches, patches_reason = read_convolution(model.conv1)
    embedding_reason = None
    if getattr(model, "attn_pool", None) is not None or model.pool_type not in ("tok", "avg"):
        embedding_reason = "it pools by a head of its own; known are 'tok' and 'avg'"
    mode = "cls" if model.pool_type == "tok" else "latent_mean"
    return Anatomy(
        model,
        [read_block(block) for block in model.transformer.resblocks],
        image_size=pair(model.image_size),
        grid=grid,
        num_class_tokens=1,
        prefix_tokens=[model.class_embedding],
        patches=patches,
        # open_clip uses antialiasing when it interpolates the position embeddings of a checkpoint.
        patch_positions=GridPositions(model.positional_embedding, grid, antialias=True),
        pre_norm=find(model, ["ln_pre"]),
        norm=model.ln_post,
        pooling=Pooling(mode, before_norm=bool(model.final_ln_after_pool)),
        projection=None if model.proj is None else Projection(model.proj.mT),
        embed=embed,
        unsupported_patches_reason=patches_reason,
        unsupported_embedding_reason=embedding_reason,
    )


def read_block(module: nn.Module) -> Block:
    """Read a block of an open_clip vision or text tower. Raise `NotAPlainViT` if it is not a plain pre-norm block."""
    attention = getattr(module, "attn", None)
    if not isinstance(attention, nn.MultiheadAttention):
        raise NotAPlainViT(f"its attention is a {type(attention).__name__}, expected nn.MultiheadAttention")
    query, key, value = split_linear(3, attention.in_proj_weight, attention.in_proj_bias)
    return Block(
        module,
        attention_norm=module.ln_1,
        attention=Attention(query, key, value, attention.out_proj, attention.num_heads),
        mlp_norm=module.ln_2,
        mlp=MLP(module.mlp.c_fc, module.mlp.c_proj, activation_name(module.mlp.gelu)),
        attention_scale=getattr(module.ls_1, "gamma", None),
        mlp_scale=getattr(module.ls_2, "gamma", None),
    )
