"""`frugalvit compare`: the numbers of evaluation, a teacher with less to compute, a picture."""

import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from frugalvit_cli import main
from PIL import Image
from torch import nn
from transformers import ViTForImageClassification, ViTImageProcessor
from vision_transformers import KINDS

from frugalvit import checkpoint_path, count_macs, read_anatomy
from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images
from frugalvit.compare import compare, describe_score, draw_comparison
from frugalvit.contenders import (
    LOWER_RESOLUTION,
    Contender,
    as_teacher,
    at_lower_resolution,
    load_students,
    load_teachers,
)
from frugalvit.modeling.hosts.transformers import resize_positions_


VIT, STUDENT = (str(checkpoint_path(name)) for name in ("cifar10-vit", "cifar10-sparseformer"))
SPLIT = "test[:48]"


def run(*arguments) -> int:
    return main(["compare", *map(str, arguments), "--device", "cpu"])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The folder that a comparison wrote, and its numbers."""
    folder = tmp_path_factory.mktemp("compare") / "out"
    students = [STUDENT, checkpoint_path("cifar10-convmixer")]
    options = ["--resolutions", 16, "--rounds", 1, "--precision", "float32", "bf16"]
    assert run(VIT, *students, "--split", SPLIT, *options, "--output", folder) == 0
    return folder, json.loads((folder / "compare.json").read_text())


def test_accuracies_are_those_of_evaluation(outcome, tmp_path):
    rows = {row["model"]: row for row in outcome[1]["rows"]}
    for name in ("cifar10-vit", "cifar10-sparseformer", "cifar10-convmixer"):
        model = ["--model", checkpoint_path(name), "--split", SPLIT, "--output", tmp_path / "results.json"]
        assert main(["evaluate", "classification", *map(str, model), "--device", "cpu"]) == 0
        expected = json.loads((tmp_path / "results.json").read_text())["accuracy"]
        assert rows[name]["accuracy"] == expected
        share = np.array([1.0] * round(48 * expected) + [0.0] * round(48 * (1 - expected)))
        assert rows[name]["accuracy_error"] == pytest.approx(share.std(ddof=1) / 48**0.5)
        difference = rows[name]["accuracy_difference"]
        teacher = rows["cifar10-vit"]["accuracy"]
        assert difference is None if name == "cifar10-vit" else difference == pytest.approx(expected - teacher)


def test_rows_files_and_picture(outcome):
    folder, content = outcome
    assert {file.name for file in folder.iterdir()} == {"compare.json", "compare.md", "compare.png"}
    rows = content["rows"]
    assert [(row["method"], row["tokens"], row["image_size"]) for row in rows] == [
        ("teacher", 65, [32, 32]),
        (LOWER_RESOLUTION, 17, [16, 16]),
        ("SparseFormer", 16, [32, 32]),
        ("cifar10-convmixer", None, [32, 32]),
    ]
    assert rows[0]["cosine"] == pytest.approx(1) and rows[-1]["cosine"] is None
    assert all(0.5 < row["cosine"] < 0.99 for row in rows[1:-1])
    for row in rows:
        speeds = {name: list(speeds) for name, speeds in row["images_per_second"].items()}
        assert speeds == {"float32": ["1", "32"], "bf16": ["1", "32"]}
    vit = ViTForImageClassification.from_pretrained(VIT)
    assert rows[0]["parameters"] == rows[1]["parameters"] == vit.num_parameters()
    assert rows[0]["macs"] == count_macs(vit, 32).macs_with_attention
    assert content["command"].startswith("frugalvit compare ") and content["settings"]["images"] == 48
    lines = (folder / "compare.md").read_text().splitlines()
    assert len(lines) == 2 + len(rows) + 2 and all(line.count("|") == lines[0].count("|") for line in lines[:-2])
    assert f"{100 * rows[0]['accuracy']:.1f} ± " in lines[2]
    with Image.open(folder / "compare.png") as picture:
        assert picture.size == (1200, 800)


@pytest.mark.parametrize("kind", ["timm-vit", "vit-classifier", "clip"])
def test_a_teacher_is_timed_as_it_runs(kind):
    anatomy = read_anatomy(KINDS[kind].make())
    teacher, images = as_teacher(anatomy), anatomy.example()
    with torch.no_grad():
        assert torch.equal(teacher.model(images), (anatomy.run_classifier or anatomy.run)(images))
        assert torch.equal(teacher.embed(images), anatomy.run(images))
    assert teacher.tokens == anatomy.num_prefix_tokens + 64


def test_macs_of_a_model_that_the_meta_device_cannot_run():
    """SigLIP 2 NaFlex reads the shapes of its images."""
    naflex, fixed = (as_teacher(read_anatomy(KINDS[kind].make())) for kind in ("siglip2", "siglip"))
    with pytest.raises(RuntimeError):
        count_macs(naflex.model, 32)
    assert naflex.macs == pytest.approx(fixed.macs, rel=0.01)


def test_lower_resolution():
    """The teacher's own view, smaller, through the teacher's blocks with resampled positions."""
    model = ViTForImageClassification.from_pretrained(VIT).eval()
    contender = at_lower_resolution(read_anatomy(model), None, (16, 16))
    view = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    small = F.interpolate(view, (16, 16), mode="bilinear", antialias=True, align_corners=False)
    with torch.no_grad():
        resized = resize_positions_(ViTForImageClassification.from_pretrained(VIT).eval(), 16)
        assert torch.allclose(contender.model(small), resized(small).logits, atol=1e-3)
        assert torch.allclose(contender.model(small), model.classifier(contender.embed(small)), atol=1e-5)
    assert contender.macs == count_macs(resized, 16).macs_with_attention


def test_default_resolutions():
    contenders = load_teachers(VIT, device="cpu")
    assert [contender.image_size for contender in contenders[1:]] == [(16, 16), (20, 20), (24, 24)]
    assert [contender.tokens for contender in contenders] == [65, 17, 26, 37]


def test_errors_are_paired():
    """The error of a difference is that of what differs, image by image."""
    teacher = torch.tensor([1.0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.float64)
    right = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 1], dtype=torch.float64)
    found = describe_score("accuracy", right, teacher)
    assert found["accuracy"] == 0.625 and found["accuracy_difference"] == -0.125
    assert found["accuracy_error"] == pytest.approx(right.numpy().std(ddof=1) / 8**0.5)
    assert found["accuracy_difference_error"] == pytest.approx((right - teacher).numpy().std(ddof=1) / 8**0.5)


def test_features_are_judged_as_evaluation_does(tmp_path):
    images = ["--split", "test[:60]", "--train-split", "train[:150]"]
    options = ["--resolutions", "--rounds", 1, "--precision", "float32"]
    folder = tmp_path / "out"
    assert run(VIT, STUDENT, "--features", *images, *options, "--output", folder) == 0
    content = json.loads((folder / "compare.json").read_text())
    assert content["settings"]["train_images"] == 150 and "accuracy" not in content["rows"][0]
    for row, name in zip(content["rows"], (VIT, STUDENT), strict=True):
        for task, measure in (("knn", "neighbor_accuracy"), ("linear", "linear_accuracy")):
            file = tmp_path / "results.json"
            arguments = ["evaluate", task, "--model", name, *images, "--device", "cpu", "--output", str(file)]
            assert main(arguments) == 0
            assert row[measure] == pytest.approx(json.loads(file.read_text())["accuracy"])


class Constant(nn.Module):
    """A classifier that always gives the same answer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 8)

    def forward(self, pixel_values):
        return self.linear(pixel_values.mean((2, 3)))

    def classify(self, embedding):
        return F.one_hot(torch.full((len(embedding),), 3), 10).float()


@pytest.mark.parametrize("first", [0, 2])
def test_another_contender(first):
    """Any model can be described; its images are resized, and its classes matched by name."""
    images, model = load_images(SUBSET, "test[:20]"), Constant()
    names = images.features["label"].names
    own = [*names[first:], *names[:first]]
    processor, classes = ViTImageProcessor(size={"height": 32, "width": 32}), dict(enumerate(own))
    mine = Contender(
        "mine", "a method", model, (8, 8), model, processor, classifier=model.classify, id2label=classes, draws=2
    )
    student, row = compare([*load_students(STUDENT, device="cpu"), mine], images, rounds=1)
    assert row["accuracy"] == images["label"].count(names.index(own[3])) / 20 and row["accuracy_difference"] < 0
    assert (row["method"], row["parameters"], row["macs"], row["cosine"]) == ("a method", 32, 24, None)
    assert student["images_per_second"]["float32"].keys() == row["images_per_second"]["float32"].keys()


def test_images_without_labels(tmp_path):
    (tmp_path / "images").mkdir()
    for color in ("red", "blue"):
        Image.new("RGB", (40, 30), color).save(tmp_path / "images" / f"{color}.png")
    options = ["--resolutions", "--rounds", 1, "--precision", "float32"]
    assert run(VIT, STUDENT, "--dataset", tmp_path / "images", *options, "--output", tmp_path / "out") == 0
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())["rows"]
    assert "accuracy" not in rows[0] and rows[1]["cosine"] > 0.3


def test_picture():
    """A line for each method over speed; the legend has names as they are."""

    def row(model, method, accuracy, speed):
        values = {"accuracy": accuracy, "accuracy_error": 0.01, "cosine": 0.9}
        return {"model": model, "method": method, "images_per_second": {"float32": {"1": 1.0, "32": speed}}, **values}

    rows = [row("$v_$", "teacher", 0.9, 30.0), row("s", "fewer", 0.8, 90.0), row("t", "fewer", 0.85, 60.0)]
    figure = draw_comparison(rows)
    [axes], [legend] = figure.axes, figure.legends
    star, fewer = (bars.lines[0] for bars in axes.containers)
    assert star.get_xydata().tolist() == [[30, 90]]
    assert list(fewer.get_xdata()) == [60, 90] and np.allclose(fewer.get_ydata(), [85, 80])
    assert [text.get_text() for text in legend.get_texts()] == ["teacher, $v_$", "fewer"]
    figure.draw_without_rendering()
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([VIT, "--output", "full"], "exists and is no empty folder"),
        ([VIT, "--output", "out", "--resolutions", "15"], "--resolutions 15"),
        ([VIT, "no/folder/here", "--output", "out"], "Cannot load 'no/folder/here'"),
        ([str(checkpoint_path("cifar10-convmixer")), "--output", "out"], "Cannot compare students with"),
        ([VIT, "--output", "out", "--dataset", "animals"], "The model does not know the classes"),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch, capsys):
    """One line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    for label in ("owl", "fox"):
        (tmp_path / "animals" / label).mkdir(parents=True)
        Image.new("RGB", (32, 32), "red").save(tmp_path / "animals" / label / "0.png")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = sorted(os.listdir(tmp_path))
    try:
        assert run(*arguments) == 1
    except SystemExit as stop:
        assert stop.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert sorted(os.listdir(tmp_path)) == before
