"""Profile of a model's time on a CPU, by kind of operator: products, and all that lies between them.

    python benchmarks/operator_profile.py --sparseformer CHECKOUT

CHECKOUT is a clone of github.com/showlab/sparseformer, whose model of the same size runs as it is. Models have random
weights and see random images. Each precision of each model is profiled over several passes, after some to warm up; the
time of an operator is its own, without that of the operators it calls. Writes operator_profile.json.
"""

import argparse
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from frugalvit.benchmark import build_model
from frugalvit.common.choices import DTYPES
from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.tables import format_table
from shared import add_results_argument, write_table
from sparseformer_speed import SIZES, load_reference


# ATen's names of the operators of each kind.
KINDS = {
    "linear layers": ["addmm", "mm"],
    "other products": ["bmm", "baddbmm", "mkldnn_convolution"],
    "attention": ["_scaled_dot_product_flash_attention_for_cpu", "_softmax"],
    "sampling": ["grid_sampler_2d", "max_pool2d_with_indices"],
    "copies": ["copy_", "cat"],
    "norms": ["native_layer_norm", "var"],
    "activations": ["gelu", "relu", "clamp_min", "sin", "cos"],
    "additions": ["add", "add_", "sub", "mul", "div", "sum"],
}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparseformer", type=Path, required=True, help="a clone of the reference implementation")
    parser.add_argument("--size", choices=SIZES, default="base", help="default: %(default)s")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--batch-size", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--passes", type=positive, default=20, help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()

    variant, theirs, vits = SIZES[arguments.size]
    models = {name: build_model(name) for name in (variant, vits[0])}
    models["reference implementation"] = load_reference(arguments.sparseformer, theirs)
    images, rows = torch.randn(arguments.batch_size, 3, 224, 224), []
    for name, model in tqdm(models.items(), desc="models"):
        for dtype in (getattr(torch, name) for name in arguments.dtype):
            row = {"row": name, "dtype": str(dtype).removeprefix("torch.")}
            rows.append(row | measure(model.to(dtype), images.to(dtype), arguments.passes))
    print(format_table(rows))
    settings = {"batch_size": arguments.batch_size, "passes": arguments.passes}
    write_table(arguments.results_dir / "operator_profile.json", settings, rows, threads=torch.get_num_threads())


@torch.inference_mode()
def measure(model: torch.nn.Module, images: torch.Tensor, passes: int) -> dict[str, float]:
    """Milliseconds of a pass, and the share of each kind of operator in them."""
    for _ in range(3):
        model(images)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(passes):
            model(images)
    times = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    total = sum(times.values())
    shares = {
        kind: sum(times.get(f"aten::{operator}", 0) for operator in operators) / total
        for kind, operators in KINDS.items()
    }
    return {"milliseconds": total / passes / 1e3, **shares, "the rest": 1 - sum(shares.values())}


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
