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

import gradio
import httpx
import numpy as np
import pytest
import torch
from huggingface_hub import SpaceCard
from packaging.requirements import Requirement
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

import frugalvit
from frugalvit import demo
from frugalvit.cli import main
from frugalvit.common.loading import load_image_classifier
from frugalvit.dense import dense_features, principal_colors
from frugalvit.publish import size_of


NAMES = ("cifar10-sparseformer", "cifar10-vit-context-broadcast")
# Models for several numbers of tokens, with random weights.
ELASTIC = {
    "elastic": {"elastic_token_counts": [4, 9, 16]},
    "tree": {"elastic_token_counts": [4, 16], "placement": "content"},
    # As DPT reads it.
    "backbone": {"elastic_token_counts": [4, 16], "placement": "content", "reshape_hidden_states": False},
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Function that asks the page, served by the command, what it shows of a model and an image."""
    folders = [str(frugalvit.checkpoint_path(name)) for name in NAMES]
    folders += [save_elastic(tmp_path_factory.mktemp("models") / name, **kind) for name, kind in ELASTIC.items()]
    command, port = [sys.executable, "-m", "frugalvit", "demo", *folders, "--device", "cpu"], free_port()
    temporary = tmp_path_factory.mktemp("temporary")
    # What `mkdtemp` and gradio write, they write there.
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


def save_elastic(folder, elastic_token_counts: list[int], **kind) -> str:
    config = frugalvit.PatchSparseFormerConfig(
        **{"image_size": 32, "patch_size": 4, "num_latent_tokens": 16, "elastic_token_counts": elastic_token_counts},
        **{"hidden_size": 32, "focusing_hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **kind},
    )
    torch.manual_seed(0)
    backbone = "reshape_hidden_states" in kind
    model_class = frugalvit.SparseFormerBackbone if backbone else frugalvit.SparseFormerForImageClassification
    model_class(config).save_pretrained(folder)
    return str(folder)


def wait_for(url: str, process: subprocess.Popen, log, seconds: float = 200):
    for _ in range(int(20 * seconds)):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url, verify=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError(log.read_text())


def look(api: str, model: str, image_file: str | None, fails: bool = False, tokens: int = 1024):
    """The page's answer: all that it shows, or an error."""
    image = None
    if image_file:
        with open(image_file, "rb") as file:
            [path] = httpx.post(f"{api}/upload", files={"files": file}).raise_for_status().json()
        image = {"path": path, "meta": {"_type": "gradio.FileData"}}
    event = httpx.post(f"{api}/call/look", json={"data": [model, image, tokens]}).raise_for_status().json()["event_id"]
    answer = httpx.get(f"{api}/call/look/{event}", timeout=120).raise_for_status().text
    assert ("event: error" if fails else "event: complete") in answer, answer
    return json.loads(answer.rpartition("data: ")[2])


@pytest.fixture(scope="module")
def image_file(tmp_path_factory) -> str:
    return str(demo.example_images(tmp_path_factory.mktemp("demo") / "examples") / "0.png")


def picture(update: dict) -> np.ndarray:
    """Pixels of a plot that the page shows."""
    encoded = update["value"]["plot"].partition("base64,")[2]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("L"))


def test_shows_labels_and_pictures(ask, image_file):
    rois_of = {}
    for name in NAMES:
        labels, rois, features, attention = ask(name, image_file)
        model, image_processor = load_image_classifier(frugalvit.checkpoint_path(name), "cpu")
        pixel_values = image_processor(Image.open(image_file), return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            best = model(pixel_values).logits.softmax(-1)[0].max(0)
        assert labels["label"] == model.config.id2label[best.indices.item()]
        assert labels["confidences"][0]["confidence"] == pytest.approx(best.values.item(), abs=1e-4)
        assert len(labels["confidences"]) == 5
        rois_of[name] = rois["visible"]
        assert rois["visible"] != features["visible"] and attention["visible"]
        for shown in (rois if rois["visible"] else features, attention):
            assert picture(shown).std() > 20
    assert rois_of == {"cifar10-sparseformer": True, "cifar10-vit-context-broadcast": False}


def test_tokens_can_be_chosen(ask, image_file):
    """The nearest count that the model is made for."""
    shown = {tokens: ask("elastic", image_file, tokens=tokens) for tokens in (1, 4, 5, 16, 1024)}
    rois = {tokens: picture(update[1]) for tokens, update in shown.items()}
    assert np.array_equal(rois[1], rois[4]) and np.array_equal(rois[4], rois[5])
    assert np.array_equal(rois[16], rois[1024]) and not np.array_equal(rois[4], rois[16])
    assert shown[4][0] == shown[5][0] != shown[16][0]


def test_a_tree_grows(ask, image_file, tmp_path):
    """By three tokens a step, also between the counts that the model is made for; its cells lie over the image."""
    shown = {tokens: picture(ask("tree", image_file, tokens=tokens)[1]) for tokens in (4, 6, 7, 16)}
    assert np.array_equal(shown[6], shown[7])
    assert not any(np.array_equal(shown[7], shown[tokens]) for tokens in (4, 16))
    model, image_processor = load_image_classifier(save_elastic(tmp_path / "tree", **ELASTIC["tree"]), "cpu")
    assert demo.token_counts(model) == [4, 7, 10, 13, 16]
    for tokens in (4, 7):
        _, figure, *_ = demo.look(model, image_processor, Image.open(image_file), num_tokens=tokens)
        seen, cells = figure.axes
        assert not seen.collections and {len(lines.get_paths()) for lines in cells.collections} == {tokens}


@pytest.mark.parametrize("name", ["elastic", "backbone"])
def test_feature_maps(name, ask, image_file, tmp_path):
    """Of as many tokens as are chosen, in the colors of the most: those that `SparseFormerBackbone` reads out."""
    shown = {tokens: ask(name, image_file, tokens=tokens) for tokens in (4, 16)}
    assert all(features["visible"] for _, _, features, _ in shown.values())
    model, image_processor = load_image_classifier(save_elastic(tmp_path / name, **ELASTIC[name]), "cpu", False, True)
    labels, rois, features, attention = demo.look(model, image_processor, Image.open(image_file), num_tokens=4)
    assert bool(labels) == bool(shown[4][0].get("label")) == (name == "elastic")
    assert rois and attention and len(features.axes) == 3
    backbone = frugalvit.PatchSparseFormerBackbone.from_pretrained(tmp_path / name, reshape_hidden_states=True)
    pixel_values = image_processor(Image.open(image_file), return_tensors="pt")["pixel_values"]
    maps = [dense_features(backbone, pixel_values, tokens)["stage2"] for tokens in (16, 4)]
    for axes, colors in zip(features.axes[1:], principal_colors(*maps), strict=True):
        np.testing.assert_allclose(axes.images[0].get_array(), colors[0].permute(1, 2, 0), atol=1e-4)
    assert not np.array_equal(picture(shown[4][2]), picture(shown[16][2]))


def test_nothing_is_shown_without_an_image(ask):
    _, *updates = ask("cifar10-sparseformer", None)
    assert [update["visible"] for update in updates] == [False] * 3


def write_bomb(path):
    """A small file of 60 million pixels."""
    Image.new("1", (10_000, 6_000)).save(path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_bomb, "at most 50 million"),
        (lambda path: path.write_text("no image"), "cannot identify image"),
        (lambda path: path.write_bytes(encoded()[:200]), "Cannot show that"),
        (lambda path: path.write_bytes(b""), "cannot identify image"),
        (lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "cannot identify image"),
    ],
    ids=["bomb", "text", "truncated", "empty", "PostScript"],
)
def test_what_is_no_image_is_said(write, message, ask, tmp_path):
    write(tmp_path / "image.png")
    said = ask("cifar10-sparseformer", str(tmp_path / "image.png"), fails=True)["error"]
    assert message in said and "/" not in said


def encoded() -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((32, 32), 50).save(buffer, "PNG")
    return buffer.getvalue()


def test_large_files_are_refused(ask):
    with pytest.raises(httpx.HTTPStatusError, match="413"):
        [api] = ask.args
        files = {"files": io.BytesIO(bytes(21_000_000))}
        httpx.post(f"{api}/upload", files=files, timeout=60).raise_for_status()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "--port is 99999, expected a number from 1 to 65535"),
        (["--port", "-1"], "--port is -1"),
        (["nowhere/at/all"], "There is no folder"),
        (["{folder}"], "it has no config.json"),
    ],
)
def test_what_cannot_be_served_is_known_first(arguments, message, tmp_path, capsys):
    assert main(["demo", *(text.format(folder=tmp_path) for text in arguments)]) == 1
    assert message in capsys.readouterr().err


@torch.no_grad()
def test_attention_lies_where_patches_are():
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="eager",
    )
    model, pixel_values = ViTForImageClassification(config).eval(), torch.randn(1, 3, 32, 32)
    maps = demo.attention_maps(model, pixel_values)
    attentions = model(pixel_values, output_attentions=True).attentions
    for values, weights in zip(maps, attentions, strict=True):
        torch.testing.assert_close(values[1, 2], weights[0, :, :, 1 + 4 + 2].mean())


def test_attention_to_a_token_is_spread_over_its_roi():
    rois = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.5, 0.0, 1.0, 0.5], [-1.0, -1.0, -0.5, -0.5], [1.0, 0.5, 0.5, 0.0]])
    shares = demo._shares_of_rois(rois, 4)
    assert shares.sum((1, 2)).tolist() == [1, 1, 0, 1]
    expected = torch.zeros(4, 4)
    expected[:2, 2:] = 0.25
    assert torch.equal(shares[1], expected) and torch.equal(shares[3], expected)


def test_two_models_of_one_name(capsys):
    assert main(["demo", "here/model", "there/model"]) == 1
    assert "Two of the models have the same name" in capsys.readouterr().err


def test_without_gradio(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ValueError, match="pip install 'frugalvit.demo.'"):
        demo.build_page({})


def test_a_space_shows_a_model_with_the_code_that_it_brings(image_file, imported_once, tmp_path, capsys):
    """As the hub runs it: its folder, packages of its requirements.txt, gradio's variables."""
    source, folder = frugalvit.checkpoint_path("cifar10-sparseformer"), tmp_path / "space"
    assert main(["publish", str(source), "--space", "--output", str(folder)]) == 0
    assert f"Wrote {folder}." in capsys.readouterr().out
    about = SpaceCard.load(folder / "README.md").data
    assert (about.sdk, about.sdk_version, about.app_file, about.license) == (
        *("gradio", gradio.__version__, "app.py", "apache-2.0"),
    )
    installed = {Requirement(line).name for line in (folder / "requirements.txt").read_text().splitlines()}
    assert {"torch", "transformers", "timm"} <= installed and not {"gradio", "frugalvit", "pytest"} & installed
    assert not list((folder / "model").glob("*.py")) and sum(size_of(path) for path in folder.iterdir()) < 12e6
    # Nothing is there but what it brings and other packages: of frugalvit no clone and no install.
    code = "import runpy, sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
    code += f"sys.path.insert(0, {str(folder)!r}); runpy.run_path('app.py', run_name='__main__')"
    port = free_port()
    page = {"GRADIO_SERVER_PORT": str(port), "GRADIO_SERVER_NAME": "127.0.0.1"}
    with served([sys.executable, "-c", code], port, folder, **page) as ask:
        labels, rois, *_ = ask("cifar10-sparseformer", image_file)
    model, image_processor = load_image_classifier(source, "cpu")
    pixel_values = image_processor(Image.open(image_file), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        assert labels["label"] == model.config.id2label[model(pixel_values).logits.argmax().item()]
    assert rois["visible"]


def test_what_classifies_no_images_makes_no_space(imported_once, tmp_path, capsys):
    clip = str(frugalvit.checkpoint_path("cifar10-sparseformer-clip"))
    assert main(["publish", clip, "--space", "--output", str(tmp_path / "space")]) == 1
    assert "as an image classifier" in capsys.readouterr().err and not (tmp_path / "space").exists()
