"""Implementation of `from_teacher`, which makes students that inherit the blocks of a vision transformer.

Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models* (CVPR 2024), section 3.2. If the teacher has
rotary positions, the channels of its queries and keys are permuted to the order in which a SparseFormer rotates them.
Queries and keys have the same permutation, so that their products do not change.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

from .hosts import Anatomy, read_anatomy
from .hosts.anatomy import AttentionPooling, Block, GridPositions, Linear, Projection
from .hosts.running import (
    compute_hidden_states,
    evaluation_mode,
    make_example,
    record_hidden_states,
    relative_difference,
)
from .hosts.transformers import read_block, read_head
from .image_format import ImageFormat
from .layers import rotary_embeddings
from .placement import cut_patches, grid_rois


# Largest `relative_difference` between the outputs of a student and its teacher that `check_student` accepts.
TOLERANCE = 1e-4
# Epsilon of the norms in focusing layers, as in the SparseFormer authors' code. The teacher's epsilon may differ.
FOCUSING_EPS = 1e-5
# Fields of a teacher's configuration that a student's `teacher_config` leaves out.
OMITTED_FIELDS = (
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "out_features",
    "out_indices",
    "problem_type",
    "stage_names",
    "transformers_version",
)


@torch.no_grad()
def inherit_patches(
    model_class: type,
    teacher: str | nn.Module | Anatomy,
    num_latent_tokens: int | None,
    truncate: float | int,
    image_processor,
    **fields,
) -> nn.Module:
    """Return a student with its teacher's patch embedding, positions, blocks and head. This function implements
    `PatchSparseFormerModel.from_teacher`, which documents the arguments."""
    anatomy, truncated, image_fields = read_teacher(model_class, teacher, truncate, image_processor, patches=True)
    projection = anatomy.patches.projection
    hidden_size, num_channels, *patch_size = projection.weight.shape
    teacher_config = None
    config = getattr(anatomy.model, "config", None)
    if type(config).__module__.startswith("transformers."):
        defaults = type(config)().to_dict()
        changed = {name: value for name, value in config.to_dict().items() if value != defaults.get(name)}
        teacher_config = {name: value for name, value in changed.items() if name not in OMITTED_FIELDS}
        teacher_config["model_type"] = config.model_type
    if num_latent_tokens is None:
        num_latent_tokens = default_num_latent_tokens(anatomy, fill_grid=True)
    inherited = configuration_fields(anatomy) | {
        "num_latent_tokens": num_latent_tokens,
        "num_hidden_layers": len(anatomy.blocks) - truncated,
        "num_channels": num_channels,
        "patch_size": patch_size,
        "teacher_config": teacher_config,
    }
    if anatomy.patches.norm is not None:
        inherited["extra_norms"].append("patch")
    if anatomy.pre_norm is not None:
        inherited["extra_norms"].append("embedding")
    student = new_student(model_class, anatomy, inherited | image_fields | fields, truncated)
    embeddings = student.base_model.embeddings
    load_weights(embeddings.projection, Projection(projection.weight.flatten(1), projection.bias))
    load_weights(embeddings.patch_norm, anatomy.patches.norm)
    load_weights(embeddings.norm, anatomy.pre_norm)
    if anatomy.patch_positions is None:
        # The teacher adds no positions. Only with `placement="content"`, the student's positions are trained, because
        # `to_plain_vit` could not store trained positions in a model of the teacher's class.
        embeddings.position_embeddings.zero_().requires_grad_(student.config.placement == "content")
    else:
        embeddings.position_embeddings.copy_(anatomy.patch_positions(student.config.token_grid))
    if truncated:
        prefix = blank_image_prefix(anatomy, truncated)
    else:
        # Tokens with positions. The student applies the teacher's `pre_norm` itself.
        prefix = projection.weight.new_zeros(0, hidden_size)
        prefix = torch.cat([prefix, *(token.reshape(-1, hidden_size) for token in anatomy.prefix_tokens)])
        if isinstance(anatomy.patch_positions, GridPositions):
            positions = anatomy.patch_positions.table.flatten(0, -2)[: -math.prod(anatomy.patch_positions.grid)]
            prefix[: len(positions)] += positions
    if embeddings.cls_token is not None:
        embeddings.cls_token.copy_(prefix[: anatomy.num_class_tokens])
    if embeddings.register_tokens is not None:
        embeddings.register_tokens.copy_(prefix[anatomy.num_class_tokens :])
    check_student(student, anatomy, truncated, inherited, fields)
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
    """Return a student with its teacher's blocks and head, and with a new focusing stage. This function implements
    `SparseFormerModel.from_teacher`, which documents the arguments. The argument `inherits` of this function is the
    argument `inherit_blocks` of `from_teacher`."""
    anatomy, truncated, image_fields = read_teacher(model_class, teacher, truncate, image_processor)
    if num_latent_tokens is None:
        num_latent_tokens = default_num_latent_tokens(anatomy)
    inherited = configuration_fields(anatomy)
    inherited |= {
        "num_latent_tokens": num_latent_tokens,
        "num_hidden_layers": len(anatomy.blocks) - truncated,
        "num_channels": anatomy.num_channels,
        "feature_stride": list(anatomy.patch_size),
        # Half the encoder's width, rounded down to a multiple of 8. The SparseFormer papers use 384 for an encoder of
        # width 768.
        "focusing_hidden_size": max(inherited["hidden_size"] // 16 * 8, 8),
        "focusing_layer_norm_eps": FOCUSING_EPS,
    }
    student = new_student(model_class, anatomy, inherited | image_fields | fields, truncated, inherits)
    latents = student.base_model.latents
    if inherits:
        if latents.register_tokens is not None:
            prefix = blank_image_prefix(anatomy, truncated)
            latents.register_tokens.copy_(prefix[anatomy.num_class_tokens :])
        check_student(student, anatomy, truncated, inherited, fields)
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
    """Read a teacher. If `teacher` is a folder or hub id, load the model and its image processor.

    Returns:
        The teacher's `Anatomy`, the number of leading blocks that the student leaves out, and the preprocessing fields
        of the student's configuration.

    Raises:
        ValueError: if the teacher is not supported or `truncate` is out of range.
    """
    if isinstance(teacher, str | os.PathLike):
        classifies = model_class.__name__.endswith("ForImageClassification")
        image_processor = image_processor or AutoImageProcessor.from_pretrained(teacher)
        auto_class = AutoModelForImageClassification if classifies else AutoModel
        teacher = auto_class.from_pretrained(teacher, dtype=torch.float32)
    if image_processor is None:
        anatomy = read_anatomy(teacher)
        image_fields = {"image_mean": None, "image_std": None}
    else:
        image_format = ImageFormat.from_processor(image_processor)
        anatomy = read_anatomy(teacher, image_format.size)
        image_fields = image_format.config_fields()
    anatomy.require_plain("bootstrap from", embeds=True, patches=patches)
    blocks = len(anatomy.blocks)
    # If `truncate` is at least 1, it is a number of blocks: 1.0 is one block, and 1.5 is an error.
    is_whole = truncate < 1 or truncate == int(truncate)
    truncated = round(truncate * blocks) if truncate < 1 else int(truncate)
    if isinstance(truncate, bool) or truncate < 0 or not is_whole or truncated >= blocks:
        raise ValueError(
            f"`truncate` is {truncate}, expected a fraction from 0 to below 1 of the teacher's {blocks} blocks, or a "
            f"count from 0 to {blocks - 1}; at least one block has to stay."
        )
    return anatomy, truncated, image_fields


def new_student(model_class: type, anatomy: Anatomy, fields: dict, truncated: int, inherits: bool = True) -> nn.Module:
    """Return a student with its teacher's classifier, projection and pooling head. With `inherits`, the student also
    has the teacher's final norm and all but the first `truncated` blocks. Other weights are new."""
    needs_classifier = model_class.__name__.endswith("ForImageClassification")
    needs_projection = model_class.__name__.endswith("WithProjection")
    if needs_classifier and anatomy.classifier is None:
        raise ValueError(
            f"{anatomy.name} has no linear classifier to inherit. Load the teacher with "
            "AutoModelForImageClassification, or make a VisionModel, which needs no classifier."
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
            f"`num_labels` is {config.num_labels}, but the teacher's classifier has {len(anatomy.classifier.weight)} "
            "classes. Bootstrap with the teacher's classes, then fine-tune."
        )
    student = model_class(config).eval()
    if needs_classifier:
        load_weights(student.classifier, anatomy.classifier)
    if needs_projection:
        load_weights(student.visual_projection, anatomy.projection)
    if anatomy.pooling.head is not None and student.base_model.pooling_head is not None:
        load_pooling(read_head(student.base_model.pooling_head), anatomy.pooling.head)
    if inherits:
        load_weights(student.base_model.layernorm, anatomy.norm)
        channels = None if anatomy.rotary is None else anatomy.rotary.channels
        for layer, block in zip(student.base_model.layers, anatomy.blocks[truncated:], strict=True):
            load_block(read_block(layer), block, channels)
    return student


def default_num_latent_tokens(anatomy: Anatomy, fill_grid: bool = False) -> int:
    """Return the default number of a student's latent tokens, a quarter of the teacher's patches.

    If the teacher has a class token and `fill_grid` is False, the default is one less, because the bootstrapping paper
    (Gao et al., CVPR 2024) counts [CLS] as a token. If both sides of the images have at least 384 pixels, patches are
    counted as in an image of 224 pixels, because the paper's student of ViT-L/16-384 has 49 tokens with [CLS].
    """
    patches = anatomy.num_patches
    if min(anatomy.image_size) >= 384:
        patches = round(patches * (224 / min(anatomy.image_size)) ** 2)
    counts_class_token = anatomy.num_class_tokens > 0 and not fill_grid
    return max(patches // 4 - int(counts_class_token), 1)


def configuration_fields(anatomy: Anatomy) -> dict:
    """Return the fields of a `SparseFormerBaseConfig` that depend on the teacher. Raise a ValueError if the teacher's
    blocks differ in shape, or if its norms or activations differ in kind."""
    height, width = anatomy.image_size
    block = anatomy.blocks[0]
    attention = block.attention
    mlp = block.mlp
    pooling = anatomy.pooling
    head = pooling.head
    shapes = {(each.attention.num_heads, each.mlp.up.weight.shape, each.mlp.activation) for each in anatomy.blocks}
    norms = [norm for norm in (anatomy.norm, attention.query_norm) if norm is not None]
    has_layer_norm = isinstance(block.attention_norm, nn.LayerNorm)
    for reason, applies in (
        ("its blocks differ from each other in heads, widths or activations", len(shapes) > 1),
        (
            "its final norm or norm of queries is of another kind than its blocks' norms",
            any(isinstance(norm, nn.LayerNorm) != has_layer_norm for norm in norms),
        ),
        (
            "the MLP of its pooling has another activation than its blocks",
            head is not None and head.mlp is not None and head.mlp.activation != mlp.activation,
        ),
    ):
        if applies:
            raise anatomy.unsupported_error("bootstrap from", reason)
    # Transformers' RMSNorms have `variance_epsilon`. In PyTorch's RMSNorm, `eps=None` means the machine epsilon.
    eps = getattr(block.attention_norm, "eps", getattr(block.attention_norm, "variance_epsilon", None))
    extra_norms = {"query_key": attention.query_norm, "attention": attention.output_norm, "mlp": mlp.norm}
    final_norm = "after_pooling" if pooling.before_norm else "before_pooling"
    fields = {
        "image_size": height if height == width else [height, width],
        "hidden_size": attention.query.weight.shape[1],
        "intermediate_size": len(mlp.up.weight),
        "num_attention_heads": attention.num_heads,
        "hidden_act": mlp.activation,
        "gated_mlp": mlp.gate is not None,
        "layer_scale": block.attention_scale is not None,
        "norm_type": "layer_norm" if has_layer_norm else "rms_norm",
        "layer_norm_eps": torch.finfo(torch.float32).eps if eps is None else eps,
        "extra_norms": [name for name, norm in extra_norms.items() if norm is not None],
        "final_norm": None if anatomy.norm is None else final_norm,
        "num_class_tokens": anatomy.num_class_tokens,
        "num_register_tokens": anatomy.num_register_tokens,
        "pooling": pooling.mode,
        "pooled_class_tokens": pooling.class_tokens,
    }
    if anatomy.rotary is not None:
        fields |= anatomy.rotary.config_fields
    if head is not None:
        fields["pooling_num_attention_heads"] = head.attention.num_heads
        fields["pooling_intermediate_size"] = 0 if head.mlp is None else len(head.mlp.up.weight)
    if anatomy.classifier is not None:
        fields |= anatomy.labels or {"num_labels": anatomy.classifier.out_features}
    return fields


def blank_image_prefix(anatomy: Anatomy, index: int) -> torch.Tensor:
    """Return a teacher's class tokens and registers before block `index`, `(prefix tokens, hidden_size)`, for an image
    of zeros. A student stores these tokens as parameters, so they are the same for all images. After the
    first block, the teacher's own class tokens and registers depend on the image."""
    with evaluation_mode(anatomy.model):
        hidden_states = compute_hidden_states(anatomy, torch.zeros_like(make_example(anatomy)[:1]))
    return hidden_states[index][0, : anatomy.num_prefix_tokens]


def load_block(target: Block, source: Block, channels: torch.Tensor | None = None):
    """Copy the weights of a block into another block of equal shape. `channels`, `(head_dim,)`, permutes the channels
    of each head's queries and keys, see `Rotary`."""
    rows = None
    if channels is not None:
        channels = channels.to(source.attention.query.weight.device)
        heads = torch.arange(source.attention.num_heads, device=channels.device).unsqueeze(1)
        rows = (heads * source.attention.head_dim + channels).flatten()
    load_weights(target.attention_norm, source.attention_norm)
    load_weights(target.attention.query, source.attention.query, rows)
    load_weights(target.attention.key, source.attention.key, rows)
    load_weights(target.attention.value, source.attention.value)
    load_weights(target.attention.query_norm, source.attention.query_norm, channels)
    load_weights(target.attention.key_norm, source.attention.key_norm, channels)
    load_weights(target.attention.output_norm, source.attention.output_norm)
    load_weights(target.attention.output, source.attention.output)
    load_weights(target.mlp_norm, source.mlp_norm)
    load_weights(target.mlp.gate, source.mlp.gate)
    load_weights(target.mlp.up, source.mlp.up)
    load_weights(target.mlp.norm, source.mlp.norm)
    load_weights(target.mlp.down, source.mlp.down)
    for name in ("attention_scale", "mlp_scale"):
        target_scale = getattr(target, name)
        source_scale = getattr(source, name)
        if target_scale is not None:
            target_scale.copy_(torch.ones_like(target_scale) if source_scale is None else source_scale)


def load_pooling(target: AttentionPooling, source: AttentionPooling):
    """Copy the weights of attention pooling."""
    target.probe.copy_(source.probe)
    for name in ("query", "key", "value", "output"):
        load_weights(getattr(target.attention, name), getattr(source.attention, name))
    if source.mlp is not None:
        load_weights(target.norm, source.norm)
        load_weights(target.mlp.up, source.mlp.up)
        load_weights(target.mlp.down, source.mlp.down)


def load_weights(
    target: Linear | nn.Module | None, source: Linear | nn.Module | None, channels: torch.Tensor | None = None
):
    """Copy the weight and bias of a linear layer or a norm. `channels` are the source's output channels in the order
    of the target. If the source has no weight, the target's weight becomes 1. If the source has no bias, the target's
    bias becomes 0. Nothing is copied if `target` or `source` is None."""
    if target is None or source is None:
        return
    for name, default in (("weight", 1.0), ("bias", 0.0)):
        parameter = getattr(target, name, None)
        value = getattr(source, name, None)
        if parameter is None:
            continue
        if value is None:
            parameter.fill_(default)
        else:
            parameter.copy_(value if channels is None else value[channels])


def check_student(student: nn.Module, anatomy: Anatomy, truncated: int, inherited: dict, fields: dict):
    """Raise a ValueError if a student's inherited layers and its teacher return different embeddings of noise images.
    Do nothing if `fields` has other values than `inherited`, the teacher's configuration.

    The input of the inherited layers is all patches of the images. If leading blocks were truncated, or the student
    has no patch embedding, the input is the teacher's tokens before the first inherited block.
    """
    if any(inherited.get(name, value) != value for name, value in fields.items()):
        return
    if any(parameter.dtype != torch.float32 for parameter in anatomy.model.parameters()):
        return
    base = student.base_model
    device = next(base.parameters()).device
    with evaluation_mode(anatomy.model):
        images = make_example(anatomy)
        with record_hidden_states(anatomy) as hidden_states:
            expected = anatomy.embed(images).to(device)
    if truncated == 0 and hasattr(base, "embeddings"):
        patches = cut_patches(images.to(device), base.embeddings.patch_size).flatten(1, 2)
        positions = torch.zeros(()) if anatomy.patch_positions is None else anatomy.patch_positions(anatomy.grid)
        tokens = base.embeddings.embed(patches, positions.to(patches))
    else:
        tokens = hidden_states[truncated].to(device)
    rois = grid_rois(anatomy.grid).to(device).expand(len(tokens), -1, -1)
    position_embeddings = None if base.config.rope_theta is None else rotary_embeddings(base.config, rois)
    for layer in base.layers:
        tokens = layer(tokens, position_embeddings=position_embeddings)
    found = base.pooler(tokens, base.layernorm, base.pooling_head)
    if hasattr(student, "visual_projection"):
        found = student.visual_projection(found)
    elif anatomy.projection is not None:
        found = F.linear(found, anatomy.projection.weight, anatomy.projection.bias)
    difference = relative_difference(found, expected)
    if not difference < TOLERANCE:
        raise ValueError(
            f"Cannot bootstrap from {anatomy.name}: the student's embedding of the teacher's own tokens differs from "
            f"the teacher's (largest relative difference {difference:.1e}). Expected a plain pre-norm vision "
            "transformer; docs/models.md lists them."
        )
