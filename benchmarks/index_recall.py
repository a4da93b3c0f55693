"""Measure image search in which a student replaces its teacher for the queries, for the index, or for both.

    python benchmarks/index_recall.py --data Caltech-101 caltech101-train.parquet caltech101-test.parquet

The values of `--data` are a title, a file with photographs for the index and a file with photographs for the queries.
Without the last file, the photographs of the index are also the queries. A photograph is then left out of the results
of its own query. `--data` can be repeated.

In the reference search, the teacher embeds queries and index. Each row measures a model in one of these roles:

- "queries": the model embeds the queries, and the teacher embeds the index.
- "index": the teacher embeds the queries, and the model embeds the index.
- "grown": the model embeds the queries and half of the index, and the teacher embeds the other half of the index.
- "both": the model embeds the queries and the index.

Scores are means over queries:

- `neighbors@1`: 1 if the row's search and the reference search have the same first result, and 0 otherwise.
- `neighbors@10`: share of the reference search's first ten results that are also in the row's first ten results.
- `neighbors_in_50`: share of the reference search's first ten results that are in the row's first fifty results.
- `labels@1`: 1 if the row's first result has the label of the query, and 0 otherwise.
- `labels@10`: share of the row's first ten results that have the label of the query.

`…_error` is the standard error over queries. `…_difference` compares a student with the teacher on smaller images.
These images have as many patches as the student has tokens. The value is the student's score minus the teacher's
score. `labels…_to_teacher` is a model's score minus the score of the teacher on full-size images. Both differences are
computed for each query and averaged.
"""

import argparse
import itertools
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F

from frugalvit import checkpoint_path
from frugalvit.baselines import LOWER_RESOLUTION, Baseline, load_students, load_teachers
from frugalvit.compare import embed_all
from frugalvit.modeling.packing import pack_linear_layers
from frugalvit.training.data import label_numbers, load_images, sample
from shared import add_results_argument, make_parser, write_table


COUNTS = (1, 10)
SHORTLIST = 50
ROLES = ("queries", "index", "grown", "both")


def main():
    parser = make_parser(__doc__)
    parser.add_argument(
        "--data",
        action="append",
        nargs="+",
        required=True,
        metavar=("TITLE", "IMAGES"),
        help="title, images of the index and images of the queries; can be repeated",
    )
    parser.add_argument("--teacher", default=str(checkpoint_path("caltech101-vit")))
    parser.add_argument("--student", default=str(checkpoint_path("caltech101-sparseformer")))
    parser.add_argument("--sizes", type=int, nargs="+", default=[112, 84, 56], help="pixels of the teacher's images")
    parser.add_argument("--index-images", type=int, help="size of the index, drawn at random (default: all images)")
    parser.add_argument("--query-images", type=int, help="number of queries, drawn at random (default: all images)")
    add_results_argument(parser)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/index-recall"), help="default: %(default)s")
    arguments = parser.parse_args()
    baselines = load_teachers(arguments.teacher, resolutions=arguments.sizes) + load_students(arguments.student)
    for baseline in baselines:
        pack_linear_layers(baseline.model)
    rows = []
    settings = {name: getattr(arguments, name) for name in ("index_images", "query_images")}
    for title, *files in arguments.data:
        rows += [{"data": title} | row for row in measure(arguments, baselines, *files)]
        write_table(arguments.results_dir / "index_recall.json", settings, rows)


def measure(
    arguments: argparse.Namespace, baselines: list[Baseline], index_file: str, query_file: str | None = None
) -> list[dict]:
    """Return a row for each model and role, measured on the photographs of one data set."""
    index, index_embeddings = embed(arguments, baselines, index_file, arguments.index_images)
    queries, query_embeddings = index, index_embeddings
    if query_file:
        queries, query_embeddings = embed(arguments, baselines, query_file, arguments.query_images)
    of_index = labels(index)
    of_queries = labels(queries)
    teacher_queries = query_embeddings[0]
    teacher_index = index_embeddings[0]
    leave_out = query_file is None
    truth = nearest(teacher_queries, teacher_index, leave_out)
    of_teacher = scores(truth, truth, of_queries, of_index)
    smaller = {}
    rows = []
    for baseline, own_queries, own_index in zip(baselines, query_embeddings, index_embeddings, strict=True):
        about = {
            "model": baseline.name,
            "method": baseline.method,
            "tokens": baseline.tokens,
            "queries": len(queries),
            "index": len(index),
        }
        if baseline is baselines[0]:
            rows.append(about | {"role": "both"} | describe(of_teacher))
            continue
        grown = teacher_index.clone()
        grown[1::2] = own_index[1::2]
        pairs = (
            (own_queries, teacher_index),
            (teacher_queries, own_index),
            (own_queries, grown),
            (own_queries, own_index),
        )
        for role, pair in zip(ROLES, pairs, strict=True):
            found = scores(nearest(*pair, leave_out), truth, of_queries, of_index)
            row = about | {"role": role} | describe(found)
            for name in found:
                if name.startswith("labels"):
                    row |= difference(f"{name}_to_teacher", found[name], of_teacher[name])
            same_cost = smaller.get((baseline.tokens, role), {})
            for name in same_cost:
                row |= difference(f"{name}_difference", found[name], same_cost[name])
            if baseline.method == LOWER_RESOLUTION:
                smaller[baseline.tokens, role] = found
            rows.append(row)
    return rows


def embed(
    arguments: argparse.Namespace, baselines: list[Baseline], file: str, limit: int | None
) -> tuple[datasets.Dataset, list[torch.Tensor]]:
    """Load images, and embed the images by each model. Embeddings are saved and reused by later runs."""
    images = sample(load_images([file], "train"), limit, seed=0)
    embeddings = []
    # Each image is decoded once for all models with the same image processor.
    groups = itertools.groupby(baselines, key=lambda baseline: id(baseline.image_processor))
    for number, (_, group) in enumerate(groups):
        kept = arguments.runs_dir / f"{Path(file).stem}-{limit or 'all'}-{number}.pt"
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            found, _ = embed_all(list(group), images)
            torch.save([draws.mean(0) for draws in found], kept)
        embeddings += torch.load(kept)
    return images, embeddings


def labels(images: datasets.Dataset) -> torch.Tensor | None:
    """Return the labels of images. Return None if images have no labels, or if each image has a label of its own."""
    if "label" not in images.features:
        return None
    numbers = torch.from_numpy(label_numbers(images))
    return numbers if len(numbers.unique()) < len(numbers) else None


def nearest(queries: torch.Tensor, index: torch.Tensor, leave_out: bool) -> torch.Tensor:
    """Find the images of the index that are most similar to each query by cosine. Return their indices, nearest first,
    `(queries, 50)`. With `leave_out`, the queries are the images of the index, and each image is left out of the
    results of its own query."""
    similarity = F.normalize(queries, dim=-1) @ F.normalize(index, dim=-1).T
    if leave_out:
        similarity.fill_diagonal_(-torch.inf)
    return similarity.topk(min(SHORTLIST, similarity.shape[1])).indices


def scores(
    found: torch.Tensor, truth: torch.Tensor, of_queries: torch.Tensor | None, of_index: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return tensors of scores by name. Each tensor has a score for each query, `(queries,)`."""
    by_name = {}
    for count in COUNTS:
        same = found[:, :count, None] == truth[:, None, :count]
        by_name[f"neighbors@{count}"] = same.any(1).double().mean(1)
    same = found[:, :, None] == truth[:, None, : max(COUNTS)]
    by_name[f"neighbors_in_{SHORTLIST}"] = same.any(1).double().mean(1)
    if of_queries is not None and of_index is not None:
        right = of_index[found] == of_queries[:, None]
        by_name |= {f"labels@{count}": right[:, :count].double().mean(1) for count in COUNTS}
    return by_name


def describe(by_name: dict[str, torch.Tensor]) -> dict[str, float]:
    described = {}
    for name, values in by_name.items():
        described |= {name: values.mean().item(), f"{name}_error": standard_error(values)}
    return described


def difference(name: str, values: torch.Tensor, others: torch.Tensor) -> dict[str, float]:
    paired = values - others
    return {name: paired.mean().item(), f"{name}_error": standard_error(paired)}


def standard_error(values: torch.Tensor) -> float:
    return values.std().item() / len(values) ** 0.5


if __name__ == "__main__":
    main()
