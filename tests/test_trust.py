"""Check that commands do not run code from a model folder by default."""

import builtins
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, exporters

from frugalvit.cli import main
from frugalvit.exported import ExportedModule, load_classifier
from tiny import save_vit


CODE = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedModel, ViTImageProcessor

Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()


class Config(PreTrainedConfig):
    model_type = "foreign"


class Model(PreTrainedModel):
    config_class = Config


class Processor(ViTImageProcessor):
    pass
"""
TASKS = ("", "ForImageClassification", "ForSemanticSegmentation", "ForImageTextToText")
AUTO_MAP = {"AutoConfig": "foreign.Config"} | {f"AutoModel{task}": "foreign.Model" for task in TASKS}


@pytest.fixture
def prompts(monkeypatch):
    """Answer each prompt of `input` with yes, and return the list of prompts."""
    found = []
    monkeypatch.setattr(builtins, "input", lambda prompt="": found.append(prompt) or "y")
    return found


@pytest.fixture
def foreign(request, tmp_path):
    """Create a model folder with its own Python code. When the code is imported, it creates the file `ran`."""
    folder = tmp_path / "foreign"
    if request.param == "model":
        folder.mkdir()
        config = {"model_type": "foreign", "auto_map": AUTO_MAP, "architectures": ["Model"]}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        ViTForImageClassification(ViTConfig(image_size=32, patch_size=16, **sizes)).save_pretrained(folder)
        ViTImageProcessor().save_pretrained(folder)
        file = folder / "preprocessor_config.json"
        own = {"auto_map": {"AutoImageProcessor": "foreign.Processor"}, "image_processor_type": "Processor"}
        file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (folder / "foreign.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    return folder


@pytest.fixture
def data(tmp_path):
    for name, part in (("images", "RGB"), ("annotations", "L")):
        for split in ("train", "val"):
            folder = tmp_path / "masked" / name / split
            folder.mkdir(parents=True)
            for index in range(2):
                Image.fromarray(np.zeros((32, 32), np.uint8)).convert(part).save(folder / f"{index}.png")
    return tmp_path / "masked"


COMMANDS = [
    "predict {data}/images/train/0.png --model {model}",
    "info {model}",
    "bootstrap --teacher {model} --output_dir {out}",
    "train --model {model} --output_dir {out} --train_split train[:64]",
    "evaluate classification --model {model} --limit 2",
    "evaluate knn --model {model} --limit 2",
    "publish {model} --dry-run --license mit",
]
# These commands refuse the ViT before they load its image processor.
OTHER_MODELS = [
    "segment --model {model} --dataset {data} --output_dir {out} --num_labels 2 --drop_path 0",
    "evaluate segmentation --model {model} --dataset {data} --split val",
    "evaluate zero-shot --model {model} --limit 2",
]


@pytest.mark.parametrize(
    ("command", "foreign"),
    [*itertools.product(COMMANDS, ("model", "image processor")), *((command, "model") for command in OTHER_MODELS)],
    indirect=["foreign"],
    ids=lambda value: " ".join(word for word in value.split()[:3] if word[0] not in "{-"),
)
def test_code_does_not_run_by_default(command, foreign, data, prompts, tmp_path, capsys):
    words = command.format(model=foreign, data=data, out=tmp_path / "out").split()
    code = main(words)
    error = capsys.readouterr().err
    assert not prompts and not (tmp_path / "ran").exists()
    # `frugalvit info` does not load the image processor, so this command may succeed.
    assert code == 1 and "error:" in error or code == 0 and words[0] == "info"


def test_exported_programs_of_torch_are_not_loaded(tmp_path, monkeypatch):
    """A program in PyTorch's format .pt2 is refused, because it may contain a pickle."""
    ViTConfig().save_pretrained(tmp_path)
    (tmp_path / "model.pt2").touch()
    report = {"format": "onnx", "precision": "float32", "parts": {"model": {"outputs": ["logits"]}}}
    spec = json.dumps([1, {"type": "builtins.dict", "context": json.dumps(["logits"]), "children_spec": []}])
    components = {"model": {"file": "model.pt2", "metadata": {"in_spec": spec, "out_spec": spec}}}
    described = {"schema_version": 1, "export_format": "dynamo", "components": components}
    for name, content in (("report.json", report), ("export.json", described)):
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(exporters, "ExportedModel", lambda *_, **__: pytest.fail("the pickle is loaded"))
    with pytest.raises(ValueError, match="^Cannot load .* is not from frugalvit export"):
        ExportedModule(tmp_path)


class Trap:
    """Object that creates a folder when it is unpickled."""

    def __reduce__(self):
        return Path.mkdir, (Path("trapped"),)


def test_pickles_run_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (save_vit(tmp_path / "vit") / "model.safetensors").unlink()
    torch.save({"classifier.bias": Trap()}, "vit/pytorch_model.bin")
    with pytest.raises(ValueError, match="Cannot load 'vit"):
        load_classifier("vit", "cpu")
    assert os.listdir() == ["vit"]
