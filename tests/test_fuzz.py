"""Checkpoints and images of chance: they work, or there is one clear error and nothing else happens.

FRUGALVIT_FUZZ_CASES=500 tries more of each.
"""

import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawn import encode
from frugalvit.common.decoding import CorruptImageError, decode_image
from frugalvit.common.loading import load_image_classifier
from kinds import KINDS


CASES = int(os.environ.get("FRUGALVIT_FUZZ_CASES", "20"))
fuzz = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


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
        image = decode_image({"path": str(file), "bytes": None}, 0)
    except CorruptImageError as error:
        assert str(file) in str(error)
        return
    assert image.mode == "RGB" and min(image.size) > 0
