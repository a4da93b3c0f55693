"""`frugalvit compare`: accuracy and speed of students beside their teacher, and beside the teacher with less to
compute."""

import argparse
import itertools
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from datasets.fingerprint import Hasher
from matplotlib.figure import Figure
from torchvision.transforms import v2

from .baselines import Baseline, load_students, load_teachers
from .command_line import (
    CommandParser,
    add_dataset_arguments,
    add_device_argument,
    add_reading_arguments,
    add_trust_argument,
    positive,
)
from .evaluation.images import image_batches, images_to_evaluate, reading_options
from .macs import count_macs
from .pictures import save_figure
from .speed import images_per_second
from .training.data import class_names, label_numbers, sample
from .training.files import atomic_file, write_json, write_text
from .training.loading import choose_device
from .training.precision import choose_mixed_precision
from .training.splits import check_labels, match_labels
from .training.text import format_markdown, format_table
from .versions import origin, versions


PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
BATCH_SIZES = (1, 32)
ERRORS = "accuracy ± half of a 68 % Wilson interval, differences ± standard error; "
# Scores for the picture, the first choice first, and their titles.
SCORES = {
    "accuracy": "accuracy, %",
    "mean_iou": "mean intersection over union, %",
    "cosine": "cosine with the teacher's embedding",
}
# Lines told apart by color-blind eyes, too (Okabe & Ito).
LINE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit compare",
        description="Compare students with their teacher, and with the teacher on smaller images: accuracy of "
        "classifiers, cosine with the teacher's embedding, multiply-accumulates and images per second. Writes "
        "compare.json and compare.md after each model, and compare.png at the end. The same command goes on where it "
        "was interrupted; speeds are measured at the end, side by side.",
    )
    parser.add_argument("teacher", metavar="TEACHER", help="folder or hub id of a vision transformer")
    parser.add_argument("students", nargs="*", metavar="STUDENT", help="folders or hub ids of SparseFormers or others")
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder, or an interrupted comparison's")
    add_dataset_arguments(parser)
    parser.add_argument("--limit", type=positive, help="number of test images, chosen at random")
    parser.add_argument("--rounds", type=positive, default=10, help="timed passes per model (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive, default=64, help="default: %(default)s")
    add_reading_arguments(parser)
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    output = Path(arguments.output)
    unfinished = output / "unfinished"
    if output.exists() and not unfinished.is_dir() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {str(output)!r} exists and is no empty folder; choose another one.")
    device = choose_device(arguments.device)
    options = {"device": device, "trust_remote_code": arguments.trust_remote_code}
    baselines = load_teachers(arguments.teacher, **options)
    for folder in arguments.students:
        baselines += load_students(folder, **options)
    test, split = images_to_evaluate(argparse.Namespace(**vars(arguments) | {"limit": None}))
    if "label" in test.features:
        check_labels(test, split)
    test = sample(test, arguments.limit, seed=0)
    settings = {
        "dataset": " ".join(arguments.dataset),
        "split": split,
        "images": len(test),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "batch_sizes": BATCH_SIZES,
    }
    about = ", ".join(f"{name}: {value}" for name, value in settings.items())
    command = shlex.join(["frugalvit", "compare", *(sys.argv[2:] if argv is None else argv)])

    def legend(rows: list[dict[str, object]]) -> str:
        speeds = "images/s by batch size. " if any(rows[0]["images_per_second"].values()) else ""
        return f"{ERRORS if 'accuracy' in rows[0] else ''}{speeds}{about}."

    def write(rows: list[dict[str, object]]):
        write_json(output / "compare.json", {"command": command, "settings": settings, **origin(), "rows": rows})
        write_text(output / "compare.md", f"{format_markdown(table_rows(rows))}\n\n{legend(rows)}\n")

    rows = compare(
        baselines,
        test,
        precisions=list(PRECISIONS)[: 2 if choose_mixed_precision(device) == "bf16" else 1],
        rounds=arguments.rounds,
        folder=unfinished,
        report=write,
        **reading_options(arguments),
    )
    # Print first: a full disk must not lose what was measured.
    print(f"{format_table(table_rows(rows))}\n\n{legend(rows)}")
    write(rows)
    save_figure(draw_comparison(rows), output / "compare.png")
    shutil.rmtree(unfinished)
    print(f"Table: {output / 'compare.md'}   Picture: {output / 'compare.png'}")


def compare(
    baselines: Sequence[Baseline],
    test: datasets.Dataset,
    *,
    precisions: Sequence[str] = ("float32",),
    rounds: int = 10,
    folder: Path | None = None,
    report: Callable[[list[dict[str, object]]], None] = lambda rows: None,
    **reading,
) -> list[dict[str, object]]:
    """Measure baselines beside each other, the teacher first; they are in float32, and left in the last precision.

    Each has a row: `model` (its name), `method`, `image_size`, `tokens`, `parameters`, `macs`, `accuracy` as in
    `describe_score`, `cosine`, the mean with the teacher's embedding, and `images_per_second` by precision and batch
    size. `report` is called with the rows so far, without speeds, after each image processor's baselines, whose
    embeddings are kept in `folder`. `reading` are options of `image_batches`.
    """
    # Classes are matched by name before anything is computed.
    classes = [
        torch.tensor(match_labels(class_names(test), baseline.id2label))
        if "label" in test.features and baseline.classifier is not None
        else None
        for baseline in baselines
    ]
    rows = []
    teacher = of_teacher = None
    for _, group in itertools.groupby(baselines, key=lambda baseline: id(baseline.image_processor)):
        group = list(group)
        embeddings, indices = embed_once(folder, group, test, **reading)
        for baseline, embedded in zip(group, embeddings, strict=True):
            macs = count_macs(baseline.model, baseline.image_size).macs_with_attention
            row = {"model": baseline.name, "method": baseline.method, "image_size": list(baseline.image_size)}
            row |= {"tokens": baseline.tokens, "parameters": baseline.parameters, "macs": macs}
            if (of_model := classes[len(rows)]) is not None:
                right = classifies(baseline, embedded, of_model[label_numbers(test)[indices]])
                row |= describe_score("accuracy", right, of_teacher)
                of_teacher = right if not rows else of_teacher
            teacher = embedded.mean(0) if teacher is None else teacher
            alike = embedded.shape[-1] == teacher.shape[-1]
            row["cosine"] = F.cosine_similarity(embedded, teacher, dim=-1).mean().item() if alike else None
            rows.append(row | {"images_per_second": {precision: {} for precision in precisions}})
        report(rows)
    for precision, batch_size in itertools.product(precisions, BATCH_SIZES):
        models = {}
        images = {}
        for number, baseline in enumerate(baselines):
            models[number] = baseline.model.to(PRECISIONS[precision])
            pixels = torch.randn(batch_size, 3, *baseline.image_size)
            images[number] = pixels.to(baseline.device, PRECISIONS[precision])
        for number, speed in images_per_second(models, images, rounds).items():
            rows[number]["images_per_second"][precision][str(batch_size)] = speed
    return rows


def embed_once(folder: Path | None, baselines: Sequence[Baseline], images: datasets.Dataset, **reading):
    """Return what `embed_all` does for baselines that share weights, kept in `folder` if one is given, by a hash of
    weights, images, options and versions."""
    if folder is None:
        return embed_all(baselines, images, **reading)
    origins = [(repr(baseline.model), baseline.image_size, baseline.tokens) for baseline in baselines]
    origins += [baselines[0].model.state_dict(), repr(baselines[0].image_processor), images, reading, versions()]
    file = folder / f"{Hasher.hash(origins)}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as aside:
            torch.save(embed_all(baselines, images, **reading), aside)
    return torch.load(file)


@torch.inference_mode()
def embed_all(
    baselines: Sequence[Baseline], images: datasets.Dataset, batch_size: int = 64, **reading
) -> tuple[list[torch.Tensor], list[int]]:
    """Embed images by each baseline, `(draws, images, embedding_size)` float32 on the CPU, and return the embeddings
    and the indices of the images that could be read. An image is decoded once per image processor."""
    embeddings = [[] for _ in baselines]
    indices = []
    processors = {id(baseline.image_processor): baseline.image_processor for baseline in baselines}
    for key, image_processor in processors.items():
        indices = []
        for pixel_values, batch in image_batches(image_processor, images, batch_size, **reading):
            indices += batch
            for baseline, found in zip(baselines, embeddings, strict=True):
                if id(baseline.image_processor) == key:
                    pixels = pixel_values.to(baseline.device)
                    if pixels.shape[-2:] != baseline.image_size:
                        pixels = v2.functional.resize(pixels, list(baseline.image_size), antialias=True)
                    found.append(torch.stack([baseline.embed(pixels).float().cpu() for _ in range(baseline.draws)]))
    return [torch.cat(found, dim=1) for found in embeddings], indices


@torch.inference_mode()
def classifies(baseline: Baseline, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether a baseline's classifier is right, `(images,)`, the mean over draws."""
    best = torch.stack([baseline.classifier(draw.to(baseline.device)).argmax(-1).cpu() for draw in embeddings])
    return (best == labels).double().mean(0)


def describe_score(name: str, right: torch.Tensor, teacher: torch.Tensor | None) -> dict[str, float | None]:
    """The mean of a score as `name` and half of its Wilson interval for one standard deviation as `…_error`, and the
    difference from the teacher's on the same images and its standard error as `…_difference` and
    `…_difference_error`."""
    count = len(right)
    share = right.mean().item()
    # Of all right answers, the standard error would be zero.
    half = (share * (1 - share) / count + 1 / (4 * count**2)) ** 0.5 / (1 + 1 / count)
    described = {name: share, f"{name}_error": half, f"{name}_difference": None, f"{name}_difference_error": None}
    if teacher is not None:
        difference = right - teacher
        described[f"{name}_difference"] = difference.mean().item()
        if count > 1:
            described[f"{name}_difference_error"] = difference.std().item() / count**0.5
    return described


def table_rows(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Format the rows of `compare` for people, accuracies in percent with their errors."""
    table = []
    for row in rows:
        cells = {"model": row["model"], "method": row["method"]}
        scores = (("accuracy, %", "accuracy", ""), ("accuracy - teacher's", "accuracy_difference", "+"))
        for title, name, sign in scores:
            if row.get(name) is not None:
                error = row[f"{name}_error"]
                cells[title] = f"{100 * row[name]:{sign}.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
        cells |= {"cosine": row["cosine"], "pixels": " x ".join(map(str, row["image_size"])), "tokens": row["tokens"]}
        cells |= {"MACs, G": row["macs"] / 1e9, "parameters, M": row["parameters"] / 1e6}
        for precision, speeds in row["images_per_second"].items():
            cells |= {f"images/s, {size}, {precision}": speed for size, speed in speeds.items()}
        table.append(cells)
    return table


def draw_comparison(rows: Sequence[Mapping[str, object]], size: tuple[float, float] = (6.0, 4.0)) -> Figure:
    """Draw the rows of `compare`: scores, the first of `SCORES` that all rows have, with standard errors over speeds
    in the first precision and the largest batches, a line for each method. `size` is in inches."""
    score = next(name for name in SCORES if all(row.get(name) is not None for row in rows) or name == "cosine")
    precision, speeds = next(iter(rows[0]["images_per_second"].items()))
    batch_size = list(speeds)[-1]
    factor = 1 if score == "cosine" else 100
    lines = {}
    notes = []
    for index, row in enumerate(rows):
        if row.get(score) is not None:
            label = row["method"] if index else f"teacher, {row['model']}"
            error = factor * (row.get(f"{score}_error") or 0)
            point = (row["images_per_second"][precision][batch_size], factor * row[score], error)
            lines.setdefault(label, []).append(point)
            if row.get("tokens"):
                notes.append((str(row["tokens"]), point[:2]))

    figure = Figure(figsize=size, dpi=200, layout="constrained")
    axes = figure.subplots()
    styles = itertools.cycle((color, style) for style in ("-", "--", ":") for color in LINE_COLORS)
    for index, (label, points) in enumerate(lines.items()):
        x, y, error = np.array(sorted(points)).T
        if index:
            color, style = next(styles)
            look = {"color": color, "linestyle": style, "marker": "o", "markersize": 4}
        else:
            look = {"color": "#333333", "linestyle": "none", "marker": "*", "markersize": 11, "zorder": 3}
            axes.axhline(y[0], color="#c8c8c8", linewidth=0.8, linestyle="--")
        axes.errorbar(x, y, error, **look, elinewidth=0.8, label=label)
    for number, place in notes:
        axes.annotate(number, place, xytext=(4, 3), textcoords="offset points", fontsize=6)
    axes.set_xscale("log")
    axes.set_xlabel(f"images/s (batches of {batch_size}, {precision})", fontsize=8)
    axes.set_title(SCORES[score], loc="left", fontsize=9)
    axes.tick_params(labelsize=7.5, which="both")
    axes.xaxis.set_major_formatter("{x:,.4g}")
    axes.xaxis.set_minor_formatter("{x:,.4g}")
    axes.grid(alpha=0.3)
    # Names are no formulas.
    for text in figure.legend(loc="outside lower center", ncols=2, fontsize=7.5, frameon=False).get_texts():
        text.set_parse_math(False)
    return figure
