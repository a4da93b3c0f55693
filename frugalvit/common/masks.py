"""Images with masks: finding and reading pairs, and views of them for segmentation.

A mask is a `(height, width)` uint8 tensor of class numbers; 255 does not count.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from .choices import IGNORED
from .columns import is_image
from .data import load_table, split_names
from .decoding import CorruptImageError, ImageError, is_image_file, open_record, orientation_of, turned, undecoded
from .folders import PART_FOLDERS, image_files, part_called, say_unread, subfolders
from .splits import load_parts
from .views import LONGEST, ImageFormat, View


MASK_FOLDERS = ("annotations", "masks", "labels")
# Endings of pictures beside a mask that are drawn to be looked at.
LOSSY = {".jpg", ".jpeg", ".webp"}


def load_masked_splits(
    data,
) -> tuple[datasets.Dataset | datasets.IterableDataset, datasets.Dataset | None, datasets.Dataset | None]:
    """The images to train on, to evaluate on and to test on, see `load_parts`, that `MaskedImageArguments` tell.

    Raises:
        ValueError: as `load_masked_images`, and if nothing can be held back.
    """
    options = {"name": data.dataset_config, "image_column": data.image_column, "mask_column": data.mask_column}

    def load(dataset: list[str], split: str, streaming: bool = False):
        return load_masked_images(dataset, split, streaming=streaming, **options)

    return load_parts(data, load, lambda dataset: masked_split_names(dataset, data.dataset_config))


def masked_split_names(dataset: str | list[str], name: str | None = None) -> list[str]:
    """The splits of a data set. Arguments and errors as in `load_masked_images`."""
    paths = [dataset] if isinstance(dataset, str) else list(dataset)
    images = Path(paths[0]) / "images"
    return list(_pair_splits(images)) if len(paths) == 1 and images.is_dir() else split_names(dataset, name)


def load_masked_images(
    dataset: str | list[str],
    split: str,
    *,
    name: str | None = None,
    image_column: str | None = None,
    mask_column: str | None = None,
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Load images and their masks.

    Args:
        dataset (`str` or `list[str]`):
            A hub id, parquet files or a folder of them, with a column of images and one of masks; or a folder with
            `images/SPLIT/NAME.jpg` and `annotations/SPLIT/NAME.png` as ADE20K has it (`masks` or `labels` too, and
            without SPLIT where there is one part).
        split (`str`): Name of the part; for files, also slices such as `"train[:100]"`.
        name (`str`, *optional*): Configuration of a hub data set that has several.
        image_column, mask_column (`str`, *optional*): Their names, where there are more than two columns of images or
            no column is called "image".
        streaming (`bool`): Whether images are read as training goes on, without a copy on disk; not of folders of
            pairs.

    Returns:
        `datasets.Dataset` (`IterableDataset` when streaming) with the columns `image` and `mask`, not decoded.

    Raises:
        ValueError: if there is no such data set, split or column, or images lack masks.
    """
    paths = [dataset] if isinstance(dataset, str) else list(dataset)
    if len(paths) == 1 and (Path(paths[0]) / "images").is_dir():
        return _load_pairs(Path(paths[0]), split)
    table = load_table(dataset, split, name, streaming)
    if table.features is None:
        table = table._resolve_features()
    found = [column for column, feature in table.features.items() if is_image(feature)]
    for column in (image_column, mask_column):
        if column is not None and column not in found:
            raise ValueError(
                f"{dataset!r} has no column {column!r} of images; it has {', '.join(found) or 'none'} among "
                f"{', '.join(table.features)}."
            )
    image_column = image_column or next((column for column in found if column in ("image", "img")), None)
    others = [column for column in found if column != image_column]
    mask_column = mask_column or (others[0] if len(others) == 1 else None)
    if image_column is None or mask_column is None:
        raise ValueError(
            f"{dataset!r} has the columns of images {', '.join(found) or '(none)'}; expected one of images and one of "
            "masks. Name them with --image-column and --mask-column."
        )
    # This comes first: renaming the columns of a stream would read from it.
    for column in (image_column, mask_column):
        table = table.cast_column(column, datasets.Image(decode=False))
    table = table.select_columns([image_column, mask_column])
    names = {image_column: "image", mask_column: "mask"}
    table = table.rename_columns({old: new for old, new in names.items() if old != new})
    if not streaming and not len(table):
        raise ValueError(f"The split {split!r} of {dataset!r} has no images.")
    return table


def _pair_splits(images: Path) -> dict[str, list[str]]:
    """The folders in a folder of images, by split. A folder that is called like a part (`train`, `training`,
    `train2017`, …) has the part's name, another one its own. Without folders, all images are "train"."""
    folders = [folder.name for folder in subfolders(images) if next(image_files(folder), None)]
    splits = {}
    for folder in folders:
        splits.setdefault(part_called(folder) or folder, []).append(folder)
    return {split: splits[split] for split in sorted(splits, key=[*PART_FOLDERS, *folders].index)} or {"train": ["."]}


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if is_image_file(path) and path.is_file())


def _by_loss(files: list[Path]) -> list[Path]:
    """Sort pictures so that those of lossy formats, which cannot be masks, come first."""
    return sorted(files, key=lambda path: path.suffix.lower() not in LOSSY)


def _load_pairs(folder: Path, split: str) -> datasets.Dataset:
    roots = [folder / name for name in MASK_FOLDERS if next(image_files(folder / name), None)]
    if not roots:
        raise ValueError(f"{folder} has images, but none of the folders {', '.join(MASK_FOLDERS)} has their masks.")
    part, splits = split.partition("[")[0], _pair_splits(folder / "images")
    # A folder's own name is understood, too.
    names = splits.get(part) or [name for names in splits.values() for name in names if name == part]
    if not names:
        raise ValueError(f"{folder} has no split {part!r}; it has {', '.join(splits)}.")
    columns = {"image": [], "mask": []}
    for name in names:
        images, masks = folder / "images" / name, roots[0] / name
        say_unread(images)
        of_stem = {path.stem: path for path in _by_loss(_images_in(masks))}
        files = _images_in(images)
        if missing := [path.name for path in files if path.stem not in of_stem]:
            raise ValueError(f"{len(missing)} images in {images} have no mask in {masks}, for example {missing[0]}.")
        columns["image"] += map(undecoded, files)
        columns["mask"] += [undecoded(of_stem[path.stem]) for path in files]
    if not columns["image"]:
        raise ValueError(f"There are no images in {folder / 'images' / names[0]}.")
    table = datasets.Dataset.from_dict(columns)
    table = table.cast_column("image", datasets.Image(decode=False)).cast_column("mask", datasets.Image(decode=False))
    try:
        slices = datasets.ReadInstruction.from_spec(split).to_absolute({part: len(table)})
    except (ValueError, AssertionError) as error:
        raise ValueError(f"Cannot take {split!r} of {len(table)} images: {error}") from error
    table = table.select([index for each in slices for index in range(each.from_, each.to)])
    if not len(table):
        raise ValueError(f"The split {split!r} of {folder} has no images.")
    return table


class MaskError(ImageError):
    """A mask that does not fit its image or the classes."""


class MaskReader:
    """Reads masks and checks them.

    Args:
        num_labels (`int`): Classes, 0 to `num_labels` - 1.
        ignored_labels (iterable of `int`): Numbers in the files that do not count.
        reduce_labels (`bool`): Whether 0 in the files does not count and 1 is the first class, as in ADE20K.

    Raises:
        ValueError: if `ignored_labels` has numbers beyond 0 to 255.
    """

    def __init__(self, num_labels: int, ignored_labels: Iterable[int] = (), reduce_labels: bool = False):
        self.num_labels = num_labels
        if wrong := [label for label in ignored_labels if not 0 <= label <= IGNORED]:
            raise ValueError(f"Labels that do not count are {wrong}, expected numbers from 0 to {IGNORED}.")
        table = np.arange(256)
        table[list(ignored_labels)] = IGNORED
        if reduce_labels:
            table = np.where(table == IGNORED, IGNORED, np.where(np.arange(256) == 0, IGNORED, table - 1))
        self.table = table.astype(np.uint8)

    def __call__(self, record: dict, index: int, size: tuple[int, int], orientation: int = 1) -> torch.Tensor:
        """Read the mask of an undecoded `datasets` record, for an upright image of this width and height.

        Args:
            record (`dict`): Bytes or path of the mask.
            index (`int`): The image's index, for errors.
            size (pair of `int`): Width and height of the image, upright.
            orientation (`int`, *optional*, defaults to 1): The image's orientation in its file, see `orientation_of`.
                A mask without one of its own has the image's, if its size tells so.

        Raises:
            CorruptImageError: if it cannot be read.
            MaskError: if it has another size, several channels, or numbers that are no classes; or if its size does
                not tell whether it lies as the file of its image or upright.
        """
        try:
            with open_record(record) as mask:
                mask.load()
                if (own := orientation_of(mask)) != 1:
                    mask = turned(mask, own)
            values = np.asarray(mask)
        except Exception as error:
            raise CorruptImageError(
                f"The mask of image {index} of the data set cannot be read ({type(error).__name__}: {error}). Repair "
                "or remove it, or go on without such images: --skip-corrupt."
            ) from error
        values = values.astype(np.uint8) if values.dtype == bool else values
        if values.ndim != 2 or not np.issubdtype(values.dtype, np.integer):
            raise MaskError(
                f"The mask of image {index} is a picture of mode {mask.mode}, expected one channel of class numbers."
            )
        if orientation != 1 and own == 1:
            upright = turned(mask, orientation)
            if mask.size == upright.size == size:
                raise MaskError(
                    f"The file of image {index} says that it is to be turned (EXIF orientation {orientation}), and its"
                    " mask does not tell whether it is to be, too. Write both as they are to be seen, the image by "
                    "exiftran -ai or ImageOps.exif_transpose."
                )
            if upright.size == size:
                mask, values = upright, np.asarray(upright)
        if mask.size != size:
            raise MaskError(
                f"The mask of image {index} has {mask.size[0]} x {mask.size[1]} pixels, the image {size[0]} x "
                f"{size[1]}; expected the same size."
            )
        values = self.table[values] if values.max(initial=0) <= 255 else values
        wrong = np.unique(values[(values >= self.num_labels) & (values != IGNORED)])
        if len(wrong):
            raise MaskError(
                f"The mask of image {index} has the labels {wrong[:5].tolist()}, the classes are 0 to "
                f"{self.num_labels - 1}. Name all classes with --class-names, those that do not count with "
                "--ignored-labels, or shift them with --reduce-labels if 0 does not count."
            )
        return torch.from_numpy(values)


def resize_pair(
    image: Image.Image, mask: torch.Tensor, size: list[int], interpolation: InterpolationMode
) -> tuple[torch.Tensor, torch.Tensor]:
    """Resize an image, to a tensor, and its mask as torchvision does. The mask takes the nearest *centers*:
    torchvision's other mode, which it uses for `tv_tensors.Mask`, is half a pixel off the image."""
    pixels = v2.functional.resize(v2.functional.pil_to_tensor(image), size, interpolation, antialias=True)
    return pixels, v2.functional.resize(mask[None], size, InterpolationMode.NEAREST_EXACT)[0]


def part_of_strip(image: Image.Image, mask: torch.Tensor) -> tuple[Image.Image, torch.Tensor]:
    """A random part of a strip and of its mask, `LONGEST` times as long as wide; other images as they are."""
    longest = LONGEST * min(image.size)
    if max(image.size) <= longest:
        return image, mask
    start = int(torch.randint(max(image.size) - longest + 1, ()))
    left, top = (start if length > longest else 0 for length in image.size)
    width, height = (min(length, longest) for length in image.size)
    return image.crop((left, top, left + width, top + height)), mask[top : top + height, left : left + width]


class SegmentationView(View):
    """Views for training segmentation: random resize, crop, flip and photometric distortion, alike for image and mask.

    Args:
        image_format (`ImageFormat`): The images that the model takes; their size is that of the crop.
        read_mask (`MaskReader`): Reads the masks.
        scale (`tuple[float, float]`): Lowest and highest shorter side of the resized image, in shorter sides of the
            crop.
        max_share (`float`): Largest share that one class may have of the pixels that count. Other crops are drawn
            anew, up to 10 times; with 1, none are.
        flip (`float`): Probability of a horizontal flip.
        distort (`float`): Probability of each change of brightness, contrast, saturation and hue.
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
        self.formats, self.read_mask = {"pixel_values": image_format}, read_mask
        shorter, self.max_share = min(image_format.size), max_share
        low, high = (max(round(factor * shorter), 1) for factor in scale)
        self.sides, self.interpolation = (low, high), image_format.interpolation
        self.crop = v2.RandomCrop(
            image_format.size,
            pad_if_needed=True,
            fill={tv_tensors.Image: image_format.fill, tv_tensors.Mask: IGNORED},
        )
        changes = {"brightness": 1 / 8, "contrast": 0.5, "saturation": 0.5, "hue": 0.05}
        self.flip_and_distort = v2.Compose(
            [
                v2.RandomHorizontalFlip(flip),
                *(v2.RandomApply([v2.ColorJitter(**{name: value})], distort) for name, value in changes.items()),
            ]
        )

    def __call__(self, image: Image.Image, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        image, mask = part_of_strip(image, mask)
        shorter = [int(torch.randint(self.sides[0], self.sides[1] + 1, ()))]
        pixels, mask = resize_pair(image, mask, shorter, self.interpolation)
        pair = tv_tensors.Image(pixels), tv_tensors.Mask(mask[None])
        for _ in range(10):
            pixels, mask = self.crop(*pair)
            if self.max_share == 1:
                break
            counts = torch.bincount(mask[mask != IGNORED].flatten().int())
            if (counts > 0).sum() > 1 and counts.max() <= self.max_share * counts.sum():
                break
        pixels, mask = self.flip_and_distort(pixels, mask)
        return {"pixel_values": pixels.as_subclass(torch.Tensor), "labels": mask[0].as_subclass(torch.Tensor)}


class SegmentationEvalView(View):
    """Views for evaluating segmentation: image and mask, resized to the model's size."""

    def __init__(self, image_format: ImageFormat, read_mask: MaskReader):
        self.formats, self.read_mask = {"pixel_values": image_format}, read_mask
        self.size, self.interpolation = list(image_format.size), image_format.interpolation

    def __call__(self, image: Image.Image, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        pixels, mask = resize_pair(image, mask, self.size, self.interpolation)
        return {"pixel_values": pixels, "labels": mask}
