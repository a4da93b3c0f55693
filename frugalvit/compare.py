"""`frugalvit compare`: measure students, their teacher, and the teacher on smaller images."""

import dataclasses
import itertools
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from datasets.fingerprint import Hasher
from matplotlib.figure import Figure
from torchvision.transforms import v2

from .baselines import Baseline, adaptive_baselines, load_students, load_teachers
from .command_line import DeviceOptions, ReadingOptions, SplitOptions, argument, read_options
from .evaluation.images import image_batches, images_to_evaluate, reading_options
from .macs import count_macs
from .pictures import save_figure
from .speed import images_per_second
from .training.arguments import POSITIVE
from .training.cards import share_error
from .training.data import (
    check_classes,
    check_labels,
    class_names,
    label_numbers,
    match_labels,
    readable_images,
    sample,
)
from .training.files import atomic_file, write_json, write_text
from .training.loading import choose_device, choose_mixed_precision
from .training.text import format_markdown, format_table
from .versions import origin, versions


PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
BATCH_SIZES = (1, 32)
ERRORS = "accuracy ± half of a 68 % Wilson interval, differences ± standard error; "
# Number of nearest images to compare, and batch size of the nearest-neighbor search.
NEIGHBORS = 10
QUERIES = 1024
FOUND = (
    f"neighbors: of the {NEIGHBORS} images that the teacher finds nearest, the share that a model finds among its own "
)
FOUND += f"{NEIGHBORS}, both in the teacher's embeddings of these images, ± standard error; "
# Scores for the vertical axis of the plot in order of preference, and their titles.
SCORES = {
    "accuracy": "accuracy, %",
    "mean_iou": "mean intersection over union, %",
    "cosine": "cosine with the teacher's embedding",
}
# Colors that color-blind people can distinguish (Okabe & Ito).
LINE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


PROG = "frugalvit compare"


@dataclass(kw_only=True)
class CompareOptions(SplitOptions, ReadingOptions, DeviceOptions):
    """Compare students with their teacher, and with the teacher on smaller images. The table has the accuracy of
    classifiers, the share of the teacher's nearest images that a model finds ("neighbors, %"), the cosine with the
    teacher's embedding, multiply-accumulates and images per second. A classifier for several numbers of tokens also
    has rows in which each image gets few or all tokens, as with confidence in `frugalvit predict`. Results are written
    to compare.json and compare.md during the comparison, and to compare.png at the end. The same command continues an
    interrupted comparison. Speeds are measured at the end, for all models in turn."""

    teacher: str = argument(help="Folder or hub id of a vision transformer.", positional=True)
    students: list[str] = argument([], "Folders or hub ids of SparseFormers or other models.", positional=True)
    output: str = argument(help="New folder, or that of an interrupted comparison.", metavar="FOLDER")
    split: str | None = argument(
        None,
        "Split, or a slice such as test[:1000]. Default: test or validation, or the images that trainings hold back "
        "where a data set has neither.",
    )
    limit: int | None = argument(None, "Number of test images, chosen at random.")
    speed: bool = argument(True, "Measure speeds, which takes most of the time.")
    rounds: int = argument(10, "Timed passes of each model.")
    batch_size: int = argument(64, "Images of a batch, except for speeds.")

    expected = {"rounds": POSITIVE, "batch_size": POSITIVE}


def main(argv: list[str] | None = None) -> None:
    options = read_options(CompareOptions, PROG, argv)
    output = Path(options.output)
    unfinished = output / "unfinished"
    if output.exists() and not unfinished.is_dir() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"The output folder {str(output)!r} exists and is not empty; choose another one.")
    device = choose_device(options.device)
    test, split, num_left_out = choose_images(options)
    loading = {"device": device, "trust_remote_code": options.trust_remote_code}
    baselines = load_teachers(options.teacher, **loading)
    for folder in options.students:
        students = load_students(folder, **loading)
        baselines += students
        if "label" in test.features:
            baselines += adaptive_baselines(students)
    settings = {
        "dataset": " ".join(options.dataset),
        "split": split,
        "images": len(test),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    if num_left_out:
        settings["left_out"] = num_left_out
    if options.speed:
        settings |= {"rounds": options.rounds, "batch_sizes": BATCH_SIZES}
    command = shlex.join(["frugalvit", "compare", *(sys.argv[2:] if argv is None else argv)])

    def legend(rows: list[dict[str, object]]) -> str:
        errors = ERRORS if "accuracy" in rows[0] else ""
        errors += FOUND if rows[0]["neighbors"] is not None else ""
        speeds = "images/s by batch size. " if any(rows[0]["images_per_second"].values()) else ""
        about = ", ".join(f"{name}: {value}" for name, value in settings.items())
        return f"{errors}{speeds}{about}."

    def write(rows: list[dict[str, object]]):
        write_json(output / "compare.json", {"command": command, "settings": settings, **origin(), "rows": rows})
        write_text(output / "compare.md", f"{format_markdown(table_rows(rows))}\n\n{legend(rows)}\n")

    rows = compare(
        baselines,
        test,
        precisions=list(PRECISIONS)[: 2 if choose_mixed_precision(device) == "bf16" else 1],
        rounds=options.rounds if options.speed else 0,
        folder=unfinished,
        report=write,
        **reading_options(options),
    )
    # Print the results before writing them, so that they are not lost if the disk is full.
    print(f"{format_table(table_rows(rows))}\n\n{legend(rows)}")
    write(rows)
    save_figure(draw_comparison(rows), output / "compare.png")
    shutil.rmtree(unfinished)
    print(f"Table: {output / 'compare.md'}   Picture: {output / 'compare.png'}")


def choose_images(options: CompareOptions) -> tuple[datasets.Dataset, str, int]:
    """Load the images for the comparison, or a random sample of `options.limit` images. Return the readable images,
    the name of their split and the number of unreadable images."""
    images, split = images_to_evaluate(dataclasses.replace(options, limit=None), held_back=True)
    if "label" in images.features:
        check_classes(class_names(images))
        check_labels(images, split)
    chosen = sample(images, options.limit, seed=0)
    readable = readable_images(chosen, options.skip_corrupt, split)
    print(f"Comparing on {len(readable):,} images of {split}.", file=sys.stderr)
    if len(readable) <= NEIGHBORS:
        print(f"neighbors, % is left out: nearest neighbors need more than {NEIGHBORS} images.", file=sys.stderr)
    return readable, split, len(chosen) - len(readable)


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
    """Measure baselines on the same images. If `rounds` is not 0, the baselines' models are converted in place to the
    last of `precisions`.

    Args:
        baselines (sequence of `Baseline`): Models in float32, the teacher first.
        test (`datasets.Dataset`): Images from `load_images`.
        precisions (sequence of `str`, *optional*): Precisions of the speed measurement, as keys of `PRECISIONS`.
        rounds (`int`, *optional*, defaults to 10): Timed forward passes of each model. 0 skips the speed measurement.
        folder (`Path`, *optional*): Folder where embeddings are saved, so that a repeated call can load them.
        report (`Callable`, *optional*):
            Called with the rows so far, without speeds, after each group of baselines that share an image processor.
        reading: Further arguments of `image_batches`.

    Returns:
        A row for each baseline: `model` (its name), `method`, `image_size`, `tokens`, `parameters`, `macs`, the
        fields of `describe_score` for the accuracy, `cosine` (mean cosine with the teacher's embeddings),
        `neighbors` and `neighbors_error` (see `neighbors_found`) and `images_per_second` by precision and batch size.
    """
    # The data set's classes are matched with each model's classes here, so that a mismatch raises an error before the
    # slow computations.
    class_indices = [
        torch.tensor(match_labels(class_names(test), baseline.id2label))
        if "label" in test.features and baseline.classifier is not None
        else None
        for baseline in baselines
    ]
    rows = []
    # Images for the speed measurement of models whose speed depends on the images, by row.
    timed: dict[int, torch.Tensor] = {}
    teacher_embeddings = None
    teacher_correct = None
    for _, group in itertools.groupby(baselines, key=lambda baseline: id(baseline.image_processor)):
        group = list(group)
        embeddings, indices = embed_once(folder, group, test, **reading)
        for baseline, embedded in zip(group, embeddings, strict=True):
            row = {
                "model": baseline.name,
                "method": baseline.method,
                "image_size": list(baseline.image_size),
                "tokens": baseline.tokens,
                "parameters": baseline.parameters,
            }
            if baseline.macs is None:
                row["macs"] = count_macs(baseline.model, baseline.image_size).macs_with_attention
            else:
                costs = baseline.macs(embedded[0])
                row["macs"] = costs.mean().item()
                if rounds:
                    timed[len(rows)] = typical_images(baseline, costs, test.select(indices), **reading)
            if (numbers := class_indices[len(rows)]) is not None:
                correct = is_correct(baseline, embedded, numbers[label_numbers(test)[indices]])
                row |= describe_score("accuracy", correct, teacher_correct)
                if not rows:
                    teacher_correct = correct
            if teacher_embeddings is None:
                teacher_embeddings = embedded.mean(0)
            row |= {"cosine": None, "neighbors": None, "neighbors_error": None}
            if baseline.macs is None and embedded.shape[-1] == teacher_embeddings.shape[-1]:
                row["cosine"] = F.cosine_similarity(embedded, teacher_embeddings, dim=-1).mean().item()
                if len(indices) > NEIGHBORS:
                    found = neighbors_found(embedded.mean(0), teacher_embeddings)
                    row["neighbors"] = found.mean().item()
                    row["neighbors_error"] = found.std().item() / len(found) ** 0.5
            row["images_per_second"] = {precision: {} for precision in precisions}
            rows.append(row)
        report(rows)
    if not rounds:
        return rows
    for precision, batch_size in itertools.product(precisions, BATCH_SIZES):
        models = {}
        batches = {}
        for number, baseline in enumerate(baselines):
            models[number] = baseline.model.to(PRECISIONS[precision])
            pixel_values = timed.get(number, torch.randn(batch_size, 3, *baseline.image_size))
            batches[number] = pixel_values.to(baseline.device, PRECISIONS[precision]).split(batch_size)
        for number, speed in images_per_second(models, batches, rounds).items():
            rows[number]["images_per_second"][precision][str(batch_size)] = speed
    return rows


def typical_images(
    baseline: Baseline, costs: torch.Tensor, images: datasets.Dataset, batch_size: int = 64, **reading
) -> torch.Tensor:
    """Return the pixel values of up to `BATCH_SIZES[-1]` images whose mean cost is close to the mean cost of all
    images. `costs`, `(images,)`, has the cost of each image."""
    order = costs.argsort(stable=True)
    count = min(len(order), BATCH_SIZES[-1])
    # Each chosen image is in the middle of an equal share of the images, which are sorted by cost.
    places = (torch.arange(count) + 0.5) * len(order) / count
    chosen = images.select(order[places.long()].tolist())
    return next(image_batches(baseline.image_processor, chosen, count, **reading))[0]


def embed_once(folder: Path | None, baselines: Sequence[Baseline], images: datasets.Dataset, **reading):
    """Call `embed_all` for baselines that share weights. If `folder` is given, save the result there and load it
    in later calls. The file's name is a hash of the weights, images, options and package versions."""
    if folder is None:
        return embed_all(baselines, images, **reading)
    origins = [(each.name, repr(each.model), each.image_size, each.tokens) for each in baselines]
    # The number of tokens and the placement are in the configuration of a student alone.
    origins.append(repr(getattr(getattr(baselines[0].model, "model", None), "config", None)))
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
    """Embed images with each baseline. Baselines with the same image processor share the decoded images.

    Returns:
        A list with the embeddings of each baseline, `(draws, images, embedding_size)` float32 on the CPU, and a list
        with the indices of the readable images. A baseline embeds each image several times if its field `draws` is
        larger than 1.
    """
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
def is_correct(baseline: Baseline, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Classify embeddings, `(draws, images, embedding_size)`. Each image has several embeddings if `baseline.draws` is
    larger than 1. Return the share of correct classifications for each image, `(images,)` float64."""
    best = torch.stack([baseline.classifier(draw.to(baseline.device)).argmax(-1).cpu() for draw in embeddings])
    return (best == labels).double().mean(0)


def neighbors_found(embeddings: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compare the nearest neighbors of the model's embeddings with those of the teacher's embeddings.

    Each image is a query, once with the model's embedding and once with the teacher's embedding. Both queries search
    the teacher's embeddings of all other images for the `NEIGHBORS` nearest images.

    Args:
        embeddings (`torch.Tensor` of shape `(images, embedding_size)`): The model's embeddings.
        teacher (`torch.Tensor` of shape `(images, embedding_size)`): The teacher's embeddings.

    Returns:
        For each image, the share of the teacher's neighbors that the model also finds, `(images,)` float64.
    """
    teacher = F.normalize(teacher, dim=-1)
    embeddings = F.normalize(embeddings, dim=-1)
    shares = []
    for places in torch.arange(len(teacher)).split(QUERIES):
        nearest = []
        for queries in (teacher, embeddings):
            similarity = queries[places] @ teacher.T
            similarity[torch.arange(len(places)), places] = -torch.inf
            nearest.append(similarity.topk(NEIGHBORS).indices)
        same = nearest[0][:, :, None] == nearest[1][:, None, :]
        shares.append(same.any(1).double().mean(1))
    return torch.cat(shares)


def describe_score(name: str, correct: torch.Tensor, teacher: torch.Tensor | None) -> dict[str, float | None]:
    """Return a model's mean score, the difference from the teacher's mean score, and the errors of both values.

    Args:
        name (`str`): Name of the score.
        correct (`torch.Tensor` of shape `(images,)`): Score of each image, 0 to 1.
        teacher (`torch.Tensor` of shape `(images,)`, *optional*): The teacher's scores of the same images.

    Returns:
        `{name}` is the mean. `{name}_error` is half the width of the 68 % Wilson interval of the mean.
        `{name}_difference` is the mean minus the teacher's mean. `{name}_difference_error` is the standard error of
        this difference.
    """
    count = len(correct)
    mean = correct.mean().item()
    described = {
        name: mean,
        f"{name}_error": share_error(mean, count),
        f"{name}_difference": None,
        f"{name}_difference_error": None,
    }
    if teacher is not None:
        difference = correct - teacher
        described[f"{name}_difference"] = difference.mean().item()
        if count > 1:
            described[f"{name}_difference_error"] = difference.std().item() / count**0.5
    return described


def table_rows(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Format the rows of `compare` as cells of a table. Accuracies and their errors are in percent."""
    table = []
    for row in rows:
        cells = {"model": row["model"], "method": row["method"]}
        scores = (
            ("accuracy, %", "accuracy", ""),
            ("accuracy - teacher's", "accuracy_difference", "+"),
            ("neighbors, %", "neighbors", ""),
        )
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
    """Plot the rows of `compare`, with a line for each method and a point for each row.

    The vertical axis shows the first of `SCORES` that all rows have, with error bars. If the rows have speeds, the
    horizontal axis shows images per second in the first precision that was measured, with the largest batch size. If
    the rows have no speeds, the horizontal axis shows the multiply-accumulates for one image. `size` is the width and
    height of the figure in inches.
    """
    score = next(name for name in SCORES if all(row.get(name) is not None for row in rows) or name == "cosine")
    precision, speeds = next(iter(rows[0]["images_per_second"].items()))
    batch_size = list(speeds)[-1] if speeds else None
    factor = 1 if score == "cosine" else 100
    lines = {}
    notes = []
    for index, row in enumerate(rows):
        if row.get(score) is not None:
            label = row["method"] if index else f"teacher, {row['model']}"
            cost = row["images_per_second"][precision][batch_size] if speeds else row["macs"] / 1e9
            error = factor * (row.get(f"{score}_error") or 0)
            lines.setdefault(label, []).append((cost, factor * row[score], error))
            if row.get("tokens"):
                notes.append((str(row["tokens"]), (cost, factor * row[score])))

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
    unit = f"images/s (batches of {batch_size}, {precision})" if speeds else "multiply-accumulates for one image, G"
    axes.set_xlabel(unit, fontsize=8)
    axes.set_title(SCORES[score], loc="left", fontsize=9)
    axes.tick_params(labelsize=7.5, which="both")
    axes.xaxis.set_major_formatter("{x:,.4g}")
    axes.xaxis.set_minor_formatter("{x:,.4g}")
    axes.grid(alpha=0.3)
    # Without `set_parse_math(False)`, Matplotlib draws a name with dollar signs as a formula.
    for text in figure.legend(loc="outside lower center", ncols=2, fontsize=7.5, frameon=False).get_texts():
        text.set_parse_math(False)
    return figure
