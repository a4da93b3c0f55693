"""Tests of the page that `frugalvit demo` serves."""

import base64
import io
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from processes import web_server

import frugalvit
from frugalvit import demo
from frugalvit.training.loading import load_model


NAMES = ("cifar10-sparseformer", "cifar10-vit-context-broadcast")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Serve the page. Yield a function that sends an image to the page and returns labels and a picture of RoIs."""
    import gradio_client

    folders = [str(frugalvit.checkpoint_path(name)) for name in NAMES]
    temporary = tmp_path_factory.mktemp("temporary")
    command = [sys.executable, "-m", "frugalvit", "demo", *folders, "--device", "cpu"]
    with web_server(command, tmp_path_factory.mktemp("demo"), os.environ | {"TMPDIR": str(temporary)}) as address:
        client = gradio_client.Client(address, verbose=False)
        yield lambda name, file, tokens=256: client.predict(
            file and gradio_client.handle_file(file), name, tokens, api_name="/look"
        )
    assert not list(temporary.iterdir())


@pytest.fixture(scope="module")
def image_file(tmp_path_factory) -> str:
    return demo.write_examples(tmp_path_factory.mktemp("examples"))[0]


def picture(update: dict) -> np.ndarray:
    """Decode a plot of the page to gray pixels."""
    encoded = update["plot"].partition("base64,")[2]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("L"))


def test_page_shows_labels_and_rois(ask, image_file):
    for name in NAMES:
        labels, rois = ask(name, image_file)
        model, image_processor = load_model(frugalvit.checkpoint_path(name), "image-classification", "cpu")
        pixel_values = image_processor(Image.open(image_file), return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            best = model(pixel_values).logits.softmax(-1)[0].max(0)
        assert labels["label"] == model.config.id2label[best.indices.item()]
        assert labels["confidences"][0]["confidence"] == pytest.approx(best.values.item(), abs=1e-4)
        assert len(labels["confidences"]) == 5
        assert (rois is not None) == (name == "cifar10-sparseformer")
        assert rois is None or picture(rois).std() > 20
    assert ask("cifar10-sparseformer", None)[1] is None


def test_unreadable_images_are_errors(ask, tmp_path):
    file = tmp_path / "image.png"
    # This small file decodes to 60 million pixels, more than the limit of 50 million.
    Image.new("1", (10_000, 6_000)).save(file)
    with pytest.raises(Exception, match="at most 50 million"):
        ask("cifar10-sparseformer", str(file))
    file.write_text("no image")
    with pytest.raises(Exception, match="cannot identify image"):
        ask("cifar10-sparseformer", str(file))
