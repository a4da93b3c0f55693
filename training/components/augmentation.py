"""Views of images in training: for little data and for bootstrapping; mixup and CutMix."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from ...common.views import MIX, EvalView, ImageFormat, View, random_seed, seeded_by_torch


class SmallDataView(View):
    """Views for training from little data: crop, flip, RandAugment, random erasing.

    Args:
        image_format (`ImageFormat`): The images that the model takes.
        crop (`str`): `"padded"`, a crop of the image's size from the padded image, or `"resized"`, a random part of
            the image resized.
        padding (`int`): Pixels on every side for `crop="padded"`.
        padding_mode (`str`): Content of these pixels: `"reflect"`, the image, or `"constant"`, black.
        crop_size (`int`, *optional*):
            Pixels of the image, height and width, when it is padded and cropped; it is resized for the model after
            that. The model's size if not given.
        scale, ratio (`tuple[float, float]`): Lowest and highest area, as a share of the image's, and aspect ratio of
            the part for `crop="resized"`.
        flip (`float`): Probability of a horizontal flip.
        randaugment_layers, randaugment_magnitude (`int`):
            Operations for an image, and their strength of 0 to 30, or, of timm's, 0 to 10.
        erasing (`float`): Probability of erasing a rectangle.
        augmentation (`str`):
            `"torchvision"`, whose RandAugment knows some operations in one direction alone and whose erased rectangles
            show the mean; or `"timm"`, as DeiT trains: `rand-m9-mstd0.5-inc1` for a magnitude of 9, three times as
            strong as torchvision's 9 of 30, and noise in erased rectangles (clipped to what pixels can show).
    """

    def __init__(
        self,
        image_format: ImageFormat,
        crop: str = "padded",
        padding: int = 4,
        padding_mode: str = "reflect",
        crop_size: int | None = None,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        randaugment_layers: int = 2,
        randaugment_magnitude: int = 9,
        erasing: float = 0.0,
        augmentation: str = "torchvision",
    ):
        self.formats = {"pixel_values": image_format}
        self.size, self.interpolation = image_format.size, image_format.interpolation
        self.crop_size = (crop_size, crop_size) if crop_size else self.size
        if padding >= min(self.crop_size):
            raise ValueError(
                f"--crop-padding is {padding}, expected less than the images' {min(self.crop_size)} pixels."
            )
        self.flip, self.padding, self.padding_mode = flip, padding, padding_mode
        self.part = v2.RandomResizedCrop(self.size, scale, ratio) if crop == "resized" else None
        self.randaugment = self.erasing = None
        self.of_timm, self.image_format = augmentation == "timm", image_format
        if self.of_timm:
            # Slow to import.
            from timm.data import rand_augment_transform
            from timm.data.random_erasing import RandomErasing

            if randaugment_layers:
                self.randaugment = rand_augment_transform(
                    f"rand-m{randaugment_magnitude}-n{randaugment_layers}-mstd0.5-inc1",
                    {
                        "translate_const": int(0.45 * min(self.size)),
                        "img_mean": tuple(image_format.fill),
                        "interpolation": image_format.resample,
                    },
                )
            if erasing:
                self.erasing = RandomErasing(erasing, mode="pixel", device="cpu")
            return
        if randaugment_layers:
            self.randaugment = v2.RandAugment(
                randaugment_layers,
                randaugment_magnitude,
                interpolation=InterpolationMode.BILINEAR,
                fill=image_format.fill,
            )
        if erasing:
            self.erasing = v2.RandomErasing(erasing, value=image_format.fill)

    def __call__(self, image):
        if self.part:
            box = self.part.make_params([image])
            image = v2.functional.resized_crop(image, **box, size=self.size, interpolation=self.interpolation)
        elif image.size != self.crop_size[::-1]:
            image = v2.functional.resize(image, self.crop_size, self.interpolation)
        pixels = self.crop_and_flip(np.asarray(image))
        if pixels.shape[:2] != self.size:
            pixels = np.array(v2.functional.resize(Image.fromarray(pixels), self.size, self.interpolation))
        with seeded_by_torch() if self.of_timm else nullcontext():
            if self.randaugment:
                pixels = np.array(self.randaugment(Image.fromarray(pixels)))
            pixels = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
            return {"pixel_values": self.erase(pixels) if self.erasing else pixels}

    def erase(self, pixels: torch.Tensor) -> torch.Tensor:
        """Erase a rectangle of an image, `(channels, height, width)`; timm's noise is standard normal once pixels are
        normalized."""
        if not self.of_timm:
            return self.erasing(pixels)
        erased = self.erasing(self.image_format.normalize(pixels[None])[0])
        return (255 * self.image_format.denormalize(erased)).round().clamp(0, 255).to(torch.uint8)

    def crop_and_flip(self, pixels: np.ndarray) -> np.ndarray:
        """Pad, crop and flip `(height, width, channels)`, by reflection in one indexing, which is quick."""
        height, width = pixels.shape[:2]
        padding = 0 if self.part else self.padding
        top, left = torch.randint(2 * padding + 1, (2,)).tolist() if padding else (0, 0)
        rows, columns = np.arange(height) + (top - padding), np.arange(width) + (left - padding)
        if torch.rand(()) < self.flip:
            columns = columns[::-1]
        if padding and self.padding_mode == "constant":
            pixels = np.pad(pixels, ((padding, padding), (padding, padding), (0, 0)))
            return pixels[rows[:, None] + padding, columns + padding]
        rows, columns = (n - 1 - abs(n - 1 - abs(at)) for n, at in ((height, rows), (width, columns)))
        return pixels[rows[:, None], columns]


class BootstrapView(View):
    """Views for bootstrapping (Gao et al. 2024): a random part of the image, flipped or not, for student and teacher.

    Crop and flip are drawn once; each model gets the part at its own size and normalization. The teacher's pixels are
    called `teacher_pixel_values`, and left out where both models take the same.

    Args:
        student, teacher (`ImageFormat`): The images that the models take.
        scale, ratio (`tuple[float, float]`): Lowest and highest area, as a share of the image's, and aspect ratio of
            the part.
        flip (`float`): Probability of a horizontal flip.
        zoom_out (`float`): Largest ratio of the sides of a canvas to the image's. Half of the images are put on such a
            canvas first, at a random place; 1 puts none.
        canvas_images (`float`): Share of the canvases that show another image.
        draw_image (`Callable`, *optional*): Returns another image, chosen by torch's random numbers.
    """

    def __init__(
        self,
        student: ImageFormat,
        teacher: ImageFormat | None = None,
        scale: Sequence[float] = (0.5, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        zoom_out: float = 1.0,
        canvas_images: float = 0.0,
        draw_image: Callable[[], Image.Image] | None = None,
    ):
        self.formats = {"pixel_values": student}
        # How evaluation crops the middle is nothing to a random part.
        any_crop = {"resize": None, "rounds_center": False}
        if teacher is not None and replace(teacher, **any_crop) != replace(student, **any_crop):
            self.formats["teacher_pixel_values"] = teacher
        self.crop = v2.RandomResizedCrop(student.size, list(scale), list(ratio))
        self.flip = flip
        self.zoom_out = v2.RandomZoomOut(student.fill, (1.0, zoom_out)) if zoom_out > 1 else None
        self.canvas_images, self.draw_image = canvas_images, draw_image

    def __call__(self, image):
        if self.zoom_out and torch.rand(()) < self.zoom_out.p:
            image = self.put_on_canvas(image)
        part = self.crop.make_params([image])
        if torch.rand(()) < self.flip:
            image = v2.functional.horizontal_flip(image)
        return {
            name: v2.functional.pil_to_tensor(
                v2.functional.resized_crop(image, **part, size=list(format_.size), interpolation=format_.interpolation)
            )
            for name, format_ in self.formats.items()
        }

    def put_on_canvas(self, image):
        """The image at a random place of a canvas, which is plain or another image."""
        left, top, right, bottom = self.zoom_out.make_params([image])["padding"]
        size = (left + image.width + right, top + image.height + bottom)
        if self.canvas_images and torch.rand(()) < self.canvas_images:
            canvas = self.draw_image().resize(size, Image.Resampling.BILINEAR)
        else:
            canvas = Image.new(image.mode, size, tuple(self.zoom_out.fill))
        canvas.paste(image, (left, top))
        return canvas


class PairedEvalView(View):
    """The views of an image that student and teacher get in evaluation; one tensor where both take the same."""

    def __init__(self, student: ImageFormat, teacher: ImageFormat | None = None):
        self.formats = {"pixel_values": student}
        if teacher is not None and student != teacher:
            self.formats["teacher_pixel_values"] = teacher
        self.views = {name: EvalView(image_format) for name, image_format in self.formats.items()}
        self.at_least = tuple(map(max, *(view.at_least for view in self.views.values()), (0, 0)))

    def __call__(self, image):
        return {name: view(image)["pixel_values"] for name, view in self.views.items()}


@dataclass
class Mix:
    """Mixup (Zhang et al. 2018), CutMix (Yun et al. 2019) and label smoothing: adds `targets`, `(batch, labels)`.

    An image mixes with its neighbor in the epoch's order, by a weight that is a function of (seed, epoch, index). Both
    are in the same process, as shares of a batch are even. timm draws one weight and one box for a whole batch, from
    the same distributions, and mixes with the reversed batch. Workers call `draw`; the call itself runs on the device.

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

    @property
    def pairs(self) -> bool:
        """Whether images mix at all."""
        return bool(self.mixup or self.cutmix)

    def draw(self, batch: dict[str, torch.Tensor]):
        """Add to a batch how its images mix: `kept`, `(batch,)`, the share that each keeps of itself, and `box`,
        `(batch, 4)` as top, bottom, left, right, the part that it takes from its neighbor, all zeros if it blends."""
        if self.pairs:
            keys = zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True)
            size = batch["pixel_values"].shape[-2:]
            kept, boxes = zip(*(self._draw(*key, *size) for key in keys), strict=True)
            batch["kept"], batch["box"] = torch.tensor(kept), torch.tensor(boxes)

    def __call__(self, batch: dict[str, torch.Tensor]):
        """Mix normalized images as `draw` has noted in the batch, or else draw first."""
        targets = F.one_hot(batch["labels"], self.num_labels).float()
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / self.num_labels
        if self.pairs:
            if "kept" not in batch:
                self.draw(batch)
            pixels, kept, box = batch["pixel_values"], batch.pop("kept"), batch.pop("box")
            # Each image's neighbor: pairs change places.
            partners, of_partners = (of.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) for of in (pixels, targets))
            blends = (box == 0).all(1)
            batch["pixel_values"] = torch.lerp(partners, pixels, torch.where(blends, kept, 1.0).view(-1, 1, 1, 1))
            if self.cutmix:
                inside = _inside(box, *pixels.shape[-2:])
                batch["pixel_values"] = torch.where(inside, partners, batch["pixel_values"])
            targets = torch.lerp(of_partners, targets, kept[:, None])
        batch["targets"] = targets

    def _draw(self, epoch: int, index: int, height: int, width: int) -> tuple[float, tuple[int, int, int, int]]:
        """The share that an image keeps of itself, and the box that it takes from its neighbor if it cuts."""
        numbers = random.Random(random_seed(self.seed, epoch, index, MIX))
        if not self.cutmix or (self.mixup and numbers.random() < 0.5):
            return numbers.betavariate(self.mixup, self.mixup), (0, 0, 0, 0)
        side = (1 - numbers.betavariate(self.cutmix, self.cutmix)) ** 0.5
        box = []
        for length in (height, width):
            center = numbers.random() * length
            low, high = (round(center + sign * side * length / 2) for sign in (-1, 1))
            box += [max(low, 0), min(high, length)]
        top, bottom, left, right = box
        return 1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right)


def _inside(box: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Whether each pixel lies in the box of its image, `(batch, 1, height, width)`."""
    top, bottom, left, right = box[:, :, None].unbind(1)
    rows, columns = (torch.arange(length, device=box.device) for length in (height, width))
    rows, columns = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    return (rows[:, :, None] & columns[:, None])[:, None]
