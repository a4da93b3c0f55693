"""Images that `frugalvit index` and `datasets` with sentence-transformers read again after a kill, and after new
images were added.

    pip install -e ".[search]"
    python benchmarks/index_alternatives.py

A folder of embedded images is embedded by `frugalvit index`, and by `Dataset.map` around `SentenceTransformer.encode`.
Each is killed at half of them and started again, then started once more, then once more with new images. Counts are
of images that were read, not times. Writes index_alternatives.json.
"""

import argparse
import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import datasets
import torch
from sentence_transformers import SentenceTransformer

import frugalvit
from frugalvit import index
from frugalvit.common.choices import SUBSET
from frugalvit.common.command_line import CommandParser, positive
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.tables import format_table
from shared import add_results_argument, write_table


MODEL = str(frugalvit.checkpoint_path("cifar10-sparseformer-clip"))
BATCH_SIZE = 64


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=positive, default=4_096, help="default: %(default)s")
    parser.add_argument("--added", type=positive, default=64, help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    records = load_images(SUBSET, f"train[:{arguments.images + arguments.added}]")
    rows = []
    for name, run in {"frugalvit index": run_index, "datasets and sentence-transformers": run_map}.items():
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home) / "images"
            folder.mkdir()
            write_images(folder, records, range(arguments.images))
            read = [count_read(run, Path(home), kill_at=arguments.images // 2)]
            read += [count_read(run, Path(home)) for _ in range(2)]
            write_images(folder, records, range(arguments.images, arguments.images + arguments.added))
            read.append(count_read(run, Path(home)))
        titles = ("before the kill", "after it", "once more", f"with {arguments.added} new ones")
        rows.append({"by": name, **dict(zip(titles, read, strict=True))})
    print(format_table(rows))
    settings = {"images": arguments.images, "added": arguments.added, "batch_size": BATCH_SIZE}
    write_table(arguments.results_dir / "index_alternatives.json", settings, rows)


def write_images(folder: Path, records: datasets.Dataset, numbers: range):
    for number in numbers:
        decode_image(records[number]["image"], number).save(folder / f"{number:05d}.png")


def count_read(run, home: Path, kill_at: int | None = None) -> int:
    """Images that a process of its own reads until it ends, or is killed after so many."""
    counted = home / "counted"
    counted.write_bytes(b"")
    if not (child := os.fork()):
        descriptor = os.open(counted, os.O_WRONLY | os.O_APPEND)

        def note():
            os.write(descriptor, b".")
            if kill_at is not None and counted.stat().st_size >= kill_at:
                os.kill(os.getpid(), 9)

        try:
            run(home, note)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return counted.stat().st_size


def run_index(home: Path, note):
    decode_file = index.decode_file

    def decode(*arguments, **options):
        note()
        return decode_file(*arguments, **options)

    options = ["--model", MODEL, "--output", str(home / "index"), "--device", "cpu", "--num-workers", "1"]
    with patch.object(index, "decode_file", decode):
        index.main([str(home / "images"), *options, "--batch-size", str(BATCH_SIZE)])


def run_map(home: Path, note):
    searcher = SentenceTransformer(MODEL, device="cpu")

    def embed(batch: dict) -> dict:
        for _ in batch["image"]:
            note()
        return {"embedding": searcher.encode(batch["image"], normalize_embeddings=True)}

    cache = str(home / "cache")
    images = datasets.load_dataset("imagefolder", data_dir=str(home / "images"), split="train", cache_dir=cache)
    # A name, as the fingerprint of what holds a model may change from process to process.
    images.map(
        embed,
        batched=True,
        batch_size=BATCH_SIZE,
        remove_columns="image",
        new_fingerprint=f"embedded-{images._fingerprint}",
    )


if __name__ == "__main__":
    main()
