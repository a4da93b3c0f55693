"""Data sets of images from various sources, random views of images, and PyTorch datasets of views.

A view is a dict of uint8 tensors, which `collate` normalizes in batches. A training view only depends on the seed, the
epoch and the image's index, not on workers, processes or batches. So a resumed run gets the same views as a run
without interruption.
"""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import datasets
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info
from torchvision.transforms import v2
from transformers import TrainerCallback

from ..modeling.image_format import ImageFormat
from .data import check_classes, check_labels, check_same_classes, class_names, load_images
from .preprocessing import CorruptImageError, decode_image, middle_of


# Number of images in the buffer that shuffles a stream. The order of the stream's files is also shuffled.
SHUFFLE_BUFFER = 1_000
# Values of the last argument of `seeded`, so that views, mixing and captions get different random numbers.
VIEW = 0
MIX = 1
CAPTION = 4


class PlainImages:
    """A PyTorch dataset or a list of PIL images with the interface of a `datasets.Dataset`.

    Args:
        source: The dataset or list. Items are images, pairs of image and label, or dictionaries with `image` and
            optionally `label`. The attribute `classes` of torchvision's datasets contains the names of the labels.
        features (`datasets.Features`, *optional*): Types of the columns. By default, there is a column `image`, and a
            column `label` if `source.classes` exists.
    """

    def __init__(self, source, features: datasets.Features | None = None):
        self.source = source
        self.features = features or datasets.Features({"image": datasets.Image()})
        names = getattr(source.dataset if isinstance(source, Subset) else source, "classes", None)
        if features is None and names:
            self.features["label"] = datasets.ClassLabel(names=list(names))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict:
        item = self.source[index]
        if isinstance(item, dict):
            item = (item["image"], item.get("label"))
        image, *label = item if isinstance(item, tuple | list) else (item,)
        if not isinstance(image, Image.Image):
            raise ValueError(f"Item {index} of the images is a {type(image).__name__}, expected a PIL image.")
        return {"image": image} | ({"label": int(label[0])} if "label" in self.features else {})

    def select(self, indices) -> "PlainImages":
        return PlainImages(Subset(self.source, [int(index) for index in indices]), self.features)

    def remove_columns(self, name: str) -> "PlainImages":
        return PlainImages(self.source, datasets.Features({"image": self.features["image"]}))


def as_images(images) -> datasets.Dataset | datasets.IterableDataset | PlainImages:
    """Convert images to a data set with the column `image` and optionally `label`. Images are not decoded.

    Args:
        images: A `datasets.Dataset` or `IterableDataset` with a column of images, a PyTorch dataset or a list of PIL
            images (see `PlainImages`), a list of paths, or the name of a folder or data set.
    """
    if isinstance(images, PlainImages):
        return images
    if isinstance(images, datasets.Dataset | datasets.IterableDataset):
        return load_images(images)
    if isinstance(images, str | Path):
        return load_images(str(images))
    if isinstance(images, Mapping) or not hasattr(images, "__len__") or not hasattr(images, "__getitem__"):
        raise ValueError(
            f"The images are a {type(images).__name__}; expected a data set, a list of PIL images or of paths, or the "
            "name of a folder."
        )
    if isinstance(images, Sequence) and len(images) and isinstance(images[0], str | Path):
        table = datasets.Dataset.from_dict({"image": [str(path) for path in images]})
        return table.cast_column("image", datasets.Image(decode=False))
    return PlainImages(images)


def labeled_images(train, evaluation=None) -> tuple:
    """Convert training and evaluation images to data sets. Raise a ValueError if labels are missing, if the classes of
    both data sets differ, or if there are fewer than two classes."""
    parts = [None if images is None else as_images(images) for images in (train, evaluation)]
    if any(images is not None and class_names(images) is None for images in parts):
        raise ValueError("The images have no labels; expected a column of labels, or a dataset with classes.")
    for images, name in zip(parts, ("train", "evaluation"), strict=True):
        check_labels(images, name)
    check_classes(class_names(parts[0]))
    check_same_classes(class_names(parts[0]), parts[1])
    return tuple(parts)


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


class Views(Dataset, TrainerCallback):
    """PyTorch dataset of views. A view has uint8 `pixel_values` and, if the data set has labels, `labels`. Training
    views are also a callback of the trainer, which sets their epoch.

    Args:
        images: A data set with the columns `image` and optionally `label` or `mask`, for example from `as_images`.
        view (`Callable`): Makes a view of an image, or of an image and its mask. See `EvalView`.
        seed (`int`, *optional*): Seed of the random numbers that training views depend on. If `seed` is given, a view
            also has `epoch`. Evaluation views need no seed.
        skip_corrupt (`bool`): If an image cannot be read, use the next image instead.
        classes (sequence of `int`, *optional*): The model's index of each class. Default: labels stay unchanged.

    Attributes:
        views_per_image (`int`, *optional*): Number of different views of each image. Epoch `e` repeats the views of
            epoch `e % views_per_image`, and a sample's `epoch` is this remainder. By default, all epochs differ.
    """

    views_per_image: int | None = None

    def __init__(self, images, view, seed: int | None = None, skip_corrupt: bool = False, classes=None):
        self.images = images
        self.view = view
        self.seed = seed
        self.skip_corrupt = skip_corrupt
        self.classes = classes
        # The epoch is in shared memory, so that persistent workers see its new value in later epochs.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def on_epoch_begin(self, args, state, control, **kwargs):
        # A method `set_epoch` would not suffice: if a run is resumed within an epoch, Accelerate's
        # `skip_first_batches` hides the method, so that it is not called.
        self.epoch.fill_(int(state.epoch))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict:
        for position in range(index, index + len(self)):
            if sample := self.sample(position % len(self), self.images[position % len(self)]):
                return sample
        raise ValueError(f"None of the {len(self)} images of the data set can be read.")

    def sample(self, index: int, record: dict) -> dict | None:
        """Return the view of a record, or None if its image cannot be read and `skip_corrupt` is set."""
        if get_worker_info():
            # Workers ignore Ctrl-C, because the main process needs their images to finish the current step.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            parts = [decode_image(record["image"], index)]
            if "mask" in record:
                parts.append(self.view.read_mask(record["mask"], index, parts[0].size))
            if self.seed is None:
                sample = self.view(*parts) | {"index": index}
            else:
                epoch = int(self.epoch)
                if self.views_per_image:
                    epoch %= self.views_per_image
                with seeded(self.seed, epoch, index, VIEW):
                    sample = self.view(*parts) | {"epoch": epoch, "index": index}
        except CorruptImageError:
            if not self.skip_corrupt:
                raise
            return None
        if "label" in record:
            sample["labels"] = record["label"] if self.classes is None else self.classes[record["label"]]
        return sample


class StreamedViews(IterableDataset, Views):
    """Views of a shuffled stream. Each worker numbers its images so that indices are unique among workers."""

    def __init__(self, images: datasets.IterableDataset, view, seed: int, *args):
        super().__init__(images.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER), view, seed, *args)

    def __len__(self):
        raise TypeError("a stream has no length")

    def __iter__(self) -> Iterator[dict]:
        # The stream shuffles images in a new order in each epoch.
        self.images.set_epoch(int(self.epoch))
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        samples = (self.sample(first + step * number, record) for number, record in enumerate(self.images))
        return filter(None, samples)


def collate(
    samples: list[dict], formats: dict[str, ImageFormat], mix: Callable | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return a batch of views. Pixels are normalized. Numbers, such as labels, become int64 tensors.

    Args:
        samples (`list[dict]`): Views.
        formats (`dict[str, ImageFormat]`): Maps the name of a pixel tensor to the format that normalizes its pixels.
        mix (`Callable`, *optional*): Mixes the images and labels of a training batch. The random numbers of `mix`
            depend on `seed`, the epoch and the index of the batch's first image.
        seed (`int`): Seed for `mix`.
    """
    batch = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        batch[name] = torch.stack(values) if isinstance(first, torch.Tensor) else torch.tensor(values)
        if name in formats:
            batch[name] = formats[name].normalize(batch[name])
    if mix and "epoch" in batch:
        with seeded(seed, int(batch["epoch"][0]), int(batch["index"][0]), MIX):
            batch["pixel_values"], batch["labels"] = mix(batch["pixel_values"], batch["labels"])
    return batch


def mixing(num_labels: int, mixup: float, cutmix: float):
    """Return a transform of a batch that applies torchvision's `MixUp` or `CutMix`, chosen at random. `mixup` and
    `cutmix` are the parameters `alpha` of these transforms. The value 0 turns a transform off. If both are 0, return
    None."""
    kinds = ((v2.MixUp, mixup), (v2.CutMix, cutmix))
    mixes = [kind(alpha=alpha, num_classes=num_labels) for kind, alpha in kinds if alpha]
    return v2.RandomChoice(mixes) if mixes else None
