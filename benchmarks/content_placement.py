"""Compare two placements of a student's tokens: on a grid, and by the content of each image.

    python benchmarks/content_placement.py teacher --name clothing --model VIT --train TRAIN --test TEST
    python benchmarks/content_placement.py students --teacher TEACHER --train TRAIN --test TEST --backgrounds IMAGES
    python benchmarks/content_placement.py table --name caltech101
    python benchmarks/content_placement.py larger --name caltech101 --test TEST --backgrounds IMAGES
    python benchmarks/content_placement.py speed --teacher TEACHER
    python benchmarks/content_placement.py picture --student STUDENT --test TEST

- `teacher` fits a linear classifier to the embedding of a pretrained vision transformer.
- `students` bootstraps students for six numbers of tokens. Half of the training views are zoomed out. Students and
  teacher are measured on three views of each test photograph: the photograph, the photograph on a plain canvas with
  2.5 times its width and height, and the photograph on another photograph with the size of the canvas.
- `table` averages the results of all seeds under --runs-dir.
- `larger` measures images of twice the size. `speed` times both placements, and `picture` draws their tokens.
"""

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import caltech101
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from transformers import AutoImageProcessor, AutoModelForImageClassification

import shared
from frugalvit.baselines import load_teacher
from frugalvit.configuration.configuration_base import pair
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.modeling.modeling_patch_sparseformer import PatchSparseFormerForImageClassification
from frugalvit.pictures import save_figure
from frugalvit.speed import images_per_second
from frugalvit.training import bootstrap
from frugalvit.training.data import class_names, load_images
from frugalvit.training.files import write_json
from frugalvit.training.loading import choose_device, load_model
from frugalvit.training.preprocessing import decode_image
from frugalvit.training.views import EvalView
from linear_probe import fit_probe


PLACEMENTS = ("grid", "content")
TOKENS = [9, 16, 25, 36, 49, 64]
# Value of `frugalvit bootstrap --zoom_out` for all students.
ZOOM_OUT = 3.0
PICTURE_TOKENS, PICTURES = 25, 6


def main():
    parser = shared.make_parser(__doc__)
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
    shared.add_precision_argument(parser, "bf16")
    parser.add_argument("--training-precision", choices=["no", "bf16"], help="if not that of measuring")
    shared.add_run_arguments(parser, "runs/content_placement")
    caltech101.run_command(parser, COMMANDS)


def make_teacher(arguments):
    folder = arguments.runs_dir / f"{arguments.name}-teacher"
    processor = AutoImageProcessor.from_pretrained(arguments.model)
    image_format = ImageFormat.from_processor(processor)
    names = class_names(load_images([arguments.train], "train"))
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    model = AutoModelForImageClassification.from_pretrained(arguments.model, dtype=torch.float32, **labels).eval()
    anatomy = read_anatomy(model.to(choose_device()), image_format.size)
    seen = argparse.Namespace(**vars(arguments) | {"test": arguments.train, "test_images": None})
    probe = fit_probe(*caltech101.outputs_for(seen, anatomy.embed, image_format))
    with torch.no_grad():
        # The probe standardizes its inputs, and the classifier does not. The mean and std of the probe are therefore
        # merged into the weight and bias of the classifier.
        model.classifier.weight.copy_(probe.linear.weight / probe.std)
        model.classifier.bias.copy_(probe.linear.bias - model.classifier.weight.cpu() @ probe.mean)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    logits, labels = caltech101.outputs_for(arguments, anatomy.run_classifier, image_format)
    print(f"Teacher: {caltech101.accuracy_of(logits, labels):.2%} of {len(labels):,} test images.")


def accuracies(arguments, classify: Callable, image_format: ImageFormat) -> dict[str, float]:
    """Return the accuracy on each of `caltech101.VIEWS`. `classify` maps normalized images to logits."""
    return {
        view: caltech101.accuracy_of(*caltech101.outputs_for(arguments, classify, image_format, view))
        for view in caltech101.VIEWS
    }


def measure(arguments, folder: Path, placement: str, scale: int = 1) -> list[dict]:
    """Return a student's accuracies for each number of tokens. Images are enlarged by the factor `scale`."""
    model, processor = load_model(folder, "image-classification", str(choose_device()))
    image_format = ImageFormat.from_processor(processor)
    size = tuple(scale * side for side in image_format.size)
    resize = image_format.resize and scale * image_format.resize
    image_format = dataclasses.replace(image_format, size=size, resize=resize)
    rows = []
    for count in arguments.tokens:
        found = accuracies(arguments, lambda pixels, count=count: model(pixels, num_tokens=count).logits, image_format)
        rows.append({"placement": placement, "tokens": count} | found)
    return rows


def train_students(arguments):
    for seed in arguments.seeds:
        for placement in arguments.placements:
            shared.print_rows(train_student(arguments, placement, seed))
    anatomy, processor = load_teacher(arguments.teacher, str(choose_device()))
    found = accuracies(arguments, anatomy.run_classifier, ImageFormat.from_processor(processor))
    row = {"placement": "teacher", "tokens": anatomy.num_patches} | found
    write_json(arguments.runs_dir / f"{arguments.name}-teacher.json", [row])


def train_student(arguments, placement: str, seed: int) -> list[dict]:
    """Train and measure a student, or reuse its run. Return a row for each number of tokens."""
    folder = bootstrap_student(arguments, placement, seed)
    about = {"seed": seed, "steps": arguments.steps, "batch_size": arguments.batch_size}
    about["inherited_rate"] = arguments.learning_rate * arguments.inherited_learning_rate
    names = ("test", "test_images", "backgrounds", "tokens", "mixed_precision")
    return shared.measured_once(
        folder,
        lambda folder: [row | about for row in measure(arguments, folder, placement)],
        shared.describe_options(arguments, *names),
    )


def bootstrap_student(arguments, placement: str, seed: int) -> Path:
    rate = arguments.learning_rate * arguments.inherited_learning_rate
    budget = f"{arguments.steps}x{arguments.batch_size}-{rate:g}"
    folder = arguments.runs_dir / f"{arguments.name}-{placement}-{budget}-seed{seed}"
    argv = [
        *("--teacher", arguments.teacher, "--dataset", arguments.train, "--eval_split", "none", "--seed", str(seed)),
        *("--num_tokens", *map(str, TOKENS), "--placement", placement),
        *("--zoom_out", str(ZOOM_OUT)),
        *("--max_steps", str(arguments.steps), "--per_device_train_batch_size", str(arguments.batch_size)),
        *("--learning_rate", str(arguments.learning_rate)),
        *("--inherited_lr_factor", str(arguments.inherited_learning_rate)),
        *shared.precision_arguments(arguments, arguments.training_precision),
    ]
    shared.run_training(bootstrap, folder, argv)
    return folder


def measure_larger(arguments):
    rows = []
    for placement in PLACEMENTS:
        (folder,) = arguments.runs_dir.glob(f"{arguments.name}-{placement}-*seed{arguments.seeds[0]}")
        rows += measure(arguments, folder, placement, scale=2)
    settings = {name: getattr(arguments, name) for name in ("test_images", "mixed_precision")}
    settings["seed"] = arguments.seeds[0]
    shared.write_table(arguments.results_dir / f"content_larger_{arguments.name}.json", settings, rows)


def make_table(arguments):
    file = arguments.runs_dir / f"{arguments.name}-teacher.json"
    rows = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    groups: dict[tuple, list[dict]] = {}
    for file in sorted(arguments.runs_dir.glob(f"{arguments.name}-[a-z]*/measured.json")):
        for row in json.loads(file.read_text(encoding="utf-8")):
            key = tuple((name, value) for name, value in row.items() if name not in (*caltech101.VIEWS, "seed"))
            groups.setdefault(key, []).append(row)
    for key, found in groups.items():
        row = dict(key) | {"seeds": len(found)}
        for name in caltech101.VIEWS:
            values = [each[name] for each in found]
            row |= {name: statistics.mean(values), f"{name}: spread": shared.spread(values)}
        rows.append(row)
    settings = {name: getattr(arguments, name) for name in ("test_images", "mixed_precision", "training_precision")}
    settings |= {"canvas": caltech101.CANVAS, "zoom_out": ZOOM_OUT}
    shared.write_table(arguments.results_dir / f"content_students_{arguments.name}.json", settings, rows)


def measure_speed(arguments):
    teacher, _ = load_model(arguments.teacher, "image-classification", "cpu")
    make = functools.partial(PatchSparseFormerForImageClassification.from_teacher, teacher, TOKENS[-1])
    models = {name: make(elastic_token_counts=TOKENS, placement=name) for name in PLACEMENTS}
    pixel_values = torch.randn(32, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    rows = []
    for count in arguments.tokens:
        calls = {name: functools.partial(model, num_tokens=count) for name, model in models.items()}
        speeds = images_per_second(calls, pixel_values, rounds=20)
        rows += [{"placement": name, "tokens": count, "images_per_second": speed} for name, speed in speeds.items()]
    settings = {"batch_size": 32, "precision": "float32"}
    shared.write_table(arguments.results_dir / "content_placement_speed.json", settings, rows)


def draw_picture(arguments):
    """Draw a row of test images. Below it, draw the same images in one row for each placement. In these rows, the cell
    of each token is reduced to the resolution of one patch."""
    records = load_images([arguments.test], "train")
    chosen = [round(len(records) * (number + 0.5) / PICTURES) for number in range(PICTURES)]
    models = {}
    for placement in PLACEMENTS:
        models[placement], processor = load_model(arguments.student, "image-classification", "cpu")
        models[placement].set_placement(placement)
    image_format = ImageFormat.from_processor(processor)
    view, images = EvalView(image_format), []
    for number, index in enumerate(chosen):
        image = decode_image(records[index]["image"], index)
        images.append(image if number % 2 == 0 else caltech101.put_on_canvas(image, index, image_format))
    pixels = torch.stack([view(image)["pixel_values"] for image in images])
    pixel_values = image_format.normalize(pixels)
    figure = Figure(figsize=(1.9 * PICTURES, 6.2), layout="constrained")
    axes = figure.subplots(3, PICTURES, subplot_kw={"xticks": [], "yticks": []})
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
    save_figure(figure, arguments.results_dir / "content_placement.webp")


def seen_by(image: torch.Tensor, rois: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Return an image in which each RoI has the resolution of a patch, `(channels, height, width)` uint8."""
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
    "larger": (measure_larger, ["test", "backgrounds"]),
    "speed": (measure_speed, ["teacher"]),
    "picture": (draw_picture, ["student", "test"]),
}


if __name__ == "__main__":
    main()
