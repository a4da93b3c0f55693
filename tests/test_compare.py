"""Tests of `frugalvit compare`."""

import dataclasses
import json
import os
import types

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoImageProcessor, ViTForImageClassification, ViTImageProcessor
from vision_transformers import KINDS

from drawn import draw_classes
from frugalvit import PatchSparseFormerForImageClassification, checkpoint_path, compare, count_macs, read_anatomy
from frugalvit.baselines import (
    CONFIDENCES,
    LOWER_RESOLUTION,
    WithTokens,
    adaptive_baselines,
    as_teacher,
    at_lower_resolution,
    load_students,
    load_teachers,
)
from frugalvit.cli import main
from frugalvit.compare import describe_score, draw_comparison, embed_all
from frugalvit.evaluation.images import image_batches
from frugalvit.modeling.hosts.running import make_example
from frugalvit.modeling.hosts.transformers import resize_positions_
from frugalvit.training.data import load_images
from frugalvit.training.text import format_markdown


VIT, STUDENT = (str(checkpoint_path(name)) for name in ("cifar10-vit", "cifar10-sparseformer"))
SPLIT = "test[:48]"


def run(*arguments) -> int:
    return main(["compare", *map(str, arguments), "--device", "cpu"])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Run a comparison, and return its output folder and the content of compare.json."""
    folder = tmp_path_factory.mktemp("compare") / "out"
    students = [STUDENT, checkpoint_path("cifar10-convmixer")]
    assert run(VIT, *students, "--split", SPLIT, "--rounds", 1, "--output", folder) == 0
    return folder, json.loads((folder / "compare.json").read_text())


def test_accuracies_are_those_of_evaluation(outcome, tmp_path):
    rows = {row["model"]: row for row in outcome[1]["rows"]}
    for name in ("cifar10-vit", "cifar10-sparseformer", "cifar10-convmixer"):
        model = ["--model", checkpoint_path(name), "--split", SPLIT, "--output", tmp_path / "results.json"]
        assert main(["evaluate", "classification", *map(str, model), "--device", "cpu"]) == 0
        expected = json.loads((tmp_path / "results.json").read_text())["accuracy"]
        assert rows[name]["accuracy"] == expected
        difference, teacher = rows[name]["accuracy_difference"], rows["cifar10-vit"]["accuracy"]
        assert difference is None if name == "cifar10-vit" else difference == pytest.approx(expected - teacher)


def test_rows_files_and_picture(outcome):
    folder, content = outcome
    assert {file.name for file in folder.iterdir()} == {"compare.json", "compare.md", "compare.png"}
    rows = content["rows"]
    assert [(row["method"], row["tokens"], row["image_size"]) for row in rows] == [
        ("teacher", 65, [32, 32]),
        (LOWER_RESOLUTION, 5, [8, 8]),
        (LOWER_RESOLUTION, 10, [12, 12]),
        (LOWER_RESOLUTION, 17, [16, 16]),
        (LOWER_RESOLUTION, 26, [20, 20]),
        (LOWER_RESOLUTION, 37, [24, 24]),
        ("SparseFormer", 16, [32, 32]),
        ("cifar10-convmixer", None, [32, 32]),
    ]
    assert rows[0]["cosine"] == pytest.approx(1) and rows[-1]["cosine"] is None
    assert all(0.2 < row["cosine"] < 0.99 for row in rows[1:-1])
    assert rows[0]["neighbors"] == 1 and rows[-1]["neighbors"] is None
    assert all(0.2 < row["neighbors"] < 1 and 0 < row["neighbors_error"] < 0.1 for row in rows[1:-1])
    assert all([*row["images_per_second"]["float32"]] == ["1", "32"] for row in rows)
    vit = ViTForImageClassification.from_pretrained(VIT)
    assert rows[0]["parameters"] == rows[1]["parameters"] == vit.num_parameters()
    assert rows[0]["macs"] == count_macs(vit, 32).macs_with_attention
    assert content["command"].startswith("frugalvit compare ") and content["settings"]["images"] == 48
    lines = (folder / "compare.md").read_text().splitlines()
    assert len(lines) == 2 + len(rows) + 2 and f"{100 * rows[0]['accuracy']:.1f} ± " in lines[2]
    with Image.open(folder / "compare.png") as picture:
        assert picture.size == (1200, 800) and len(picture.convert("RGB").getcolors(1200 * 800)) > 100
    notes = [text.get_text() for text in draw_comparison(rows).axes[0].texts]
    assert notes == [str(row["tokens"]) for row in rows if row["tokens"]]


def test_an_interrupted_comparison_resumes(outcome, tmp_path, monkeypatch):
    """A resumed comparison computes only models that have no row in the results. Speeds are measured last."""
    embedded, folder = [], tmp_path / "out"

    def embed(baselines, images, **reading):
        embedded.append(baselines[0].name)
        if interrupts and baselines[0].name == "cifar10-sparseformer":
            raise KeyboardInterrupt
        return embed_all(baselines, images, **reading)

    monkeypatch.setattr("frugalvit.compare.embed_all", embed)
    students = [STUDENT, checkpoint_path("cifar10-convmixer"), "--rounds", 1, "--output", folder]
    for split, interrupts in (("test[48:96]", True), (SPLIT, True), (SPLIT, False)):
        assert run(VIT, *students, "--split", split) == (130 if interrupts else 0)
        lines = (folder / "compare.md").read_text().splitlines()
        assert len(lines) == 4 + (6 if interrupts else 8) and ("images/s" in lines[0]) is not interrupts
    assert embedded == [*["cifar10-vit", "cifar10-sparseformer"] * 2, "cifar10-sparseformer", "cifar10-convmixer"]
    assert sorted(os.listdir(folder)) == ["compare.json", "compare.md", "compare.png"]
    for row, expected in zip(
        json.loads((folder / "compare.json").read_text())["rows"], outcome[1]["rows"], strict=True
    ):
        assert row.pop("images_per_second")["float32"].keys() == {"1", "32"}
        assert row == {name: expected[name] for name in row}
    assert run(VIT, *students, "--split", SPLIT) == 1


@pytest.mark.parametrize("kind", ["timm-vit", "clip"])
@torch.no_grad()
def test_a_teacher_runs_in_its_own_library(kind):
    anatomy = read_anatomy(KINDS[kind].make())
    teacher, images = as_teacher(anatomy), make_example(anatomy)
    assert torch.equal(teacher.model(images), (anatomy.run_classifier or anatomy.embed)(images))
    assert teacher.tokens == anatomy.num_prefix_tokens + 64
    assert count_macs(teacher.model, 32).macs_with_attention > 0


def test_lower_resolution():
    """The baseline's logits equal those of a teacher whose position embeddings are resized for smaller images."""
    model = ViTForImageClassification.from_pretrained(VIT).eval()
    baseline = at_lower_resolution(read_anatomy(model), None, (16, 16))
    view = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    small = F.interpolate(view, (16, 16), mode="bilinear", antialias=True, align_corners=False)
    with torch.no_grad():
        resized = resize_positions_(ViTForImageClassification.from_pretrained(VIT).eval(), 16)
        assert torch.allclose(baseline.model(small), resized(small).logits, atol=1e-3)
        assert torch.allclose(baseline.model(small), model.classifier(baseline.embed(small)), atol=1e-5)
    assert count_macs(baseline.model, 16) == count_macs(resized, 16)


@pytest.mark.parametrize("placement", ["grid", "grid_then_content"])
def test_students_classify_adaptively(placement, tmp_path):
    """Each row has the accuracy and the mean cost of `classify_adaptively`."""
    teacher, processor = ViTForImageClassification.from_pretrained(VIT), AutoImageProcessor.from_pretrained(VIT)
    options = {"elastic_token_counts": [4, 16], "placement": placement, "image_processor": processor}
    student = PatchSparseFormerForImageClassification.from_teacher(teacher, 16, **options)
    student.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    students = load_students(str(tmp_path))
    images = load_images("cifar10-subset", SPLIT)
    baselines = load_teachers(VIT, resolutions=[]) + students + adaptive_baselines(students)
    rows = compare.compare(baselines, images, rounds=1)
    few, most = (row["macs"] for row in rows[1:3])
    if placement != "grid":
        most = count_macs(WithTokens(student, 16, placement="content"), 32).macs_with_attention
    pixels, _ = next(image_batches(students[0].image_processor, images))
    for row, confidence in zip(rows[3:], CONFIDENCES, strict=True):
        found = student.classify_adaptively(pixels, confidence)
        assert row["model"].endswith(f", 4 or 16 tokens, confidence {confidence}")
        assert row["accuracy"] == (found.logits.argmax(1) == torch.tensor(images["label"][:])).double().mean()
        again = (found.num_tokens == 16).double().mean().item()
        assert row["macs"] == pytest.approx(few + again * most) and again > 0
        assert row["cosine"] is None and row["images_per_second"]["float32"].keys() == {"1", "32"}
    assert len({row["macs"] for row in rows[3:]}) == 3
    assert draw_comparison(rows).axes[0].containers[-1].get_label() == f"{tmp_path.name}, adaptively"


def test_the_choice_of_an_adaptive_student():
    """`num_tokens` of the configuration is the number of tokens in the second look. There is no choice if it is at
    most the smallest number, or if the student has a single number of tokens. Both looks share the stem of a focusing
    stage."""
    student = load_students(STUDENT)
    assert not adaptive_baselines(student)
    model = student[0].model.model
    model.config.elastic_token_counts = [4, 15]
    students = [dataclasses.replace(student[0], name=f"student, {count} tokens") for count in (4, 15)]
    embeddings = torch.tensor([[0.0, 4], [0.0, 15]])
    first, both = adaptive_baselines(students)[0].macs(embeddings).tolist()
    few, most = (count_macs(WithTokens(model, count), 32).macs_with_attention for count in (4, 15))
    stem = count_macs(model.base_model.stem, 32).macs_with_attention
    assert (first, both) == (few, few + most - stem) and stem > 0
    for count in (4, 3):
        model.config.num_tokens = count
        assert not adaptive_baselines(students)


def test_timed_images_cost_as_much_as_all_images(write_parquet, monkeypatch):
    monkeypatch.setattr(compare, "BATCH_SIZES", (1, 5))
    images = load_images([write_parquet(count=25)], "train")
    costs = (7 * torch.arange(25) % 25).double() ** 2
    processor = ViTImageProcessor(do_resize=False, do_rescale=False, do_normalize=False)
    pixel_values = compare.typical_images(types.SimpleNamespace(image_processor=processor), costs, images)
    # The color of an image is ten times its index.
    chosen = (pixel_values.float().mean((1, 2, 3)) / 10).round().long()
    assert len(chosen) == 5 and costs[chosen].mean().item() == pytest.approx(costs.mean().item(), rel=0.05)


def test_errors_are_paired():
    """The standard error of the difference between two models is computed from their differences on each image."""
    teacher = torch.tensor([1.0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.float64)
    right = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 1], dtype=torch.float64)
    found = describe_score("accuracy", right, teacher)
    assert found["accuracy"] == 0.625 and found["accuracy_difference"] == -0.125
    # At each end p of the Wilson interval, |p - accuracy| equals one standard deviation, sqrt(p * (1 - p) / 8).
    end = (0.625 + 1 / 16) / (1 + 1 / 8) + found["accuracy_error"]
    assert (end - 0.625) ** 2 == pytest.approx(end * (1 - end) / 8)
    assert describe_score("accuracy", torch.ones(8), None)["accuracy_error"] > 0.05
    assert found["accuracy_difference_error"] == pytest.approx((right - teacher).numpy().std(ddof=1) / 8**0.5)


def test_images_without_a_split_and_models_without_speeds(tmp_path, capsys):
    """Without `--split`, models are compared on held-back images. With `--no_speed`, the plot's x-axis shows MACs."""
    draw_classes(tmp_path / "images", 20, ("cat", "dog"))
    (tmp_path / "images" / "cat" / "broken.png").write_bytes(b"no image")
    out = tmp_path / "out"
    assert run(VIT, "--dataset", tmp_path / "images", "--skip_corrupt", "--no_speed", "--output", out) == 0
    content = json.loads((out / "compare.json").read_text())
    settings = content["settings"]
    assert (settings["split"], settings["images"]) == ("train, held back", 4)
    assert "neighbors, % is left out: nearest neighbors need more than 10 images." in capsys.readouterr().err
    assert "images/s" not in (out / "compare.md").read_text() and (out / "compare.png").is_file()
    assert draw_comparison(content["rows"]).axes[0].get_xlabel().startswith("multiply-accumulates")


@pytest.mark.parametrize("queries", [4, 1024])
def test_neighbors_are_those_of_the_teacher(queries, monkeypatch):
    """The teacher's embeddings lie on an arc, one degree apart. The model's embeddings are rotated by 2.1 degrees, so
    two of the ten neighbors of each image change."""
    monkeypatch.setattr(compare, "QUERIES", queries)
    angles = torch.stack([torch.arange(60.0), torch.arange(60.0) + 2.1]).deg2rad()
    teacher, rotated = torch.stack([angles.cos(), angles.sin()], dim=2)
    assert compare.neighbors_found(3 * teacher, teacher).tolist() == [1] * 60
    # Images near an end of the arc are not checked, because they have neighbors on one side only.
    assert compare.neighbors_found(rotated, 2 * teacher)[10:50].tolist() == pytest.approx([0.8] * 40)


def test_a_pipe_does_not_end_a_cell():
    assert format_markdown([{"model": "a|b", "MACs": 1}]).splitlines()[-1] == "| a\\|b | 1 |"


def test_a_student_is_no_teacher(tmp_path, capsys):
    for student in (STUDENT, str(checkpoint_path("cifar10-sparseformer-clip"))):
        assert run(student, VIT, "--split", SPLIT, "--output", tmp_path / "out") == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"The first model is {student}, a student; expected its teacher, a plain vision" in error


def test_unknown_classes_are_refused(tmp_path, capsys):
    draw_classes(tmp_path / "animals", 3, ("owl", "fox"))
    assert run(VIT, "--output", tmp_path / "out", "--dataset", tmp_path / "animals") == 1
    assert "The model does not know the classes" in capsys.readouterr().err.splitlines()[-1]
    assert os.listdir(tmp_path) == ["animals"]
