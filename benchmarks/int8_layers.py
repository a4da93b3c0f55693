"""Layers of a model that suffer in int8: groups of layers left in float32, one at a time.

    python benchmarks/int8_layers.py

Shipped classifiers are written in int8 for each runtime: whole, with the linear layers and convolutions of one group
in float32 (`frugalvit export --float-layers`), and with all of these in float32, which shows what else a runtime
quantizes. Each program is compared with the original on test images of CIFAR-10. Writes int8_layers.json.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tqdm.auto import tqdm

from frugalvit import checkpoint_path
from frugalvit.common.choices import SUBSET
from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images, sample
from frugalvit.common.exported import REPORT, ExportedModule, Part, export_parts, parts_of
from frugalvit.common.files import write_json
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.tables import format_table
from frugalvit.export import batches_for, compare_outputs
from shared import add_results_argument, write_table


RUNTIMES = ["openvino", "onnx"]
WHOLE = {"all in int8": [], "all in float32": ["*"]}
GROUPS = {
    "cifar10-sparseformer": {
        "stem": ["*.stem"],
        "sampling points": ["*.offset_proj"],
        "changes of RoIs": ["*.roi_deltas"],
        "mixing": ["*.mixing"],
        "position encodings": ["*.position_encoding"],
        "attention": ["*.attention"],
        "mlp": ["*.mlp"],
        "transition": ["*.transition"],
        "classifier": ["classifier"],
    },
    "cifar10-vit": {
        "patch embeddings": ["*.embeddings"],
        "attention": ["*.attention"],
        "mlp": ["*.mlp"],
        "classifier": ["classifier"],
    },
    "cifar10-agent-cnn": {
        "patch embeddings": ["*.embeddings"],
        "first layers of the mlp": ["*.fc1"],
        "second layers of the mlp": ["*.fc2"],
        "mlp": ["*.mlp"],
        "classifier": ["classifier"],
    },
}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
    parser.add_argument("--images", type=int, default=1000, help="to compare on (default: %(default)s)")
    parser.add_argument("--calibration-images", type=int, default=300, help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()

    test = sample(load_images(SUBSET, "test"), arguments.images, seed=0)
    train = sample(load_images(SUBSET, "train"), arguments.calibration_images, seed=0)
    rows = []
    for name in arguments.models:
        groups = WHOLE | GROUPS[name]
        for runtime in RUNTIMES:
            for group in tqdm(groups, desc=f"{name}, {runtime}"):
                rows.append(
                    {"row": f"{name}, {runtime}, {group}", **measure(name, runtime, groups[group], test, train)}
                )
    print(format_table(rows))
    settings = {"images": len(test), "calibration_images": len(train)}
    write_table(arguments.results_dir / "int8_layers.json", settings, rows, threads=torch.get_num_threads())


def measure(name: str, runtime: str, float_layers: list[str], test: Dataset, train: Dataset) -> dict:
    """The agreement of a program with the original, and its size."""
    model, processor = load_image_classifier(checkpoint_path(name))
    parts: dict[str, Part] = parts_of(model)
    [(part_name, part)] = parts.items()
    calibration = {part_name: list(batches_for(part, processor, None, train, batch_size=1))}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        export_parts(parts, model.config, runtime, "int8", folder, calibration, float_layers)
        size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".json")
        outputs = {part_name: {"outputs": list(part(**part.example(1)))}}
        write_json(folder / REPORT, {"format": runtime, "precision": "int8", "parts": outputs})
        found = compare_outputs(part, ExportedModule(folder), batches_for(part, processor, None, test))
    return {
        "float_layers": float_layers,
        "bytes": size,
        **{name: found[name] for name in ("min_cosine", "mean_cosine", "agreement")},
    }


if __name__ == "__main__":
    main()
