"""Zero-shot classification of images. Each class is described by sentences."""

import argparse
from collections.abc import Sequence

import datasets
import open_clip
import torch

from ..training.data import check_classes, class_names, readable_images
from ..training.files import read_text
from ..training.metrics import accuracies
from .images import image_batches, images_to_evaluate, reading_options
from .two_towers import TwoTowers, embed_all_texts, load_two_towers, name_models


def run(arguments: argparse.Namespace) -> dict[str, object]:
    found, split = images_to_evaluate(arguments)
    images = readable_images(found, arguments.skip_corrupt, split)
    names = read_names(arguments.classes, images)
    templates = read_templates(arguments.templates)
    towers = load_two_towers(arguments.model, arguments.vision_model, arguments.device, arguments.trust_remote_code)
    classifier = zero_shot_classifier(towers, names, templates, arguments.batch_size)
    results = zero_shot_accuracy(towers, classifier, images, **reading_options(arguments))
    results["skipped"] += len(found) - len(images)
    about = {"dataset": " ".join(arguments.dataset), "split": split}
    return name_models(arguments) | about | {"classes": len(names), "templates": len(templates)} | results


def read_names(source: str | None, images: datasets.Dataset) -> list[str]:
    """Return class names from `source`: "imagenet", or a file with a name on each line. `None` means the data set's
    own class names."""
    known = class_names(images)
    if known is None:
        raise ValueError("The data set has no labels to compare with; name their column with label_column.")
    names = list(open_clip.IMAGENET_CLASSNAMES) if source == "imagenet" else known
    if source not in (None, "imagenet"):
        names = read_lines(source)
    if len(names) < len(known):
        raise ValueError(f"classes {source} names {len(names)} classes, the data set has {len(known)}.")
    check_classes(names)
    return names


def read_lines(file: str) -> list[str]:
    return [line.strip() for line in read_text(file).splitlines() if line.strip()]


def read_templates(source: str) -> list[str]:
    """Return sentence templates from `source`: "imagenet" or a file. `{}` in a template stands for a class name."""
    if source == "imagenet":
        return [template("{}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
    templates = read_lines(source)
    if wrong := [line for line in templates or [""] if line.count("{}") != 1 or line.count("{") != 1]:
        raise ValueError(f"templates {source} has the line {wrong[0]!r}, expected one {{}} in it, for the name.")
    return templates


def zero_shot_classifier(
    towers: TwoTowers, names: Sequence[str], templates: Sequence[str], batch_size: int = 64
) -> torch.Tensor:
    """Compute the weights `(width, classes)` of a zero-shot classifier. The weights of a class are the normalized mean
    embedding of the sentences about this class."""
    texts = [template.format(name) for name in names for template in templates]
    embeddings = embed_all_texts(towers, texts, batch_size).unflatten(0, (len(names), len(templates)))
    return torch.nn.functional.normalize(embeddings.mean(1), dim=-1).mT


@torch.inference_mode()
def zero_shot_accuracy(
    towers: TwoTowers,
    classifier: torch.Tensor,
    images: datasets.Dataset,
    **reading,
) -> dict[str, object]:
    """Measure the accuracy of a zero-shot classifier.

    Args:
        towers (`TwoTowers`): The CLIP or SigLIP.
        classifier (`torch.Tensor`): Weights `(width, classes)` of `zero_shot_classifier`.
        images (`datasets.Dataset`): Columns `image` (not decoded) and `label`.
        reading: Further arguments of `image_batches`.

    Returns:
        `dict`: `images`, `skipped`, `accuracy` and `top5_accuracy`.
    """
    classifier = classifier.to(towers.device)
    measured = accuracies()
    count = 0
    for pixel_values, indices in image_batches(towers.image_processor, images, **reading):
        scores = towers.embed_images(pixel_values.to(towers.device)) @ classifier
        measured.add_batch(predictions=scores.cpu().numpy(), references=images[indices]["label"])
        count += len(indices)
    return {"images": count, "skipped": len(images) - count, **measured.compute()}
