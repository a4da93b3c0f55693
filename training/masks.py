"""Load images with segmentation masks from pairs of files, from two columns of a table, or from labelme's JSON files.

A mask is a `(height, width)` uint8 tensor of class numbers. Pixels with the value 255 are ignored.
"""

import functools
import io
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps

from .choices import IGNORED
from .data import SPLITS, SYSTEM_FOLDERS, files_within, load_splits, load_table, split_names
from .files import read_text
from .preprocessing import IMAGE_ENDINGS, CorruptImageError, open_record
from .text import first_line, shortened


# Names of mask folders, in order of preference. Lossy formats are not read, because they change class numbers.
MASK_FOLDERS = ("annotations", "masks", "labels")
LOSSY = (".jpg", ".jpeg", ".webp")
# labelme's labels of pixels outside of all shapes, and of pixels to ignore.
BACKGROUND = "_background_"
IGNORE = "__ignore__"


def load_masked_splits(data, skip_corrupt: bool = False) -> tuple:
    """Load images with masks to train, evaluate and test on, see `load_splits`. If `data.class_names` is not set, it
    is set to the labels in labelme's files. See `readable_images` for `skip_corrupt`."""
    data.class_names = data.class_names or _labelme_names(_find_pairs(data.dataset)) or None
    load = functools.partial(
        load_masked_images,
        name=data.dataset_config,
        image_column=data.image_column,
        mask_column=data.mask_column,
        class_names=data.class_names,
    )
    return load_splits(data, skip_corrupt=skip_corrupt, load=load, names_of_splits=masked_split_names)


def masked_split_names(dataset: str | list[str], name: str | None = None) -> list[str]:
    return [*_find_pairs(dataset)] or split_names(dataset, name)


def load_masked_images(
    dataset: str | list, split: str, name=None, image_column=None, mask_column=None, class_names=None, streaming=False
) -> datasets.Dataset | datasets.IterableDataset:
    """Load a split of a data set with the columns `image` and `mask`, which are not decoded.

    Args:
        dataset (`str` or `list[str]`):
            A data set that `load_table` reads, with columns of images and masks; a folder with `images/SPLIT/NAME.jpg`
            and `annotations/SPLIT/NAME.png` (or `masks` or `labels` instead of `annotations`), as in ADE20K; or a
            folder with `SPLIT/NAME.jpg` and labelme's `SPLIT/NAME.json`. In a folder without splits, `SPLIT/` is
            left out of the paths.
        split (`str`): Split to load.
        name (`str`, *optional*): Name of a configuration, for hub data sets with several configurations.
        image_column, mask_column (`str`, *optional*): Names of the columns. Required if the columns are ambiguous.
        class_names (`list[str]`, *optional*): Labels in labelme's files for the classes 0, 1, …
        streaming (`bool`, *optional*, defaults to `False`): Read images only when they are used.
    """
    if pairs := _find_pairs(dataset):
        return _load_pairs(pairs, split, class_names)
    table = load_table(dataset, split, name, streaming)
    found = [column for column, feature in table.features.items() if isinstance(feature, datasets.Image)]
    image_column = image_column or next((column for column in found if column in ("image", "img")), None)
    others = [column for column in found if column != image_column]
    mask_column = mask_column or (others[0] if len(others) == 1 else None)
    if not {image_column, mask_column} <= {*found}:
        raise ValueError(
            f"{dataset!r} has the image columns {', '.join(found)}, expected images and masks: give image_column and "
            f"mask_column, or a folder with PNG masks in {', '.join(MASK_FOLDERS)}."
        )
    names = {image_column: "image", mask_column: "mask"}
    return table.select_columns([*names]).rename_columns({old: new for old, new in names.items() if old != new})


def _find_pairs(dataset: str | list[str]) -> dict[str, list[tuple[Path, Path]]]:
    """Return a dict that maps each split of a folder (see `SPLITS`) to its pairs of image file and mask file. Without
    split folders, all pairs are in "train". Without mask files, the dict is empty."""
    pairs = defaultdict(list)
    folder = Path(dataset if isinstance(dataset, str) else dataset[0])
    images = folder / "images" if (folder / "images").is_dir() else folder
    parts = sorted(path for path in images.glob("*") if path.is_dir() and not SYSTEM_FOLDERS.fullmatch(path.name))
    parts = [path for path in parts if next(files_within(path, IMAGE_ENDINGS), None)]
    for part in parts or [images]:
        roots = [folder / name / part.relative_to(images) for name in MASK_FOLDERS[::-1] if images != folder]
        mask_of = {path.stem: path for root in roots for path in _pictures(root) if path.suffix.lower() not in LOSSY}
        split = "train" if part == images else SPLITS.get(part.name.lower(), part.name)
        pairs[split] += [(image, mask_of.get(image.stem, image.with_suffix(".json"))) for image in _pictures(part)]
    return pairs if any(mask.is_file() for part in pairs.values() for _, mask in part) else {}


def _pictures(folder: Path) -> list[Path]:
    # Hidden files, such as macOS's `._x.jpg`, are left out.
    files = (path for path in folder.glob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(path for path in files if path.suffix.lower() in IMAGE_ENDINGS)


def _load_pairs(pairs: dict, split: str, class_names: list[str] | None) -> datasets.Dataset:
    # `split` may also be a split folder's name, such as "training".
    folder, bracket, numbers = split.partition("[")
    part = SPLITS.get(folder.lower(), folder)
    if part not in pairs:
        raise ValueError(f"The folder has no split {folder!r}; it has {', '.join(pairs)}.")
    [found] = datasets.ReadInstruction.from_spec(f"{part}{bracket}{numbers}").to_absolute({part: len(pairs[part])})
    names = class_names or _labelme_names(pairs)
    columns = {"image": [], "mask": []}
    for image, mask in pairs[part][found.from_ : found.to]:
        if not mask.is_file():
            raise ValueError(f"The image {image} has no mask in a folder {', '.join(MASK_FOLDERS)}, nor labelme's.")
        columns["image"].append({"bytes": None, "path": str(image)})
        is_drawn = mask.suffix == ".json"
        columns["mask"].append(_draw(mask, names) if is_drawn else {"bytes": None, "path": str(mask)})
    if not columns["image"]:
        raise ValueError(f"The split {split!r} has no images.")
    return datasets.Dataset.from_dict(columns, datasets.Features(dict.fromkeys(columns, datasets.Image(decode=False))))


def _labelme_names(pairs: dict) -> list[str]:
    files = {mask for part in pairs.values() for _, mask in part if mask.suffix == ".json" and mask.is_file()}
    labels = {shape["label"] for file in files for shape in _read_labelme(file)["shapes"]}
    return [BACKGROUND, *sorted(labels - {BACKGROUND, IGNORE})] if files else []


def _read_labelme(file: Path) -> dict:
    text = read_text(file)
    try:
        content = json.loads(text)
        if wrong := [shape["label"] for shape in content["shapes"] if not isinstance(shape["label"], str)]:
            raise ValueError(f"the label {wrong[0]!r}, expected a text")
        return {name: content[name] for name in ("shapes", "imageWidth", "imageHeight")}
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} is no file of labelme's: {type(error).__name__}: {error}.") from error


def _draw(file: Path, names: list[str]) -> dict:
    numbers = {IGNORE: IGNORED} | {name: number for number, name in enumerate(names)}
    content = _read_labelme(file)
    mask = Image.new("L", (content["imageWidth"], content["imageHeight"]), numbers.get(BACKGROUND, IGNORED))
    for shape in content["shapes"]:
        label = shape["label"]
        kind = shape.get("shape_type")
        if label not in numbers or kind != "polygon" or not shape.get("points"):
            raise ValueError(f"{file} has a {kind} {label!r}, expected polygons, with points, of {shortened(names)}.")
        points = [tuple(point) for point in shape["points"]]
        ImageDraw.Draw(mask).polygon(points, numbers[label], numbers[label])
    encoded = io.BytesIO()
    mask.save(encoded, "PNG")
    return {"bytes": encoded.getvalue(), "path": None}


class MaskReader:
    """Read masks as tensors of class numbers.

    Args:
        num_labels (`int`): Number of classes.
        ignored_labels (iterable of `int`, *optional*): Class numbers in mask files whose pixels are ignored.
        reduce_labels (`bool`, *optional*, defaults to `False`): Ignore pixels with the number 0, and read the numbers
            1, 2, … as the classes 0, 1, …, as in ADE20K.
    """

    def __init__(self, num_labels: int, ignored_labels: Iterable[int] = (), reduce_labels: bool = False):
        self.num_labels = num_labels
        self.table = np.arange(256, dtype=np.uint8)
        if reduce_labels:
            self.table[:-1] = [IGNORED, *range(IGNORED - 1)]
        self.table[[*ignored_labels]] = IGNORED

    def __call__(self, record: dict | Image.Image, index: int, size: tuple[int, int]) -> torch.Tensor:
        """Read a mask as a `(height, width)` uint8 tensor.

        Args:
            record (`dict` or `PIL.Image.Image`): An undecoded `datasets.Image` record or a PIL image.
            index (`int`): Number of the image, for messages.
            size (`tuple[int, int]`): Width and height of the upright image.
        """
        try:
            with open_record(record) as mask:
                values = np.asarray(ImageOps.exif_transpose(mask))
        except Exception as error:
            problem = f"cannot be read ({first_line(error)}); to leave such images out: skip_corrupt"
            raise CorruptImageError(f"The mask of image {index} of the data set {problem}.") from error
        values = values.astype(np.uint8) if values.dtype == bool else values
        if values.shape != size[::-1] or not np.issubdtype(values.dtype, np.integer):
            found = f"{values.dtype} of shape {values.shape}"
            raise ValueError(f"The mask of image {index} has {found}, expected class numbers of shape {size[::-1]}.")
        values = self.table[values] if values.max(initial=0) <= 255 else values
        wrong = np.unique(values[(values >= self.num_labels) & (values != IGNORED)])
        if len(wrong):
            classes = f"the classes are 0 to {self.num_labels - 1} (class_names, ignored_labels, reduce_labels)"
            raise ValueError(f"The mask of image {index} has the labels {wrong[:5].tolist()}, {classes}.")
        return torch.from_numpy(values)
