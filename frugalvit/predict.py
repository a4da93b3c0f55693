"""`frugalvit predict`: labels of images, and pictures of the places where tokens look."""

import glob
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel

from .common.columns import features_of, find_image_column
from .common.decoding import read_image, read_record
from .common.exported import ExportedModule
from .common.folders import image_files, parquet_files, say_unread
from .common.loading import load_image_classifier
from .common.metrics import check_scores
from .common.packing import pack_linear_layers
from .common.reading import Reader, read_ahead, share_read
from .common.resources import checkpoint_path
from .common.tables import printable
from .common.views import prepare_images, restore_images
from .options.predict import MAX_DRAWN, PAGE, parse
from .tokens import choose_tokens


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    # What costs little is checked before the model is loaded.
    paths = find_images(arguments.images, None if arguments.skip_corrupt else arguments.limit)
    if arguments.rois:
        from .pictures import check_picture_path, save_figure

        check_picture_path(arguments.rois)
    model, image_processor = load_image_classifier(
        arguments.model or checkpoint_path("cifar10-sparseformer"), arguments.device, arguments.trust_remote_code
    )
    if arguments.rois and not has_rois(model):
        raise ValueError(
            f"--rois: {type(model).__name__} has no RoIs to draw, expected a SparseFormer. Leave --rois out or choose "
            "another --model."
        )

    confidence = choose_tokens(model, arguments.num_tokens, arguments.confidence)
    pack_linear_layers(model)

    reader = Reader(image_processor, share_read(model), arguments.exact)

    def read(file: tuple[str, Path | dict]) -> torch.Tensor:
        return reader.pixels(decode_file(file[1], file[0], at_least=reader.at_least))

    files = read_ahead(
        read, find_files(paths, arguments.image_column), 2 * arguments.batch_size, arguments.num_workers
    )
    images = islice(_readable(files, arguments.skip_corrupt), arguments.limit)
    drawn, captions, count, written = [], [], 0, False
    with tqdm(desc="predict", unit=" images", leave=False, disable=None) as progress:
        while batch := list(islice(images, arguments.batch_size)):
            draws = bool(arguments.rois) and len(drawn) < MAX_DRAWN
            pixel_values = reader.batch([pixels for _, pixels in batch])
            predictions = predict_pixels(model, image_processor, pixel_values, arguments.top, draws, confidence)
            for (name, _), prediction in zip(batch, predictions, strict=True):
                if arguments.json:
                    labels = [{"label": label, "score": score} for label, score in prediction.labels]
                    tokens = {} if confidence is None else {"num_tokens": prediction.num_tokens}
                    result = json.dumps({"image": name, "labels": labels} | tokens, indent=2)
                    tqdm.write(f"{',' if written else '['}\n{textwrap.indent(result, '  ')}", end="")
                    written = True
                else:
                    tqdm.write(format_prediction(name, prediction))
                if draws and len(drawn) < MAX_DRAWN:
                    drawn.append(prediction)
                    captions.append(f"{printable(Path(name).name)}: {format_labels(prediction.labels[:3])}")
            count += len(batch)
            progress.update(len(batch))
    if not count:
        raise ValueError("None of the images can be read.")
    if arguments.json:
        print("\n]")
    if arguments.rois:
        path, pages = Path(arguments.rois), []
        for start in range(0, len(drawn), PAGE):
            page = slice(start, start + PAGE)
            pages.append(path.with_stem(f"{path.stem}-{len(pages) + 1}") if pages else path)
            save_figure(draw_predictions(drawn[page], captions[page], arguments.all_steps), pages[-1])
        print(f"Drew {len(drawn)} of {count} images: {printable(', '.join(map(str, pages)))}", file=sys.stderr)


@dataclass
class Prediction:
    """A model's labels of an image, and where its tokens looked.

    Args:
        labels (`list`): Pairs of label and score, the best first.
        num_tokens (`int`, *optional*): Latent tokens that were needed, where the model's confidence decided.
        view (`torch.Tensor`, *optional*): `(channels, height, width)`, 0 to 1: the image as the model saw it.
        rois (`list`): `(tokens, 4)` after every adjustment.
        sampling_points (`list`): `(tokens, points, 2)` of every sampling.
    """

    labels: list[tuple[str, float]]
    num_tokens: int | None = None
    view: torch.Tensor | None = None
    rois: list[torch.Tensor] = field(default_factory=list)
    sampling_points: list[torch.Tensor] = field(default_factory=list)


def predict(
    model: PreTrainedModel,
    image_processor,
    images: Sequence[Image.Image],
    top: int = 5,
    output_rois: bool = False,
    confidence: float | None = None,
) -> list[Prediction]:
    """Label RGB images in one batch: prepare them by the image processor, and call `predict_pixels`."""
    return predict_pixels(
        model, image_processor, prepare_images(image_processor, images), top, output_rois, confidence
    )


@torch.no_grad()
def predict_pixels(
    model: PreTrainedModel,
    image_processor,
    pixel_values: torch.Tensor,
    top: int = 5,
    output_rois: bool = False,
    confidence: float | None = None,
) -> list[Prediction]:
    """Label a batch of prepared images.

    Args:
        model (`PreTrainedModel`): An image classifier of this project or of Transformers.
        image_processor: Its image processor, whose normalization is undone for `Prediction.view`.
        pixel_values (`torch.Tensor`): `(batch, channels, height, width)`, normalized.
        top (`int`, *optional*, defaults to 5): Labels for each image.
        output_rois (`bool`, *optional*, defaults to `False`): Return RoIs too; the model must have them.
        confidence (`float`, *optional*): Without RoIs, spend few tokens on images whose class is so sure, see
            `SparseFormerForImageClassification.classify_adaptively`.

    Returns:
        `list[Prediction]`: One for each image, on the CPU. Scores are sigmoids for multi-label models and softmax
        probabilities otherwise.

    Raises:
        ValueError: if the model's scores are no numbers, or are not as many as there are names of classes.
    """
    if confidence is None:
        outputs = model(pixel_values.to(model.device), **({"output_rois": True} if output_rois else {}))
    else:
        outputs = model.classify_adaptively(pixel_values.to(model.device), confidence)
    logits = outputs.logits.float()
    check_scores(logits)
    if logits.shape[-1] != len(model.config.id2label):
        raise ValueError(
            f"The model computes {logits.shape[-1]} scores, and its config.json has names of "
            f"{len(model.config.id2label)} classes."
        )
    multi_label = model.config.problem_type == "multi_label_classification"
    scores, indices = (logits.sigmoid() if multi_label else logits.softmax(-1)).topk(min(top, logits.shape[-1]))
    predictions = [
        Prediction([(model.config.id2label[index], score) for index, score in zip(*row, strict=True)])
        for row in zip(indices.tolist(), scores.tolist(), strict=True)
    ]
    if confidence is not None:
        for prediction, count in zip(predictions, outputs.num_tokens.tolist(), strict=True):
            prediction.num_tokens = count
    if output_rois:
        pixel_values = restore_images(image_processor, pixel_values)
        for i, prediction in enumerate(predictions):
            prediction.view = pixel_values[i]
            prediction.rois = [step[i].cpu() for step in outputs.rois]
            prediction.sampling_points = [step[i].cpu() for step in outputs.sampling_points]
    return predictions


def has_rois(model: PreTrainedModel) -> bool:
    """Whether the model takes `output_rois=True`."""
    if isinstance(model, ExportedModule):
        return "rois" in model.outputs
    return "rois" in getattr(model.config, "keys_to_ignore_at_inference", ())


def draw_predictions(
    predictions: Sequence[Prediction], captions: Sequence[str] | None = None, all_steps: bool = False
):
    """`draw_rois` for what `predict(…, output_rois=True)` returned; a `matplotlib.figure.Figure`."""
    from .pictures import draw_rois

    rois = [torch.stack(step) for step in zip(*(prediction.rois for prediction in predictions), strict=True)]
    points = torch.stack([prediction.sampling_points[-1] for prediction in predictions])
    views = [prediction.view for prediction in predictions]
    return draw_rois(views, rois, [points], captions=captions, all_steps=all_steps)


def format_labels(labels: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{printable(label)} {score:.1%}" for label, score in labels)


def format_prediction(name: str, prediction: Prediction) -> str:
    tokens = "" if prediction.num_tokens is None else f" ({prediction.num_tokens} tokens)"
    lines = [f"{score:8.1%}  {printable(label)}" for label, score in prediction.labels]
    return "\n".join([f"{printable(name)}{tokens}", *lines])


def find_images(arguments: Sequence[str], limit: int | None = None) -> list[Path]:
    """Find the image and parquet files that arguments stand for: files, folders with all files in them, or patterns.
    If several folders, for example of classes, have more images than `limit`, so many are taken, evenly spread.

    Raises:
        FileNotFoundError: if an argument stands for no file.
    """
    found = []
    for argument in arguments:
        path = Path(argument).expanduser()
        if path.is_dir():
            say_unread(path)
            files = sorted([*image_files(path), *parquet_files(path)])
            problem = "are no images in the folder"
        elif path.exists() and not path.is_file():
            raise ValueError(f"{argument!r} is no file but a device or a pipe, expected an image.")
        elif path.exists():
            files, problem = [path], ""
        else:
            files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]
            problem = (
                "is no file that matches the pattern" if glob.has_magic(argument) else "is no such file or folder:"
            )
        if not files:
            raise FileNotFoundError(f"There {problem} {argument!r}; give image files, folders or patterns.")
        found += files
    in_folders = len({path.parent for path in found}) > 1 and not any(path.suffix == ".parquet" for path in found)
    if limit is not None and limit < len(found) and in_folders:
        return [found[index * len(found) // limit] for index in range(limit)]
    return found


def read_images(
    paths: Sequence[Path], skip_corrupt: bool = False, image_column: str | None = None
) -> Iterator[tuple[str, Image.Image]]:
    """Yield names and RGB images, see `to_rgb`, of image files and of parquet files with an image column.

    Args:
        paths (sequence of `Path`): The files.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read, and print so.
        image_column (`str`, *optional*): Column of parquet files, if names and types do not tell.

    Raises:
        ValueError: if a file is no image or is corrupt, or a parquet file has no column of images, or several.
    """
    files = find_files(paths, image_column)
    yield from _readable(read_ahead(lambda file: decode_file(file[1], file[0]), files, 1), skip_corrupt)


def find_files(paths: Sequence[Path], image_column: str | None = None) -> Iterator[tuple[str, Path | dict]]:
    """Yield names of image files, and of the images in parquet files, each with the argument of `decode_file`;
    arguments and errors as of `read_images`."""
    for path in paths:
        if path.suffix.lower() == ".parquet":
            for index, record in enumerate(_read_parquet(path, image_column)):
                yield f"{path}[{index}]", record
        else:
            yield str(path), path


def _readable(files: Iterator[tuple[tuple, Future]], skip_corrupt: bool) -> Iterator[tuple[str, object]]:
    """Yield the name and the image of each file of `read_ahead`; with `skip_corrupt`, of those that can be read."""
    for (name, _), future in files:
        try:
            yield name, future.result()
        except (ValueError, PermissionError) as error:
            if not skip_corrupt:
                raise
            tqdm.write(f"Left out: {printable(str(error))}", file=sys.stderr)


def _read_parquet(path: Path, image_column: str | None) -> Iterator[dict]:
    """Yield undecoded images of a parquet file, of the column that training takes, too."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"Cannot read {str(path)!r}: it is no parquet file or is corrupt.") from error
    with file:
        column = find_image_column(features_of(file.schema_arrow), image_column, str(path))
        for batch in file.iter_batches(64, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield value if isinstance(value, dict) else {"path" if isinstance(value, str) else "bytes": value}


def decode_file(
    file: Path | dict,
    name: str,
    hint: str = " To go on without such images: --skip-corrupt.",
    at_least: tuple[int, int] | None = None,
) -> Image.Image:
    """Read the RGB image in a file, or of an undecoded `datasets` record; `at_least` as in `read_image`.

    Raises:
        ValueError: if it is no image or is corrupt, with a hint what to do.
    """
    try:
        return read_record(file, at_least) if isinstance(file, dict) else read_image(file, at_least=at_least)
    except PermissionError:
        raise
    # Decoders raise whatever a broken file leads them to.
    except Exception as error:
        raise ValueError(
            f"Cannot read {name!r}: it is no image that Pillow reads, or is corrupt ({error}).{hint}"
        ) from error
