"""Mean IoU of a semantic segmentation model at the resolution of the masks."""

import argparse

import datasets
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2
from tqdm import tqdm
from transformers import PreTrainedModel

from ..modeling.image_format import ImageFormat
from ..training.data import EVALUATION_SPLITS, readable_images
from ..training.loading import load_model
from ..training.masks import MaskReader, load_masked_images, masked_split_names
from ..training.metrics import SegmentationScores
from ..training.preprocessing import LONGEST, CorruptImageError, decode_image
from ..training.scores import check_scores
from .images import take_first


def run(arguments: argparse.Namespace) -> dict[str, object]:
    splits = masked_split_names(arguments.dataset, arguments.dataset_config)
    split = arguments.split or next((split for split in EVALUATION_SPLITS if split in splits), "train")
    model, image_processor = load_model(
        arguments.model, "image-segmentation", arguments.device, arguments.trust_remote_code
    )
    found = load_masked_images(
        arguments.dataset,
        split,
        name=arguments.dataset_config,
        image_column=arguments.image_column,
        mask_column=arguments.mask_column,
        class_names=list(model.config.id2label.values()),
    )
    found = take_first(found, arguments.limit)
    images = readable_images(found, arguments.skip_corrupt, split)
    reduce_labels = arguments.reduce_labels or getattr(image_processor, "do_reduce_labels", False)
    ignored = arguments.ignored_labels or getattr(model.config, "ignored_labels", ())
    results = segmentation_scores(
        model,
        ImageFormat.from_processor(image_processor),
        images,
        MaskReader(model.config.num_labels, ignored, reduce_labels),
        batch_size=arguments.batch_size,
        window=arguments.window,
        skip_corrupt=arguments.skip_corrupt,
    )
    results["skipped"] += len(found) - len(images)
    names = model.config.id2label
    iou = results.pop("iou")
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
    window: int | None = None,
    skip_corrupt: bool = False,
) -> dict[str, object]:
    """Evaluate a semantic segmentation model. The model's logits are resized to the resolution of the masks.

    Args:
        model (`PreTrainedModel`): The segmentation model.
        image_format (`ImageFormat`): Size and normalization of the model's images.
        images (`datasets.Dataset`): Columns `image` and `mask`, both not decoded.
        read_mask (`MaskReader`): Reader of the masks.
        batch_size (`int`, *optional*, defaults to 16): Number of images, or of one image's windows, in a forward pass.
        window (`int`, *optional*):
            Side of a square sliding window in pixels. The image's shorter side is resized to this length, and the
            window moves in steps of two thirds of its side. By default, images are resized to the model's image size.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read.

    Returns:
        `dict`: `images`, `skipped` and the scores of `SegmentationScores`.
    """
    scores = SegmentationScores(model.config.num_labels)
    count = 0
    batch = []
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
            count += len(batch)
            batch = []
    if not count:
        raise ValueError(f"None of the {len(images)} images of the data set can be read.")
    return {"images": count, "skipped": len(images) - count, **scores.compute()}


def _resize(picture: Image.Image, size: tuple[int, ...], image_format: ImageFormat) -> torch.Tensor:
    pixels = v2.functional.pil_to_tensor(picture)
    return v2.functional.resize(pixels, list(size), image_format.interpolation, antialias=True)


def _logits(model: PreTrainedModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """Compute float32 logits `(batch, classes, height, width)` at the resolution of the images."""
    logits = model(pixel_values=pixel_values.to(model.device)).logits.float()
    check_scores(logits)
    return F.interpolate(logits, pixel_values.shape[-2:], mode="bilinear")


def _slide(
    model: PreTrainedModel, image_format: ImageFormat, picture: Image.Image, window: int, batch_size: int
) -> torch.Tensor:
    """Return logits of the resized image, `(1, classes, height, width)`, averaged over overlapping windows."""
    if max(picture.size) > LONGEST * min(picture.size):
        raise ValueError(
            f"An image has {picture.width:,} x {picture.height:,} pixels; where a window slides it may be {LONGEST} "
            "times as long as wide. Evaluate without a window, or leave the image out."
        )
    pixels = image_format.normalize(_resize(picture, (window,), image_format)[None])
    along = 2 if pixels.shape[2] > window else 3
    length = pixels.shape[along]
    # The last window ends at the image's edge.
    starts = sorted({*range(0, length - window, max(window * 2 // 3, 1)), length - window})
    views = torch.cat([pixels.narrow(along, start, window) for start in starts])
    total = torch.zeros(1, model.config.num_labels, *pixels.shape[2:])
    counts = torch.zeros(pixels.shape[2:])
    found = torch.cat([_logits(model, batch).cpu() for batch in views.split(batch_size)])
    for start, logits in zip(starts, found, strict=True):
        total.narrow(along, start, window).add_(logits)
        counts.narrow(along - 2, start, window).add_(1)
    return total / counts
