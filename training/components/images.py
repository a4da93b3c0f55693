"""Images in the forms in which people have them, made into data sets to train on."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import datasets
import torch
from PIL import Image
from torch.utils.data import Subset

from ...common.data import load_images, select_images
from ...common.decoding import decode_image
from ...common.labels import check_same_classes, class_names
from ...common.splits import hold_back


class PlainImages:
    """A PyTorch dataset or a list of PIL images, with records and features as a `datasets.Dataset` has them.

    Args:
        source: Has a length, and items that are images, pairs of image and label, or dictionaries with `image` and
            perhaps `label`. Its attribute `classes`, as torchvision's data sets have it, names the labels.
    """

    def __init__(self, source):
        self.source = source
        self.features = datasets.Features({"image": datasets.Image()})
        names = getattr(source.dataset if isinstance(source, Subset) else source, "classes", None)
        if names:
            self.features["label"] = datasets.ClassLabel(names=list(names))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict:
        item = self.source[index]
        if isinstance(item, dict):
            item = (item["image"], *((item["label"],) if "label" in item else ()))
        if not isinstance(item, tuple | list):
            item = (item,)
        if not isinstance(item[0], Image.Image):
            raise ValueError(f"Item {index} of the images is a {type(item[0]).__name__}, expected a PIL image.")
        record = {"image": item[0]}
        return record | {"label": int(item[1])} if "label" in self.features else record

    def select(self, indices) -> "PlainImages":
        """The images of these indices."""
        images = PlainImages(Subset(self.source, list(indices)))
        images.features = self.features
        return images

    def hold_back(self) -> tuple["PlainImages", "PlainImages"]:
        """Images to train on and images to evaluate on, see `frugalvit.common.splits.hold_back`."""
        train, evaluation = hold_back(datasets.Dataset.from_dict({"place": range(len(self))}))
        return self.select(train["place"]), self.select(evaluation["place"])

    def remove_columns(self, name: str) -> "PlainImages":
        """The same images without a column, in practice the labels."""
        images = PlainImages(self.source)
        images.features = datasets.Features({key: kind for key, kind in self.features.items() if key != name})
        return images


def is_selected(features: datasets.Features | None) -> bool:
    """Whether the columns are those that `load_images` returns."""
    others = {name: kind for name, kind in (features or {}).items() if name != "image"}
    return (
        features is not None
        and features.get("image") == datasets.Image(decode=False)
        and all(name == "label" and isinstance(kind, datasets.ClassLabel) for name, kind in others.items())
    )


def labeled_images(train, evaluation=None, test=None) -> tuple:
    """Images to train on, to evaluate on and to test on, each as `as_images` returns them, for a trainer that learns
    from labels.

    Raises:
        ValueError: if images to train or to evaluate on have no labels, or parts have different classes.
    """
    train, evaluation, test = (None if images is None else as_images(images) for images in (train, evaluation, test))
    if class_names(train) is None:
        raise ValueError(
            "The training images have no labels to train with; a dataset of PyTorch names them by its attribute "
            "classes."
        )
    if evaluation is not None and class_names(evaluation) is None:
        raise ValueError("The evaluation images have no labels; choose others with --eval-dataset or --eval-split.")
    for images in (evaluation, test):
        check_same_classes(class_names(train), images)
    return train, evaluation, test


def draw_image(images: datasets.Dataset | PlainImages) -> Image.Image:
    """One of the images, chosen by torch's random numbers; raises `ImageError` if it cannot be read."""
    index = int(torch.randint(len(images), ()))
    return decode_image(images[index]["image"], index)


def as_images(images) -> datasets.Dataset | datasets.IterableDataset | PlainImages:
    """Return images of any form in the one that `load_images` returns, or as `PlainImages`.

    Args:
        images: A `datasets.Dataset` or `IterableDataset` with a column of images, and perhaps one of labels; a dataset
            of PyTorch or a list of PIL images, see `PlainImages`; a list of paths of image files; or what
            `load_images` takes, for example a folder.

    Raises:
        ValueError: if there are no images.
    """
    if isinstance(images, datasets.Dataset | datasets.IterableDataset):
        # Those that are selected already are known by their fingerprint, for example to caches.
        return images if is_selected(images.features) else select_images(images, "the data set")
    if isinstance(images, PlainImages):
        return images
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
