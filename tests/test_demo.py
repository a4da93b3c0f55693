"""`frugalvit demo`: a real page, asked as a browser asks it."""

import base64
import contextlib
import io
import os
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
import torch
from frugalvit_cli import main
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

import frugalvit
from frugalvit import demo
from frugalvit.common.loading import load_image_classifier


NAMES = ("cifar10-sparseformer", "cifar10-vit-context-broadcast")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Function that asks the page, served by the command, what it shows of a model and an image."""
    config = frugalvit.PatchSparseFormerConfig(
        **{"image_size": 32, "patch_size": 4, "num_latent_tokens": 16, "elastic_token_counts": [4, 9, 16]},
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    )
    torch.manual_seed(0)
    elastic = tmp_path_factory.mktemp("models") / "elastic"
    frugalvit.PatchSparseFormerForImageClassification(config).save_pretrained(elastic)
    folders = [*(str(frugalvit.checkpoint_path(name)) for name in NAMES), str(elastic)]
    folder, port = tmp_path_factory.mktemp("demo"), free_port()
    command = [sys.executable, "-m", "frugalvit", "demo", *folders, "--device", "cpu", "--port", str(port)]
    temporary, log = tmp_path_factory.mktemp("temporary"), folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=folder, env={**os.environ, "TMPDIR": str(temporary)}
        )
        try:
            for _ in range(4000):
                assert process.poll() is None, log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"http://127.0.0.1:{port}/gradio_api/info")
                    break
                time.sleep(0.05)
            client = Client(f"http://127.0.0.1:{port}", verbose=False)
            yield lambda name, file, tokens=256: client.predict(
                file and handle_file(file), name, tokens, api_name="/look"
            )
        finally:
            process.terminate()
            process.wait()
    assert not list(temporary.iterdir())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def image_file(tmp_path_factory) -> str:
    return demo.write_examples(tmp_path_factory.mktemp("examples"))[0]


def picture(update: dict) -> np.ndarray:
    """Pixels of a plot that the page shows."""
    encoded = update["plot"].partition("base64,")[2]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("L"))


def test_shows_labels_and_where_tokens_look(ask, image_file):
    for name in NAMES:
        labels, rois = ask(name, image_file)
        model, image_processor = load_image_classifier(frugalvit.checkpoint_path(name), "cpu")
        pixel_values = image_processor(Image.open(image_file), return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            best = model(pixel_values).logits.softmax(-1)[0].max(0)
        assert labels["label"] == model.config.id2label[best.indices.item()]
        assert labels["confidences"][0]["confidence"] == pytest.approx(best.values.item(), abs=1e-4)
        assert len(labels["confidences"]) == 5
        assert (rois is not None) == (name == "cifar10-sparseformer")
        assert rois is None or picture(rois).std() > 20
    # Without an image, there is nothing to draw.
    assert ask("cifar10-sparseformer", None)[1] is None


def test_what_is_no_image_is_said(ask, tmp_path):
    file = tmp_path / "image.png"
    # A small file of 60 million pixels.
    Image.new("1", (10_000, 6_000)).save(file)
    with pytest.raises(AppError, match="at most 50 million"):
        ask("cifar10-sparseformer", str(file))
    for text in ("no image", "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        file.write_text(text)
        with pytest.raises(AppError, match="cannot identify image"):
            ask("cifar10-sparseformer", str(file))
    file.write_bytes(bytes(21_000_000))
    with pytest.raises(ValueError, match="exceeds the maximum file size"):
        ask("cifar10-sparseformer", str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["here/model", "there/model"], "Two of the models have the same name"),
        (["nowhere/at/all"], "Cannot load 'nowhere/at/all'"),
        (["{folder}"], "it has no config.json"),
    ],
)
def test_what_cannot_be_served_is_known_first(arguments, message, tmp_path, capsys):
    assert main(["demo", *(text.format(folder=tmp_path) for text in arguments)]) == 1
    assert message in capsys.readouterr().err
