"""Students of a vision transformer: build new students, load students to continue, and freeze inherited weights."""

import random
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn
from transformers import MODEL_FOR_BACKBONE_MAPPING, AutoConfig, PreTrainedModel
from transformers.utils import logging

from ..configuration.configuration_base import is_sparseformer
from ..configuration.configuration_patch_sparseformer import Placement
from ..modeling.hosts import Anatomy
from ..modeling.image_format import ImageFormat
from ..modeling.modeling_patch_sparseformer import (
    PatchSparseFormerForImageClassification,
    PatchSparseFormerVisionModel,
    PatchSparseFormerVisionModelWithProjection,
)
from ..modeling.modeling_sparseformer import (
    SparseFormerForImageClassification,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)
from ..modeling.modeling_sparseformer_dense import PatchSparseFormerBackbone, SparseFormerBackbone
from .arguments import CheckedArguments, argument, read_values
from .files import split_revision
from .loading import load_model, load_pretrained


logger = logging.get_logger(__name__)

# Classes of students. The outer keys are values of the argument `focusing`, and the inner keys are kinds of output.
STUDENTS = {
    "paper": {
        "map": SparseFormerBackbone,
        "classifier": SparseFormerForImageClassification,
        "projection": SparseFormerVisionModelWithProjection,
        "tokens": SparseFormerVisionModel,
    },
    "inherited": {
        "map": PatchSparseFormerBackbone,
        "classifier": PatchSparseFormerForImageClassification,
        "projection": PatchSparseFormerVisionModelWithProjection,
        "tokens": PatchSparseFormerVisionModel,
    },
}


@dataclass
class StudentArguments(CheckedArguments):
    """Arguments of the teacher and the student."""

    teacher: str = argument(help="Folder, hub id or open_clip:MODEL:PRETRAINED of a ViT, CLIP, SigLIP or LLaVA.")
    student: str | None = argument(None, "Folder or hub id (@revision, too) of a SparseFormer to continue from.")
    focusing: str = argument(
        "inherited", "Embed cells by the teacher's patches, or learn the paper's focusing stage.", choices=[*STUDENTS]
    )
    placement: str = argument(
        "grid",
        "Cells with focusing inherited: equal, smaller at details, or smaller in a second look alone.",
        choices=get_args(Placement),
    )
    num_tokens: list[int] | None = argument(
        None, "Numbers of latent tokens, one or several. Default: a quarter of the patches."
    )
    image_size: int | None = argument(
        None, "Size of the student's images in pixels. Default: that of the teacher or student."
    )
    config_overrides: str = argument("", "Fields of the student's configuration, for example stem_channels=32.")
    upsampler_hidden_size: int | None = argument(
        None, "Train a backbone with an upsampler of this width; needs dense_loss_weight."
    )
    truncate: float | None = argument(None, "Leading blocks to leave out, a share or a count. Default: by preset.")
    break_ties: bool = argument(True, "Move equal initial RoIs apart, unlike the paper and its code.")
    trust_remote_code: bool = argument(False, "Run the code in the teacher's repository.")


def build_student(
    options: StudentArguments,
    teacher: Anatomy,
    teacher_format: ImageFormat,
    inherit_blocks: bool = True,
    **defaults,
) -> PreTrainedModel:
    """Build a new student of a teacher.

    Args:
        options (`StudentArguments`): The student's class, tokens and configuration.
        teacher (`Anatomy`): The vision transformer whose blocks and head the student inherits.
        teacher_format (`ImageFormat`): Size and normalization of the images of teacher and student.
        inherit_blocks (`bool`): Whether to inherit the teacher's blocks and classifier, or only the classifier.
        defaults: Defaults of `truncate` and of configuration fields. `options` may override these defaults.
    """
    if options.upsampler_hidden_size:
        kind = "map"
    elif teacher.classifier is not None:
        kind = "classifier"
    else:
        kind = "tokens" if teacher.projection is None else "projection"
    student_class = STUDENTS[options.focusing][kind]
    counts = sorted({*(options.num_tokens or ())})
    if counts and counts[-1] > teacher.num_patches:
        logger.warning(
            f"num_tokens has {counts[-1]}, more than the teacher's {teacher.num_patches} patches. So many tokens cost "
            "more than the teacher."
        )
    fields = teacher_format.config_fields() | defaults
    if len(counts) > 1:
        fields["elastic_token_counts"] = counts
    if options.upsampler_hidden_size:
        fields["upsampler_hidden_size"] = options.upsampler_hidden_size
    if options.focusing == "paper":
        fields["inherit_blocks"] = inherit_blocks
        fields["break_ties"] = options.break_ties
    elif not inherit_blocks:
        raise ValueError("inherit_blocks is False, expected True with focusing inherited.")
    if options.placement != "grid":
        if options.focusing == "paper":
            raise ValueError(f"placement is {options.placement}, expected grid with focusing paper.")
        fields["placement"] = options.placement
    if options.truncate is not None:
        fields["truncate"] = options.truncate
    if options.config_overrides:
        fields |= parse_overrides(student_class.config_class.model_type, options.config_overrides)
    return student_class.from_teacher(teacher, counts[-1] if counts else None, **fields)


def continued_student(options: StudentArguments) -> PreTrainedModel:
    """Load `options.student` to continue its training. Set the student's token counts and placement of tokens to the
    values in `options`."""
    name, revision = split_revision(options.student)
    config = load_pretrained(AutoConfig, options.student, "a SparseFormer")
    if not is_sparseformer(config):
        raise ValueError(f"student is {options.student}, a {config.model_type}, expected a SparseFormer.")
    upsampler = {"upsampler_hidden_size": options.upsampler_hidden_size} if options.upsampler_hidden_size else {}
    if upsampler or any(name.endswith("Backbone") for name in config.architectures or ()):
        backbone_class = MODEL_FOR_BACKBONE_MAPPING[type(config)]
        student = backbone_class.from_pretrained(name, dtype=torch.float32, **revision, **upsampler)
    else:
        student, _ = load_model(options.student, "image-feature-extraction", "cpu")
    config = student.config
    if options.placement != "grid":
        if not config.has_patch_embedding:
            raise ValueError(f"placement is {options.placement}, expected grid for a student with focusing paper.")
        student.set_placement(options.placement)
    if counts := options.num_tokens:
        if max(counts) != config.num_latent_tokens:
            student.resize_tokens(max(counts))
        if len({*counts}) > 1:
            config.elastic_token_counts = sorted({*counts})
            config.validate()
    student.set_num_tokens(None)
    return student


def parse_overrides(model_type: str, text: str) -> dict:
    """Parse `config_overrides` into a dict of configuration fields."""
    defaults = AutoConfig.for_model(model_type)
    overrides = read_values("config_overrides", text)
    for name in overrides:
        if not hasattr(defaults, name):
            raise ValueError(f"config_overrides has {name!r}, which {model_type} configurations do not have.")
    return overrides


def token_counts_to_train(config, seed: str) -> list[int]:
    """Return the token counts to train in a step: the largest count, up to two random counts, and the smallest count.
    This is the sandwich rule of Yu and Huang, *Universally Slimmable Networks and Improved Training Techniques*."""
    if len(config.trained_token_counts) == 1:
        return list(config.trained_token_counts)
    smallest, *between, largest = config.trained_token_counts
    return [largest, *random.Random(seed).sample(between, min(len(between), 2)), smallest]


def freeze(student: PreTrainedModel, args, num_blocks: int) -> set[nn.Parameter]:
    """Freeze a student in place. The focusing stage and the student's first blocks stay trainable. `args.tune` is the
    number of these blocks, or their share of the teacher's blocks. If the student inherits no blocks, only classifier,
    projection and pooling head are frozen.

    Args:
        student (`PreTrainedModel`): The student.
        args (`BootstrapArguments`): The training arguments.
        num_blocks (`int`): Number of the teacher's blocks.

    Returns:
        `set[nn.Parameter]`: The inherited parameters. `args.inherited_lr_factor` is their learning rate factor.
    """
    base = student.base_model
    for owner in (student, base):
        for name in ("classifier", "visual_projection", "pooling_head"):
            if isinstance(module := getattr(owner, name, None), nn.Module):
                module.requires_grad_(False)
    if not args.inherit_blocks:
        return set()
    layers = base.layers
    inherits_patches = base.config.has_patch_embedding
    tune = 1 / 3 if args.tune is None else args.tune
    count = int(tune) if tune >= 1 else round(tune * num_blocks)
    if args.tune_all or (inherits_patches and args.tune is None):
        count = len(layers)
    if count > len(layers):
        raise ValueError(f"tune is {args.tune}, {count} blocks, expected at most the student's {len(layers)}.")
    layers[count:].requires_grad_(False)
    if inherits_patches:
        # All weights of `base` are inherited, except for those of `placement`, which choose the grid cells of tokens.
        placement = (base.embeddings.placement or nn.Module()).requires_grad_(True)
        return {*base.parameters()} - {*placement.parameters()}
    base.layernorm.requires_grad_(False)
    return set(layers[:count].parameters())
