"""Students that inherit the blocks of a vision transformer (Gao et al., *Bootstrapping SparseFormers from Vision
Foundation Models*, section 3.2), read into an `Anatomy`.

Channels of rotary attention are put into the order in which a SparseFormer rotates them, queries and keys alike, which
leaves their products as they are.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

from .hosts import Anatomy, read_anatomy
from .hosts.anatomy import (
    Attention,
    AttentionPooling,
    Block,
    Linear,
    Projection,
    difference,
    evaluating,
    norm_type,
)
from .hosts.transformers import read_block, read_head
from .image_format import ImageFormat
from .layers import pool_tokens, rotary_embeddings
from .placement import cut_patches, grid_rois


# Largest difference of a student's outputs from its teacher's, relative to their largest value.
TOLERANCE = 1e-4
# What reads the RoIs of tokens has the reference implementation's epsilon, whatever the teacher's is.
FOCUSING_EPS = 1e-5


@torch.no_grad()
def inherit_patches(
    model_class: type,
    teacher: str | nn.Module | Anatomy,
    num_latent_tokens: int | None,
    truncate: float | int,
    image_processor,
    **fields,
) -> nn.Module:
    """`from_teacher` of a PatchSparseFormer's class, which documents it."""
    anatomy, truncated, images = read_teacher(model_class, teacher, truncate, image_processor, patches=True)
    patches = anatomy.patch_embedding
    _, num_channels, *patch_size = patches.weight.shape
    inherited = configuration_fields(anatomy) | {
        "num_latent_tokens": default_num_latent_tokens(anatomy, True)
        if num_latent_tokens is None
        else num_latent_tokens,
        "num_hidden_layers": len(anatomy.blocks) - truncated,
        "num_channels": num_channels,
        "patch_size": patch_size,
        "teacher_config": teacher_config(anatomy),
    }
    inherited["extra_norms"] += ["patch"] if anatomy.patch_norm is not None else []
    inherited["extra_norms"] += ["embedding"] if anatomy.pre_norm is not None else []
    student = new_student(model_class, anatomy, inherited | images | fields, truncated)
    embeddings = student.base_model.embeddings
    load_weights(embeddings.projection, Projection(patches.weight.flatten(1), patches.bias))
    load_weights(embeddings.patch_norm, anatomy.patch_norm)
    load_weights(embeddings.norm, anatomy.pre_norm)
    positions = anatomy.positions_of(student.config.token_grid)
    if positions is None:
        # A grid's stay zero, so that the student goes back into its teacher's class, see `to_plain_vit`.
        embeddings.position_embeddings.zero_().requires_grad_(student.config.placement == "content")
    else:
        embeddings.position_embeddings.copy_(positions)
    front = prefix_tokens_of_blank_image(anatomy, truncated) if truncated else anatomy.prefix_tokens()
    if embeddings.cls_token is not None:
        embeddings.cls_token.copy_(front[: anatomy.num_class_tokens])
    if embeddings.register_tokens is not None:
        embeddings.register_tokens.copy_(front[anatomy.num_class_tokens :])
    if not {*fields} & {*inherited}:
        check_student(student, anatomy, truncated)
    return student


@torch.no_grad()
def inherit_blocks(
    model_class: type,
    teacher: str | nn.Module | Anatomy,
    num_latent_tokens: int | None,
    truncate: float | int,
    inherits: bool,
    break_ties: bool,
    image_processor,
    **fields,
) -> nn.Module:
    """`from_teacher` of a SparseFormer's class, which documents it."""
    anatomy, truncated, images = read_teacher(model_class, teacher, truncate, image_processor)
    inherited = configuration_fields(anatomy) | {
        "num_latent_tokens": default_num_latent_tokens(anatomy) if num_latent_tokens is None else num_latent_tokens,
        "num_hidden_layers": len(anatomy.blocks) - truncated,
        "num_channels": anatomy.num_channels,
        "feature_stride": list(anatomy.patch_size),
        # The papers halve the width from base (768 to 384); heads are 64 wide.
        "focusing_hidden_size": max(anatomy.hidden_size // 16 * 8, 8),
        "focusing_layer_norm_eps": FOCUSING_EPS,
    }
    student = new_student(model_class, anatomy, inherited | images | fields, truncated, inherits)
    latents = student.base_model.latents
    if inherits:
        if latents.register_tokens is not None:
            latents.register_tokens.copy_(prefix_tokens_of_blank_image(anatomy, truncated)[anatomy.num_class_tokens :])
        if not {*fields} & {*inherited}:
            check_student(student, anatomy, truncated)
    if break_ties:
        latents.break_ties()
    return student


def read_teacher(
    model_class: type,
    teacher: str | os.PathLike | nn.Module | Anatomy,
    truncate: float | int,
    image_processor=None,
    patches: bool = False,
) -> tuple[Anatomy, int, dict]:
    """Read a teacher, which a name loads with its image processor, and refuse it unless it is a plain vision
    transformer with an embedding. Return it with the number of leading blocks that are left out and the student's
    fields of preprocessing, unset without a processor."""
    if isinstance(teacher, str | os.PathLike):
        classifies = model_class.__name__.endswith("ForImageClassification")
        image_processor = image_processor or AutoImageProcessor.from_pretrained(teacher)
        auto_class = AutoModelForImageClassification if classifies else AutoModel
        teacher = auto_class.from_pretrained(teacher, dtype=torch.float32)
    if image_processor is None:
        anatomy = read_anatomy(teacher)
        images = {"image_mean": None, "image_std": None}
    else:
        image_format = ImageFormat.from_processor(image_processor)
        anatomy = read_anatomy(teacher, image_format.size)
        images = image_format.config_fields()
    anatomy.require_plain("bootstrap from", embeds=True, patches=patches)
    blocks = len(anatomy.blocks)
    # From 1 on, whole numbers are counts, be they floats or not.
    truncated = round(truncate * blocks) if truncate < 1 else int(truncate)
    whole = truncate < 1 or truncate == truncated
    if isinstance(truncate, bool) or truncate < 0 or not whole or truncated >= blocks:
        raise ValueError(
            f"`truncate` is {truncate}; expected a fraction below 1 of the teacher's {blocks} blocks, or a count from "
            f"0 to {blocks - 1}, that leaves at least one."
        )
    return anatomy, truncated, images


def new_student(model_class: type, anatomy: Anatomy, fields: dict, truncated: int, inherits: bool = True) -> nn.Module:
    """Make a student with the classifier, projection and pooling head of its teacher and, if it `inherits` them, its
    blocks without the leading ones and its final norm; all else has fresh weights."""
    needs_classifier = model_class.__name__.endswith("ForImageClassification")
    needs_projection = model_class.__name__.endswith("WithProjection")
    if needs_classifier and anatomy.classifier is None:
        raise ValueError(
            f"{anatomy.name} has no linear classifier to inherit. Load the teacher with "
            "AutoModelForImageClassification, or make a model for features alone."
        )
    if needs_projection and anatomy.projection is None:
        raise ValueError(
            f"{anatomy.name} has no projection to inherit. Load a CLIP as CLIPModel or CLIPVisionModelWithProjection, "
            "or make a VisionModel without projection."
        )
    if needs_projection:
        projection = anatomy.projection
        fields = {"projection_dim": len(projection.weight), "projection_bias": projection.bias is not None} | fields
    config = model_class.config_class(**fields)
    if needs_classifier and config.num_labels != len(anatomy.classifier.weight):
        raise ValueError(
            f"The teacher's classifier has {len(anatomy.classifier.weight)} classes, `num_labels` is "
            f"{config.num_labels}. Bootstrap with the teacher's classes first, then fine-tune."
        )
    student = model_class(config).eval()
    if needs_classifier:
        load_weights(student.classifier, anatomy.classifier)
    if needs_projection:
        load_weights(student.visual_projection, anatomy.projection)
    if anatomy.pooling_head is not None and student.base_model.pooling_head is not None:
        load_pooling(read_head(student.base_model.pooling_head), anatomy.pooling_head)
    if inherits:
        load_weights(student.base_model.layernorm, anatomy.norm)
        channels = None if anatomy.rotary is None else anatomy.rotary.channels
        for layer, block in zip(student.base_model.layers, anatomy.blocks[truncated:], strict=True):
            load_block(read_block(layer), block, channels)
    return student


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


def configuration_fields(anatomy: Anatomy) -> dict:
    """Fields of a `SparseFormerBaseConfig` that follow from a teacher. Raise a ValueError if its blocks differ from
    each other, or have activations or norms that a SparseFormer has not."""
    height, width = anatomy.image_size
    block = anatomy.blocks[0]
    attention = block.attention
    mlp = block.mlp
    for other in anatomy.blocks[1:]:
        shape = (other.attention.num_heads, other.mlp.up.weight.shape, other.mlp.activation)
        if shape != (attention.num_heads, mlp.up.weight.shape, mlp.activation):
            raise anatomy.refusal(
                "bootstrap from", "its blocks differ from each other in heads, widths or activations"
            )
    for name, norm in (("final norm", anatomy.norm), ("norm of queries", attention.query_norm)):
        if norm is not None and norm_type(norm) != norm_type(block.attention_norm):
            raise anatomy.refusal("bootstrap from", f"its {name} is of another kind than those of its blocks")
    # Of any library's norm; PyTorch's RMSNorm has None by default.
    eps = getattr(block.attention_norm, "eps", getattr(block.attention_norm, "variance_epsilon", None))
    extra_norms = {"query_key": attention.query_norm, "attention": attention.output_norm, "mlp": mlp.norm}
    fields = {
        "image_size": height if height == width else [height, width],
        "hidden_size": anatomy.hidden_size,
        "intermediate_size": len(mlp.up.weight),
        "num_attention_heads": attention.num_heads,
        "hidden_act": mlp.activation,
        "gated_mlp": mlp.gate is not None,
        "layer_scale": block.attention_scale is not None,
        "norm_type": norm_type(block.attention_norm),
        "layer_norm_eps": torch.finfo(torch.float32).eps if eps is None else eps,
        "extra_norms": [name for name, norm in extra_norms.items() if norm is not None],
        "final_norm": "after_pooling" if anatomy.pool_before_norm else "before_pooling",
        "num_class_tokens": anatomy.num_class_tokens,
        "num_register_tokens": anatomy.num_register_tokens,
        "pooling": anatomy.pooling,
        "pooled_class_tokens": anatomy.class_tokens,
    }
    if anatomy.norm is None:
        fields["final_norm"] = None
    if anatomy.rotary is not None:
        fields |= anatomy.rotary.fields
    if (head := anatomy.pooling_head) is not None:
        fields |= {
            "pooling_num_attention_heads": head.attention.num_heads,
            "pooling_intermediate_size": 0 if head.mlp is None else len(head.mlp.up.weight),
        }
        if head.mlp is not None and head.mlp.activation != mlp.activation:
            raise anatomy.refusal("bootstrap from", "the MLP of its pooling has another activation than its blocks'")
    if anatomy.classifier is not None:
        fields |= anatomy.labels or {"num_labels": anatomy.classifier.out_features}
    return fields


def teacher_config(anatomy: Anatomy) -> dict | None:
    """Fields of the configuration of a teacher of Transformers that differ from its class's defaults, without labels;
    None for a teacher of another library."""
    config = getattr(anatomy.model, "config", None)
    if not type(config).__module__.startswith("transformers."):
        return None
    left_out = ("_name_or_path", "architectures", "dtype", "id2label", "label2id", "out_features", "out_indices")
    left_out += ("problem_type", "stage_names", "transformers_version")
    defaults = type(config)().to_dict()
    fields = {name: value for name, value in config.to_dict().items() if value != defaults.get(name)}
    fields = {name: value for name, value in fields.items() if name not in left_out}
    return fields | {"model_type": config.model_type}


def prefix_tokens_of_blank_image(anatomy: Anatomy, index: int) -> torch.Tensor:
    """Class tokens and registers before a block, `(prefix tokens, hidden_size)`, in an image of zeros. They differ
    from image to image; a student's are constant, and learned from here."""
    with evaluating(anatomy.model):
        states = anatomy.states(torch.zeros_like(anatomy.example()[:1]))
    return states[index][0, : anatomy.num_prefix_tokens]


def load_block(target: Block, source: Block, channels: torch.Tensor | None = None):
    """Copy a block's weights into another one of its shape. `channels` is the order of each head's channels of queries
    and keys, where they are rotated."""
    load_weights(target.attention_norm, source.attention_norm)
    load_attention(target.attention, source.attention, channels)
    load_weights(target.mlp_norm, source.mlp_norm)
    if source.mlp.gate is not None:
        load_weights(target.mlp.gate, source.mlp.gate)
    load_weights(target.mlp.up, source.mlp.up)
    load_weights(target.mlp.norm, source.mlp.norm)
    load_weights(target.mlp.down, source.mlp.down)
    for name in ("attention_scale", "mlp_scale"):
        if (scale := getattr(target, name)) is not None:
            scale.copy_(torch.ones_like(scale) if getattr(source, name) is None else getattr(source, name))


def load_attention(target: Attention, source: Attention, channels: torch.Tensor | None = None):
    """Copy the weights of an attention; arguments as of `load_block`."""
    query = source.query
    key = source.key
    if channels is not None:
        channels = channels.to(query.weight.device)
        heads = torch.arange(source.num_heads, device=channels.device).unsqueeze(1) * source.head_dim
        rows = (heads + channels).flatten()
        query, key = (
            Projection(each.weight[rows], None if each.bias is None else each.bias[rows]) for each in (query, key)
        )
    load_weights(target.query, query)
    load_weights(target.key, key)
    load_weights(target.value, source.value)
    load_weights(target.output, source.output)
    load_weights(target.output_norm, source.output_norm)
    load_weights(target.query_norm, source.query_norm, channels)
    load_weights(target.key_norm, source.key_norm, channels)


def load_pooling(target: AttentionPooling, source: AttentionPooling):
    """Copy the weights of attention pooling."""
    target.probe.copy_(source.probe)
    load_attention(target.attention, source.attention)
    if source.mlp is not None:
        load_weights(target.norm, source.norm)
        load_weights(target.mlp.up, source.mlp.up)
        load_weights(target.mlp.down, source.mlp.down)


def load_weights(
    target: Linear | nn.Module | None, source: Linear | nn.Module | None, channels: torch.Tensor | None = None
):
    """Copy the weight and bias of a linear layer or a norm, in the order of `channels`; what a source lacks becomes 1
    and 0. Nothing is copied without a source or a target."""
    if target is None or source is None:
        return
    order = slice(None) if channels is None else channels
    for name, missing in (("weight", 1.0), ("bias", 0.0)):
        if (tensor := getattr(target, name, None)) is not None:
            value = getattr(source, name, None)
            tensor.copy_(torch.full_like(tensor, missing) if value is None else value[order])


def check_student(student: nn.Module, anatomy: Anatomy, truncated: int):
    """Raise a ValueError unless a student's inherited part embeds two images of noise as its teacher does: given all
    of the teacher's patches or, without its first blocks, the tokens after those."""
    if any(parameter.dtype != torch.float32 for parameter in anatomy.model.parameters()):
        return
    base = student.base_model
    device = base.layernorm.weight.device if anatomy.norm is not None else next(base.parameters()).device
    with evaluating(anatomy.model):
        images = anatomy.example()
        with anatomy.record_hidden_states() as states:
            expected = anatomy.embed(images).to(device)
    tokens = states[truncated].to(device)
    if truncated == 0 and hasattr(base, "embeddings"):
        embeddings = base.embeddings
        tokens = embeddings.projection(cut_patches(images.to(device), embeddings.patch_size).flatten(1, 2))
        tokens = embeddings.patch_norm(tokens)
        if (positions := anatomy.positions_of(anatomy.grid)) is not None:
            tokens = tokens + positions.to(device)
        front = anatomy.prefix_tokens().to(device).expand(len(tokens), -1, -1)
        tokens = embeddings.norm(torch.cat([front, tokens], dim=1))
    rois = grid_rois(anatomy.grid).to(device).expand(len(tokens), -1, -1)
    position_embeddings = rotary_embeddings(base.config, rois)
    for layer in base.layers:
        tokens = layer(tokens, position_embeddings=position_embeddings)
    found = pool_tokens(
        tokens,
        anatomy.pooling,
        base.layernorm,
        anatomy.num_prefix_tokens,
        anatomy.class_tokens or range(anatomy.num_class_tokens),
        anatomy.pool_before_norm,
        base.pooling_head,
    )
    if hasattr(student, "visual_projection"):
        found = student.visual_projection(found)
    elif anatomy.projection is not None:
        found = F.linear(found, anatomy.projection.weight, anatomy.projection.bias)
    if not difference(found, expected) < TOLERANCE:
        raise ValueError(
            f"Cannot bootstrap from {anatomy.name}: the student's embedding of the teacher's own tokens differs from "
            f"the teacher's (largest relative difference {difference(found, expected):.1e}). Expected a plain "
            "pre-norm vision transformer; docs/models.md lists them."
        )
