"""Measure initializations of attention on CIFAR-10. Each command writes one table.

    python benchmarks/impulse_tables.py initializations   # table 2: initializations
    python benchmarks/impulse_tables.py solvers           # impulse initialization with each solver and sharpness
    python benchmarks/impulse_tables.py longer            # rows of "initializations" after 40 epochs
    python benchmarks/impulse_tables.py settings          # table 1: position embeddings and pooling
    python benchmarks/impulse_tables.py sizes             # table 3: widths of ViT-T and ViT-S with few and many heads
    python benchmarks/impulse_tables.py directions        # possible reasons for differences from the paper
    python benchmarks/impulse_tables.py convmixer         # table 4: ConvMixers with trained and frozen filters
    python benchmarks/impulse_tables.py heads             # tables 5 and 7: widths and numbers of heads, 8 blocks
    python benchmarks/impulse_tables.py pseudo_inputs     # table 6: all nine pairs of pseudo inputs
    python benchmarks/impulse_tables.py speed             # time of the closed form and of Algorithm 1, no training

Unless the name of a table or row gives another size, ViTs have 64 patches, width 96, 4 blocks and 4 heads. Models are
trained for 6 epochs on 6,000 images, in batches of 64. The first epoch is the warm-up, except in rows with "small
steps". Recipes of `frugalvit train --config` have the paper's sizes and budgets. Finished runs under --runs-dir are
reused, so an interrupted command can be repeated. Seeds can run in parallel. The output is impulse_TABLE.json.
"""

import json
import statistics
import time

import torch

from frugalvit import ViTImpulseInitConfig, ViTImpulseInitModel, impulse_init_
from frugalvit.modeling.initialization import VALUE_INITS
from frugalvit.training import train
from shared import budget_settings, last_accuracies, parse_table, run_row, wanted_rows, write_table


VIT_SIZES = "patch_size=4,hidden_size=96,num_hidden_layers=4,num_attention_heads=4"
CONVMIXER_SIZES = "patch_size=4,hidden_size=96,num_hidden_layers=6"


def impulse(**options) -> dict:
    text = ",".join(
        f"{name}={json.dumps(value) if isinstance(value, list | bool) else value}" for name, value in options.items()
    )
    return {"initialization": "impulse", "initialization_options": text}


# Arguments of `frugalvit train` for each row, by row name.
BASELINES = {
    "kaiming uniform": {"initialization": "kaiming_uniform"},
    "truncated normal": {"initialization": "trunc_normal"},
    "mimetic": {"initialization": "mimetic"},
}
# 0.059 is the standard deviation of Kaiming uniform initialization at width 96.
LARGER = "truncated normal, weights of std 0.059"
# In these controls, the initialization of values differs from the initialization of queries and keys.
CONTROLS = {
    "truncated normal, mimetic values": {
        "initialization": "trunc_normal",
        "initialization_options": "value_init=mimetic",
    },
    "mimetic, default values": {"initialization": "mimetic", "initialization_options": "value_init=default"},
}
RANDOM = {"config_overrides": "position_embedding=random"}
METHODS = {
    "Algorithm 1 as printed": {"solver": "adam"},
    "Algorithm 1 bounded": {"solver": "adam_bounded"},
    "closed form, maps of Algorithm 1": {"solver": "closed_form", "mass": "null"},
    "closed form, mass 0.1": {"solver": "closed_form", "mass": 0.1},
    "closed form, mass 0.2": {"solver": "closed_form", "mass": 0.2},
    "closed form, mass 0.5": {"solver": "closed_form", "mass": 0.5},
    "closed form, mass 0.9": {"solver": "closed_form", "mass": 0.9},
    "pseudo-inverse": {"solver": "pinv"},
}
IMPULSES = {
    f"impulse {side}x{side}, {method}, {values} values": impulse(**options, kernel_size=side, value_init=values)
    for side in (3, 5)
    for method, options in METHODS.items()
    for values in VALUE_INITS
}
# Algorithm 1 as printed in the paper, and with bounded weights as in the authors' code. In all these rows, values have
# the default initialization.
IMPULSES_OF_PAPER = {
    name: row for name, row in IMPULSES.items() if "Algorithm 1 " in name and name.endswith("default values")
}
# Initializations that are compared for tables 2, 3, 5 and 7 of the paper.
ROWS = BASELINES | IMPULSES_OF_PAPER | {name: row for name, row in IMPULSES.items() if "3x3" in name and "0.2" in name}
VIT_TABLES = {
    "initializations": ROWS | CONTROLS,
    "solvers": {name: row for name, row in IMPULSES.items() if "3x3" in name}
    # In the code of the NeurIPS 2025 paper, queries and keys are computed from random position embeddings.
    | {
        f"random positions, {name}": RANDOM | row
        for name, row in (BASELINES | IMPULSES).items()
        if name == "truncated normal" or "3x3, pseudo-inverse" in name
    },
    "longer": {
        name: (ROWS | CONTROLS)[name]
        for name in (
            "truncated normal",
            "impulse 3x3, Algorithm 1 as printed, default values",
            "impulse 3x3, Algorithm 1 bounded, default values",
            "impulse 3x3, closed form, mass 0.2, mimetic values",
            "truncated normal, mimetic values",
            "mimetic",
            "kaiming uniform",
        )
    }
    | {LARGER: BASELINES["truncated normal"] | {"config_overrides": "initializer_range=0.059"}},
    "pseudo_inputs": {
        f"{first}, then {later}; {'own' if per_layer else 'same'} weights; {side}x{side}, {heads} heads": {
            "config_overrides": f"num_attention_heads={heads}"
        }
        | impulse(
            solver="adam_bounded",
            kernel_size=side,
            pseudo_input=[first, later],
            per_layer=per_layer,
            value_init="default",
        )
        for first in ("pe", "uniform", "pe+uniform")
        for later in ("pe", "uniform", "pe+uniform")
        for per_layer in (False, True)
        for heads in (3, 8)
        for side in (3, 5)
    },
    # Here, unlike in the paper, Algorithm 1 does not help and Kaiming uniform is best. Two possible reasons
    # are tested. The first is a small standard deviation of weights: 0.02 by default, and 0.059 for Kaiming uniform.
    # The second is too many steps of Algorithm 1.
    "directions": {
        name: row
        for base in ("truncated normal", "impulse 3x3, Algorithm 1 bounded, default values")
        for name, row in {
            base: ROWS[base],
            f"{base}, weights of std 0.059": ROWS[base] | {"config_overrides": "initializer_range=0.059"},
        }.items()
    }
    | {
        f"impulse 3x3, Algorithm 1 as printed, {steps:,} steps": impulse(
            solver="adam", steps=steps, kernel_size=3, value_init="default"
        )
        for steps in (300, 1000, 3000)
    },
    "settings": {
        f"{'learned' if positions == 'learned' else 'sinusoidal'} positions, "
        f"{'classification token' if pooling == 'cls' else 'average pooling'}": {
            "config_overrides": f"position_embedding={positions},pooling={pooling}",
            "initialization": "trunc_normal",
        }
        for positions in ("learned", "sincos")
        for pooling in ("cls", "mean")
    },
    "sizes": {
        f"{size}, {name}": {"config_overrides": f"hidden_size={width},num_attention_heads={heads}"} | row
        for size, width, heads in (("T/h3", 192, 3), ("T/h8", 192, 8), ("S/h6", 384, 6), ("S/h16", 384, 16))
        for name, row in ROWS.items()
    },
    "heads": {
        f"width {width}, {heads} heads, {name}": {
            "config_overrides": f"hidden_size={width},num_hidden_layers=8,num_attention_heads={heads}"
        }
        | row
        for width in (64, 128, 256, 512)
        for heads in (4, 8, 16, 32)
        for name, row in ROWS.items()
    }
    | {
        f"width 256, 4 heads, {name}, small steps": row
        | {"learning_rate": 3e-4, "warmup_epochs": 3}
        | {"config_overrides": "hidden_size=256,num_hidden_layers=8,num_attention_heads=4"}
        for name, row in ROWS.items()
    },
}
CONVMIXER = {
    f"kernel {kernel_size}, {filters}": {"kernel_size": kernel_size, "spatial_filters": filters}
    for kernel_size in (3, 5, 8)
    for filters in ("trained", "random", "impulse", "signed_impulse", "box")
}

# Model variants of the table "speed", by row name. All variants have 12 layers. Images of 32 x 32 pixels have patches
# of 2 x 2 pixels, and images of 224 x 224 pixels have patches of 16 x 16 pixels.
SPEEDS = {
    f"{variant}, {grid} x {grid}": f"{variant}-{pixels}"
    for variant in ("vit-tiny-h3", "vit-tiny-h8", "vit-small-h6", "vit-small-h16")
    for grid, pixels in ((16, 32), (14, 224))
}
# Number of steps of Algorithm 1, as in the paper.
STEPS = 10_000
# The closed form is timed this many times, and the table has the median.
REPEATS = 5


def main():
    arguments = parse_table(__doc__, [*VIT_TABLES, "convmixer", "speed"], 6000, "runs/impulse_tables")
    if arguments.table == "speed":
        rows = [measure_speed(name) for name in wanted_rows(arguments, SPEEDS)]
        settings = {"steps": STEPS, "repeats": REPEATS, "adam_seconds": "time of one layer times 12"}
        write_table(arguments.results_dir / "impulse_speed.json", settings, rows)
        return

    table = CONVMIXER if arguments.table == "convmixer" else VIT_TABLES[arguments.table]
    architecture = CONVMIXER_SIZES if arguments.table == "convmixer" else VIT_SIZES
    settings, rows = budget_settings(arguments) | {"architecture": architecture}, []
    for name in wanted_rows(arguments, table):
        results = [run(arguments, name, table[name], seed) for seed in arguments.seeds]
        losses = [result["loss"] for result in results]
        rows.append({"row": name, **last_accuracies(results), "train_loss": statistics.mean(losses)})
        write_table(arguments.results_dir / f"impulse_{arguments.table}.json", settings, rows)


def run(arguments, name: str, row: dict, seed: int) -> dict:
    """Train a row's model with one seed, or reuse the finished run. Return the results of the run."""
    options = {"per_device_train_batch_size": 64, "weight_decay": 0.01, "warmup_epochs": 1, "mixup": 0}
    options |= {"randaugment_layers": 0}
    if arguments.table == "convmixer":
        overrides = ",".join([CONVMIXER_SIZES, *(f"{field}={value}" for field, value in row.items())])
        options |= {"model_type": "convmixer", "config_overrides": overrides, "learning_rate": 0.01}
    else:
        overrides = ",".join(filter(None, [VIT_SIZES, row.get("config_overrides")]))
        options |= {"model_type": "vit_impulse_init", "learning_rate": 1e-3} | row | {"config_overrides": overrides}
    return run_row(arguments, train, name, seed, options)[1]


def measure_speed(name: str) -> dict:
    """Measure the time of impulse initialization by each solver. The closed form is timed twice: once with the default
    `mass`, and once for attention maps that are as sharp as those of Algorithm 1. Algorithm 1 is timed for one layer,
    and this time is multiplied by 12."""
    config = ViTImpulseInitConfig.from_variant(SPEEDS[name], initialization="trunc_normal")
    measured = {"same_maps": timed(config, REPEATS, mass=None), "default": timed(config, REPEATS)}
    config.num_hidden_layers = 1
    seconds, report = timed(config, 1, solver="adam", steps=STEPS)
    measured["adam"] = 12 * seconds, report
    row = {"row": name, "times_faster": measured["adam"][0] / measured["same_maps"][0]}
    for solver, (seconds, report) in measured.items():
        numbers = ("peak_rate", "mass", "error", "query_norm", "key_norm")
        row |= {f"{solver}_seconds": seconds} | {f"{solver}_{number}": report.mean(number) for number in numbers}
    return row


def timed(config: ViTImpulseInitConfig, repeats: int, **options):
    """Initialize a model several times. Return the median time in seconds, and the report that `impulse_init_` returns
    for the last model."""
    seconds = []
    for repeat in range(repeats):
        model = ViTImpulseInitModel(config)
        start = time.perf_counter()
        report = impulse_init_(model, generator=torch.Generator().manual_seed(repeat), **options)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), report


if __name__ == "__main__":
    main()
