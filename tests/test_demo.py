"""`frugalvit demo`: a real page, asked as a browser asks it."""

import base64
import contextlib
import functools
import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from frugalvit_cli import main
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
    command, port = [sys.executable, "-m", "frugalvit", "demo", *folders, "--device", "cpu"], free_port()
    temporary = tmp_path_factory.mktemp("temporary")
    with served([*command, "--port", str(port)], port, tmp_path_factory.mktemp("demo"), TMPDIR=str(temporary)) as ask:
        yield ask
    assert not list(temporary.iterdir())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def served(command: list[str], port: int, folder: Path, **environment: str):
    """A page in a process that runs in a folder; the function that asks it."""
    log = folder / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}, cwd=folder
        ) as process,
    ):
        try:
            api = f"http://127.0.0.1:{port}/gradio_api"
            wait_for(f"{api}/info", process, log)
            yield functools.partial(look, api)
        finally:
            process.terminate()
            process.wait()


def wait_for(url: str, process: subprocess.Popen, log, seconds: float = 200):
    for _ in range(int(20 * seconds)):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url, verify=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError(log.read_text())


def look(api: str, model: str, image_file: str | None, fails: bool = False, tokens: int = 256):
    """The page's answer: labels and picture, or an error."""
    image = None
    if image_file:
        with open(image_file, "rb") as file:
            [path] = httpx.post(f"{api}/upload", files={"files": file}).raise_for_status().json()
        image = {"path": path, "meta": {"_type": "gradio.FileData"}}
    event = httpx.post(f"{api}/call/look", json={"data": [image, model, tokens]}).raise_for_status().json()["event_id"]
    answer = httpx.get(f"{api}/call/look/{event}", timeout=120).raise_for_status().text
    assert ("event: error" if fails else "event: complete") in answer, answer
    return json.loads(answer.rpartition("data: ")[2])


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
    assert "at most 50 million" in ask("cifar10-sparseformer", str(file), fails=True)["error"]
    for text in ("no image", "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        file.write_text(text)
        assert "cannot identify image" in ask("cifar10-sparseformer", str(file), fails=True)["error"]
    with pytest.raises(httpx.HTTPStatusError, match="413"):
        [api] = ask.args
        files = {"files": io.BytesIO(bytes(21_000_000))}
        httpx.post(f"{api}/upload", files=files, timeout=60).raise_for_status()


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
