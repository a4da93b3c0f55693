"""Views of images for bootstrapping."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torchvision.transforms import v2

from ..common.views import EvalView, ImageFormat, View


class BootstrapView(View):
    """Views for bootstrapping (Gao et al. 2024): a random part of the image, flipped or not, for student and teacher,
    each at its own size. The teacher's `teacher_pixel_values` are left out where both models take the same.

    Args:
        student, teacher (`ImageFormat`): The images that the models take.
        scale, ratio (`tuple[float, float]`): Lowest and highest share of the area, and aspect ratio, of the part.
        flip (`float`): Probability of a horizontal flip.
        zoom_out (`float`): Largest ratio of the sides of a canvas to the image's. Half of the images are put on such a
            canvas first, at a random place; 1 puts none.
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
        self.formats, self.flip = {"pixel_values": student}, flip
        # Their center crops, for evaluation, may differ.
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


class PairedEvalView(View):
    """The views of an image that student and teacher get in evaluation; one tensor where both take the same."""

    def __init__(self, student: ImageFormat, teacher: ImageFormat | None = None):
        self.formats = {"pixel_values": student}
        if teacher is not None and student != teacher:
            self.formats["teacher_pixel_values"] = teacher
        self.views = {name: EvalView(image_format) for name, image_format in self.formats.items()}

    def __call__(self, image):
        return {name: view(image)["pixel_values"] for name, view in self.views.items()}
