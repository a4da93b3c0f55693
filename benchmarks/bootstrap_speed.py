"""Compare the speed of `frugalvit bootstrap` with a plain training loop for the reference implementation.

    python benchmarks/bootstrap_speed.py --sparseformer CHECKOUT --dataset IMAGES

CHECKOUT is a clone of github.com/showlab/sparseformer. The student is a SparseFormer-B with 49 tokens, and the teacher
is a ViT-B/16. Both have random weights. The plain loop crops, flips and normalizes images with torchvision, and its
teacher is timm's ViT. In each round, each of the two trainings runs in a new process. The medians of all rounds are
written to bootstrap_speed.json.
"""

import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from frugalvit import bootstrap
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training.data import load_images
from frugalvit.training.loading import choose_device
from shared import Views, add_results_argument, cropped, make_parser, write_table
from sparseformer_speed import load_reference


TEACHER = ViTConfig(num_labels=1000)
# The plain loop freezes as many inherited blocks as `frugalvit bootstrap`: four of eight.
FROZEN = 4


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--sparseformer", type=Path, required=True, help="a clone of the reference implementation")
    parser.add_argument("--dataset", nargs="+", required=True, help="images to train on, as in `frugalvit bootstrap`")
    parser.add_argument("--split", default="train", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after as many more (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        save_teacher(folder / "teacher")
        images = load_images(arguments.dataset, arguments.split).select_columns(["image"])
        if len(images) < 2 * arguments.steps * arguments.batch_size:
            parser.error(f"--dataset has {len(images)} images, too few for {2 * arguments.steps} steps")
        images.to_parquet(folder / "images.parquet")
        arguments.dataset = str(folder / "images.parquet")
        rows = {"plain loop": plain_loop, "frugalvit bootstrap": bootstrap_command}
        measured = {name: [] for name in rows}
        for _ in range(arguments.rounds):
            for name, function in rows.items():
                measured[name].append(in_process(function, arguments, folder))
    table = []
    for name, results in measured.items():
        speed = statistics.median(speed for speed, _ in results)
        first = table[0]["images_per_second"] if table else speed
        peak = statistics.median(peak for _, peak in results)
        table.append({"row": name, "images_per_second": speed, "times_first": speed / first, "peak_memory_mb": peak})
    settings = {name: getattr(arguments, name) for name in ("batch_size", "steps", "rounds")}
    write_table(arguments.results_dir / "bootstrap_speed.json", settings, table)


def save_teacher(folder: Path):
    ViTForImageClassification(TEACHER).save_pretrained(folder)
    ViTImageProcessor().save_pretrained(folder)


def in_process(function, *arguments) -> tuple[float, float]:
    """Run a function in a new process. Return its result (images per second) and the peak memory in MB."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(with_peak, function, *arguments).result()


def with_peak(function, *arguments) -> tuple[float, float]:
    speed = function(*arguments)
    return speed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bootstrap_command(arguments, folder: Path) -> float:
    """Run `frugalvit bootstrap`. Return the images per second during the second half of the steps."""
    output = Path(tempfile.mkdtemp(dir=folder))
    bootstrap(
        str(folder / "teacher"),
        arguments.dataset,
        num_tokens=48,
        focusing="paper",
        output=output,
        eval_split="none",
        per_device_train_batch_size=arguments.batch_size,
        bf16=choose_device().type == "cuda",
        max_steps=2 * arguments.steps,
        logging_steps=arguments.steps,
        load_best_model_at_end=False,
        save_strategy="no",
    )
    log = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [record["images_per_second"] for record in log if "loss" in record][-1]


def plain_loop(arguments, folder: Path) -> float:
    """Run the plain training loop. Return the images per second during the second half of the steps."""
    import timm

    device = choose_device()
    teacher = timm.create_model("vit_base_patch16_224").eval().to(device)
    student = load_reference(arguments.sparseformer, "sparseformer_btsp_augreg_base").train().to(device)
    for part in (student.layers[-FROZEN:], student.norm, student.proj):
        part.requires_grad_(False)
    student.proj = torch.nn.Identity()
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=2e-4)
    images = Views(load_images(arguments.dataset), cropped(ImageFormat((224, 224)), (0.5, 1.0)))
    loader = DataLoader(images, arguments.batch_size, shuffle=True, drop_last=True)
    seconds = 0.0
    start = time.perf_counter()
    for step, batch in zip(range(2 * arguments.steps), loader, strict=False):
        pixel_values = batch["pixel_values"].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            with torch.no_grad():
                target = teacher.forward_head(teacher.forward_features(pixel_values), pre_logits=True)
            loss = (1 - F.cosine_similarity(student(pixel_values), target)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if step >= arguments.steps:
            seconds += time.perf_counter() - start
        start = time.perf_counter()
    return arguments.steps * arguments.batch_size / seconds


if __name__ == "__main__":
    main()
