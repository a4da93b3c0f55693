"""Tests of `frugalvit publish`."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

import frugalvit
from frugalvit import publish
from frugalvit.cli import main
from kinds import KINDS
from render import render


ROOT = Path(__file__).parents[1]
CARDS = ROOT / "model_cards" / "templates"
CARD = """---
library_name: transformers
license: mit
pipeline_tag: image-classification
datasets: [uoft-cs/cifar10]
tags: [frugalvit]
model-index:
- name: tiny
  results:
  - task: {type: image-classification}
    dataset: {name: CIFAR-10, type: uoft-cs/cifar10}
    metrics:
    - {type: accuracy, value: 0.1}
---

A card with results.
"""


@pytest.fixture(autouse=True)
def imports(request):
    """Use the fixture `imported_once` to save time. Only the test `…_from_nothing` starts a new Python process."""
    if "from_nothing" not in request.node.name:
        request.getfixturevalue("imported_once")


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(0)
    KINDS["bootstrapped"].classifier(KINDS["bootstrapped"].config()).save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "README.md").write_text(CARD, encoding="utf-8")
    return tmp_path / "trained"


def test_stores_half_precision_that_loads_as_float32(trained, tmp_path):
    publish.main([str(trained), "--output", str(tmp_path / "out")])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as weights:
        dtypes = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert {name for name, dtype in dtypes.items() if dtype == "F32"} == {"sparseformer.latents.initial_rois"}
    assert set(dtypes.values()) == {"F16", "F32"}
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    original = AutoModelForImageClassification.from_pretrained(trained)
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-3, atol=1e-6)
    assert (tmp_path / "out" / "README.md").read_bytes() == (trained / "README.md").read_bytes()
    assert (tmp_path / "out" / "modeling_sparseformer.py").is_file()


def test_uploads_all_in_one_commit_and_checks_from_nothing(trained, tmp_path, hub, capsys):
    (trained / "checkpoints").mkdir()
    (trained / "optimizer.bin").write_text("private")
    assert main(["publish", str(trained), "someone/my model"]) == 1
    assert "Repo id must" in capsys.readouterr().err
    assert main(["publish", str(trained), "someone/model", "--dry-run"]) == 0
    assert "Nothing was uploaded." in capsys.readouterr().out and not hub.created and not hub.commits
    assert main(["publish", str(trained), "someone/model", "--output", str(tmp_path / "out"), "--private"]) == 0
    [(path, _, files)] = hub.commits
    assert path == "/api/models/someone/model/commit/main"
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"} < set(files)
    assert "optimizer.bin" not in files and b"someone/model" in files["notebook.ipynb"]
    assert hub.created[0].get("visibility") == "private" or hub.created[0].get("private")
    assert "Uploaded to someone/model." in capsys.readouterr().out
    hub.private = False
    assert main(["publish", str(trained), "someone/model", "--private"]) == 1
    assert "private: someone/model exists and is public" in capsys.readouterr().err and len(hub.commits) == 1


def test_a_folder_without_a_card_gets_a_short_one(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes))
    arguments = TrainingArguments(tmp_path / "run", report_to=[], use_cpu=True)
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    Trainer(model, arguments, processing_class=processor).save_model(tmp_path / "saved")
    assert not (tmp_path / "saved" / "README.md").exists()
    with pytest.raises(ValueError, match="names no license; give it by --license"):
        publish.main([str(tmp_path / "saved"), "--dry-run"])
    with pytest.raises(ValueError, match="The license is 'MIT License', expected the hub's name of one"):
        publish.main([str(tmp_path / "saved"), "--dry-run", "--license", "MIT License"])
    publish.main([str(tmp_path / "saved"), "--license", "mit", "--output", str(tmp_path / "out")])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("mit", "image-classification")
    assert "AutoModelForImageClassification.from_pretrained" in card.text


def test_unsafe_folders_are_not_uploaded(trained, tmp_path, hub, capsys):
    def spoil(name: str, old: str, new: str):
        text = (trained / name).read_text(encoding="utf-8")
        assert old in text
        (trained / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    def refused(message: str, *options: str):
        assert main(["publish", str(trained), "someone/model", "--output", str(tmp_path / "out"), *options]) == 1
        assert re.search(message, capsys.readouterr().err)
        assert not hub.created and not hub.commits and not (tmp_path / "out").exists()

    code = '"auto_map": {"AutoImageProcessor": ["someone/else--evil.X", null]}, "do_resize"'
    for name, old, new, message in (
        ("README.md", "A card", f"hf_{'Ab3' * 11}", "README.md holds an access token"),
        ("config.json", '"dtype"', f'"note": "hf_{"Ab3" * 11}", "dtype"', "config.json holds an access token"),
        ("preprocessor_config.json", '"do_resize"', code, "names code that is not published, 'someone/else--evil.X'"),
    ):
        text = (trained / name).read_text(encoding="utf-8")
        spoil(name, old, new)
        refused(message)
        (trained / name).write_text(text, encoding="utf-8")
    assert main(["publish", str(trained), "--output", str(trained), "--overwrite"]) == 1
    assert "holds the model" in capsys.readouterr().err
    (tmp_path / "secret.txt").write_text("mine")
    (trained / "merges.txt").symlink_to(tmp_path / "secret.txt")
    refused("merges.txt' is a link")
    (trained / "merges.txt").unlink()
    weights = load_file(trained / "model.safetensors")
    weights["classifier.bias"][0] = float("nan")
    save_file(weights, trained / "model.safetensors", {"format": "pt"})
    refused("The weights classifier.bias have values that are not finite")
    # Only a process without frugalvit runs the source files in the folder. Such a process must notice the change.
    spoil("modeling_sparseformer.py", "pooler_output=", "pooler_output=2 * ")
    with pytest.raises(ValueError, match="Without frugalvit the model computes something else, by up to"):
        publish.check_outputs(trained)
    (trained / "modeling_sparseformer.py").write_text("raise RuntimeError('broken')", encoding="utf-8")
    with pytest.raises(ValueError, match="does not load without frugalvit: RuntimeError: broken"):
        publish.check_outputs(trained)


def test_cards_are_as_rendered():
    """The committed model cards equal the model cards that `python model_cards/render.py` writes."""
    cards, folder = render(), ROOT / "model_cards"
    assert {str(path.relative_to(folder)) for path in folder.glob("papers/*.md")} < cards.keys()
    for path, text in cards.items():
        assert (folder / path).read_text(encoding="utf-8") == text, path


@pytest.mark.parametrize("card", sorted(CARDS.glob("cifar10-*.md")), ids=lambda card: card.stem)
def test_small_shipped_models_are_as_published(card, tmp_path):
    source, folder = frugalvit.checkpoint_path(card.stem), tmp_path / card.stem
    publish.main([str(source), "--output", str(folder), "--no-code"])
    ours, theirs = ({path.name: path.read_bytes() for path in each.iterdir()} for each in (folder, source))
    assert ours.keys() == theirs.keys()
    # Configurations of another version of Transformers are not compared, because they may have other fields.
    if json.loads(theirs["config.json"])["transformers_version"] != transformers.__version__:
        for files, name in itertools.product((ours, theirs), ("config.json", "generation_config.json")):
            files.pop(name, None)
    assert ours == theirs
    assert sum(map(len, ours.values())) < 8e6
