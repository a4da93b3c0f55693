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
    """Return a function that runs a command of the benchmark with tiny models and returns the rows of its table."""
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

    def run(command: str, table: str, *argv: str) -> list[dict]:
        argv += ("--teacher", str(teacher), "--student", str(tmp_path / "student"))
        argv += ("--runs-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path))
        argv += (
            "--index-images",
            "14",
            "--query-images",
            "8",
            "--data",
            "Two",
            index,
            queries,
            "--data",
            "One",
            index,
        )
        monkeypatch.setattr("sys.argv", ["index_recall.py", command, "--train", index, "--test", queries, *argv])
        index_recall.main()
        return json.loads((tmp_path / f"{table}.json").read_text("utf-8"))["rows"]

    return run


def test_rows_have_every_model_in_every_role(call, write_parquet, monkeypatch):
    rows = call("models", "index_recall", "--sizes", "16")
    # The second call has no `embed_all`, so it must read the embeddings that the first call saved.
    monkeypatch.setattr("frugalvit.compare.embed_all", None)
    assert call("models", "index_recall", "--sizes", "16") == rows
    # Other images in a file of the same name are embedded anew.
    write_parquet("index.parquet", 16, size=24)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        call("models", "index_recall", "--sizes", "16")

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


def test_relational_loss_compares_images_of_a_batch():
    """The loss does not change if all embeddings of the student are rotated."""
    torch.manual_seed(0)
    teacher = torch.randn(6, 8)
    rotation, _ = torch.linalg.qr(torch.randn(8, 8))
    assert index_recall.relational_loss(3 * teacher @ rotation, teacher).item() == pytest.approx(0, abs=1e-6)
    assert index_recall.relational_loss(torch.randn(6, 8), teacher) > 0.01


def test_students_of_each_loss(call, tmp_path):
    argv = ["--seeds", "0", "--tokens", "4", "16", "--steps", "2", "--mixed-precision", "no"]
    rows = call("losses", "index_losses", *argv)
    data = ("Caltech-101, held-out classes", "Two", "One")
    models = [(model, tokens) for model in (*index_recall.LOSSES, "student") for tokens in (5, 17)]
    measured = [(row["data"], row["model"], row["tokens"]) for row in rows if row["model"] != "teacher"]
    assert measured == [(each, *model) for each in data for model in models]
    # The images have two classes, and the first one is held out.
    assert (rows[0]["index"], rows[0]["queries"]) == (8, 6)
    both = next(row for row in rows if row["model"] == "both")
    assert both["neighbors@10_differences"] == [pytest.approx(both["neighbors@10_difference"])]
    students = {
        (tmp_path / "runs" / f"{loss}-seed0" / "model.safetensors").read_bytes() for loss in index_recall.LOSSES
    }
    assert len(students) == len(index_recall.LOSSES)
