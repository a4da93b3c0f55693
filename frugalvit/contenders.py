"""Models that `frugalvit compare` measures beside each other: a teacher, the same teacher with less to compute, and
students. Describe any other model as a `Contender`."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from .common.loading import load_vision_model
from .common.macs import macs_of
from .common.views import size_made_by
from .configuration.configuration_sparseformer_base import is_sparseformer
from .evaluation.embeddings import image_embedder, image_maker, without_agent
from .modeling.hosts import Anatomy, read_anatomy


LOWER_RESOLUTION = "teacher at lower resolution"
RANDOM_PATCHES = "teacher with random patches"
BASELINES = ("lower-resolution", "random-patches")
# Numbers of patches, as shares of the teacher's.
SHARES = (1 / 4, 2 / 5, 9 / 16)


@dataclass
class Contender:
    """A model to measure.

    Args:
        name (`str`): Name of its row.
        method (`str`): Name of the method that made it; contenders of one method are a line of the picture.
        model (`nn.Module`): The module to time and count, called with pixel values `(batch, 3, height, width)`.
        image_size (pair of `int`): Height and width of the model's images in pixels. Images of another size are
            resized by antialiased bilinear interpolation.
        embed (`Callable`): Maps pixel values to the embedding `(batch, embedding_size)`.
        image_processor: Turns `PIL.Image` into pixel values.
        classifier (`Callable`, *optional*): Maps the embedding to logits `(batch, classes)`.
        id2label (`dict`): Names of the classes.
        tokens (`int`, *optional*): Tokens in its blocks, including [CLS] and registers.
        parameters (`int`, *optional*): Parameters of the image side; those of `model` by default.
        draws (`int`): Times each image is embedded, where the model draws at random; results are averaged.
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

    def __post_init__(self):
        if self.parameters is None:
            self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @functools.cached_property
    def macs(self) -> int:
        """Multiply-accumulates of one image, including attention's products."""
        return macs_of(self.model, self.image_size)


class Vision(nn.Module):
    """An embedding and its classifier, if there is one, as one module.

    Args:
        source (`nn.Module`): The model that has the weights.
        embed (`Callable`), classifier (`Callable`, *optional*): As in `Contender`.
    """

    def __init__(self, source: nn.Module, embed: Callable, classifier: Callable | None = None):
        super().__init__()
        self.source = source
        # In a closure, as they are modules of `source` already.
        self.run = lambda images: embed(images) if classifier is None else classifier(embed(images))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.run(pixel_values)


class WithTokens(nn.Module):
    """A SparseFormer that computes with a fixed number of latent tokens.

    Args:
        model (`nn.Module`): The SparseFormer; it is not changed.
        num_tokens (`int`): Latent tokens.
    """

    def __init__(self, model: nn.Module, num_tokens: int):
        super().__init__()
        self.model, self.num_tokens = model, num_tokens
        self.base_model_arguments = getattr(model, "base_model_arguments", {})

    def forward(self, pixel_values: torch.Tensor, **arguments):
        return self.model(pixel_values, num_tokens=self.num_tokens, **arguments)


def as_teacher(anatomy: Anatomy, **others) -> Contender:
    """Describe a vision transformer as it is; `others` are further fields of the `Contender`."""
    fields = {
        "name": "teacher",
        "method": "teacher",
        "model": Vision(anatomy.source, anatomy.run_classifier or anatomy.run),
        "image_size": anatomy.image_size,
        "embed": anatomy.embed,
        "classifier": anatomy.classifier,
        "id2label": anatomy.labels.get("id2label", {}),
        "tokens": anatomy.num_prefix_tokens + anatomy.num_patches,
        "parameters": count_parameters(anatomy),
    }
    return Contender(**fields | others)


def count_parameters(anatomy: Anatomy) -> int:
    """Number of parameters of a model's image side."""
    parts = set(anatomy.model.parameters())
    if anatomy.classifier is not None:
        parts |= set(anatomy.classifier.parameters())
    if anatomy.projection is not None:
        parts |= {anatomy.projection.weight, anatomy.projection.bias} - {None}
    return sum(part.numel() for part in parts)


def load_teacher(folder: str, device: str | None = None, trust_remote_code: bool = False) -> tuple[Anatomy, object]:
    """Load a vision transformer, as an `Anatomy`, and its image processor.

    Raises:
        ValueError: if there is no such model, or it is no plain vision transformer.
    """
    model, image_processor = load_vision_model(folder, device, trust_remote_code)
    anatomy = read_anatomy(model.requires_grad_(False), size_made_by(image_processor))
    anatomy.require_plain("compare students with", embeds=True)
    return anatomy, image_maker(image_processor)


def at_lower_resolution(anatomy: Anatomy, image_processor, image_size: tuple[int, int]) -> Contender:
    """The teacher with smaller images and resampled positions, without training.

    Args:
        anatomy (`Anatomy`), image_processor: The teacher, as `load_teacher` returns it.
        image_size (pair of `int`): Height and width in pixels, multiples of the patches'.
    """
    height, width = image_size
    name = f"{height if height == width else f'{height} x {width}'} pixels"
    resized = anatomy.resized((height, width))
    return as_teacher(resized, name=name, method=LOWER_RESOLUTION, image_processor=image_processor)


def with_random_patches(anatomy: Anatomy, image_processor, patches: int, seed: int = 0, draws: int = 3) -> Contender:
    """The teacher with few of its patches, chosen at random for each image.

    Args:
        anatomy (`Anatomy`), image_processor: The teacher, as `load_teacher` returns it.
        patches (`int`): Number of patches kept after the embedding.
        seed (`int`): Seed of the choice.
        draws (`int`): As in `Contender`.
    """
    embed = RandomPatches(anatomy, patches, seed)
    return as_teacher(
        anatomy,
        name=f"{patches} random patches",
        method=RANDOM_PATCHES,
        model=Vision(anatomy.source, embed, anatomy.classifier),
        embed=embed,
        image_processor=image_processor,
        tokens=anatomy.num_prefix_tokens + patches,
        draws=draws,
    )


class RandomPatches:
    """A vision transformer's embedding of some of an image's patches, chosen at random for each image.

    Args:
        anatomy (`Anatomy`): The vision transformer.
        patches (`int`): Number of patches kept.
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
        """Return the tokens after the last block, `(batch, prefix + patches, hidden_size)`, and the indices of the
        patches kept, `(batch, patches)` int64."""
        if (dtype := next(self.anatomy.model.parameters()).dtype) != self.dtype:
            # Some parts are views of weights, which a cast leaves behind.
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
        name (`str`, *optional*): Name of the row; the folder's by default.
        baselines (sequence of `str`): Some of `BASELINES`.
        resolutions (sequence of `int`, *optional*): Shorter sides of the smaller images in pixels; by default those
            with about `SHARES` of the patches.
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
        raise ValueError(f"{error} To compare without smaller teachers: --baselines none.") from error
    contenders = [as_teacher(anatomy, name=name or Path(folder).name, image_processor=image_processor)]
    if "lower-resolution" in baselines:
        contenders += [at_lower_resolution(anatomy, image_processor, size) for size in sizes]
    if "random-patches" in baselines:
        counts = [math.prod(size) // math.prod(anatomy.patch_size) for size in sizes]
        contenders += [with_random_patches(anatomy, image_processor, count, seed) for count in counts]
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
    """Height and width of smaller images with the teacher's proportions, given their shorter side.

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


def load_students(
    folder: str,
    method: str | None = None,
    name: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> list[Contender]:
    """Load a SparseFormer, a contender for each number of tokens it is trained for, or any other model with an
    embedding.

    Args:
        folder (`str`): Folder or hub id, see `load_vision_model`.
        method (`str`, *optional*): Name of the method; by default "SparseFormer" for a single number of tokens,
            otherwise the name.
        name (`str`, *optional*): Name of the row; the folder's by default.
        device (`str`, *optional*), trust_remote_code (`bool`): As in `load_vision_model`.

    Raises:
        ValueError: if there is no such model, or it has no embedding.
    """
    model, image_processor = load_vision_model(folder, device, trust_remote_code)
    model = without_agent(model).requires_grad_(False).eval()
    size, name, config = size_made_by(image_processor), name or Path(folder).name, getattr(model, "config", None)
    fields = {"image_size": size, "image_processor": image_maker(image_processor)}
    if not is_sparseformer(config) and not (anatomy := read_anatomy(model, size)).obstacle:
        return [as_teacher(anatomy, name=name, method=method or name, **fields)]
    if (classifier := getattr(model, "classifier", None)) is not None:
        fields |= {"classifier": classifier, "id2label": dict(config.id2label)}
    if not is_sparseformer(config):
        embed = image_embedder(model, size)
        return [Contender(name, method or name, Vision(model, embed, classifier).eval(), embed=embed, **fields)]
    several = len(config.trained_token_counts) > 1
    return [
        Contender(
            f"{name}, {count} tokens" if several else name,
            method or (name if several else "SparseFormer"),
            WithTokens(model, count).eval(),
            embed=image_embedder(model, size, count),
            tokens=config.num_prefix_tokens + count,
            **fields,
        )
        for count in (config.trained_token_counts if several else [config.default_num_tokens])
    ]
