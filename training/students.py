"""Students of a vision transformer: how they are made, and which parts of them learn."""

import random
from dataclasses import dataclass

import torch
from torch import nn
from transformers import MODEL_FOR_BACKBONE_MAPPING, AutoConfig

from ..common.choices import FOCUSINGS, PLACEMENT_RULES, PLACEMENTS
from ..common.loading import load_vision_model, split_revision
from ..common.views import ImageFormat
from ..configuration.configuration_base import pair, set_image_size
from ..modeling.hosts import Anatomy
from ..modeling.modeling_sparseformer import (
    SparseFormerBackbone,
    SparseFormerForImageClassification,
    SparseFormerPreTrainedModel,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)
from .arguments import argument, check, check_choices, check_from, read_values


# Pixels of the largest images that the recipe "small" is for.
LARGEST_SMALL = 96


@dataclass
class StudentArguments:
    """Teacher and student.

    Raises:
        ValueError: if a value does not fit.
    """

    teacher: str = argument(
        help="Folder or hub id (@revision, too) of the vision transformer, CLIP, SigLIP, LLaVA, PaliGemma, Gemma 3 or "
        "LLaVA-OneVision to bootstrap from, or open_clip:MODEL:PRETRAINED."
    )
    student: str | None = argument(None, "Folder or hub id (@revision, too) of a SparseFormer to continue from.")
    focusing: str = argument(
        "paper",
        "paper: a focusing stage that is learned from random weights. inherited: the teacher's patch embedding at the "
        "cells of a grid, so that the student starts as its teacher at a lower resolution.",
        choices=FOCUSINGS,
    )
    placement: str = argument(
        "grid",
        "With focusing inherited, grid: tokens look at the cells of a grid. content: at cells of several sizes, small "
        "where an image has detail. Such students have 4, 7, 10 … tokens; other counts are rounded down.",
        choices=PLACEMENTS,
    )
    placement_rule: str = argument(
        "detail", "With placement content, what says which cells are made smaller.", choices=PLACEMENT_RULES
    )
    num_tokens: list[int] | None = argument(
        None,
        "Latent tokens, [CLS] not counted; of several counts, one student serves each, and a call chooses. Each step "
        "trains the largest, the smallest and two others. Default: a quarter of the teacher's with [CLS], or the "
        "student's.",
    )
    image_size: int | None = argument(
        None, "Pixels of the student's images. Default: the teacher's, or the student's."
    )
    config_overrides: str = argument("", "The student's configuration, for example stem_channels=32.")
    upsampler_hidden_size: int | None = argument(
        None,
        "Make a backbone (SparseFormerBackbone), whose map convolutions of this width refine, for example 128. With "
        "dense_loss_weight, which trains them together with the tokens.",
    )
    truncate: float | None = argument(
        None,
        "Leading blocks left out: a share of the teacher's, or a count. Default: a third with the recipe paper, one "
        "with small, none with inherited.",
    )
    break_ties: bool = argument(
        True,
        "Move initial RoIs apart that are equal, which the paper and its code leave; focusing inherited has none.",
    )
    trust_remote_code: bool = argument(False, "Run code that comes with the teacher.")

    def __post_init__(self):
        check_choices(self)
        if self.placement != "grid" and self.focusing != "inherited" and self.student is None:
            raise ValueError(
                f"placement is {self.placement!r}, expected 'grid' without focusing inherited or student."
            )
        check(self, lambda counts: counts and min(counts) > 0, "one count or more, from 1", "num_tokens")
        check_from(self, 1, "image_size", "upsampler_hidden_size")
        check_blocks(self, "truncate")

    @property
    def counts(self) -> dict:
        """`num_tokens` as `from_teacher` has it."""
        counts = sorted({*(self.num_tokens or ())})
        return {
            "num_latent_tokens": counts[-1] if counts else None,
            "elastic_token_counts": counts if len(counts) > 1 else None,
        }


def check_blocks(arguments, *names: str):
    """Raise a ValueError unless counts and shares of blocks are in range, or None (not given)."""
    fits = lambda value: 0 <= value < 1 or (value >= 1 and float(value).is_integer())  # noqa: E731
    check(arguments, fits, "a share from 0 to below 1, or a count", *names)


def check_teacher(teacher: Anatomy, name: str):
    """Raise a ValueError if the teacher does not take the images that its image processor makes."""
    teacher.require_plain("bootstrap from", embeds=True)
    with torch.inference_mode():
        try:
            teacher.embed(teacher.example())
        # Models fail in more ways than can be listed.
        except Exception as error:
            raise ValueError(
                f"teacher {name} does not take what its image processor makes, images of "
                f"{' x '.join(map(str, teacher.image_size))} pixels: {' '.join(str(error).split())[:200]}"
            ) from error


def build_student(
    options: StudentArguments, teacher: Anatomy, teacher_format: ImageFormat, inherit_blocks: bool = True, **recipe
) -> SparseFormerPreTrainedModel:
    """Return a new student with the teacher's blocks, or that of `options.student` with the tokens and pixels that are
    asked for. `recipe` gives `truncate` and fields of the configuration that `options` leaves open."""
    if options.student:
        return continued_student(options, teacher)
    inherits = options.focusing == "inherited"
    if teacher_format.reverse_channels and inherits:
        raise ValueError(
            f"teacher {options.teacher} takes blue, green and red; a student gets red, green and blue, for which the "
            "teacher's patches are not made. Leave focusing inherited out."
        )
    if options.upsampler_hidden_size:
        student_class = SparseFormerBackbone
        recipe["upsampler_hidden_size"] = options.upsampler_hidden_size
    elif teacher.classifier is not None:
        student_class = SparseFormerForImageClassification
    elif teacher.projection is not None:
        student_class = SparseFormerVisionModelWithProjection
    else:
        student_class = SparseFormerVisionModel
    if options.placement == "content":
        recipe |= {"placement": "content", "placement_rule": options.placement_rule}
    if options.truncate is not None:
        recipe["truncate"] = options.truncate
    height, width = teacher_format.size
    fields = {
        "image_size": height if height == width else [height, width],
        "image_mean": teacher_format.mean,
        "image_std": teacher_format.std,
        "resample": teacher_format.resample,
        "resize_size": teacher_format.resize,
        **recipe,
        **parse_overrides("patch_sparseformer" if inherits else "sparseformer", options.config_overrides),
    }
    student = student_class.from_teacher(
        teacher,
        **options.counts,
        inherit_blocks=inherit_blocks,
        focusing=options.focusing,
        break_ties=options.break_ties,
        **fields,
    )
    if options.image_size:
        set_image_size(student.config, options.image_size)
    return student


def continued_student(options: StudentArguments, teacher: Anatomy) -> SparseFormerPreTrainedModel:
    """Load `options.student`, and give it the tokens, places and pixels that are asked for."""
    student, _ = load_vision_model(options.student, "cpu")
    if not isinstance(student, SparseFormerPreTrainedModel):
        raise ValueError(f"student {options.student} is no SparseFormer but a {type(student).__name__}.")
    upsampler = {"upsampler_hidden_size": options.upsampler_hidden_size} if options.upsampler_hidden_size else {}
    # Of a backbone, what was loaded is the base model.
    if upsampler or any(name.endswith("Backbone") for name in student.config.architectures or ()):
        name, revision = split_revision(options.student)
        backbone_class = MODEL_FOR_BACKBONE_MAPPING[type(student.config)]
        student = backbone_class.from_pretrained(name, dtype=torch.float32, **revision, **upsampler)
    projects = isinstance(student, SparseFormerVisionModelWithProjection)
    width = student.config.projection_dim if projects else student.config.pooled_size
    if width != teacher.embedding_size or projects != (teacher.projection is not None):
        raise ValueError(
            f"student {options.student} gives embeddings {width} wide and teacher {teacher.embedding_size}, before or "
            "after a projection; these cannot be aligned. Give the teacher that the student was bootstrapped from."
        )
    if options.placement == "content":
        if not student.config.embeds_patches:
            raise ValueError("placement content is for tokens that embed patches: focusing inherited.")
        if student.config.placement != "content":
            student.place_by_content(options.placement_rule)
    counts = options.counts
    if counts["num_latent_tokens"] not in (None, student.config.num_latent_tokens):
        student.resize_tokens(counts["num_latent_tokens"])
    if elastic := counts["elastic_token_counts"]:
        student.config.elastic_token_counts = sorted({*map(student.config.round_tokens, elastic)})
    student.set_num_tokens(None)
    if options.image_size:
        set_image_size(student.config, options.image_size)
    return student


def parse_overrides(model_type: str, text: str) -> dict:
    """Read `config_overrides`, fields of a configuration, as a dict.

    Raises:
        ValueError: if the configuration has no such field.
    """
    defaults, overrides = AutoConfig.for_model(model_type), read_values("config_overrides", text)
    for name in overrides:
        if not hasattr(defaults, name):
            raise ValueError(f"config_overrides: {model_type} configurations have no {name!r}.")
    return overrides


def token_counts_to_train(config, seed: str) -> list[int]:
    """The counts of tokens to train in a step: the largest, two of the others, chosen by the seed, and the smallest.

    It is the sandwich rule of Yu and Huang, *Universally Slimmable Networks and Improved Training Techniques*.
    """
    smallest, *between = config.trained_token_counts
    if not between:
        return [smallest]
    *between, largest = between
    return [largest, *random.Random(seed).sample(between, min(len(between), 2)), smallest]


def format_of(config) -> ImageFormat:
    """The format of images that a SparseFormer's configuration asks for."""
    return ImageFormat(
        pair(config.image_size), config.image_mean, config.image_std, config.resample, config.resize_size
    )


def freeze(student: SparseFormerPreTrainedModel, args, num_blocks: int) -> set[nn.Parameter]:
    """Freeze a student but for its focusing stage and the blocks to tune.

    Without inherited blocks, the whole transformer stays trainable, and only the inherited classifier, projection or
    pooling head is frozen.

    Args:
        student (`SparseFormerPreTrainedModel`): Changed in place.
        args (`BootstrapArguments`): Names the blocks to tune.
        num_blocks (`int`): Blocks of the teacher, of which `args.tune` may be a share.

    Returns:
        `set[nn.Parameter]`: The inherited parameters that are tuned.

    Raises:
        ValueError: if more blocks are to be tuned than the student has.
    """
    for name in ("classifier", "visual_projection", "pooling_head"):
        for owner in (student, student.base_model):
            if isinstance(module := getattr(owner, name, None), nn.Module):
                module.requires_grad_(False)
    if not args.inherit_blocks:
        return set()
    base = student.base_model
    layers, inherits_patches = base.layers, base.config.embeds_patches
    tune = 1 / 3 if args.tune is None else args.tune
    count = int(tune) if tune >= 1 else round(tune * num_blocks)
    if args.tune_all or (inherits_patches and args.tune is None):
        count = len(layers)
    if count > len(layers):
        raise ValueError(f"tune asks for {count} blocks, the student has {len(layers)}; tune_all tunes them all.")
    layers[count:].requires_grad_(False)
    if inherits_patches:
        # Cells stay where they are. All but what chooses them begins as the teacher's.
        base.latents.initial_rois.requires_grad_(False)
        placement = (base.placement or nn.Module()).requires_grad_(True)
        return {*base.parameters()} - {*placement.parameters()}
    base.layernorm.requires_grad_(False)
    return set(layers[:count].parameters())
