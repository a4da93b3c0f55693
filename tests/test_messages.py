"""Messages: one clear line about a wrong folder, argument or label, before much is allocated."""

import json
import shutil
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


CONFIG, WEIGHTS, PROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"
FIELDS = {
    "num_hidden_layers": -1,
    "hidden_size": 2.5,
    "num_attention_heads": 3,
    "patch_size": 0,
    "image_size": None,
    "hidden_act": "no_such",
    "model_type": "no_such",
}


def change(folder: Path, what: str):
    name, _, content = what.partition("=")
    if what == "missing":
        shutil.rmtree(folder)
    elif what == "pickled":
        torch.save({}, folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()
    elif name in FIELDS:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | {name: FIELDS[name]}))
    elif content == "cut":
        (folder / name).write_bytes((folder / name).read_bytes()[:-100])
    else:
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    "what",
    ["missing", "pickled", *FIELDS, f"{WEIGHTS}=cut", f"{WEIGHTS}=no weights", f"{CONFIG}=", f"{CONFIG}=[]"]
    + [f"{CONFIG}={'[' * 100_000}", f"{PROCESSOR}={{", f"{PROCESSOR}=[]"],
    ids=lambda what: what[:24],
)
def test_folders_that_are_no_models(what, folder):
    change(folder, what)
    for name, load in LOADERS.items():
        # Not read.
        if not (PROCESSOR in what and name == "info"):
            with pytest.raises((ValueError, OSError)) as error:
                load(str(folder))
            assert "\n" not in str(error.value) and len(str(error.value)) < 1_000


def test_info_looks_at_the_weights(folder, capsys):
    assert main(["info", str(folder)]) == 0
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 4}))
    assert main(["info", str(folder)]) == 1
    assert "checkpoint has other shapes of vit.layers.0.mlp.fc1.bias" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert main(["info", str(folder)]) == 1
    assert "no file named model.safetensors" in capsys.readouterr().err
