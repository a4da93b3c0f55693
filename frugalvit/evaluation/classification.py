"""Top-1 and top-5 accuracy of an image classifier, of ImageNet's relatives too, of attacked and of occluded images."""

import argparse
import time

import datasets
import torch
from torch import nn
from transformers import PreTrainedModel

from ..common.exported import ExportedModule
from ..common.loading import load_image_classifier
from ..common.metrics import evaluate_classifier
from ..common.packing import pack_linear_layers
from ..common.reading import Reader, share_read
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
    confidence = arguments.confidence
    conditions = {"protocol": arguments.protocol}
    if arguments.attack:
        if isinstance(model, ExportedModule):
            raise ValueError("--attack needs a gradient, which an exported model has not; give the original.")
        conditions["fgsm_eps"] = arguments.eps
    if arguments.occlude:
        conditions["occluded_share"] = arguments.ratio
    if confidence is not None:
        if arguments.attack:
            raise ValueError("--attack needs a gradient, which --confidence, a choice, has not; give one of both.")
        conditions["confidence"] = confidence
    results = classification_accuracy(
        model,
        image_processor,
        images,
        **conditions,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        skip_corrupt=arguments.skip_corrupt,
        exact=arguments.exact,
    )
    about = {"model": arguments.model, "dataset": " ".join(arguments.dataset), "split": split}
    if arguments.num_tokens is not None:
        about["num_tokens"] = arguments.num_tokens
    return about | conditions | results


class Adaptive(nn.Module):
    """A classifier that spends few tokens on images whose class is sure, and notes the `counts` of all images.

    Args:
        model (`SparseFormerForImageClassification`): The classifier.
        confidence (`float`): See `classify_adaptively`.
    """

    def __init__(self, model: PreTrainedModel, confidence: float):
        super().__init__()
        self.model, self.confidence, self.counts = model, confidence, []

    def forward(self, pixel_values: torch.Tensor):
        outputs = self.model.classify_adaptively(pixel_values, self.confidence)
        self.counts += outputs.num_tokens.tolist()
        return outputs


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
    num_workers: int = 0,
    skip_corrupt: bool = False,
    exact: bool = False,
) -> dict[str, object]:
    """Evaluate an image classifier, with a progress bar.

    Args:
        model (`PreTrainedModel`): The classifier, on its device.
        image_processor: Turns `PIL.Image` into pixel values.
        images (`datasets.Dataset`): Images, as `load_images` returns them.
        protocol (`str`, *optional*, defaults to `"labels"`): See `right_answers`.
        fgsm_eps (`float`, *optional*): Attack the images by that step, see `fgsm`; after occlusion if there is both.
        occluded_share (`float`, *optional*): Hide that share in the middle, see `occlude_center`.
        confidence (`float`, *optional*): Spend few tokens on images whose class is so sure, see `classify_adaptively`.
        batch_size (`int`, *optional*, defaults to 64): Images at a time.
        num_workers (`int`, *optional*, defaults to 0): Threads that decode, see `count_threads`.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read.
        exact (`bool`, *optional*, defaults to `False`): Read images in the slow way, see `Reader`.

    Returns:
        `dict`: `images`, `skipped` (not readable or without a right answer), `accuracy`, `top5_accuracy`, `loss` and
        `images_per_second` (with decoding); with `confidence`, `mean_num_tokens`, the latent tokens of the last
        look at an image.

    Raises:
        ValueError: if there are no labels or no readable images, or the model does not know a label.
    """
    answers, total, count = right_answers(protocol, images, model.config.id2label), len(images), 0
    counting = [index for index, right in enumerate(answers.right) if right]
    images, right_of = images.select(counting), [answers.right[index] for index in counting]
    most = max(map(len, right_of), default=1)
    classes = None if answers.classes is None else torch.tensor(answers.classes, device=model.device)
    image_format = ImageFormat.from_processor(image_processor) if fgsm_eps else None
    reader = Reader(image_processor, share_read(model), exact)

    def batches():
        nonlocal count
        for pixel_values, indices in image_batches(reader, images, batch_size, num_workers, skip_corrupt):
            count += len(indices)
            right = [right_of[index] + [-1] * (most - len(right_of[index])) for index in indices]
            right, pixel_values = torch.tensor(right, device=model.device), pixel_values.to(model.device)
            if occluded_share:
                pixel_values = occlude_center(pixel_values, occluded_share)
            if fgsm_eps:
                order = -1 if image_format.reverse_channels else 1
                mean, std = image_format.mean[::order], image_format.std[::order]
                pixel_values = fgsm(model, pixel_values, right, fgsm_eps, mean, std, classes)
            yield {"pixel_values": pixel_values, "labels": right}

    classifier = model if confidence is None else Adaptive(model, confidence)
    start = time.perf_counter()
    metrics = evaluate_classifier(classifier, batches(), classes)
    seconds = time.perf_counter() - start
    account = {} if confidence is None else {"mean_num_tokens": sum(classifier.counts) / count}
    return {"images": count, "skipped": total - count, **metrics, "images_per_second": count / seconds, **account}
