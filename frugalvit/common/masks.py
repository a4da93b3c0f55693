"""Images with masks: pairs of files or of columns, and views of both for segmentation.

A mask is a `(height, width)` uint8 tensor of class numbers; 255 does not count.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from .choices import IGNORED
from .columns import is_image
from .data import load_table, split_names
from .decoding import CorruptImageError, ImageError, is_image_file, open_record, undecoded
from .folders import image_files, part_called, say_unread, subfolders
from .splits import load_parts
from .views import LONGEST, ImageFormat, View


MASK_FOLDERS = ("annotations", "masks", "labels")
# Endings of pictures that cannot be masks.
LOSSY = (".jpg", ".jpeg", ".webp")


def load_masked_splits(data) -> tuple:
    """Load the images to train on, to evaluate on and to test on, see `load_parts`, of `MaskedImageArguments`."""
    options = {"name": data.dataset_config, "image_column": data.image_column, "mask_column": data.mask_column}

    def load(dataset: list[str], split: str, streaming: bool = False):
        return load_masked_images(dataset, split, streaming=streaming, **options)

    return load_parts(data, load, lambda dataset: masked_split_names(dataset, data.dataset_config))


def masked_split_names(dataset: str | list[str], name: str | None = None) -> list[str]:
    folder = _folder_of_pairs(dataset)
    return list(_pair_splits(folder / "images")) if folder else split_names(dataset, name)


def load_masked_images(
    dataset: str | list[str],
    split: str,
    *,
    name: str | None = None,
    image_column: str | None = None,
    mask_column: str | None = None,
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Load images and their masks into the columns `image` and `mask`, not decoded.

    A data set is a hub id (with a configuration, `name`), parquet files or a folder of them, with a column of images
    and one of masks; or a folder with `images/SPLIT/NAME.jpg` and `annotations/SPLIT/NAME.png` as ADE20K has it
    (`masks` or `labels`, too, and without SPLIT where there is one part). `split` may be a slice, `"train[:100]"`.
    """
    if folder := _folder_of_pairs(dataset):
        return _load_pairs(folder, split)
    table = load_table(dataset, split, name, streaming)
    table = table._resolve_features() if table.features is None else table
    found = [column for column, feature in table.features.items() if is_image(feature)]
    image_column = image_column or next((column for column in found if column in ("image", "img")), None)
    others = [column for column in found if column != image_column]
    mask_column = mask_column or (others[0] if len(others) == 1 else None)
    if image_column not in found or mask_column not in found:
        raise ValueError(
            f"{dataset!r} has the columns of images {', '.join(found) or '(none)'}; expected one of images and one of "
            "masks. Name them with --image-column and --mask-column."
        )
    names = {image_column: "image", mask_column: "mask"}
    # This comes first: renaming the columns of a stream would read from it.
    for column in names:
        table = table.cast_column(column, datasets.Image(decode=False))
    return table.select_columns([*names]).rename_columns({old: new for old, new in names.items() if old != new})


def _folder_of_pairs(dataset: str | list[str]) -> Path | None:
    paths = [dataset] if isinstance(dataset, str) else dataset
    return Path(paths[0]) if len(paths) == 1 and (Path(paths[0]) / "images").is_dir() else None


def _pair_splits(images: Path) -> dict[str, list[str]]:
    """Group folders of images by split: `train`, `training` and `train2017` are "train", and so are loose images."""
    splits = {}
    for folder in subfolders(images):
        if next(image_files(folder), None):
            splits.setdefault(part_called(folder.name) or folder.name, []).append(folder.name)
    return splits or {"train": ["."]}


def _load_pairs(folder: Path, split: str) -> datasets.Dataset:
    root = next((folder / name for name in MASK_FOLDERS if next(image_files(folder / name), None)), None)
    if root is None:
        raise ValueError(f"{folder} has images, but none of the folders {', '.join(MASK_FOLDERS)} has their masks.")
    part, splits = split.partition("[")[0], _pair_splits(folder / "images")
    # The name of a folder is a split, too.
    names = splits.get(part) or [name for names in splits.values() for name in names if name == part]
    columns = {"image": [], "mask": []}
    for name in names:
        say_unread(folder / "images" / name)
        mask_of = {path.stem: path for path in _images_in(root / name) if path.suffix.lower() not in LOSSY}
        for path in _images_in(folder / "images" / name):
            if path.stem not in mask_of:
                raise ValueError(f"The image {path} has no mask in {root / name}.")
            columns["image"].append(undecoded(path))
            columns["mask"].append(undecoded(mask_of[path.stem]))
    try:
        slices = datasets.ReadInstruction.from_spec(split).to_absolute({part: len(columns["image"])})
    except (ValueError, AssertionError) as error:
        raise ValueError(f"Cannot take {split!r} of {len(columns['image'])} images: {error}") from error
    chosen = [index for each in slices for index in range(each.from_, each.to)]
    if not chosen:
        raise ValueError(f"{folder} has no split {split!r} with images; it has {', '.join(splits)}.")
    features = datasets.Features(dict.fromkeys(columns, datasets.Image(decode=False)))
    return datasets.Dataset.from_dict(columns, features).select(chosen)


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if is_image_file(path) and path.is_file())


class MaskError(ImageError):
    """A mask that does not fit its image or the classes."""


class MaskReader:
    """Reads masks of classes from 0 to `num_labels` - 1. `ignored_labels` are numbers in the files that do not count;
    with `reduce_labels`, 0 does not either, and 1 is the first class, as in ADE20K."""

    def __init__(self, num_labels: int, ignored_labels: Iterable[int] = (), reduce_labels: bool = False):
        self.num_labels, self.table = num_labels, np.arange(256, dtype=np.uint8)
        if wrong := [label for label in ignored_labels if not 0 <= label <= IGNORED]:
            raise ValueError(f"Labels that do not count are {wrong}, expected numbers from 0 to {IGNORED}.")
        if reduce_labels:
            self.table[:-1] = [IGNORED, *range(IGNORED - 1)]
        self.table[[*ignored_labels]] = IGNORED

    def __call__(self, record: dict, index: int, size: tuple[int, int]) -> torch.Tensor:
        """Read the mask in an undecoded `datasets` record, for the upright image `index` of this width and height."""
        try:
            with open_record(record) as mask:
                mode, values = mask.mode, np.asarray(ImageOps.exif_transpose(mask))
        except Exception as error:
            raise CorruptImageError(
                f"The mask of image {index} of the data set cannot be read ({type(error).__name__}: {error}). Repair "
                "or remove it, or go on without such images: --skip-corrupt."
            ) from error
        values = values.astype(np.uint8) if values.dtype == bool else values
        if values.shape != size[::-1] or not np.issubdtype(values.dtype, np.integer):
            raise MaskError(
                f"The mask of image {index} is a picture of mode {mode} with {values.shape[1]} x {values.shape[0]} "
                f"pixels, expected one channel of class numbers, {size[0]} x {size[1]} as the upright image."
            )
        values = self.table[values] if values.max(initial=0) <= 255 else values
        wrong = np.unique(values[(values >= self.num_labels) & (values != IGNORED)])
        if len(wrong):
            raise MaskError(
                f"The mask of image {index} has the labels {wrong[:5].tolist()}, the classes are 0 to "
                f"{self.num_labels - 1}. Use --class-names, --ignored-labels, or --reduce-labels if 0 does not count."
            )
        return torch.from_numpy(values)


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
        read_mask: MaskReader,
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

    def __init__(self, image_format: ImageFormat, read_mask: MaskReader):
        self.formats, self.read_mask = {"pixel_values": image_format}, read_mask

    def __call__(self, image: Image.Image, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        image_format = self.formats["pixel_values"]
        pixels, mask = resize_pair(image, mask, list(image_format.size), image_format.interpolation)
        return {"pixel_values": pixels, "labels": mask}
