"""Measure models on one image at a time, on a CPU.

    python benchmarks/one_image.py --tome CHECKOUT --results-dir results

CHECKOUT is a clone of github.com/facebookresearch/ToMe. The models are the teacher `caltech101-vit`, the same teacher
on smaller images, the same teacher with ToMe, and the student `caltech101-sparseformer`. Each model runs in eager mode
and with packed linear layers as in `Classifier`. The models in `EXPORTED` also run compiled, and exported to OpenVINO
and ONNX. For each model, the benchmark also measures the speed of the linear layers' matrix products without the
model's other operations, with unpacked and with packed weights. The output is one_image.json.
"""

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

from frugalvit import checkpoint_path, export
from frugalvit.baselines import WithTokens, load_teacher
from frugalvit.exported import load_classifier
from frugalvit.modeling.packing import multiply, pack_linear_layers
from frugalvit.speed import images_per_second
from frugalvit.training.choices import SUBSET
from frugalvit.training.loading import bfloat16_is_fast, load_model
from shared import MatrixProducts, add_results_argument, make_parser, write_table
from token_merging import tome


TEACHER = "caltech101-vit"
STUDENT = "caltech101-sparseformer"
SIZES = (112, 84, 56)
COUNTS = (16, 36, 64)
MERGED = (8, 16)
# Models to compile and export, by name: the model's folder and its number of tokens.
EXPORTED = {"teacher": (TEACHER, None)} | {f"student, {count} tokens": (STUDENT, count) for count in COUNTS[:2]}
FORMATS = ("openvino", "onnx")
PRODUCTS = "matrix products alone"
PACKED_PRODUCTS = "packed matrix products alone"


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--tome", help="clone of ToMe")
    parser.add_argument("--rounds", type=int, default=30, help="timed passes of each model (default: %(default)s)")
    add_results_argument(parser)
    arguments = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16) if bfloat16_is_fast() else (torch.float32,):
        timed, batches = {}, {}
        for name, (model, size) in load_models(arguments.tome).items():
            pixel_values = torch.randn(1, 3, size, size).to(dtype)
            for way, runner in ways_to_run(model.to(dtype), pixel_values, compiles=name in EXPORTED).items():
                timed[name, way] = runner
                batches[name, way] = pixel_values
        if dtype == torch.float32:
            programs = export_models()
            timed |= programs
            batches |= {(name, way): batches[name, PRODUCTS] for name, way in programs}
        speeds = images_per_second(timed, batches, arguments.rounds)
        rows += [
            {
                "model": name,
                "way": way,
                "dtype": str(dtype).removeprefix("torch."),
                "images_per_second": speed,
                "share_of_products": speed / speeds[name, PACKED_PRODUCTS if way == "packed" else PRODUCTS],
            }
            for (name, way), speed in speeds.items()
        ]
    write_table(arguments.results_dir / "one_image.json", {"batch_size": 1, "rounds": arguments.rounds}, rows)


def load_models(checkout: str | None) -> dict[str, tuple[nn.Module, int]]:
    """Return models in evaluation mode and the side of their images in pixels, by name."""
    teacher, _ = load_teacher(str(checkpoint_path(TEACHER)))
    student, _ = load_model(STUDENT, "image-classification", "cpu")
    models = {"teacher": (teacher.source, 224)}
    models |= {f"teacher, {size} pixels": (copy.deepcopy(teacher.source), size) for size in SIZES}
    models |= {f"ToMe, {merged} a block": (tome(teacher, checkout, merged), 224) for merged in MERGED if checkout}
    for count in COUNTS:
        models[f"student, {count} tokens"] = (WithTokens(copy.deepcopy(student), count), 224)
    return {name: (model.eval(), size) for name, (model, size) in models.items()}


class PackedProducts(MatrixProducts):
    """The same products with packed weights, without the checks of `PackedLinear`."""

    def forward(self, _: torch.Tensor) -> list[torch.Tensor]:
        return [multiply(given, layer.packed, layer.bias) for layer, given in self.calls]


def ways_to_run(model: nn.Module, pixel_values: torch.Tensor, compiles: bool) -> dict[str, nn.Module]:
    ways = {"eager": model, PRODUCTS: MatrixProducts(model, pixel_values)}
    packed = copy.deepcopy(model)
    if pack_linear_layers(packed):
        ways |= {"packed": packed, PACKED_PRODUCTS: PackedProducts(packed, pixel_values)}
    if compiles:
        ways["compiled"] = torch.compile(copy.deepcopy(model), dynamic=False)
    return ways


def export_models() -> dict[tuple[str, str], nn.Module]:
    programs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, count) in EXPORTED.items():
            for format in FORMATS:
                output = Path(folder, f"{name} {format}")
                # `frugalvit export` needs images to compare the program with the model. Two images suffice, because
                # this benchmark measures only speed. With `--force`, different outputs are no error.
                words = ["--model", model, "--format", format, "--output", str(output), "--dataset", SUBSET]
                words += ["--limit", "2", "--force", *(["--num_tokens", str(count)] if count else [])]
                export.main(words)
                programs[name, format] = load_classifier(output)[0]
    return programs


if __name__ == "__main__":
    main()
