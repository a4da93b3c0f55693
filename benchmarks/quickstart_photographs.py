"""The photographs of `frugalvit quickstart`, drawn from Caltech-101 at random: those to learn from without labels.

    python benchmarks/quickstart_photographs.py --train TRAIN --test TEST

It writes train.parquet and test.parquet into training/caltech101/. Files of images are taken as they are.
"""

import argparse
from pathlib import Path

import datasets

from frugalvit.common.command_line import CommandParser
from frugalvit.common.data import load_images, sample
from frugalvit.common.files import whole_file
from shared import ROOT


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="parquet file or folder of training images")
    parser.add_argument("--test", required=True, help="of test images")
    parser.add_argument("--unlabeled", type=int, default=960, help="drawn from --train (default: %(default)s)")
    parser.add_argument("--held-back", type=int, default=300, help="drawn from --test (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT / "training" / "caltech101", help="default: %(default)s")
    arguments = parser.parse_args()
    parts = {
        "train": sample(load_images([arguments.train], "train"), arguments.unlabeled, arguments.seed),
        "test": sample(load_images([arguments.test], "train"), arguments.held_back, arguments.seed),
    }
    parts["train"] = parts["train"].select_columns("image")
    for name, images in parts.items():
        with whole_file(arguments.output / f"{name}.parquet") as aside:
            images.cast_column("image", datasets.Image()).to_parquet(aside)
        print(
            f"{name}: {len(images)} photographs, {(arguments.output / f'{name}.parquet').stat().st_size / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
