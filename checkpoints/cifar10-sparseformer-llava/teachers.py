"""Read what a SparseFormer inherits out of a pre-trained vision transformer.

Teachers are recognized by their structure, so that neither Transformers' model files nor timm nor open_clip need to
be imported: a `blocks` list beside a `patch_embed` (timm), a list of layers in a Transformers model's base model or
vision tower, a list of residual blocks beside a class embedding (open_clip).
"""

import copy
import inspect
import re
from dataclasses import dataclass, field

import torch
from torch import nn

from .configuration_base import pair


# Names inside a block, of timm, Transformers and older Transformers, to those of `SparseFormerLayer`.
_RENAMES = (
    (r"^(?:norm1|layer_norm1|ln_1|layernorm_before)\.", "layernorm_before."),
    (r"^(?:norm2|layer_norm2|ln_2|layernorm_after)\.", "layernorm_after."),
    (r"^(?:attn|self_attn|attention)\.(?:attention\.)?(?:q|query|q_proj)\.", "attention.q_proj."),
    (r"^(?:attn|self_attn|attention)\.(?:attention\.)?(?:k|key|k_proj)\.", "attention.k_proj."),
    (r"^(?:attn|self_attn|attention)\.(?:attention\.)?(?:v|value|v_proj)\.", "attention.v_proj."),
    (r"^(?:attn|self_attn|attention)\.(?:proj|out_proj|o_proj|output\.dense)\.", "attention.o_proj."),
    (r"^(?:mlp\.fc1|mlp\.c_fc|intermediate\.dense)\.", "mlp.fc1."),
    (r"^(?:mlp\.fc2|mlp\.c_proj|output\.dense)\.", "mlp.fc2."),
)
_FUSED_QKV = re.compile(r"^(?:attn|attention)\.(?:qkv\.|in_proj_)(weight|bias)$")
_LAYER_SCALE = re.compile(r"^(?:ls_?|layer_scale)([12])\.(?:gamma|lambda1)$")
_LINEARS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")
_NORMS = ("layernorm_before", "layernorm_after")
_ACTIVATIONS = {
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_pytorch_tanh",
    "GELUTanhActivation": "gelu_pytorch_tanh",
    "PytorchGELUTanh": "gelu_pytorch_tanh",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}


@dataclass
class Teacher:
    """What a SparseFormer takes from a teacher.

    Args:
        blocks (`list[dict]`): Weights of every block, under the names of a `SparseFormerLayer` that attends and has an
            MLP; layer scale is folded into the linear layers before it.
        norm (`dict`): Weight and bias of the final LayerNorm.
        classifier (`dict`, *optional*): Weight and bias of the classifier.
        num_tokens (`int`): Image tokens, [CLS] not counted.
        fields (`dict`): Configuration fields that follow from the teacher.
        modules (`list`): The teacher's own blocks.
        projection (`torch.Tensor`, *optional*): `(projection_dim, hidden_size)`, what a CLIP projects its pooled token
            by.
        pooling_head (`dict`, *optional*): Weights of the head by which SigLIP pools its tokens, under the names of a
            `SparseFormerPoolingHead`.
    """

    blocks: list[dict[str, torch.Tensor]]
    norm: dict[str, torch.Tensor]
    classifier: dict[str, torch.Tensor] | None
    num_tokens: int
    fields: dict = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    projection: torch.Tensor | None = None
    pooling_head: dict[str, torch.Tensor] | None = None


def _is_timm(model: nn.Module) -> bool:
    return all(hasattr(model, name) for name in ("blocks", "patch_embed", "forward_features", "forward_head"))


def _is_open_clip(model: nn.Module) -> bool:
    return all(hasattr(model, name) for name in ("transformer", "class_embedding", "ln_post", "proj"))


def _unwrap(model: nn.Module) -> nn.Module:
    """The timm model inside Transformers' wrapper, the visual tower of an open_clip model, or the model itself."""
    if hasattr(model, "visual") and hasattr(model, "encode_image"):
        return model.visual
    return getattr(model, "timm_model", model)


def _vision_tower(model: nn.Module) -> nn.Module | None:
    """The part of a CLIP or SigLIP of Transformers that holds the layers of its vision transformer, if it is one."""
    while isinstance(getattr(model, "vision_model", None), nn.Module):
        model = model.vision_model
    return model if hasattr(model, "post_layernorm") and hasattr(model, "encoder") else None


def _refuse(model: nn.Module, reason: str):
    raise ValueError(
        f"Cannot bootstrap from {type(model).__name__}: {reason}. Teachers are plain pre-norm vision transformers: "
        "Transformers' ViT, DeiT, CLIP and SigLIP, timm's and open_clip's VisionTransformer, ViTImpulseInit."
    )


def read_teacher(model: nn.Module) -> Teacher:
    """Read a vision transformer: Transformers' ViT, DeiT, CLIP or SigLIP, timm's or open_clip's VisionTransformer, or
    one of this package (fused or split qkv, any head count, layer scale).

    Of a CLIP, the LayerNorm before its blocks goes with the patches and positions that it normalizes, as in the
    reference implementation: the focusing stage learns to give what the blocks expect.

    Raises:
        ValueError: if the model is no such transformer, or its blocks hold parameters that a plain pre-norm block has
            no place for.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"A teacher is a model, got {type(model).__name__}; load it first.")
    wrapper, model = model, _unwrap(model)
    if _is_timm(model):
        teacher = _read_timm(model)
        if teacher.classifier is not None and hasattr(wrapper, "config"):
            teacher.fields.pop("num_labels")
            teacher.fields.update(_labels(wrapper.config))
        return teacher
    if _is_open_clip(model):
        return _read_open_clip(model)
    if _vision_tower(model) is not None:
        return _read_vision_tower(model)
    if hasattr(model, "config") and hasattr(model, "base_model"):
        return _read_transformers(model)
    _refuse(model, "it has no list of transformer blocks")


def _read_timm(model: nn.Module) -> Teacher:
    modules = list(model.blocks)
    if not modules or not hasattr(modules[0], "attn"):
        _refuse(model, "its blocks have no attention")
    if model.global_pool not in ("token", "avg"):
        _refuse(model, f"it pools by {model.global_pool!r}, known are 'token' and 'avg'")
    if not isinstance(getattr(model, "norm_pre", None), (nn.Identity, type(None))):
        _refuse(model, "it has a LayerNorm before its blocks")
    pools_tokens = model.global_pool == "avg"
    pools_before_norm = isinstance(model.norm, nn.Identity)
    norm = model.fc_norm if pools_before_norm else model.norm
    attention, mlp = modules[0].attn, modules[0].mlp
    fields = {
        "image_size": list(model.patch_embed.img_size),
        "num_attention_heads": attention.num_heads,
        "hidden_act": activation_name(model, mlp.act),
        "use_cls_token": not pools_tokens,
        "pooling": "mean" if pools_tokens else "cls",
        "pool_before_norm": pools_before_norm,
    }
    classifier = model.head if isinstance(model.head, nn.Linear) else None
    return _teacher(model, modules, modules[0].norm1, norm, classifier, model.patch_embed.num_patches, fields)


def _read_open_clip(model: nn.Module) -> Teacher:
    modules = list(model.transformer.resblocks)
    if model.attn_pool is not None or model.pool_type not in ("tok", "avg"):
        _refuse(model, "it pools by attention; known are 'tok' and 'avg'")
    if not getattr(model.transformer, "batch_first", True):
        _refuse(model, "its blocks take the batch second; create it with batch_first=True")
    attention = modules[0].attn
    if not isinstance(attention, nn.MultiheadAttention):
        _refuse(model, f"its attention is a {type(attention).__name__}, expected nn.MultiheadAttention")
    pools_tokens = model.pool_type == "avg"
    fields = {
        "image_size": list(model.image_size),
        "num_attention_heads": attention.num_heads,
        "hidden_act": activation_name(model, modules[0].mlp.gelu),
        "use_cls_token": not pools_tokens,
        "pooling": "mean" if pools_tokens else "cls",
        "pool_before_norm": pools_tokens and model.final_ln_after_pool,
    }
    num_tokens = model.grid_size[0] * model.grid_size[1]
    teacher = _teacher(model, modules, modules[0].ln_1, model.ln_post, None, num_tokens, fields)
    return _with_projection(teacher, None if model.proj is None else model.proj.mT)


def _read_vision_tower(model: nn.Module) -> Teacher:
    tower = _vision_tower(model)
    config, head = tower.config, getattr(tower, "head", None)
    height, width = pair(config.image_size)
    patch_height, patch_width = pair(config.patch_size)
    has_cls = hasattr(tower.embeddings, "class_embedding")
    fields = {
        "image_size": [height, width],
        "num_attention_heads": config.num_attention_heads,
        "hidden_act": config.hidden_act,
        "use_cls_token": has_cls,
        "pooling": "cls" if has_cls else "attention",
    }
    if not has_cls and head is None:
        _refuse(model, "it has neither a [CLS] nor a pooling head to align")
    modules = list(tower.encoder.layers)
    num_tokens = (height // patch_height) * (width // patch_width)
    teacher = _teacher(model, modules, modules[0].layer_norm1, tower.post_layernorm, None, num_tokens, fields)
    if not has_cls:
        teacher.pooling_head = _read_pooling_head(head)
    projection = getattr(model, "visual_projection", None)
    return _with_projection(teacher, None if projection is None else projection.weight)


def _with_projection(teacher: Teacher, projection: torch.Tensor | None) -> Teacher:
    if projection is not None:
        teacher.projection = projection
        teacher.fields["projection_dim"] = len(projection)
    return teacher


def _read_pooling_head(head: nn.Module) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in head.state_dict().items():
        if match := _FUSED_QKV.match(name):
            for projection, part in zip("qkv", tensor.chunk(3), strict=True):
                weights[f"attention.{projection}_proj.{match[1]}"] = part
        elif name == "probe":
            weights["probe"] = tensor[0]
        else:
            weights[name.replace("attention.out_proj.", "attention.o_proj.")] = tensor
    return weights


def _read_transformers(model: nn.Module) -> Teacher:
    base, config = model.base_model, model.config
    encoder = getattr(base, "encoder", base)
    modules = list(getattr(encoder, "layers", getattr(encoder, "layer", ())))
    norm = getattr(base, "layernorm", None)
    names = ("patch_size", "image_size", "num_attention_heads", "hidden_act")
    if not modules or not isinstance(norm, nn.LayerNorm) or not all(hasattr(config, name) for name in names):
        _refuse(model, "it has no list of transformer layers followed by a LayerNorm")
    first_norm = getattr(modules[0], "layernorm_before", None)
    if not isinstance(first_norm, nn.LayerNorm):
        _refuse(model, f"its layers ({type(modules[0]).__name__}) do not begin with a LayerNorm")
    if hasattr(model, "distillation_classifier"):
        _refuse(model, "it averages two classifiers; load it as DeiTForImageClassification, which has one")
    height, width = pair(config.image_size)
    patch_height, patch_width = pair(config.patch_size)
    classifier = getattr(model, "classifier", None)
    fields = {
        "image_size": [height, width],
        "num_attention_heads": config.num_attention_heads,
        "hidden_act": config.hidden_act,
        "use_cls_token": _pooling(config) == "cls",
        "pooling": _pooling(config),
    }
    if isinstance(classifier, nn.Linear):
        fields.update(_labels(config))
    else:
        classifier = None
    num_tokens = (height // patch_height) * (width // patch_width)
    return _teacher(model, modules, first_norm, norm, classifier, num_tokens, fields)


def _teacher(model, modules, first_norm, norm, classifier, num_tokens, fields) -> Teacher:
    blocks = [read_block(model, module) for module in modules]
    intermediate_size, hidden_size = blocks[0]["mlp.fc1.weight"].shape
    if blocks[0]["attention.q_proj.weight"].shape != (hidden_size, hidden_size):
        _refuse(model, "its attention is not as wide as its tokens")
    height, width = fields["image_size"]
    fields.update(
        image_size=height if height == width else [height, width],
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        qkv_bias="attention.q_proj.bias" in blocks[0],
        layer_norm_eps=first_norm.eps,
    )
    if classifier is not None and "id2label" not in fields:
        fields["num_labels"] = classifier.out_features
    if classifier is not None:
        classifier = {"weight": classifier.weight, "bias": _bias(classifier)}
    return Teacher(blocks, {"weight": norm.weight, "bias": _bias(norm)}, classifier, num_tokens, fields, modules)


def read_block(model: nn.Module, block: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of any library's plain pre-norm block under the names of a `SparseFormerLayer`, layer scale folded in.

    Raises:
        ValueError: if the `model`'s block has other parameters or lacks some.
    """
    weights, scales, unknown = {}, {}, []
    for name, tensor in block.state_dict().items():
        if match := _FUSED_QKV.match(name):
            for projection, part in zip("qkv", tensor.chunk(3), strict=True):
                weights[f"attention.{projection}_proj.{match[1]}"] = part
        elif match := _LAYER_SCALE.match(name):
            scales["attention.o_proj" if match[1] == "1" else "mlp.fc2"] = tensor
        else:
            for pattern, replacement in _RENAMES:
                renamed, found = re.subn(pattern, replacement, name)
                if found:
                    weights[renamed] = tensor
                    break
            else:
                unknown.append(name)
    missing = [f"{name}.weight" for name in _LINEARS + _NORMS if f"{name}.weight" not in weights]
    if unknown or missing:
        problems = [f"unexpected {unknown}"] * bool(unknown) + [f"missing {missing}"] * bool(missing)
        _refuse(model, f"its block {type(block).__name__} is no plain pre-norm block ({'; '.join(problems)})")
    projections = [name for name in _LINEARS if name[-6:] in ("q_proj", "k_proj", "v_proj")]
    has_qkv_bias = any(f"{name}.bias" in weights for name in projections)
    for name in _LINEARS:
        # A projection without its own bias computes the same with a bias of zero.
        if name not in projections or has_qkv_bias:
            weights.setdefault(f"{name}.bias", weights[f"{name}.weight"].new_zeros(len(weights[f"{name}.weight"])))
    for name, scale in scales.items():
        weights[f"{name}.weight"] = scale[:, None] * weights[f"{name}.weight"]
        weights[f"{name}.bias"] = scale * weights[f"{name}.bias"]
    return weights


@torch.no_grad()
def check_inherited_block(model: nn.Module, block: nn.Module, layer: nn.Module):
    """Raise unless `layer`, a `SparseFormerLayer` with inherited weights, computes what the teacher's `block` does.

    Equal names do not make equal blocks (post-norm ones have the same), so both are run on random tokens in float32.
    """
    block, layer = copy.deepcopy(block).float().eval(), copy.deepcopy(layer).float().eval()
    width = layer.layernorm_before.normalized_shape[0]
    tokens = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(layer.mlp.fc1.weight.device)
    takes_mask = "attention_mask" in inspect.signature(block.forward).parameters
    expected = block(tokens, attention_mask=None) if takes_mask else block(tokens)
    expected = expected[0] if isinstance(expected, tuple) else expected
    difference = (layer(tokens)[0] - expected).abs().max() / expected.abs().max()
    if not difference < 1e-4:
        _refuse(
            _unwrap(model),
            f"its block {type(block).__name__} computes something else than a plain pre-norm block with the same "
            f"weights (largest relative difference {difference:.1e})",
        )


def embed(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """The final embedding, which bootstrapping aligns, `(batch, hidden_size)` or `(batch, projection_dim)`.

    What the classifier reads: [CLS] after the final LayerNorm, or the pooled embedding of a model that pools its
    tokens. Of a CLIP with a projection, the projected embedding, not normalized.
    """
    model = _unwrap(model)
    if _is_timm(model):
        return model.forward_head(model.forward_features(pixel_values), pre_logits=True)
    if _is_open_clip(model):
        outputs = model(pixel_values)
        return outputs[0] if isinstance(outputs, tuple) else outputs
    project = getattr(model, "visual_projection", nn.Identity())
    if (tower := _vision_tower(model)) is not None:
        return project(tower(pixel_values).pooler_output)
    outputs = model.base_model(pixel_values)
    # Transformers' ViT calls the output of an extra dense layer its pooler output; ours is what the classifier reads.
    pooled = outputs.pooler_output if hasattr(model.config, "pooling") else outputs.last_hidden_state[:, 0]
    return project(pooled)


def classifier_of(model: nn.Module) -> nn.Module | None:
    """The module that takes `embed`'s output to logits, or None."""
    model = _unwrap(model)
    classifier = model.head if _is_timm(model) else getattr(model, "classifier", None)
    return classifier if isinstance(classifier, nn.Linear) else None


def _pooling(config) -> str:
    """What the classifier of a Transformers model reads: our configurations say, others have a [CLS]."""
    return getattr(config, "pooling", "cls")


def _labels(config) -> dict:
    return {"id2label": dict(config.id2label), "label2id": dict(config.label2id)}


def _bias(module: nn.Module) -> torch.Tensor:
    return module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias


def activation_name(model: nn.Module, activation: nn.Module) -> str:
    """Transformers' name of an activation of any library.

    Raises:
        ValueError: if the `model`'s is not known.
    """
    name = type(activation).__name__
    if name not in _ACTIVATIONS:
        _refuse(model, f"its activation {name} is not one of {sorted(_ACTIVATIONS)}")
    if name == "GELU" and getattr(activation, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    return _ACTIVATIONS[name]
