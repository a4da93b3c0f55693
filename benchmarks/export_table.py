"""SparseFormers and the ViT that they replace in every runtime and precision, beside PyTorch, in one run.

    python benchmarks/export_table.py --caltech TRAIN TEST

Each model is written by `frugalvit export` for each runtime; the programs of a group of models take turns. Models of
the papers have random weights here: their speed and size count, their agreement with the original does not. The
shipped models are compared with the original on 300 test images that calibration has not seen. Writes export.json.
Folders are kept under --runs-dir and found again; TRAIN and TEST are parquet files of Caltech-101.
"""

import argparse
from pathlib import Path

import torch
from transformers import ViTImageProcessor

from frugalvit import checkpoint_path, export
from frugalvit.architectures import image_size_of
from frugalvit.benchmark import VITS, build_model, measure_all
from frugalvit.common.command_line import CommandParser
from frugalvit.common.exported import REPORT, ExportedModule
from frugalvit.common.resources import shipped_checkpoints
from frugalvit.common.tables import format_table
from frugalvit.options.benchmark import ROUNDS
from shared import add_results_argument, write_table


RUNTIMES = [
    ("openvino", "float32"),
    ("openvino", "bfloat16"),
    ("openvino", "int8"),
    ("onnx", "float32"),
    ("onnx", "int8"),
]
# Models whose programs fit into 24 GB together, and take turns.
GROUPS = {
    "base": ["vit-base", "augreg-base-49-224"],
    "large": ["augreg-large-49-224"],
    "caltech101": ["caltech101-sparseformer"],
    "cifar10": ["cifar10-vit", "cifar10-sparseformer"],
}
# Of programs, and not of what a machine does besides.
COLUMNS = ("compared", "min_cosine", "mean_cosine", "agreement", "original_accuracy", "accuracy")


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caltech", nargs=2, required=True, metavar=("TRAIN", "TEST"), help="parquet files")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--rounds", type=int, default=10, help=ROUNDS)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/export"), help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    rows = []
    for group in arguments.groups:
        models = {}
        for name in GROUPS[group]:
            models[f"{name}, pytorch"] = model = build_model(name)
            for runtime, precision in RUNTIMES:
                folder = exported(model, name, runtime, precision, arguments)
                models[f"{name}, {runtime} {precision}"] = ExportedModule(folder)
        dtypes = [torch.float32, torch.bfloat16]
        size = image_size_of(next(iter(models.values())))
        for row in measure_all(models, size, arguments.batch_size, dtypes, "cpu", arguments.rounds):
            model = models[row["row"]]
            program = isinstance(model, ExportedModule)
            own = model.report if program else {"bytes": None}
            # Random weights agree by chance.
            trained = not program or (checkpoint_of(row["row"].partition(",")[0]) is not None)
            found = own["parts"]["model"]["measured"][0] if program and trained else {}
            measured = {column: found.get(column) for column in COLUMNS}
            rows.append({**row, "bytes": own["bytes"], **measured})
    print(
        format_table([{key: row[key] for key in ("row", "dtype", "batch_size", "images_per_second")} for row in rows])
    )
    settings = {"batch_sizes": arguments.batch_size, "rounds": arguments.rounds}
    write_table(arguments.results_dir / "export.json", settings, rows, threads=torch.get_num_threads())


def checkpoint_of(name: str) -> Path | None:
    """The folder of a model, if it ships."""
    return checkpoint_path(name) if name in shipped_checkpoints() else None


def exported(model, name: str, runtime: str, precision: str, arguments) -> Path:
    """The folder of an exported model, written now or found."""
    folder = arguments.runs_dir / f"{name}-{runtime}-{precision}"
    if (folder / REPORT).is_file():
        return folder
    source = checkpoint_of(name)
    if source is None:
        source = arguments.runs_dir / name
        model.save_pretrained(source)
        if name in VITS:
            ViTImageProcessor().save_pretrained(source)
    data = ["--limit", "16", "--calibration-images", "16"]
    if name.startswith("cifar10"):
        data = ["--limit", "300"]
    elif name.startswith("caltech101"):
        train, test = arguments.caltech
        data = ["--calibration-data", train, "--dataset", test, "--limit", "300"]
    # What is refused by default is in the table, too.
    export.main(
        [str(source), "--output", str(folder), "--format", runtime, "--precision", precision, "--force", *data]
    )
    return folder


if __name__ == "__main__":
    main()
