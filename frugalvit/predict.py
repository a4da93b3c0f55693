"""`frugalvit predict`: print labels of images and draw the RoIs of tokens."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import torch
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel

from .architectures import has_rois
from .command_line import DeviceOptions, ReadingOptions, TokenOptions, argument, read_options
from .exported import load_classifier
from .inference import Application, choose_tokens
from .modeling.layers import class_scores
from .pictures import check_picture_path, draw_rois, save_figure
from .training.arguments import POSITIVE
from .training.data import METADATA_FILES, NOT_READ, files_within, find_image_column, leave_out, load_table
from .training.preprocessing import (
    IMAGE_ENDINGS,
    UNREAD_ENDINGS,
    CorruptImageError,
    prepare_images,
    restore_images,
)
from .training.scores import check_scores
from .training.text import printable


PROG = "frugalvit predict"
MAX_DRAWN = 8


@dataclass(kw_only=True)
class PredictOptions(DeviceOptions, ReadingOptions, TokenOptions):
    """Print the top labels of images. The option rois draws the RoIs of a SparseFormer's tokens."""

    images: list[str] = argument(help="Files, folders, 'photos/*.jpg', .parquet files.", positional=True)
    model: str = argument("cifar10-sparseformer", "Folder, hub id or name of a model that ships.")
    confidence: float | None = argument(None, "Few tokens first, and more for images of a lower score.")
    top: int = argument(5, "Number of labels for each image.")
    limit: int | None = argument(None, "Take only the first images.")
    image_column: str | None = argument(None, "Name of the image column of parquet files, where types do not tell.")
    rois: str | None = argument(None, f"Picture of the tokens' RoIs in the first {MAX_DRAWN} images (.png, .pdf, …).")
    batch_size: int = argument(32, "Images of a batch.")
    json: bool = argument(False, "Print JSON.")

    expected = {
        "confidence": ("a number from 0 to 1", lambda score: 0 <= score <= 1),
        "top": POSITIVE,
        "limit": POSITIVE,
        "batch_size": POSITIVE,
    }

    def __post_init__(self):
        super().__post_init__()
        if self.rois and self.confidence is not None:
            raise ValueError("rois: images of one picture have the same number of tokens; leave confidence out")


def main(argv: list[str] | None = None) -> None:
    options = read_options(PredictOptions, PROG, argv)
    paths = find_images(options.images)
    if options.rois:
        check_picture_path(options.rois)
    predictor = Predictor(options)
    model = predictor.model
    if options.rois and not has_rois(model):
        raise ValueError(f"rois: {type(model).__name__} has no RoIs to draw, expected a SparseFormer as the model.")
    images = find_files(paths, options.image_column)
    # Only readable images count towards `options.limit`. With `skip_corrupt`, the loop below finds the images that
    # cannot be read, so this loop applies the limit.
    predicted = predictor.process(images if options.skip_corrupt else islice(images, options.limit))
    # The configuration of an exported model has its number of tokens in the field `num_tokens`.
    default_num_tokens = getattr(model.config, "default_num_tokens", getattr(model.config, "num_tokens", None))
    drawn = []
    captions = []
    results = []
    count = 0
    num_unreadable = 0
    for (name, _), prediction in tqdm(predicted, "predict", leave=False, disable=None):
        if isinstance(prediction, CorruptImageError):
            if not options.skip_corrupt:
                raise ValueError(f"Cannot read {name!r} ({prediction}). To leave such images out: --skip_corrupt.")
            tqdm.write(f"Left out: cannot read {printable(f'{name}: {prediction}')}", file=sys.stderr)
            num_unreadable += 1
            continue
        if options.json:
            labels = [{"label": label, "score": score} for label, score in prediction.labels]
            num_tokens = prediction.num_tokens or default_num_tokens
            results.append({"image": name, "labels": labels, "num_tokens": num_tokens})
        else:
            tqdm.write(format_prediction(name, prediction))
        if options.rois and len(drawn) < MAX_DRAWN:
            drawn.append(prediction)
            captions.append(f"{printable(Path(name).name)}: {format_labels(prediction, 3)}")
        count += 1
        if count == options.limit:
            break
    if not count:
        raise ValueError("None of the images can be read.")
    if num_unreadable:
        print(f"{num_unreadable} of {num_unreadable + count} images were left out.", file=sys.stderr)
    if options.json:
        print(json.dumps(results, indent=2))
    if options.rois:
        save_figure(draw_predictions(drawn, captions), Path(options.rois))
        print(f"Drew {len(drawn)} of {count} images: {printable(options.rois)}", file=sys.stderr)


@dataclass
class Prediction:
    """The labels of an image and the RoIs of the tokens.

    Args:
        labels (`list[tuple[str, float]]`): Labels and their scores, the best label first.
        num_tokens (`int`, *optional*): Number of latent tokens. Only set if `confidence` is given.
        view (`torch.Tensor` of shape `(channels, height, width)`, *optional*): Input image, with values from 0 to 1.
        rois (`list[torch.Tensor]`): RoIs `(tokens, 4)` after each focusing step.
        sampling_points (`list[torch.Tensor]`): Sampling points `(tokens, points, 2)` of each sampling step, or empty.
        is_regression (`bool`): Whether the scores are outputs of a regression.
    """

    labels: list[tuple[str, float]]
    num_tokens: int | None = None
    view: torch.Tensor | None = None
    rois: list[torch.Tensor] = field(default_factory=list)
    sampling_points: list[torch.Tensor] = field(default_factory=list)
    is_regression: bool = False


class Predictor(Application):
    """A classifier that computes a `Prediction` of each image, for the options of `frugalvit predict`."""

    _load = staticmethod(load_classifier)

    def __init__(self, options: PredictOptions):
        super().__init__(
            options.model,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
        )
        choose_tokens(self.model, options.num_tokens, options.confidence)
        self.options = {"top": options.top, "confidence": options.confidence, "output_rois": bool(options.rois)}

    def _compute(self, pixel_values: torch.Tensor) -> list[Prediction]:
        return predict_pixels(self.model, self.image_processor, pixel_values, **self.options)


def predict(model: PreTrainedModel, image_processor, images: Sequence[Image.Image], **options) -> list[Prediction]:
    """Label RGB images in one batch. `options` are further arguments of `predict_pixels`."""
    return predict_pixels(model, image_processor, prepare_images(image_processor, images), **options)


@torch.no_grad()
def predict_pixels(
    model: PreTrainedModel,
    image_processor,
    pixel_values: torch.Tensor,
    top: int = 5,
    num_tokens: int | None = None,
    confidence: float | None = None,
    output_rois: bool = False,
) -> list[Prediction]:
    """Label a batch of preprocessed images.

    Args:
        pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`): Images.
        top (`int`, *optional*, defaults to 5): Number of labels for each image.
        num_tokens (`int`, *optional*): Number of latent tokens. Default: `config.default_num_tokens`.
        confidence (`float`, *optional*): Use more tokens for images whose best score is below this number.
        output_rois (`bool`, *optional*, defaults to `False`): Also return input images, RoIs and sampling points.
    """
    config = model.config
    if confidence is None:
        arguments = {}
        if num_tokens is not None:
            arguments["num_tokens"] = num_tokens
        if output_rois:
            arguments["output_rois"] = True
        outputs = model(pixel_values.to(model.device), **arguments)
    else:
        outputs = model.classify_adaptively(pixel_values.to(model.device), confidence)
    check_scores(outputs.logits)
    num_classes = outputs.logits.shape[-1]
    if num_classes != len(config.id2label):
        raise ValueError(
            f"The model has {num_classes} scores, and its config.json names {len(config.id2label)} classes."
        )
    scores, indices = class_scores(config, outputs.logits).topk(min(top, num_classes))
    predictions = [
        Prediction(
            [(config.id2label[index], score) for index, score in zip(*row, strict=True)],
            is_regression=config.problem_type == "regression",
        )
        for row in zip(indices.tolist(), scores.tolist(), strict=True)
    ]
    for i, prediction in enumerate(predictions):
        if confidence is not None:
            prediction.num_tokens = outputs.num_tokens[i].item()
        if output_rois:
            prediction.view = restore_images(image_processor, pixel_values[i : i + 1])[0]
            prediction.rois = [step[i].cpu() for step in outputs.rois]
            prediction.sampling_points = [step[i].cpu() for step in getattr(outputs, "sampling_points", None) or ()]
    return predictions


def draw_predictions(predictions: Sequence[Prediction], captions: Sequence[str] | None = None):
    """Draw the RoIs of predictions made with `output_rois=True`. See `draw_rois` for `captions`."""
    rois = [torch.stack(step) for step in zip(*(prediction.rois for prediction in predictions), strict=True)]
    points = [torch.stack(step) for step in zip(*(each.sampling_points[-1:] for each in predictions), strict=True)]
    views = [prediction.view for prediction in predictions]
    return draw_rois(views, rois, points, captions=captions)


def format_labels(prediction: Prediction, count: int | None = None) -> str:
    number = ".5g" if prediction.is_regression else ".1%"
    return ", ".join(f"{printable(label)} {score:{number}}" for label, score in prediction.labels[:count])


def format_prediction(name: str, prediction: Prediction) -> str:
    tokens = "" if prediction.num_tokens is None else f" ({prediction.num_tokens} tokens)"
    number = "8.5g" if prediction.is_regression else "8.1%"
    lines = [f"{score:{number}}  {printable(label)}" for label, score in prediction.labels]
    return "\n".join([f"{printable(name)}{tokens}", *lines])


def find_images(names: Sequence[str]) -> list[Path]:
    """Find image and parquet files. Each of `names` is a file, a folder or a pattern. Folders are searched
    recursively."""
    found = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            files = sorted(files_within(path, {*IMAGE_ENDINGS, *UNREAD_ENDINGS, ".parquet"}))
            if unread := [file for file in files if file.suffix.lower() in UNREAD_ENDINGS]:
                leave_out(unread, NOT_READ)
            files = [file for file in files if file not in unread and file.name not in METADATA_FILES]
        else:
            # Use `Path.glob`, because its `**` does not follow links to folders. Such links may form cycles.
            matches = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            # Leave out pipes, because reading a pipe may block. Leave out hidden files and files in hidden folders.
            # If `name` is ".cache/*.png", files in `.cache` are kept, because `name` contains this folder's full name.
            files = [match for match in matches if match.is_file() and _hidden(match) <= _hidden(path)]
        if not files:
            raise FileNotFoundError(f"There are no images at {name!r}; give image files, folders or patterns.")
        found += files
    return found


def _hidden(path: Path) -> set[str]:
    return {part for part in path.parts if part.startswith(".")}


def find_files(paths: Sequence[Path], image_column: str | None = None) -> Iterator[tuple[str, Path | dict]]:
    """Yield a name and a path for each image file, and a name and a record for each image of a parquet file."""
    for path in paths:
        if path.suffix.lower() == ".parquet":
            for index, record in enumerate(_read_parquet(path, image_column)):
                yield f"{path}[{index}]", record
        else:
            yield str(path), path


def _read_parquet(path: Path, image_column: str | None) -> Iterator[dict]:
    """Yield the undecoded images of a parquet file. The image column is chosen in the same way as for training."""
    features = load_table(str(path), streaming=True).features
    column = find_image_column(features, image_column, repr(str(path)))
    with pq.ParquetFile(path) as file:
        # `datasets` would keep more images in memory.
        for batch in file.iter_batches(64, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield value if isinstance(value, dict) else {"path" if isinstance(value, str) else "bytes": value}
