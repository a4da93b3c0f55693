"""Views of images in training: for little data, for bootstrapping and for segmentation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from ..common.choices import IGNORED
from ..common.views import LONGEST, EvalView, ImageFormat, View
from .arguments import ImageTrainingArguments, argument


@dataclass
class SmallDataArguments(ImageTrainingArguments):
    """Training of classifiers from little data: the optimizer, crops and flips."""

    metric_for_best_model: str = argument("accuracy", "Metric that chooses the best model.")
    batch_eval_metrics: bool = argument(True, "Measure batch by batch, instead of keeping all logits.")
    learning_rate: float = argument(1e-3, "Highest learning rate.")
    weight_decay: float = argument(0.05, "Weight decay; none on biases, norms, positions and [CLS].")
    lr_scheduler_type: str = argument("cosine", "Schedule, a name of Transformers.")
    attn_implementation: str | None = argument(None, "Attention in training. Default: eager on CPUs.")
    crop: str = argument("padded", "Crop of the padded image, or a random part.", choices=["padded", "resized"])
    crop_padding: int = argument(4, "Pixels of padding on each side for crop padded.")
    padding_mode: str = argument("reflect", "What they show: the image, or black.", choices=["reflect", "constant"])
    crop_size: int | None = argument(None, "Pixels of the images for crop padded. Default: the model's.")
    crop_scale: list[float] = argument([0.08, 1.0], "Lowest and highest share of the area for crop resized.")
    flip: float = argument(0.5, "Probability of a horizontal flip.")


class SmallDataView(View):
    """Views for training from little data: crop, flip, RandAugment, random erasing, all of torchvision."""

    def __init__(
        self,
        image_format: ImageFormat,
        args: SmallDataArguments,
        randaugment_layers: int = 0,
        randaugment_magnitude: int = 9,
        erasing: float = 0.0,
    ):
        self.formats = {"pixel_values": image_format}
        size, interpolation, fill = list(image_format.size), image_format.interpolation, image_format.fill
        before, padding = 2 * [args.crop_size] if args.crop_size else size, args.crop_padding
        flip = v2.RandomHorizontalFlip(args.flip)
        if args.crop == "resized":
            steps = [v2.RandomResizedCrop(size, args.crop_scale, interpolation=interpolation), flip]
        else:
            if padding >= min(before):
                raise ValueError(f"crop_padding is {padding}, expected less than the images' {min(before)} pixels.")
            crop = v2.RandomCrop(before, padding or None, padding_mode=args.padding_mode)
            steps = [v2.Resize(before, interpolation), flip, crop, v2.Resize(size, interpolation)]
        if randaugment_layers:
            bilinear = InterpolationMode.BILINEAR
            steps.append(v2.RandAugment(randaugment_layers, randaugment_magnitude, 31, bilinear, fill))
        steps.append(v2.PILToTensor())
        if erasing:
            steps.append(v2.RandomErasing(erasing, value=fill))
        self.transform = v2.Compose(steps)

    def __call__(self, image):
        return {"pixel_values": self.transform(image)}


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


def resize_pair(
    image: Image.Image, mask: torch.Tensor, size: Sequence[int], interpolation: InterpolationMode
) -> tuple[torch.Tensor, torch.Tensor]:
    """Resize an image, to a tensor, and its mask as torchvision does. The mask takes the nearest *centers*:
    torchvision's other mode, which it uses for `tv_tensors.Mask`, is half a pixel off the image."""
    pixels = v2.functional.resize(v2.functional.pil_to_tensor(image), size, interpolation, antialias=True)
    return pixels, v2.functional.resize(mask[None], size, InterpolationMode.NEAREST_EXACT)[0]


class SegmentationView(View):
    """Views for training segmentation: random resize, crop, flip and photometric distortion, alike for image and mask.

    `scale` is the range of the resized image's shorter side, in crops. A crop in which one class has more than
    `max_share` of the pixels that count is drawn anew, up to 10 times. `flip` and `distort` are probabilities.
    """

    def __init__(
        self,
        image_format: ImageFormat,
        read_mask,
        scale: Sequence[float] = (0.5, 2.0),
        max_share: float = 0.75,
        flip: float = 0.5,
        distort: float = 0.5,
    ):
        self.formats, self.read_mask, self.max_share = {"pixel_values": image_format}, read_mask, max_share
        self.sides = [max(round(factor * min(image_format.size)), 1) for factor in scale]
        fill = {tv_tensors.Image: image_format.fill, tv_tensors.Mask: IGNORED}
        self.crop = v2.RandomCrop(image_format.size, pad_if_needed=True, fill=fill)
        changes = {"brightness": 1 / 8, "contrast": 0.5, "saturation": 0.5, "hue": 0.05}
        jitters = [v2.RandomApply([v2.ColorJitter(**{name: value})], distort) for name, value in changes.items()]
        self.flip_and_distort = v2.Compose([v2.RandomHorizontalFlip(flip), *jitters])

    def __call__(self, image: Image.Image, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        # A part of a strip: resized whole, it would take gigabytes.
        part = v2.RandomCrop([min(length, LONGEST * min(mask.shape)) for length in mask.shape])
        image, mask = part(image, tv_tensors.Mask(mask))
        shorter = int(torch.randint(self.sides[0], self.sides[1] + 1, ()))
        pixels, mask = resize_pair(image, mask, [shorter], self.formats["pixel_values"].interpolation)
        pair = tv_tensors.Image(pixels), tv_tensors.Mask(mask[None])
        for _ in range(10):
            pixels, mask = self.crop(*pair)
            counts = torch.bincount(mask[mask != IGNORED].flatten().int())
            if self.max_share == 1 or ((counts > 0).sum() > 1 and counts.max() <= self.max_share * counts.sum()):
                break
        pixels, mask = self.flip_and_distort(pixels, mask)
        return {"pixel_values": pixels.as_subclass(torch.Tensor), "labels": mask[0].as_subclass(torch.Tensor)}


class SegmentationEvalView(View):
    """Views for evaluating segmentation: image and mask, resized to the model's size."""

    def __init__(self, image_format: ImageFormat, read_mask):
        self.formats, self.read_mask = {"pixel_values": image_format}, read_mask

    def __call__(self, image: Image.Image, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        image_format = self.formats["pixel_values"]
        pixels, mask = resize_pair(image, mask, list(image_format.size), image_format.interpolation)
        return {"pixel_values": pixels, "labels": mask}
