"""Time and result of impulse initialization: the closed form against Algorithm 1, in one run.

    python benchmarks/impulse_speed.py

Algorithm 1 takes the paper's 10,000 steps for one layer, its time for all layers is that times their number: every
layer is the same problem. The closed form is solved for the maps that Algorithm 1 reaches, which "times_faster" is
for, and for the default mass. Writes impulse_speed.json.
"""

import argparse
import time

import torch
from tqdm import tqdm

from frugalvit import ViTImpulseInitConfig, ViTImpulseInitModel, impulse_init_
from frugalvit.common.command_line import CommandParser
from frugalvit.common.tables import format_table
from shared import add_results_argument, write_table


VARIANTS = ("vit-tiny-h3", "vit-tiny-h8", "vit-small-h6", "vit-small-h16")
# Patches of 2 pixels at 32, 16 at 224.
GRIDS = {"16x16": "32", "14x14": "224"}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS, help="default: all")
    parser.add_argument("--grids", nargs="+", default=list(GRIDS), choices=GRIDS, help="default: all")
    parser.add_argument("--steps", type=int, default=10_000, help="of Algorithm 1 (default: the paper's 10,000)")
    parser.add_argument("--repeats", type=int, default=5, help="of the closed form, the median counts (default: 5)")
    add_results_argument(parser)
    arguments = parser.parse_args()

    cases = [(variant, grid) for variant in arguments.variants for grid in arguments.grids]
    rows = []
    for variant, grid in tqdm(cases, desc="models"):
        config = ViTImpulseInitConfig.from_variant(f"{variant}-{GRIDS[grid]}", initialization="trunc_normal")
        measured = {
            "same_maps": timed(config, arguments.repeats, mass=None),
            "default": timed(config, arguments.repeats),
        }
        config.num_hidden_layers = 1
        adam_seconds, report = timed(config, 1, solver="adam", steps=arguments.steps)
        measured["adam"] = (12 * adam_seconds, report)
        row = {
            "model": variant,
            "grid": grid,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "times_faster": measured["adam"][0] / measured["same_maps"][0],
        }
        for name, (seconds, report) in measured.items():
            numbers = ("peak_rate", "mass", "error", "query_norm", "key_norm")
            row |= {f"{name}_seconds": seconds} | {f"{name}_{number}": report.mean(number) for number in numbers}
        rows.append(row)
    print(format_table(rows))
    write_table(
        arguments.results_dir / "impulse_speed.json",
        {"steps": arguments.steps, "repeats": arguments.repeats},
        rows,
        threads=torch.get_num_threads(),
        adam_seconds="time of one layer times 12",
    )


def timed(config: ViTImpulseInitConfig, repeats: int, **options):
    """Median seconds of an initialization of the whole model, and its last report."""
    seconds = []
    for repeat in range(repeats):
        model = ViTImpulseInitModel(config)
        start = time.perf_counter()
        report = impulse_init_(model, generator=torch.Generator().manual_seed(repeat), **options)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2], report


if __name__ == "__main__":
    main()
