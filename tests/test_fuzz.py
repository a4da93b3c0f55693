"""Configurations, checkpoints and images of chance: they work, or there is one clear error and nothing else happens.

FRUGALVIT_FUZZ_CASES=500 tries more of each.
"""

import dataclasses
import json
import os
import pickle
import shutil
import types
import typing

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from drawn import encode
from frugalvit.common.exported import read_report
from frugalvit.common.image_files import read_images
from frugalvit.common.loading import load_image_classifier
from frugalvit.common.tables import format_table
from frugalvit.curves import best_epoch, curves_of, read_epochs
from frugalvit.index import read_about, read_shards
from frugalvit.model_folders import Notes
from frugalvit.validation import check_weights
from kinds import KINDS


CASES = int(os.environ.get("FRUGALVIT_FUZZ_CASES", "20"))
fuzz = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# By the type of a field, values that fit and values that do not; all of them small.
VALUES = {
    int: st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 8, 12, 16, 33]),
    float: st.sampled_from([-1.0, 0.0, 1e-6, 0.1, 0.5, 1.0, 2.0, float("nan"), float("inf")]),
    bool: st.booleans(),
    str: st.sampled_from(["", "gelu", "relu", "none", "cb", "random", "mlp_end", "before", "after", "cls", "mean"]),
    types.NoneType: st.none(),
}
OWN = {
    kind: {
        field.name: field.type
        for field in dataclasses.fields(KINDS[kind].config_class)
        if field.name not in {inherited.name for inherited in dataclasses.fields(PreTrainedConfig)}
        # What Algorithm 1 takes its minutes for.
        and field.name not in ("impulse_steps",)
    }
    for kind in KINDS
}


def values_of(annotation) -> st.SearchStrategy:
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    known = [VALUES[member] for member in members if member in VALUES]
    pairs = st.lists(VALUES[int], min_size=1, max_size=3)
    return st.one_of(*known, *([] if len(known) == len(members) else [pairs]))


@st.composite
def overrides(draw, kind: str) -> dict:
    names = draw(st.lists(st.sampled_from(sorted(OWN[kind])), min_size=1, max_size=3, unique=True))
    return {name: draw(values_of(OWN[kind][name])) for name in names}


@pytest.mark.parametrize("kind", list(KINDS))
@fuzz
@given(data=st.data())
def test_configurations(kind, data, tmp_path_factory):
    """A model is built, runs, learns, is saved and loaded; or the error says what is wrong."""
    chosen = data.draw(overrides(kind))
    torch.manual_seed(0)
    try:
        config = KINDS[kind].config(**chosen)
        model = KINDS[kind].classifier(config)
        size = config.image_size
        size = (size, size) if isinstance(size, int) else tuple(size)
        pixel_values = torch.randn(2, config.num_channels, *size)
        outputs = model(pixel_values, labels=torch.tensor([0, 1]))
    except (ValueError, StrictDataclassError) as error:
        assert len(str(error)) > 20
        return
    assert outputs.logits.shape == (2, 3)
    outputs.loss.backward()
    folder = tmp_path_factory.mktemp("fuzz")
    model.eval().save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixel_values).logits, model(pixel_values).logits, equal_nan=True)
    shutil.rmtree(folder)


def corrupt(content: bytes, cut: float, place: float, change: int, length: int) -> bytes:
    """Bytes cut off at a share of their length, or some of them changed."""
    if change == 0:
        return content[: int(cut * len(content))]
    start = int(place * len(content))
    end = min(start + length, len(content))
    return content[:start] + bytes((byte + change) % 256 for byte in content[start:end]) + content[end:]


corruptions = st.tuples(
    st.floats(0, 0.999), st.floats(0, 0.999), st.integers(0, 255), st.sampled_from([1, 1, 3, 20, 400])
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    kind = KINDS["agent_cnn"]
    model = kind.classifier(kind.config_class.from_variant(kind.variant, **kind.fields))
    folder = tmp_path_factory.mktemp("models") / "model"
    model.save_pretrained(folder)
    return folder


@fuzz
@given(
    corruption=corruptions,
    name=st.sampled_from(["config.json", "model.safetensors", "model.safetensors", "preprocessor_config.json"]),
)
def test_corrupted_checkpoints(corruption, name, folder, tmp_path):
    """A corrupted checkpoint loads, as changed weights do, or there is a ValueError; the folder stays as it is."""
    content = (folder / name).read_bytes()
    place, start, change, length = corruption
    if name == "model.safetensors":
        # The header, where the structure lies, half of the time.
        start *= 0.05 if change % 2 else 1
    (folder / name).write_bytes(corrupt(content, place, start, change, length))
    files = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.parent.rglob("*")}
    try:
        load_image_classifier(folder, "cpu")
    except ValueError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
    finally:
        after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.parent.rglob("*")}
        (folder / name).write_bytes(content)
    assert after == files
    assert not list(tmp_path.iterdir())


class Trap:
    """A pickle that does something when it is read."""

    def __reduce__(self):
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickles_are_not_read(name, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "model")
    os.remove("model/model.safetensors")
    torch.save({"classifier.bias": Trap()}, f"model/{name}")
    with open("model/optimizer.pkl", "wb") as file:
        pickle.dump(Trap(), file)
    with pytest.raises(ValueError, match="Cannot load 'model"):
        load_image_classifier("model", "cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# JSON files that a folder from elsewhere may bring: what one holds, and what reads it.
SPEC = json.dumps([1, {"type": "builtins.dict", "context": '["logits"]', "children_spec": []}])
PROGRAM = {"file": "model.onnx", "metadata": {"in_spec": SPEC, "out_spec": SPEC}}
RESULTS = {"arguments": {"dataset": ["owner/name"]}, "best": {"accuracy": 0.5, "accuracy_4": 0.25}}
RESULTS["images"] = {"test split": "test", "test images": 5}
EPOCH = {"epoch": 1, "step": 2, "train_loss": 1.0, "accuracy": 0.5}


def read_scores(folder) -> str:
    """Read scores as `frugalvit budget` prints them."""
    notes = Notes(folder)
    return format_table(notes.scores([{"model": "student", "num_tokens": 4}])) + str(notes.images())


def read_curves(folder) -> str:
    """Read curves as `frugalvit curves` prints them."""
    epochs = read_epochs(str(folder))
    return format_table([{name: epochs[-1].get(name) for name in curves_of({"run": epochs})}]) + str(
        best_epoch(epochs)
    )


JSON = {
    "report.json": (
        {
            "format": "onnx",
            "precision": "int8",
            "macs": 1,
            "parts": {"model": {"outputs": ["logits"], "num_tokens": {"4": {}}}},
        },
        read_report,
    ),
    "export.json": ({"export_format": "onnx", "components": {"model": PROGRAM}}, read_report),
    "index.json": ({"folder": "images", "model": "model", "vision_model": None}, read_about),
    "results.json": (RESULTS, read_scores),
    "metrics.jsonl": (EPOCH, read_curves),
    "model.safetensors.index.json": ({"weight_map": {"weight": "model.safetensors"}}, check_weights),
    "embeddings": ([["a.png", 1, 1]], lambda folder: list(read_shards(folder))),
}
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [-1, 0, 1, 10**30, 0.5, float("nan"), float("inf"), "", "0", "../x", "/x", "\0", "\ud800", "x" * 300]
    ),
)
odd_values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["", "0", "file", "step"]), inner)
    ),
    max_leaves=5,
)


@st.composite
def altered(draw, content):
    """JSON with another value, one more or one less, somewhere in it."""
    if not isinstance(content, dict | list) or not content or draw(st.integers(0, 3)) == 0:
        return draw(odd_values)
    changed = content.copy()
    key = draw(st.sampled_from(sorted(content) if isinstance(content, dict) else range(len(content))))
    match draw(st.sampled_from(["alter", "alter", "remove", "add"])):
        case "alter":
            changed[key] = draw(altered(content[key]))
        case "remove":
            del changed[key]
        case "add" if isinstance(changed, dict):
            changed[draw(st.sampled_from(["", "unknown", "0"]))] = draw(odd_values)
        case "add":
            changed.append(draw(odd_values))
    return changed


@pytest.mark.parametrize("name", list(JSON))
@fuzz
@given(data=st.data())
def test_odd_json(name, data, tmp_path_factory):
    """Odd JSON is taken, or there is one clear error; only files of the folder are named."""
    folder = tmp_path_factory.mktemp("json") / "step-00000006"
    folder.mkdir()
    for other, (content, _) in JSON.items():
        (folder / other).write_text(json.dumps(content))
    (folder / "model.onnx").touch()
    content, read = JSON[name]
    content = data.draw(altered(content))
    (folder / name).write_text(json.dumps(content))
    embeddings = folder / "embeddings-00000-0.safetensors"
    files = content if name == "embeddings" else JSON["embeddings"][0]
    save_file({"embeddings": torch.ones(1, 4)}, embeddings, {"files": json.dumps(files)})
    try:
        found = read(folder)
    except (ValueError, OSError) as error:
        assert len(str(error)) > 20
        return
    finally:
        shutil.rmtree(folder)
    if name == "embeddings":
        assert all(".." not in file[0].split("/") and file[0][0] != "/" for shard in found for file in shard.files)


PIXELS = np.random.default_rng(0).integers(0, 255, (24, 20, 3), dtype=np.uint8)


@pytest.mark.filterwarnings("ignore")  # Pillow says what it thinks of a file
@fuzz
@given(corruption=corruptions, format=st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]))
def test_corrupted_images(corruption, format, tmp_path):
    """A file that can be decoded is an RGB image; one that cannot is named."""
    file = tmp_path / f"image.{format.lower()}"
    place, start, change, length = corruption
    file.write_bytes(corrupt(encode(PIXELS, format), place, start, change, length))
    try:
        [(name, image)] = read_images([file])
    except ValueError as error:
        assert str(file) in str(error)
        return
    assert name == str(file) and image.mode == "RGB" and min(image.size) > 0
