"""The number of tokens, chosen on the command line of `frugalvit predict` and `frugalvit evaluate`."""

import json

import pytest
import torch
from frugalvit_cli import main

from frugalvit import PatchSparseFormerConfig, PatchSparseFormerForImageClassification, checkpoint_path
from frugalvit.common.choices import SUBSET
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.common.labels import class_names


SPLIT = "test[:24]"


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """A folder with a model that is sure of some images with its fewest tokens, and of others not."""
    folder = tmp_path_factory.mktemp("elastic")
    torch.manual_seed(0)
    names = class_names(load_images(SUBSET, SPLIT))
    config = PatchSparseFormerConfig(
        **{"image_size": 32, "patch_size": 4, "num_latent_tokens": 16, "elastic_token_counts": [4, 9, 16]},
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}},
    )
    model = PatchSparseFormerForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for index, record in enumerate(load_images(SUBSET, SPLIT)):
        decode_image(record["image"], index).save(folder / f"{index:02}.png")
    return folder


def predict(elastic, images, *arguments, capsys) -> list[dict]:
    assert main(["predict", str(images), "--model", str(elastic), "--json", "--top", "1", *arguments]) in (0, None)
    return json.loads(capsys.readouterr().out)


def evaluate(elastic, tmp_path, *arguments) -> dict:
    results = tmp_path / "results.json"
    model = ["--model", str(elastic), "--split", SPLIT, "--device", "cpu", "--output", str(results)]
    assert main(["evaluate", "classification", *model, *arguments]) == 0
    return json.loads(results.read_text())


def test_sure_images_take_few_tokens(elastic, images, capsys):
    by_count = {count: predict(elastic, images, "--num-tokens", str(count), capsys=capsys) for count in (4, 9, 16)}
    assert "num_tokens" not in by_count[4][0] and by_count[16] == predict(elastic, images, capsys=capsys)
    confidence = sorted(image["labels"][0]["score"] for image in by_count[4])[12]
    found = predict(elastic, images, "--confidence", str(confidence), capsys=capsys)
    assert {image["num_tokens"] for image in found} == {4, 16}
    for index, image in enumerate(found):
        expected = by_count[image["num_tokens"]][index]["labels"][0]
        assert image["labels"][0] == {"label": expected["label"], "score": pytest.approx(expected["score"], rel=1e-4)}


def test_evaluation_with_a_count(elastic, tmp_path):
    few, all_tokens = evaluate(elastic, tmp_path, "--num-tokens", "4"), evaluate(elastic, tmp_path)
    assert few["num_tokens"] == 4 and "num_tokens" not in all_tokens
    assert few["loss"] != all_tokens["loss"]


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("elastic", ["--num-tokens", "17"], "`num_tokens` is 17, expected 1 to 16"),
        ("elastic", ["--confidence", "2"], "got '2', expected a number from 0 to 1"),
        ("elastic", ["--confidence", "0.5", "--rois", "rois.png"], "leave --confidence out"),
        ("cifar10-vit", ["--num-tokens", "4"], "--num-tokens is for SparseFormers"),
        ("cifar10-vit", ["--confidence", "0.5"], "A confidence is for classifiers that are SparseFormers"),
        ("cifar10-sparseformer", ["--confidence", "0.5"], "A confidence needs a model for several numbers of tokens"),
    ],
)
def test_what_cannot_be_chosen(model, arguments, message, elastic, images, capsys):
    folder = elastic if model == "elastic" else checkpoint_path(model)
    try:
        code = main(["predict", str(images), "--model", str(folder), *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code in (1, 2) and message in captured.err and "Traceback" not in captured.err
