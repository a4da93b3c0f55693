"""Tiny ViTs on a few embedded images, and data sets made on the spot."""

import json
import shutil

import datasets
import pytest
import torch
from transformers import ViTImageProcessor

from frugalvit.common import contender
from frugalvit.common.macs import macs_of
from frugalvit.training import train
from tiny import make_vit


TINY_VIT = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"


# `datasets` waits for Arrow's threads after each pass over a stream of parquet: 5 seconds, too long for tests.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.01
# As long does PyTorch for the processes of a loader that the garbage collector finds.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5


@pytest.fixture(scope="module", autouse=True)
def slow_bfloat16():
    """The same arithmetic on every machine, also after a test's own `monkeypatch.undo()` and in what tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("frugalvit.common.precision.bfloat16_is_fast", lambda: False)
        yield


COUNTED = {}


@pytest.fixture(autouse=True)
def counted_once(request, monkeypatch):
    """Count the cost of a model once for each architecture; on a device that is not there, each time."""

    def count(model, image_size, num_channels):
        # The one inside `WithTokens`.
        config = getattr(getattr(model, "model", model), "config", None)
        key = repr(model), str(config), getattr(model, "num_tokens", None), image_size, num_channels
        if key not in COUNTED:
            COUNTED[key] = macs_of(model, image_size, num_channels)
        return COUNTED[key]

    if "device" not in request.fixturenames:
        monkeypatch.setattr(contender, "macs_of", count)


@pytest.fixture(scope="session")
def class_names():
    """Names of the classes of the embedded images."""
    return ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(scope="session")
def teacher(class_names, tmp_path_factory):
    """A folder with an untrained ViT of 3 blocks."""
    folder = tmp_path_factory.mktemp("teacher")
    labels = {"id2label": dict(enumerate(class_names)), "label2id": {name: i for i, name in enumerate(class_names)}}
    make_vit(num_hidden_layers=3, layer_norm_eps=1e-6, **labels).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}, image_std=[0.25] * 3).save_pretrained(folder)
    return folder


@pytest.fixture
def fused_calls(monkeypatch):
    """Grows with every call of PyTorch's fused attention."""
    calls, fused = [], torch.nn.functional.scaled_dot_product_attention

    def count(*arguments, **options):
        calls.append(None)
        return fused(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
    return calls


def tiny_words(output_dir, *arguments, **options) -> list[str]:
    """A command line of the recipe on 64 images, batches of 16."""
    options = {
        "output_dir": output_dir,
        "config_overrides": TINY_VIT,
        "train_split": "train[:64]",
        "eval_split": "test[:50]",
        "epochs": 2,
        "batch_size": 16,
        "warmup_epochs": 1,
        "logging_steps": 1,
    } | options
    options = {key: value for key, value in options.items() if value is not None}
    return [text for key, value in options.items() for text in (f"--{key}", str(value))] + [*arguments]


def run_tiny(output_dir, *arguments, **options):
    """Run the recipe, and return what `results.json` holds."""
    assert not train.main(tiny_words(output_dir, *arguments, **options))
    return json.loads((output_dir / "results.json").read_text(encoding="utf-8"))


@pytest.fixture
def tiny_run(tmp_path):
    """`run_tiny` to a folder of this test."""
    return lambda *arguments, name="out", **options: run_tiny(tmp_path / name, *arguments, **options)


@pytest.fixture
def tiny_trainer(tmp_path):
    """The trainer of a `tiny_run`, which can be asked without a training."""

    def make(*arguments, name="out", **options):
        words = tiny_words(tmp_path / name, *arguments, **options)
        return train.make_trainer(train.parse(words), words)

    return make


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory):
    """Folders of runs that tests share, by their options."""
    return tmp_path_factory.mktemp("runs"), {}


@pytest.fixture
def finished_run(shared_runs, tmp_path):
    """Copies a finished `tiny_run`, which is trained once for all tests."""
    root, folders = shared_runs

    def copy(name="out", **options):
        key = repr(options)
        if key not in folders:
            run_tiny(root / str(len(folders)), **options)
            folders[key] = root / str(len(folders))
        shutil.copytree(folders[key], tmp_path / name)
        return json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8"))

    return copy
