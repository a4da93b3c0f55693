"""Tokens where images have detail: students whose tokens are cells of trees beside students with grids.

    python benchmarks/content_placement.py teacher --model VIT --train TRAIN --test TEST       # Clothing's, 224 pixels
    python benchmarks/content_placement.py untrained --teacher TEACHER --test TEST --backgrounds IMAGES
    python benchmarks/content_placement.py peers --teacher TEACHER --test TEST --backgrounds IMAGES --tome CHECKOUT
    python benchmarks/content_placement.py students --teacher TEACHER --train TRAIN --test TEST --backgrounds IMAGES
    python benchmarks/content_placement.py table --name caltech101
    python benchmarks/content_placement.py larger --teacher TEACHER --student RUN --test TEST --backgrounds IMAGES
    python benchmarks/content_placement.py looks --teacher TEACHER --student RUN --test TEST --backgrounds IMAGES
    python benchmarks/content_placement.py speed --teacher TEACHER                      # the choice of cells included
    python benchmarks/content_placement.py picture --test TEST

`students` bootstraps a student of each of --placements for six counts of tokens, all on the same views, half of them
zoomed out, half of those onto other training images. Each is asked about test photographs, the same as small objects
(on a canvas whose sides are 2.5 times theirs), and the same on other photographs. `untrained` asks the teacher, and
students before training, which are the teacher at lower resolution and with trees; `peers` the teacher with random
patches and ToMe (github.com/facebookresearch/ToMe) as it is off the shelf. Runs are kept under --runs-dir and found
again; `table` puts all that are there into content_students_NAME.json. Caltech-101's teacher is that of caltech101.py.
`larger` shows a student images of 448 pixels, for which it was not trained (content_placement_larger.json). `looks`
lets an image's number of tokens follow from what its splits are worth, and from how sure the student is, and lets the
teacher's own attention choose the cells (content_placement_looks.json). `picture` draws what tokens of a grid see and
those of trees, of the student that ships (content_placement.webp).
"""

import argparse
import functools
import json
import math
import statistics
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from caltech101 import CANVAS, put_on_canvas
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import frugalvit
from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.files import whole_file, write_json
from frugalvit.common.loading import choose_device, load_image_classifier
from frugalvit.common.num_tokens import using_tokens
from frugalvit.common.risk import stop_when_sure
from frugalvit.common.speed import images_per_second
from frugalvit.common.tables import format_table
from frugalvit.common.views import EvalView, ImageFormat, seeded
from frugalvit.configuration.configuration_base import pair
from frugalvit.contenders import load_teacher, with_random_patches
from frugalvit.modeling.hosts import Anatomy, read_anatomy
from frugalvit.modeling.modeling_sparseformer import SparseFormerForImageClassification
from frugalvit.modeling.placement import split_in_four, worth_of
from frugalvit.pictures import save_figure
from frugalvit.training import bootstrap, train
from frugalvit.training.components.attended_cells import attended_cells
from shared import add_run_arguments, run_training, spread, write_table
from token_merging import merging


# Arguments of `frugalvit bootstrap` by what they are called.
PLACEMENTS = {
    "grid": [],
    "detail": ["--placement", "content"],
    "contrast": ["--placement", "content", "--placement-rule", "contrast"],
    "learned": ["--placement", "content", "--placement-rule", "learned"],
    "entropy": ["--placement", "content", "--placement-rule", "entropy"],
}
TOKENS = [9, 16, 25, 36, 49, 64]
VIEWS = ("photographs", "small", "small, on photographs")
# What students are trained on besides photographs.
ZOOM_OUT, CANVAS_IMAGES = 3.0, 0.5
STUDENT = "caltech101-sparseformer"
# Pixels at which a teacher of 224 sees twice as much.
LARGER = 448
# Of the picture.
PICTURE_TOKENS, PICTURES = 25, 6


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", help="pretrained ViT to fine-tune")
    parser.add_argument("--teacher", help="folder of the teacher")
    parser.add_argument("--student", help="folder of a student")
    parser.add_argument("--tome", help="checkout of ToMe")
    parser.add_argument("--train", help="parquet file or folder of training images")
    parser.add_argument("--test", help="of test images")
    parser.add_argument("--backgrounds", help="of other photographs")
    parser.add_argument("--name", default="caltech101", help="of the data (default: %(default)s)")
    parser.add_argument("--placements", nargs="*", choices=PLACEMENTS, default=["grid", "detail"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: 9 16 25 36 49 64")
    parser.add_argument("--epochs", type=int, default=6, help="of students (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=192, help="default: %(default)s")
    parser.add_argument("--random-share", type=float, default=0.25, help="of random trees (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: %(default)s")
    parser.add_argument("--inherited-learning-rate", type=float, default=0.04, help="default: %(default)s")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="bf16", help="default: %(default)s")
    parser.add_argument("--num-workers", type=int, default=0, help="that decode images (default: %(default)s)")
    add_run_arguments(parser, "runs/content_placement")
    arguments = parser.parse_args()
    function, needed = COMMANDS[arguments.what]
    if missing := [name for name in needed if getattr(arguments, name) is None]:
        parser.error(f"{arguments.what} needs --{missing[0]}")
    function(arguments)


def train_teacher(arguments):
    """Fine-tune a pretrained ViT at its own size alone."""
    folder = arguments.runs_dir / f"{arguments.name}-teacher"
    argv = [
        *("--model", arguments.model, "--dataset", arguments.train, "--eval-split", "none", "--crop", "resized"),
        *("--epochs", "12", "--batch-size", "64", "--crop-scale", "0.4", "1.0", "--learning-rate", "2e-4"),
        *("--layer-decay", "0.85", "--head-multiplier", "5", "--warmup-epochs", "1", "--mixup", "0.1"),
        *("--mixed-precision", arguments.mixed_precision, "--num-workers", str(arguments.num_workers)),
    ]
    run_training(train, folder, argv)
    model, processor = load_image_classifier(folder, str(choose_device()))
    pixels, labels = test_pixels(arguments, ImageFormat.from_processor(processor), VIEWS[:1])
    right = ask(arguments, lambda batch: model(batch).logits, processor, pixels[VIEWS[0]]).argmax(1) == labels
    print(f"Teacher: {right.float().mean():.2%} of {len(labels):,} test images.")


class TestViews(Dataset):
    """Test images as `VIEWS`, in uint8, and their labels."""

    def __init__(self, arguments, image_format: ImageFormat, views: tuple[str, ...]):
        self.records = load_images([arguments.test], "train")
        self.backgrounds = load_images([arguments.backgrounds], "train") if VIEWS[2] in views else None
        self.image_format, self.view, self.views = image_format, EvalView(image_format), views

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict:
        image = decode_image(self.records[index]["image"], index)
        found = {}
        for name in self.views:
            shown = image
            if name == "small":
                shown = put_on_canvas(image, index, self.image_format)
            elif name == "small, on photographs":
                number = index % len(self.backgrounds)
                shown = put_on(decode_image(self.backgrounds[number]["image"], number), image, index)
            found[name] = self.view(shown)["pixel_values"]
        return found | {"label": self.records[index]["label"]}


def put_on(background: Image.Image, image: Image.Image, index: int) -> Image.Image:
    """A test image on another photograph, whose sides are `CANVAS` times as long, at a place that its number
    decides."""
    size = [round(CANVAS * side) for side in image.size]
    with seeded(index):
        left, top = (int(torch.randint(large - small + 1, ())) for large, small in zip(size, image.size, strict=True))
    canvas = background.resize(size)
    canvas.paste(image, (left, top))
    return canvas


def test_pixels(
    arguments, image_format: ImageFormat, views: tuple[str, ...] = VIEWS
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """All test images as `views`, `(images, 3, height, width)` of uint8, and their labels; made once."""
    about = [*map(str, image_format.size), *(str(VIEWS.index(view)) for view in views)]
    file = arguments.runs_dir / f"{arguments.name}-test-{'-'.join(about)}.pt"
    if not file.is_file():
        loader = DataLoader(
            TestViews(arguments, image_format, views), batch_size=50, num_workers=arguments.num_workers
        )
        batches = list(tqdm(loader, desc="test images"))
        found = {name: torch.cat([batch[name] for batch in batches]) for name in (*views, "label")}
        arguments.runs_dir.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as aside:
            torch.save(found, aside)
    found = torch.load(file)
    return found, found.pop("label").to(choose_device())


@torch.inference_mode()
def ask(arguments, model, processor, pixels: torch.Tensor) -> torch.Tensor:
    """A model's logits of all test images, in float32."""
    image_format, found = ImageFormat.from_processor(processor), []
    for batch in pixels.split(100):
        with torch.autocast(choose_device().type, torch.bfloat16, enabled=arguments.mixed_precision == "bf16"):
            found.append(model(image_format.normalize(batch.to(choose_device()))).float())
    return torch.cat(found)


def accuracies(arguments, classify, processor) -> dict[str, float]:
    """Accuracy of a function that returns logits, on each of `VIEWS`."""
    pixels, labels = test_pixels(arguments, ImageFormat.from_processor(processor))
    return {
        name: (ask(arguments, classify, processor, pixels[name]).argmax(1) == labels).float().mean().item()
        for name in VIEWS
    }


def measure(arguments, model, processor, placement: str, counts: list[int]) -> list[dict]:
    """Accuracy of a classifier on each of `VIEWS`, for each count of tokens."""
    model.to(choose_device()).eval()
    return [
        {"placement": placement, "tokens": model.config.round_tokens(count)}
        | accuracies(arguments, functools.partial(logits_of, model, count), processor)
        for count in counts
    ]


def logits_of_teacher(anatomy: Anatomy, pixel_values: torch.Tensor) -> torch.Tensor:
    return anatomy.classifier(anatomy.embed(pixel_values))


def logits_of(model, num_tokens: int, pixel_values: torch.Tensor) -> torch.Tensor:
    return model(pixel_values, num_tokens=num_tokens).logits


def untrained(arguments, placement: str):
    """A teacher's student before training, and its image processor."""
    teacher, processor = load_image_classifier(arguments.teacher, "cpu")
    image_format = ImageFormat.from_processor(processor)
    looks = {} if placement == "grid" else {"placement": "content", "placement_rule": placement}
    student = SparseFormerForImageClassification.from_teacher(
        teacher,
        focusing="inherited",
        elastic_token_counts=TOKENS,
        image_mean=image_format.mean,
        image_std=image_format.std,
        resample=image_format.resample,
        resize_size=image_format.resize,
        **looks,
    )
    return student, processor


def measure_untrained(arguments):
    """The teacher, and students before training."""
    teacher, processor = load_image_classifier(arguments.teacher, str(choose_device()))
    anatomy = read_anatomy(teacher, ImageFormat.from_processor(processor).size)
    classify = functools.partial(logits_of_teacher, anatomy)
    rows = [{"placement": "teacher", "tokens": math.prod(anatomy.grid)} | accuracies(arguments, classify, processor)]
    for placement in arguments.placements:
        rows += measure(arguments, *untrained(arguments, placement), f"{placement}, untrained", arguments.tokens)
    print(format_table(rows))
    write_json(arguments.runs_dir / f"{arguments.name}-untrained.json", rows)


def measure_peers(arguments):
    """The teacher with fewer of its own tokens: chosen at random, or merged."""
    anatomy, processor = load_teacher(arguments.teacher, str(choose_device()))
    contenders = [
        with_random_patches(anatomy, processor, count, seed=0) for count in arguments.tokens if count in (16, 36, 64)
    ]
    contenders += [merging(anatomy, processor, arguments.tome, merged) for merged in (20, 40)]
    rows = []
    for each in contenders:
        classify = functools.partial(logits_of_contender, each)
        rows.append({"placement": each.name, "tokens": each.tokens} | accuracies(arguments, classify, processor))
        print(rows[-1], flush=True)
    write_json(arguments.runs_dir / f"{arguments.name}-peers.json", rows)


def logits_of_contender(contender, pixel_values: torch.Tensor) -> torch.Tensor:
    return contender.classifier(contender.embed(pixel_values))


def measure_larger(arguments):
    """A student with images of its teacher's size and of `LARGER` pixels, beside its teacher, all test images."""
    student, processor = load_image_classifier(arguments.student, str(choose_device()))
    student = student.float().eval()
    own = ImageFormat.from_processor(processor)
    teacher, _ = load_image_classifier(arguments.teacher, str(choose_device()))
    anatomy = read_anatomy(teacher, own.size)
    larger = replace(own, size=(LARGER, LARGER), resize=round(own.resize * LARGER / own.size[0]))
    found: dict[tuple[str, int, int], dict] = {}
    for image_format in (own, larger):
        size = image_format.size[0]
        models = {}
        if image_format is own:
            models["teacher", size, math.prod(anatomy.grid)] = functools.partial(logits_of_teacher, anatomy)
        for count in arguments.tokens:
            models["student", size, student.config.round_tokens(count)] = functools.partial(logits_of, student, count)
        for view in VIEWS:
            pixels, labels = test_pixels(arguments, image_format, (view,))
            for key, classify in models.items():
                right = ask(arguments, classify, processor, pixels[view]).argmax(1) == labels
                found.setdefault(key, {})[view] = right.float().mean().item()
                print(key, view, found[key][view], flush=True)
    rows = []
    for (model, size, tokens), accuracies in found.items():
        with using_tokens(student, tokens) if model == "student" else nullcontext():
            macs = frugalvit.count_macs(student if model == "student" else teacher, size).macs_with_attention
        rows.append({"model": model, "pixels": size, "tokens": tokens, "macs": macs} | accuracies)
    print(format_table(rows))
    settings = {"images": len(labels), "canvas": CANVAS, "precision": arguments.mixed_precision}
    write_table(arguments.results_dir / "content_placement_larger.json", settings, rows)


class TeacherAttention(nn.Module):
    """A teacher's own attention in the place of a student's forecast of it: the most that a closer look could give."""

    def __init__(self, teacher: Anatomy):
        super().__init__()
        # Not the student's.
        self.teacher = (teacher,)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """`(batch, channels, height, width)` to logits `(batch, rows, columns)`."""
        (teacher,) = self.teacher
        with teacher.watch() as states:
            teacher.embed(image)
            return attended_cells(teacher, states).unflatten(1, teacher.grid).log()


def worths_of_splits(student, pixel_values: torch.Tensor) -> torch.Tensor:
    """The worth of each split of an image's tree, `(batch, splits)`, the worthiest first. A split is worth at most as
    much as the one that it depends on."""
    base, found = student.base_model, []
    levels = base.stem(pixel_values, base.config.cell_grids(tuple(pixel_values.shape[-2:])))
    logits = base.placement.forecast(levels[-1])
    attention = logits.flatten(1).softmax(1).view_as(logits)
    for worth in worth_of(base.placement.rule, levels[-1], base.placement.patch_size, len(levels), attention):
        found.append(torch.minimum(worth, split_in_four(found[-1])) if found else worth)
    return torch.cat([worth.flatten(1) for worth in found], dim=1).sort(dim=1, descending=True).values


def measure_looks(arguments):
    """Measure numbers of tokens that differ between images, beside one for all."""
    student, processor = load_image_classifier(arguments.student, "cpu")
    student = student.float().eval()
    counts = [student.config.round_tokens(count) for count in arguments.tokens]
    pixels, labels = test_pixels(arguments, ImageFormat.from_processor(processor))
    teacher, _ = load_image_classifier(arguments.teacher, "cpu")
    anatomy, forecast = read_anatomy(teacher, pair(student.config.image_size)), student.base_model.placement.forecast
    worths, thresholds, rows = functools.partial(worths_of_splits, student), None, {}
    for view in VIEWS:
        calls = {count: functools.partial(logits_of, student, count) for count in counts}
        logits = {count: ask(arguments, call, processor, pixels[view]) for count, call in calls.items()}
        worth = ask(arguments, worths, processor, pixels[view])
        # Half of the photographs have more splits that are worth as much.
        base = math.prod(student.config.cell_grids()[0])
        thresholds = thresholds or [worth[:, (count - base) // 3].median().item() for count in counts[1:-1]]
        found = [("one number", count, each.argmax(1), torch.tensor([count])) for count, each in logits.items()]
        found += [("worth", each, *split_where_worth(logits, worth, each, base)) for each in thresholds]
        looks = {count: logits[count] for count in (counts[1], counts[-1])}
        for confidence in (0.3, 0.5, 0.7):
            classes, numbers = stop_when_sure(looks, confidence)
            found.append(("confidence", confidence, classes, torch.tensor([*looks]).cumsum(0)[numbers - 1]))
        student.base_model.placement.forecast = TeacherAttention(anatomy)
        for count in counts[1:3]:
            classes = ask(arguments, calls[count], processor, pixels[view]).argmax(1)
            found.append(("teacher's attention", count, classes, torch.tensor([count])))
        student.base_model.placement.forecast = forecast
        for choice, number, classes, tokens in found:
            row = rows.setdefault((choice, number), {"choice": choice, "number": number})
            row[view] = (classes == labels).float().mean().item()
            row[f"{view}: tokens"] = tokens.float().mean().item()
        print(format_table([*rows.values()]), flush=True)
    settings = {"images": len(labels), "canvas": CANVAS, "precision": arguments.mixed_precision}
    write_table(arguments.results_dir / "content_placement_looks.json", settings, [*rows.values()])


def split_where_worth(
    logits: dict[int, torch.Tensor], worths: torch.Tensor, threshold: float, base: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and tokens, `(images,)` int64 each, if cells are split whose split is worth a threshold; rounded up to
    the counts that there are logits of."""
    counts = torch.tensor([*logits])
    needed = base + 3 * (worths >= threshold).sum(1)
    number = (needed.unsqueeze(1) > counts).sum(1).clamp(max=len(counts) - 1)
    labels = torch.stack([each.argmax(1) for each in logits.values()], dim=1)
    return labels.gather(1, number.unsqueeze(1)).squeeze(1), counts[number]


def train_students(arguments):
    """Train one student after another, and measure each when it is done."""
    for seed in arguments.seeds:
        for placement in arguments.placements:
            print(format_table(train_student(arguments, placement, seed)), flush=True)


def train_student(arguments, placement: str, seed: int) -> list[dict]:
    """Train and measure a student, now or before; return a row for each count of tokens."""
    content = placement != "grid"
    share = f"-random{arguments.random_share:g}" if content else ""
    rate = arguments.learning_rate * arguments.inherited_learning_rate
    budget = f"{arguments.epochs}epochs-{rate:g}"
    folder = arguments.runs_dir / f"{arguments.name}-{placement}{share}-{budget}-seed{seed}"
    measured_file = folder / "measured.json"
    if measured_file.is_file():
        return json.loads(measured_file.read_text(encoding="utf-8"))
    argv = [
        *("--teacher", arguments.teacher, "--dataset", arguments.train, "--eval-split", "none", "--no-compare"),
        *("--focusing", "inherited", "--elastic-token-counts", *map(str, TOKENS), *PLACEMENTS[placement]),
        *("--zoom-out", str(ZOOM_OUT), "--canvas-images", str(CANVAS_IMAGES), "--epochs", str(arguments.epochs)),
        *("--learning-rate", str(arguments.learning_rate), "--batch-size", str(arguments.batch_size)),
        *("--inherited-learning-rate", str(arguments.inherited_learning_rate), "--seed", str(seed)),
        *("--mixed-precision", arguments.mixed_precision, "--num-workers", str(arguments.num_workers)),
        # All students of a seed see the same views.
        *("--teacher-cache", str(arguments.runs_dir / f"{arguments.name}-teacher-seed{seed}")),
        *(("--config-overrides", f"placement_random_share={arguments.random_share}") if content else ()),
    ]
    run_training(bootstrap, folder, argv)
    model, processor = load_image_classifier(folder, "cpu")
    about = {"seed": seed, "epochs": arguments.epochs, "inherited_rate": rate, "batch_size": arguments.batch_size}
    about |= {"random_share": arguments.random_share} if content else {}
    rows = [row | about for row in measure(arguments, model, processor, placement, arguments.tokens)]
    write_json(measured_file, rows)
    return rows


def make_table(arguments):
    """Write a table of all finished runs: means over seeds."""
    rows = []
    for name in ("untrained", "peers"):
        file = arguments.runs_dir / f"{arguments.name}-{name}.json"
        rows += json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
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
    print(format_table([{k: v for k, v in row.items() if not k.endswith("spread")} for row in rows]))
    settings = {"canvas": CANVAS, "zoom_out": ZOOM_OUT, "canvas_images": CANVAS_IMAGES}
    write_table(arguments.results_dir / f"content_students_{arguments.name}.json", settings, rows)


def measure_speed(arguments):
    models = {placement: untrained(arguments, placement)[0] for placement in ("grid", "detail", "learned")}
    pixel_values = torch.randn(32, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    rows = []
    for count in arguments.tokens:
        calls = {name: functools.partial(model, num_tokens=count) for name, model in models.items()}
        speeds = images_per_second(calls, pixel_values, rounds=20)
        rows += [
            {"placement": name, "tokens": models[name].config.round_tokens(count), "images_per_second": speed}
            for name, speed in speeds.items()
        ]
    print(format_table(rows))
    settings = {"batch_size": 32, "precision": "float32"}
    write_table(arguments.results_dir / "content_placement_speed.json", settings, rows)


def draw_picture(arguments):
    """Draw photographs as small objects, as a grid's and as a tree's tokens see them, with the labels of both."""
    records = load_images([arguments.test], "train")
    chosen = [round(len(records) * (number + 0.5) / PICTURES) for number in range(PICTURES)]
    grid, processor = load_image_classifier(frugalvit.checkpoint_path(STUDENT), "cpu")
    tree, _ = load_image_classifier(frugalvit.checkpoint_path(STUDENT), "cpu")
    tree.place_by_content()
    # It was not trained with trees.
    tree.config.elastic_token_counts = None
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
            seen = seen_by(pixels[column], outputs.rois[-1][column], pair(model.config.patch_size))
            axes[row, column].imshow(seen.permute(1, 2, 0))
            label = model.config.id2label[int(outputs.logits[column].argmax())]
            axes[row, column].set_xlabel(label.replace("_", " "), fontsize=8)
        axes[row, 0].set_ylabel(f"{name} {count} tokens", fontsize=9)
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
    "teacher": (train_teacher, ["model", "train", "test"]),
    "untrained": (measure_untrained, ["teacher", "test", "backgrounds"]),
    "peers": (measure_peers, ["teacher", "test", "backgrounds", "tome"]),
    "students": (train_students, ["teacher", "train", "test", "backgrounds"]),
    "table": (make_table, []),
    "speed": (measure_speed, ["teacher"]),
    "larger": (measure_larger, ["teacher", "student", "test", "backgrounds"]),
    "looks": (measure_looks, ["teacher", "student", "test", "backgrounds"]),
    "picture": (draw_picture, ["test"]),
}


if __name__ == "__main__":
    main()
