"""Test fine-tuning of pretrained models of Transformers and timm on other classes."""

import functools

import pytest
import timm
import torch
from safetensors.torch import load_file
from trainings import TIMM, logged, measured, run_command, save_timm
from transformers import AutoImageProcessor, AutoModelForImageClassification

from frugalvit import (
    BootstrappedViTConfig,
    BootstrappedViTForImageClassification,
    load_context_broadcast,
    remove_context_broadcast,
)
from frugalvit.modeling.context_broadcast import has_context_broadcast
from frugalvit.training.loading import load_model
from runs import make as make_trainer
from tiny import save_vit


make, run = functools.partial(make_trainer, "train"), functools.partial(run_command, "train")
PLAIN = {"mixup": 0, "randaugment_layers": 0, "label_smoothing_factor": 0, "flip": 0, "crop_padding": 0}


def load(folder):
    classes = AutoModelForImageClassification, AutoImageProcessor
    model, processor = (each.from_pretrained(folder) for each in classes)
    return model.eval(), processor


def test_a_folder_of_timm_from_training_to_its_uses(tmp_path, class_names):
    """The model learns. Auto classes, `frugalvit bootstrap` and timm load the trained model."""
    folder, out = tmp_path / "timm", tmp_path / "out"
    save_timm(folder, ["ant", "bee", "cow", "dog", "emu"])
    own = run(out, model=folder, num_train_epochs=8, learning_rate=5e-3, **PLAIN)
    losses = logged(own, "loss")
    assert sum(losses[-4:]) < sum(losses[:4]) - 1
    model, processor = load(out)
    assert model.config.id2label == dict(enumerate(class_names)) and model.config.label2id["truck"] == 9
    assert measured(model, processor) == pytest.approx(own.metrics["accuracy"])
    assert "A vit_tiny_patch16_224 classifier" in (out / "README.md").read_text(encoding="utf-8")
    there = timm.create_model("vit_tiny_patch16_224", **TIMM, num_classes=10).eval()
    there.load_state_dict(load_file(out / "model.safetensors"))
    pixel_values = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(there(pixel_values), model(pixel_values).logits)
    student = make_trainer("bootstrap", tmp_path / "student", teacher=out, num_tokens=4).student
    assert student.config.id2label == model.config.id2label


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_thousand_classes_become_ten(library, tmp_path, class_names):
    """Only the classifier is replaced. With `context_broadcast_blend`, the logits do not change at the start."""
    folder = tmp_path / "vit"
    if library == "timm":
        save_timm(folder, num_classes=1000)
    else:
        save_vit(folder, num_labels=1000)
    options = {"context_broadcast": "cb", "context_broadcast_blend": True}
    own = run(tmp_path / "out", model=folder, learning_rate=1e-9, max_steps=1, **options)
    before, (model, _) = load_model(folder, "image-feature-extraction", "cpu")[0].state_dict(), load(tmp_path / "out")
    load_context_broadcast(model, tmp_path / "out")
    after, heads = model.state_dict(), ("timm_model.head.", "classifier.")
    assert all((after[name] - before[name]).abs().max() < 1e-6 for name in before if not name.startswith(heads))
    assert [*model.config.id2label.values()] == class_names
    assert has_context_broadcast(model)
    pixel_values = torch.randn(2, 3, 32, 32)
    logits = model(pixel_values).logits
    remove_context_broadcast(model)
    assert torch.allclose(model(pixel_values).logits, logits, atol=1e-5)
    again = make(tmp_path / "again", model=tmp_path / "out", trust_remote_code=True)
    assert again.evaluate()["eval_accuracy"] == pytest.approx(own.metrics["accuracy"])


def test_a_bootstrapped_vit_takes_larger_images(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "patch_size": 8}
    config = BootstrappedViTConfig(
        vit_config={**sizes, "image_size": 32, "num_attention_heads": 2},
        agent_config={**sizes, "num_positions": 2},
    )
    model = BootstrappedViTForImageClassification(config)
    model.save_pretrained(tmp_path / "model")
    run(tmp_path / "out", model=tmp_path / "model", image_size=64, max_steps=1)
    model, processor = load(tmp_path / "out")
    assert model.config.image_size == processor.size["height"] == 64
    assert model(torch.randn(1, 3, 64, 64)).logits.isfinite().all()


def test_a_new_timm_model_has_stochastic_depth(tmp_path):
    options = {"model_type": "timm_wrapper", "config_overrides": "architecture=vit_tiny_patch16_224"}
    own = make(tmp_path / "out", **options, image_size=224, drop_path=0.1)
    assert own.model.timm_model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)
