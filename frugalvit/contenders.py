"""Contenders of `frugalvit compare`: a teacher, the same teacher with less to compute, and students.

Whoever has another way to make a model cheaper describes it as a `Contender`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .common.contender import Contender, Vision, as_students, as_teacher, count_parameters
from .common.loading import load_vision_model
from .common.views import size_made_by
from .configuration.configuration_sparseformer_base import is_sparseformer
from .evaluation.embeddings import image_embedder, image_maker, without_agent
from .modeling.hosts import Anatomy, read_anatomy


LOWER_RESOLUTION = "teacher at lower resolution"
RANDOM_PATCHES = "teacher with random patches"
BASELINES = ("lower-resolution", "random-patches")
# Numbers of patches, as shares of the teacher's.
SHARES = (1 / 4, 2 / 5, 9 / 16)


def load_teacher(folder: str, device: str | None = None, trust_remote_code: bool = False) -> tuple[Anatomy, object]:
    """Load a vision transformer, as an `Anatomy`, and its image processor.

    Raises:
        ValueError: if there is no such model, or it is no plain vision transformer.
    """
    model, image_processor = load_vision_model(folder, device, trust_remote_code)
    model.requires_grad_(False)
    anatomy = read_anatomy(model, size_made_by(image_processor))
    anatomy.require_plain("compare students with", embeds=True)
    return anatomy, image_maker(image_processor)


def at_lower_resolution(anatomy: Anatomy, image_processor, image_size: tuple[int, int]) -> Contender:
    """The teacher with smaller images, its positions resampled, which takes no training.

    Args:
        anatomy (`Anatomy`), image_processor: The teacher, as `load_teacher` returns it.
        image_size (pair of `int`): Height and width in pixels, multiples of the patches'.
    """
    small = anatomy.resized(image_size)
    height, width = image_size
    return Contender(
        name=f"{height if height == width else f'{height} x {width}'} pixels",
        method=LOWER_RESOLUTION,
        model=Vision(small.source or small.model, small.embed, small.classifier),
        embed=small.embed,
        image_processor=image_processor,
        image_size=tuple(image_size),
        classifier=small.classifier,
        id2label=anatomy.labels.get("id2label", {}),
        tokens=small.num_prefix_tokens + small.num_patches,
        parameters=count_parameters(anatomy),
    )


def with_random_patches(anatomy: Anatomy, image_processor, patches: int, seed: int = 0, draws: int = 3) -> Contender:
    """The teacher with few of its patches, chosen at random for each image: a choice of patches has to surpass it.

    Args:
        anatomy (`Anatomy`), image_processor: The teacher, as `load_teacher` returns it.
        patches (`int`): Number of patches that are kept, after the embedding.
        seed (`int`): Seed of the choice.
        draws (`int`): As of a `Contender`.
    """
    embed = RandomPatches(anatomy, patches, seed)
    return Contender(
        name=f"{patches} random patches",
        method=RANDOM_PATCHES,
        model=Vision(anatomy.source, embed, anatomy.classifier),
        embed=embed,
        image_processor=image_processor,
        image_size=anatomy.image_size,
        classifier=anatomy.classifier,
        id2label=anatomy.labels.get("id2label", {}),
        tokens=anatomy.num_prefix_tokens + patches,
        parameters=count_parameters(anatomy),
        draws=draws,
    )


class RandomPatches:
    """A vision transformer's embedding of some of an image's patches, chosen at random for each image.

    Args:
        anatomy (`Anatomy`): A plain vision transformer's.
        patches (`int`): Number of patches that are kept, from 1 to all.
        seed (`int`): Seed of the choice, which goes on from call to call.
    """

    def __init__(self, anatomy: Anatomy, patches: int, seed: int):
        self.anatomy, self.patches = anatomy, patches
        self.dtype = next(anatomy.model.parameters()).dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        tokens, _ = self.states(pixel_values)
        return self.anatomy.pool(tokens)

    def states(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens after the last block, `(batch, prefix + patches, hidden_size)`, and the numbers of the
        patches that were kept, `(batch, patches)` int64."""
        if (dtype := next(self.anatomy.model.parameters()).dtype) != self.dtype:
            # What was read are in part views of weights, which a cast leaves behind.
            self.anatomy, self.dtype = self.anatomy.read(self.anatomy.source), dtype
        anatomy, front = self.anatomy, self.anatomy.num_prefix_tokens
        tokens = anatomy.tokens(pixel_values)
        # Without replacement. The order does not matter.
        noise = torch.rand(len(tokens), anatomy.num_patches, generator=self.generator)
        kept = noise.topk(self.patches).indices.to(tokens.device)
        patches = tokens[:, front:].gather(1, kept[..., None].expand(-1, -1, tokens.shape[-1]))
        tokens = torch.cat([tokens[:, :front], patches], dim=1)
        rotate = anatomy.rotation(tokens.dtype, kept)
        for block in anatomy.blocks:
            tokens = block(tokens, rotate)
        return tokens, kept


def load_students(folder: str, method: str | None = None, name: str | None = None, **options) -> list[Contender]:
    """`load_student`, with each count of tokens that a SparseFormer is made for, the smallest first. They share one
    model."""
    student = load_student(folder, method, name, **options)
    if len(getattr(getattr(student.model, "config", None), "trained_token_counts", [None])) == 1:
        return [student]
    # A point of a line each, where all students of a method share one.
    return [
        dataclasses.replace(
            student,
            name=f"{student.name}, {each.num_tokens} tokens",
            method=method or student.name,
            model=each.model,
            embed=image_embedder(student.model, student.image_size, each.num_tokens),
            tokens=each.tokens,
            num_tokens=each.num_tokens,
            load=functools.partial(_load_one, number, load_students, folder, method, name, **options),
        )
        for number, each in enumerate(as_students(student.model, student.image_size))
    ]


def _load_one(number: int, load: Callable, *arguments, **options) -> Contender:
    """Load one of several contenders anew, in a process that measures its memory."""
    return load(*arguments, **options)[number]


def load_student(
    folder: str,
    method: str | None = None,
    name: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Contender:
    """Load a SparseFormer, or any other model with an embedding.

    Args:
        folder (`str`): Folder or hub id, see `load_vision_model`.
        method (`str`, *optional*): Name of the method; "SparseFormer" if not given, or the name of another model.
        name (`str`, *optional*): Name of the row; the folder's if not given.
        device (`str`, *optional*), trust_remote_code (`bool`): As in `load_vision_model`.

    Raises:
        ValueError: if there is no such model, or it has no embedding.
    """
    model, image_processor = load_vision_model(folder, device, trust_remote_code)
    model = without_agent(model).requires_grad_(False).eval()
    load = functools.partial(load_student, folder, method, name, device, trust_remote_code)
    size, name, config = size_made_by(image_processor), name or Path(folder).name, getattr(model, "config", None)
    fields = {"embed": image_embedder(model, size), "image_processor": image_maker(image_processor), "load": load}
    sparse = is_sparseformer(config)
    if not (sparse or (anatomy := read_anatomy(model, size)).obstacle):
        return as_teacher(anatomy, name=name, method=method or name, **fields)
    if (classifier := getattr(model, "classifier", None)) is not None:
        fields |= {"classifier": classifier, "id2label": dict(config.id2label)}
    if not sparse:
        return Contender(name, method or name, Vision(model, fields["embed"], classifier).eval(), size, **fields)
    tokens = config.num_prefix_tokens + config.default_num_tokens
    return Contender(name, method or "SparseFormer", model, size, tokens=tokens, **fields)


def load_teachers(
    folder: str,
    name: str | None = None,
    baselines: Sequence[str] = BASELINES,
    resolutions: Sequence[int] | None = None,
    *,
    seed: int = 0,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> list[Contender]:
    """Load a teacher, and the same weights with smaller images and with as few patches chosen at random.

    Args:
        folder (`str`): Folder or hub id, see `load_vision_model`.
        name (`str`, *optional*): Name of the row; the folder's if not given.
        baselines (sequence of `str`): Some of `BASELINES`.
        resolutions (sequence of `int`, *optional*): Shorter sides of the smaller images in pixels; those with about
            `SHARES` of the patches if not given.
        seed (`int`): Seed of the choice of patches.
        device (`str`, *optional*), trust_remote_code (`bool`): As in `load_vision_model`.

    Raises:
        ValueError: if there is no such model, it is no plain vision transformer, or resolutions do not fit its
            patches.
    """
    anatomy, image_processor = load_teacher(folder, device, trust_remote_code)
    sizes = [size_of(anatomy, pixels) for pixels in resolutions] if resolutions else lower_sizes(anatomy)
    try:
        if baselines:
            anatomy.check_tokens("leave out patches of")
        if "random-patches" in baselines:
            anatomy.check("leave out patches of")
    except ValueError as error:
        raise ValueError(f"{error} To compare without what the teacher does with less: --baselines none.") from error
    name = name or Path(folder).name
    contenders = [as_teacher(anatomy, name=name, image_processor=image_processor)]
    for baseline in baselines:
        for size in sizes:
            if baseline == "lower-resolution":
                contenders.append(at_lower_resolution(anatomy, image_processor, size))
            else:
                patches = math.prod(size) // math.prod(anatomy.patch_size)
                contenders.append(with_random_patches(anatomy, image_processor, patches, seed))
    arguments = (folder, name, baselines, resolutions)
    options = {"seed": seed, "device": device, "trust_remote_code": trust_remote_code}
    for number, contender in enumerate(contenders):
        contender.load = functools.partial(_load_one, number, load_teachers, *arguments, **options)
    return contenders


def lower_sizes(anatomy: Anatomy) -> list[tuple[int, int]]:
    """Heights and widths at which an image has about `SHARES` of its patches."""
    sizes = []
    for share in SHARES:
        sides = zip(anatomy.grid, anatomy.patch_size, strict=True)
        size = tuple(max(round(count * share**0.5), 1) * side for count, side in sides)
        if size != anatomy.image_size and size not in sizes:
            sizes.append(size)
    return sizes


def size_of(anatomy: Anatomy, pixels: int) -> tuple[int, int]:
    """Height and width of images whose shorter side has so many pixels, in the shape of the teacher's.

    Raises:
        ValueError: if patches do not divide that size, or it is not smaller than the teacher's.
    """
    shorter = min(anatomy.image_size)
    sides = zip(anatomy.image_size, anatomy.patch_size, strict=True)
    size = tuple(round(side * pixels / shorter / patch) * patch for side, patch in sides)
    if min(size) != pixels or not 0 < pixels < shorter:
        raise ValueError(
            f"--resolutions {pixels}: expected less than the teacher's {shorter} pixels and a multiple of its "
            f"patches' {min(anatomy.patch_size)}."
        )
    return size
