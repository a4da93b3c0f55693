"""ImageNet-1K's relatives: which of a model's answers are right for an image. All tables come from timm."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import datasets
from timm.data.real_labels import RealLabelsImagenet

from ..common.labels import IMAGENET_CLASSES, match_labels


_VALIDATION_NAME = re.compile(r"ILSVRC2012_val_\d{8}")


@dataclass(frozen=True)
class RightAnswers:
    """The right classes of images.

    Args:
        right (`list[list[int]]`): For each image, its right classes, as indices of `classes`; an image without any
            does not count.
        classes (`list[int]`, *optional*): The model's classes that are compared; all if `None`.
    """

    right: list[list[int]]
    classes: list[int] | None = None


def right_answers(protocol: str, images: datasets.Dataset, id2label: Mapping[int, str]) -> RightAnswers:
    """Return the right classes of each image of a data set.

    Args:
        protocol (`str`): One of `PROTOCOLS`.
        images (`datasets.Dataset`): Images, as `load_images` returns them.
        id2label (`Mapping[int, str]`): The model's classes; 1,000 in ImageNet's order for all but `"labels"`.

    Raises:
        ValueError: if labels are missing, the data set is not what the protocol is for, or the model does not know a
            label.
    """
    if protocol != "labels" and len(id2label) != IMAGENET_CLASSES:
        raise ValueError(
            f"--protocol {protocol} is for models with ImageNet's 1,000 classes; this has {len(id2label)}."
        )
    if protocol == "imagenet-real":
        return RightAnswers(_real_labels(images))
    if "label" not in images.features:
        raise ValueError("The data set has no labels to compare with; name their column with --label-column.")
    names, labels = images.features["label"].names, images["label"]
    if (unlabeled := next((i for i, label in enumerate(labels) if label is None or label < 0), None)) is not None:
        raise ValueError(f"Image {unlabeled} of the data set has no label; choose another --split.")
    if protocol == "imagenet-a":
        return _imagenet_a(names, labels)
    if protocol == "imagenet-v2" and set(names) - {str(index) for index in range(IMAGENET_CLASSES)}:
        raise ValueError(f"ImageNet-V2's classes are named 0 to 999; this data set's {', '.join(names[:3])}, …")
    known = match_labels(names, id2label)
    return RightAnswers([[known[label]] for label in labels])


def _imagenet_a(names: Sequence[str], labels: Sequence[int]) -> RightAnswers:
    synsets = _table("imagenet_a_synsets.txt")
    if unknown := sorted(set(names) - set(synsets)):
        raise ValueError(f"ImageNet-A's classes are 200 of WordNet's numbers; {unknown[0]!r} is none of them.")
    places = [synsets.index(name) for name in names]
    return RightAnswers(
        [[places[label]] for label in labels], [int(index) for index in _table("imagenet_a_indices.txt")]
    )


def _real_labels(images: datasets.Dataset) -> list[list[int]]:
    # It wants as many file names as there are, before it tells the labels.
    labels = RealLabelsImagenet(range(50_000)).real_labels
    found = [_VALIDATION_NAME.search(Path(image["path"] or "").name) for image in images["image"]]
    if None in found:
        path = images[found.index(None)]["image"]["path"]
        raise ValueError(
            f"ReaL labels belong to files named as ILSVRC2012_val_00000001.JPEG; image {found.index(None)} of the "
            f"data set is {path or 'without a name'}."
        )
    return [labels[f"{match[0]}.JPEG"] for match in found]


def _table(name: str) -> list[str]:
    return resources.files("timm.data").joinpath("_info", name).read_text(encoding="utf-8").split()
