"""Top-1 and top-5 accuracy of an image classifier on unchanged, attacked or occluded images."""

import argparse
import time

import datasets
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2
from transformers import PreTrainedModel

from ..exported import ExportedModule, load_classifier
from ..inference import choose_tokens
from ..modeling.image_format import ImageFormat
from ..modeling.packing import pack_linear_layers
from ..training.data import (
    check_classes,
    check_labels,
    check_single_label,
    class_names,
    label_numbers,
    match_labels,
    readable_images,
)
from ..training.metrics import accuracies
from .images import image_batches, images_to_evaluate, reading_options


def run(arguments: argparse.Namespace) -> dict[str, object]:
    found, split = images_to_evaluate(arguments)
    images = readable_images(found, arguments.skip_corrupt, split)
    model, image_processor = load_classifier(arguments.model, arguments.device, arguments.trust_remote_code)
    pack_linear_layers(model)
    choose_tokens(model, arguments.num_tokens, None)
    if arguments.attack and isinstance(model, ExportedModule):
        raise ValueError("attack needs a gradient, which an exported model does not have.")
    conditions = {
        "fgsm_eps": 1 / 255 if arguments.attack else None,
        "occluded_share": 0.25 if arguments.occlude else None,
    }
    results = classification_accuracy(model, image_processor, images, **conditions, **reading_options(arguments))
    results["skipped"] += len(found) - len(images)
    about = {"model": arguments.model, "dataset": " ".join(arguments.dataset), "split": split}
    conditions |= {"num_tokens": arguments.num_tokens}
    return about | {name: value for name, value in conditions.items() if value is not None} | results


def classification_accuracy(
    model: PreTrainedModel,
    image_processor,
    images: datasets.Dataset,
    *,
    fgsm_eps: float | None = None,
    occluded_share: float | None = None,
    **reading,
) -> dict[str, object]:
    """Measure the accuracy of an image classifier. Its classes and the data set's classes are matched by name.

    Args:
        model (`PreTrainedModel`): The classifier.
        image_processor: The classifier's image processor.
        images (`datasets.Dataset`): Columns `image` (not decoded) and `label` (two or more classes).
        fgsm_eps (`float`, *optional*): Step size of the attack by `fgsm`. Default: no attack.
        occluded_share (`float`, *optional*): Share of an image's area that `occlude_center` hides. Default: 0.
        reading: Further arguments of `image_batches`.

    Returns:
        `dict`: `images`, `skipped`, `loss`, `accuracy`, `top5_accuracy` and `images_per_second` (including decoding).
    """
    if class_names(images) is None:
        raise ValueError("The data set has no labels to compare with; name their column with label_column.")
    check_labels(images, str(images.split or "given"))
    check_classes(class_names(images))
    check_single_label(model.config, "Accuracy")
    labels = torch.tensor(match_labels(class_names(images), model.config.id2label))[label_numbers(images)]
    image_format = ImageFormat.from_processor(image_processor) if fgsm_eps else None

    model.eval()
    measured = accuracies()
    loss = 0.0
    count = 0
    start = time.perf_counter()
    with torch.inference_mode():
        for pixel_values, indices in image_batches(image_processor, images, **reading):
            right = labels[indices].to(model.device)
            pixel_values = pixel_values.to(model.device)
            if occluded_share:
                pixel_values = occlude_center(pixel_values, occluded_share)
            if fgsm_eps:
                pixel_values = fgsm(model, pixel_values, right, fgsm_eps, image_format)
            logits = model(pixel_values=pixel_values).logits.float()
            loss += F.cross_entropy(logits, right, reduction="sum").item()
            count += len(indices)
            measured.add_batch(predictions=logits.cpu().numpy(), references=right.cpu().numpy())
    speed = count / (time.perf_counter() - start)
    results = {"images": count, "skipped": len(images) - count, "loss": loss / count, **measured.compute()}
    return results | {"images_per_second": speed}


def fgsm(
    model: nn.Module, pixel_values: torch.Tensor, labels: torch.Tensor, eps: float, image_format: ImageFormat
) -> torch.Tensor:
    """Attack images by one step of the fast gradient sign method (Goodfellow et al. 2015). The step adds `eps` times
    the sign of the loss's gradient to the colors, and clamps the colors to the range from 0 to 1."""
    with torch.inference_mode(False), torch.enable_grad():
        pixel_values = pixel_values.clone().requires_grad_()
        loss = F.cross_entropy(model(pixel_values=pixel_values).logits, labels.clone())
        (gradient,) = torch.autograd.grad(loss, pixel_values)
    colors = image_format.denormalize(pixel_values.detach()) + eps * gradient.sign()
    return v2.functional.normalize(colors.clamp(0, 1), image_format.mean, image_format.std)


def occlude_center(pixel_values: torch.Tensor, ratio: float) -> torch.Tensor:
    """Fill a rectangle in the middle of images `(batch, channels, height, width)` with the mean color, which is 0
    after normalization. The rectangle has the aspect ratio of the image. Its area is `ratio` times the image's
    area."""
    height, width = pixel_values.shape[-2:]
    rows, columns = (round(side * ratio**0.5) for side in (height, width))
    top = (height - rows) // 2
    left = (width - columns) // 2
    occluded = pixel_values.clone()
    occluded[..., top : top + rows, left : left + columns] = 0
    return occluded
