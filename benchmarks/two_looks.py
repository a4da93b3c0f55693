"""Measure two looks at an image: a first look on a grid and, for some images, a second look with more tokens.

    python benchmarks/two_looks.py --teacher TEACHER --train TRAIN --test TEST --backgrounds IMAGES

A student is bootstrapped for each seed. Its tokens are placed on a grid in training, and its attention forecast is
trained for placement by content. Images are the views of `content_placement.py`. Each of METHODS decides which images
get a second look, and how the tokens of the second look are placed:

- "confidence" gives a second look to images whose likeliest class has a low probability.
- "similarity" gives it to images whose first embedding is probably far from the teacher's embedding. A linear model
  predicts the cosine from the first embedding. No labels are needed.
- "grid", "content" and "margin" are placements of the second look. "margin" is placement by content with the factor
  MARGIN for the scores of merged blocks, so that more blocks are split. "attention" is "margin" with the attention of
  the first look in the place of the forecast.
- "better" chooses between "grid" and "margin" for each image. A linear model predicts from the first embedding by how
  much the cosine to the teacher's embedding differs.

Linear models and thresholds come from training photographs and training photographs on a plain canvas. For each number
of tokens in LOOKS, the threshold is the one with which two looks cost what this number of tokens costs on training
photographs. The output, two_looks_NAME.json, has the gain of each method over one look on a grid, and the gain of one
look with all tokens by content, at the same mean cost. The student is the same. Gains are computed at equal
multiply-accumulates and at equal time. Time is measured when the table is made. Embeddings are saved, so the table can
be made again while no other program runs.
"""

import argparse
import contextlib
import copy
import functools
import itertools
import math
import statistics
from pathlib import Path
from unittest import mock

import caltech101
import numpy as np
import torch
import torch.nn.functional as F
from content_placement import bootstrap_student
from sklearn.linear_model import RidgeCV

import shared
from frugalvit.baselines import WithTokens, load_teacher
from frugalvit.configuration.configuration_base import pair
from frugalvit.macs import count_macs
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.modeling.placement import AttentionForecast, choose_cells
from frugalvit.speed import images_per_second
from frugalvit.training.loading import choose_device, load_model


TOKENS = [9, 16, 25, 36, 49, 64]
# Numbers of tokens in the first look and in the second look, by the number of tokens with the same mean cost.
LOOKS = {16: (9, 25), 25: (16, 36), 36: (16, 49), 49: (25, 64), 64: (36, 64)}
MARGIN = 1.5
# Number of tokens in the look whose attention chooses cells.
ATTENDING = 16
METHODS = [
    *(("confidence", placement) for placement in ("grid", "content", "margin", "attention", "better")),
    *(("similarity", placement) for placement in ("content", "margin", "better")),
]
PHOTOGRAPHS, SMALL, CLUTTERED = caltech101.VIEWS
# Shares of small objects in mixtures with photographs.
MIXTURES = (0.25, 0.5)
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
    for (tokens, exits, placement), measured in found.items():
        row = {"tokens": tokens, "exit": exits, "placement": placement}
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
    """Return the costs of one look for each kind in COSTS, by placement and number of tokens. "margin" and "attention"
    cost as much as "content"."""
    model, processor = load_model(folder, "image-classification", str(choose_device()))
    size = ImageFormat.from_processor(processor).size
    model = model.base_model
    looks = {
        (placement, count): functools.partial(model, num_tokens=count, placement=placement, output_tokens=False)
        for placement in ("grid", "content")
        for count in TOKENS
    }
    speeds = images_per_second(looks, torch.randn(TIMED_IMAGES, 3, *size).to(model.device), ROUNDS)
    macs = {count: count_macs(WithTokens(model, count), size).macs_with_attention for count in TOKENS}
    costs = {"macs": {key: macs[key[1]] for key in looks}, "seconds": {key: 1 / speeds[key] for key in looks}}
    for cost in costs.values():
        cost |= {(name, count): cost["content", count] for name in ("margin", "attention") for count in TOKENS}
    return costs


def measure(arguments, folder: Path, costs: dict[str, dict]) -> dict[tuple, dict[str, float]]:
    """Measure a student. The keys of the result are the number of tokens, the exit and the placement. The exit of
    images with one look is empty."""
    model, _ = load_model(folder, "image-classification", str(choose_device()))
    classifier = model.classifier.cpu()
    macs = {count: costs["macs"]["grid", count] for count in TOKENS}
    fit, test = (embeddings(arguments, folder, part) for part in ("fit", "test"))
    accuracy = functools.partial(accuracy_of, classifier)
    results = {}
    for placement, count in passes("test"):
        row = results[count, "", placement] = {}
        for view, found in test.items():
            row[view] = accuracy(found[placement, count], found)
            row |= {f"{view}: {kind}": cost[placement, count] for kind, cost in costs.items()}
    one_look = dict(results)
    for tokens, (exits, placement) in itertools.product(LOOKS, METHODS):
        first, second = LOOKS[tokens]
        if placement == "attention" and first != ATTENDING:
            continue
        score = exit_score(exits, first, classifier, fit)
        # The share of training photographs with a second look for which two looks cost as much as `tokens`.
        share = (macs[tokens] - macs[first]) / macs[second]
        threshold = torch.quantile(score(fit[PHOTOGRAPHS]), share).item()
        predict_gain = predict(fit, first, functools.partial(gain_of_content, second))
        row = results[tokens, exits, placement] = {}
        for view, found in test.items():
            again = score(found) < threshold
            if placement == "better":
                gains = predict_gain(found["grid", first])
                looked = torch.where(gains[:, None] > 0, found["margin", second], found["grid", second])
            else:
                looked = found[placement, second]
            embedding = torch.where(again[:, None], looked, found["grid", first])
            row[view] = accuracy(embedding, found)
            for kind, cost in costs.items():
                later = cost["grid" if placement == "grid" else "content", second]
                row[f"{view}: {kind}"] = cost["grid", first] + again.float().mean().item() * later
    for row in results.values():
        row |= compare_with_one_look(row, one_look)
    return results


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
        for share in MIXTURES:
            accuracy, cost = (
                (1 - share) * row[f"{PHOTOGRAPHS}{name}"] + share * row[f"{SMALL}{name}"] for name in ("", f": {kind}")
            )
            grid = (1 - share) * at_cost(PHOTOGRAPHS, "grid", kind, cost) + share * at_cost(SMALL, "grid", kind, cost)
            compared[f"{share:.0%} small: {gain}"] = accuracy - grid
    return compared


def exit_score(exits: str, first: int, classifier, fit: dict[str, dict]):
    """Return a function that gives scores to the images of a view. Images with low scores get a second look."""
    if exits == "confidence":
        return lambda found: classifier(found["grid", first]).detach().softmax(1).amax(1)
    predicted = predict(fit, first, lambda found: F.cosine_similarity(found["grid", first], found["teacher"]))
    return lambda found: predicted(found["grid", first])


def gain_of_content(count: int, found: dict) -> torch.Tensor:
    content, grid = (F.cosine_similarity(found[name, count], found["teacher"]) for name in ("margin", "grid"))
    return content - grid


def predict(fit: dict[str, dict], first: int, target):
    """Fit a linear model that predicts `target` from the embedding of the first look."""
    inputs = torch.cat([found["grid", first] for found in fit.values()])
    targets = torch.cat([target(found) for found in fit.values()])
    linear = RidgeCV(np.logspace(-2, 4, 13)).fit(F.normalize(inputs, dim=1), targets)
    return lambda embedding: torch.from_numpy(linear.predict(F.normalize(embedding, dim=1))).float()


def embeddings(arguments, folder: Path, part: str) -> dict[str, dict]:
    """Return a student's embeddings of the views of the test photographs, or of training photographs (`part` is
    "fit"), by placement and number of tokens. Embeddings are saved in the folder and reused."""
    file = folder / f"{part}.pt"
    if file.is_file():
        return torch.load(file)
    model, processor = load_model(folder, "image-classification", str(choose_device()))
    image_format = ImageFormat.from_processor(processor)
    on_grid = copy.deepcopy(model)
    on_grid.set_placement("grid")
    on_grid.set_attn_implementation("eager")
    views = {}
    for view in caltech101.VIEWS if part == "test" else (PHOTOGRAPHS, SMALL):
        limit = arguments.fit_images if part == "fit" else None if view == PHOTOGRAPHS else arguments.object_images
        images = {"test": arguments.train if part == "fit" else arguments.test, "test_images": limit}
        seen = argparse.Namespace(**vars(arguments) | images)
        found = {}
        for placement, count in passes(part):
            call = functools.partial(look, on_grid if placement == "grid" else model, on_grid, placement, count)
            found[placement, count], found["labels"] = caltech101.outputs_for(seen, call, image_format, view)
        if part == "fit":
            found["teacher"] = embeddings_of_teacher(
                arguments.teacher, arguments.train, limit, view, arguments.mixed_precision
            )
        views[view] = found
    torch.save(views, file)
    return views


def passes(part: str) -> list[tuple[str, int]]:
    """Return the placements and numbers of tokens of all single looks at the images of a part."""
    second = sorted({second for _, second in LOOKS.values()})
    if part == "fit":
        placed = {"grid": sorted({count for counts in LOOKS.values() for count in counts}), "margin": second}
    else:
        attending = [second for first, second in LOOKS.values() if first == ATTENDING]
        placed = {"grid": TOKENS, "content": TOKENS[1:], "margin": TOKENS[1:], "attention": attending}
    return [(placement, count) for placement, counts in placed.items() for count in counts]


@torch.no_grad()
def look(model, on_grid, placement: str, count: int, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the pooled embeddings of one look. For "attention", the forecast is replaced by the attention of [CLS] in
    the last block of a look with ATTENDING tokens on a grid."""
    forecast = contextlib.nullcontext()
    if placement == "attention":
        attention = on_grid(pixel_values, num_tokens=ATTENDING, output_attentions=True).attentions[-1]
        side = math.isqrt(ATTENDING)
        shares = attention[:, :, 0, -ATTENDING:].mean(1).unflatten(1, (1, side, side)).float()
        cell = pair(model.config.patch_size)

        def attend(_, level: torch.Tensor) -> torch.Tensor:
            grid = [points // side for points, side in zip(level.shape[-2:], cell, strict=True)]
            return F.interpolate(shares, grid, mode="bilinear").squeeze(1).log()

        forecast = mock.patch.object(AttentionForecast, "forward", attend)
    with choosing_cells(1.0 if placement == "content" else MARGIN), forecast:
        return model.base_model(pixel_values, num_tokens=count, output_tokens=False).pooler_output


@functools.cache
def embeddings_of_teacher(name: str, images: str, limit: int, view: str, precision: str) -> torch.Tensor:
    teacher, processor = load_teacher(name, str(choose_device()))
    seen = argparse.Namespace(test=images, test_images=limit, mixed_precision=precision)
    return caltech101.outputs_for(seen, teacher.embed, ImageFormat.from_processor(processor), view)[0]


if __name__ == "__main__":
    main()
