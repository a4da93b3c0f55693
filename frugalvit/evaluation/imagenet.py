"""Right answers for ImageNet-1K and its relatives. All tables come from timm."""

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import datasets
from timm.data.real_labels import RealLabelsImagenet

from ..common.labels import IMAGENET_CLASSES, check_labels, class_names, match_labels
from ..common.tables import shortened


def right_answers(
    protocol: str, images: datasets.Dataset, id2label: Mapping[int, str]
) -> tuple[list[list[int]], list[int] | None]:
    """Return the right classes of each image of a data set.

    Args:
        protocol (`str`): `"labels"`, those of the data set; `"imagenet-v2"`, folders named 0 to 999;
            `"imagenet-real"`, the ReaL labels of ImageNet's validation images; or `"imagenet-a"`, 200 classes alone.
        images (`datasets.Dataset`): Images, as `load_images` returns them.
        id2label (`Mapping[int, str]`): The model's classes; 1,000 in ImageNet's order for all but `"labels"`.

    Returns:
        `tuple`: For each image its right classes, none if it does not count; and the model's classes to compare, which
        these are indices of, or `None` for all.
    """
    if protocol != "labels" and len(id2label) != IMAGENET_CLASSES:
        raise ValueError(f"--protocol {protocol} is for ImageNet's 1,000 classes; this model has {len(id2label)}.")
    if protocol == "imagenet-real":
        # timm's class expects all file names.
        labels = RealLabelsImagenet(range(50_000)).real_labels
        return [labels[_validation_name(image["path"])] for image in images["image"]], None
    names = class_names(images)
    if names is None:
        raise ValueError("The data set has no labels to compare with; name their column with --label-column.")
    check_labels(images, str(images.split or "given"))
    if protocol == "imagenet-a":
        synsets = _table("imagenet_a_synsets.txt")
        if unknown := sorted(set(names) - set(synsets)):
            raise ValueError(f"ImageNet-A's classes are 200 of WordNet's numbers; {unknown[0]!r} is none of them.")
        known, compared = [synsets.index(name) for name in names], _table("imagenet_a_indices.txt")
        return [[known[label]] for label in images["label"]], list(map(int, compared))
    if protocol == "imagenet-v2" and set(names) - {str(index) for index in range(IMAGENET_CLASSES)}:
        raise ValueError(f"ImageNet-V2's classes are named 0 to 999; this data set's {shortened(names)}")
    known = match_labels(names, id2label)
    return [[known[label]] for label in images["label"]], None


def _validation_name(path: str | None) -> str:
    match = re.search(r"ILSVRC2012_val_\d{8}", Path(path or "").name)
    if match is None:
        raise ValueError(f"ReaL labels belong to files named as ILSVRC2012_val_00000001.JPEG, not {path!r}.")
    return f"{match[0]}.JPEG"


def _table(name: str) -> list[str]:
    return resources.files("timm.data").joinpath("_info", name).read_text(encoding="utf-8").split()
