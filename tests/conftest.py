"""Fixtures for all tests, and the order in which test modules run."""

import base64
import gc
import json
import os
import signal
import sys
import types


# Test processes run in parallel, so more than one thread in each process would slow down all of them. With one thread,
# results of different processes are also equal bit by bit. PyTorch reads OMP_NUM_THREADS when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import httpx2
import huggingface_hub
import pytest
from accelerate.state import AcceleratorState
from huggingface_hub.utils._http import default_client_factory


# Test modules that take long. Parallel test processes start these modules first, in this order.
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
    """Reset Accelerate's state before and after each test, because tests may set different precisions."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="session", autouse=True)
def default_signals():
    """Restore the default handlers of SIGINT and SIGHUP: `&` and `nohup` make a process ignore these signals."""
    for name, default in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
            signal.signal(getattr(signal, name), default)


def pytest_configure():
    """Block the import of `openvino_telemetry`, because this package sends usage data and forks the process."""
    sys.modules["openvino_telemetry"] = None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable the garbage collector while pytest imports the tests, then freeze all objects (`gc.freeze`)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def freeze_imported_objects():
    """Freeze all objects before each test module: `gc.freeze` hides them from garbage collections by `Trainer`."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Sort tests so that long modules start first. A long module that starts late would delay the end of the run."""
    if hasattr(config, "workerinput"):
        rank = {f"test_{name}": index for index, name in enumerate(LONG_MODULES)}
        items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


class Hub:
    """Fake Hugging Face Hub that records the requests of an upload and answers them.

    Attributes:
        files (`list[str]`): Names of files in the repository before the upload.
        private (`bool`): Whether the repository is private.
        created (`list[dict]`): Requests to create a repository.
        branches (`list[str]`): Names of created branches.
        commits (`list[tuple[str, dict, dict]]`): Path, header and files of each commit.
    """

    url = "https://huggingface.co"

    def __init__(self):
        self.files, self.created, self.branches, self.commits = [], [], [], []
        self.private = True

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        path, name = request.url.path, request.url.path.rpartition("/")[2]
        if request.method == "HEAD":
            missing = {"X-Error-Code": "EntryNotFound"}
            return httpx2.Response(200) if name in self.files else httpx2.Response(404, headers=missing)
        if request.method == "GET":
            return httpx2.Response(200, json={"id": "someone/model", "private": self.private})
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
    """Replace the Hugging Face Hub with a fake `Hub`, so that no request leaves this process."""
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    huggingface_hub.set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(hub.answer)))
    yield hub
    huggingface_hub.set_client_factory(default_client_factory)


@pytest.fixture
def imported_once(monkeypatch):
    """Run the checks of `frugalvit publish` in forks of a process that has already imported Transformers."""
    from processes import run_in_server

    monkeypatch.setattr("frugalvit.publish.subprocess", types.SimpleNamespace(run=run_in_server))


@pytest.fixture(scope="session")
def scenes(tmp_path_factory) -> str:
    """Path of a parquet file with 12 images and their segmentation masks."""
    from drawn import write_scenes

    return write_scenes(tmp_path_factory.mktemp("scenes") / "scenes.parquet")


@pytest.fixture
def write_parquet(tmp_path):
    """Function that writes images to a parquet file and returns the file's path. An image's index determines its color
    and its label. `corrupt` lists the indices of images with truncated bytes."""
    import datasets
    import numpy as np

    from drawn import encode

    def write(name="images.parquet", count=12, corrupt=(), labels=True, size=8, names=("even", "odd")):
        images = []
        for index in range(count):
            data = encode(np.full((size, size, 3), 10 * index, dtype=np.uint8))
            images.append({"bytes": data[:40] if index in corrupt else data, "path": None})
        columns = {"image": images} | ({"label": [index % len(names) for index in range(count)]} if labels else {})
        features = {"image": datasets.Image()} | ({"label": datasets.ClassLabel(names=list(names))} if labels else {})
        datasets.Dataset.from_dict(columns, datasets.Features(features)).to_parquet(tmp_path / name)
        return str(tmp_path / name)

    return write
