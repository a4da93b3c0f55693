"""Functions that the benchmarks share: options, training runs, measurements and files of results."""

import argparse
import hashlib
import json
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import datasets
import torch
from torch import nn
from torchvision.transforms import v2
from transformers import ViTConfig, ViTForImageClassification

from frugalvit import SparseFormerConfig, SparseFormerForImageClassification, checkpoint_path
from frugalvit.compare import draw_comparison, table_rows
from frugalvit.macs import count_macs
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.pictures import save_figure
from frugalvit.speed import images_per_second
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import default_split, load_images
from frugalvit.training.files import shipped_checkpoints, write_json
from frugalvit.training.loading import choose_device, load_model
from frugalvit.training.preprocessing import decode_image
from frugalvit.training.text import format_table
from frugalvit.versions import origin


ROOT = Path(__file__).resolve().parents[1]
# Configuration overrides for a SparseFormer with a small focusing stage, for images of 32 x 32 pixels.
STUDENT = "stem_channels=32,num_mixed_points=16,mixing_hidden_size=64,num_focusing_iterations=2"
# Configuration fields of ViTs. Benchmarks compare SparseFormers with these ViTs.
VITS = {
    "vit-base": {},
    "vit-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
# Small batches get more timed passes than the largest batch, but at most `MOST_ROUNDS` times as many.
MOST_ROUNDS = 10


def make_parser(description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_run_arguments(parser: argparse.ArgumentParser, runs_dir: str):
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--runs-dir", type=Path, default=Path(runs_dir), help="default: %(default)s")
    add_results_argument(parser)


def add_results_argument(parser: argparse.ArgumentParser):
    """Add the option `--results-dir`. Its default is not `results/`, which holds the committed results."""
    parser.add_argument(
        "--results-dir",
        type=new_folder,
        default="runs/results",
        help="where tables and pictures go (default: %(default)s; those of the whole run are kept in results/)",
    )


def new_folder(path: str) -> Path:
    Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def add_data_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("--dataset", nargs="+", default=[SUBSET], help=f"as in training (default: {SUBSET})")
    parser.add_argument("--eval-dataset", nargs="+", help="data set to test on, if --dataset is files")
    parser.add_argument("--class-names", nargs="+", help="class names, if the data set has none")


def add_precision_argument(parser: argparse.ArgumentParser, default: str):
    """Add the option `--mixed-precision`. Its default is the same on every machine."""
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default=default, help="default: %(default)s")


def precision_arguments(arguments, precision: str | None = None) -> list[str]:
    """Return a training's precision options. Without `--bf16`, the speed of the machine decides in bootstrapping."""
    if (precision or arguments.mixed_precision) == "no":
        return ["--bf16", "False"]
    # For bfloat16 on a CPU, Transformers needs `--use_cpu`.
    return ["--bf16", "--use_cpu", str(choose_device().type == "cpu")]


def parse_table(description: str, tables: Iterable[str], images: int, runs_dir: str) -> argparse.Namespace:
    """Parse the command line of a benchmark that trains a model for each row of a table."""
    parser = make_parser(description)
    parser.add_argument("table", choices=[*tables])
    parser.add_argument("--rows", nargs="+", help="names of rows to run (default: all)")
    add_data_arguments(parser)
    parser.add_argument("--images", type=int, default=images, help="training images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, help="default: 6, of longer 40")
    add_precision_argument(parser, "no")
    add_run_arguments(parser, runs_dir)
    arguments = parser.parse_args()
    arguments.epochs = arguments.epochs or (40 if arguments.table == "longer" else 6)
    return arguments


def budget_settings(arguments) -> dict:
    return {name: getattr(arguments, name) for name in ("images", "epochs", "seeds", "mixed_precision")}


def wanted_rows(arguments, known: Iterable[str]) -> list[str]:
    """Return the names of the rows to run: the names after `--rows`, or all names."""
    known = list(known)
    if unknown := sorted(set(arguments.rows or ()) - set(known)):
        raise SystemExit(f"There is no row {unknown[0]!r}; the rows are: {'; '.join(known)}.")
    return arguments.rows or known


def check_origin(path: Path, origin: str):
    """Write a note next to a file or folder that says how the path is made. Exit if the path exists and its note is
    another one."""
    note = path.with_name(f"{path.name}.txt")
    if path.exists() and not note.is_file():
        raise SystemExit(f"{path} has no note {note.name} that says how it was made; remove it.")
    if path.exists() and (before := note.read_text("utf-8")) != origin:
        raise SystemExit(f"{path} is the result of another command; remove it and {note.name}: {before}")
    path.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(origin, "utf-8")


def describe_options(arguments, *names: str) -> str:
    return json.dumps({name: getattr(arguments, name) for name in names})


def measured_once(folder: Path, measure: Callable[[Path], dict | list[dict]], options: str) -> dict | list[dict]:
    """Return `measure(folder)`. The result is saved in the folder, and later calls with equal options read it from
    there."""
    file = folder / "measured.json"
    check_origin(file, options)
    if not file.is_file():
        write_json(file, measure(folder))
    return json.loads(file.read_text("utf-8"))


def read_rows(path: Path) -> list[dict]:
    """Read the rows of a file of results. Return an empty list if the file does not exist."""
    return json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []


def print_rows(rows: list[dict]):
    """Print rows as a table. Values that are lists (one number for each seed) are left out."""
    print(format_table([{k: v for k, v in row.items() if not isinstance(v, list)} for row in rows]), flush=True)


def data_arguments(arguments) -> list[str]:
    data = ["--dataset", *arguments.dataset]
    for option in ("eval_dataset", "class_names"):
        if getattr(arguments, option):
            data += [f"--{option}", *getattr(arguments, option)]
    return data


def evaluation_images(arguments) -> datasets.Dataset:
    dataset = arguments.eval_dataset or arguments.dataset
    return load_images(dataset, default_split(dataset), class_names=arguments.class_names)


def row_arguments(row: dict, epochs: int) -> list[str]:
    """Convert a row to command-line options. `warmup_epochs` becomes `warmup_steps`, a fraction of all steps."""
    row = {"warmup_epochs": 0, **row, "num_train_epochs": epochs}
    row["warmup_steps"] = row.pop("warmup_epochs") / epochs
    values = {field: value if isinstance(value, list) else [value] for field, value in row.items()}
    return [text for field, value in values.items() for text in (f"--{field}", *map(str, value))]


def folder_name(row: str, seed: int, argv: Sequence[str] = ()) -> str:
    """Return the name of a run's folder. If `argv` is given, the name ends with a hash of `argv`."""
    name = f"{''.join(c if c.isalnum() else '-' for c in row)}-seed{seed}"
    return f"{name}-{hashlib.sha256(shlex.join(argv).encode()).hexdigest()[:8]}" if argv else name


def run_row(arguments, training, name: str, seed: int, options: dict) -> tuple[Path, dict]:
    """Train a row's model with one seed, or reuse the finished run. Return the folder of the run and its results."""
    argv = ["--seed", str(seed), *data_arguments(arguments)]
    argv += ["--train_split", f"train[:{arguments.images}]", *row_arguments(options, arguments.epochs)]
    argv += precision_arguments(arguments)
    folder = arguments.runs_dir / folder_name(name, seed, argv)
    return folder, run_training(training, folder, argv)


def run_training(training, folder: Path, argv: list[str]) -> dict:
    """Run a training module, or reuse a finished run of the same command. Return the last value of each log entry.
    The model of the last epoch is kept, because a choice of the best epoch would use the test images."""
    argv = ["--output_dir", str(folder), *argv, "--load_best_model_at_end", "False", "--logging_strategy", "epoch"]
    command = shlex.join([*training.PROG.split(), *argv])
    check_origin(folder, command)
    # The model card is the last file that a training writes. A run without a card is not finished.
    if not (folder / "README.md").is_file():
        try:
            training.main(argv)
        except ValueError as error:
            raise SystemExit(f"{folder.name}: {error}") from error
    log = json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"]
    return {name: value for record in log for name, value in record.items()}


def last_accuracies(results: list[dict]) -> dict:
    """Return the accuracies of all seeds with their mean and standard deviation."""
    accuracies = [result["eval_accuracy"] for result in results]
    return {"accuracy": statistics.mean(accuracies), "spread": spread(accuracies), "accuracies": accuracies}


def spread(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def cropped(image_format: ImageFormat, scale: Sequence[float]) -> v2.Compose:
    return v2.Compose(
        [
            v2.RandomResizedCrop(image_format.size, tuple(scale), interpolation=image_format.interpolation),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(image_format.mean, image_format.std),
        ]
    )


class Views(torch.utils.data.Dataset):
    def __init__(self, images: datasets.Dataset, transform: Callable):
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict:
        record = self.images[index]
        return {
            "pixel_values": self.transform(decode_image(record["image"], index)),
            "labels": record.get("label", -1),
        }


def build_model(name: str) -> nn.Module:
    """Load a shipped classifier, or build a model with random weights: one of `VITS` or a SparseFormer variant."""
    if name in shipped_checkpoints():
        return load_model(checkpoint_path(name), "image-classification", "cpu")[0]
    if name in VITS:
        return ViTForImageClassification(ViTConfig(num_labels=1000, **VITS[name])).eval()
    return SparseFormerForImageClassification(SparseFormerConfig.from_variant(name)).eval()


class MatrixProducts(nn.Module):
    """The matrix products of a model's linear layers, without the model's other operations. The inputs are random and
    have the shapes that the linear layers get for `pixel_values`."""

    def __init__(self, model: nn.Module, pixel_values: torch.Tensor):
        super().__init__()
        self.calls = []
        hooks = [
            module.register_forward_pre_hook(lambda layer, given: self.calls.append((layer, given[0])))
            for module in model.modules()
            if isinstance(module, nn.Linear)
        ]
        with torch.no_grad():
            model(pixel_values)
            self.calls = [(layer, torch.randn_like(given)) for layer, given in self.calls]
        for hook in hooks:
            hook.remove()

    def forward(self, _: torch.Tensor) -> list[torch.Tensor]:
        return [layer(given) for layer, given in self.calls]


def measure_speeds(
    models: Mapping[str, nn.Module],
    size: int,
    batch_sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    rounds: int,
    programs: Mapping[str, Callable] | None = None,
) -> list[dict]:
    """Measure images per second on the CPU for each dtype and batch size. Models and `programs`, which are exported
    models, are timed in turns. The precision of a program is fixed. Programs are therefore timed only once, together
    with the models in the first dtype."""
    rows = []
    programs = programs or {}
    macs = {name: count_macs(model, size).macs_with_attention for name, model in models.items()}
    for dtype in dtypes:
        timed = {name: model.to(dtype) for name, model in models.items()} | (programs if dtype == dtypes[0] else {})
        for batch_size in batch_sizes:
            more = min(max(batch_sizes) // batch_size, MOST_ROUNDS)
            speeds = images_per_second(timed, torch.randn(batch_size, 3, size, size).to(dtype), rounds * more)
            first = next(iter(speeds.values()))
            rows += [
                {
                    "row": name,
                    "batch_size": batch_size,
                    "images_per_second": speed,
                    "times_first": speed / first,
                    "dtype": programs[name].precision if name in programs else str(dtype).removeprefix("torch."),
                    "macs": macs.get(name),
                }
                for name, speed in speeds.items()
            ]
    return rows


def peak_memory(make: Callable[..., Callable[[], object]], *arguments) -> float:
    """Return the peak memory of a call in megabytes, measured in a new process on Linux. In that process,
    `make(*arguments)` returns the function to call. Memory that `make` allocates does not count."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_peak_memory, make, *arguments).result()


def _peak_memory(make: Callable, *arguments) -> float:
    call = make(*arguments)
    before = _kilobytes("VmRSS")
    # Writing 5 to `clear_refs` resets `VmHWM`, the peak memory of the process.
    Path("/proc/self/clear_refs").write_text("5")
    with torch.inference_mode():
        call()
    return (_kilobytes("VmHWM") - before) / 1000


def _kilobytes(name: str) -> int:
    return int(re.search(name + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def write_comparison(arguments, name: str, images: int, rows: list[dict], data: str):
    """Print the rows of `frugalvit.compare.compare`, save them as JSON, and draw them as a picture."""
    print(format_table(table_rows(rows)))
    save_table(arguments.results_dir / f"{name}.json", {"images": images, "rounds": arguments.rounds}, rows, data=data)
    save_figure(draw_comparison(rows), arguments.results_dir / f"{name}.png")


def write_table(path: Path, settings: dict, rows: list[dict], **more):
    """Print rows, and save them as JSON with the command, the settings, the versions and the machine."""
    print_rows(rows)
    save_table(path, settings, rows, **more)


def save_table(path: Path, settings: dict, rows: list[dict], **more):
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
