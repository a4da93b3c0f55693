"""`frugalvit curves`: the course of trainings, beside each other."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .common.files import misshapen, read_json_lines
from .common.tables import format_table
from .options.curves import parse
from .pictures import LINE_COLORS, TEXT_COLOR, check_picture_path, label_lines, save_figure


# What is drawn first, and what it is called; other scores follow by their names.
TITLES = {
    "train_loss": "training loss",
    "loss": "evaluation loss",
    "accuracy": "accuracy",
    "top5_accuracy": "top-5 accuracy",
    "mean_iou": "mean IoU",
    "alignment": "cosine with the teacher",
}
# What records of epochs have besides.
NO_SCORES = {"epoch", "step", "images_per_second", "learning_rate", "gradient_norm", "teacher_accuracy"}
# By which the best epoch is chosen, where a run has it.
CHOOSING = ("accuracy", "mean_iou", "alignment")
PANELS_IN_A_ROW = 4


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    names = arguments.names or [Path(run).name for run in arguments.runs]
    if len(names) != len(arguments.runs) or len(set(names)) != len(names):
        raise ValueError(f"--names has {len(set(names))} different names for {len(arguments.runs)} runs.")
    if arguments.picture:
        check_picture_path(arguments.picture)
    runs = {name: read_epochs(run) for name, run in zip(names, arguments.runs, strict=True)}
    curves = curves_of(runs)
    print(
        format_table(
            [
                {"run": name, "epoch": epochs[-1]["epoch"], "best epoch": best_epoch(epochs)}
                | {curve: epochs[-1].get(curve) for curve in curves}
                for name, epochs in runs.items()
            ]
        )
    )
    if arguments.picture:
        save_figure(draw_curves(runs), arguments.picture)


def read_epochs(folder: str) -> list[dict]:
    """The records of a run's epochs that are done.

    Raises:
        ValueError: if the folder holds no run, no epoch is done, or a record is none of numbers.
    """
    file = Path(folder) / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{folder!r} has no metrics.jsonl; expected the --output of a training run.")
    epochs = [record for record in read_json_lines(file) if "train_loss" in record]
    if not epochs:
        raise ValueError(f"No epoch of {folder!r} is done yet.")
    for record in epochs:
        if problem := misshapen(record, dict[str, float | int]) or misshapen(record, {"epoch": int}):
            raise ValueError(f"An epoch in {str(file)!r} is none that a training wrote: {problem}.")
    return epochs


def curves_of(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Names of all losses and scores that a run has, the known ones first."""
    found = dict.fromkeys(name for epochs in runs.values() for name in epochs[-1] if name not in NO_SCORES)
    return [name for name in TITLES if name in found] + [name for name in found if name not in TITLES]


def best_epoch(epochs: Sequence[Mapping[str, float]]) -> int | None:
    """The epoch with the highest score of those that training chooses by, the first of equal ones; None without such a
    score."""
    score = next((name for name in CHOOSING if name in epochs[-1]), None)
    scored = [record for record in epochs if score in record]
    return max(scored, key=lambda record: record[score])["epoch"] if scored else None


def draw_curves(runs: Mapping[str, Sequence[Mapping[str, float]]], panel_size: float = 2.6) -> Figure:
    """Draw losses and scores over epochs, a panel each and a line for every run (figure S1 of Hyeon-Woo et al.).

    A dot marks the best epoch.

    Args:
        runs (`Mapping`): Records of epochs by the name of the run.
        panel_size (`float`, *optional*, defaults to 2.6): Width of a panel in inches.

    Returns:
        `matplotlib.figure.Figure`: Not known to pyplot; show it in a notebook or save it with `save_figure`.
    """
    curves = curves_of(runs)
    columns = min(len(curves), PANELS_IN_A_ROW)
    rows = -(-len(curves) // columns)
    size = (panel_size * columns, panel_size * rows)
    figure = Figure(figsize=size, dpi=200, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    for axes, curve in zip(panels, curves, strict=False):
        lines = {}
        for color, (name, epochs) in zip(LINE_COLORS, runs.items(), strict=False):
            points = [(record["epoch"], record[curve]) for record in epochs if curve in record]
            chosen = best_epoch(epochs)
            if points:
                axes.plot(*zip(*points, strict=True), color=color, linewidth=1.2)
                best = [point for point in points if point[0] == chosen]
                if best:
                    axes.plot(*best[0], "o", color=color, markersize=3)
                lines[name] = color
        axes.set_title(TITLES.get(curve, curve.replace("_", " ")), loc="left", fontsize=8, color=TEXT_COLOR)
        axes.set_xlabel("epoch", fontsize=7, color=TEXT_COLOR)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=7, colors=TEXT_COLOR)
        axes.spines[["top", "right"]].set_visible(False)
        if curve == curves[0]:
            label_lines(axes, lines, "upper right" if curve.endswith("loss") else "lower right")
    return figure
