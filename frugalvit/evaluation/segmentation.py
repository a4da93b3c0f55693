"""Mean IoU of a semantic segmentation model, at the resolution of the masks."""

import argparse
from collections.abc import Iterator

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
from ..configuration.configuration_sparseformer_base import is_sparseformer
from ..pictures import check_picture_path, draw_segmentation, save_figure
from .images import take_first


def run(arguments: argparse.Namespace) -> dict[str, object]:
    if arguments.picture:
        check_picture_path(arguments.picture)
    split = arguments.split or next(
        iter(evaluation_splits(masked_split_names(arguments.dataset, arguments.dataset_config))), "train"
    )
    if arguments.window and len(arguments.window) > 2:
        raise ValueError(f"--window has {len(arguments.window)} numbers, expected one, or height and width.")
    if not arguments.window and (arguments.stride or arguments.shorter_side):
        raise ValueError("--stride and --shorter-side say how a window slides; give its size by --window.")
    model, image_processor = load_with_image_processor(
        *(arguments.model, arguments.device, arguments.trust_remote_code, "a semantic segmentation model"),
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
    image_format = ImageFormat.from_processor(image_processor)
    reduce_labels = arguments.reduce_labels or getattr(image_processor, "do_reduce_labels", False)
    read_mask = MaskReader(model.config.num_labels, arguments.ignored_labels, reduce_labels)
    if arguments.picture:
        if max(arguments.drawn) > len(images):
            raise ValueError(f"--drawn has {max(arguments.drawn)}, there are {len(images)} images.")
        # Before anything is measured: an image that cannot be read, or a disk that takes no more, would end it.
        shown = images.select([number - 1 for number in arguments.drawn])
        save_figure(picture_of(model, image_format, shown, read_mask), arguments.picture)
    results = segmentation_scores(
        model,
        image_format,
        images,
        read_mask,
        batch_size=arguments.batch_size,
        window=(arguments.window[0], arguments.window[-1]) if arguments.window else None,
        stride=arguments.stride,
        shorter_side=arguments.shorter_side,
        flip=arguments.flip,
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
    stride: int | None = None,
    shorter_side: int | None = None,
    flip: bool = False,
    skip_corrupt: bool = False,
) -> dict[str, object]:
    """Evaluate a semantic segmentation model, with a progress bar.

    Args:
        model (`PreTrainedModel`): Returns `logits`, `(batch, classes, …)`, at any resolution.
        image_format (`ImageFormat`): The images that it takes.
        images (`datasets.Dataset`): Images with masks, as `load_masked_images` returns them.
        read_mask (`MaskReader`): Reads the masks.
        batch_size (`int`, *optional*, defaults to 16): Images, or windows of an image, at a time.
        window (pair of `int`, *optional*): Height and width of a window; without one, the image is resized whole.
        stride (`int`, *optional*): Pixels from window to window, at least 1; two thirds of the window's shorter side
            if not given.
        shorter_side (`int`, *optional*): Shorter side of the resized image under the window, in pixels; the window's
            if not given.
        flip (`bool`, *optional*, defaults to `False`): Average logits with those of the mirrored image.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read.

    Returns:
        `dict`: `images`, `skipped` and the scores of `SegmentationScores`.

    Raises:
        CorruptImageError: for the first image that cannot be read, if they are not to be left out.
        ValueError: if none can be read, a mask does not fit its image or the classes, or windows leave gaps.
    """
    if window and (stride or 1) > min(window):
        raise ValueError(
            f"A stride of {stride} leaves gaps between windows of {window}; expected at most {min(window)}."
        )
    scores, count = SegmentationScores(model.config.num_labels), 0
    with tqdm(total=len(images), desc="evaluate", unit=" images", leave=False, disable=None) as progress:
        for batch in _batches(images, read_mask, 1 if window else batch_size, skip_corrupt, progress):
            pictures, masks = zip(*batch, strict=True)
            if window:
                logits = _slide(model, image_format, pictures[0], window, stride, shorter_side, batch_size, flip)
            else:
                pixels = [_resize(picture, image_format.size, image_format) for picture in pictures]
                logits = _logits(model, image_format.normalize(torch.stack(pixels)), flip)
            for of_image, mask in zip(logits, masks, strict=True):
                of_image = F.interpolate(of_image[None], mask.shape, mode="bilinear", align_corners=False)
                scores.add_batch(predictions=of_image.argmax(1)[0].cpu().numpy(), references=mask.numpy())
            count += len(batch)
    if not count:
        raise ValueError(f"None of the {len(images)} images of the data set can be read.")
    return {"images": count, "skipped": len(images) - count, **scores.compute()}


@torch.inference_mode()
def picture_of(model: PreTrainedModel, image_format: ImageFormat, images: datasets.Dataset, read_mask: MaskReader):
    """`draw_segmentation` of images, resized whole. Arguments as in `segmentation_scores`."""
    pixels, masks = [], []
    for index, record in enumerate(images):
        picture = decode_image(record["image"], index)
        pixels.append(_resize(picture, image_format.size, image_format))
        masks.append(read_mask(record["mask"], index, picture.size))
    pixels = torch.stack(pixels)
    sparse = {"output_rois": True, "output_token_maps": True} if is_sparseformer(model.config) else {}
    outputs = model(pixel_values=image_format.normalize(pixels).to(model.device), **sparse)
    predictions = [
        F.interpolate(logits[None].float(), mask.shape, mode="bilinear").argmax(1)[0]
        for logits, mask in zip(outputs.logits, masks, strict=True)
    ]
    names = [model.config.id2label[label] for label in range(model.config.num_labels)]
    tokens = {"rois": outputs.rois[-1], "token_maps": outputs.token_maps} if sparse else {}
    return draw_segmentation(pixels / 255, masks, predictions, names, **tokens)


def _batches(
    images: datasets.Dataset, read_mask: MaskReader, batch_size: int, skip_corrupt: bool, progress: tqdm
) -> Iterator[list[tuple[Image.Image, torch.Tensor]]]:
    batch = []
    for index in range(len(images)):
        try:
            picture = decode_image(images[index]["image"], index)
            mask = read_mask(images[index]["mask"], index, picture.size)
            batch.append((picture, mask))
        except CorruptImageError:
            if not skip_corrupt:
                raise
        progress.update()
        if len(batch) == batch_size or (batch and index == len(images) - 1):
            yield batch
            batch = []


def _resize(picture: Image.Image, size: tuple[int, ...], image_format: ImageFormat) -> torch.Tensor:
    pixels = v2.functional.pil_to_tensor(picture)
    return v2.functional.resize(pixels, list(size), image_format.interpolation, antialias=True)


def _logits(model: PreTrainedModel, pixel_values: torch.Tensor, flip: bool) -> torch.Tensor:
    """`(batch, classes, height, width)` at the resolution of the images, float32."""
    size, pixel_values = pixel_values.shape[-2:], pixel_values.to(model.device)

    def compute(pixel_values: torch.Tensor) -> torch.Tensor:
        logits = model(pixel_values=pixel_values).logits.float()
        check_scores(logits)
        return F.interpolate(logits, size, mode="bilinear")

    logits = compute(pixel_values)
    return (logits + compute(pixel_values.flip(-1)).flip(-1)) / 2 if flip else logits


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """The starts of windows that cover a length; the last window ends with it."""
    return sorted({*range(0, max(length - window, 0), stride), max(length - window, 0)})


def _slide(
    model: PreTrainedModel,
    image_format: ImageFormat,
    picture: Image.Image,
    window: tuple[int, int],
    stride: int | None,
    shorter_side: int | None,
    batch_size: int,
    flip: bool,
) -> torch.Tensor:
    """Mean logits `(1, classes, height, width)` of the windows that see each pixel of the resized image."""
    if max(picture.size) > LONGEST * min(picture.size):
        raise ImageError(
            f"An image has {picture.width:,} x {picture.height:,} pixels; where a --window slides it may be {LONGEST} "
            "times as long as wide. Evaluate such images without."
        )
    stride = stride or max(min(window) * 2 // 3, 1)
    pixels = image_format.normalize(_resize(picture, (shorter_side or min(window),), image_format)[None])
    height, width = pixels.shape[-2:]
    # An image that is smaller than the window is seen whole, on a ground of the mean color.
    pixels = F.pad(pixels, (0, max(window[1] - width, 0), 0, max(window[0] - height, 0)))
    starts = [
        (top, left)
        for top in window_starts(pixels.shape[-2], window[0], stride)
        for left in window_starts(pixels.shape[-1], window[1], stride)
    ]
    total = torch.zeros(model.config.num_labels, *pixels.shape[-2:])
    counts = torch.zeros(pixels.shape[-2:])
    for first in range(0, len(starts), batch_size):
        places = [
            (slice(top, top + window[0]), slice(left, left + window[1]))
            for top, left in starts[first : first + batch_size]
        ]
        logits = _logits(model, torch.cat([pixels[..., rows, columns] for rows, columns in places]), flip).cpu()
        for of_window, (rows, columns) in zip(logits, places, strict=True):
            total[:, rows, columns] += of_window
            counts[rows, columns] += 1
    return (total / counts)[None, :, :height, :width]
