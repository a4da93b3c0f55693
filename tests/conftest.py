"""The order of tests, and the hub's side of an upload, on this machine."""

import base64
import gc
import json
import os
import signal
import sys
import types


# Tests run side by side, and what they start computes little: threads would wait for each other. Besides, what is
# computed is then what a process of one thread computes, bit by bit. PyTorch reads it when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import httpx2
import huggingface_hub
import pytest
from accelerate.state import AcceleratorState
from huggingface_hub.utils._http import default_client_factory


# Few tests that take long, many of them processes to wait for.
LONG_MODULES = (
    "export",
    "ecosystem",
    "processes",
    "bootstrap",
    "hub",
    "llava",
    "train",
    "joint",
    "align_llava",
    "docs",
)


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """A test may have left one of another precision in this process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="session", autouse=True)
def signals_as_at_a_terminal():
    """A test run in the background is told to ignore some."""
    for name, usual in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
            signal.signal(getattr(signal, name), usual)


def pytest_configure():
    """Keep OpenVINO from sending usage data, for which it forks the process: without this package it sends none."""
    sys.modules["openvino_telemetry"] = None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from what is imported, while that happens and ever after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_no_garbage():
    """Let the garbage collector look once at what earlier modules imported and compiled: `Trainer` collects garbage
    whenever it trains."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Side by side, long modules run first: at the end, no process is left alone with much to do."""
    if hasattr(config, "workerinput"):
        rank = {f"test_{name}": index for index, name in enumerate(LONG_MODULES)}
        items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


class Hub:
    """Answers what creating a repository and committing files to it asks, and notes it.

    Attributes:
        files (`list[str]`): Names that the repository has already.
        created (`list[dict]`): What each creation asked for.
        branches (`list[str]`): Those that were made.
        commits (`list[tuple[str, dict, dict]]`): Path, header and files of each.
    """

    url = "https://huggingface.co"

    def __init__(self):
        self.files, self.created, self.branches, self.commits = [], [], [], []

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        path, name = request.url.path, request.url.path.rpartition("/")[2]
        if request.method == "HEAD":
            missing = {"X-Error-Code": "EntryNotFound"}
            return httpx2.Response(200) if name in self.files else httpx2.Response(404, headers=missing)
        if request.method == "GET":
            return httpx2.Response(200, json={"id": "someone/model", "private": True})
        if path == "/api/validate-yaml":
            return httpx2.Response(200, json={"errors": [], "warnings": []})
        parts = [json.loads(line) for line in request.read().splitlines()]
        if path == "/api/repos/create":
            self.created += parts
            return httpx2.Response(200, json={"url": f"{self.url}/someone/{parts[0]['name']}"})
        if "/branch/" in path:
            self.branches.append(name)
            return httpx2.Response(200, json={})
        if "/preupload/" in path:
            files = parts[0]["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return httpx2.Response(200, json={"files": modes})
        header, *files = parts
        contents = {file["value"]["path"]: base64.b64decode(file["value"]["content"]) for file in files}
        self.commits.append((path, header["value"], contents))
        commit = {"commitUrl": f"{self.url}/someone/model/commit/0", "commitOid": "0", "success": True}
        return httpx2.Response(200, json=commit)


@pytest.fixture
def hub(monkeypatch):
    """The hub, which no request leaves this process for."""
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    huggingface_hub.set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(hub.answer)))
    yield hub
    huggingface_hub.set_client_factory(default_client_factory)


@pytest.fixture
def imported_once(monkeypatch):
    """Whether a repository loads without frugalvit is asked in a fork of a process that has imported Transformers."""
    from processes import run_in_server

    monkeypatch.setattr("frugalvit.publish.subprocess", types.SimpleNamespace(run=run_in_server))


@pytest.fixture(scope="session")
def scenes(tmp_path_factory) -> str:
    """A file of 12 images with masks."""
    from drawn import write_scenes

    return write_scenes(tmp_path_factory.mktemp("scenes") / "scenes.parquet")


@pytest.fixture
def write_parquet(tmp_path):
    """Writes images whose color tells their index; `corrupt` lists those whose bytes are cut off."""

    import datasets
    import numpy as np

    from drawn import encode

    def write(name="images.parquet", count=12, corrupt=(), labels=True, size=8, names=("even", "odd")):
        images = []
        for index in range(count):
            data = encode(np.full((size, size, 3), 10 * index, dtype=np.uint8))
            images.append({"bytes": data[:40] if index in corrupt else data, "path": None})
        columns = {"image": images} | ({"label": [index % 2 for index in range(count)]} if labels else {})
        features = {"image": datasets.Image()} | ({"label": datasets.ClassLabel(names=list(names))} if labels else {})
        datasets.Dataset.from_dict(columns, datasets.Features(features)).to_parquet(tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The hub's cache, with a model whose branch main has 3 classes and whose tag v1 has 2."""
    from transformers import ViTImageProcessor

    from tiny import make_vit

    commits = {"main": "0" * 40, "v1": "1" * 40}
    repository = tmp_path / "models--someone--model"
    for count, (name, commit) in zip((3, 2), commits.items(), strict=True):
        folder = repository / "snapshots" / commit
        make_vit(num_labels=count).save_pretrained(folder)
        ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1 * count] * 3).save_pretrained(folder)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
