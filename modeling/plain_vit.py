"""Conversion of a PatchSparseFormer to a plain vision transformer of Transformers.

The student's tokens must be the cells of a grid. The student resizes each image so that each cell becomes a patch. A
model of the teacher's class can compute the student's outputs from the resized images. Such a model is called the
host. `to_plain_vit` builds a host for the size of the resized images. Then it copies the student's weights into the
modules that `read_anatomy` finds in the host.
"""

import copy
import inspect
import math
import os

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    CLIPVisionModelWithProjection,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..configuration.configuration_base import pair
from .hosts import Anatomy, read_anatomy
from .hosts.anatomy import GridPositions, Projection
from .hosts.running import evaluation_mode, make_example, relative_difference
from .hosts.transformers import read_block, read_head
from .inheritance import TOLERANCE, load_block, load_pooling, load_weights
from .layers import check_num_tokens


SHARED_FIELDS = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "num_attention_heads",
    "num_channels",
    "num_hidden_layers",
)
# Configuration fields that add a bias to a host. All are set to `True`, because a student has all of these biases.
BIASES = ("attention_bias", "key_bias", "mlp_bias", "proj_bias", "qkv_bias", "query_bias", "value_bias")
# Model types of hosts that accept rectangular images. Hosts of all other types accept only square images.
TAKES_RECTANGLES = ("deit", "dinov3_vit", "ijepa", "vit", "vit_mae", "vit_msn")


@torch.no_grad()
def to_plain_vit(
    student: PreTrainedModel, num_tokens: int | None, like: PreTrainedConfig | str | os.PathLike | None
) -> PreTrainedModel:
    """Convert a student to a model of its teacher's class. `PatchSparseFormerModel.to_plain_vit` calls this function
    and documents the arguments."""
    config = student.config
    if config.placement == "content":
        raise ValueError(
            "`placement` is 'content', expected 'grid': a plain ViT has no tokens for cells of several sizes."
        )
    if not type(student).__name__.endswith(("ForImageClassification", "Model", "WithProjection")):
        raise ValueError(f"Got a {type(student).__name__}, expected a classifier or a vision model.")
    count = config.default_num_tokens if num_tokens is None else check_num_tokens(config, num_tokens)
    if like is None and config.teacher_config is None:
        raise ValueError(
            "The student's configuration has no `teacher_config`, because its teacher is no Transformers model; give "
            "`like`, the configuration of a model of Transformers with the teacher's architecture."
        )
    if like is None:
        like = AutoConfig.for_model(**config.teacher_config)
    elif not isinstance(like, PreTrainedConfig):
        like = AutoConfig.from_pretrained(like)
    host_config = copy.deepcopy(getattr(like, "vision_config", like))
    model_type = host_config.model_type
    grid = config.grid_of(count)
    check_grid(config, grid, model_type)
    set_fields(host_config, student, grid)
    try:
        host = build_host(student, host_config).to(student.device, student.dtype).eval()
        anatomy = read_anatomy(host)
        copy_weights(student, anatomy, grid)
        if student.dtype == torch.float32:
            check_host(student, anatomy, count)
    # These errors occur if the host has another architecture than the student.
    except (AttributeError, RuntimeError, StrictDataclassError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"The student's weights do not fit a {model_type}: {reason}. Expected its teacher's architecture."
        ) from error
    return host


def check_grid(config: PreTrainedConfig, grid: tuple[int, int], model_type: str):
    """Raise a ValueError if `grid` is not square and models of type `model_type` accept only square images."""
    rows, columns = grid
    if rows == columns or model_type in TAKES_RECTANGLES:
        return
    squares = []
    height, width = pair(config.image_size)
    # In longer images, no square grid has nearly square cells.
    if max(height, width) <= 2 * min(height, width):
        sides = range(1, math.isqrt(config.num_latent_tokens) + 1)
        squares = [side * side for side in sides if config.grid_of(side * side) == (side, side)]
    raise ValueError(
        f"`num_tokens` is {rows * columns}, a grid of {rows} x {columns}, but a {model_type} takes square grids "
        f"alone; expected one of {', '.join(map(str, squares))}."
    )


def set_fields(host_config: PreTrainedConfig, student: PreTrainedModel, grid: tuple[int, int]):
    """Adapt a host's configuration to a student, in place. With the new image size, an image has `grid[0]` rows
    and `grid[1]` columns of patches."""
    config = student.config
    patch_size = pair(config.patch_size)
    image_size = (grid[0] * patch_size[0], grid[1] * patch_size[1])
    has_head = student.base_model.pooling_head is not None
    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    fields |= dict.fromkeys(BIASES, True)
    # The pooling head of AIMv2 and SigLIP is optional. With `is_native=False`, AIMv2 has learned positions.
    fields |= {"use_head": has_head, "vision_use_head": has_head, "is_native": False}
    # The configuration of SigLIP 2 NaFlex has a number of patches instead of an image size.
    fields["num_patches"] = math.prod(grid)
    # The normalization of pixels in C-RADIO is disabled, because the student's weights include it.
    fields |= {"max_img_size": max(image_size)}
    fields |= {"norm_mean": [0.0] * config.num_channels, "norm_std": [1.0] * config.num_channels}
    # By default, ViTMAE would mask patches.
    fields["mask_ratio"] = 0.0
    for name, size in (("patch_size", patch_size), ("image_size", image_size)):
        keeps_pair = isinstance(getattr(host_config, name, None), list | tuple) or size[0] != size[1]
        fields[name] = list(size) if keeps_pair else size[0]
    for name, value in fields.items():
        if hasattr(host_config, name):
            setattr(host_config, name, value)


def build_host(student: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a new host, with a classifier or a projection if the student has a classifier or a projection."""
    if hasattr(student, "visual_projection"):
        if config.model_type != "clip_vision_model":
            raise ValueError(f"Transformers has no {config.model_type} with a projection; expected clip_vision_model.")
        config.projection_dim = student.config.projection_dim
        return CLIPVisionModelWithProjection(config)
    if not hasattr(student, "classifier"):
        host_class = MODEL_MAPPING[type(config)]
        if "add_pooling_layer" in inspect.signature(host_class).parameters:
            return host_class(config, add_pooling_layer=False)
        return host_class(config)
    family = config.model_type.removesuffix("_vision_model")
    if family != config.model_type:
        config = AutoConfig.for_model(family, vision_config=config.to_dict())
    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise ValueError(f"Transformers has no image classifier for {config.model_type}.")
    for name in ("id2label", "label2id", "problem_type"):
        setattr(config, name, getattr(student.config, name))
    host_class = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
    # For DeiT and others, `host_class` is a tuple of classes. The first class has a single classifier.
    if isinstance(host_class, tuple):
        host_class = host_class[0]
    return host_class(config)


def copy_weights(student: PreTrainedModel, anatomy: Anatomy, grid: tuple[int, int]):
    """Copy a student's weights into the modules of a host. In the host, an image has `grid[0]` rows and `grid[1]`
    columns of patches."""
    base = student.base_model
    embeddings = base.embeddings
    if anatomy.num_prefix_tokens != student.config.num_prefix_tokens:
        raise ValueError(
            f"The student has {student.config.num_prefix_tokens} class tokens and registers, a {anatomy.name} has "
            f"{anatomy.num_prefix_tokens}; expected its teacher's architecture."
        )
    projection = embeddings.projection
    patches = anatomy.patches.projection
    load_weights(patches, Projection(projection.weight.view(patches.weight.shape), projection.bias))
    load_weights(anatomy.patches.norm, embeddings.patch_norm)
    load_weights(anatomy.pre_norm, embeddings.norm)
    positions = embeddings.positions_of(grid)
    if patches.bias is None:
        positions = positions + projection.bias
    if isinstance(anatomy.patch_positions, GridPositions):
        table = anatomy.patch_positions.table.flatten(0, -2)
        # The student's class tokens and registers include their positions, so positions of prefix tokens are zero.
        table.copy_(F.pad(positions, (0, 0, len(table) - len(positions), 0)))
    prefix = [tokens for tokens in (embeddings.cls_token, embeddings.register_tokens) if tokens is not None]
    first = 0
    for tokens in anatomy.prefix_tokens:
        rows = tokens.view(-1, tokens.shape[-1])
        rows.copy_(torch.cat(prefix)[first : first + len(rows)])
        first += len(rows)
    for block, layer in zip(anatomy.blocks, base.layers, strict=True):
        load_block(block, read_block(layer))
    load_weights(anatomy.norm, base.layernorm)
    if anatomy.pooling.head is not None:
        head = read_head(base.pooling_head)
        load_pooling(anatomy.pooling.head, head)
        if anatomy.model.config.model_type == "aimv2_vision_model":
            # AIMv2 has no query projection, so the student's query is projected before it is copied.
            anatomy.pooling.head.probe.copy_(head.attention.query(head.probe))
    if anatomy.classifier is not None:
        load_weights(anatomy.classifier, student.classifier)
    if anatomy.projection is not None:
        load_weights(anatomy.projection, student.visual_projection)


def check_host(student: PreTrainedModel, anatomy: Anatomy, num_tokens: int):
    """Raise a ValueError if the outputs of a host and of its student differ for noise images."""
    images = make_example(anatomy)
    with evaluation_mode(student):
        outputs = student(images, num_tokens=num_tokens)
    expected = next(outputs[name] for name in ("logits", "image_embeds", "pooler_output") if name in outputs)
    run = anatomy.embed if anatomy.classifier is None else anatomy.run_classifier
    difference = relative_difference(run(images), expected)
    if not difference < TOLERANCE:
        raise ValueError(
            f"A {anatomy.name} with the student's weights differs from the student (relative difference "
            f"{difference:.1e}): it has no place for all of them, such as positions or biases."
        )
