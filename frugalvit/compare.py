"""`frugalvit compare`: accuracy and speed of students beside their teacher, and beside the teacher with less to
compute."""

import argparse
import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from torchvision.transforms import v2

from .common.command_line import (
    CommandParser,
    add_dataset_arguments,
    add_device_argument,
    add_reading_arguments,
    add_training_images_arguments,
    add_trust_argument,
    positive,
)
from .common.data import sample
from .common.files import whole_folder, write_json, write_text
from .common.labels import check_labels, class_names, label_numbers, match_labels
from .common.loading import choose_device
from .common.precision import choose_mixed_precision
from .common.speed import images_per_second
from .common.tables import format_markdown, format_table
from .common.versions import origin
from .contenders import Contender, load_students, load_teachers
from .evaluation.features import LabeledFeatures
from .evaluation.images import image_batches, images_to_evaluate, read_labeled_parts
from .evaluation.knn import neighbor_scores
from .evaluation.linear import fit_probe
from .pictures import LEGEND_COLOR, LINE_COLORS, OUTLINE_COLOR, TEXT_COLOR, save_figure


PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
BATCH_SIZES = (1, 32)
# Scores for the picture, the first choice first, and their titles.
SCORES = {
    "accuracy": "accuracy, %",
    "linear_accuracy": "accuracy of a linear probe, %",
    "neighbor_accuracy": "accuracy of nearest neighbors, %",
    "mean_iou": "mean intersection over union, %",
    "cosine": "cosine with the teacher's embedding",
}


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit compare",
        description="Compare students with their teacher, and with the teacher on smaller images: accuracy (of models "
        "without classifier: of nearest neighbors and a linear probe), cosine with the teacher's embedding, "
        "multiply-accumulates and images per second. Writes compare.json, compare.md and compare.png.",
    )
    parser.add_argument("teacher", metavar="TEACHER", help="folder or hub id of a vision transformer")
    parser.add_argument("students", nargs="*", metavar="STUDENT", help="folders or hub ids of SparseFormers or others")
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder for table and picture")
    parser.add_argument(
        "--resolutions",
        nargs="*",
        type=positive,
        metavar="PIXELS",
        help="shorter sides of smaller images for the teacher (default: with about 1/4, 2/5 and 9/16 of the patches)",
    )
    add_dataset_arguments(parser)
    add_training_images_arguments(parser)
    parser.add_argument(
        "--features", action="store_true", help="measure nearest neighbors and a linear probe for classifiers, too"
    )
    parser.add_argument("--limit", type=positive, help="number of test images, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=list(PRECISIONS),
        help="for speed (default: float32 and, where the device is fast at it, bf16)",
    )
    parser.add_argument("--rounds", type=positive, default=10, help="timed passes per model (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive, default=64, help="default: %(default)s")
    add_reading_arguments(parser)
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    output = Path(arguments.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {str(output)!r} exists and is no empty folder; choose another one.")
    device = str(choose_device(arguments.device))
    precisions = arguments.precision
    if precisions is None:
        precisions = ["float32", "bf16"] if choose_mixed_precision(torch.device(device)) == "bf16" else ["float32"]

    options = {"device": device, "trust_remote_code": arguments.trust_remote_code}
    contenders = load_teachers(arguments.teacher, resolutions=arguments.resolutions, **options)
    for folder in arguments.students:
        contenders += load_students(folder, **options)
    test, train, split = choose_images(arguments, any(contender.classifier is None for contender in contenders))
    with whole_folder(output) as folder:
        rows = compare(
            contenders,
            test,
            train,
            features=arguments.features,
            seed=arguments.seed,
            precisions=precisions,
            rounds=arguments.rounds,
            batch_size=arguments.batch_size,
            num_workers=arguments.num_workers,
            skip_corrupt=arguments.skip_corrupt,
        )
        settings = {
            "dataset": " ".join(arguments.eval_dataset or arguments.dataset),
            "split": split,
            "images": len(test),
            "train_images": None if train is None else len(train),
            "seed": arguments.seed,
            "device": device,
            "threads": torch.get_num_threads(),
            "rounds": arguments.rounds,
            "batch_sizes": BATCH_SIZES,
        }
        legend = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in settings.items())
        legend = f"± is a standard error; images/s by batch size. {legend}."
        # Print first: a full disk must not lose what was measured.
        print(f"{format_table(table_rows(rows))}\n\n{legend}")
        command = shlex.join(["frugalvit", "compare", *(sys.argv[2:] if argv is None else argv)])
        write_json(folder / "compare.json", {"command": command, "settings": settings, **origin(), "rows": rows})
        write_text(folder / "compare.md", f"{format_markdown(table_rows(rows))}\n\n{legend}\n")
        save_figure(draw_comparison(rows), folder / "compare.png")
    print(f"Table: {output / 'compare.md'}   Picture: {output / 'compare.png'}")


def choose_images(
    arguments: argparse.Namespace, has_backbones: bool
) -> tuple[datasets.Dataset, datasets.Dataset | None, str]:
    """Load the test images; labeled images to learn from, if embeddings are judged by labels; and the test images'
    split."""
    options = {"dataset": arguments.eval_dataset or arguments.dataset, "limit": None}
    test, split = images_to_evaluate(argparse.Namespace(**vars(arguments) | options))
    train = None
    if "label" not in test.features or (label_numbers(test) < 0).all():
        if arguments.features:
            raise ValueError(f"The split {split!r} has no labels, which --features needs; see --label-column.")
        test = test.select_columns("image")
    elif arguments.features or has_backbones:
        train, test, split = read_labeled_parts(arguments)
    else:
        check_labels(test, split)
    return sample(test, arguments.limit, arguments.seed), train, split


def compare(
    contenders: Sequence[Contender],
    test: datasets.Dataset,
    train: datasets.Dataset | None = None,
    *,
    features: bool = False,
    seed: int = 0,
    precisions: Sequence[str] = ("float32",),
    rounds: int = 10,
    **reading,
) -> list[dict[str, object]]:
    """Measure contenders beside each other.

    Args:
        contenders (sequence of `Contender`): The teacher first, all on one device and in float32.
        test (`datasets.Dataset`): Test images, as `load_images` returns them.
        train (`datasets.Dataset`, *optional*): Images with labels of the same classes, from which nearest neighbors
            and linear probes learn. Without it, these are not measured.
        features (`bool`): Do not use classifiers.
        seed (`int`): Seed of linear probes.
        precisions (sequence of `str`): Some of `PRECISIONS`; models are left in the last of them.
        rounds (`int`): Timed passes of each model.
        reading: `batch_size` and others of `image_batches`.

    Returns:
        `list[dict]`: For each contender `model` (its name), `method`, `image_size`, `tokens`, `parameters`, `macs`;
        those of the scores `accuracy`, `linear_accuracy` and `neighbor_accuracy` that were measured, each as in
        `describe_score`; `cosine`, the mean with the teacher's embedding; and `images_per_second` by precision and
        batch size.
    """
    labels = torch.from_numpy(label_numbers(test)) if "label" in test.features else None
    classes = [
        None if features or labels is None or contender.classifier is None else matching_classes(contender, test)
        for contender in contenders
    ]
    embeddings, indices = embed_all(contenders, test, **reading)
    labels = None if labels is None else labels[indices]
    if train is not None:
        known, train_indices = embed_all(contenders, train, **reading)
        known_labels = torch.from_numpy(label_numbers(train))[train_indices]

    rows, scores = [], []
    for number, contender in enumerate(contenders):
        right = {}
        if classes[number] is not None:
            right["accuracy"] = classifies(contender, embeddings[number], classes[number][labels])
        if train is not None:
            right |= learns(embeddings[number], labels, known[number], known_labels, seed)
        scores.append(right)
        row = {"model": contender.name, "method": contender.method, "image_size": list(contender.image_size)}
        row |= {"tokens": contender.tokens, "parameters": contender.parameters, "macs": contender.macs}
        for name, values in right.items():
            row |= describe_score(name, values, scores[0].get(name) if number else None)
        row["cosine"] = mean_cosine(embeddings[number], embeddings[0])
        rows.append(row | {"images_per_second": {precision: {} for precision in precisions}})
    for precision, batch_size in itertools.product(precisions, BATCH_SIZES):
        dtype = PRECISIONS[precision]
        models = {number: contender.model.to(dtype) for number, contender in enumerate(contenders)}
        images = {
            number: torch.randn(batch_size, 3, *contender.image_size).to(contender.device, dtype)
            for number, contender in enumerate(contenders)
        }
        speeds = images_per_second(models, images, rounds)
        for number, speed in speeds.items():
            rows[number]["images_per_second"][precision][str(batch_size)] = speed
    return rows


def matching_classes(contender: Contender, images: datasets.Dataset) -> torch.Tensor:
    """The classifier's index of each of the data set's classes, `(classes,)`."""
    try:
        return torch.tensor(match_labels(class_names(images), contender.id2label))
    except ValueError as error:
        raise ValueError(f"{contender.name}: {error} Or compare embeddings: --features.") from error


@torch.inference_mode()
def embed_all(
    contenders: Sequence[Contender], images: datasets.Dataset, batch_size: int = 64, **reading
) -> tuple[list[torch.Tensor], list[int]]:
    """Embed images by each contender, `(draws, images, embedding_size)` float32 on the CPU, and return the embeddings
    and the indices of the images that could be read. An image is decoded once per image processor."""
    embeddings, indices = [[] for _ in contenders], []
    processors = {id(contender.image_processor): contender.image_processor for contender in contenders}
    for key, image_processor in processors.items():
        indices = []
        for pixel_values, batch in image_batches(image_processor, images, batch_size, **reading):
            indices += batch
            for contender, found in zip(contenders, embeddings, strict=True):
                if id(contender.image_processor) == key:
                    pixels = pixel_values.to(contender.device)
                    if pixels.shape[-2:] != contender.image_size:
                        pixels = v2.functional.resize(pixels, list(contender.image_size), antialias=True)
                    found.append(torch.stack([contender.embed(pixels).float().cpu() for _ in range(contender.draws)]))
    return [torch.cat(found, dim=1) for found in embeddings], indices


@torch.inference_mode()
def classifies(contender: Contender, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether a contender's classifier is right, `(images,)`, the mean over draws."""
    best = [contender.classifier(draw.to(contender.device)).argmax(-1).cpu() for draw in embeddings]
    return torch.stack([(draw == labels).double() for draw in best]).mean(0)


def learns(
    embeddings: torch.Tensor, labels: torch.Tensor, known: torch.Tensor, known_labels: torch.Tensor, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Whether a linear probe and 20 nearest neighbors are right, `(images,)` each, the mean over draws, given the
    embeddings and labels of the test images and of the images to learn from."""
    classes = known_labels.unique()
    right = {"linear_accuracy": [], "neighbor_accuracy": []}
    for asked, features in zip(embeddings, known, strict=True):
        train = LabeledFeatures(features, torch.searchsorted(classes, known_labels))
        right["linear_accuracy"].append(classes[fit_probe(train, seed)(asked).argmax(1)] == labels)
        right["neighbor_accuracy"].append(classes[neighbor_scores(train, asked).argmax(1)] == labels)
    return {name: torch.stack(draws).double().mean(0) for name, draws in right.items()}


def describe_score(name: str, right: torch.Tensor, teacher: torch.Tensor | None) -> dict[str, float | None]:
    """The mean of a score as `name`, its standard error as `…_error`, the difference from the teacher's on the same
    images as `…_difference`, and the standard error of that paired difference as `…_difference_error`."""
    difference = None if teacher is None else right - teacher
    return {
        name: right.mean().item(),
        f"{name}_error": standard_error(right),
        f"{name}_difference": None if difference is None else difference.mean().item(),
        f"{name}_difference_error": None if difference is None else standard_error(difference),
    }


def standard_error(values: torch.Tensor) -> float | None:
    """Standard error of the mean; None for a single value."""
    return values.std().item() / len(values) ** 0.5 if len(values) > 1 else None


def mean_cosine(embeddings: torch.Tensor, teacher: torch.Tensor) -> float | None:
    """Mean cosine of embeddings, `(draws, images, embedding_size)`, with the teacher's; None if sizes differ."""
    if embeddings.shape[-1] != teacher.shape[-1]:
        return None
    return F.cosine_similarity(embeddings, teacher.mean(0), dim=-1).mean().item()


def table_rows(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Format the rows of `compare` for people, accuracies in percent with their standard errors."""
    scores = [name for name in SCORES if name != "cosine" and any(name in row for row in rows)]
    table = []
    for row in rows:
        cells = {"model": row["model"], "method": row["method"]}
        for name in scores:
            title = name.replace("_", " ")
            cells[f"{title}, %"] = _percent(row, name)
            cells[f"{title} - teacher's"] = _percent(row, f"{name}_difference", "+")
        cells |= {"cosine": row["cosine"], "pixels": " x ".join(map(str, row["image_size"])), "tokens": row["tokens"]}
        cells |= {"MACs, G": row["macs"] / 1e9, "parameters, M": row["parameters"] / 1e6}
        for precision, speeds in row["images_per_second"].items():
            suffix = "" if precision == "float32" else f", {precision}"
            cells |= {f"images/s, {size}{suffix}": speed for size, speed in speeds.items()}
        table.append(cells)
    return table


def _percent(row: Mapping[str, object], name: str, sign: str = "") -> str:
    value, error = row.get(name), row.get(f"{name}_error")
    if value is None:
        return "-"
    return f"{100 * value:{sign}.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def draw_comparison(rows: Sequence[Mapping[str, object]], size: tuple[float, float] = (6.0, 4.0)) -> Figure:
    """Draw the scores of contenders over their speeds, a line for each method, with standard errors.

    Args:
        rows (sequence of `Mapping`): The rows of `compare`, the teacher first.
        size (pair of `float`, *optional*, defaults to `(6.0, 4.0)`): Width and height in inches.

    Returns:
        `matplotlib.figure.Figure`: Not known to pyplot. Speeds are those of the first precision and the largest
        batches, scores the first of `SCORES` that all rows have.
    """
    score = next(name for name in SCORES if all(row.get(name) is not None for row in rows) or name == "cosine")
    precision, speeds = next(iter(rows[0]["images_per_second"].items()))
    batch_size, factor = list(speeds)[-1], 1 if score == "cosine" else 100
    lines = {}
    for index, row in enumerate(rows):
        if row.get(score) is not None:
            label = row["method"] if index else f"teacher, {row['model']}"
            error = factor * (row.get(f"{score}_error") or 0)
            point = (row["images_per_second"][precision][batch_size], factor * row[score], error)
            lines.setdefault(label, []).append(point)

    figure = Figure(figsize=size, dpi=200, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    styles = itertools.cycle((color, style) for style in ("-", "--", ":") for color in LINE_COLORS)
    for index, (label, points) in enumerate(lines.items()):
        x, y, error = np.array(sorted(points)).T
        if index:
            color, style = next(styles)
            look = {"color": color, "linestyle": style, "linewidth": 1.4, "marker": "o", "markersize": 4.5}
        else:
            look = {"color": TEXT_COLOR, "linestyle": "none", "marker": "*", "markersize": 11, "zorder": 3}
            axes.axhline(y[0], color=OUTLINE_COLOR, linewidth=0.8, linestyle="--", zorder=0)
        axes.errorbar(x, y, error, **look, elinewidth=0.8, markeredgecolor="white", label=label)

    axes.set_xscale("log")
    axes.margins(0.12)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"images/s (batches of {batch_size}, {precision})", fontsize=8, color=TEXT_COLOR)
    axes.set_title(SCORES[score], loc="left", fontsize=9, color=TEXT_COLOR)
    axes.tick_params(labelsize=7.5, colors=TEXT_COLOR, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(LEGEND_COLOR)
    axes.grid(color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    # Below the axes, where it covers no line. Names are no formulas.
    legend = figure.legend(
        loc="outside lower center", ncols=2, fontsize=7.5, frameon=False, labelcolor=TEXT_COLOR, handlelength=2.2
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure
