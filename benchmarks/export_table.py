"""Measure SparseFormers and ViTs in each runtime and precision.

    python benchmarks/export_table.py --caltech TRAIN TEST
    python benchmarks/export_table.py --caltech TRAIN TEST --int8-without-speeds

TRAIN and TEST are parquet files of Caltech-101. `frugalvit export` writes a program for each model, runtime and
precision. The models of a group (`GROUPS`) and their programs are timed in turns. Models of the papers have random
weights, so only their speed and size are reported. The program of a shipped model is also compared with the PyTorch
model on 300 test images. These images are not used for calibration. Exported folders under --runs-dir are reused. The
output is export.json. --int8-without-speeds exports only the int8 programs of shipped models, also for few tokens, and
updates their sizes and agreement in export.json.
"""

import json
import shlex
import sys
from pathlib import Path

import torch
from transformers import ViTImageProcessor

from frugalvit import checkpoint_path, export
from frugalvit.evaluation.classification import classification_accuracy
from frugalvit.exported import REPORT, ExportedModule, load_classifier
from frugalvit.inference import choose_tokens
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import load_images, sample
from frugalvit.training.files import shipped_checkpoints, write_json
from frugalvit.versions import origin
from shared import VITS, add_results_argument, build_model, make_parser, measure_speeds, print_rows, write_table


RUNTIMES = [
    ("openvino", "float32"),
    ("openvino", "bfloat16"),
    ("openvino", "int8"),
    ("onnx", "float32"),
    ("onnx", "int8"),
]
# Groups of models, with their image sizes. All programs of a group are loaded together and fit into 24 GB.
GROUPS = {
    "base": (["vit-base", "augreg-base-49-224"], 224),
    "large": (["augreg-large-49-224"], 224),
    "caltech101": (["caltech101-sparseformer"], 224),
    "cifar10": (["cifar10-vit", "cifar10-sparseformer"], 32),
}
# Numbers of tokens of further int8 programs of the student that ships.
FEW_TOKENS = (16, 25, 36)
# Columns with values that do not depend on the machine.
COLUMNS = ("compared", "min_cosine", "mean_cosine", "agreement", "original_accuracy", "accuracy")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--caltech", nargs=2, required=True, metavar=("TRAIN", "TEST"), help="parquet files")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--rounds", type=int, default=10, help="passes of the largest batch (default: %(default)s)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/export"), help="default: %(default)s")
    parser.add_argument("--int8-without-speeds", action="store_true", help="see above")
    add_results_argument(parser)
    arguments = parser.parse_args()
    if arguments.int8_without_speeds:
        update_int8(arguments)
        return

    torch.manual_seed(0)
    rows = []
    for group in arguments.groups:
        names, size = GROUPS[group]
        models, programs = {name: build_model(name) for name in names}, {}
        for name, model in models.items():
            for runtime, precision in RUNTIMES:
                folder = exported(model, name, runtime, precision, arguments)
                programs[f"{name}, {runtime} {precision}"] = ExportedModule(folder)
        models = {f"{name}, pytorch": model for name, model in models.items()}
        dtypes = [torch.float32, torch.bfloat16]
        for row in measure_speeds(models, size, arguments.batch_size, dtypes, arguments.rounds, programs):
            program, measured = programs.get(row["row"]), {}
            # Agreement and accuracy are meaningful only for shipped models. Other models have random weights.
            if program and row["row"].partition(",")[0] in shipped_checkpoints():
                measured = program.report["parts"]["model"]
                measured |= accuracies(row["row"].partition(",")[0], program, arguments)
            size_in_bytes = {"bytes": program.report["bytes"] if program else None}
            rows.append(row | size_in_bytes | {column: measured.get(column) for column in COLUMNS})
    settings = {"batch_sizes": arguments.batch_size, "rounds": arguments.rounds}
    write_table(arguments.results_dir / "export.json", settings, rows)


def update_int8(arguments):
    """Measure sizes and agreement of the int8 programs of shipped models. Keep the speeds in export.json."""
    path = arguments.results_dir / "export.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    few = []
    for runtime in ("openvino", "onnx"):
        for name in ("caltech101-sparseformer", "cifar10-vit", "cifar10-sparseformer"):
            measured = measure_int8(name, runtime, arguments)
            for row in table["rows"]:
                if row["row"] == f"{name}, {runtime} int8":
                    row |= measured
        for num_tokens in FEW_TOKENS:
            measured = measure_int8("caltech101-sparseformer", runtime, arguments, num_tokens)
            few.append({"row": f"{runtime} int8", "num_tokens": num_tokens, **measured})
    table["int8"] = {
        "what": "sizes and agreement of the int8 programs of shipped models; their speeds are of an earlier export, "
        "which had other layers in float32",
        "command": shlex.join(["python", "benchmarks/export_table.py", *sys.argv[1:]]),
        **origin(),
    }
    table["few_tokens"] = few
    write_json(path, table)
    print_rows(few)


def measure_int8(name: str, runtime: str, arguments, num_tokens: int | None = None) -> dict[str, object]:
    program = ExportedModule(exported(None, name, runtime, "int8", arguments, num_tokens))
    measured = program.report["parts"]["model"] | accuracies(name, program, arguments, num_tokens)
    return {"bytes": program.report["bytes"]} | {column: measured[column] for column in COLUMNS}


def accuracies(name: str, program: ExportedModule, arguments, num_tokens: int | None = None) -> dict[str, float]:
    """Measure the accuracy of a shipped model and of its exported program on 300 test images."""
    dataset = SUBSET if name.startswith("cifar10") else arguments.caltech[1]
    images = sample(load_images(dataset, "test" if dataset == SUBSET else "train"), 300, seed=0)
    model, image_processor = load_classifier(checkpoint_path(name), "cpu")
    choose_tokens(model, num_tokens, None)
    found = {"original_accuracy": model, "accuracy": program}
    return {key: classification_accuracy(each, image_processor, images)["accuracy"] for key, each in found.items()}


def exported(model, name: str, runtime: str, precision: str, arguments, num_tokens: int | None = None) -> Path:
    tokens = [str(num_tokens)] if num_tokens else []
    folder = arguments.runs_dir / "-".join([name, *tokens, runtime, precision])
    if (folder / REPORT).is_file():
        return folder
    if name in shipped_checkpoints():
        source = checkpoint_path(name)
    else:
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
    # With --force, programs with an agreement below the limits are also written. The table has all programs.
    program = ["--format", runtime, "--precision", precision, "--output", str(folder)]
    if num_tokens:
        program += ["--num-tokens", str(num_tokens)]
    export.main(["--model", str(source), *program, "--force", *data])
    return folder


if __name__ == "__main__":
    main()
