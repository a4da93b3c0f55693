"""Code that comes with a model runs where the user says so, and no command asks."""

import builtins
import json

import numpy as np
import pytest
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from frugalvit.cli import main
from frugalvit.common.exported import ExportedModule


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
    """The questions that were asked; each is answered with yes."""
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


SPEC = json.dumps([1, {"type": "builtins.dict", "context": '["logits"]', "children_spec": []}])
IMPORTS = {"default_factory_module": "antigravity", "default_factory_name": "fly", "dict_context": []}
REPORT = {"format": "onnx", "precision": "float32", "macs": 1, "parts": {"model": {"outputs": ["logits"]}}}
MANIFEST = {
    "schema_version": 1,
    "export_format": "onnx",
    "components": {"model": {"file": "model.onnx", "metadata": {"in_spec": SPEC, "out_spec": SPEC}}},
}


def component(**fields):
    """A manifest whose program is described in another way."""
    return MANIFEST | {"components": {"model": MANIFEST["components"]["model"] | fields}}


def spec(node) -> dict:
    return component(metadata={"in_spec": SPEC, "out_spec": json.dumps([1, node])})


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """Function that loads a folder as an exported model; Transformers must not be asked to."""
    loaded = []
    exporters = pytest.importorskip("transformers.exporters")
    monkeypatch.setattr("frugalvit.common.exported.check_format", lambda *_: None)
    monkeypatch.setattr(
        exporters.ExportedModel, "from_pretrained", lambda *_, **options: loaded.append(options) or 1 / 0
    )
    ViTConfig().save_pretrained(tmp_path)
    for name in ("model.onnx", "openvino_model.xml", "model.pt2", "model.pte"):
        (tmp_path / name).touch()

    def load(report, manifest, trust=False) -> str:
        for name, content in (("report.json", report), ("export.json", manifest)):
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ValueError) as raised:
            ExportedModule(tmp_path, None, trust)
        return ("loaded: " if loaded else "") + str(raised.value)

    return load


def test_what_is_right_is_loaded(exported):
    assert exported(REPORT, MANIFEST).startswith("loaded: ")


@pytest.mark.parametrize("says", ["onnx", "openvino", "executorch"])
@pytest.mark.parametrize("file", ["model.pt2", "model.onnx", "openvino_model.xml", "model.pte"])
def test_pickled_programs_do_not_pass_for_others(says, file, exported):
    """The manifest and the name of the file tell what would be loaded, whatever the report says."""
    report, manifest = REPORT | {"format": says}, component(file=file) | {"export_format": "dynamo"}
    assert "speak of other programs" in exported(report, manifest)
    assert "speak of other programs" in exported(report, manifest, trust=True)


@pytest.mark.parametrize(
    ("report", "manifest"),
    [
        ({}, MANIFEST),
        ([], MANIFEST),
        ("{", MANIFEST),
        ("[" * 100_000, MANIFEST),
        (REPORT | {"format": 5}, MANIFEST),
        (REPORT | {"format": []}, MANIFEST),
        (REPORT | {"format": "dynamo"}, MANIFEST),
        (REPORT | {"precision": "int4"}, MANIFEST),
        (REPORT | {"macs": "many"}, MANIFEST),
        (REPORT | {"parts": {}}, MANIFEST),
        (REPORT | {"parts": []}, MANIFEST),
        (REPORT | {"parts": {"model": {}}}, MANIFEST),
        (REPORT | {"parts": {"model": []}}, MANIFEST),
        (REPORT | {"parts": {"model": {"outputs": "logits"}}}, MANIFEST),
        (REPORT | {"parts": {"model": {"outputs": [5]}}}, MANIFEST),
        (REPORT | {"parts": {"model": {"outputs": []}}}, MANIFEST),
        (REPORT | {"parts": {"model": {"outputs": ["forward"]}}}, MANIFEST),
        (REPORT | {"parts": {"model": {"outputs": ["logits"], "num_tokens": {"many": {}}}}}, MANIFEST),
        (REPORT | {"parts": {"model": {"outputs": ["logits"], "num_tokens": {"0": {}}}}}, MANIFEST),
        (REPORT | {"parts": {"model": {"outputs": ["logits"], "num_tokens": {"4": []}}}}, MANIFEST),
        (REPORT | {"parts": {"model": {"outputs": ["logits"], "num_tokens": [4]}}}, MANIFEST),
        (REPORT | {"parts": {"other": {"outputs": ["logits"]}}}, MANIFEST),
        (REPORT, {}),
        (REPORT, []),
        (REPORT, "[" * 100_000),
        (REPORT, MANIFEST | {"export_format": "openvino"}),
        (REPORT, MANIFEST | {"export_format": None}),
        (REPORT, MANIFEST | {"components": {}}),
        (REPORT, MANIFEST | {"components": {"model": {}}}),
        (REPORT, MANIFEST | {"components": {"model": []}}),
        (REPORT, component(file=5)),
        (REPORT, component(file="model.pt2")),
        (REPORT, component(file="../model.onnx")),
        (REPORT, component(file="/model.onnx")),
        (REPORT, component(metadata=[])),
        (REPORT, component(metadata={"out_spec": 5})),
        (REPORT, component(metadata={"out_spec": "{"})),
        (REPORT, spec(5)),
        (REPORT, spec({"type": "builtins.dict", "context": "{}", "children_spec": []})),
        (REPORT, spec({"type": "collections.OrderedDict", "context": "[]", "children_spec": []})),
        (REPORT, spec({"type": "collections.defaultdict", "context": json.dumps(IMPORTS), "children_spec": []})),
        (REPORT, spec({"type": "builtins.list", "context": "null", "children_spec": [{"type": "antigravity.Fly"}]})),
    ],
)
def test_odd_exported_folders_are_refused_before_anything_is_loaded(report, manifest, exported):
    message = exported(report, manifest)
    assert message.startswith("Cannot load ") and "\n" not in message
