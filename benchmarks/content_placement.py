"""Placement of tokens by content: students whose cells are chosen for each image beside students with grids.

    python benchmarks/content_placement.py teacher --name clothing --model VIT --train TRAIN --test TEST
    python benchmarks/content_placement.py students --teacher TEACHER --train TRAIN --test TEST --backgrounds IMAGES
    python benchmarks/content_placement.py table --name caltech101
    python benchmarks/content_placement.py speed --teacher TEACHER                      # the choice of cells included
    python benchmarks/content_placement.py picture --student STUDENT --test TEST

`teacher` fits a linear classifier to the embedding of a pretrained vision transformer, which stays as it is.
`students` bootstraps a student of each of --placements for six counts of tokens, all on the same views, half of them
zoomed out. Each is asked about test photographs, the same as small objects (on a canvas whose sides are 2.5 times
theirs), and the same on other photographs; so is the teacher. Runs are kept under --runs-dir and found again; `table`
puts all that are there into content_students_NAME.json. `speed` times both placements (content_placement_speed.json).
`picture` draws what tokens of a grid see and those that a student places (content_placement.webp).
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from caltech101 import CANVAS, VIEWS, accuracy_of, outputs_for, print_accuracy, put_on_canvas, run_command
from matplotlib.figure import Figure
from transformers import AutoImageProcessor, AutoModelForImageClassification

from frugalvit.baselines import load_teacher
from frugalvit.common.data import class_names, load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.files import write_json
from frugalvit.common.loading import choose_device, load_image_classifier
from frugalvit.common.speed import images_per_second
from frugalvit.configuration.configuration_base import pair
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.modeling.modeling_patch_sparseformer import PatchSparseFormerForImageClassification
from frugalvit.pictures import save_figure
from frugalvit.training import bootstrap
from frugalvit.training.augmentation import EvalView
from linear_probe import fit_probe
from shared import (
    add_precision_argument,
    add_run_arguments,
    make_parser,
    measured_once,
    precision_arguments,
    print_rows,
    run_training,
    spread,
    write_table,
)


PLACEMENTS = ("grid", "content")
TOKENS = [9, 16, 25, 36, 49, 64]
# What students are trained on besides photographs.
ZOOM_OUT = 3.0
# Of the picture.
PICTURE_TOKENS, PICTURES = 25, 6


def main():
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", help="folder or hub id of a pretrained ViT")
    parser.add_argument("--teacher", help="folder of the teacher")
    parser.add_argument("--student", help="folder of a student")
    parser.add_argument("--train", help="parquet file or folder of training images")
    parser.add_argument("--test", help="of test images")
    parser.add_argument("--backgrounds", help="of other photographs")
    parser.add_argument("--name", default="caltech101", help="of the data (default: %(default)s)")
    parser.add_argument("--placements", nargs="*", choices=PLACEMENTS, default=PLACEMENTS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: 9 16 25 36 49 64")
    parser.add_argument("--test-images", type=int, help="drawn at random (default: all)")
    parser.add_argument("--steps", type=int, default=180, help="of students (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=192, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: %(default)s")
    parser.add_argument("--inherited-learning-rate", type=float, default=0.04, help="default: %(default)s")
    add_precision_argument(parser, "bf16")
    add_run_arguments(parser, "runs/content_placement")
    run_command(parser, COMMANDS)


def make_teacher(arguments):
    folder = arguments.runs_dir / f"{arguments.name}-teacher"
    processor = AutoImageProcessor.from_pretrained(arguments.model)
    image_format = ImageFormat.from_processor(processor)
    names = class_names(load_images([arguments.train], "train"))
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    model = AutoModelForImageClassification.from_pretrained(arguments.model, dtype=torch.float32, **labels).eval()
    anatomy = read_anatomy(model.to(choose_device()), image_format.size)
    seen = argparse.Namespace(**vars(arguments) | {"test": arguments.train, "test_images": None})
    probe = fit_probe(*outputs_for(seen, anatomy.embed, image_format))
    with torch.no_grad():
        # Of features that are not standardized.
        model.classifier.weight.copy_(probe.linear.weight / probe.std)
        model.classifier.bias.copy_(probe.linear.bias - model.classifier.weight.cpu() @ probe.mean)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    print_accuracy(arguments, folder)


def accuracies(arguments, classify: Callable, image_format: ImageFormat) -> dict[str, float]:
    """Accuracy of a function that returns logits, on each of `VIEWS`."""
    return {view: accuracy_of(*outputs_for(arguments, classify, image_format, view)) for view in VIEWS}


def measure(arguments, model, processor, placement: str) -> list[dict]:
    """Accuracy of a classifier on each of `VIEWS`, for each count of tokens."""
    model.to(choose_device()).eval()
    image_format = ImageFormat.from_processor(processor)
    return [
        {"placement": placement, "tokens": count}
        | accuracies(arguments, functools.partial(logits_of, model, count), image_format)
        for count in arguments.tokens
    ]


def logits_of(model, num_tokens: int, pixel_values: torch.Tensor) -> torch.Tensor:
    return model(pixel_values, num_tokens=num_tokens).logits


def train_students(arguments):
    for seed in arguments.seeds:
        for placement in arguments.placements:
            print_rows(train_student(arguments, placement, seed))
    anatomy, processor = load_teacher(arguments.teacher, str(choose_device()))
    found = accuracies(arguments, anatomy.run_classifier, ImageFormat.from_processor(processor))
    row = {"placement": "teacher", "tokens": anatomy.num_patches} | found
    write_json(arguments.runs_dir / f"{arguments.name}-teacher.json", [row])


def train_student(arguments, placement: str, seed: int) -> list[dict]:
    """Train and measure a student, now or before; return a row for each count of tokens."""
    rate = arguments.learning_rate * arguments.inherited_learning_rate
    budget = f"{arguments.steps}x{arguments.batch_size}-{rate:g}"
    folder = arguments.runs_dir / f"{arguments.name}-{placement}-{budget}-seed{seed}"
    argv = [
        *("--teacher", arguments.teacher, "--dataset", arguments.train, "--eval_split", "none", "--seed", str(seed)),
        *("--num_tokens", *map(str, TOKENS), "--placement", placement),
        *("--zoom_out", str(ZOOM_OUT)),
        *("--max_steps", str(arguments.steps), "--per_device_train_batch_size", str(arguments.batch_size)),
        *("--learning_rate", str(arguments.learning_rate)),
        *("--inherited_lr_factor", str(arguments.inherited_learning_rate), *precision_arguments(arguments)),
    ]
    run_training(bootstrap, folder, argv)
    about = {"seed": seed, "steps": arguments.steps, "batch_size": arguments.batch_size, "inherited_rate": rate}
    return measured_once(folder, lambda folder: [row | about for row in measure_student(arguments, folder, placement)])


def measure_student(arguments, folder: Path, placement: str) -> list[dict]:
    model, processor = load_image_classifier(folder, "cpu")
    rows = measure(arguments, model, processor, placement)
    if placement == "content":
        model.set_placement("grid")
        rows += measure(arguments, model, processor, "content, asked by grid")
    return rows


def make_table(arguments):
    file = arguments.runs_dir / f"{arguments.name}-teacher.json"
    rows = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    groups: dict[tuple, list[dict]] = {}
    for file in sorted(arguments.runs_dir.glob(f"{arguments.name}-[a-z]*/measured.json")):
        for row in json.loads(file.read_text(encoding="utf-8")):
            key = tuple((name, value) for name, value in row.items() if name not in (*VIEWS, "seed"))
            groups.setdefault(key, []).append(row)
    for key, found in groups.items():
        row = dict(key) | {"seeds": len(found)}
        for name in VIEWS:
            values = [each[name] for each in found]
            row |= {name: statistics.mean(values), f"{name}: spread": spread(values)}
        rows.append(row)
    settings = {"canvas": CANVAS, "zoom_out": ZOOM_OUT, "test_images": arguments.test_images}
    write_table(arguments.results_dir / f"content_students_{arguments.name}.json", settings, rows)


def measure_speed(arguments):
    teacher, _ = load_image_classifier(arguments.teacher, "cpu")
    models = {
        placement: PatchSparseFormerForImageClassification.from_teacher(
            teacher, TOKENS[-1], elastic_token_counts=TOKENS, placement=placement
        )
        for placement in PLACEMENTS
    }
    pixel_values = torch.randn(32, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    rows = []
    for count in arguments.tokens:
        calls = {name: functools.partial(model, num_tokens=count) for name, model in models.items()}
        speeds = images_per_second(calls, pixel_values, rounds=20)
        rows += [{"placement": name, "tokens": count, "images_per_second": speed} for name, speed in speeds.items()]
    settings = {"batch_size": 32, "precision": "float32"}
    write_table(arguments.results_dir / "content_placement_speed.json", settings, rows)


def draw_picture(arguments):
    """Draw photographs as small objects, as tokens of a grid see them and those that a student places, with labels."""
    records = load_images([arguments.test], "train")
    chosen = [round(len(records) * (number + 0.5) / PICTURES) for number in range(PICTURES)]
    models = {}
    for placement in PLACEMENTS:
        models[placement], processor = load_image_classifier(arguments.student, "cpu")
        if placement == "grid":
            models[placement].set_placement(placement)
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
    for row, (name, model) in enumerate(models.items(), 1):
        with torch.inference_mode():
            outputs = model(pixel_values, num_tokens=PICTURE_TOKENS, output_rois=True)
        for column in range(PICTURES):
            seen = seen_by(pixels[column], outputs.rois[-1][column], pair(model.config.patch_size))
            axes[row, column].imshow(seen.permute(1, 2, 0))
            label = model.config.id2label[int(outputs.logits[column].argmax())]
            axes[row, column].set_xlabel(label.replace("_", " "), fontsize=8)
        axes[row, 0].set_ylabel(f"{PICTURE_TOKENS} tokens, {name}", fontsize=9)
    axes[0, 0].set_ylabel("image", fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    save_figure(figure, arguments.results_dir / "content_placement.webp")


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


COMMANDS = {
    "teacher": (make_teacher, ["model", "train", "test"]),
    "students": (train_students, ["teacher", "train", "test", "backgrounds"]),
    "table": (make_table, []),
    "speed": (measure_speed, ["teacher"]),
    "picture": (draw_picture, ["student", "test"]),
}


if __name__ == "__main__":
    main()
