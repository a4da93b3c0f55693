"""Measure image search in which a student replaces its teacher for the queries, for the index, or for both.

    python benchmarks/index_recall.py --data Caltech-101 caltech101-train.parquet caltech101-test.parquet
    python benchmarks/index_recall.py texts

The values of `--data` are a title, a file with photographs for the index and a file with photographs for the queries.
Without the last file, the photographs of the index are also the queries. A photograph is then left out of the results
of its own query. `--data` can be repeated.

`models`, the default, measures the student and the teacher on smaller images. In the reference search, the teacher
embeds queries and index. Each row measures a model in one of these roles:

- "queries": the model embeds the queries, and the teacher embeds the index.
- "index": the teacher embeds the queries, and the model embeds the index.
- "grown": the model embeds the queries and half of the index, and the teacher embeds the other half of the index.
- "both": the model embeds the queries and the index.

`texts` searches test images of CIFAR-10 by sentences about their classes. The shipped CLIP with a SparseFormer embeds
images and sentences.

Scores are means over queries:

- `neighbors@1`: 1 if the row's search and the reference search have the same first result, and 0 otherwise.
- `neighbors@10`: share of the reference search's first ten results that are also in the row's first ten results.
- `neighbors_in_50`: share of the reference search's first ten results that are in the row's first fifty results. If
  the teacher sorts these fifty results, the share is also that of the first ten results after sorting.
- `labels@1`: 1 if the row's first result has the label of the query, and 0 otherwise.
- `labels@10`: share of the row's first ten results that have the label of the query.
- `cosine`: cosine of the query's embeddings by the row's model and by the teacher.
- `agreement`: 1 if the classifier predicts the same class from both embeddings, and 0 otherwise.

`…_error` is the standard error over queries. `…_difference` is the score minus the score of the teacher on smaller
images with as many patches as the student has tokens.
"""

import argparse
import functools
import itertools
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F

from frugalvit import checkpoint_path
from frugalvit.baselines import Baseline, load_students, load_teachers
from frugalvit.compare import embed_once
from frugalvit.evaluation.retrieval import embed_all_images
from frugalvit.evaluation.two_towers import embed_all_texts, load_two_towers
from frugalvit.modeling.packing import pack_linear_layers
from frugalvit.training.choices import SUBSET
from frugalvit.training.data import class_names, label_numbers, load_images, sample
from shared import add_results_argument, make_parser, write_table
from small_clip import SENTENCES


COUNTS = (1, 10)
SHORTLIST = 50
ROLES = ("queries", "index", "grown", "both")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("what", nargs="?", choices=COMMANDS, default="models")
    parser.add_argument(
        "--data",
        action="append",
        nargs="+",
        default=[],
        metavar=("TITLE", "IMAGES"),
        help="title, images of the index and images of the queries; can be repeated",
    )
    parser.add_argument("--teacher", default=str(checkpoint_path("caltech101-vit")))
    parser.add_argument("--student", default=str(checkpoint_path("caltech101-sparseformer")))
    parser.add_argument("--sizes", type=int, nargs="+", default=[112, 84, 56], help="pixels of the teacher's images")
    parser.add_argument("--index-images", type=int, help="size of the index, drawn at random (default: all images)")
    parser.add_argument("--query-images", type=int, help="number of queries, drawn at random (default: all images)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/index-recall"), help="default: %(default)s")
    add_results_argument(parser)
    arguments = parser.parse_args()
    COMMANDS[arguments.what](arguments)


def compare_models(arguments):
    baselines = load_teachers(arguments.teacher, resolutions=arguments.sizes) + load_students(arguments.student)
    rows = []
    for title, *files in arguments.data:
        smaller = {}
        for baseline, about, found in search(arguments, baselines, *files):
            about["method"] = baseline.method
            # A student is compared with the teacher on smaller images, with as many patches as the student has tokens.
            other = smaller.setdefault((baseline.tokens, about["role"]), found)
            differences = {f"{name}_difference": found[name] - other[name] for name in found if other is not found}
            rows.append({"data": title} | about | describe(found) | describe(differences))
        settings = {name: getattr(arguments, name) for name in ("index_images", "query_images")}
        write_table(arguments.results_dir / "index_recall.json", settings, rows)


def search(
    arguments: argparse.Namespace,
    baselines: list[Baseline],
    index_file: str,
    query_file: str | None = None,
) -> list[tuple[Baseline, dict, dict[str, torch.Tensor]]]:
    """Search the photographs of a data set with each model in each of ROLES. The first model is the teacher, which
    is only measured in the last role. Return the model, its description and its scores."""
    index = sample(load_images([index_file], "train"), arguments.index_images, seed=0)
    queries = sample(load_images([query_file], "train"), arguments.query_images, seed=0) if query_file else index
    embed_index = functools.partial(embed, arguments, index)
    embed_queries = functools.partial(embed, arguments, queries)
    leave_out = query_file is None
    teacher, *others = baselines
    truth = nearest(embed_queries(teacher), embed_index(teacher), leave_out)
    rows = []
    for baseline, role in [(teacher, ROLES[-1]), *itertools.product(others, ROLES)]:
        own_index = embed_index(teacher if role == "queries" else baseline)
        if role == "grown":
            own_index[::2] = embed_index(teacher)[::2]
        own_queries = embed_queries(teacher if role == "index" else baseline)
        found = scores(nearest(own_queries, own_index, leave_out), truth, labels(queries), labels(index))
        expected = embed_queries(teacher)
        found["cosine"] = F.cosine_similarity(own_queries, expected).double()
        if baseline.classifier is not None:
            classes = [baseline.classifier(each).argmax(1) for each in (own_queries, expected)]
            found["agreement"] = (classes[0] == classes[1]).double()
        about = {"model": baseline.name, "tokens": baseline.tokens, "role": role}
        rows.append((baseline, about | {"queries": len(queries), "index": len(index)}, found))
    return rows


def embed(arguments: argparse.Namespace, images: datasets.Dataset, baseline: Baseline) -> torch.Tensor:
    """Embed images by a model. Embeddings are saved and reused by later calls."""
    pack_linear_layers(baseline.model)
    [found], _ = embed_once(arguments.runs_dir / "embeddings", [baseline], images)
    return found.mean(0)


def search_by_texts(arguments):
    name = "cifar10-sparseformer-clip"
    towers = load_two_towers(str(checkpoint_path(name)), device="cpu")
    images = load_images([SUBSET], "test")
    names = class_names(images)
    texts = [sentence.format(name) for sentence in SENTENCES for name in names]
    found = nearest(embed_all_texts(towers, texts, 64), embed_all_images(towers, images, 256, 0), leave_out=False)
    right = labels(images)[found] == torch.arange(len(names)).repeat(len(SENTENCES))[:, None]
    # Sentences about one class have similar results. The standard error is therefore that of classes.
    right = right.double().unflatten(0, (len(SENTENCES), len(names))).mean(0)
    row = {"model": name, "queries": len(texts), "index": len(images), "chance": 1 / len(names)}
    row |= describe({f"labels@{count}": right[:, :count].mean(1) for count in COUNTS})
    write_table(arguments.results_dir / "index_texts.json", {"sentences": SENTENCES}, [row])


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
    """Return the mean of each score and its standard error over queries."""
    described = {}
    for name, values in by_name.items():
        described |= {name: values.mean().item(), f"{name}_error": values.std().item() / len(values) ** 0.5}
    return described


COMMANDS = {"models": compare_models, "texts": search_by_texts}


if __name__ == "__main__":
    main()
