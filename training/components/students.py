"""Students of a vision transformer: how they are made, which parts are frozen, and their optimizer."""

import math
import random
from collections.abc import Sequence

import torch
from torch import nn
from transformers import MODEL_FOR_BACKBONE_MAPPING

from ...common.loading import load_vision_model, split_revision
from ...common.views import ImageFormat
from ...configuration.configuration_base import pair, set_image_size
from ...modeling.hosts import Anatomy
from ...modeling.modeling_sparseformer import (
    SparseFormerBackbone,
    SparseFormerForImageClassification,
    SparseFormerPreTrainedModel,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)
from ..options.bootstrap import LARGEST_SMALL, RECIPES, ScheduleArguments, StudentArguments
from .arguments import read_values, write_values
from .models import parse_overrides
from .optimizers import make_optimizer, parameter_groups


def recipe_of(config, size: tuple[int, int]) -> str:
    """The recipe for a student with this configuration, whose teacher has images of that height and width."""
    if config.embeds_patches:
        return "inherited"
    return "paper" if max(size) > LARGEST_SMALL else "small"


def fill_in(groups: Sequence, values: dict):
    """Set the arguments that were not given, None, to `values`."""
    for group in groups:
        for name, value in values.items():
            if getattr(group, name, value) is None:
                setattr(group, name, value)


def apply_recipe(arguments: Sequence, size: tuple[int, int]):
    """Fill in the arguments that were not given, by the recipe: that of `--recipe`, or else the one for the teacher's
    image size. With `--student`, learning is shorter and starts with smaller steps.

    Args:
        arguments (sequence): Dataclasses of arguments, `StudentArguments` first; they are changed.
        size (pair of `int`): Height and width of the teacher's images in pixels.
    """
    options = arguments[0]
    # A student that was trained before would lose by large steps.
    small = "paper" if options.student or max(size) > LARGEST_SMALL else "small"
    options.recipe = options.recipe or ("inherited" if options.focusing == "inherited" else small)
    values = RECIPES[options.recipe] | {"epochs": 20}
    if options.student:
        # It has its configuration, and its weights are good enough to begin with.
        values |= {"config_overrides": "", "learning_rate": values["learning_rate"] / 4, "warmup_epochs": 0.0}
        values["epochs"] = 5
    if any(getattr(group, "teacher_cache", None) for group in arguments):
        values["token_loss_weight"] = 0.0
    overrides = values.pop("config_overrides"), options.config_overrides
    options.config_overrides = write_values(read_values("config_overrides", ",".join(filter(None, overrides))))
    fill_in(arguments, values)


def check_teacher(teacher: Anatomy, name: str):
    """Raise a ValueError if the teacher does not take the images that its image processor makes."""
    teacher.require_plain("bootstrap from", embeds=True)
    with torch.inference_mode():
        try:
            teacher.embed(teacher.example())
        # Models fail in more ways than can be listed.
        except Exception as error:
            raise ValueError(
                f"--teacher {name} does not take what its image processor makes, images of "
                f"{' x '.join(map(str, teacher.image_size))} pixels: {' '.join(str(error).split())[:200]}"
            ) from error


def build_student(
    options: StudentArguments, teacher: Anatomy, teacher_format: ImageFormat
) -> SparseFormerPreTrainedModel:
    """Return a new student with the teacher's blocks, or that of `--student` with the tokens and pixels that are asked
    for."""
    upsampler = {"upsampler_hidden_size": options.upsampler_hidden_size} if options.upsampler_hidden_size else {}
    if options.student:
        student, _ = load_vision_model(options.student, "cpu")
        if not isinstance(student, SparseFormerPreTrainedModel):
            raise ValueError(f"--student {options.student} is no SparseFormer but a {type(student).__name__}.")
        # Of a backbone, what was loaded is the base model.
        if upsampler or any(name.endswith("Backbone") for name in student.config.architectures or ()):
            name, revision = split_revision(options.student)
            backbone_class = MODEL_FOR_BACKBONE_MAPPING[type(student.config)]
            student = backbone_class.from_pretrained(name, dtype=torch.float32, **revision, **upsampler)
        projects = isinstance(student, SparseFormerVisionModelWithProjection)
        width = student.config.projection_dim if projects else student.config.pooled_size
        teacher_width = teacher.embedding_size
        if width != teacher_width or projects != (teacher.projection is not None):
            raise ValueError(
                f"--student {options.student} gives embeddings {width} wide and --teacher {teacher_width}, before or "
                "after a projection; these cannot be aligned. Give the teacher that the student was bootstrapped from."
            )
        if options.placement == "content" and not student.config.embeds_patches:
            raise ValueError("--placement content is for tokens that embed patches: --focusing inherited.")
        if options.placement == "content" and student.config.placement != "content":
            student.place_by_content(options.placement_rule)
        if options.num_latent_tokens not in (None, student.config.num_latent_tokens):
            student.resize_tokens(options.num_latent_tokens)
        if options.elastic_token_counts:
            counts = {*map(student.config.round_tokens, options.elastic_token_counts)}
            student.config.elastic_token_counts = sorted(counts)
        student.set_num_tokens(None)
        if options.image_size:
            set_image_size(student.config, options.image_size)
        return student
    if teacher_format.reverse_channels and options.focusing == "inherited":
        raise ValueError(
            f"--teacher {options.teacher} takes blue, green and red; a student gets red, green and blue, for which "
            "the teacher's patches are not made. Leave --focusing inherited out."
        )
    height, width = teacher_format.size
    image_size = height if height == width else [height, width]
    if upsampler:
        student_class = SparseFormerBackbone
    elif teacher.classifier is not None:
        student_class = SparseFormerForImageClassification
    else:
        student_class = (
            SparseFormerVisionModel if teacher.projection is None else SparseFormerVisionModelWithProjection
        )
    looks, kind = {}, "patch_sparseformer" if options.focusing == "inherited" else "sparseformer"
    if options.placement == "content":
        looks = {"placement": "content", "placement_rule": options.placement_rule}
    student = student_class.from_teacher(
        teacher,
        num_latent_tokens=options.num_latent_tokens,
        elastic_token_counts=options.elastic_token_counts,
        truncate=options.truncate,
        inherit_blocks=options.inherit_blocks,
        focusing=options.focusing,
        break_ties=options.break_ties,
        image_mean=teacher_format.mean,
        image_std=teacher_format.std,
        resample=teacher_format.resample,
        resize_size=teacher_format.resize,
        **{"image_size": image_size, **looks, **upsampler, **parse_overrides(kind, options.config_overrides)},
    )
    if options.image_size:
        set_image_size(student.config, options.image_size)
    return student


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


def freeze(student: SparseFormerPreTrainedModel, options, num_blocks: int) -> set[nn.Parameter]:
    """Freeze a student but for its focusing stage and the blocks to tune.

    Without inherited blocks, the whole transformer stays trainable, and only the inherited classifier, projection or
    pooling head is frozen.

    Args:
        student (`SparseFormerPreTrainedModel`): Changed in place.
        options (`StudentArguments` or `BootstrapArguments`): Names the blocks to tune.
        num_blocks (`int`): Blocks of the teacher, of which `options.tune` may be a share.

    Returns:
        `set[nn.Parameter]`: The inherited parameters that are tuned.

    Raises:
        ValueError: if more blocks are to be tuned than the student has.
    """
    for name in ("classifier", "visual_projection", "pooling_head"):
        for owner in (student, student.base_model):
            if isinstance(module := getattr(owner, name, None), nn.Module):
                module.requires_grad_(False)
    if not options.inherit_blocks:
        return set()
    base = student.base_model
    layers, inherits_patches = base.layers, base.config.embeds_patches
    tune = 1 / 3 if options.tune is None else options.tune
    count = int(tune) if tune >= 1 else round(tune * num_blocks)
    if options.tune_all or (inherits_patches and options.tune is None):
        count = len(layers)
    if count > len(layers):
        raise ValueError(f"--tune asks for {count} blocks, the student has {len(layers)}; --tune-all tunes them all.")
    layers[count:].requires_grad_(False)
    if inherits_patches:
        # Cells stay where they are. All but what chooses them begins as the teacher's.
        base.latents.initial_rois.requires_grad_(False)
        placement = (base.placement or nn.Module()).requires_grad_(True)
        return {*base.parameters()} - {*placement.parameters()}
    base.layernorm.requires_grad_(False)
    return set(layers[:count].parameters())


def build_optimizer(
    student, tuned: set[nn.Parameter], schedule: ScheduleArguments, steps_per_epoch: int, epochs: float
):
    """Return an optimizer and a schedule: the learning rate rises over the warm-up, then falls as half a cosine.
    Inherited weights, `tuned`, rest during the warm-up if the focusing stage is new."""
    warmup, total = round(schedule.warmup_epochs * steps_per_epoch), epochs * steps_per_epoch

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))

    # Where the focusing stage is inherited, too, nothing waits for it.
    waits = not student.config.embeds_patches

    def inherited_rate(step: int) -> float:
        return 0.0 if step < warmup and waits else schedule.inherited_learning_rate * rate(step)

    groups, rates = [], []
    for group in parameter_groups(student, schedule.weight_decay):
        for members, factor in (
            ([p for p in group["params"] if p not in tuned], rate),
            ([p for p in group["params"] if p in tuned], inherited_rate),
        ):
            # DeepSpeed would drop an empty group, and the schedule would not find it.
            if members:
                groups.append({**group, "params": members})
                rates.append(factor)
    optimizer = make_optimizer(schedule.optimizer, groups, lr=schedule.learning_rate)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
