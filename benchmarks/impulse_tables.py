"""Initializations of attention on CIFAR-10: one command a table.

    python benchmarks/impulse_tables.py initializations   # table 2's question: the worth of a start
    python benchmarks/impulse_tables.py solvers           # solver, sharpness and values, one by one
    python benchmarks/impulse_tables.py longer            # the same after 40 epochs
    python benchmarks/impulse_tables.py settings          # table 1: positions and pooling
    python benchmarks/impulse_tables.py sizes             # table 3: widths of ViT-T and ViT-S with few and many heads
    python benchmarks/impulse_tables.py directions        # why some rows stand in another order than the paper's
    python benchmarks/impulse_tables.py convmixer         # table 4: filters that are trained, or not
    python benchmarks/impulse_tables.py heads             # tables 5 and 7: widths and heads, of depth 8
    python benchmarks/impulse_tables.py pseudo_inputs     # table 6, all nine pairs

Every row of a table has the same architecture and budget, but in "settings", "sizes" and "heads", whose rows are
architectures. The defaults are a reduced recipe (64 tokens, width 96, 4 blocks,
4 heads; 6,000 images, batches of 64, one epoch of warm-up). --paper-recipe, for an accelerator, is ViT-T or
ConvMixer-256 with patches of 2 pixels on all images, 200 or 100 epochs, batches of 512, and RandAugment of two
operations. The paper does not print the rest, which is ours: 10 epochs of warm-up, RandAugment's strength, padded
crops, flips, label smoothing of 0.1, gradients clipped at 1. The data sets of table 2:

    --dataset uoft-cs/cifar10
    --dataset uoft-cs/cifar100 --label-column fine_label
    --dataset ufldl-stanford/svhn --dataset-config cropped_digits --flip 0
    --dataset FOLDER with train/ and val/, for ImageNet-1K, with --paper-recipe (a slice of it lacks classes) and
    --config-overrides image_size=224,patch_size=16,resize_size=256 --crop resized

Runs are kept under --runs-dir and found again, so that a killed command goes on, and seeds can be run side by side
before all of them are put together. Writes impulse_TABLE.json.
"""

import argparse
import json
import statistics

from frugalvit.common.command_line import CommandParser
from frugalvit.configuration.configuration_base import VALUE_INITS
from frugalvit.training import train
from shared import (
    add_budget_arguments,
    add_data_arguments,
    add_recipe_arguments,
    add_run_arguments,
    budget_arguments,
    budget_settings,
    check_paper_recipe,
    data_arguments,
    folder_name,
    given_arguments,
    last_accuracies,
    print_rows,
    reduced_epochs,
    row_arguments,
    run_training,
    set_budget,
    wanted_rows,
    write_table,
)


def impulse(**options) -> dict:
    """A row that starts with impulses."""
    text = ",".join(
        f"{name}={json.dumps(value) if isinstance(value, list | bool) else value}" for name, value in options.items()
    )
    return {"initialization": "impulse", "initialization_options": text}


# Rows: name -> arguments of the command.
BASELINES = {
    "kaiming uniform": {"initialization": "kaiming_uniform"},
    "truncated normal": {"initialization": "trunc_normal"},
    "mimetic": {"initialization": "mimetic"},
}
# Queries and keys of one kind with values of the other: what each of the two is worth.
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
# The paper's method, as printed and bounded as in its authors' code; values are left alone.
IMPULSES_OF_PAPER = {
    name: row for name, row in IMPULSES.items() if "Algorithm 1 " in name and name.endswith("default values")
}
# The rows of tables 2, 3, 5 and 7, and ours.
ROWS = BASELINES | IMPULSES_OF_PAPER | {name: row for name, row in IMPULSES.items() if "3x3" in name and "0.2" in name}
VIT_TABLES = {
    "initializations": ROWS | CONTROLS,
    "solvers": {name: row for name, row in IMPULSES.items() if "3x3" in name}
    # The positions that the NeurIPS 2025 code solves for.
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
        )
    },
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
    # What explains that Algorithm 1 gains nothing and Kaiming uniform leads here, one change each: weights as large as
    # Kaiming uniform's of width 96 (0.02 is made for 768, and leaves values that hardly show), and fewer steps.
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
    # Without an initialization of attention: what the model's own positions and pooling are worth.
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
    },
}
CONVMIXER = {
    f"kernel {kernel_size}, {filters}": {"kernel_size": kernel_size, "spatial_filters": filters}
    for kernel_size in (3, 5, 8)
    for filters in ("trained", "random", "impulse", "signed_impulse", "box")
}


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*VIT_TABLES, "convmixer"])
    parser.add_argument("--rows", nargs="+", help="names of rows to run (default: all)")
    add_data_arguments(parser)
    add_budget_arguments(
        parser, "6000; with --paper-recipe all", "6, of longer 40; with --paper-recipe 200, of ConvMixers 100"
    )
    add_recipe_arguments(parser)
    add_run_arguments(parser, "runs/impulse_tables")
    parser.set_defaults(crop="padded", flip="0.5")
    arguments = parser.parse_args()
    check_paper_recipe(parser, arguments)
    if arguments.paper_recipe:
        set_budget(arguments, None, 100 if arguments.table == "convmixer" else 200)
    else:
        set_budget(arguments, 6000, reduced_epochs(arguments.table))

    table, rows = CONVMIXER if arguments.table == "convmixer" else VIT_TABLES[arguments.table], []
    for name in wanted_rows(arguments, table):
        results = [run(arguments, name, table[name], seed) for seed in arguments.seeds]
        losses = [result["epochs"][-1]["train_loss"] for result in results]
        rows.append({"row": name, **last_accuracies(results), "train_loss": statistics.mean(losses)})
        print_rows(rows)
    write_table(
        arguments.results_dir / f"impulse_{arguments.table}.json",
        budget_settings(arguments) | {"architecture": architecture(arguments)},
        rows,
        device=results[0]["device"],
    )


def architecture(arguments) -> str:
    """`--config-overrides` of every row."""
    if arguments.table == "convmixer":
        reduced, paper = "patch_size=4,hidden_size=96,num_hidden_layers=6", "patch_size=2,hidden_size=256"
    else:
        reduced = "patch_size=4,hidden_size=96,num_hidden_layers=4,num_attention_heads=4"
        paper = "patch_size=2,hidden_size=192,num_hidden_layers=12,num_attention_heads=3"
    sizes = paper if arguments.paper_recipe else reduced
    return ",".join(filter(None, [sizes, arguments.config_overrides]))


def run(arguments, name: str, row: dict, seed: int) -> dict:
    """Results of a row's run with a seed, trained now or before; tables share rows of one name and budget."""
    convmixer = arguments.table == "convmixer"
    overrides, extra = architecture(arguments), []
    if convmixer:
        overrides += "".join(f",{field}={value}" for field, value in row.items())
    else:
        row = dict(row)
        overrides = ",".join(filter(None, [overrides, row.pop("config_overrides", "")]))
        extra = row_arguments(row)
    extra += given_arguments(arguments, "dataset_config", "label_column")
    argv = [
        *("--seed", str(seed), *data_arguments(arguments), *budget_arguments(arguments)),
        *("--model-type", "convmixer" if convmixer else "vit_impulse_init", "--config-overrides", overrides),
        *("--batch-size", "512" if arguments.paper_recipe else "64"),
        *("--learning-rate", "0.01" if convmixer else "1e-3", "--weight-decay", "0.01"),
        *("--warmup-epochs", "10" if arguments.paper_recipe else "1"),
        *("--randaugment-layers", "2" if arguments.paper_recipe else "0", "--mixup", "0"),
        *given_arguments(arguments, "crop", "flip"),
        *extra,
    ]
    return run_training(train, arguments.runs_dir / folder_name(name, seed, argv), argv)


if __name__ == "__main__":
    main()
