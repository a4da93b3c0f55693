"""`frugalvit predict`: labels of images, and pictures of the places where tokens look."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel

from .architectures import has_rois
from .common.command_line import (
    CommandParser,
    add_device_argument,
    add_exact_argument,
    add_reading_arguments,
    add_token_arguments,
    add_trust_argument,
    positive,
)
from .common.image_files import decode_file, find_files, find_images, readable
from .common.loading import load_image_classifier
from .common.packing import pack_linear_layers
from .common.reading import Reader, read_ahead, share_read
from .common.scores import check_scores
from .common.tables import printable
from .common.views import prepare_images, restore_images
from .inference import choose_tokens, class_scores


# Images that are drawn, and those of a picture.
MAX_DRAWN, PAGE = 32, 8


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit predict",
        description="Print the top labels of images; with --rois, draw where the tokens of a SparseFormer look.",
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="image files, folders, patterns such as 'photos/*.jpg', .parquet files",
    )
    parser.add_argument(
        "--model",
        default="cifar10-sparseformer",
        metavar="FOLDER",
        help="model folder, hub id (@revision, too) or name of one that ships (default: %(default)s)",
    )
    parser.add_argument("--image-column", help="of parquet files, where names and types do not tell")
    parser.add_argument("--top", type=positive, default=5, help="labels for each image (default: 5)")
    parser.add_argument("--limit", type=positive, help="take only this many images")
    parser.add_argument(
        "--rois",
        metavar="FILE",
        help="draw the input, the token RoIs of the first, third and last focusing step and the last sampling points "
        f"(at most {MAX_DRAWN} images, {PAGE} a picture) into this .png, .webp, .pdf or .svg, further ones numbered",
    )
    parser.add_argument("--all-steps", action="store_true", help="draw the RoIs of every focusing step")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_reading_arguments(parser)
    add_exact_argument(parser)
    add_token_arguments(parser)
    parser.add_argument("--batch-size", type=positive, default=32, help="images at a time (default: 32)")
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.rois and arguments.confidence is not None:
        parser.error("argument --rois: images of one picture have the same number of tokens; leave --confidence out")
    paths = find_images(arguments.images, None if arguments.skip_corrupt else arguments.limit)
    if arguments.rois:
        from .pictures import check_picture_path, save_figure

        check_picture_path(arguments.rois)
    model, image_processor = load_image_classifier(arguments.model, arguments.device, arguments.trust_remote_code)
    if arguments.rois and not has_rois(model):
        raise ValueError(f"--rois: {type(model).__name__} has no RoIs to draw, expected a SparseFormer as --model.")
    choose_tokens(model, arguments.num_tokens, arguments.confidence)
    pack_linear_layers(model)
    reader = Reader(image_processor, share_read(model), arguments.exact)

    def read(file: tuple[str, Path | dict]) -> torch.Tensor:
        return reader.pixels(decode_file(file[1], file[0], at_least=reader.at_least))

    files = find_files(paths, arguments.image_column)
    pending = read_ahead(read, files, 2 * arguments.batch_size, arguments.num_workers)
    images = islice(readable(pending, arguments.skip_corrupt), arguments.limit)
    drawn, captions, results, count = [], [], [], 0
    with tqdm(desc="predict", unit=" images", leave=False, disable=None) as progress:
        while batch := list(islice(images, arguments.batch_size)):
            draws = bool(arguments.rois) and len(drawn) < MAX_DRAWN
            pixel_values = reader.batch([pixels for _, pixels in batch])
            predictions = predict_pixels(
                model, image_processor, pixel_values, arguments.top, draws, arguments.confidence
            )
            for (name, _), prediction in zip(batch, predictions, strict=True):
                if arguments.json:
                    labels = [{"label": label, "score": score} for label, score in prediction.labels]
                    tokens = {} if arguments.confidence is None else {"num_tokens": prediction.num_tokens}
                    results.append({"image": name, "labels": labels} | tokens)
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
        print(json.dumps(results, indent=2))
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
        regression (`bool`): Whether scores are numbers of a regression.
    """

    labels: list[tuple[str, float]]
    num_tokens: int | None = None
    view: torch.Tensor | None = None
    rois: list[torch.Tensor] = field(default_factory=list)
    sampling_points: list[torch.Tensor] = field(default_factory=list)
    regression: bool = False


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
    """Label a batch of prepared images.

    Args:
        model (`PreTrainedModel`): An image classifier of this project or of Transformers.
        image_processor: Its image processor, whose normalization is undone for `Prediction.view`.
        pixel_values (`torch.Tensor`): `(batch, channels, height, width)`, normalized.
        top (`int`, *optional*, defaults to 5): Labels for each image.
        output_rois (`bool`, *optional*, defaults to `False`): Return RoIs too; the model must have them.
        confidence (`float`, *optional*): Choose tokens by `classify_adaptively`; not with RoIs.
    """
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
            prediction.sampling_points = [step[i].cpu() for step in outputs.sampling_points]
    return predictions


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
    number = "8.5g" if prediction.regression else "8.1%"
    lines = [f"{score:{number}}  {printable(label)}" for label, score in prediction.labels]
    return "\n".join([f"{printable(name)}{tokens}", *lines])
