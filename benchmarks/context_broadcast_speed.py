"""The cost of Context Broadcasting: a ViT-S at 224 pixels with and without, on this machine, in one run.

    python benchmarks/context_broadcast_speed.py

The models share their weights and take turns; medians of their times are compared. Writes
context_broadcast_speed.json.
"""

import argparse
import copy

import torch

from frugalvit import (
    ViTContextBroadcastConfig,
    ViTContextBroadcastForImageClassification,
    count_context_broadcast,
    count_macs,
    insert_context_broadcast,
)
from frugalvit.common.command_line import CommandParser
from frugalvit.common.speed import images_per_second
from frugalvit.common.tables import format_table
from shared import add_results_argument, write_table


KINDS = ("cb", "cb_s", "cb_gate", "cb_hybrid")


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=40, help="timed passes of each (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()

    config = ViTContextBroadcastConfig.from_variant("vit-small-plain-224")
    plain = ViTContextBroadcastForImageClassification(config).eval()
    models = {"none": plain} | {kind: copy.deepcopy(plain) for kind in KINDS}
    for kind in KINDS:
        insert_context_broadcast(models[kind], kind)
    pixel_values = torch.randn(arguments.batch_size, 3, 224, 224).to(arguments.device)
    models = {name: model.to(arguments.device) for name, model in models.items()}
    speeds = images_per_second(models, pixel_values, arguments.rounds)
    rows = [
        {
            "row": name,
            "images_per_second": speeds[name],
            "overhead": speeds["none"] / speeds[name] - 1,
            "macs": count_macs(model, 224).macs,
            "operations": count_context_broadcast(model, 224),
        }
        for name, model in models.items()
    ]
    print(format_table(rows))
    write_table(
        arguments.results_dir / "context_broadcast_speed.json",
        {"model": "vit-small-plain-224", "batch_size": arguments.batch_size, "rounds": arguments.rounds},
        rows,
        device=arguments.device,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
