"""Training of semantic segmentation, on scenes of rectangles."""

import functools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from runs import check_resumes, error_of
from runs import make as make_trainer
from trainings import logged, run_command
from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation

from drawn import scene
from frugalvit import SparseFormerConfig, SparseFormerForImageClassification
from frugalvit.common.choices import IGNORED
from frugalvit.training.segment import SegmentationArguments, SegmentationTrainer


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
    """Of a run that starts from a tiny classifier."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("start")
    config = SparseFormerConfig(
        image_size=32,
        num_latent_tokens=4,
        num_sampling_points=4,
        num_mixed_points=8,
        stem_channels=8,
        focusing_hidden_size=32,
        num_focusing_iterations=2,
        hidden_size=64,
        num_hidden_layers=2,
        decoder_hidden_size=32,
        image_mean=0.5,
        image_std=0.25,
    )
    SparseFormerForImageClassification(config).save_pretrained(folder)
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


def brute_force(model, batches) -> dict[str, float]:
    """Scores of all pixels that count, one class after the other."""
    predicted, real = [], []
    for batch in batches:
        with torch.no_grad():
            logits = model(pixel_values=batch["pixel_values"]).logits
        logits = F.interpolate(logits, batch["labels"].shape[1:], mode="bilinear")
        counts = batch["labels"] != IGNORED
        predicted.append(logits.argmax(1)[counts].numpy())
        real.append(batch["labels"][counts].numpy())
    predicted, real = np.concatenate(predicted), np.concatenate(real)
    ious = [
        ((predicted == c) & (real == c)).sum() / ((predicted == c) | (real == c)).sum() for c in {*real, *predicted}
    ]
    recalls = [(predicted[real == c] == c).mean() for c in {*real}]
    return {
        "mean_iou": np.mean(ious),
        "mean_accuracy": np.mean(recalls),
        "pixel_accuracy": (predicted == real).mean(),
    }


def test_learns_and_measures_the_saved_model(options, tmp_path):
    own, out = run_command("segment", tmp_path / "out", **options | {"num_train_epochs": 6}), tmp_path / "out"
    losses, found = logged(own, "loss"), logged(own, "eval_mean_iou")
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]) and own.metrics["mean_iou"] == max(found)
    model = AutoModelForSemanticSegmentation.from_pretrained(out).eval()
    assert model.config.num_latent_tokens == 16 and [*model.config.image_size] == [40, 48]
    assert model.config.id2label == dict(enumerate("abcd")) and model.config.drop_path_rate == 0.1
    processor = AutoImageProcessor.from_pretrained(out)
    assert processor.image_std == 0.25 and dict(processor.size) == {"height": 40, "width": 48}
    measured = brute_force(model, own.get_eval_dataloader())
    assert {name: own.metrics[name] for name in measured} == pytest.approx(measured, abs=1e-5)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"mean IoU {own.metrics['mean_iou']:.2%} of 12 images, measured at 40 x 48 pixels" in card
    # Where some pixels do not count, and some classes are not there.
    some = make(tmp_path / "some", **options | {"ignored_labels": [0, 2]})
    measured = brute_force(some.model.eval(), some.get_eval_dataloader())
    metrics = some.evaluate()
    assert {name: metrics[f"eval_{name}"] for name in measured} == pytest.approx(measured, abs=1e-5)


def test_a_run_that_was_stopped_goes_on(options, tmp_path):
    check_resumes("segment", tmp_path, 4, **options)


def test_models_of_transformers_learn_from_scratch(options, tmp_path):
    own = run_command("segment", tmp_path / "out", **options | SEGFORMER | {"drop_path": 0.2, "layer_decay": 1})
    model = AutoModelForSemanticSegmentation.from_pretrained(tmp_path / "out").eval()
    assert type(model).__name__ == "SegformerForSemanticSegmentation" and model.config.drop_path_rate == 0.2
    pixel_values = torch.randn(1, 3, 40, 48)
    torch.testing.assert_close(model(pixel_values).logits, own.model.eval()(pixel_values).logits)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: image-segmentation" in card and "AutoModelForSemanticSegmentation" in card


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [({}, 80_000, 3), ({"max_steps": 5}, 5, 3), ({"num_train_epochs": 2}, -1, 2)],
)
def test_the_papers_steps_unless_told(options, steps, epochs, tmp_path):
    args = SegmentationArguments(str(tmp_path), use_cpu=True, **options)
    assert (args.max_steps, args.num_train_epochs) == (steps, epochs)


def test_each_rate_ends_in_the_optimizer(options, tmp_path):
    own = make(tmp_path / "out", **options | {"layer_decay": 0.5})
    groups = own.create_optimizer().param_groups
    rates = {weight: group["lr"] for group in groups for weight in group["params"]}
    expected = {
        "decode_head.query.weight": 2e-3,
        "sparseformer.layernorm.weight": 1e-3,
        "sparseformer.layers.1.mlp.fc1.weight": 1e-3,
        "sparseformer.layers.0.mlp.fc1.weight": 5e-4,
        "sparseformer.stem.convolution.weight": 2.5e-4,
    }
    weights = dict(own.model.named_parameters())
    assert {name: rates[weights[name]] for name in expected} == pytest.approx(expected)
    trained = {weight for weight in weights.values() if weight.requires_grad}
    assert {*rates} == trained and {group["weight_decay"] for group in groups} == {0.01, 0.0}


def write_pair(folder, part: str, seed: int):
    """A scene as ADE20K has it."""
    for name, pixels in zip((f"images/{part}/{seed}.jpg", f"annotations/{part}/{seed}.png"), scene(seed), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name)


def test_ade20k_does_not_count_0(options, tmp_path):
    for seed in range(6):
        write_pair(tmp_path / "ade", "training" if seed < 4 else "validation", seed)
    data = {"dataset": tmp_path / "ade", "eval_dataset": None, "train_split": "training", "eval_split": "validation"}
    data |= {"class_names": None, "num_labels": 3, "image_size": [40, 52], "reduce_labels": True}
    own = make(tmp_path / "out", **options | data)
    labels = torch.stack([own.eval_dataset[index]["labels"] for index in range(2)])
    masks = torch.stack([torch.as_tensor(scene(seed)[1]) for seed in (4, 5)])
    assert torch.equal(labels, torch.where(masks == 0, IGNORED, masks - 1)) and len(own.train_dataset) == 4
    assert own.processing_class.do_reduce_labels
    batch = next(iter(own.get_train_dataloader()))
    assert batch["labels"].shape == (4, 40, 52) and {*batch["labels"].unique().tolist()} <= {0, 1, 2, IGNORED}


def test_polygons_of_labelme_have_their_names(options, tmp_path):
    folder = tmp_path / "labelme"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (52, 40), "red").save(folder / f"{number}.jpg")
        shapes = [
            {
                "label": label,
                "shape_type": "polygon",
                "points": [[left, 0], [left + 20, 0], [left + 20, 40], [left, 40]],
            }
            for label, left in (("right", 30), ("left", 0))
        ]
        content = {"imagePath": f"{number}.jpg", "imageHeight": 40, "imageWidth": 52, "shapes": shapes}
        (folder / f"{number}.json").write_text(json.dumps(content), encoding="utf-8")
    data = {"dataset": folder, "eval_dataset": None, "class_names": None, "image_size": [40, 52]}
    own = make(tmp_path / "out", **options | data)
    assert own.model.config.id2label == {0: "_background_", 1: "left", 2: "right"}
    labels = own.eval_dataset[0]["labels"]
    assert (labels[:, :19] == 1).all() and (labels[:, 32:49] == 2).all() and not labels[:, 23:28].any()


def test_pairs_in_python(options, tmp_path):
    """PIL images, images and masks move together, and masks are those of the command."""
    made = make(tmp_path / "out", **options)
    pairs = [tuple(map(Image.fromarray, scene(seed))) for seed in range(12)]
    own = SegmentationTrainer(made.model, made.args, pairs, pairs[:5], made.processing_class)
    for index in range(5):
        for name in ("pixel_values", "labels"):
            assert torch.equal(own.eval_dataset[index][name], made.eval_dataset[index][name])
            assert torch.equal(own.train_dataset[index][name], made.train_dataset[index][name])
    assert own.train().global_step == 6
    scores = own.predict(pairs[:5]).metrics
    assert scores["test_mean_iou"] == pytest.approx(logged(own, "eval_mean_iou")[own.state.best_global_step // 3 - 1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"class_names": ["a", "b"]}, "has the labels [2, 3], the classes are 0 to 1"),
        ({"ignored_labels": [0, 1, 2, 3]}, "No pixel of the evaluation masks counts; check ignored_labels"),
        ({"warmup_steps": 6}, "warmup_steps is 6, expected less than the training's 6 steps"),
        ({"num_labels": 5}, "num_labels is 5, class_names has 4"),
        ({"model_type": "segformer"}, "Give either model, to go on from, or model_type"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1, expected 0, as pixels have no"),
        ({"image_size": 2}, "image_size is [2], expected one number or two, at least 4"),
        ({"class_names": None}, "is no segmentation model, which has classes; give num_labels or class_names"),
    ],
)
def test_wrong_calls_are_one_line(wrong, message, options, tmp_path, capsys):
    assert message in error_of("segment", tmp_path / "out", capsys, **options | wrong)
