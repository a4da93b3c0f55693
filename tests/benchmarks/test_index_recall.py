"""Tests of benchmarks/index_recall.py."""

import json
import math

import index_recall
import pytest
import torch
from transformers import ViTForImageClassification, ViTImageProcessor

from frugalvit import PatchSparseFormerForImageClassification
from tiny import save_vit


# The embeddings lie on a circle, one degree apart. Each label has two embeddings.
DEGREES = torch.arange(60.0)
INDEX = torch.stack([DEGREES.deg2rad().cos(), DEGREES.deg2rad().sin()], dim=1)
LABELS = torch.arange(60) // 2


def test_scores_of_a_rotated_query():
    """Images 0 to 9 are nearest to the query at 0 degrees. Images 1 to 10 are nearest to the query at 5.2 degrees."""
    angle = math.radians(5.2)
    queries = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]])
    truth = index_recall.nearest(queries[:1], 5 * INDEX, leave_out=False)
    found = index_recall.nearest(3 * queries[1:], INDEX, leave_out=False)
    assert truth[0].tolist() == [*range(50)] and found[0, :3].tolist() == [5, 6, 4]
    scores = index_recall.scores(found, truth, torch.tensor([2]), LABELS)
    expected = {"neighbors@1": 0, "neighbors@10": 0.9, "neighbors_in_50": 1, "labels@1": 1, "labels@10": 0.2}
    assert {name: value.item() for name, value in scores.items()} == pytest.approx(expected)


def test_images_are_not_their_own_neighbors():
    found = index_recall.nearest(INDEX, INDEX, leave_out=True)
    assert found[30, :2].sort().values.tolist() == [29, 31] and 30 not in found[30]


@pytest.fixture
def call(tmp_path, write_parquet, monkeypatch):
    """Return a function that measures tiny models and returns the rows of the table."""
    teacher = save_vit(tmp_path / "teacher", num_labels=3, patch_size=4)
    student = PatchSparseFormerForImageClassification.from_teacher(
        ViTForImageClassification.from_pretrained(teacher),
        16,
        elastic_token_counts=[4, 16],
        image_processor=ViTImageProcessor.from_pretrained(teacher),
    )
    student.save_pretrained(tmp_path / "student")
    index = write_parquet("index.parquet", 16, size=32)
    queries = write_parquet("queries.parquet", 12, size=32)

    def run() -> list[dict]:
        argv = ["--teacher", teacher, "--student", tmp_path / "student", "--sizes", 16]
        argv += ["--runs-dir", tmp_path / "runs", "--results-dir", tmp_path]
        argv += ["--index-images", 14, "--query-images", 8, "--data", "Two", index, queries, "--data", "One", index]
        monkeypatch.setattr("sys.argv", ["index_recall.py", *map(str, argv)])
        index_recall.main()
        return json.loads((tmp_path / "index_recall.json").read_text("utf-8"))["rows"]

    return run


def test_rows_have_every_model_in_every_role(call, write_parquet, monkeypatch):
    rows = call()
    # The second call has no `embed_all`, so it must read the embeddings that the first call saved.
    monkeypatch.setattr("frugalvit.compare.embed_all", None)
    assert call() == rows
    # Other images in a file of the same name are embedded anew.
    write_parquet("index.parquet", 16, size=24)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        call()

    roles = [(row["data"], row["model"], row["role"]) for row in rows]
    models = ["16 pixels", "student, 4 tokens", "student, 16 tokens"]
    own = [("teacher", "both"), *((model, role) for model in models for role in index_recall.ROLES)]
    assert roles == [(data, *each) for data in ("Two", "One") for each in own]
    assert [(row["queries"], row["index"]) for row in rows[:: len(own)]] == [(8, 14), (14, 14)]
    assert (
        rows[0]["neighbors@1"]
        == rows[0]["neighbors@10"]
        == rows[0]["agreement"]
        == pytest.approx(rows[0]["cosine"])
        == 1
    )
    smaller, student = (
        next(row for row in rows if row["model"] == model and row["role"] == "queries")
        for model in ("16 pixels", "student, 16 tokens")
    )
    assert smaller["cosine"] < 1 and smaller["tokens"] == student["tokens"]
    assert student["cosine_difference"] == pytest.approx(student["cosine"] - smaller["cosine"])
