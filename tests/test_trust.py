"""Code that comes with a model runs where the user says so, and no command asks."""

import builtins
import json

import numpy as np
import pytest
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from frugalvit.cli import main


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
AUTO_MAP = {
    "AutoConfig": "foreign.Config",
    **{
        f"AutoModel{task}": "foreign.Model"
        for task in ("", "ForImageClassification", "ForSemanticSegmentation", "ForImageTextToText")
    },
}


@pytest.fixture
def asked(monkeypatch):
    """What was asked; all of it is answered with yes."""
    questions = []
    monkeypatch.setattr(builtins, "input", lambda prompt="": questions.append(prompt) or "y")
    return questions


@pytest.fixture(params=["model", "image processor"])
def foreign(request, tmp_path):
    """A model folder with code of its own, which leaves the file `ran` when it is imported."""
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


@pytest.mark.parametrize(
    "command",
    [
        "predict {data}/images/train/0.png --model {model}",
        "info {model}",
        "bootstrap --teacher {model} --output {out}",
        "train --model {model} --output {out} --batch-size 64 --train-split train[:64]",
        "train --distill-from {model} --output {out} --batch-size 64 --train-split train[:64]",
        "segment --model {model} --dataset {data} --output {out} --num-labels 2 --batch-size 2 --drop-path 0",
        "evaluate classification --model {model} --limit 2",
        "evaluate knn --model {model} --limit 2",
        "evaluate segmentation --model {model} --dataset {data} --split val",
        "evaluate zero-shot --model {model} --limit 2",
        "attention {model}",
        "features {model} --image {data}/images/train/0.png --picture {out}.png",
        "publish {model} --dry-run",
        "demo {model}",
    ],
    ids=lambda command: " ".join(word for word in command.split()[:3] if word[0] not in "{-"),
)
def test_nothing_runs_without_a_yes(command, foreign, data, asked, tmp_path, capsys):
    words = command.format(model=foreign, data=data, out=tmp_path / "out").split()
    code = main(words)
    error = capsys.readouterr().err
    assert not asked and not (tmp_path / "ran").exists()
    # It takes no images.
    assert code == 1 and "error:" in error or code == 0 and words[0] == "info"
