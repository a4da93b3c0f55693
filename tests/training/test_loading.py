"""Where models come from."""

import shutil

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from frugalvit.evaluation.two_towers import load_two_towers
from frugalvit.info import describe
from frugalvit.training.loading import load_image_classifier, load_vision_model, split_revision


VIT = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
COMMITS = {"main": "0" * 40, "v1": "1" * 40}


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The hub's cache, with a model whose branch main has 3 classes and whose tag v1 has 2."""
    repository = tmp_path / "models--someone--model"
    for count, (name, commit) in zip((3, 2), COMMITS.items(), strict=True):
        folder = repository / "snapshots" / commit
        ViTForImageClassification(ViTConfig(**VIT, intermediate_size=32, num_labels=count)).save_pretrained(folder)
        ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1 * count] * 3).save_pretrained(folder)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("revision", "count"), [("", 3), ("@main", 3), ("@v1", 2), (f"@{COMMITS['v1']}", 2)])
def test_a_revision_is_pinned(cached, revision, count):
    for load in (load_image_classifier, load_vision_model):
        model, processor = load(f"someone/model{revision}", "cpu")
        assert model.config.num_labels == count and processor.image_mean[0] == pytest.approx(0.1 * count)
    assert describe(f"someone/model{revision}")["parameters"] == model.num_parameters()


def test_training_goes_on_from_a_revision(cached, tiny_run, tmp_path):
    tiny_run(model="someone/model@v1", config_overrides=None, epochs=1)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "base_model: someone/model\n" in card and "--model someone/model@v1" in card
    assert (torch.tensor(ViTImageProcessor.from_pretrained(tmp_path / "out").image_mean) - 0.2).abs().max() < 1e-6


def test_revisions_that_are_none(cached, tmp_path):
    for load in (load_image_classifier, load_two_towers):
        with pytest.raises(ValueError, match="^Cannot load 'someone/model@v2' as an? "):
            load("someone/model@v2")
        with pytest.raises(ValueError, match="'someone/model@' names no revision; expected owner/name@revision"):
            load("someone/model@")
    # A folder may have any name.
    shutil.copytree(tmp_path / "models--someone--model" / "snapshots" / COMMITS["v1"], tmp_path / "mine@home")
    assert split_revision(tmp_path / "mine@home") == (str(tmp_path / "mine@home"), {})
    assert load_image_classifier(tmp_path / "mine@home", "cpu")[0].config.num_labels == 2
