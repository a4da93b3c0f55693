"""Initializations of attention on CIFAR-10: one command a table.

    python benchmarks/impulse_tables.py initializations   # table 2's question: what a start is worth
    python benchmarks/impulse_tables.py solvers           # solver, sharpness and values, one by one
    python benchmarks/impulse_tables.py pseudo_inputs     # table 6
    python benchmarks/impulse_tables.py convmixer         # table 4: filters that are trained, or not

Every row of a table has the same architecture and budget. The defaults are a reduced recipe (64 tokens, width 192, 6
blocks, 8 heads); the paper's is --paper_recipe, for an accelerator. Runs are kept under --runs_dir and found again, so
that a killed command goes on, and seeds can be run side by side before all of them are put together. Writes
results/impulse_TABLE.json.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from accelerate.state import AcceleratorState

from frugalvit.tables import format_table
from frugalvit.training import train
from frugalvit.training.data import SUBSET
from frugalvit.training.files import write_json
from frugalvit.training.loop import versions


ROOT = Path(__file__).resolve().parents[1]


def impulse(**options) -> dict:
    """A row that starts with impulses."""
    text = ",".join(
        f"{name}={json.dumps(value) if isinstance(value, list) else value}" for name, value in options.items()
    )
    return {"initialization": "impulse", "initialization_options": text}


# Rows: name -> arguments of the recipe.
VIT_TABLES = {
    "initializations": {
        "kaiming uniform": {"initialization": "kaiming_uniform"},
        "truncated normal": {"initialization": "trunc_normal"},
        "mimetic": {"initialization": "mimetic"},
        "impulse 3x3": impulse(kernel_size=3, value_init="mimetic"),
        "impulse 5x5": impulse(kernel_size=5, value_init="mimetic"),
        "impulse 3x3, default values": impulse(kernel_size=3, value_init="default"),
    },
    "solvers": {
        f"{solver}{f', mass {mass}' if mass else ''}, {values} values": impulse(
            solver=solver, value_init=values, **({"mass": mass} if mass else {})
        )
        for solver, masses in (("closed_form", (0.2, 0.5, 0.9)), ("adam", (None,)), ("pinv", (None,)))
        for mass in masses
        for values in ("mimetic", "default")
    },
    "pseudo_inputs": {
        f"{first}, then {later}; {'own' if per_layer else 'same'} weights in each layer": impulse(
            pseudo_input=[first, later], per_layer=per_layer, value_init="mimetic"
        )
        for first, later in (("pe", "pe"), ("pe+uniform", "uniform"), ("uniform", "uniform"), ("gaussian", "gaussian"))
        for per_layer in (True, False)
    },
}
CONVMIXER = {
    f"kernel {kernel_size}, {filters}": {"kernel_size": kernel_size, "spatial_filters": filters}
    for kernel_size in (3, 5, 8)
    for filters in ("trained", "random", "impulse", "box")
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*VIT_TABLES, "convmixer"])
    parser.add_argument("--rows", nargs="+", help="names of rows to run (default: all)")
    parser.add_argument("--dataset", nargs="+", default=[SUBSET], help=f"as in training (default: {SUBSET})")
    parser.add_argument("--eval_dataset", nargs="+", help="where --dataset is given as files")
    parser.add_argument("--class_names", nargs="+", help="where the data set has none")
    parser.add_argument("--images", type=int, help="training images (default: 8000 for a reduced recipe)")
    parser.add_argument("--epochs", type=int, help="default: 8; 200, of ConvMixers 100, with --paper_recipe")
    parser.add_argument("--config_overrides", default="", help="of the architecture, after the recipe's")
    parser.add_argument("--paper_recipe", action="store_true", help="ViT-T or ConvMixer-256 with patches of 2 pixels")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no", help="default: %(default)s")
    parser.add_argument("--runs_dir", type=Path, default=Path("runs/impulse_tables"), help="default: %(default)s")
    parser.add_argument("--results_dir", type=Path, default=ROOT / "results", help="default: results/")
    arguments = parser.parse_args()
    arguments.epochs = arguments.epochs or (
        (100 if arguments.table == "convmixer" else 200) if arguments.paper_recipe else 8
    )
    if arguments.images is None and not arguments.paper_recipe:
        arguments.images = 8000

    table = CONVMIXER if arguments.table == "convmixer" else VIT_TABLES[arguments.table]
    if unknown := sorted(set(arguments.rows or ()) - table.keys()):
        raise SystemExit(f"There is no row {unknown[0]!r}; the rows are: {'; '.join(table)}.")
    rows = []
    for name in arguments.rows or table:
        results = [run(arguments, name, table[name], seed) for seed in arguments.seeds]
        # Of the last epoch: choosing an epoch by its accuracy would be choosing on test images.
        accuracies = [result["epochs"][-1]["accuracy"] for result in results]
        rows.append(
            {
                "row": name,
                "accuracy": statistics.mean(accuracies),
                "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "train_loss": statistics.mean(result["epochs"][-1]["train_loss"] for result in results),
                "accuracies": accuracies,
            }
        )
        print(format_table([{k: v for k, v in row.items() if k != "accuracies"} for row in rows]), flush=True)
    write_json(
        arguments.results_dir / f"impulse_{arguments.table}.json",
        {
            "command": " ".join(["python", "benchmarks/impulse_tables.py", *sys.argv[1:]]),
            "settings": {name: getattr(arguments, name) for name in ("images", "epochs", "seeds", "mixed_precision")}
            | {"architecture": architecture(arguments)},
            "spread": "standard deviation over seeds",
            "device": results[0]["device"],
            "versions": versions(),
            "rows": rows,
        },
    )


def architecture(arguments) -> str:
    """`--config_overrides` of every row."""
    if arguments.table == "convmixer":
        sizes = "patch_size=2,hidden_size=256" if arguments.paper_recipe else "patch_size=4,hidden_size=128"
    elif arguments.paper_recipe:
        sizes = "patch_size=2,hidden_size=192,num_hidden_layers=12,num_attention_heads=3"
    else:
        sizes = "patch_size=4,hidden_size=192,num_hidden_layers=6,num_attention_heads=8"
    return ",".join(filter(None, [sizes, arguments.config_overrides]))


def run(arguments, name: str, row: dict, seed: int) -> dict:
    """Results of a row's run with a seed, trained now or before."""
    folder = arguments.runs_dir / arguments.table / f"{''.join(c if c.isalnum() else '-' for c in name)}-seed{seed}"
    convmixer = arguments.table == "convmixer"
    overrides, extra = architecture(arguments), []
    if convmixer:
        overrides += "".join(f",{field}={value}" for field, value in row.items())
    else:
        # The model's own initialization would be done twice.
        overrides += ",initialization=trunc_normal"
        extra = [text for field, value in row.items() for text in (f"--{field}", value)]
    data = ["--dataset", *arguments.dataset]
    for option in ("eval_dataset", "class_names"):
        if getattr(arguments, option):
            data += [f"--{option}", *getattr(arguments, option)]
    train.main(
        [
            *("--output_dir", str(folder), "--seed", str(seed), *data),
            *("--train_split", f"train[:{arguments.images}]" if arguments.images else "train"),
            *("--model_type", "convmixer" if convmixer else "vit_impulse_init", "--config_overrides", overrides),
            *("--epochs", str(arguments.epochs), "--batch_size", "512" if arguments.paper_recipe else "128"),
            *("--learning_rate", "0.01" if convmixer else "1e-3", "--weight_decay", "0.01"),
            *("--warmup_epochs", "10" if arguments.paper_recipe else "1"),
            *("--mixed_precision", arguments.mixed_precision),
            *("--randaugment_layers", "2" if arguments.paper_recipe else "0", "--mixup", "0"),
            *extra,
        ]
    )
    AcceleratorState._reset_state(True)
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
