"""One photograph at a time, and few: images a second of a student with packed linear layers, without, and exported.

    python benchmarks/one_at_a_time.py --dataset PHOTOGRAPHS [--calibration-data OTHERS]

The shipped `caltech101-vit` and its student with several numbers of tokens compute batches of 1, 8 and 32 images, in
float32 and bfloat16: as PyTorch has them, with `pack_linear_layers`, which `Embedder` and `Classifier` use, and as
OpenVINO's programs of `frugalvit export`, one for each number of tokens, compared with the models on the photographs;
beside bfloat16 those of 8 bits, too, if there are photographs to calibrate them. All take turns. "Times" are over the
teacher as PyTorch has it, which a user has now, and over the same kind's teacher. Beside them stands the ratio of
multiply-accumulates. Writes one_at_a_time.json.
"""

import argparse
import copy
import functools

import torch

from frugalvit import checkpoint_path
from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.macs import macs_of
from frugalvit.common.num_tokens import WithTokens
from frugalvit.common.packing import pack_linear_layers
from frugalvit.common.speed import images_per_second
from frugalvit.common.tables import format_table
from shared import add_results_argument, exported, write_table


TEACHER, STUDENT = "caltech101-vit", "caltech101-sparseformer"
SIZE = 224


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[64, 36, 16, 9], help="default: 64 36 16 9")
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--seconds", type=positive, default=40, help="of each batch size (default: %(default)s)")
    parser.add_argument("--dataset", required=True, help="photographs to compare programs on")
    parser.add_argument("--calibration-data", help="other photographs, for programs of 8 bits (default: none)")
    add_results_argument(parser)
    arguments = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        plain = [load_image_classifier(checkpoint_path(name), "cpu")[0].to(dtype) for name in (TEACHER, STUDENT)]
        packed = copy.deepcopy(plain)
        layers = sum(map(pack_linear_layers, packed))
        precision, macs = str(dtype).removeprefix("torch."), {None: macs_of(plain[0], SIZE)}
        calls = {("plain", None): plain[0], ("packed", None): packed[0]}
        openvino = ["--format", "openvino", "--dataset", arguments.dataset, "--force"]
        programs = {"openvino": [*openvino, "--precision", precision]}
        if dtype == torch.bfloat16 and arguments.calibration_data:
            int8 = ["--precision", "int8", "--calibration-data", arguments.calibration_data]
            programs["openvino int8"] = [*openvino, *int8]
        for kind, options in programs.items():
            calls[kind, None] = exported(TEACHER, *options)
        for count in arguments.tokens:
            macs[count] = macs_of(WithTokens(plain[1], count), SIZE)
            for kind, (_, student) in {"plain": plain, "packed": packed}.items():
                calls[kind, count] = functools.partial(student, num_tokens=count)
            for kind, options in programs.items():
                calls[kind, count] = exported(STUDENT, *options, "--num-tokens", str(count))
        for batch_size in arguments.batch_sizes:
            images = torch.randn(batch_size, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
            speeds = images_per_second(calls, images, rounds=100, limit=arguments.seconds)
            rows += [
                {
                    **{"dtype": precision, "batch_size": batch_size, "kind": kind},
                    **{"tokens": count or "teacher", "images_per_second": speed},
                    "times_plain_teacher": speed / speeds["plain", None],
                    "times_own_teacher": speed / speeds[kind, None],
                    "times_fewer_macs": macs[None] / macs[count],
                }
                for (kind, count), speed in speeds.items()
            ]
            print(format_table(rows[-len(speeds) :]), flush=True)
    settings = {"packed_layers": layers, "seconds": arguments.seconds, "threads": torch.get_num_threads()}
    write_table(arguments.results_dir / "one_at_a_time.json", settings, rows)


if __name__ == "__main__":
    main()
