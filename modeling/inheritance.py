"""A SparseFormer that inherits the blocks of a vision transformer (Gao et al., *Bootstrapping SparseFormers from
Vision Foundation Models*, section 3.2): mathematics over an `Anatomy`.

Layer scale is folded into the linear layer before it. Channels of rotary attention are put into the order in which a
SparseFormer rotates them, queries and keys alike, which leaves their products as they are.
"""

import torch
from torch import nn

from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from . import modeling_patch_sparseformer
from .hosts import Anatomy, read_anatomy
from .hosts.anatomy import TOLERANCE, AttentionPooling, Block, Projection, difference, evaluating, norm_eps, norm_type
from .pyramid import grid_rois


# Where a student's focusing stage comes from.
FOCUSINGS = ("paper", "inherited")
# What reads the RoIs of tokens has the reference implementation's epsilon, whatever the teacher's is.
FOCUSING_EPS = 1e-5


@torch.no_grad()
def inherit(
    model_class: type,
    teacher: nn.Module | Anatomy,
    num_latent_tokens: int | None,
    truncate: float | int | None,
    inherit_blocks: bool,
    focusing: str,
    check: bool,
    break_ties: bool,
    **fields,
) -> nn.Module:
    """`from_teacher` of a model's class, which documents it and has the defaults."""
    anatomy = read_anatomy(teacher)
    anatomy.require_plain("bootstrap from", embeds=True)
    if focusing not in FOCUSINGS:
        raise ValueError(f"`focusing` is {focusing!r}, expected one of {', '.join(map(repr, FOCUSINGS))}.")
    inherits_patches, embeds = focusing == "inherited", model_class.focusing_of_students == "inherited"
    if embeds and not inherits_patches:
        raise ValueError(f"`focusing` is {focusing!r}; tokens of {model_class.__name__} embed patches: 'inherited'.")
    if inherits_patches and not embeds:
        # In the code of a folder, the papers' models come without these.
        model_class = getattr(modeling_patch_sparseformer, f"Patch{model_class.__name__}", model_class)
    if inherits_patches and not inherit_blocks:
        raise ValueError('`focusing="inherited"` inherits the whole teacher; expected `inherit_blocks=True`.')
    blocks = len(anatomy.blocks)
    if truncate is None:
        truncate = 0 if inherits_patches else 1 / 3
    # From 1 on, whole numbers are counts, be they floats or not: a command line does not tell.
    truncated = round(truncate * blocks) if truncate < 1 else int(truncate)
    whole = truncate < 1 or truncate == truncated
    if isinstance(truncate, bool) or truncate < 0 or not whole or truncated >= blocks:
        raise ValueError(
            f"`truncate` is {truncate}; expected a fraction below 1 of the teacher's {blocks} blocks, or a count from "
            f"0 to {blocks - 1}, that leaves at least one."
        )
    # The class may be one of a model's own code.
    needs_classifier = model_class.__name__.endswith("ForImageClassification")
    if needs_classifier and anatomy.classifier is None:
        raise ValueError(
            f"{anatomy.name} has no linear classifier to inherit. Load the teacher with "
            "AutoModelForImageClassification, or use SparseFormerModel.from_teacher for features alone."
        )
    needs_projection = model_class.__name__.endswith("WithProjection")
    if needs_projection and anatomy.projection is None:
        raise ValueError(
            f"{anatomy.name} has no projection to inherit. Load a CLIP as CLIPModel or CLIPVisionModelWithProjection, "
            "or use SparseFormerVisionModel.from_teacher."
        )
    inherited = configuration_fields(anatomy)
    if inherits_patches:
        if check:
            anatomy.check_tokens("inherit the patch embedding of")
        inherited |= patch_fields(anatomy)
    if num_latent_tokens is None:
        num_latent_tokens = default_num_latent_tokens(anatomy, inherits_patches)
    own = {
        "num_latent_tokens": num_latent_tokens,
        "num_hidden_layers": blocks - truncated,
    }
    if not inherits_patches:
        # The papers halve the width from base (768 to 384); heads are 64 wide.
        own |= {"focusing_hidden_size": max(anatomy.hidden_size // 16 * 8, 8), "focusing_layer_norm_eps": FOCUSING_EPS}
    config_class = PatchSparseFormerConfig if inherits_patches and not embeds else model_class.config_class
    config = config_class(**inherited | own | fields)
    if needs_classifier and config.num_labels != len(anatomy.classifier.weight):
        raise ValueError(
            f"The teacher's classifier has {len(anatomy.classifier.weight)} classes, `num_labels` is "
            f"{config.num_labels}. Bootstrap with the teacher's classes first, then fine-tune."
        )
    if check:
        anatomy.check("bootstrap from")
    student = model_class(config).eval()
    base = student.base_model
    if inherit_blocks:
        if anatomy.norm is not None and config.final_norm:
            _load(base.layernorm, anatomy.norm)
        for layer, block in zip(base.layers, anatomy.blocks[truncated:], strict=True):
            layer.load_state_dict(block_weights(block, anatomy))
        if inherits_patches:
            inherit_patches(anatomy, base, truncated)
        elif anatomy.num_register_tokens and config.num_register_tokens == anatomy.num_register_tokens:
            base.latents.register_tokens.copy_(front_of_blank_image(anatomy, truncated)[anatomy.num_class_tokens :])
    if needs_classifier:
        _load(student.classifier, anatomy.classifier)
    if needs_projection:
        student.visual_projection.load_state_dict(_projection_weights("", anatomy.projection, config.projection_bias))
    if anatomy.pooling_head is not None and base.pooling_head is not None:
        base.pooling_head.load_state_dict(_pooling_head_weights(anatomy.pooling_head))
    if check and inherit_blocks and not {*fields} & {*inherited}:
        check_student(anatomy, student)
    if break_ties and not inherits_patches:
        base.latents.break_ties()
    return student


def patch_fields(anatomy: Anatomy) -> dict:
    """Fields of a `PatchSparseFormerConfig` that follow from how a teacher makes tokens of an image."""
    return {
        "patch_size": list(anatomy.patch_size),
        "num_channels": anatomy.patch_embedding.weight.shape[1],
        "patch_norm": anatomy.patch_embedding.norm is not None,
        "embedding_norm": anatomy.pre_norm is not None,
    }


def inherit_patches(anatomy: Anatomy, base: nn.Module, truncated: int):
    """Let a student embed patches as its teacher does, with the positions of a teacher at a lower resolution."""
    sampling, embedding = base.final_focusing_layer.sampling, anatomy.patch_embedding
    weight = spread_weight(embedding.weight, sampling.patch_size, anatomy)
    sampling.projection.load_state_dict(_projection_weights("", Projection(weight.flatten(1), embedding.bias)))
    for norm, source in ((sampling.norm, embedding.norm), (base.embedding_norm, anatomy.pre_norm)):
        if source is not None:
            _load(norm, source)
    _set_positions(base.latents, anatomy)
    front = anatomy.front_tokens()
    if truncated:
        front = front_of_blank_image(anatomy, truncated)
    if anatomy.num_class_tokens:
        base.latents.cls_token.copy_(front[: anatomy.num_class_tokens])
    if anatomy.num_register_tokens:
        base.latents.register_tokens.copy_(front[anatomy.num_class_tokens :])


def spread_weight(weight: torch.Tensor, patch_size: tuple[int, int], anatomy: Anatomy) -> torch.Tensor:
    """Spread a patch embedding's weights, `(hidden_size, channels, rows, columns)`, over patches of more points. Until
    it is trained, the embedding is that of the means over several points.

    Raises:
        ValueError: unless there are a whole number of times as many points.
    """
    factors = [points // size for points, size in zip(patch_size, anatomy.patch_size, strict=True)]
    if any(points % size for points, size in zip(patch_size, anatomy.patch_size, strict=True)):
        raise ValueError(
            f"`patch_size` is {tuple(patch_size)}, expected a multiple of {anatomy.patch_size}, {anatomy.name}'s."
        )
    for dim, factor in zip((2, 3), factors, strict=True):
        weight = weight.repeat_interleave(factor, dim) / factor
    return weight


def _set_positions(part: nn.Module, anatomy: Anatomy):
    positions = [anatomy.positions_of(grid) for grid in getattr(part, "grids", None) or [part.grid]]
    unknown = any(table is None for table in positions)
    part.token_embedding.copy_(torch.zeros_like(part.token_embedding) if unknown else torch.cat(positions))


def default_num_latent_tokens(anatomy: Anatomy, fill_grid: bool = False) -> int:
    """A quarter of the teacher's image tokens, [CLS] counted as the paper does (table 2), unless they fill a grid.

    For a teacher of 384 or more pixels, it is a quarter of the tokens that it would have at 224: the paper's default
    is 49 tokens for ViT-L/16-384, too (144 and 196 are continued bootstrapping). A CLIP ViT-L/14-336 has 144 in table
    6.
    """
    patches = anatomy.num_patches
    if min(anatomy.image_size) >= 384:
        patches = round(patches * (224 / min(anatomy.image_size)) ** 2)
    return max(patches // 4 - (anatomy.num_class_tokens > 0 and not fill_grid), 1)


def front_of_blank_image(anatomy: Anatomy, index: int) -> torch.Tensor:
    """Class tokens and registers before a block, `(prefix tokens, hidden_size)`, in an image of zeros. They differ
    from image to image; a student's are constant, and learned from here."""
    with evaluating(anatomy.model):
        states = anatomy.states(torch.zeros_like(anatomy.example()[:1]))
    return states[index][0, : anatomy.num_prefix_tokens]


def configuration_fields(anatomy: Anatomy) -> dict:
    """Fields of a `SparseFormerBaseConfig` that follow from a teacher.

    Raises:
        ValueError: if its blocks differ from each other, or have activations or norms that a SparseFormer has not.
    """
    block, (height, width) = anatomy.blocks[0], anatomy.image_size
    attention, mlp = block.attention, block.mlp
    for other in anatomy.blocks[1:]:
        shape = (other.attention.num_heads, other.mlp.up.weight.shape, other.mlp.activation)
        if shape != (attention.num_heads, mlp.up.weight.shape, mlp.activation):
            raise anatomy.refusal(
                "bootstrap from", "its blocks differ from each other in heads, widths or activations"
            )
    for name, norm in (("final norm", anatomy.norm), ("norm of queries", attention.query_norm)):
        if norm is not None and norm_type(norm) != norm_type(block.attention_norm):
            raise anatomy.refusal("bootstrap from", f"its {name} is of another kind than those of its blocks")
    fields = {
        "image_size": height if height == width else [height, width],
        "feature_stride": list(anatomy.patch_size),
        "hidden_size": anatomy.hidden_size,
        "intermediate_size": len(mlp.up.weight),
        "num_attention_heads": attention.num_heads,
        "hidden_act": mlp.activation,
        "qkv_bias": _has_qkv_bias(block),
        "gated_mlp": mlp.gate is not None,
        "mlp_norm": mlp.norm is not None,
        "query_key_norm": attention.query_norm is not None,
        "attention_norm": attention.output_norm is not None,
        "norm_type": norm_type(block.attention_norm),
        "layer_norm_eps": norm_eps(block.attention_norm),
        "final_norm": anatomy.norm is not None,
        "use_cls_token": anatomy.num_class_tokens > 0,
        "num_class_tokens": max(anatomy.num_class_tokens, 1),
        "num_register_tokens": anatomy.num_register_tokens,
        "pooling": anatomy.pooling,
        "pooled_class_tokens": anatomy.class_tokens,
        "pool_before_norm": anatomy.pool_before_norm,
    }
    if anatomy.rotary is not None:
        fields |= anatomy.rotary.fields
    if (head := anatomy.pooling_head) is not None:
        fields |= {
            "pooling_num_attention_heads": head.attention.num_heads,
            "pooling_intermediate_size": 0 if head.mlp is None else len(head.mlp.up.weight),
            "pooling_hidden_act": None if head.mlp is None else head.mlp.activation,
        }
    if anatomy.projection is not None:
        fields["projection_dim"] = len(anatomy.projection.weight)
        fields["projection_bias"] = anatomy.projection.bias is not None
    if anatomy.classifier is not None:
        fields |= anatomy.labels or {"num_labels": anatomy.classifier.out_features}
    return fields


def block_weights(block: Block, anatomy: Anatomy | None = None) -> dict[str, torch.Tensor]:
    """Weights of a block under the names of a `SparseFormerLayer` that attends and has an MLP, or, renamed, of any
    other plain pre-norm block."""
    attention, mlp = block.attention, block.mlp
    query, key = attention.query, attention.key
    norms = [attention.query_norm, attention.key_norm]
    weights = {}
    if anatomy is not None and anatomy.rotary is not None:
        order = anatomy.rotary.channels.to(query.weight.device)
        heads = torch.arange(attention.num_heads, device=order.device).unsqueeze(1) * attention.head_dim
        query, key = (_permuted(projection, (heads + order).flatten()) for projection in (query, key))
    else:
        order = slice(None)
    for name, norm in zip(("q_norm", "k_norm"), norms, strict=True):
        if norm is not None:
            weights |= {f"attention.{name}.{part}": tensor[order] for part, tensor in norm.state_dict().items()}
    has_bias = _has_qkv_bias(block)
    for name, projection in (("q_proj", query), ("k_proj", key), ("v_proj", attention.value)):
        weights |= _projection_weights(f"attention.{name}.", projection, has_bias)
    weights |= _projection_weights("attention.o_proj.", _scaled(attention.output, block.attention_scale))
    if mlp.gate is not None:
        weights |= _projection_weights("mlp.gate_proj.", mlp.gate)
    weights |= _projection_weights("mlp.fc1.", mlp.up)
    weights |= _projection_weights("mlp.fc2.", _scaled(mlp.down, block.mlp_scale))
    for name, norm in (
        ("layernorm_before", block.attention_norm),
        ("layernorm_after", block.mlp_norm),
        ("attention.output_norm", attention.output_norm),
        ("mlp.norm", mlp.norm),
    ):
        if norm is not None:
            weights |= {f"{name}.{part}": tensor for part, tensor in _norm_weights(norm).items()}
    return weights


def _has_qkv_bias(block: Block) -> bool:
    attention = block.attention
    return any(projection.bias is not None for projection in (attention.query, attention.key, attention.value))


def _projection_weights(prefix: str, projection: Projection, has_bias: bool = True) -> dict[str, torch.Tensor]:
    """A linear layer without a bias computes the same with a bias of zero."""
    weights = {f"{prefix}weight": projection.weight}
    if has_bias:
        bias = projection.bias
        weights[f"{prefix}bias"] = projection.weight.new_zeros(len(projection.weight)) if bias is None else bias
    return weights


def _permuted(projection: Projection, rows: torch.Tensor) -> Projection:
    return Projection(projection.weight[rows], None if projection.bias is None else projection.bias[rows])


def _scaled(projection: Projection, scale: torch.Tensor | None) -> Projection:
    if scale is None:
        return projection
    return Projection(scale[:, None] * projection.weight, None if projection.bias is None else scale * projection.bias)


def _norm_weights(norm: nn.Module) -> dict[str, torch.Tensor]:
    """Weight, and of a LayerNorm the bias, of norms that may have none."""
    width = norm.weight if norm.weight is not None else torch.ones(norm.normalized_shape)
    weights = {"weight": width}
    if norm_type(norm) == "layer_norm":
        weights["bias"] = width.new_zeros(width.shape) if norm.bias is None else norm.bias
    return weights


def _pooling_head_weights(head: AttentionPooling) -> dict[str, torch.Tensor]:
    weights, attention = {"probe": head.probe}, head.attention
    for name in ("query", "key", "value", "output"):
        weights |= _projection_weights(f"attention.{name[0]}_proj.", getattr(attention, name))
    if head.mlp is not None:
        weights |= {f"layernorm.{part}": tensor for part, tensor in _norm_weights(head.norm).items()}
        weights |= _projection_weights("mlp.fc1.", head.mlp.up) | _projection_weights("mlp.fc2.", head.mlp.down)
    return weights


def _load(module: nn.Module, source: nn.Module):
    """Copy a norm's or linear layer's weights, where the source may have no bias."""
    if isinstance(source, nn.Linear):
        module.load_state_dict(_projection_weights("", Projection.of(source)))
    else:
        module.load_state_dict(_norm_weights(source))


@torch.no_grad()
def student_discrepancies(anatomy: Anatomy, student: nn.Module) -> dict[str, torch.Tensor]:
    """The differences that `check_student` looks at, each the largest relative to the largest value. Student and
    teacher are compared from the first inherited block on: the student's cortex is given the teacher's tokens there,
    at RoIs that are the teacher's patches."""
    base = student.base_model
    device, dtype = base.latents.initial_rois.device, base.latents.token_embedding.dtype
    with evaluating(anatomy.model):
        images = anatomy.example()
        with anatomy.watch() as states:
            embedding = anatomy.embed(images)
        patch_tokens = anatomy.normalize(states[-1])[:, anatomy.num_prefix_tokens :]
    tokens = states[len(states) - 1 - len(base.layers)].to(device, dtype)
    rois = grid_rois(anatomy.grid).to(device).expand(len(tokens), -1, -1)
    final, pooled = base.run_cortex(tokens, rois)
    pooled = getattr(student, "visual_projection", nn.Identity())(pooled)
    embedding = embedding.to(device)
    if pooled.shape != embedding.shape:
        # A bare student of a CLIP stops before the projection.
        pooled = embedding
    return {
        "tokens": difference(final[:, student.config.num_prefix_tokens :], patch_tokens.to(device)),
        "embedding": difference(pooled, embedding),
    }


def check_student(anatomy: Anatomy, student: nn.Module):
    """Raise a ValueError unless a student's inherited part computes what its teacher does."""
    if any(parameter.dtype != torch.float32 for parameter in anatomy.model.parameters()):
        # `Anatomy.check` compared in float32 what was read.
        return
    for what, value in student_discrepancies(anatomy, student).items():
        if not value < TOLERANCE:
            raise ValueError(
                f"Cannot bootstrap from {anatomy.name}: with its own tokens, the student's {what} differ from the "
                f"teacher's (largest relative difference {value:.1e})."
            )
