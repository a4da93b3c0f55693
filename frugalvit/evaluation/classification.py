"""Top-1 and top-5 accuracy of an image classifier."""

import argparse
import time
from collections.abc import Mapping, Sequence

import datasets
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from ..training.loading import load_image_classifier
from ..training.metrics import evaluate_classifier
from .images import add_image_arguments, image_batches, read_images


def add_parser(tasks) -> None:
    parser = tasks.add_parser(
        "classification",
        help="top-1 and top-5 accuracy of an image classifier",
        description="Top-1 and top-5 accuracy of an image classifier, with the model's own image processor.",
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="model folder or hub id")
    add_image_arguments(parser)
    parser.set_defaults(evaluate=run)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    images, split = read_images(arguments)
    model, image_processor = load_image_classifier(arguments.model, arguments.device, arguments.trust_remote_code)
    results = classification_accuracy(
        model,
        image_processor,
        images,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        skip_corrupt=arguments.skip_corrupt,
    )
    return {"model": arguments.model, "dataset": " ".join(arguments.dataset), "split": split, **results}


def classification_accuracy(
    model: PreTrainedModel,
    image_processor,
    images: datasets.Dataset,
    *,
    batch_size: int = 64,
    num_workers: int = 0,
    skip_corrupt: bool = False,
) -> dict[str, object]:
    """Evaluate an image classifier, with a progress bar.

    Labels are matched with the model's by name where the data set's names are all known to the model, and by index
    otherwise.

    Args:
        model (`PreTrainedModel`): The classifier, on its device.
        image_processor: What turns `PIL.Image` into pixel values.
        images (`datasets.Dataset`): What `load_images` returns.
        batch_size (`int`, *optional*, defaults to 64): Images at a time.
        num_workers (`int`, *optional*, defaults to 0): Processes that decode.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read.

    Returns:
        `dict`: `images`, `skipped`, `accuracy`, `top5_accuracy`, `loss` and `images_per_second` (with decoding).

    Raises:
        ValueError: if there are no labels or no readable images, or the model does not know a label.
    """
    if "label" not in images.features:
        raise ValueError("The data set has no labels to compare with; name their column with --label-column.")
    names = images.features["label"].names
    if unlabeled := [index for index, label in enumerate(images["label"]) if label is None or label < 0]:
        raise ValueError(f"Image {unlabeled[0]} of the data set has no label; choose another --split.")
    known, count = match_labels(names, model.config.id2label), 0

    def batches():
        nonlocal count
        for pixel_values, indices in image_batches(image_processor, images, batch_size, num_workers, skip_corrupt):
            count += len(indices)
            labels = torch.tensor([known[label] for label in images[indices]["label"]])
            yield {"pixel_values": pixel_values.to(model.device), "labels": labels.to(model.device)}

    start = time.perf_counter()
    metrics = evaluate_classifier(Accelerator(), model, batches())
    seconds = time.perf_counter() - start
    return {"images": count, "skipped": len(images) - count, **metrics, "images_per_second": count / seconds}


def match_labels(names: Sequence[str], id2label: Mapping[int, str]) -> list[int]:
    """The model's index of each class of a data set.

    Classes are matched by name, whatever the case, if the model knows all of them, and by index otherwise.

    Raises:
        ValueError: if the data set has classes beyond the model's.
    """
    known = {label.casefold(): index for index, label in id2label.items()}
    if len(known) == len(id2label) and all(name.casefold() in known for name in names):
        return [known[name.casefold()] for name in names]
    if len(names) > len(id2label):
        raise ValueError(
            f"The data set has {len(names)} classes ({', '.join(names[:3])}, …), the model only {len(id2label)} "
            f"({', '.join(list(id2label.values())[:3])}, …); choose a model for this data set."
        )
    return list(range(len(names)))
