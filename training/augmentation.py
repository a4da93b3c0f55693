"""Transforms of an image into a view. A view is a dict of uint8 tensors, which `collate` normalizes in batches. A
training view depends only on the seed, the epoch and the image index, so that a resumed run gets the same views."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torchvision.transforms import v2

from ..modeling.image_format import ImageFormat
from .preprocessing import middle_of


# Values of the last argument of `seeded`, so that views, mixing and captions get different random numbers.
VIEW = 0
MIX = 1
CAPTION = 4


@contextmanager
def seeded(*keys: int):
    """Seed PyTorch's CPU generator for a `with` block, and restore the generator's earlier state afterwards. The seed
    is a hash of `keys`, computed by the finalizer of SplitMix64."""
    mask = (1 << 64) - 1
    seed = 0
    for key in keys:
        seed = (seed + key + 0x9E3779B97F4A7C15) & mask
        seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 & mask
        seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EB & mask
        seed ^= seed >> 31
    state = torch.get_rng_state()
    # `torch.manual_seed` would also seed every accelerator, and is a hundred times slower than
    # `torch.default_generator.manual_seed`.
    torch.default_generator.manual_seed(seed >> 32)
    try:
        yield
    finally:
        torch.set_rng_state(state)


class EvalView:
    """Resize and center-crop an image in the same way as the model's image processor. A view has `pixel_values`.
    If a teacher's image format differs from the model's, a view also has `teacher_pixel_values`."""

    def __init__(self, image_format: ImageFormat, teacher: ImageFormat | None = None):
        self.formats = {"pixel_values": image_format}
        if teacher not in (None, image_format):
            self.formats["teacher_pixel_values"] = teacher

    def __call__(self, image):
        views = {}
        for name, image_format in self.formats.items():
            height, width = image_format.size
            size = [image_format.resize] if image_format.resize else [height, width]
            pixels = v2.functional.pil_to_tensor(middle_of(image) if image_format.resize else image)
            pixels = v2.functional.resize(pixels, size, image_format.interpolation, antialias=True)
            # Transformers rounds the offset of the crop down. The center crops of timm and torchvision use `round`.
            to_int = round if image_format.rounds_center else int
            top = to_int((pixels.shape[-2] - height) / 2)
            left = to_int((pixels.shape[-1] - width) / 2)
            views[name] = v2.functional.crop(pixels, top, left, height, width)
        return views


class BootstrapView:
    """Crop and flip an image at random for bootstrapping (Gao et al. 2024). Student and teacher get the same crop,
    resized to the image size of each model. If the image formats of student and teacher are equal,
    `teacher_pixel_values` is left out.

    Args:
        student (`ImageFormat`): The student's image format.
        teacher (`ImageFormat`, *optional*): The teacher's image format.
        scale (`tuple[float, float]`): Lowest and highest area of a crop, relative to the image's area.
        ratio (`tuple[float, float]`): Lowest and highest aspect ratio of a crop.
        flip (`float`): Probability of a horizontal flip.
        zoom_out (`float`): Before the crop, half of the images are placed at a random position on a larger canvas.
            `zoom_out` is the highest ratio of the canvas's sides to the image's sides. With the value 1, there is no
            canvas.
    """

    def __init__(
        self,
        student: ImageFormat,
        teacher: ImageFormat | None = None,
        scale: Sequence[float] = (0.5, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        zoom_out: float = 1.0,
    ):
        self.formats = {"pixel_values": student}
        self.flip = flip
        # `resize` and `rounds_center` are not compared, because only evaluation views use these fields.
        any_crop = {"resize": None, "rounds_center": False}
        if teacher is not None and replace(teacher, **any_crop) != replace(student, **any_crop):
            self.formats["teacher_pixel_values"] = teacher
        self.crop = v2.RandomResizedCrop(student.size, list(scale), list(ratio))
        self.zoom_out = v2.RandomZoomOut(student.fill, (1.0, zoom_out)) if zoom_out != 1 else None

    def __call__(self, image):
        if self.zoom_out:
            image = self.zoom_out(image)
        part = self.crop.make_params([image])
        if torch.rand(()) < self.flip:
            image = v2.functional.horizontal_flip(image)
        return {
            name: v2.functional.pil_to_tensor(
                v2.functional.resized_crop(image, **part, size=list(format_.size), interpolation=format_.interpolation)
            )
            for name, format_ in self.formats.items()
        }
