"""Test training of semantic segmentation on images of rectangles."""

import functools

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from trainings import logged, run_command
from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation

from drawn import scene
from frugalvit.training.metrics import SegmentationScores
from frugalvit.training.segment import SegmentationTrainer
from kinds import KINDS
from runs import error_of
from runs import make as make_trainer


make = functools.partial(make_trainer, "segment")
SEGFORMER = {
    "model": None,
    "model_type": "segformer",
    "num_latent_tokens": None,
    "config_overrides": "depths=[1,1,1,1],hidden_sizes=[8,8,16,16],num_attention_heads=[1,1,1,1],"
    "mlp_ratios=[1,1,1,1],decoder_hidden_size=16",
}


@pytest.fixture(scope="module")
def options(tmp_path_factory, scenes) -> dict:
    """Save a tiny classifier. Return the options of a training that starts from this classifier."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("start")
    kind, normalization = KINDS["bootstrapped"], {"image_mean": 0.5, "image_std": 0.25}
    config = kind.config(num_latent_tokens=4, num_focusing_iterations=2, decoder_hidden_size=32, **normalization)
    kind.classifier(config).save_pretrained(folder)
    data = {
        "dataset": scenes,
        "eval_dataset": scenes,
        "class_names": [*"abcd"],
        "train_split": None,
        "eval_split": None,
    }
    rates = {"learning_rate": 1e-3, "head_multiplier": 2, "warmup_steps": 2, "drop_path": 0.1}
    sizes = {"num_latent_tokens": 16, "image_size": [40, 48], "per_device_train_batch_size": 4}
    return {"model": folder, "per_device_eval_batch_size": 5} | data | rates | sizes


def measured(model, batches) -> dict[str, float]:
    """Compute a model's segmentation scores over all pixels that are not ignored."""
    scores = SegmentationScores(4)
    for batch in batches:
        with torch.no_grad():
            logits = model(pixel_values=batch["pixel_values"]).logits
        predictions = F.interpolate(logits, batch["labels"].shape[1:], mode="bilinear").argmax(1)
        scores.add_batch(predictions=predictions.numpy(), references=batch["labels"].numpy())
    return {name: value for name, value in scores.compute().items() if name != "iou"}


def test_learns_and_measures_the_saved_model(options, tmp_path):
    own, out = run_command("segment", tmp_path / "out", **options | {"num_train_epochs": 6}), tmp_path / "out"
    losses, found = logged(own, "loss"), logged(own, "eval_mean_iou")
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]) and own.metrics["mean_iou"] == max(found)
    model = AutoModelForSemanticSegmentation.from_pretrained(out).eval()
    assert model.config.num_latent_tokens == 16 and [*model.config.image_size] == [40, 48]
    assert model.config.id2label == dict(enumerate("abcd")) and model.config.drop_path_rate == 0.1
    processor = AutoImageProcessor.from_pretrained(out)
    assert processor.image_std == 0.25 and dict(processor.size) == {"height": 40, "width": 48}
    found = measured(model, own.get_eval_dataloader())
    assert {name: own.metrics[name] for name in found} == pytest.approx(found, abs=1e-5)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"mean IoU {own.metrics['mean_iou']:.2%}, measured at 40 x 48 pixels" in card


def test_models_of_transformers_learn_from_scratch_and_continue(options, tmp_path):
    own = run_command("segment", tmp_path / "out", **options | SEGFORMER | {"drop_path": 0.2, "layer_decay": 1})
    model = AutoModelForSemanticSegmentation.from_pretrained(tmp_path / "out").eval()
    assert type(model).__name__ == "SegformerForSemanticSegmentation" and model.config.drop_path_rate == 0.2
    again = make(tmp_path / "again", **options | {"model": tmp_path / "out", "num_latent_tokens": None})
    pixel_values = torch.randn(1, 3, 40, 48)
    for other in (own.model, again.model):
        torch.testing.assert_close(model(pixel_values).logits, other.eval()(pixel_values).logits)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: image-segmentation" in card and "AutoModelForSemanticSegmentation" in card


def test_pairs_in_python(options, tmp_path):
    """Pairs of an image and its mask give the same views as the data set that the command loads."""
    made = make(tmp_path / "out", ignored_labels=3, **options)
    assert made.model.config.ignored_labels == [3]
    pairs = [tuple(map(Image.fromarray, scene(seed))) for seed in range(12)]
    own = SegmentationTrainer(made.model, made.args, pairs, pairs[:5], made.processing_class)
    for name in ("pixel_values", "labels"):
        assert torch.equal(own.eval_dataset[3][name], made.eval_dataset[3][name])
        assert torch.equal(own.train_dataset[3][name], made.train_dataset[3][name])
    assert "eval_mean_iou" in own.evaluate() and own.predict(pairs[:5]).metrics["test_mean_iou"] >= 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ignored_labels": [0, 1, 2, 3]}, "All pixels of the evaluation masks are ignored; check ignored_labels"),
        ({"ignored_labels": [256]}, "ignored_labels is [256], expected class numbers from 0 to 255"),
        ({"class_names": ["a"], "num_labels": None}, "The model has 1 class, expected two or more"),
        ({"class_names": None}, "which has no classes for segmentation; pass num_labels or class_names"),
    ],
)
def test_wrong_calls_are_one_line(wrong, message, options, tmp_path, capsys):
    assert message in error_of("segment", tmp_path / "out", capsys, **options | wrong)
