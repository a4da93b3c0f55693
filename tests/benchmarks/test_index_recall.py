"""Search in an index of a teacher's embeddings by a student."""

import json
import math

import datasets
import index_recall
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessor
from vision_transformers import of_transformers

from frugalvit import PatchSparseFormerForImageClassification


# Images on a half circle, one degree after another, two for each label.
DEGREES = torch.arange(60.0)
INDEX = torch.stack([DEGREES.deg2rad().cos(), DEGREES.deg2rad().sin()], dim=1)
LABELS = torch.arange(60) // 2


def test_scores_of_a_query_that_is_turned():
    """The teacher's query is at 0 degrees, the model's at 5.2: its ten nearest images are 1 to 10."""
    turned = math.radians(5.2)
    queries = torch.tensor([[1.0, 0.0], [math.cos(turned), math.sin(turned)]])
    truth = index_recall.nearest(queries[:1], 5 * INDEX, leave_out=False)
    found = index_recall.nearest(3 * queries[1:], INDEX, leave_out=False)
    assert truth[0].tolist() == [*range(50)] and found[0, :3].tolist() == [5, 6, 4]
    scores = index_recall.scores(found, truth, torch.tensor([2]), LABELS)
    expected = {"neighbors@1": 0, "neighbors@10": 0.9, "neighbors_in_50": 1, "labels@1": 1, "labels@10": 0.2}
    assert {name: value.item() for name, value in scores.items()} == pytest.approx(expected)


def test_an_image_does_not_find_itself():
    found = index_recall.nearest(INDEX, INDEX, leave_out=True)
    assert found[30, :2].sort().values.tolist() == [29, 31] and 30 not in found[30]


def test_a_table_has_every_model_in_every_role(tmp_path, monkeypatch):
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    teacher = of_transformers("ViT", "ForImageClassification", num_labels=3)()
    student = PatchSparseFormerForImageClassification.from_teacher(
        teacher, 16, elastic_token_counts=[4, 16], image_processor=processor
    )
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    for name, count in (("index", 16), ("queries", 12)):
        images = [Image.new("RGB", (32, 32), (9 * number, count, 99)) for number in range(count)]
        records = {"image": images, "label": [number % 3 for number in range(count)]}
        datasets.Dataset.from_dict(records, features).to_parquet(tmp_path / f"{name}.parquet")
    index, queries = (str(tmp_path / f"{name}.parquet") for name in ("index", "queries"))
    options = {"teacher": tmp_path / "teacher", "student": tmp_path / "student", "sizes": 16, "index-images": 14}
    options |= {"query-images": 8, "runs-dir": tmp_path / "runs", "results-dir": tmp_path}
    argv = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    argv += ["--data", "Two", index, queries, "--data", "One", index]
    monkeypatch.setattr("sys.argv", ["index_recall.py", *argv])
    index_recall.main()
    # Embeddings are kept: a second call finds them.
    monkeypatch.delattr(index_recall, "embed_all")
    index_recall.main()

    rows = json.loads((tmp_path / "index_recall.json").read_text("utf-8"))["rows"]
    roles = [(row["data"], row["model"], row["role"]) for row in rows]
    models = ["16 pixels", "student, 4 tokens", "student, 16 tokens"]
    own = [("teacher", "both"), *((model, role) for model in models for role in index_recall.ROLES)]
    assert roles == [(data, *each) for data in ("Two", "One") for each in own]
    assert [(row["queries"], row["index"]) for row in rows[:: len(own)]] == [(8, 14), (14, 14)]
    assert rows[0]["neighbors@1"] == rows[0]["neighbors@10"] == 1
    # The student with 16 tokens is the teacher at 16 pixels, whose patches are as many.
    same = [row for row in rows if row["model"] == "student, 16 tokens"]
    assert all("neighbors@10_difference_error" in row and "labels@1_to_teacher" in row for row in same)
