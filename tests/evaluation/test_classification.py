"""Tests of `frugalvit evaluate classification`."""

import io
import json

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessor

from drawn import draw_classes, encode
from frugalvit.cli import main
from frugalvit.training.arguments import DataArguments
from frugalvit.training.data import load_splits, match_labels
from tiny import make_vit, save_vit


LABELS = ["airplane", "bird", "cat", "dog", "frog", "horse", "ship"]
COUNT = 23


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a ViT with random weights for 7 classes, and return its folder."""
    folder = tmp_path_factory.mktemp("models") / "vit"
    model = make_vit(id2label=dict(enumerate(LABELS)), label2id={label: i for i, label in enumerate(LABELS)})
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def write_images(path, names=LABELS):
    """Write random images with labels to a parquet file. Return the encoded images and the labels."""
    generator = np.random.default_rng(0)
    encoded = [encode(generator.integers(0, 256, (24, 40, 3), dtype=np.uint8)) for _ in range(COUNT)]
    labels = generator.integers(0, len(names), COUNT).tolist()
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    stored = [{"bytes": data, "path": None} for data in encoded]
    datasets.Dataset.from_dict({"img": stored, "label": labels}, features=features).to_parquet(str(path))
    return encoded, labels


def brute_force(folder, encoded, labels, change=lambda model, pixels, label: pixels) -> dict[str, float]:
    """Compute the scores one image at a time, after `change` has altered the image's pixels."""
    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    top1, top5, loss = 0, 0, 0.0
    for data, label in zip(encoded, labels, strict=True):
        pixels = processor(Image.open(io.BytesIO(data)), return_tensors="pt").pixel_values
        with torch.no_grad():
            probabilities = model(change(model, pixels, label)).logits[0].softmax(-1)
        ranking = sorted(range(len(LABELS)), key=lambda i: -probabilities[i])
        top1 += ranking[0] == label
        top5 += label in ranking[:5]
        loss -= probabilities[label].log().item()
    return {"accuracy": top1 / len(labels), "top5_accuracy": top5 / len(labels), "loss": loss / len(labels)}


@torch.enable_grad()
def attack(model, pixels, label):
    pixels = pixels.requires_grad_()
    torch.nn.functional.cross_entropy(model(pixels).logits, torch.tensor([label])).backward()
    colors = (pixels.detach() * 0.5 + 0.5 + 1 / 255 * pixels.grad.sign()).clamp(0, 1)
    return (colors - 0.5) / 0.5


def hide(model, pixels, label):
    pixels[..., 8:24, 8:24] = 0
    return pixels


def fails(*arguments, capsys) -> str:
    """Check that the command fails, and return the last line of its standard error."""
    assert main(["evaluate", "classification", *map(str, arguments)]) == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "change", "noted"),
    [
        ([], lambda model, pixels, label: pixels, {}),
        (["--attack", "fgsm"], attack, {"fgsm_eps": 1 / 255}),
        (["--occlude", "center"], hide, {"occluded_share": 0.25}),
    ],
)
def test_equals_brute_force(options, change, noted, folder, tmp_path, capsys):
    encoded, labels = write_images(tmp_path / "images.parquet")
    arguments = ["--model", folder, "--dataset", tmp_path / "images.parquet", "--batch-size", 5, *options]
    assert main(["evaluate", "classification", *map(str, arguments), "--output", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    expected = brute_force(folder, encoded, labels, change) | noted
    assert {name: results[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert 0 < results["accuracy"] < results["top5_accuracy"] < 1
    assert (results["images"], results["skipped"], results["split"]) == (COUNT, 0, "train")
    assert f"{results['accuracy']:.4g}" in capsys.readouterr().out


def test_multi_label_classifiers_are_refused(tmp_path, capsys):
    write_images(tmp_path / "images.parquet", names=["LABEL_0", "LABEL_1"])
    model = save_vit(tmp_path / "vit", problem_type="multi_label_classification")
    error = fails("--model", model, "--dataset", tmp_path / "images.parquet", capsys=capsys)
    assert "'multi_label_classification'" in error


def test_counts_exclude_skipped_images(folder, tmp_path, capsys):
    draw_classes(tmp_path / "images", 3, ("1", "2"))
    (tmp_path / "images" / "1" / "empty.png").touch()
    arguments = ["--model", folder, "--dataset", tmp_path / "images"]
    assert "1 of 7 images of train cannot be read: " in fails(*arguments, capsys=capsys)
    output = tmp_path / "out.json"
    words = ["evaluate", "classification", *map(str, arguments), "--skip-corrupt", "--output", str(output)]
    assert main(words) == 0
    results = json.loads(output.read_text())
    assert (results["images"], results["skipped"]) == (6, 1)
    assert f"1 of 7 images of train left out: {tmp_path}/images/1/empty.png" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["classification", "knn"])
def test_a_single_class_is_refused(task, tmp_path, capsys):
    draw_classes(tmp_path / "images", 12, ("cat",))
    words = f"evaluate {task} --model cifar10-vit --dataset {tmp_path}/images --device cpu".split()
    assert main(words) == 1
    assert "There is one class, cat (1), expected two or more" in capsys.readouterr().err
    with pytest.raises(ValueError, match="There is one class, cat"):
        load_splits(DataArguments(dataset=[str(tmp_path / "images")]), learns_labels=True)


@pytest.mark.parametrize(
    ("names", "labels", "expected"),
    [
        (["polar_bear", "Sea lion"], ["Polar Bear", "sea-lion"], [0, 1]),
        (["tabby", "dog"], ["LABEL_0", "LABEL_1", "LABEL_2"], [0, 1]),
        (["crane", "Crane"], ["Crane", "crane"], [1, 0]),
        (["CAF\u00c9"], ["dog", "cafe\u0301"], [1]),
        (["tabby", "dog"], ["cat", "dog", "frog"], "does not know the classes tabby \\(1\\)"),
        # Two classes of the model have the name "cat", so the name is ambiguous.
        (["cat", "dog"], ["cat", "cat", "dog"], "has classes 0, 1 called 'cat'"),
        (["Cat", "cat"], ["cat", "dog"], "The classes 'Cat' and 'cat' are both the model's 'cat'"),
        (["1", "0", "01"], ["a", "b"], "The classes '1' and '01' are both the model's 'b'"),
    ],
)
def test_classes_are_matched_by_name(names, labels, expected):
    if isinstance(expected, list):
        assert match_labels(names, dict(enumerate(labels))) == expected
        return
    with pytest.raises(ValueError, match=expected):
        match_labels(names, dict(enumerate(labels)))


def test_images_without_labels_are_refused(folder, tmp_path, capsys):
    write_images(tmp_path / "images.parquet")
    table = pq.read_table(tmp_path / "images.parquet").drop_columns(["label"]).replace_schema_metadata()
    pq.write_table(table, tmp_path / "images.parquet")
    assert "no labels" in fails("--model", folder, "--dataset", tmp_path / "images.parquet", capsys=capsys)
