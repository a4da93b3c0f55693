"""A `Contender`: a model that is measured beside others, what it costs, and how fast it is."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torchvision.transforms import v2

from ..modeling.hosts import Anatomy
from .macs import macs_of
from .speed import images_per_second


@dataclass
class Contender:
    """A model that is measured beside others.

    Args:
        name (`str`): Name of its row.
        method (`str`): Name of the method that made it; contenders of one method are a line of the picture.
        model (`nn.Module`): The module that is timed and counted, called with pixel values `(batch, num_channels,
            height, width)`.
        image_size (pair of `int`): Height and width in pixels that the model takes. If the image processor makes
            others, images are resized by antialiased bilinear interpolation.
        embed (`Callable`, *optional*): Takes pixel values to the embedding `(batch, embedding_size)`, comparable with
            the teacher's. It and the image processor are needed where images are looked at.
        image_processor (*optional*): Turns `PIL.Image` into pixel values.
        classifier (`Callable`, *optional*): Takes the embedding to logits `(batch, classes)`.
        id2label (`dict`): Names of the classes.
        tokens (`int`, *optional*): Tokens in its blocks, [CLS] and registers counted.
        num_tokens (`int`, *optional*): Those among them that its method chooses, a teacher's patches or a
            SparseFormer's latent tokens.
        parameters (`int`, *optional*): Number of parameters of the image side; those of `model` if not given.
        num_channels (`int`): Channels of its images.
        draws (`int`): Number of times that an image is embedded, if chance has a part; results are averaged.
        load (`Callable`, *optional*): Makes the contender again, in another process; it has to be picklable. Without
            it, memory is not measured.
    """

    name: str
    method: str
    model: nn.Module
    image_size: tuple[int, int]
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    image_processor: object = None
    classifier: Callable[[torch.Tensor], torch.Tensor] | None = None
    id2label: dict[int, str] = field(default_factory=dict)
    tokens: int | None = None
    num_tokens: int | None = None
    parameters: int | None = None
    num_channels: int = 3
    draws: int = 1
    load: "Callable[[], Contender] | None" = None

    def __post_init__(self):
        if self.parameters is None:
            self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @functools.cached_property
    def macs(self) -> int:
        """Multiply-accumulates of one image, attention's products counted."""
        return macs_of(self.model, self.image_size, self.num_channels)

    def noise(self, batch_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A batch of images for the model, `(batch_size, num_channels, height, width)`."""
        return torch.randn(batch_size, self.num_channels, *self.image_size).to(self.device, dtype)

    def fit(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Resize pixel values that the image processor made to the size that the model takes."""
        if pixel_values.shape[-2:] == self.image_size:
            return pixel_values
        return v2.functional.resize(pixel_values, list(self.image_size), v2.InterpolationMode.BILINEAR, antialias=True)


class Vision(nn.Module):
    """An embedding and the classifier that reads it, if there is one, as one module.

    Args:
        source (`nn.Module`): The model that has the weights.
        embed (`Callable`), classifier (`Callable`, *optional*): As of a `Contender`.
    """

    def __init__(self, source: nn.Module, embed: Callable, classifier: Callable | None = None):
        super().__init__()
        self.source = source
        # Not modules of this one besides: they are the source's.
        self.run = lambda images: embed(images) if classifier is None else classifier(embed(images))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.run(pixel_values)


class WithTokens(nn.Module):
    """A SparseFormer that computes with a fixed number of latent tokens.

    Args:
        model (`nn.Module`): The SparseFormer, which is left as it is.
        num_tokens (`int`): Latent tokens.
    """

    def __init__(self, model: nn.Module, num_tokens: int):
        super().__init__()
        self.model, self.num_tokens = model, num_tokens
        self.base_model_arguments = getattr(model, "base_model_arguments", {})

    def forward(self, pixel_values: torch.Tensor, **arguments):
        return self.model(pixel_values, num_tokens=self.num_tokens, **arguments)


def as_teacher(anatomy: Anatomy, image_size: tuple[int, int] | None = None, **others) -> Contender:
    """A vision transformer as it is.

    Args:
        anatomy (`Anatomy`): Its anatomy.
        image_size (pair of `int`, *optional*): Height and width of its images in pixels, if not the anatomy's.
        others: Other fields of the `Contender`.
    """
    size = image_size or anatomy.image_size
    patches = math.prod(
        pixels * count // native for pixels, native, count in zip(size, anatomy.image_size, anatomy.grid, strict=True)
    )
    fields = {
        "name": "teacher",
        "method": "teacher",
        "model": Vision(anatomy.source, anatomy.run_classifier or anatomy.run),
        "image_size": size,
        "embed": anatomy.embed,
        "classifier": anatomy.classifier,
        "id2label": anatomy.labels.get("id2label", {}),
        "tokens": anatomy.num_prefix_tokens + patches,
        "num_tokens": patches,
        "parameters": count_parameters(anatomy),
    }
    return Contender(**fields | others)


def as_students(model: nn.Module, image_size: tuple[int, int], num_channels: int = 3) -> list[Contender]:
    """A SparseFormer with each count of tokens that it is made for, the smallest first; another model as it is.

    Args:
        model (`nn.Module`): The model.
        image_size (pair of `int`), num_channels (`int`): Height, width and channels of its images.
    """
    fields = {"name": "student", "method": "SparseFormer", "image_size": image_size, "num_channels": num_channels}
    counts = getattr(model.config, "trained_token_counts", None)
    if counts is None:
        return [Contender(model=model, **fields)]
    front = model.config.num_prefix_tokens
    return [Contender(model=WithTokens(model, n), tokens=front + n, num_tokens=n, **fields) for n in counts]


def count_parameters(anatomy: Anatomy) -> int:
    """Number of parameters of a model's image side."""
    parts = [*anatomy.model.parameters()]
    parts += anatomy.classifier.parameters() if anatomy.classifier is not None else ()
    if anatomy.projection is not None:
        parts += [part for part in (anatomy.projection.weight, anatomy.projection.bias) if part is not None]
    return sum(part.numel() for part in set(parts))


def measure_speeds(
    contenders: Sequence[Contender],
    batch_size: int,
    dtype: torch.dtype = torch.float32,
    rounds: int = 20,
    limit: float = math.inf,
) -> list[float]:
    """Images a second of contenders, each in batches of images of its own size; their passes take turns.

    Args:
        contenders (sequence of `Contender`): In evaluation mode, in `dtype`.
        batch_size (`int`), dtype (`torch.dtype`): Of the images.
        rounds (`int`), limit (`float`): As of `images_per_second`.
    """
    models = {number: contender.model for number, contender in enumerate(contenders)}
    images = {number: contender.noise(batch_size, dtype) for number, contender in enumerate(contenders)}
    return [*images_per_second(models, images, rounds, limit).values()]
