"""Top-1 and top-5 accuracy of an image classifier, on ImageNet's relatives, attacked and occluded images, too."""

import argparse
import time

import datasets
import torch
from transformers import PreTrainedModel

from ..common.exported import ExportedModule
from ..common.loading import load_image_classifier
from ..common.metrics import accuracies
from ..common.packing import pack_linear_layers
from ..common.scores import negative_log_likelihood
from ..common.views import ImageFormat
from ..inference import choose_tokens
from .imagenet import right_answers
from .images import image_batches, images_to_evaluate
from .robustness import fgsm, occlude_center


def run(arguments: argparse.Namespace) -> dict[str, object]:
    images, split = images_to_evaluate(arguments)
    model, image_processor = load_image_classifier(arguments.model, arguments.device, arguments.trust_remote_code)
    pack_linear_layers(model)
    choose_tokens(model, arguments.num_tokens, arguments.confidence)
    conditions = {"protocol": arguments.protocol}
    if arguments.attack:
        if isinstance(model, ExportedModule) or arguments.confidence is not None:
            raise ValueError("--attack needs a gradient, which an exported model and --confidence do not have.")
        conditions["fgsm_eps"] = 1 / 255
    if arguments.occlude:
        conditions["occluded_share"] = 0.25
    if arguments.confidence is not None:
        conditions["confidence"] = arguments.confidence
    results = classification_accuracy(
        model,
        image_processor,
        images,
        **conditions,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        skip_corrupt=arguments.skip_corrupt,
    )
    about = {"model": arguments.model, "dataset": " ".join(arguments.dataset), "split": split}
    if arguments.num_tokens is not None:
        about["num_tokens"] = arguments.num_tokens
    return about | conditions | results


def classification_accuracy(
    model: PreTrainedModel,
    image_processor,
    images: datasets.Dataset,
    *,
    protocol: str = "labels",
    fgsm_eps: float | None = None,
    occluded_share: float | None = None,
    confidence: float | None = None,
    batch_size: int = 64,
    **reading,
) -> dict[str, object]:
    """Evaluate an image classifier. Where several classes are right for an image, the loss is that of their joint
    probability.

    Args:
        model (`PreTrainedModel`): The classifier, on its device.
        image_processor: Turns `PIL.Image` into pixel values.
        images (`datasets.Dataset`): Images, as `load_images` returns them.
        protocol (`str`, *optional*, defaults to `"labels"`): See `right_answers`.
        fgsm_eps (`float`, *optional*), occluded_share (`float`, *optional*): See `fgsm` and `occlude_center`.
        confidence (`float`, *optional*): As in `classify_adaptively`.
        batch_size (`int`, *optional*, defaults to 64), reading: As in `image_batches`.

    Returns:
        `dict`: `images`, `skipped` (not readable or without a right answer), `loss`, `accuracy`, `top5_accuracy` and
        `images_per_second` (with decoding); with `confidence`, also `mean_num_tokens`, the latent tokens of the last
        look at an image.
    """
    right_of, classes = right_answers(protocol, images, model.config.id2label)
    counting = [index for index, right in enumerate(right_of) if right]
    total, images = len(images), images.select(counting)
    # Filled up with -1 to as many as the most.
    labels = torch.nn.utils.rnn.pad_sequence([torch.tensor(right_of[i]) for i in counting], True, padding_value=-1)
    chosen = slice(None) if classes is None else torch.tensor(classes, device=model.device)
    image_format = ImageFormat.from_processor(image_processor) if fgsm_eps else None

    model.eval()
    measured, loss, count, tokens, start = accuracies(), 0.0, 0, 0, time.perf_counter()
    with torch.inference_mode():
        for pixel_values, indices in image_batches(image_processor, images, batch_size, **reading):
            right, pixel_values = labels[indices].to(model.device), pixel_values.to(model.device)
            if occluded_share:
                pixel_values = occlude_center(pixel_values, occluded_share)
            if fgsm_eps:
                pixel_values = fgsm(model, pixel_values, right, fgsm_eps, image_format, chosen)
            if confidence is None:
                outputs = model(pixel_values=pixel_values)
            else:
                outputs = model.classify_adaptively(pixel_values, confidence)
                tokens += outputs.num_tokens.sum().item()
            logits = outputs.logits.float()[:, chosen]
            loss += negative_log_likelihood(logits, right).item()
            count += len(indices)
            measured.add_batch(predictions=logits.cpu().numpy(), references=right.cpu().numpy())
    speed = count / (time.perf_counter() - start)
    results = {"images": count, "skipped": total - count, "loss": loss / count, **measured.compute()}
    results["images_per_second"] = speed
    return results if confidence is None else results | {"mean_num_tokens": tokens / count}
