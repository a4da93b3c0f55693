"""What a student with an inherited start adds to its teacher on smaller images, which is what it computes.

    python benchmarks/small_images.py train --teacher checkpoints/caltech101-vit --train TRAIN --test TEST
    python benchmarks/small_images.py processing --test TEST

`train` sets four METHODS side by side, of one teacher and on the same views, each seen once: the teacher as it is with
images of --sizes pixels; fine-tuned at each size with labels; fine-tuned at each size to its own embedding at full
size, without labels; and one SparseFormer for all sizes, bootstrapped without labels. The first three are of the
teacher's own class, in a plain loop. Learning rates are those of bootstrapping an inherited start, and --label-rates.
Rows are written one by one to small_images_DATA.json, and a run goes on where it stopped. `processing` compares the
shipped student with itself as a plain ViT, whose image processor resizes photographs once (plain_vit.json).
"""

import copy
import dataclasses
import json
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from caltech101 import BATCH_SIZE, accuracy_of, outputs_for, run_command
from torch import nn
from torchvision.transforms import v2
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from frugalvit import PatchSparseFormerForImageClassification, checkpoint_path
from frugalvit.baselines import load_teacher
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.loading import choose_device, load_image_classifier
from frugalvit.common.views import ImageFormat
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.training.augmentation import seeded
from shared import add_precision_argument, add_run_arguments, make_parser, write_table


METHODS = ("as it is", "with labels", "to its embedding", "one SparseFormer")
# Bootstrapping's for an inherited start.
RATE, WARMUP, WEIGHT_DECAY, CROP_SCALE = 2e-5, 0.05, 0.05, (0.5, 1.0)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--teacher", help="folder of an image classifier")
    parser.add_argument("--train", help="parquet file or folder of training images")
    parser.add_argument("--test", help="of test images")
    parser.add_argument("--title", default="Caltech-101", help="name of the data (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[112, 84, 56], help="default: 112 84 56")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--label-rates", type=float, nargs="+", default=[RATE, 1e-4], help="default: 2e-5 1e-4")
    parser.add_argument("--steps", type=int, default=109, help=f"of {BATCH_SIZE} views (default: %(default)s)")
    add_precision_argument(parser, "no")
    add_run_arguments(parser, "runs/small-images")
    parser.set_defaults(seeds=[0])
    run_command(parser, COMMANDS)


def train_all(arguments):
    """Train and measure each row that is not in the table yet."""
    file = arguments.results_dir / f"small_images_{arguments.title.lower().replace('-', '')}.json"
    rows = json.loads(file.read_text("utf-8"))["rows"] if file.is_file() else []
    settings = {name: getattr(arguments, name) for name in ("steps", "seeds", "mixed_precision")}
    for seed in arguments.seeds:
        views = teachers_views(arguments, seed)
        for method in arguments.methods:
            rates = {METHODS[0]: [0.0], METHODS[1]: arguments.label_rates}.get(method, [RATE])
            groups = [arguments.sizes] if method in (METHODS[0], METHODS[3]) else [[size] for size in arguments.sizes]
            for rate, sizes in ((rate, sizes) for rate in rates for sizes in groups):
                about = {"method": method, "rate": rate, "seed": seed, "views": arguments.steps * BATCH_SIZE}
                done = [row["pixels"] for row in rows if about.items() <= row.items()]
                if not {*sizes} <= {*done}:
                    rows += [about | row for row in train_one(arguments, method, rate, sizes, views)]
                    write_table(file, settings, rows, data=arguments.title)


def teachers_views(arguments, seed: int) -> dict[str, torch.Tensor]:
    """Random crops and flips of training images, uint8, with labels and the teacher's embeddings, kept in a file."""
    file = arguments.runs_dir / f"{arguments.title.lower()}-{arguments.steps}steps-seed{seed}.pt"
    if file.is_file():
        return torch.load(file, mmap=True)
    teacher, processor = load_teacher(arguments.teacher, str(choose_device()))
    image_format = ImageFormat.from_processor(processor)
    draw = v2.Compose(
        [
            v2.RandomResizedCrop(image_format.size, CROP_SCALE, interpolation=image_format.interpolation),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]
    )
    images = load_images([arguments.train], "train")
    generator = torch.Generator().manual_seed(seed)
    passes = math.ceil(arguments.steps * BATCH_SIZE / len(images))
    order = torch.cat([torch.randperm(len(images), generator=generator) for _ in range(passes)])
    views = {"pixels": [], "labels": [], "embeddings": []}
    for step in tqdm(range(arguments.steps), desc="teacher"):
        indices = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE].tolist()
        with seeded(seed, step):
            pixels = torch.stack([draw(decode_image(images[index]["image"], index)) for index in indices])
        with torch.no_grad(), precision(arguments):
            embeddings = teacher.embed(image_format.normalize(pixels.to(choose_device()))).float().cpu()
        for name, values in zip(views, (pixels, torch.tensor(images[indices]["label"]), embeddings), strict=True):
            views[name].append(values)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: torch.stack(values) for name, values in views.items()}, file)
    return torch.load(file, mmap=True)


def precision(arguments) -> torch.autocast:
    return torch.autocast(choose_device().type, torch.bfloat16, enabled=arguments.mixed_precision == "bf16")


def train_one(arguments, method: str, rate: float, sizes: list[int], views: dict) -> list[dict]:
    """Train a model by one of `METHODS`, and return its accuracy for images of each size."""
    anatomy, processor = load_teacher(arguments.teacher, str(choose_device()))
    image_format, model = ImageFormat.from_processor(processor), copy.deepcopy(anatomy.source)
    counts = {size: math.prod(size // side for side in anatomy.patch_size) for size in sizes}
    if method == METHODS[3]:
        model = PatchSparseFormerForImageClassification.from_teacher(
            anatomy, max(counts.values()), elastic_token_counts=sorted(counts.values()), image_processor=processor
        ).to(choose_device())

    def calls(size: int) -> tuple[Callable, Callable]:
        """Functions of images of full size that return the embedding and the logits of smaller ones."""
        if method == METHODS[3]:
            embed = lambda images: model.base_model(images, num_tokens=counts[size]).pooler_output  # noqa: E731
            return embed, lambda images: model(images, num_tokens=counts[size]).logits
        small = read_anatomy(model, (size, size))
        resize = lambda images: F.interpolate(images, (size, size), mode="bilinear", antialias=True)  # noqa: E731
        return (lambda images: small.embed(resize(images))), lambda images: small.run_classifier(resize(images))

    functions = {size: calls(size) for size in sizes}
    if rate:
        with_labels = method == METHODS[1]
        model.train().requires_grad_(True).classifier.requires_grad_(with_labels)
        outputs = {size: each[with_labels] for size, each in functions.items()}
        fit(arguments, model, rate, views, image_format, outputs, with_labels)
    model.eval()
    rows = []
    for size, (_, classify) in functions.items():
        logits, labels = outputs_for(arguments, classify, image_format)
        rows.append({"pixels": size, "tokens": counts[size], "accuracy": accuracy_of(logits, labels)})
    return rows


def fit(arguments, model: nn.Module, rate: float, views: dict, image_format, calls: dict, with_labels: bool):
    """Take a step on each batch of views, by all sizes."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    spared = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": spared, "weight_decay": 0.0}]
    optimizer, steps = torch.optim.AdamW(groups, lr=rate), len(views["pixels"])
    schedule = get_cosine_schedule_with_warmup(optimizer, round(WARMUP * steps), steps)
    for step in tqdm(range(steps), desc=f"{rate:g}"):
        pixels = image_format.normalize(views["pixels"][step].to(choose_device()))
        losses = []
        for call in calls.values():
            with precision(arguments):
                outputs = call(pixels).float()
            if with_labels:
                losses.append(F.cross_entropy(outputs, views["labels"][step].to(outputs.device)))
            else:
                targets = views["embeddings"][step].to(outputs.device)
                losses.append(1 - F.cosine_similarity(outputs, targets).mean())
        sum(losses).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@torch.no_grad()
def measure_processing(arguments):
    """Compare the shipped student with its plain ViTs, whose processors resize as `frugalvit export` writes them."""
    model, processor = load_image_classifier(checkpoint_path("caltech101-sparseformer"), "cpu")
    image_format, rows = ImageFormat.from_processor(processor), []
    for size in arguments.sizes:
        count = (size // model.config.feature_stride[0]) ** 2
        host = model.to_plain_vit(count)
        resize = round(image_format.resize * size / image_format.size[0])
        smaller = dataclasses.replace(image_format, size=(size, size), resize=resize, resample=2)
        logits, labels = outputs_for(arguments, lambda x, count=count: model(x, num_tokens=count).logits, image_format)
        plain, _ = outputs_for(arguments, lambda x, host=host: host(x).logits, smaller)
        rows.append(
            {
                "tokens": count,
                "pixels": size,
                "accuracy": accuracy_of(logits, labels),
                "plain_accuracy": accuracy_of(plain, labels),
                "same_label": accuracy_of(plain, logits.argmax(1)),
                "cosine": F.cosine_similarity(plain, logits).mean().item(),
            }
        )
        write_table(arguments.results_dir / "plain_vit.json", {"images": len(labels)}, rows, data="Caltech-101")


COMMANDS = {"train": (train_all, ("teacher", "train", "test")), "processing": (measure_processing, ("test",))}


if __name__ == "__main__":
    main()
