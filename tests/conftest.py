"""The order of tests, and the hub's side of an upload, on this machine."""

import base64
import collections
import gc
import http.server
import json
import os
import signal
import sys
import threading
import types


# Tests run side by side, and what they start computes little: threads would wait for each other. Besides, what is
# computed is then what a process of one thread computes, bit by bit. PyTorch reads it when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from accelerate.state import AcceleratorState


# Few tests that take long, many of them processes to wait for.
LONG_MODULES = (
    "tests/test_export.py",
    "tests/modeling/test_ecosystem.py",
    "tests/training/test_processes.py",
    "tests/training/test_bootstrap.py",
    "tests/training/test_recipes.py",
    "tests/common/test_data_sets.py",
    "tests/modeling/test_hub.py",
    "tests/modeling/test_llava.py",
    "tests/training/test_train.py",
    "tests/training/test_joint.py",
    "tests/training/test_align_llava.py",
    "tests/test_publish.py",
    "tests/test_package.py",
    "tests/test_compare.py",
    "tests/test_demo.py",
    "tests/modeling/test_serve.py",
    "tests/test_quickstart.py",
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
    """Side by side, long modules run first, then classes and modules of many tests: at the end, no process is left
    alone with much to do."""
    if not hasattr(config, "workerinput"):
        return
    scopes = [item.nodeid.rpartition("::")[0] for item in items]
    sizes = collections.Counter(scopes)

    def place(index: int) -> tuple[int, int]:
        module = scopes[index].partition("::")[0]
        rank = LONG_MODULES.index(module) if module in LONG_MODULES else len(LONG_MODULES)
        return rank, -sizes[scopes[index]]

    items[:] = [items[index] for index in sorted(range(len(items)), key=place)]


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers what creating a repository and committing files to it asks."""

    private = True
    files: list[str]
    created: list[dict]
    branches: list[str]
    commits: list[tuple[str, dict, dict[str, bytes]]]

    def answer(self, content: dict, error: str | None = None):
        body = json.dumps(content).encode()
        self.send_response(404 if error else 200)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self):
        self.answer({}, None if self.path.rpartition("/")[2] in self.files else "EntryNotFound")

    def do_GET(self):
        self.answer({"id": "someone/model", "private": self.private})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/someone/{self.created[-1]['name']}"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/branch/" in self.path:
            self.branches.append(self.path.rpartition("/")[2])
            self.answer({})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            self.answer({"files": modes})
        else:
            header, *files = (json.loads(line) for line in body.splitlines())
            contents = {file["value"]["path"]: base64.b64decode(file["value"]["content"]) for file in files}
            self.commits.append((self.path, header["value"], contents))
            self.answer({"commitUrl": f"{self.server.url}/someone/model/commit/0", "commitOid": "0", "success": True})

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    handler = type("Handler", (Hub,), {"files": [], "created": [], "branches": [], "commits": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        # It asks often whether it is to end.
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield handler
        server.shutdown()
        thread.join()


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
