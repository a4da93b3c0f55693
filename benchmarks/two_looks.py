"""Measure two looks at an image: a first look on a grid and, for some images, a second look with more tokens.

    python benchmarks/two_looks.py --teacher TEACHER --train TRAIN --test TEST --backgrounds IMAGES

A student is bootstrapped for each seed. Its tokens are placed on a grid in training, and its attention forecast is
trained for placement by content. Images are the views of `content_placement.py`. Images whose likeliest class has a
low probability get the second look. Its tokens are placed by one of PLACEMENTS:

- "grid": on a grid, as in the first look.
- "content": by content.
- "margin": by content, with the factor MARGIN for the scores of merged blocks, so that more blocks are split.

Thresholds come from training photographs. For each number of tokens in LOOKS, the threshold is the one with which two
looks cost what this number of tokens costs on training photographs. The output, two_looks_NAME.json, has the gain of
two looks over one look on a grid, and the gain of one look with all tokens by content, at the same mean cost. The
student is the same. Gains are computed at equal multiply-accumulates and at equal time. Time is measured when the
table is made. Embeddings are saved, so the table can be made again while no other program runs.
"""

import argparse
import functools
import itertools
import math
import statistics
from pathlib import Path
from unittest import mock

import caltech101
import numpy as np
import torch
from content_placement import bootstrap_student

import shared
from frugalvit.baselines import WithTokens
from frugalvit.macs import count_macs
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.modeling.placement import MARGIN, choose_cells
from frugalvit.speed import images_per_second
from frugalvit.training.loading import choose_device, load_model


TOKENS = [9, 16, 25, 36, 49, 64]
# Numbers of tokens in the first look and in the second look, by the number of tokens with the same mean cost.
LOOKS = {16: (9, 25), 25: (16, 36), 36: (16, 49), 49: (25, 64), 64: (36, 64)}
PLACEMENTS = ("grid", "content", "margin")
PHOTOGRAPHS = caltech101.VIEWS[0]
# Kinds of costs, and the names of gains at equal mean cost.
COSTS = {"macs": "gain", "seconds": "gain at equal time"}
# Images of a batch, and rounds, when seconds are measured.
TIMED_IMAGES, ROUNDS = 32, 10


def main():
    parser = shared.make_parser(__doc__)
    for name in ("teacher", "train", "test", "backgrounds"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--name", default="caltech101", help="of the data (default: %(default)s)")
    parser.add_argument("--object-images", type=int, help="test images on a canvas (default: all)")
    parser.add_argument("--fit-images", type=int, default=300, help="training photographs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of students (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument("--inherited-learning-rate", type=float, default=0.02, help="default: %(default)s")
    shared.add_precision_argument(parser, "bf16")
    shared.add_run_arguments(parser, "runs/two_looks")
    arguments = parser.parse_args()
    arguments.training_precision = arguments.mixed_precision
    found: dict[tuple, dict[str, list[float]]] = {}
    costs = None
    for seed in arguments.seeds:
        with choosing_cells(math.inf):
            folder = bootstrap_student(arguments, "content", seed)
        for part in ("fit", "test"):
            embeddings(arguments, folder, part)
        costs = costs or measure_costs(folder)
        for key, values in measure(arguments, folder, costs).items():
            row = found.setdefault(key, {})
            for name, value in values.items():
                row.setdefault(name, []).append(value)
    rows = []
    for (tokens, looks, placement), measured in found.items():
        row = {"tokens": tokens, "looks": looks, "placement": placement}
        for name, values in measured.items():
            row |= {name: statistics.mean(values), f"{name}: spread": shared.spread(values)}
        rows.append(row)
    settings = {name: getattr(arguments, name) for name in ("object_images", "fit_images", "steps", "batch_size")}
    settings |= {"margin": MARGIN, "seeds": arguments.seeds, "mixed_precision": arguments.mixed_precision}
    shared.write_table(arguments.results_dir / f"two_looks_{arguments.name}.json", settings, rows)


def choosing_cells(margin: float):
    """Multiply the scores of blocks by `margin` before cells are chosen. With an infinite margin, cells are a grid."""

    def choose(split_scores, grid):
        return choose_cells([margin * split_scores[0].clamp(min=1e-20), *split_scores[1:]], grid)

    return mock.patch("frugalvit.modeling.placement.choose_cells", choose)


def measure_costs(folder: Path) -> dict[str, dict[tuple[str, int], float]]:
    """Return the costs of one look for each kind in COSTS, by placement and number of tokens. "margin" costs as much
    as "content"."""
    model, processor = load_model(folder, "image-classification", str(choose_device()))
    size = ImageFormat.from_processor(processor).size
    model = model.base_model
    looks = {
        (placement, count): WithTokens(model, count, placement=placement, output_tokens=False)
        for placement in ("grid", "content")
        for count in TOKENS
    }
    speeds = images_per_second(looks, torch.randn(TIMED_IMAGES, 3, *size).to(model.device), ROUNDS)
    macs = {count: count_macs(WithTokens(model, count), size).macs_with_attention for count in TOKENS}
    costs = {"macs": {key: macs[key[1]] for key in looks}, "seconds": {key: 1 / speeds[key] for key in looks}}
    for cost in costs.values():
        cost |= {("margin", count): cost["content", count] for count in TOKENS}
    return costs


def measure(arguments, folder: Path, costs: dict[str, dict]) -> dict[tuple, dict[str, float]]:
    """Measure a student. The keys of the result are the number of tokens, the number of looks and the placement."""
    model, _ = load_model(folder, "image-classification", str(choose_device()))
    classifier = model.classifier.cpu()
    macs = {count: costs["macs"]["grid", count] for count in TOKENS}
    fit, test = (embeddings(arguments, folder, part) for part in ("fit", "test"))
    accuracy = functools.partial(accuracy_of, classifier)
    results = {}
    for placement, count in passes("test"):
        row = results[count, 1, placement] = {}
        for view, found in test.items():
            row[view] = accuracy(found[placement, count], found)
            row |= {f"{view}: {kind}": cost[placement, count] for kind, cost in costs.items()}
    one_look = dict(results)
    for tokens, placement in itertools.product(LOOKS, PLACEMENTS):
        first, second = LOOKS[tokens]
        # The share of training photographs with a second look for which two looks cost as much as `tokens`.
        share = (macs[tokens] - macs[first]) / macs[second]
        threshold = torch.quantile(confidence(classifier, fit[PHOTOGRAPHS]["grid", first]), share).item()
        row = results[tokens, 2, placement] = {}
        for view, found in test.items():
            again = confidence(classifier, found["grid", first]) < threshold
            embedding = torch.where(again[:, None], found[placement, second], found["grid", first])
            row[view] = accuracy(embedding, found)
            for kind, cost in costs.items():
                row[f"{view}: {kind}"] = cost["grid", first] + again.float().mean().item() * cost[placement, second]
    for row in results.values():
        row |= compare_with_one_look(row, one_look)
    return results


@torch.no_grad()
def confidence(classifier, embedding: torch.Tensor) -> torch.Tensor:
    return classifier(embedding).softmax(1).amax(1)


def accuracy_of(classifier, embedding: torch.Tensor, found: dict) -> float:
    with torch.no_grad():
        return caltech101.accuracy_of(classifier(embedding), found["labels"])


def compare_with_one_look(row: dict[str, float], one_look: dict[tuple, dict[str, float]]) -> dict[str, float]:
    """Return the gains of a row, and of one look with all tokens by content, over one look on a grid. All three have
    the same mean cost: values between two numbers of tokens are interpolated."""

    def at_cost(view: str, placement: str, kind: str, cost: float) -> float:
        rows = [each for (_, _, name), each in one_look.items() if name == placement]
        return float(np.interp(cost, [each[f"{view}: {kind}"] for each in rows], [each[view] for each in rows]))

    compared = {}
    for kind, gain in COSTS.items():
        for view in caltech101.VIEWS:
            cost = row[f"{view}: {kind}"]
            grid = at_cost(view, "grid", kind, cost)
            compared[f"{view}: {gain}"] = row[view] - grid
            compared[f"{view}: {gain} of content"] = at_cost(view, "content", kind, cost) - grid
    return compared


def embeddings(arguments, folder: Path, part: str) -> dict[str, dict]:
    """Return a student's embeddings of the views of the test photographs, or of training photographs (`part` is
    "fit"), by placement and number of tokens. Embeddings are saved in the folder and reused."""
    file = folder / f"{part}.pt"
    names = ("train", "fit_images") if part == "fit" else ("test", "backgrounds", "object_images")
    shared.check_origin(file, shared.describe_options(arguments, "mixed_precision", *names))
    if file.is_file():
        return torch.load(file)
    model, processor = load_model(folder, "image-classification", str(choose_device()))
    image_format = ImageFormat.from_processor(processor)
    views = {}
    for view in caltech101.VIEWS if part == "test" else (PHOTOGRAPHS,):
        limit = arguments.fit_images if part == "fit" else None if view == PHOTOGRAPHS else arguments.object_images
        images = {"test": arguments.train if part == "fit" else arguments.test, "test_images": limit}
        seen = argparse.Namespace(**vars(arguments) | images)
        found = {}
        for placement, count in passes(part):
            call = functools.partial(look, model, placement, count)
            found[placement, count], found["labels"] = caltech101.outputs_for(seen, call, image_format, view)
        views[view] = found
    torch.save(views, file)
    return views


def passes(part: str) -> list[tuple[str, int]]:
    """Return the placements and numbers of tokens of all single looks at the images of a part."""
    if part == "fit":
        return [("grid", count) for count in sorted({first for first, _ in LOOKS.values()})]
    # The smallest number of tokens is only used for first looks, on a grid.
    return [("grid", TOKENS[0]), *itertools.product(PLACEMENTS, TOKENS[1:])]


@torch.no_grad()
def look(model, placement: str, count: int, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the pooled embeddings of one look."""
    placed = "grid" if placement == "grid" else "content"
    with choosing_cells(MARGIN if placement == "margin" else 1.0):
        return WithTokens(model.base_model, count, placement=placed, output_tokens=False)(pixel_values).pooler_output


if __name__ == "__main__":
    main()
