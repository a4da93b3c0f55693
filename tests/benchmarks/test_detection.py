"""benchmarks/detection.py: scenes whose boxes are known, and detectors that learn from maps and are trained once."""

import argparse
import importlib
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model, ViTImageProcessor


@pytest.fixture(scope="module")
def detection():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
        yield importlib.import_module("detection")


@pytest.fixture(scope="module")
def data(detection, tmp_path_factory):
    """White objects of different shapes, and black backgrounds with masks."""
    folder = tmp_path_factory.mktemp("detection")
    names = [*detection.CLASSES, "other"]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    images = [Image.new("RGB", (60 + 5 * n, 60), (255 * (n < 20),) * 3) for n in range(22)]
    objects = {"image": images, "label": [n % 10 if n < 20 else 10 for n in range(22)]}
    datasets.Dataset.from_dict(objects, features).to_parquet(folder / "objects.parquet")
    features = datasets.Features({"image": datasets.Image(), "mask": datasets.Image()})
    scenes = {"image": [Image.new("RGB", (48, 36))] * 2, "mask": [Image.new("L", (48, 36))] * 2}
    datasets.Dataset.from_dict(scenes, features).to_parquet(folder / "scenes.parquet")
    return folder


def test_boxes_are_where_objects_lie(detection, data):
    scenes = detection.Scenes(str(data / "objects.parquet"), str(data / "scenes.parquet"), 12, seed=3)
    again = detection.Scenes(str(data / "objects.parquet"), str(data / "scenes.parquet"), 12, seed=3)
    for index in reversed(range(len(scenes))):
        scene, same = scenes[index], again[index]
        assert scene["image"].size == (448, 336) and scene["image"].tobytes() == same["image"].tobytes()
        assert torch.equal(scene["boxes"], same["boxes"]) and scene["labels"].max() < 10
        seen = np.array(scene["image"].convert("L")) > 0
        for left, top, right, bottom in scene["boxes"].int().tolist():
            rows, columns = (seen[top:bottom, left:right].any(axis).nonzero()[0] for axis in (1, 0))
            assert [columns[0], columns[-1] + 1, rows[0], rows[-1] + 1] == [0, right - left, 0, bottom - top]
            seen[top:bottom, left:right] = False
        assert not seen.any()
    assert scenes.count() == again.count() and min(scenes.count().values()) > 0


def test_a_detector_learns_from_maps(detection, data):
    """Of maps that show where objects of a class are, the loss falls; what is found is compared with what is there."""
    scenes = detection.Scenes(str(data / "objects.parquet"), str(data / "scenes.parquet"), 8, seed=3)
    maps, losses = torch.zeros(8, 12, *detection.GRID), []
    for image, each in enumerate(scenes.truth):
        for (left, top, right, bottom), label in zip((each["boxes"] / 14).int().tolist(), each["labels"], strict=True):
            maps[image, label, top : bottom + 1, left : right + 1] = 1
    targets = detection.targets_of(scenes.truth)
    for steps in (1, 12):
        options = argparse.Namespace(steps=steps, learning_rate=1e-3)
        head = detection.train_head(options, maps, scenes.truth, seed=0, name="")
        with torch.no_grad():
            losses.append(head(maps, labels=targets).loss)
    assert losses[1] < 0.8 * losses[0]
    assert detection.evaluate(head, maps, scenes.truth)["ap"] < 0.1

    class Known:
        """A perfect detector, which returns boxes in another order."""

        device = torch.device("cpu")

        def __call__(self, batch):
            scores = torch.full((len(batch), 8, len(detection.CLASSES)), -9.0)
            boxes = torch.full((len(batch), 8, 4), 0.5)
            for image, each in enumerate(targets):
                places = torch.arange(len(each["boxes"])).flip(0)
                boxes[image, places], scores[image, places, each["class_labels"]] = each["boxes"], 9.0
            return argparse.Namespace(logits=scores, pred_boxes=boxes)

    found = detection.evaluate(Known(), maps, scenes.truth)
    names = [*detection.METRICS.values(), *detection.BOX_METRICS.values()]
    assert [found[name] for name in names] == pytest.approx([1] * 10)
    assert len(found["detections"][0]) == len(scenes.truth[0]["boxes"])


def test_command(detection, data, monkeypatch, tmp_path):
    """A row for each backbone; a second run finds those of the first."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 1}
    Dinov2Model(Dinov2Config(**sizes, image_size=56, patch_size=14)).save_pretrained(tmp_path / "teacher")
    ViTImageProcessor(size={"height": 56, "width": 56}).save_pretrained(tmp_path / "teacher")
    command = ["detection.py", "--teacher", str(tmp_path / "teacher"), "--seeds", "0", "--mixed-precision", "no"]
    for part in ("train", "test"):
        command += [f"--{part}", str(data / "objects.parquet"), f"--{part}-backgrounds", str(data / "scenes.parquet")]
    command += ["--train-images", "4", "--test-images", "3", "--steps", "1"]
    command += ["--runs-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    tables = []
    for _ in range(2):
        detection.main()
        tables.append(json.loads((tmp_path / "detection.json").read_text("utf-8"))["rows"])
        monkeypatch.setattr(detection, "train_head", lambda *_: pytest.fail("It trains."))
    assert tables[0] == tables[1] and (tmp_path / "detection.webp").is_file()
    assert [(row["backbone"], row["pixels"], row["tokens"]) for row in tables[0]] == [
        ("teacher", "336x448", 768),
        ("teacher at lower resolution", "168x224", 192),
        ("trees, before training", "336x448", 192),
    ]
    teacher, *others = (row["macs"] for row in tables[0])
    assert all(macs < 0.3 * teacher for macs in others)
    assert all(0 <= row["ap"] <= 1 for row in tables[0])
