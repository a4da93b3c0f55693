"""`frugalvit predict`: labels of images, and pictures of the places where tokens look."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, tee
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Features
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel

from .architectures import has_rois
from .command_line import (
    CommandParser,
    add_device_argument,
    add_reading_arguments,
    add_token_arguments,
    add_trust_argument,
    positive,
)
from .exported import load_classifier
from .inference import Classifier, choose_tokens
from .modeling.layers import class_scores
from .modeling.packing import pack_linear_layers
from .pictures import check_picture_path, draw_rois, save_figure
from .training.data import METADATA_FILES, NOT_READ, files_within, find_column, kind_of, leave_out
from .training.decoding import IMAGE_ENDINGS, UNREAD_ENDINGS, CorruptImageError
from .training.preprocessing import prepare_images, restore_images
from .training.scores import check_scores
from .training.text import printable


# Images of a picture.
MAX_DRAWN = 8


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit predict",
        description="Print the top labels of images; with --rois, draw where the tokens of a SparseFormer look.",
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders, 'photos/*.jpg', .parquet files")
    parser.add_argument("--model", default="cifar10-sparseformer", metavar="FOLDER", help="or hub id, or name")
    parser.add_argument("--image-column", help="of parquet files, where names and types do not tell")
    parser.add_argument("--top", type=positive, default=5, help="labels for each image")
    parser.add_argument("--limit", type=positive, help="take only this many images")
    parser.add_argument("--rois", metavar="FILE", help=f"draw the tokens' RoIs in {MAX_DRAWN} images (.png, .pdf, …)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_reading_arguments(parser)
    add_token_arguments(parser)
    parser.add_argument("--batch-size", type=positive, default=32, help="images at a time")
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.rois and arguments.confidence is not None:
        parser.error("argument --rois: images of one picture have the same number of tokens; leave --confidence out")
    paths = find_images(arguments.images)
    if arguments.rois:
        check_picture_path(arguments.rois)
    model, image_processor = load_classifier(arguments.model, arguments.device, arguments.trust_remote_code)
    if arguments.rois and not has_rois(model):
        raise ValueError(f"--rois: {type(model).__name__} has no RoIs to draw, expected a SparseFormer as --model.")
    choose_tokens(model, arguments.num_tokens, arguments.confidence)
    pack_linear_layers(model)
    predictor = _Predictor(
        model,
        image_processor,
        confidence=arguments.confidence,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        return_errors=True,
    )
    predictor.options = {"top": arguments.top, "output_rois": bool(arguments.rois)}
    found = find_files(paths, arguments.image_column)
    names, files = tee(found if arguments.skip_corrupt else islice(found, arguments.limit))
    drawn = []
    captions = []
    results = []
    count = 0
    predictions = tqdm(predictor(file for _, file in files), "predict", leave=False, disable=None)
    for (name, _), prediction in zip(names, predictions, strict=False):
        if isinstance(prediction, CorruptImageError):
            if not arguments.skip_corrupt:
                raise ValueError(f"Cannot read {name!r}: {prediction} To go on without such images: --skip-corrupt.")
            tqdm.write(f"Left out: cannot read {printable(f'{name}: {prediction}')}", file=sys.stderr)
            continue
        if arguments.json:
            labels = [{"label": label, "score": score} for label, score in prediction.labels]
            results.append({"image": name, "labels": labels, "num_tokens": prediction.num_tokens})
        else:
            tqdm.write(format_prediction(name, prediction))
        if arguments.rois and len(drawn) < MAX_DRAWN:
            drawn.append(prediction)
            captions.append(f"{printable(Path(name).name)}: {format_labels(prediction, 3)}")
        count += 1
        if count == arguments.limit:
            break
    if not count:
        raise ValueError("None of the images can be read.")
    if arguments.json:
        print(json.dumps(results, indent=2))
    if arguments.rois:
        save_figure(draw_predictions(drawn, captions), Path(arguments.rois))
        print(f"Drew {len(drawn)} of {count} images: {printable(arguments.rois)}", file=sys.stderr)


@dataclass
class Prediction:
    """A model's labels of an image, the best first, and where its tokens look."""

    labels: list[tuple[str, float]]
    # Latent tokens, where the model's confidence decided.
    num_tokens: int | None = None
    # The image as the model saw it, (channels, height, width), 0 to 1.
    view: torch.Tensor | None = None
    # (tokens, 4) after every adjustment, and, of the papers' models, (tokens, points, 2) of every sampling.
    rois: list[torch.Tensor] = field(default_factory=list)
    sampling_points: list[torch.Tensor] = field(default_factory=list)
    regression: bool = False


class _Predictor(Classifier):
    """A `Classifier` that yields a `Prediction` for each image."""

    def _compute(self, pixel_values: torch.Tensor) -> list[Prediction]:
        return predict_pixels(
            self.model, self.image_processor, pixel_values, confidence=self.confidence, **self.options
        )


def predict(model: PreTrainedModel, image_processor, images: Sequence[Image.Image], **options) -> list[Prediction]:
    """Label RGB images in one batch; options as in `predict_pixels`."""
    return predict_pixels(model, image_processor, prepare_images(image_processor, images), **options)


@torch.no_grad()
def predict_pixels(
    model: PreTrainedModel,
    image_processor,
    pixel_values: torch.Tensor,
    top: int = 5,
    output_rois: bool = False,
    confidence: float | None = None,
) -> list[Prediction]:
    """Label a batch of prepared images, `(batch, channels, height, width)`."""
    config = model.config
    if confidence is None:
        outputs = model(pixel_values.to(model.device), **({"output_rois": True} if output_rois else {}))
    else:
        outputs = model.classify_adaptively(pixel_values.to(model.device), confidence)
    check_scores(outputs.logits)
    classes = outputs.logits.shape[-1]
    if classes != len(config.id2label):
        raise ValueError(f"The model has {classes} scores, and its config.json names {len(config.id2label)} classes.")
    scores, indices = class_scores(config, outputs.logits).topk(min(top, classes))
    predictions = [
        Prediction(
            [(config.id2label[index], score) for index, score in zip(*row, strict=True)],
            regression=config.problem_type == "regression",
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


def draw_predictions(
    predictions: Sequence[Prediction], captions: Sequence[str] | None = None, all_steps: bool = False
):
    """`draw_rois` for what `predict(…, output_rois=True)` returned; a `matplotlib.figure.Figure`."""
    rois = [torch.stack(step) for step in zip(*(prediction.rois for prediction in predictions), strict=True)]
    points = [torch.stack(step) for step in zip(*(each.sampling_points[-1:] for each in predictions), strict=True)]
    views = [prediction.view for prediction in predictions]
    return draw_rois(views, rois, points, captions=captions, all_steps=all_steps)


def format_labels(prediction: Prediction, count: int | None = None) -> str:
    number = ".5g" if prediction.regression else ".1%"
    return ", ".join(f"{printable(label)} {score:{number}}" for label, score in prediction.labels[:count])


def format_prediction(name: str, prediction: Prediction) -> str:
    tokens = "" if prediction.num_tokens is None else f" ({prediction.num_tokens} tokens)"
    number = "8.5g" if prediction.regression else "8.1%"
    lines = [f"{score:{number}}  {printable(label)}" for label, score in prediction.labels]
    return "\n".join([f"{printable(name)}{tokens}", *lines])


def find_images(arguments: Sequence[str]) -> list[Path]:
    """Find the image and parquet files that arguments name: files, folders with all files in them, or patterns."""
    found = []
    for argument in arguments:
        path = Path(argument).expanduser()
        if path.is_dir():
            files = sorted(files_within(path, {*IMAGE_ENDINGS, *UNREAD_ENDINGS, ".parquet"}))
            if unread := [file for file in files if file.suffix.lower() in UNREAD_ENDINGS]:
                leave_out(unread, NOT_READ)
            files = [file for file in files if file not in unread and file.name not in METADATA_FILES]
        else:
            # Unlike `glob`, it follows no links at **, which may lead in circles.
            names = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            # A pipe would be waited for; hidden files are those that are named.
            files = [name for name in names if name.is_file() and _hidden(name) <= _hidden(path)]
        if not files:
            raise FileNotFoundError(f"There are no images at {argument!r}; give image files, folders or patterns.")
        found += files
    return found


def _hidden(path: Path) -> set[str]:
    return {part for part in path.parts if part.startswith(".")}


def find_files(paths: Sequence[Path], image_column: str | None = None) -> Iterator[tuple[str, Path | dict]]:
    """Yield names of image files, and of the images in parquet files, each with the argument of `open_record`."""
    for path in paths:
        if path.suffix.lower() == ".parquet":
            for index, record in enumerate(_read_parquet(path, image_column)):
                yield f"{path}[{index}]", record
        else:
            yield str(path), path


def _read_parquet(path: Path, image_column: str | None) -> Iterator[dict]:
    """Yield undecoded images of a parquet file, of the column that training takes, too."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"Cannot read {str(path)!r}: it is no parquet file or is corrupt.") from error
    with file:
        features = Features.from_arrow_schema(file.schema_arrow)
        kinds = {name: kind_of(feature) for name, feature in features.items()}
        column = find_column(kinds, image_column, ("image", "bytes"), "image", str(path))
        for batch in file.iter_batches(64, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield value if isinstance(value, dict) else {"path" if isinstance(value, str) else "bytes": value}
