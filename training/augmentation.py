"""Views of images: what a recipe shows a model of an image, as a function of (seed, epoch, image index) alone.

Workers, processes and the batch that an image lands in change nothing, so a run resumes exactly and a later run can
regenerate the very same views. Geometry and color are torchvision v2 transforms under a random state that is set for
the sample and put back after it; pixels stay uint8 until a whole batch is normalized at once.
"""

import math
import random
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2


# What a random number is for: streams that share (seed, epoch, index) must not share numbers.
VIEW, MIX, ORDER, SHUFFLE = range(4)


def random_seed(*keys: int) -> int:
    """A well mixed 32-bit seed from integers (the finalizer of SplitMix64, chained)."""
    mask, value = (1 << 64) - 1, 0
    for key in keys:
        value = (value + key + 0x9E3779B97F4A7C15) & mask
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        value ^= value >> 31
    return value >> 32


@contextmanager
def seeded(*keys: int):
    """Draw torch's CPU random numbers from the stream of `keys` inside, and go on as before outside."""
    state = torch.get_rng_state()
    # Not torch.manual_seed: it also seeds every accelerator and is a hundred times slower.
    torch.default_generator.manual_seed(random_seed(*keys))
    try:
        yield
    finally:
        torch.set_rng_state(state)


@dataclass(frozen=True)
class ImageFormat:
    """The images that a model takes.

    Args:
        size (`tuple[int, int]`): Height and width in pixels.
        mean, std (`tuple[float, ...]`): Normalization of each channel, of values in 0..1.
        resample (`int`): PIL's number of the interpolation, 2 bilinear, 3 bicubic.
        resize (`int`, *optional*): Pixels of the shorter side before the center crop of evaluation; without it the
            image is resized to `size` as it is.
    """

    size: tuple[int, int]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: int = 2
    resize: int | None = None

    @classmethod
    def from_processor(cls, processor) -> "ImageFormat":
        """What a Transformers image processor says, also one that wraps timm's settings."""
        if (timm := getattr(processor, "data_config", None)) is not None:
            size = tuple(timm["input_size"][1:])
            return cls(
                size=size,
                mean=tuple(timm["mean"]),
                std=tuple(timm["std"]),
                resample={"nearest": 0, "bilinear": 2, "bicubic": 3}[timm["interpolation"]],
                resize=math.floor(min(size) / timm["crop_pct"]),
            )
        size, crop = processor.size, getattr(processor, "crop_size", None)
        shorter = size.get("shortest_edge")
        crop = crop if getattr(processor, "do_center_crop", None) else None
        if shorter is not None and crop is None:
            crop = {"height": shorter, "width": shorter}
        target = crop or size
        return cls(
            size=(target["height"], target["width"]),
            mean=tuple(processor.image_mean) if processor.do_normalize else (0.0, 0.0, 0.0),
            std=tuple(processor.image_std) if processor.do_normalize else (1.0, 1.0, 1.0),
            resample=int(processor.resample),
            resize=shorter,
        )

    @property
    def interpolation(self) -> InterpolationMode:
        return {0: InterpolationMode.NEAREST, 2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}[
            self.resample
        ]

    @property
    def fill(self) -> list[int]:
        """The color that normalizes to zero, 0..255."""
        return [round(255 * value) for value in self.mean]

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """`(batch, channels, height, width)` uint8 to normalized float32."""
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (self.mean, self.std))
        return pixels.float().mul_(1 / 255).sub_(mean).div_(std)


class View:
    """Turns an RGB `PIL.Image` into named uint8 tensors `(3, height, width)`; `formats` says how each is normalized.

    Subclasses draw from torch's random state.
    """

    formats: dict[str, ImageFormat]

    def __call__(self, image: Image.Image) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class EvalView(View):
    """No chance: resize and center crop as the image processor does."""

    def __init__(self, image_format: ImageFormat):
        self.formats = {"pixel_values": image_format}
        self.size, self.resize = image_format.size, image_format.resize
        self.interpolation = image_format.interpolation

    def __call__(self, image):
        pixels = v2.functional.pil_to_tensor(image)
        target = [self.resize] if self.resize else list(self.size)
        pixels = v2.functional.resize(pixels, target, self.interpolation, antialias=True)
        return {"pixel_values": v2.functional.center_crop(pixels, list(self.size))}


class SmallDataView(View):
    """Training from little data: crop, flip, RandAugment, random erasing.

    Args:
        image_format (`ImageFormat`): What the model takes.
        crop (`str`): `"padded"`, a crop of the model's size from the image resized to it and padded by reflection, or
            `"resized"`, a random part of the image resized.
        padding (`int`): Pixels on every side for `crop="padded"`.
        scale, ratio (`tuple[float, float]`): Area and aspect ratio of the part for `crop="resized"`.
        flip (`float`): Probability of a horizontal flip.
        randaugment_layers, randaugment_magnitude (`int`): Operations for an image, and their strength of 0 to 30.
        erasing (`float`): Probability of erasing a rectangle.
    """

    def __init__(
        self,
        image_format: ImageFormat,
        crop: str = "padded",
        padding: int = 4,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        randaugment_layers: int = 2,
        randaugment_magnitude: int = 9,
        erasing: float = 0.0,
    ):
        self.formats = {"pixel_values": image_format}
        size, interpolation = list(image_format.size), image_format.interpolation
        if crop == "padded":
            steps = [v2.Resize(size, interpolation), v2.RandomCrop(size, padding, padding_mode="reflect")]
        else:
            steps = [v2.RandomResizedCrop(size, scale, ratio, interpolation)]
        steps.append(v2.RandomHorizontalFlip(flip))
        if randaugment_layers:
            steps.append(
                v2.RandAugment(
                    randaugment_layers,
                    randaugment_magnitude,
                    interpolation=InterpolationMode.BILINEAR,
                    fill=image_format.fill,
                )
            )
        steps.append(v2.PILToTensor())
        if erasing:
            steps.append(v2.RandomErasing(erasing, value=image_format.fill))
        self.transform = v2.Compose(steps)

    def __call__(self, image):
        return {"pixel_values": self.transform(image)}


class BootstrapView(View):
    """Bootstrapping (Gao et al. 2024): one random part of the image, flipped or not, for student and teacher alike.

    Crop and flip are drawn once; each model gets the part at its own size and normalization. The teacher's pixels are
    called `teacher_pixel_values`, and left out where both models take the same.

    Args:
        student, teacher (`ImageFormat`): What the models take.
        scale, ratio (`tuple[float, float]`): Area and aspect ratio of the part.
        flip (`float`): Probability of a horizontal flip.
    """

    def __init__(
        self,
        student: ImageFormat,
        teacher: ImageFormat | None = None,
        scale: Sequence[float] = (0.5, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
    ):
        self.formats = {"pixel_values": student}
        if teacher is not None and (teacher.size, teacher.mean, teacher.std, teacher.resample) != (
            student.size,
            student.mean,
            student.std,
            student.resample,
        ):
            self.formats["teacher_pixel_values"] = teacher
        self.crop = v2.RandomResizedCrop(student.size, list(scale), list(ratio))
        self.flip = flip

    def __call__(self, image):
        part = self.crop.make_params([image])
        if torch.rand(()) < self.flip:
            image = v2.functional.horizontal_flip(image)
        return {
            name: v2.functional.pil_to_tensor(
                v2.functional.resized_crop(image, **part, size=list(format_.size), interpolation=format_.interpolation)
            )
            for name, format_ in self.formats.items()
        }


@dataclass
class Mix:
    """Mixup (Zhang et al. 2018), CutMix (Yun et al. 2019) and label smoothing: adds `targets`, `(batch, labels)`.

    An image mixes with its neighbor in the epoch's order, by a weight that is a function of (seed, epoch, index). Both
    are in the same process, as shares of a batch are even.

    Args:
        num_labels (`int`): Number of classes.
        mixup, cutmix (`float`): Parameter of the Beta distribution of weights; 0 turns it off. With both on, each
            image takes one of them with equal chance.
        label_smoothing (`float`): Share of the target that is spread over all classes.
        seed (`int`): The run's.
    """

    num_labels: int
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    seed: int = 0
    names: tuple[str, ...] = field(default=("pixel_values",))

    @property
    def mixes(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def __call__(self, batch: dict[str, torch.Tensor]):
        targets = torch.nn.functional.one_hot(batch["labels"], self.num_labels).float()
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / self.num_labels
        if self.mixes:
            partner = torch.arange(len(targets)) ^ 1
            height, width = batch[self.names[0]].shape[-2:]
            draws = [self._draw(*key, height, width) for key in zip(batch["epoch"], batch["index"], strict=True)]
            masks, kept = torch.stack([mask for mask, _ in draws]), torch.tensor([kept for _, kept in draws])
            for name in self.names:
                batch[name] = torch.lerp(batch[name][partner], batch[name], masks)
            targets = torch.lerp(targets[partner], targets, kept[:, None])
        batch["targets"] = targets

    def _draw(self, epoch, index, height: int, width: int) -> tuple[torch.Tensor, float]:
        """How much of the image itself each pixel keeps, `(1, height, width)`, and the mean of that."""
        numbers = random.Random(random_seed(self.seed, int(epoch), int(index), MIX))
        cuts = self.cutmix and (not self.mixup or numbers.random() < 0.5)
        alpha = self.cutmix if cuts else self.mixup
        kept = numbers.betavariate(alpha, alpha)
        if not cuts:
            return torch.full((1, height, width), kept), kept
        mask = torch.ones(1, height, width)
        side = (1 - kept) ** 0.5
        y, x = numbers.random() * height, numbers.random() * width
        rows = slice(max(0, round(y - side * height / 2)), round(y + side * height / 2))
        columns = slice(max(0, round(x - side * width / 2)), round(x + side * width / 2))
        mask[:, rows, columns] = 0
        return mask, mask.mean().item()
