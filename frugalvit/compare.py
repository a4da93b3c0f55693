"""`frugalvit compare`: students beside their teacher, and beside the teacher with less to compute, in accuracy, speed
and memory."""

import argparse
import itertools
import json
import multiprocessing
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image
from tqdm import tqdm

from .common.command_line import (
    CommandParser,
    add_dataset_arguments,
    add_device_argument,
    add_reading_arguments,
    add_training_images_arguments,
    add_trust_argument,
    positive,
)
from .common.contender import Contender, measure_speeds
from .common.data import sample
from .common.files import whole_folder, write_json, write_text
from .common.labels import check_labels, class_names, label_numbers, match_labels
from .common.loading import choose_device
from .common.precision import choose_mixed_precision
from .common.reading import Reader
from .common.tables import format_markdown, format_table
from .common.versions import origin
from .contenders import BASELINES, load_students, load_teachers
from .evaluation.embeddings import (
    LabeledFeatures,
    choose_classes,
    of_classes,
    read_evaluated,
    read_labeled_parts,
)
from .evaluation.images import image_batches
from .evaluation.knn import neighbor_scores
from .evaluation.linear import fit_probe
from .pictures import LEGEND_COLOR, LINE_COLORS, OUTLINE_COLOR, TEXT_COLOR, save_figure


PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
BATCH_SIZES = (1, 32)
# Passes of single images are short: so many times as many as of batches.
MORE_ROUNDS = 5
# What may say how good a contender is, the first choice first, and what it is called.
SCORES = {
    "accuracy": "accuracy",
    "linear_accuracy": "accuracy of a linear probe",
    "neighbor_accuracy": "accuracy of nearest neighbors",
    "mean_iou": "mean intersection over union",
    "cosine": "cosine with the teacher's embedding",
}
# Values of --quick.
QUICK = {"limit": 200, "train_limit": 1000, "rounds": 3, "precision": ["float32"], "memory": False}


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit compare",
        description="Set students beside their teacher, and beside what the teacher can do for nothing: look at "
        "smaller images, or at some of its patches. Measures accuracy, of models without a classifier that of nearest "
        "neighbors and of a linear probe, how near embeddings are to the teacher's, multiply-accumulates, images a "
        "second, in which the models take turns, and memory. Writes compare.json, compare.md and compare.png.",
    )
    parser.add_argument("teacher", metavar="TEACHER", help="folder or hub id of a vision transformer")
    parser.add_argument("students", nargs="*", metavar="STUDENT", help="folders or hub ids of SparseFormers or others")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a student that was made by the method NAME; those of one NAME are a line of the picture (repeatable)",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder for table and picture")
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=[*BASELINES, "none"],
        default=list(BASELINES),
        help="what else the teacher can do (default: both)",
    )
    parser.add_argument(
        "--resolutions",
        nargs="+",
        type=positive,
        metavar="PIXELS",
        help="of these, of the shorter side; of random patches, as many (default: with about 1/4, 2/5 and 9/16 of the "
        "patches)",
    )
    add_dataset_arguments(parser)
    add_training_images_arguments(parser)
    parser.add_argument(
        "--features", action="store_true", help="measure neighbors and a linear probe, also of classifiers"
    )
    parser.add_argument("--limit", type=positive, help="judge by so many images, chosen at random")
    parser.add_argument("--train-limit", type=positive, help="learn from so many images, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of all that is chosen at random (default: %(default)s)")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=list(PRECISIONS),
        help="in which speed is measured (default: float32 and, where the device is fast at it, bf16)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first look: as --limit 200 --train-limit 1000 --rounds 3 --precision float32 --no-memory, of which "
        "others that are given go before",
    )
    parser.add_argument(
        "--rounds", type=positive, default=10, help="timed passes of each model (default: %(default)s)"
    )
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory, in a process each"
    )
    parser.add_argument("--batch-size", type=positive, default=64, help="default: %(default)s")
    add_reading_arguments(parser)
    add_device_argument(parser)
    add_trust_argument(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.quick:
        parser.set_defaults(**QUICK)
        arguments = parser.parse_args(argv)
    if "none" in arguments.baselines and len(arguments.baselines) > 1:
        parser.error(f"argument --baselines: got {' '.join(arguments.baselines)}, expected none alone or others")
    named = [split_name(text) for text in arguments.model]
    baselines = [] if arguments.baselines == ["none"] else list(dict.fromkeys(arguments.baselines))
    output = Path(arguments.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {str(output)!r} exists and is no empty folder; choose another one.")
    device = str(choose_device(arguments.device))
    precisions = arguments.precision
    if precisions is None:
        precisions = ["float32", "bf16"] if choose_mixed_precision(torch.device(device)) == "bf16" else ["float32"]

    options = {"device": device, "trust_remote_code": arguments.trust_remote_code}
    contenders = load_teachers(
        arguments.teacher, None, baselines, arguments.resolutions, seed=arguments.seed, **options
    )
    for method, folder in [*((None, folder) for folder in arguments.students), *named]:
        contenders += load_students(folder, method, **options)
    has_backbones = any(contender.classifier is None for contender in contenders)
    test, train, names, split = choose_images(arguments, has_backbones)
    with whole_folder(output) as folder:
        rows = compare(
            contenders,
            test,
            train,
            features=arguments.features,
            seed=arguments.seed,
            precisions=precisions,
            rounds=arguments.rounds,
            memory=arguments.memory,
            **{name: getattr(arguments, name) for name in ("batch_size", "num_workers", "skip_corrupt")},
        )
        settings = {
            "dataset": " ".join(arguments.eval_dataset or arguments.dataset),
            "split": split,
            "images": len(test),
            "classes": len(names),
            "train_images": None if train is None else len(train),
            "seed": arguments.seed,
            "device": device,
            "threads": torch.get_num_threads(),
            "rounds": arguments.rounds,
            "batch_sizes": BATCH_SIZES,
        }
        table = table_rows(rows)
        # A disk that takes no more loses nothing that was measured.
        print(f"{format_table(table)}\n\n{describe(settings)}")
        command = shlex.join(["frugalvit", "compare", *(sys.argv[2:] if argv is None else argv)])
        write_json(folder / "compare.json", {"command": command, "settings": settings, **origin(), "rows": rows})
        write_text(folder / "compare.md", f"{format_markdown(table)}\n\n{describe(settings)}\n")
        save_figure(draw_comparison(rows), folder / "compare.png")
    print(f"Table: {output / 'compare.md'}   Picture: {output / 'compare.png'}")


def split_name(text: str) -> tuple[str, str]:
    """Split `NAME=FOLDER` into NAME and FOLDER.

    Raises:
        ValueError: if one is missing.
    """
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ValueError(f"--model {text!r}: expected NAME=FOLDER.")
    return name, folder


def choose_images(
    arguments: argparse.Namespace, has_backbones: bool
) -> tuple[datasets.Dataset, datasets.Dataset | None, list[str], str]:
    """Load the images that the arguments name.

    Returns:
        `tuple`: Images to judge by; images to learn from, if embeddings with labels are to be judged; the names of
        their classes, if they have labels; and the name of the split.
    """
    test, split = read_evaluated(arguments)
    labeled = "label" in test.features and bool((label_numbers(test) >= 0).any())
    train, names = None, []
    if labeled and (arguments.features or has_backbones):
        parts = read_labeled_parts(arguments)
        test, names, split = parts.test, parts.names, parts.split
        train = sample(parts.train, arguments.train_limit, arguments.seed)
    elif labeled:
        check_labels(test, split)
        names = class_names(test)
        if arguments.classes:
            chosen = choose_classes(arguments.classes, names)
            test, names = of_classes(test, chosen), [names[index] for index in chosen]
    elif arguments.features or arguments.classes:
        raise ValueError(f"The split {split!r} has no labels to compare with; name their column with --label-column.")
    else:
        test = test.select_columns("image")
    return sample(test, arguments.limit, arguments.seed), train, names, split


def compare(
    contenders: Sequence[Contender],
    test: datasets.Dataset,
    train: datasets.Dataset | None = None,
    *,
    features: bool = False,
    seed: int = 0,
    precisions: Sequence[str] = ("float32",),
    rounds: int = 10,
    memory: bool = True,
    **reading,
) -> list[dict[str, object]]:
    """Measure contenders beside each other.

    Args:
        contenders (sequence of `Contender`): The teacher first, all on one device and in float32.
        test (`datasets.Dataset`): Images to judge by, as `load_images` returns them.
        train (`datasets.Dataset`, *optional*): Images with labels of the same classes, from which neighbors and linear
            probes learn. Without it, these are not measured.
        features (`bool`): Leave out classifiers.
        seed (`int`): Chooses the images that are held back for linear probes.
        precisions (sequence of `str`): Some of `PRECISIONS`; models are left in the last of them.
        rounds (`int`): Timed passes of each model in batches; for single images `MORE_ROUNDS` times as many.
        memory (`bool`): Whether memory is measured, too.
        reading: `batch_size` and others of `image_batches`.

    Returns:
        `list[dict]`: For each contender `model` (its name), `method`, `image_size`, `tokens`, `parameters`, `macs`.
        The measures `accuracy` (the classifier's), `linear_accuracy` and `neighbor_accuracy` if they were measured,
        each with `…_error`, its standard error, `…_difference` from the teacher and `…_difference_error`, that of the
        paired difference. `cosine`, the mean with the teacher's embedding; `images_per_second` by precision and batch
        size; and `memory`, see `peak_memory`.

    Raises:
        ValueError: if a classifier's classes are not the data set's, or no image can be read.
    """
    labels = torch.from_numpy(label_numbers(test)) if "label" in test.features else None
    classes = [
        None if features or labels is None or contender.classifier is None else right_classes(contender, test)
        for contender in contenders
    ]
    embeddings, indices = embed_all(contenders, test, **reading)
    labels = None if labels is None else labels[indices]
    known = None if train is None else embed_all(contenders, train, **reading)

    rows, answers = [], []
    for number, contender in enumerate(contenders):
        right = {}
        if classes[number] is not None:
            right["accuracy"] = classifies(contender, embeddings[number], classes[number][labels])
        if known is not None:
            known_labels = torch.from_numpy(label_numbers(train))[known[1]]
            right |= learns(embeddings[number], labels, known[0][number], known_labels, seed)
        answers.append(right)
        row = {"model": contender.name, "method": contender.method, "image_size": list(contender.image_size)}
        row |= {"tokens": contender.tokens, "parameters": contender.parameters, "macs": contender.macs}
        for name, values in right.items():
            row |= describe_score(name, values, answers[0].get(name) if number else None)
        rows.append(row | {"cosine": mean_cosine(embeddings[number], embeddings[0])})
    for row, speeds in zip(rows, measure_all_speeds(contenders, precisions, rounds), strict=True):
        row["images_per_second"] = speeds
    for row, contender in zip(rows, tqdm(contenders, desc="memory", leave=False, disable=None), strict=True):
        row["memory"] = peak_memory(contender.load) if memory and contender.load else None
    return rows


def right_classes(contender: Contender, images: datasets.Dataset) -> torch.Tensor:
    """The classifier's class of each of the data set's, `(classes,)`.

    Raises:
        ValueError: if the classifier has other classes.
    """
    try:
        return torch.tensor(match_labels(class_names(images), contender.id2label))
    except ValueError as error:
        raise ValueError(f"{contender.name}: {error} Or compare embeddings: --features.") from error


class _Readers:
    """A `Reader` with the image processors of all contenders; those that are alike read an image once."""

    at_least = None

    def __init__(self, contenders: Sequence[Contender]):
        found, self.of = {}, []
        for contender in contenders:
            processor = contender.image_processor
            key = json.dumps(processor.to_dict(), default=str) if hasattr(processor, "to_dict") else id(processor)
            self.of.append(list(found).index(key) if key in found else len(found))
            found.setdefault(key, processor)
        self.readers = [Reader(processor, exact=True) for processor in found.values()]

    def pixels(self, image: Image.Image) -> list[torch.Tensor]:
        return [reader.pixels(image) for reader in self.readers]

    def batch(self, pixels: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [reader.batch(own) for reader, own in zip(self.readers, zip(*pixels, strict=True), strict=True)]


@torch.inference_mode()
def embed_all(
    contenders: Sequence[Contender], images: datasets.Dataset, batch_size: int = 64, **reading
) -> tuple[list[torch.Tensor], list[int]]:
    """Embed images by each contender, `(draws, images, embedding_size)` float32 on the CPU, and return the embeddings
    and the indices of the images that could be read. An image is decoded once."""
    readers, embeddings, indices = _Readers(contenders), [[] for _ in contenders], []
    for pixel_values, batch in image_batches(readers, images, batch_size, **reading):
        for contender, chosen, found in zip(contenders, readers.of, embeddings, strict=True):
            own = contender.fit(pixel_values[chosen].to(contender.device))
            found.append(torch.stack([contender.embed(own).float().cpu() for _ in range(contender.draws)]))
        indices += batch
    return [torch.cat(found, dim=1) for found in embeddings], indices


@torch.inference_mode()
def classifies(contender: Contender, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether a contender's classifier is right, `(images,)`, the mean over draws."""
    best = [contender.classifier(draw.to(contender.device)).argmax(-1).cpu() for draw in embeddings]
    return torch.stack([(draw == labels).double() for draw in best]).mean(0)


def learns(
    embeddings: torch.Tensor, labels: torch.Tensor, known: torch.Tensor, known_labels: torch.Tensor, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Whether a linear probe and 20 nearest neighbors are right, `(images,)` each, the mean over draws.

    Args:
        embeddings, known (`torch.Tensor`): Embeddings to judge by and to learn from, `(draws, images,
            embedding_size)`.
        labels, known_labels (`torch.Tensor`): Labels of both, `(images,)`.
        seed (`int`, *optional*, defaults to 0): Chooses the images that are held back for the probe.
    """
    classes = known_labels.unique()
    right = {"linear_accuracy": [], "neighbor_accuracy": []}
    for asked, features in zip(embeddings, known, strict=True):
        train = LabeledFeatures(features, torch.searchsorted(classes, known_labels))
        right["linear_accuracy"].append(classes[fit_probe(train, seed)(asked).argmax(1)] == labels)
        right["neighbor_accuracy"].append(classes[neighbor_scores(train, asked).argmax(1)] == labels)
    return {name: torch.stack(draws).double().mean(0) for name, draws in right.items()}


def describe_score(name: str, right: torch.Tensor, teacher: torch.Tensor | None) -> dict[str, float | None]:
    """The mean of a score and its standard error, and those of the difference from the teacher on the same images."""
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


def measure_all_speeds(
    contenders: Sequence[Contender], precisions: Sequence[str], rounds: int = 10
) -> list[dict[str, dict[str, float]]]:
    """Measure images a second of each contender, by precision and batch size."""
    found = [{precision: {} for precision in precisions} for _ in contenders]
    for precision in precisions:
        for contender in contenders:
            contender.model.to(PRECISIONS[precision])
        for batch_size in BATCH_SIZES:
            times = rounds * (MORE_ROUNDS if batch_size == 1 else 1)
            speeds = measure_speeds(contenders, batch_size, PRECISIONS[precision], times)
            for own, speed in zip(found, speeds, strict=True):
                own[precision][str(batch_size)] = speed
    return found


def peak_memory(load: Callable[[], Contender], batch_size: int = BATCH_SIZES[-1]) -> int:
    """Measure the most bytes that a contender and a pass with a batch take, in a process of its own: on CUDA the bytes
    that PyTorch allocates, otherwise the growth of the process.

    Args:
        load (`Callable`): Makes the contender; it has to be picklable.
        batch_size (`int`, *optional*, defaults to 32): Images of the pass.
    """
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        # Imported once for all processes.
        context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak_memory, load, batch_size).result()


@torch.inference_mode()
def _peak_memory(load: Callable[[], Contender], batch_size: int) -> int:
    before = _largest_resident()
    contender = load()
    contender.model(contender.noise(batch_size))
    if contender.device.type == "cuda":
        return torch.cuda.max_memory_allocated(contender.device)
    return _largest_resident() - before


def _largest_resident() -> int:
    """The most bytes of memory that this process has held."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Linux's getrusage begins with what the process held that started this one.
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    import resource

    # macOS counts bytes, Linux kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def table_rows(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The rows of `compare` as a person reads them, accuracies in percent with their standard errors."""
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
        if any(row["memory"] is not None for row in rows):
            cells["memory, MiB"] = row["memory"] and round(row["memory"] / 2**20)
        table.append(cells)
    return table


def _percent(row: Mapping[str, object], name: str, sign: str = "") -> str:
    value, error = row.get(name), row.get(f"{name}_error")
    if value is None:
        return "-"
    return f"{100 * value:{sign}.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def describe(settings: Mapping[str, object]) -> str:
    """The meaning of the table's numbers, in two sentences."""
    learned = f", {settings['train_images']:,} to learn from" if settings["train_images"] else ""
    classes = f" of {settings['classes']:,} classes" if settings["classes"] else ""
    threads = f"{settings['threads']} thread{'' if settings['threads'] == 1 else 's'}"
    images = f"{settings['dataset']}, {settings['split']}: {settings['images']:,} images{classes}{learned}"
    return (
        f"{images}; ± is a standard error. Images a second on {settings['device']} ({threads}), "
        f"by batch size; memory of a model and a pass of {BATCH_SIZES[-1]} images."
    )


def draw_comparison(rows: Sequence[Mapping[str, object]], size: tuple[float, float] = (6.0, 4.0)) -> Figure:
    """Draw the scores of contenders over their speeds, a line for each method, with standard errors.

    Args:
        rows (sequence of `Mapping`): The rows of `compare`, the teacher first.
        size (pair of `float`, *optional*, defaults to `(6.0, 4.0)`): Width and height in inches.

    Returns:
        `matplotlib.figure.Figure`: Not known to pyplot; show it in a notebook or save it with `save_figure`. Speeds
        are those of the first precision and the largest batches, scores the first of `SCORES` that all rows have.
    """
    score = next(name for name in SCORES if all(row.get(name) is not None for row in rows) or name == "cosine")
    precision, speeds = next(iter(rows[0]["images_per_second"].items()))
    batch_size, factor = list(speeds)[-1], 1 if score == "cosine" else 100
    teacher, *others = [row for row in rows if row.get(score) is not None]

    def point(row: Mapping[str, object]) -> tuple[float, float, float]:
        speed = row["images_per_second"][precision][batch_size]
        return speed, factor * row[score], factor * (row.get(f"{score}_error") or 0)

    figure = Figure(figsize=size, dpi=200, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    methods = {}
    for row in others:
        methods.setdefault(row["method"], []).append(point(row))
    x, y, error = point(teacher)
    star = {"color": TEXT_COLOR, "linestyle": "none", "elinewidth": 0.8, "marker": "*", "markersize": 11}
    axes.errorbar(x, y, error, **star, markeredgecolor="white", label=f"teacher, {teacher['model']}", zorder=3)
    axes.axhline(y, color=OUTLINE_COLOR, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    styles = [(color, style) for style in ("-", "--", ":") for color in LINE_COLORS]
    for (color, style), (method, points) in zip(itertools.cycle(styles), methods.items(), strict=False):
        x, y, error = np.array(sorted(points)).T
        line = {"color": color, "linestyle": style, "linewidth": 1.4, "elinewidth": 0.8, "marker": "o"}
        edge = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.6}
        axes.errorbar(x, y, error, **line, **edge, label=method)

    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.12)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"images/s (batches of {batch_size}, {precision})", fontsize=8, color=TEXT_COLOR)
    axes.set_title(SCORES[score] + ("" if score == "cosine" else ", %"), loc="left", fontsize=9, color=TEXT_COLOR)
    axes.tick_params(labelsize=7.5, colors=TEXT_COLOR, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(LEGEND_COLOR)
    axes.grid(color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    legend = {"fontsize": 7.5, "frameon": False, "labelcolor": TEXT_COLOR, "handlelength": 2.2}
    # Below the axes, it covers no line.
    for text in figure.legend(loc="outside lower center", ncols=2, **legend).get_texts():
        text.set_parse_math(False)
    return figure
