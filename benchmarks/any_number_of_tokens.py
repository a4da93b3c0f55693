"""One program for any number of tokens beside programs for one number each, in each runtime that has both.

    python benchmarks/any_number_of_tokens.py --dataset PHOTOGRAPHS

`frugalvit export` writes the shipped Caltech-101 student for 64 tokens, for 16, and for all of its numbers; programs
take turns. Writes any_number_of_tokens.json.
"""

import argparse
import functools

import torch

from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.speed import images_per_second
from frugalvit.common.tables import format_table
from shared import add_results_argument, exported, write_table


MODEL = "caltech101-sparseformer"
RUNTIMES = ("openvino", "onnx")
COUNTS = (64, 16)


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="photographs, which programs are compared with the model on")
    parser.add_argument("--batch-size", type=positive, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--rounds", type=positive, default=20, help="of which the median counts (default: 20)")
    add_results_argument(parser)
    arguments = parser.parse_args()

    rows = []
    calls, sizes = {}, {}
    for runtime in RUNTIMES:
        options = ["--format", runtime, "--dataset", arguments.dataset]
        every = exported(MODEL, *options, "--num-tokens", "all")
        for count in COUNTS:
            one = exported(MODEL, *options, "--num-tokens", str(count))
            calls[runtime, count, "one"] = one
            calls[runtime, count, "any"] = functools.partial(every, num_tokens=count)
            sizes[runtime, count, "one"], sizes[runtime, count, "any"] = (
                program.report["bytes"] for program in (one, every)
            )
    for batch_size in arguments.batch_size:
        speeds = images_per_second(calls, torch.randn(batch_size, 3, 224, 224), arguments.rounds)
        for (runtime, count, numbers), speed in speeds.items():
            row = {"runtime": runtime, "tokens": count, "program_for": numbers, "batch_size": batch_size}
            rows.append(row | {"images_per_second": speed, "bytes": sizes[runtime, count, numbers]})
    print(format_table(rows))
    settings = {"model": MODEL, "rounds": arguments.rounds, "precision": "float32"}
    write_table(arguments.results_dir / "any_number_of_tokens.json", settings, rows, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
