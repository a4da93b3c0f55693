"""Models that `frugalvit compare` measures: a teacher, the teacher on smaller images, and students. `Baseline` can
describe any other model for a comparison."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from .configuration.configuration_base import is_sparseformer
from .evaluation.embeddings import image_embedder, image_maker, without_agent
from .macs import count_macs
from .modeling.hosts import Anatomy, read_anatomy
from .modeling.modeling_patch_sparseformer import (
    PatchSparseFormerVisionModel,
    PatchSparseFormerVisionModelWithProjection,
)
from .training.loading import load_model
from .training.preprocessing import size_made_by


LOWER_RESOLUTION = "teacher at lower resolution"
# Default patch counts of the smaller images, as shares of the teacher's patch count. A ViT-S/14 for 224 pixels gets
# images of 56, 84, 112, 140 and 168 pixels.
SHARES = (1 / 16, 1 / 7, 1 / 4, 2 / 5, 9 / 16)
# Values of `confidence` for students that classify adaptively.
CONFIDENCES = (0.5, 0.7, 0.9)


@dataclass
class Baseline:
    """A model in a comparison.

    Args:
        name (`str`): Name of the model in tables.
        method (`str`): Method that produced the model. In the plot, a line connects the models of each method.
        model (`nn.Module`): Module whose speed and cost are measured, called with pixels `(batch, 3, height, width)`.
        image_size (`tuple[int, int]`): Height and width of the images for `model` and `embed`.
        embed (`Callable`): Function from pixel values to embeddings `(batch, embedding_size)`.
        image_processor (*optional*): Image processor of the model.
        classifier (`Callable`, *optional*): Function from embeddings to the logits of the classes in `id2label`.
        id2label (`dict[int, str]`, *optional*): Class names.
        tokens (`int`, *optional*): Number of tokens in the encoder blocks, including class and register tokens.
        parameters (`int`, *optional*): Number of parameters that process images. Default: all parameters of `model`.
        draws (`int`, *optional*, defaults to 1): Number of calls of `embed` for each image. A random `embed` may
            need more than one call.
        macs (`Callable`, *optional*): Function from embeddings, `(images, embedding_size)`, to the
            multiply-accumulates of each image, `(images,)`, for a model whose cost depends on the image.
    """

    name: str
    method: str
    model: nn.Module
    image_size: tuple[int, int]
    embed: Callable[[torch.Tensor], torch.Tensor]
    image_processor: object = None
    classifier: Callable[[torch.Tensor], torch.Tensor] | None = None
    id2label: dict[int, str] = field(default_factory=dict)
    tokens: int | None = None
    parameters: int | None = None
    draws: int = 1
    macs: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self):
        if self.parameters is None:
            self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


class Vision(nn.Module):
    """A module that computes `embed(images)` or, if `classifier` is given, `classifier(embed(images))`. The weights of
    both functions belong to the module `source`."""

    def __init__(self, source: nn.Module, embed: Callable, classifier: Callable | None = None):
        super().__init__()
        self.source = source
        # Use a closure: if `embed` and `classifier` were attributes, modules of `source` would be registered twice.
        self.run = lambda images: embed(images) if classifier is None else classifier(embed(images))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.run(pixel_values)


class WithTokens(nn.Module):
    """A SparseFormer that always computes with `num_tokens` latent tokens and with the given `arguments`."""

    def __init__(self, model: nn.Module, num_tokens: int, **arguments):
        super().__init__()
        self.model = model
        self.num_tokens = num_tokens
        self.arguments = arguments

    def forward(self, pixel_values: torch.Tensor, **arguments):
        return self.model(pixel_values, num_tokens=self.num_tokens, **self.arguments, **arguments)


def as_teacher(anatomy: Anatomy, **others) -> Baseline:
    """Describe an unchanged vision transformer as a `Baseline`. `others` are other fields of the `Baseline`."""
    parameters = {*anatomy.model.parameters()}
    for layer in (anatomy.classifier, anatomy.projection):
        parameters |= set() if layer is None else {layer.weight, layer.bias} - {None}
    fields = {
        "name": "teacher",
        "method": "teacher",
        "model": Vision(anatomy.source, anatomy.run_classifier or anatomy.embed),
        "image_size": anatomy.image_size,
        "embed": anatomy.embed,
        "classifier": anatomy.classifier,
        "id2label": anatomy.labels.get("id2label", {}),
        "tokens": anatomy.num_prefix_tokens + anatomy.num_patches,
        "parameters": sum(parameter.numel() for parameter in parameters),
    }
    return Baseline(**fields | others)


def load_teacher(folder: str, *options, **more) -> tuple[Anatomy, object]:
    """Load a plain vision transformer. Return its `Anatomy` and image processor. See `load_model` for arguments."""
    model, image_processor = load_model(folder, "image-feature-extraction", *options, **more)
    config = getattr(model, "config", None)
    if is_sparseformer(getattr(config, "vision_config", config)):
        raise ValueError(f"The first model is {folder}, a student; expected its teacher, a plain vision transformer.")
    anatomy = read_anatomy(model.requires_grad_(False), size_made_by(image_processor))
    anatomy.require_plain("compare students with", embeds=True)
    return anatomy, image_maker(image_processor)


def load_teachers(
    folder: str, name: str | None = None, resolutions: Sequence[int] | None = None, **options
) -> list[Baseline]:
    """Load a teacher as a baseline, followed by baselines of the same teacher on smaller images.

    Args:
        folder (`str`): Folder or hub id of a vision transformer.
        name (`str`, *optional*): Name of the teacher in tables. Default: the folder's name.
        resolutions (sequence of `int`, *optional*):
            Shorter sides of the smaller images in pixels. Default: sizes whose patch counts are about `SHARES`
            times the teacher's patch count, or no sizes if position embeddings cannot be resampled.
        options: Further arguments of `load_model`.
    """
    anatomy, image_processor = load_teacher(folder, **options)
    baselines = [as_teacher(anatomy, name=name or Path(folder).name, image_processor=image_processor)]
    shorter = min(anatomy.image_size)
    patch = min(anatomy.patch_size)
    if resolutions is None and anatomy.unsupported_patches_reason:
        resolutions = []
    elif resolutions is None:
        sides = {max(round(shorter / patch * share**0.5), 1) * patch for share in SHARES}
        resolutions = sorted(sides - {shorter})
    for pixels in resolutions:
        if not 0 < pixels < shorter or pixels % patch:
            raise ValueError(
                f"Got {pixels} pixels, expected a multiple of {patch}, less than the teacher's {shorter}."
            )
        sides = zip(anatomy.image_size, anatomy.patch_size, strict=True)
        size = tuple(round(side * pixels / shorter / patch) * patch for side, patch in sides)
        baselines.append(at_lower_resolution(anatomy, image_processor, size))
    return baselines


def at_lower_resolution(anatomy: Anatomy, image_processor, image_size: tuple[int, int]) -> Baseline:
    """Return a `Baseline` of a teacher on images of `image_size`. Its `model` is an untrained student that has the
    teacher's weights, resampled position embeddings, and one token for each patch of the smaller images."""
    height, width = image_size
    student_class = PatchSparseFormerVisionModel
    if anatomy.projection is not None and anatomy.classifier is None:
        student_class = PatchSparseFormerVisionModelWithProjection
    patches = height * width // math.prod(anatomy.patch_size)
    student = student_class.from_teacher(anatomy, patches, image_size=[height, width])
    student = student.to(next(anatomy.model.parameters())).requires_grad_(False)
    # Compute all tokens of the last block, as the teacher does.
    student.base_model.skips_unread_tokens = False
    embed = image_embedder(student, image_size)
    return as_teacher(
        anatomy,
        name=f"{height if height == width else f'{height} x {width}'} pixels",
        method=LOWER_RESOLUTION,
        model=Vision(student, embed, anatomy.classifier),
        embed=embed,
        image_size=(height, width),
        tokens=anatomy.num_prefix_tokens + patches,
        image_processor=image_processor,
    )


def load_students(folder: str, method: str | None = None, name: str | None = None, **options) -> list[Baseline]:
    """Load a student as a list of baselines. For a SparseFormer, the list has a baseline for each number of tokens
    that the model was trained for. For any other model, the list has one baseline. `method` defaults to
    "SparseFormer" for a SparseFormer with a single number of tokens, and to the model's name otherwise."""
    model, image_processor = load_model(folder, "image-feature-extraction", **options)
    model = without_agent(model).requires_grad_(False).eval()
    size = size_made_by(image_processor)
    name = name or Path(folder).name
    config = getattr(model, "config", None)
    fields = {"image_size": size, "image_processor": image_maker(image_processor)}
    if (classifier := getattr(model, "classifier", None)) is not None:
        fields |= {"classifier": classifier, "id2label": dict(config.id2label)}
    if is_sparseformer(config):
        several = len(config.trained_token_counts) > 1
        return [
            Baseline(
                f"{name}, {count} tokens" if several else name,
                method or (name if several else "SparseFormer"),
                WithTokens(model, count).eval(),
                embed=image_embedder(model, size, count),
                tokens=config.num_prefix_tokens + count,
                **fields,
            )
            for count in (config.trained_token_counts if several else [config.default_num_tokens])
        ]
    anatomy = read_anatomy(model, size)
    if not anatomy.unsupported_reason:
        return [as_teacher(anatomy, name=name, method=method or name, **fields)]
    embed = image_embedder(model, size)
    return [Baseline(name, method or name, Vision(model, embed, classifier).eval(), embed=embed, **fields)]


def adaptive_baselines(students: Sequence[Baseline]) -> list[Baseline]:
    """Return a baseline for each confidence in `CONFIDENCES`, for a classifier that `load_students` loaded with
    several numbers of tokens. Return an empty list for other models. The embedding of an image consists of its logits
    and of the number of tokens in the last look."""
    student = students[0]
    model = getattr(student.model, "model", None)
    if len(students) == 1 or student.classifier is None or model.config.problem_type == "regression":
        return []
    most = model.config.default_num_tokens
    few = min(model.config.trained_token_counts[0], most)
    if few == most:
        return []
    by_content = {"placement": "content"} if getattr(model.config, "placement", None) == "grid_then_content" else {}
    looks = (WithTokens(model, few), WithTokens(model, most, **by_content))
    first, second = (count_macs(look, student.image_size).macs_with_attention for look in looks)
    if hasattr(model.base_model, "stem"):
        # Both looks share the features of the stem.
        second -= count_macs(model.base_model.stem, student.image_size).macs_with_attention

    baselines = []
    for confidence in CONFIDENCES:
        adaptive = Vision(model, functools.partial(model.classify_adaptively, confidence=confidence)).eval()

        def embed(pixel_values: torch.Tensor, adaptive: Vision = adaptive) -> torch.Tensor:
            outputs = adaptive(pixel_values)
            return torch.cat([outputs.logits, outputs.num_tokens.unsqueeze(1)], dim=1)

        fields = {
            "name": f"{student.name.rpartition(', ')[0]}, {few} or {most} tokens, confidence {confidence:g}",
            "method": f"{student.method}, adaptively",
            "model": adaptive,
            "embed": embed,
            "classifier": lambda embeddings: embeddings[:, :-1],
            "tokens": None,
            "macs": lambda embeddings: first + second * (embeddings[:, -1] > few).double(),
        }
        baselines.append(dataclasses.replace(student, **fields))
    return baselines
