"""Tools of the commands that make tables: rows that are trained once and found again, means over seeds, files that say
how they were made."""

import argparse
import hashlib
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import datasets
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import PreTrainedModel

from frugalvit import checkpoint_path, export
from frugalvit.common.choices import SUBSET
from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images
from frugalvit.common.exported import ExportedModule
from frugalvit.common.files import write_json
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.splits import default_split
from frugalvit.common.tables import format_table
from frugalvit.common.versions import origin
from frugalvit.compare import draw_comparison, table_rows
from frugalvit.pictures import save_figure


ROOT = Path(__file__).resolve().parents[1]
# A SparseFormer's focusing stage for images of 32 pixels, small enough for many runs.
STUDENT = "stem_channels=32,num_mixed_points=16,mixing_hidden_size=64,num_focusing_iterations=2"


def add_run_arguments(parser: argparse.ArgumentParser, runs_dir: str):
    """Add options for the seeds, and for the folders of runs and results."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--runs-dir", type=Path, default=Path(runs_dir), help="default: %(default)s")
    add_results_argument(parser)


def add_results_argument(parser: argparse.ArgumentParser):
    """Add the option for the folder of results, which is not the repository's by default."""
    parser.add_argument(
        "--results-dir",
        type=writable_folder,
        default="runs/results",
        help="where tables and pictures go (default: %(default)s; those of the whole run are kept in results/)",
    )


def writable_folder(path: str) -> Path:
    """Return a folder that can be written, made if it is not there, so that this is known before anything is
    measured."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write into {path!r}: {error.strerror}") from error
    return folder


def add_data_arguments(parser: argparse.ArgumentParser):
    """Add the options that `data_arguments` reads."""
    parser.add_argument("--dataset", nargs="+", default=[SUBSET], help=f"as in training (default: {SUBSET})")
    parser.add_argument("--eval-dataset", nargs="+", help="where --dataset is given as files")
    parser.add_argument("--class-names", nargs="+", help="where the data set has none")


def add_budget_arguments(parser: argparse.ArgumentParser, images: str, epochs: str):
    """Add options for the number of images and epochs, with defaults in words, and for the precision, which is the
    same on all machines by default."""
    parser.add_argument("--images", type=int, help=f"training images (default: {images})")
    parser.add_argument("--epochs", type=int, help=f"default: {epochs}")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no", help="default: %(default)s")


def add_recipe_arguments(parser: CommandParser):
    """Add options for the paper's recipe in the place of the reduced one, and for its data sets."""
    parser.add_argument("--config-overrides", default="", help="of the architecture, after the recipe's")
    parser.add_argument("--paper-recipe", action="store_true", help="the paper's sizes and budget, see above")
    parser.add_argument("--dataset-config", help="of a hub data set that has several")
    parser.add_argument("--label-column", help="where a data set has several")
    parser.add_argument("--crop", choices=["padded", "resized"], help="default: padded")
    parser.add_argument("--flip", help="probability (default: 0.5)")


def check_paper_recipe(parser: CommandParser, arguments):
    """End the process if `--paper-recipe` is given for the images that ship, which are too few."""
    if arguments.paper_recipe and SUBSET in arguments.dataset:
        parser.error(f"--paper-recipe is for whole data sets, not for {SUBSET}: give --dataset, see --help.")


def set_budget(arguments, images: int | None, epochs: int):
    """Fill in what was not given; no number of images means all."""
    arguments.images = arguments.images or images
    arguments.epochs = arguments.epochs or epochs


def budget_settings(arguments) -> dict:
    """The budget as a table's file notes it."""
    return {name: getattr(arguments, name) for name in ("images", "epochs", "seeds", "mixed_precision")}


def wanted_rows(arguments, known: Iterable[str]) -> list[str]:
    """Names of the rows to run: those asked for, or all."""
    known = list(known)
    if unknown := sorted(set(arguments.rows or ()) - set(known)):
        raise SystemExit(f"There is no row {unknown[0]!r}; the rows are: {'; '.join(known)}.")
    return arguments.rows or known


def exported(name: str, *options: str) -> ExportedModule:
    """A model that ships as a program, compared with it on 16 images; options as of `frugalvit export`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        export.main([str(checkpoint_path(name)), "--output", str(folder), "--limit", "16", *options])
        return ExportedModule(folder)


def print_rows(rows: list[dict]):
    """Rows so far, without the values of each seed."""
    print(format_table([{k: v for k, v in row.items() if not isinstance(v, list)} for row in rows]), flush=True)


def reduced_epochs(table: str) -> int:
    """Epochs of a table by default."""
    return 40 if table == "longer" else 6


def budget_arguments(arguments) -> list[str]:
    """The budget as a command line names it."""
    split = f"train[:{arguments.images}]" if arguments.images else "train"
    budget = ["--train-split", split, "--epochs", str(arguments.epochs)]
    return [*budget, "--mixed-precision", arguments.mixed_precision]


def data_arguments(arguments) -> list[str]:
    """The data as a command line names it."""
    data = ["--dataset", *arguments.dataset]
    for option in ("eval_dataset", "class_names"):
        if getattr(arguments, option):
            data += [f"--{option}", *getattr(arguments, option)]
    return data


def evaluation_images(arguments) -> datasets.Dataset:
    """The images that a row's model is evaluated on."""
    dataset = arguments.eval_dataset or arguments.dataset
    return load_images(
        dataset,
        default_split(dataset, arguments.dataset_config),
        name=arguments.dataset_config,
        label_column=arguments.label_column,
        class_names=arguments.class_names,
    )


def given_arguments(arguments, *options: str) -> list[str]:
    """Return the options that a command was given, as a command line names them."""
    given = ((option, getattr(arguments, option)) for option in options)
    return [text for option, value in given if value for text in (f"--{option}", value)]


def row_arguments(row: dict) -> list[str]:
    """A row's arguments as the command line names them."""
    values = {field: value if isinstance(value, list) else [value] for field, value in row.items()}
    return [text for field, value in values.items() for text in (f"--{field}", *map(str, value))]


def folder_name(row: str, seed: int, argv: Sequence[str] = ()) -> str:
    """The folder of a row's run with a seed. The command's arguments, as a digest, set runs of other budgets, data and
    architectures apart."""
    name = f"{''.join(c if c.isalnum() else '-' for c in row)}-seed{seed}"
    return f"{name}-{hashlib.sha256(shlex.join(argv).encode()).hexdigest()[:8]}" if argv else name


def run_training(recipe, folder: Path, argv: list[str]) -> dict:
    """Run a training in a folder, or find the run of the same command there, and return its results."""
    argv, file = ["--output", str(folder), *argv], folder / "results.json"
    if file.is_file():
        results = json.loads(file.read_text(encoding="utf-8"))
        if results["command"] == shlex.join([*recipe.PROG.split(), *argv]):
            return results
    # What ran before may have wanted another precision.
    AcceleratorState._reset_state(True)
    try:
        recipe.main(argv)
    except ValueError as error:
        raise SystemExit(f"{folder.name}: {error}") from error
    return json.loads(file.read_text(encoding="utf-8"))


def last_model(folder: Path) -> tuple[PreTrainedModel, object]:
    """The classifier of a run's last epoch, and its image processor. The folder's own is that of the best epoch on the
    test images."""
    model, image_processor = load_image_classifier(folder, "cpu")
    model.load_state_dict(load_file(max(folder.glob("checkpoints/step-*")) / "model.safetensors"))
    return model, image_processor


def last_accuracies(results: list[dict]) -> dict:
    """Mean, standard deviation and values over seeds, of the last epoch: choosing an epoch by its accuracy would be
    choosing on test images."""
    accuracies = [result["epochs"][-1]["accuracy"] for result in results]
    return {"accuracy": statistics.mean(accuracies), "spread": spread(accuracies), "accuracies": accuracies}


def spread(values: list[float]) -> float | None:
    """Standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else None


def write_comparison(arguments, name: str, images: int, rows: list[dict], data: str):
    """Print what `frugalvit.compare.compare` returned of so many images, and write it as table and picture."""
    print(format_table(table_rows(rows)))
    settings = {"images": images, "rounds": arguments.rounds, "threads": torch.get_num_threads()}
    write_table(arguments.results_dir / f"{name}.json", settings, rows, data=data)
    save_figure(draw_comparison(rows), arguments.results_dir / f"{name}.png")


def write_table(path: Path, settings: dict, rows: list[dict], **more):
    """Write a table's rows with the command that made them."""
    write_json(
        path,
        {
            "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            "settings": settings,
            **({"spread": "standard deviation over seeds"} if "seeds" in settings else {}),
            **origin(),
            **more,
            "rows": rows,
        },
    )
