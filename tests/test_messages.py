"""Messages: one clear line about a wrong folder, argument or label, before much is allocated."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from frugalvit_cli import main

from frugalvit.common.loading import load_image_classifier, load_vision_model
from frugalvit.info import describe
from frugalvit.training.models import build_model
from frugalvit.training.segment import MaskedDataArguments, SegmenterArguments
from frugalvit.training.segment import build_model as build_segmenter
from frugalvit.training.train import ImageClassificationArguments, ModelArguments
from tiny import save_vit


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
LOADERS = {
    "classifier": load_image_classifier,
    "teacher": load_vision_model,
    "info": describe,
    "train": lambda folder: build_model(
        ModelArguments(model=folder), ImageClassificationArguments(output_dir="out", use_cpu=True), ["a", "b"]
    ),
    "segment": lambda folder: build_segmenter(
        SegmenterArguments(model=folder, drop_path=0), MaskedDataArguments(dataset=["x"], num_labels=2), False
    ),
}


@pytest.fixture
def folder(tmp_path):
    return save_vit(tmp_path / "model", patch_size=16, **SIZES)


def refused(load, folder):
    started = time.perf_counter()
    with pytest.raises((ValueError, OSError)) as error:
        load(str(folder))
    assert time.perf_counter() - started < 20
    assert "\n" not in str(error.value) and len(str(error.value)) < 1_000


CONFIG, WEIGHTS, PROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"
FIELDS = {
    "num_hidden_layers": (-1, "many"),
    "hidden_size": (0, 2.5),
    "num_attention_heads": (3,),
    "patch_size": (0,),
    "image_size": (None, -1),
    "hidden_act": ("no_such",),
    "num_channels": (0,),
    "model_type": ("no_such", None, 5),
    "architectures": ([5], ["NoSuch"]),
}


def set_field(folder: Path, name: str, value):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {name: value}))


def pickle_weights(folder: Path):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


CHANGES = {
    "missing": shutil.rmtree,
    "empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("no model")),
    "weights missing": lambda folder: (folder / WEIGHTS).unlink(),
    "weights half": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100]),
    "weights none": lambda folder: (folder / WEIGHTS).write_text("no weights"),
    "weights pickled": pickle_weights,
    **{
        f"{file} {content[:9]!r}": lambda folder, file=file, content=content: (folder / file).write_text(content)
        for file in (CONFIG, PROCESSOR)
        for content in ("", "[]", "{", "[" * 100_000)
    },
    **{
        f"{name}={value}": lambda folder, name=name, value=value: set_field(folder, name, value)
        for name, values in FIELDS.items()
        for value in values
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_folders_that_are_no_models(change, folder):
    CHANGES[change](folder)
    for name, load in LOADERS.items():
        if "architectures=" in change and name != "info" or PROCESSOR in change and name == "info":
            continue  # not read
        refused(load, folder)


def test_info_looks_at_the_weights(folder, capsys):
    assert main(["info", str(folder)]) == 0
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 4}))
    assert main(["info", str(folder)]) == 1
    assert "checkpoint has other shapes of vit.layers.0.mlp.fc1.bias" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert main(["info", str(folder)]) == 1
    assert "no file named model.safetensors" in capsys.readouterr().err
