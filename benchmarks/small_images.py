"""Compare the accuracy of a SparseFormer that inherits a teacher's weights, and of the teacher on small images.

    python benchmarks/small_images.py train --teacher checkpoints/caltech101-vit --train TRAIN --test TEST
    python benchmarks/small_images.py processing --test TEST

`train` compares four METHODS for one teacher on the same views:

- the teacher without fine-tuning, on images of --sizes pixels;
- the teacher, fine-tuned with labels on images of each size;
- the teacher, fine-tuned without labels on images of each size. The target is the original teacher's embedding of
  the full-size image;
- one SparseFormer for all sizes, trained to the same target without labels.

Fine-tuning is repeated for each learning rate of --rates. The SparseFormer uses the learning rate of inherited weights
in bootstrapping. small_images_DATA.json is written after each row, so an interrupted command can be repeated.
`processing` compares the shipped student with its exports as plain ViTs. The image processors of these exports resize
photographs directly to a small size. The output is plain_vit.json.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from caltech101 import accuracy_of, file_name, outputs_for, pooled, run_command
from torchvision.transforms import InterpolationMode

from frugalvit import PatchSparseFormerForImageClassification, checkpoint_path
from frugalvit.baselines import load_teacher
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training.data import load_images
from frugalvit.training.loading import choose_device, load_model
from shared import add_precision_argument, add_run_arguments, make_parser, read_rows, write_table
from token_merging import fit


AS_IT_IS = "as it is"
WITH_LABELS = "with labels"
STUDENT = "one SparseFormer"
METHODS = (AS_IT_IS, WITH_LABELS, "to its embedding", STUDENT)
# Learning rate of inherited weights in bootstrapping.
RATE = 2e-5


def main():
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--teacher", help="folder of an image classifier")
    parser.add_argument("--train", help="parquet file or folder of training images")
    parser.add_argument("--test", help="parquet file or folder of test images")
    parser.add_argument("--title", default="Caltech-101", help="name of the data (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[112, 84, 56], help="default: 112 84 56")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rates", type=float, nargs="+", default=[RATE, 1e-4], help="default: 2e-5 1e-4")
    parser.add_argument("--epochs", type=int, default=1, help="default: %(default)s")
    add_precision_argument(parser, "no")
    add_run_arguments(parser, "runs/small-images")
    parser.set_defaults(seeds=[0])
    run_command(parser, COMMANDS)


def train_all(arguments):
    """Train and measure the models whose rows are not yet in the file of results."""
    file = arguments.results_dir / f"small_images_{file_name(arguments)}.json"
    rows = read_rows(file)
    settings = {name: getattr(arguments, name) for name in ("epochs", "seeds", "mixed_precision")}
    for seed, method in itertools.product(arguments.seeds, arguments.methods):
        rates = {AS_IT_IS: [0.0], STUDENT: [RATE]}.get(method, arguments.rates)
        groups = [arguments.sizes] if method in (AS_IT_IS, STUDENT) else [[size] for size in arguments.sizes]
        for rate, sizes in itertools.product(rates, groups):
            about = {"method": method, "rate": rate, "seed": seed, "epochs": arguments.epochs}
            done = [row["pixels"] for row in rows if about.items() <= row.items()]
            if not {*sizes} <= {*done}:
                rows += [about | row for row in train_one(arguments, method, rate, sizes, seed)]
                write_table(file, settings, rows, data=arguments.title)


def train_one(arguments, method: str, rate: float, sizes: list[int], seed: int) -> list[dict]:
    """Train a model by one of `METHODS`. Return its accuracy for images of each size."""
    anatomy, processor = load_teacher(arguments.teacher, str(choose_device()))
    image_format, model = ImageFormat.from_processor(processor), copy.deepcopy(anatomy.source)
    counts = {size: math.prod(size // side for side in anatomy.patch_size) for size in sizes}
    if method == STUDENT:
        model = PatchSparseFormerForImageClassification.from_teacher(
            anatomy, max(counts.values()), elastic_token_counts=sorted(counts.values()), image_processor=processor
        ).to(choose_device())

    def embedder(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
        if method == STUDENT:
            return functools.partial(pooled, model.base_model, counts[size])
        small = read_anatomy(model, (size, size))
        return lambda images: small.embed(F.interpolate(images, (size, size), mode="bilinear", antialias=True))

    embedders = {size: embedder(size) for size in sizes}

    def loss(pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        embeddings = torch.cat([embed(pixel_values) for embed in embedders.values()])
        if method == WITH_LABELS:
            return F.cross_entropy(model.classifier(embeddings).float(), labels.repeat(len(sizes)))
        with torch.no_grad():
            target = anatomy.embed(pixel_values).float().repeat(len(sizes), 1)
        return 1 - F.cosine_similarity(embeddings.float(), target).mean()

    if rate:
        model.train().requires_grad_(True).classifier.requires_grad_(method == WITH_LABELS)
        options = {"learning_rate": rate, "epochs": arguments.epochs, "warmup_epochs": 0.05, "scale": (0.5, 1.0)}
        images, bf16 = load_images([arguments.train], "train"), arguments.mixed_precision == "bf16"
        fit(model, images, image_format, loss, seed=seed, bf16=bf16, **options)
    model.eval()
    rows = []
    for size, embed in embedders.items():
        embeddings, labels = outputs_for(arguments, embed, image_format)
        accuracy = accuracy_of(model.classifier.cpu()(embeddings), labels)
        rows.append({"pixels": size, "tokens": counts[size], "accuracy": accuracy})
    return rows


@torch.no_grad()
def measure_processing(arguments):
    """Compare the shipped student with its exports as plain ViTs. The plain ViTs get smaller images."""
    model, processor = load_model(checkpoint_path("caltech101-sparseformer"), "image-classification", "cpu")
    image_format, rows = ImageFormat.from_processor(processor), []
    for size in arguments.sizes:
        count = (size // model.config.feature_stride[0]) ** 2
        host = model.to_plain_vit(count)
        resize = round(image_format.resize * size / image_format.size[0])
        bilinear = InterpolationMode.BILINEAR
        smaller = dataclasses.replace(image_format, size=(size, size), resize=resize, interpolation=bilinear)
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
