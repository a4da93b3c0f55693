"""Settings for threads that wait for each other: on a machine that is idle, and on one with other work.

    python benchmarks/busy_threads.py

Each setting of OpenMP is measured in a process of its own, first on the idle machine, then beside a process for each
core that never rests: images a second of a small model (the SparseFormer for CIFAR-10) and a larger one (ViT-S/16 at
224 pixels), at inference and in training steps. `frugalvit` sets the number in `frugalvit.common.threads`. Takes about
seven minutes, in which nothing else should run. Writes busy_threads.json.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from tqdm import tqdm
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from frugalvit import checkpoint_path
from frugalvit.common.command_line import CommandParser
from frugalvit.common.tables import format_table
from shared import add_results_argument, write_table


# What a user may set, and what nobody sets.
SETTINGS = {
    "default": {},
    **{f"GOMP_SPINCOUNT={count}": {"GOMP_SPINCOUNT": str(count)} for count in (0, 2000, 20000)},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
# Model, whether it learns, images at a time. A step of the larger model with 64 images takes too long beside others.
CASES = [
    *(("small", learns, batch_size) for learns in (False, True) for batch_size in (1, 64)),
    *(("larger", False, 1), ("larger", False, 64), ("larger", True, 1)),
]
SECONDS = 2.5


def main():
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    add_results_argument(parser)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps([measure(*case) for case in CASES]))
        return

    rows = []
    for busy in (False, True):
        for setting in tqdm(arguments.settings, desc="busy" if busy else "idle"):
            with other_work() if busy else contextlib.nullcontext():
                speeds = measured(SETTINGS[setting])
            rows += [
                {
                    "setting": setting,
                    "machine": "busy" if busy else "idle",
                    "model": model,
                    "mode": "training" if learns else "inference",
                    "batch_size": batch_size,
                    "images_per_second": speed,
                }
                for (model, learns, batch_size), speed in zip(CASES, speeds, strict=True)
            ]
    print(format_table(rows))
    settings = {"seconds": SECONDS, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    write_table(arguments.results_dir / "busy_threads.json", settings, rows)


@contextlib.contextmanager
def other_work() -> Iterator[None]:
    """A process for each core that never rests."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(setting: dict[str, str]) -> list[float]:
    """Images a second of each of `CASES` in a new process with these variables, and no others of OpenMP."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, __file__, "--measure"]
    return json.loads(subprocess.run(command, env=inherited | setting, check=True, stdout=subprocess.PIPE).stdout)


def measure(name: str, learns: bool, batch_size: int) -> float:
    """Images a second of as many passes, or steps, as fit into `SECONDS`, after one that prepares."""
    torch.manual_seed(0)
    if name == "small":
        model = AutoModelForImageClassification.from_pretrained(checkpoint_path("cifar10-sparseformer"))
        pixels = 32
    else:
        sizes = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
        model, pixels = ViTForImageClassification(ViTConfig(num_labels=10, **sizes)), 224
    images, labels = torch.randn(batch_size, 3, pixels, pixels), torch.zeros(batch_size, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        model(pixel_values=images, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def look():
        with torch.inference_mode():
            model(pixel_values=images)

    run = step if learns else look
    model.train(learns)
    run()
    passes, started = 0, time.perf_counter()
    while not passes or time.perf_counter() - started < SECONDS:
        run()
        passes += 1
    return passes * batch_size / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
