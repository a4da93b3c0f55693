"""Tokens where images have detail: the shipped student of Caltech-101 with trees of cells in the place of its grids.

    python benchmarks/content_placement.py accuracy --test TEST --backgrounds IMAGES   # without any training
    python benchmarks/content_placement.py speed                                       # the choice of cells included
    python benchmarks/content_placement.py picture --test TEST

`accuracy` tries photographs, the same as small objects (on a canvas whose sides are 2.5 times theirs), and the same on
other photographs. Writes content_placement.json, content_placement_speed.json and content_placement.png.
"""

import argparse
import functools
import math

import torch
import torch.nn.functional as F
from caltech101 import CANVAS, put_on_canvas
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

import frugalvit
from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.labels import class_names
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.speed import images_per_second
from frugalvit.common.tables import format_table
from frugalvit.common.views import EvalView, ImageFormat, seeded
from frugalvit.compare import sample
from frugalvit.configuration.configuration_sparseformer import PLACEMENT_RULES
from frugalvit.pictures import save_figure
from shared import add_results_argument, write_table


STUDENT = "caltech101-sparseformer"
TOKENS = [16, 36, 64]
# Of the picture.
PICTURE_TOKENS, PICTURES = 25, 6


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--test", help="parquet file or folder of test images")
    parser.add_argument("--backgrounds", help="of other photographs")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: 16 36 64")
    parser.add_argument("--limit", type=int, default=600, help="test images, chosen at random (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=50, help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()
    COMMANDS[arguments.what](arguments)


def load_placed(rule: str | None):
    """The student, and its image processor; with a rule, with trees."""
    model, processor = load_image_classifier(frugalvit.checkpoint_path(STUDENT), "cpu")
    if rule is not None:
        model.place_by_content(rule)
        # None of them is trained with trees.
        model.config.elastic_token_counts = None
    return model, processor


def put_on(background: Image.Image, image: Image.Image, index: int) -> Image.Image:
    """A test image on another photograph, whose sides are `CANVAS` times as long, at a place that its number
    decides."""
    size = [round(CANVAS * side) for side in image.size]
    with seeded(index):
        left, top = (int(torch.randint(large - small + 1, ())) for large, small in zip(size, image.size, strict=True))
    canvas = background.resize(size)
    canvas.paste(image, (left, top))
    return canvas


def measure_accuracy(arguments):
    records = sample(load_images([arguments.test], "train"), arguments.limit, 0)
    backgrounds = load_images([arguments.backgrounds], "train")
    grid, processor = load_placed(None)
    image_format = ImageFormat.from_processor(processor)
    view = EvalView(image_format)
    models = {"grid": grid} | {rule: load_placed(rule)[0] for rule in PLACEMENT_RULES}
    names = [name.lower() for name in class_names(records)]
    known = {label.lower(): number for number, label in grid.config.id2label.items()}
    right: dict[tuple[str, int, str], int] = {}
    for start in tqdm(range(0, len(records), arguments.batch_size), desc="images"):
        views = {"photographs": [], "small": [], "small, on photographs": []}
        labels = []
        for index in range(start, min(start + arguments.batch_size, len(records))):
            image = decode_image(records[index]["image"], index)
            background = decode_image(backgrounds[index % len(backgrounds)]["image"], index)
            views["photographs"].append(view(image)["pixel_values"])
            views["small"].append(view(put_on_canvas(image, index, image_format))["pixel_values"])
            views["small, on photographs"].append(view(put_on(background, image, index))["pixel_values"])
            labels.append(known[names[records[index]["label"]]])
        labels = torch.tensor(labels)
        for name, images in views.items():
            pixel_values = image_format.normalize(torch.stack(images))
            for placement, model in models.items():
                for count in arguments.tokens:
                    with torch.inference_mode():
                        logits = model(pixel_values, num_tokens=count).logits
                    key = (placement, count, name)
                    right[key] = right.get(key, 0) + int((logits.argmax(1) == labels).sum())
    rows = [
        {
            "placement": placement,
            "tokens": model.config.round_tokens(count),
            **{name: right[placement, count, name] / len(records) for name in views},
        }
        for count in arguments.tokens
        for placement, model in models.items()
    ]
    print(format_table(rows))
    error = math.sqrt(0.25 / len(records))
    settings = {"student": STUDENT, "images": len(records), "canvas": CANVAS, "largest standard error": error}
    write_table(arguments.results_dir / "content_placement.json", settings, rows)


def measure_speed(arguments):
    grid, _ = load_placed(None)
    tree, _ = load_placed("detail")
    pixel_values = torch.randn(32, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    rows = []
    models = {"grid": grid, "content": tree}
    for count in arguments.tokens:
        calls = {name: functools.partial(model, num_tokens=count) for name, model in models.items()}
        speeds = images_per_second(calls, pixel_values, rounds=20)
        rows += [
            {"placement": name, "tokens": models[name].config.round_tokens(count), "images_per_second": speed}
            for name, speed in speeds.items()
        ]
    print(format_table(rows))
    settings = {"student": STUDENT, "batch_size": 32, "precision": "float32"}
    write_table(arguments.results_dir / "content_placement_speed.json", settings, rows)


def draw_picture(arguments):
    """Photographs as small objects, what a grid's and what a tree's tokens see of them, and what both call them."""
    records = load_images([arguments.test], "train")
    chosen = [round(len(records) * (number + 0.5) / PICTURES) for number in range(PICTURES)]
    grid, processor = load_placed(None)
    tree, _ = load_placed("detail")
    image_format = ImageFormat.from_processor(processor)
    view, images = EvalView(image_format), []
    for number, index in enumerate(chosen):
        image = decode_image(records[index]["image"], index)
        images.append(image if number % 2 == 0 else put_on_canvas(image, index, image_format))
    pixels = torch.stack([view(image)["pixel_values"] for image in images])
    pixel_values = image_format.normalize(pixels)
    figure = Figure(figsize=(1.9 * PICTURES, 6.2), layout="constrained")
    axes = figure.subplots(3, PICTURES)
    for column in range(PICTURES):
        axes[0, column].imshow(pixels[column].permute(1, 2, 0))
    for row, (name, model) in enumerate({"a grid's": grid, "a tree's": tree}.items(), 1):
        count = model.config.round_tokens(PICTURE_TOKENS)
        with torch.inference_mode():
            outputs = model(pixel_values, num_tokens=count, output_rois=True)
        for column in range(PICTURES):
            seen = seen_by(pixels[column], outputs.rois[-1][column], model.config.patch_size)
            axes[row, column].imshow(seen.permute(1, 2, 0))
            label = model.config.id2label[int(outputs.logits[column].argmax())]
            axes[row, column].set_xlabel(label.replace("_", " "), fontsize=8)
        axes[row, 0].set_ylabel(f"{name} {count} tokens", fontsize=9)
    axes[0, 0].set_ylabel("image", fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    save_figure(figure, arguments.results_dir / "content_placement.png")


def seen_by(image: torch.Tensor, rois: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """An image `(channels, height, width)` of uint8 with each RoI at the resolution of a patch."""
    _, height, width = image.shape
    seen = image.clone()
    for left, top, right, bottom in (rois * torch.tensor([width, height, width, height])).round().int().tolist():
        cell = image[None, :, top:bottom, left:right].float()
        small = F.interpolate(cell, patch_size, mode="bilinear", antialias=True)
        seen[:, top:bottom, left:right] = F.interpolate(small, cell.shape[-2:], mode="nearest").round()[0].to(seen)
        seen[:, top, left:right] = seen[:, top:bottom, left] = 255
    return seen


COMMANDS = {"accuracy": measure_accuracy, "speed": measure_speed, "picture": draw_picture}


if __name__ == "__main__":
    main()
