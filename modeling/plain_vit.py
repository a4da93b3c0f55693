"""A PatchSparseFormer as the plain vision transformer of Transformers that it computes.

With the cells of a grid for tokens, a student computes what its teacher computes on a smaller image. Its weights fit
the teacher's own class: a host is built for images of that size, read into an `Anatomy`, and written to.
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


# Fields of hosts, of which families have different ones. A student has these, too, and all biases.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_channels", "num_hidden_layers")
SHARED = ("hidden_act", "layer_norm_eps", *SIZES)
BIASES = ("attention_bias", "key_bias", "mlp_bias", "proj_bias", "qkv_bias", "query_bias", "value_bias")


@torch.no_grad()
def to_plain_vit(
    student: PreTrainedModel, num_tokens: int | None, like: PreTrainedConfig | str | os.PathLike | None
) -> PreTrainedModel:
    """`to_plain_vit` of a PatchSparseFormer's class, which documents it."""
    config = student.config
    if config.placement == "content":
        raise ValueError("The student's tokens are cells of several sizes, which no plain ViT has; expected a grid.")
    if not type(student).__name__.endswith(("ForImageClassification", "Model", "WithProjection")):
        raise ValueError(f"Got a {type(student).__name__}, expected a classifier or a vision model.")
    count = config.default_num_tokens if num_tokens is None else check_num_tokens(config, num_tokens)
    grid = config.grid_of(count)
    if like is None and config.teacher_config is None:
        raise ValueError("The student does not know its teacher's configuration in Transformers; give `like`.")
    if like is None:
        like = AutoConfig.for_model(**config.teacher_config)
    elif not isinstance(like, PreTrainedConfig):
        like = AutoConfig.from_pretrained(like)
    template = copy.deepcopy(getattr(like, "vision_config", like))
    try:
        host = build_host(student, resized_config(student, template, grid)).to(student.device, student.dtype).eval()
        anatomy = read_anatomy(host)
        copy_weights(student, anatomy, grid)
        if student.dtype == torch.float32:
            check_host(student, anatomy, count)
    # Of fields for squares alone, and of weights of other shapes.
    except (AttributeError, RuntimeError, StrictDataclassError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{count} tokens of the student do not fit a {template.model_type}: {reason}.") from error
    return host


def resized_config(student: PreTrainedModel, config: PreTrainedConfig, grid: tuple[int, int]) -> PreTrainedConfig:
    """Change a configuration, in place, to one whose images have the patches of a grid."""
    own = student.config
    sizes = {"patch_size": pair(own.patch_size)}
    sizes["image_size"] = tuple(count * pixels for count, pixels in zip(grid, sizes["patch_size"], strict=True))
    fields = {
        **{name: getattr(own, name) for name in SHARED},
        **dict.fromkeys(BIASES, True),
        **dict.fromkeys(("use_head", "vision_use_head"), student.base_model.pooling_head is not None),
        # SigLIP 2 NaFlex, C-RADIO, whose normalization is in the student's weights, AIMv2 and ViTMAE.
        "num_patches": math.prod(grid),
        "max_img_size": max(sizes["image_size"]),
        "norm_mean": [0.0] * own.num_channels,
        "norm_std": [1.0] * own.num_channels,
        "is_native": False,
        "mask_ratio": 0.0,
    }
    for name, (height, width) in sizes.items():
        is_pair = isinstance(getattr(config, name, None), list | tuple)
        fields[name] = [height, width] if is_pair or height != width else height
    for name, value in fields.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def build_host(student: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Make the host that goes with the student's classifier, projection, or neither."""
    if hasattr(student, "visual_projection"):
        if config.model_type != "clip_vision_model":
            raise ValueError(f"Transformers has no {config.model_type} with a projection; expected clip_vision_model.")
        config.projection_dim = student.config.projection_dim
        return CLIPVisionModelWithProjection(config)
    if not hasattr(student, "classifier"):
        host_class = MODEL_MAPPING[type(config)]
        pooler = "add_pooling_layer" in inspect.signature(host_class).parameters
        return host_class(config, **({"add_pooling_layer": False} if pooler else {}))
    family = config.model_type.removesuffix("_vision_model")
    if family != config.model_type:
        config = AutoConfig.for_model(family, vision_config=config.to_dict())
    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise ValueError(f"Transformers has no image classifier for {config.model_type}.")
    for name in ("id2label", "label2id", "problem_type"):
        setattr(config, name, getattr(student.config, name))
    host_class = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
    return (host_class[0] if isinstance(host_class, tuple) else host_class)(config)


def copy_weights(student: PreTrainedModel, anatomy: Anatomy, grid: tuple[int, int]):
    """Copy a student's weights into the modules of a host that was built for images of this grid."""
    base = student.base_model
    embeddings = base.embeddings
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
        # The student's class tokens and registers include their positions.
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
            # AIMv2 does not project its learned query.
            anatomy.pooling.head.probe.copy_(head.attention.query(head.probe))
    if anatomy.classifier is not None:
        load_weights(anatomy.classifier, student.classifier)
    if anatomy.projection is not None:
        load_weights(anatomy.projection, student.visual_projection)


def check_host(student: PreTrainedModel, anatomy: Anatomy, num_tokens: int):
    """Raise a ValueError unless a host's outputs for two images of noise are the student's."""
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
