"""Measure the speed of models on a GPU, and compare the outputs of models on the GPU with their outputs on the CPU.

    python benchmarks/on_gpu.py --reference CHECKOUT --tome CHECKOUT --results-dir results

The first CHECKOUT is a clone of github.com/showlab/sparseformer. The second is a clone of
github.com/facebookresearch/ToMe. Without a clone, rows that need the clone are left out. Speeds are those of models in
bfloat16. Each section of rows has a time limit (`SECONDS`). All sections together take at most seven minutes on an
H100. on_gpu.json is written after each row. To continue, and to repeat rows that failed, run the same command again.
"""

import copy
import functools
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import datasets
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms.functional import to_pil_image

import shared
from bootstrap_speed import bootstrap_command, plain_loop
from frugalvit import PatchSparseFormerForImageClassification
from frugalvit.configuration.configuration_patch_sparseformer import Placement
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.speed import images_per_second
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import load_images
from frugalvit.training.loading import choose_device, load_model
from frugalvit.training.preprocessing import decode_image
from frugalvit.training.text import first_line
from sparseformer_speed import SIZES, check_same_logits, load_reference
from token_merging import tome


# Time limit of each section in seconds. After this time, no further row of the section is measured.
SECONDS = {"papers": 160, "student": 150, "bootstrap": 70, "agreement": 30}
# In the mode "products", only the matrix products of the linear layers are timed.
MODES = ("eager", "compiled", "products")
BATCH_SIZES = (1, 64, 256)
IMAGE_SIZE = 224
TEACHER = "checkpoints/caltech101-vit"
STUDENT = "checkpoints/caltech101-sparseformer"
COUNTS = [16, 36, 64]
# Number of timed bootstrapping steps, and number of images in a step.
STEPS = 5
STEP_SIZE = 64
DEVICE = choose_device()


class Rows:
    """Rows of a JSON file. The file is written after each row, and rows in the file are not measured again."""

    def __init__(self, file: Path):
        self.file = file
        self.end = {}
        self.rows = [row for row in shared.read_rows(file) if "error" not in row]

    def measure(self, section: str, name: str, function: Callable[..., dict], *arguments, **key):
        """Measure a row. Do nothing if the file contains the row, or if the time limit of the section is over."""
        key = {"section": section, "row": name, **key}
        end = self.end.setdefault(section, time.monotonic() + SECONDS[section])
        if time.monotonic() > end or any(key.items() <= row.items() for row in self.rows):
            return
        try:
            values = function(*arguments)
        # Too little memory or a missing package may make a row fail. Other rows must still be measured.
        except (Exception, SystemExit) as error:
            values = {"error": first_line(error)}
        self.rows.append(key | values)
        shared.save_table(self.file, {}, self.rows)
        print(self.rows[-1], flush=True)

    def measure_speeds(self, section: str, name: str, make: Callable[..., nn.Module], *arguments):
        """Measure the speed of a model in each mode and batch size. The model is built when a row needs it."""
        model = functools.cache(lambda: make(*arguments).to(DEVICE, torch.bfloat16).eval())
        for mode, batch_size in itertools.product(MODES, BATCH_SIZES):
            self.measure(section, name, speed, model, mode, batch_size, mode=mode, batch_size=batch_size)


def main():
    parser = shared.make_parser(__doc__)
    parser.add_argument("--reference", type=Path, help="clone of SparseFormer's reference implementation")
    parser.add_argument("--tome", type=Path, help="clone of ToMe")
    parser.add_argument("--only", nargs="+", choices=SECONDS, default=list(SECONDS), help="sections (default: all)")
    shared.add_results_argument(parser)
    arguments = parser.parse_args()
    rows = Rows(arguments.results_dir / "on_gpu.json")
    for section in arguments.only:
        globals()[f"measure_{section}"](rows, arguments)


def speed(make: Callable[[], nn.Module], mode: str, batch_size: int) -> dict:
    model = make()
    pixel_values = torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, device=DEVICE, dtype=torch.bfloat16)
    if mode == "compiled":
        torch.compiler.reset()
        model = torch.compile(model, mode="reduce-overhead", dynamic=False)
    elif mode == "products":
        model = shared.MatrixProducts(model, pixel_values)
    return with_memory(lambda: images_per_second({"": model}, pixel_values)[""])


def with_memory(function: Callable[..., float], *arguments) -> dict:
    """Call a function that measures images per second. Return its result and, on a GPU, the peak memory in MB."""
    if DEVICE.type != "cuda":
        return {"images_per_second": function(*arguments)}
    torch.cuda.reset_peak_memory_stats()
    speed = function(*arguments)
    return {"images_per_second": speed, "peak_memory_mb": torch.cuda.max_memory_allocated() / 1e6}


def measure_papers(rows: Rows, arguments):
    """Measure SparseFormers, their reference implementation, and ViTs with two attention implementations."""
    for variant, theirs, vit in SIZES.values():
        rows.measure_speeds("papers", variant, shared.build_model, variant)
        if arguments.reference:
            reference = functools.partial(load_reference, arguments.reference, theirs)
            rows.measure("papers", f"logits of {variant}", logits_difference, variant, reference)
            rows.measure_speeds("papers", f"{variant}, reference implementation", reference)
        for attention in ("sdpa", "flash_attention_2"):
            rows.measure_speeds("papers", f"{vit}, {attention}", vit_with, vit, attention)


def logits_difference(variant: str, reference: Callable[[], nn.Module]) -> dict:
    return {"difference": check_same_logits(shared.build_model(variant), reference())}


def vit_with(name: str, attention: str) -> nn.Module:
    model = shared.build_model(name)
    model.set_attn_implementation(attention)
    return model


def measure_student(rows: Rows, arguments):
    """Measure a teacher, the teacher with ToMe, and untrained students of the teacher."""
    teacher, _ = load_model(TEACHER, "image-classification", "cpu")
    rows.measure_speeds("student", "teacher", copy.deepcopy, teacher)
    for merged in (8, 16) if arguments.tome else ():
        rows.measure_speeds("student", f"ToMe@{merged}", tome, read_anatomy(teacher), arguments.tome, merged)
    for placement, count in itertools.product(get_args(Placement), COUNTS):
        name = f"student, {placement}, {count} tokens"
        rows.measure_speeds("student", name, student_of, teacher, placement, count)


def student_of(teacher: nn.Module, placement: str, num_tokens: int) -> nn.Module:
    fields = {"placement": placement, "elastic_token_counts": COUNTS}
    student = PatchSparseFormerForImageClassification.from_teacher(teacher, COUNTS[-1], **fields)
    student.set_num_tokens(num_tokens)
    return student


def measure_bootstrap(rows: Rows, arguments):
    noise = torch.rand(2 * STEPS * STEP_SIZE, 3, 16, 20)
    photographs = (F.interpolate(noise, size=(320, 400), mode="bicubic").clamp(0, 1) * 255).byte()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "images.parquet"))
        datasets.Dataset.from_dict({"image": [to_pil_image(each) for each in photographs]}).to_parquet(file)
        options = SimpleNamespace(teacher=TEACHER, dataset=file, batch_size=STEP_SIZE, steps=STEPS)
        for loop in (bootstrap_command, plain_loop):
            rows.measure("bootstrap", loop.__name__, with_memory, loop, options, DEVICE.type == "cuda")


def measure_agreement(rows: Rows, arguments):
    images = [decode_image(record["image"], 0) for record in load_images(SUBSET, "test[:64]")]
    for name in (STUDENT, TEACHER):
        model, image_processor = load_model(name, "image-classification", "cpu")
        pixel_values = image_processor(images, return_tensors="pt")["pixel_values"]
        for dtype in ("float32", "bfloat16"):
            rows.measure("agreement", Path(name).name, agreement, model, pixel_values, dtype, dtype=dtype)


@torch.inference_mode()
def agreement(model: nn.Module, pixel_values: torch.Tensor, dtype: str) -> dict:
    expected, there = model(pixel_values).logits, {"device": DEVICE, "dtype": getattr(torch, dtype)}
    found = copy.deepcopy(model).to(**there)(pixel_values.to(**there)).logits.float().cpu()
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    return {"min_cosine": F.cosine_similarity(found, expected).min().item(), "same_label": same}


if __name__ == "__main__":
    main()
