"""Tests of `frugalvit predict`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessor, pipeline

from drawn import noise
from frugalvit import Classifier
from frugalvit.cli import main
from frugalvit.predict import find_images, format_labels, format_prediction, predict
from frugalvit.training.files import shipped_images
from frugalvit.training.loading import load_model
from kinds import KINDS
from tiny import make_vit, randomize


LABELS = ["airplane", "bird", "cat", "dog"]
SIZES = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Save a SparseFormer whose RoIs differ between images, and return its folder."""
    torch.manual_seed(0)
    model = KINDS["bootstrapped"].classifier(KINDS["bootstrapped"].config(num_labels=4, **SIZES))
    torch.nn.init.normal_(model.sparseformer.focusing_layer.roi_deltas.out_proj.weight, std=0.2)
    torch.nn.init.normal_(model.classifier.weight, std=0.1)
    folder = tmp_path_factory.mktemp("models") / "sparseformer"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def images(tmp_path):
    """Write three images and some other files to a folder and its subfolder. Return the folder."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for seed, name in enumerate(("a.png", "b.jpg", "more/c.webp")):
        noise(seed=seed).save(folder / name)
    for name in ("notes.txt", "a.pdf", "._a.png", "more/._c.webp", ".hidden.png", "more/notes.docx"):
        (folder / name).write_text("no image")
    return folder


def run(*arguments, capsys) -> tuple[int, str, str]:
    try:
        code = main(["predict", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    return code, output.out, output.err


def fails(*arguments, capsys) -> str:
    """Check that the command fails with one line of error, and return this line."""
    code, output, error = run(*arguments, capsys=capsys)
    assert code == 1 and not output
    assert error.startswith("frugalvit predict: error: ") and error.count("\n") == 1
    return error


def test_top_labels(model_folder, images, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(images))
    code, output, _ = run("~/a.png", "--model", model_folder, "--top", 2, capsys=capsys)
    lines = output.splitlines()
    assert code == 0 and lines[0] == str(images / "a.png") and len(lines) == 3
    model, processor = load_model(model_folder, "image-classification", "cpu")
    pixel_values = processor(Image.open(images / "a.png"), return_tensors="pt").pixel_values
    scores, indices = model(pixel_values).logits[0].softmax(-1).topk(2)
    expected = [f"{score:8.1%}  {LABELS[i]}" for score, i in zip(scores.tolist(), indices.tolist(), strict=True)]
    assert lines[1:] == expected


def test_folders_patterns_and_batches_as_json(model_folder, images, capsys):
    arguments = ["--model", model_folder, "--json", "--batch-size"]
    code, output, _ = run(images, *arguments, 2, capsys=capsys)
    results = json.loads(output)
    assert code == 0
    assert [result["image"] for result in results] == [str(images / n) for n in ("a.png", "b.jpg", "more/c.webp")]
    for result in results:
        assert sum(label["score"] for label in result["labels"]) == pytest.approx(1)
    _, output, _ = run(images, *arguments, 2, "--limit", 2, capsys=capsys)
    assert json.loads(output) == results[:2]
    # This link points to a folder that contains the link. A search that follows the link would never end.
    (images / "more" / "again").symlink_to(images)
    for image in (images / "[ab].*g", images / "**" / "[!.]*.webp"):
        _, output, _ = run(image, *arguments, 1, capsys=capsys)
        for single in json.loads(output):
            batched = next(result for result in results if result["image"] == single["image"])
            assert [label["label"] for label in single["labels"]] == [label["label"] for label in batched["labels"]]
            scores = [[label["score"] for label in result["labels"]] for result in (single, batched)]
            np.testing.assert_allclose(*scores, atol=1e-5)
    assert find_images([str(images / "**" / "*.[pw][ne]*")]) == [images / "a.png", images / "more" / "c.webp"]


def test_corrupt_images_are_skipped_on_request(model_folder, images, capsys):
    for name, content in (("aa.png", b""), ("b1.png", (images / "a.png").read_bytes()[:99]), ("z.jpg", b"text")):
        (images / name).write_bytes(content)
    arguments = [images, "--model", model_folder, "--json", "--batch-size", 2]
    code, output, error = run(*arguments, "--skip-corrupt", capsys=capsys)
    assert code == 0 and [Path(result["image"]).name for result in json.loads(output)] == ["a.png", "b.jpg", "c.webp"]
    assert error.count("Left out: cannot read") == 3 and "--skip_corrupt" not in error
    assert "3 of 6 images were left out." in error
    error = fails(*arguments, "--rois", images / "rois.png", capsys=capsys)
    assert "aa.png" in error and "--skip_corrupt" in error
    assert not (images / "rois.png").exists()
    for name in ("a.png", "b.jpg", "more/c.webp"):
        (images / name).unlink()
    code, output, error = run(*arguments, "--skip-corrupt", capsys=capsys)
    assert code == 1 and "None of the images can be read" in error


def test_rois_are_drawn(model_folder, images, tmp_path, capsys, monkeypatch):
    saved = []
    monkeypatch.setattr("frugalvit.predict.save_figure", lambda figure, path: saved.append((figure, path)))
    picture = str(tmp_path / "rois.png")
    code, output, error = run(images, "--model", model_folder, "--rois", picture, capsys=capsys)
    assert code == 0 and len(output.splitlines()) == 3 * 5 and "Drew 3 of 3 images" in error
    figure, path = saved[0]
    assert str(path) == picture and len(figure.axes) == 3 * 5
    captions = [part.get_suptitle() for part in figure.subfigs]
    assert [caption.split(":")[0] for caption in captions] == ["a.png", "b.jpg", "c.webp"]
    assert output.splitlines()[1].split()[1] in captions[0]


def test_confident_images_take_few_tokens(capsys):
    arguments = [shipped_images("caltech101") / "test.parquet", "--model", "caltech101-sparseformer"]
    arguments += ["--limit", 12, "--top", 1, "--json"]
    by_count = {}
    for count in (9, 64):
        _, output, _ = run(*arguments, "--num-tokens", count, capsys=capsys)
        by_count[count] = json.loads(output)
    assert {image["num_tokens"] for image in by_count[9]} == {9}
    confidence = sorted(image["labels"][0]["score"] for image in by_count[9])[6]
    _, output, _ = run(*arguments, "--confidence", confidence, capsys=capsys)
    found = json.loads(output)
    assert {image["num_tokens"] for image in found} == {9, 64}
    for index, image in enumerate(found):
        expected = by_count[image["num_tokens"]][index]["labels"][0]
        assert image["labels"][0] == {"label": expected["label"], "score": pytest.approx(expected["score"], rel=1e-4)}


@pytest.mark.parametrize(
    ("problem_type", "num_labels"),
    [("multi_label_classification", 4), ("regression", 2), (None, 1), (None, 4)],
)
def test_scores_are_those_of_transformers_pipeline(problem_type, num_labels, images):
    model = randomize(make_vit(num_labels=num_labels, problem_type=problem_type))
    processor, image = ViTImageProcessor(size={"height": 32, "width": 32}), Image.open(images / "a.png").convert("RGB")
    answers = pipeline("image-classification", model=model, image_processor=processor, top_k=4)(image)
    expected = {answer["label"]: answer["score"] for answer in answers}
    (prediction,) = predict(model, processor, [image])
    assert dict(prediction.labels) == pytest.approx(expected, rel=1e-4)
    (scores,) = Classifier(model, processor)([image])
    assert scores == pytest.approx([expected[name] for name in model.config.id2label.values()], rel=1e-4)
    if problem_type == "regression":
        label, score = prediction.labels[0]
        assert f"{score:8.5g}  {label}" in format_prediction("a.png", prediction)
        assert format_labels(prediction).startswith(f"{label} {score:.5g}")
