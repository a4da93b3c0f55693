"""Mean IoU of a semantic segmentation model, at the resolution of the masks."""

import argparse

import datasets
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2
from tqdm import tqdm
from transformers import AutoModelForSemanticSegmentation, PreTrainedModel

from ..common.decoding import CorruptImageError, ImageError, decode_image
from ..common.loading import load_with_image_processor
from ..common.masks import MaskReader, load_masked_images, masked_split_names
from ..common.metrics import SegmentationScores
from ..common.scores import check_scores
from ..common.splits import evaluation_splits
from ..common.views import LONGEST, ImageFormat
from .images import take_first


def run(arguments: argparse.Namespace) -> dict[str, object]:
    splits = evaluation_splits(masked_split_names(arguments.dataset, arguments.dataset_config))
    split = arguments.split or next(iter(splits), "train")
    if arguments.window and len(arguments.window) > 2:
        raise ValueError(f"--window has {len(arguments.window)} numbers, expected one, or height and width.")
    model, image_processor = load_with_image_processor(
        arguments.model,
        arguments.device,
        arguments.trust_remote_code,
        "a semantic segmentation model",
        lambda _: AutoModelForSemanticSegmentation,
    )
    images = load_masked_images(
        arguments.dataset,
        split,
        name=arguments.dataset_config,
        image_column=arguments.image_column,
        mask_column=arguments.mask_column,
        class_names=list(model.config.id2label.values()),
    )
    images = take_first(images, arguments.limit)
    reduce_labels = arguments.reduce_labels or getattr(image_processor, "do_reduce_labels", False)
    results = segmentation_scores(
        model,
        ImageFormat.from_processor(image_processor),
        images,
        MaskReader(model.config.num_labels, arguments.ignored_labels, reduce_labels),
        batch_size=arguments.batch_size,
        window=(arguments.window[0], arguments.window[-1]) if arguments.window else None,
        skip_corrupt=arguments.skip_corrupt,
    )
    names, iou = model.config.id2label, results.pop("iou")
    results |= {f"iou {names[label]}": value for label, value in enumerate(iou)}
    return {"model": arguments.model, "dataset": " ".join(arguments.dataset), "split": split, **results}


@torch.inference_mode()
def segmentation_scores(
    model: PreTrainedModel,
    image_format: ImageFormat,
    images: datasets.Dataset,
    read_mask: MaskReader,
    *,
    batch_size: int = 16,
    window: tuple[int, int] | None = None,
    skip_corrupt: bool = False,
) -> dict[str, object]:
    """Evaluate a semantic segmentation model, with a progress bar.

    Args:
        model (`PreTrainedModel`): Returns `logits`, `(batch, classes, …)`, at any resolution.
        image_format (`ImageFormat`): The images that it takes.
        images (`datasets.Dataset`): Images with masks, as `load_masked_images` returns them.
        read_mask (`MaskReader`): Reads the masks.
        batch_size (`int`, *optional*, defaults to 16): Images, or windows of an image, at a time.
        window (pair of `int`, *optional*): Height and width of a window that slides by two thirds of its shorter side
            over the image, whose shorter side is resized to that; without one, the image is resized whole.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read.

    Returns:
        `dict`: `images`, `skipped` and the scores of `SegmentationScores`.
    """
    scores, count, batch = SegmentationScores(model.config.num_labels), 0, []
    for index in tqdm(range(len(images)), desc="evaluate", unit=" images", leave=False, disable=None):
        try:
            picture = decode_image(images[index]["image"], index)
            batch.append((picture, read_mask(images[index]["mask"], index, picture.size)))
        except CorruptImageError:
            if not skip_corrupt:
                raise
        if batch and (window or len(batch) == batch_size or index == len(images) - 1):
            pictures, masks = zip(*batch, strict=True)
            if window:
                logits = _slide(model, image_format, pictures[0], window, batch_size)
            else:
                pixels = [_resize(picture, image_format.size, image_format) for picture in pictures]
                logits = _logits(model, image_format.normalize(torch.stack(pixels)))
            for each, mask in zip(logits, masks, strict=True):
                each = F.interpolate(each[None], mask.shape, mode="bilinear")
                scores.add_batch(predictions=each.argmax(1)[0].cpu().numpy(), references=mask.numpy())
            count, batch = count + len(batch), []
    if not count:
        raise ValueError(f"None of the {len(images)} images of the data set can be read.")
    return {"images": count, "skipped": len(images) - count, **scores.compute()}


def _resize(picture: Image.Image, size: tuple[int, ...], image_format: ImageFormat) -> torch.Tensor:
    pixels = v2.functional.pil_to_tensor(picture)
    return v2.functional.resize(pixels, list(size), image_format.interpolation, antialias=True)


def _logits(model: PreTrainedModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """`(batch, classes, height, width)` at the resolution of the images, float32."""
    logits = model(pixel_values=pixel_values.to(model.device)).logits.float()
    check_scores(logits)
    return F.interpolate(logits, pixel_values.shape[-2:], mode="bilinear")


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """The starts of windows that cover a length; the last window ends with it."""
    return sorted({*range(0, max(length - window, 0), stride), max(length - window, 0)})


def _slide(
    model: PreTrainedModel, image_format: ImageFormat, picture: Image.Image, window: tuple[int, int], batch_size: int
) -> torch.Tensor:
    """Mean logits `(1, classes, height, width)` of the windows that see each pixel of the resized image."""
    if max(picture.size) > LONGEST * min(picture.size):
        raise ImageError(
            f"An image has {picture.width:,} x {picture.height:,} pixels; where a --window slides it may be {LONGEST} "
            "times as long as wide. Evaluate such images without."
        )
    stride = max(min(window) * 2 // 3, 1)
    pixels = image_format.normalize(_resize(picture, (min(window),), image_format)[None])
    height, width = pixels.shape[-2:]
    # An image that is smaller than the window is seen whole, on a ground of the mean color.
    pixels = F.pad(pixels, (0, max(window[1] - width, 0), 0, max(window[0] - height, 0)))
    places = [
        (slice(top, top + window[0]), slice(left, left + window[1]))
        for top in window_starts(pixels.shape[-2], window[0], stride)
        for left in window_starts(pixels.shape[-1], window[1], stride)
    ]
    total = torch.zeros(model.config.num_labels, *pixels.shape[-2:])
    counts = torch.zeros(pixels.shape[-2:])
    for first in range(0, len(places), batch_size):
        batch = places[first : first + batch_size]
        logits = _logits(model, torch.cat([pixels[..., rows, columns] for rows, columns in batch])).cpu()
        for each, (rows, columns) in zip(logits, batch, strict=True):
            total[:, rows, columns] += each
            counts[rows, columns] += 1
    return (total / counts)[None, :, :height, :width]
