"""Test training of image classifiers: the saved folder can be loaded, and losses equal their formulas."""

import functools

import datasets
import pytest
import torch
import torch.nn.functional as F
from trainings import TINY_VIT, logged, measured, run_command, values_of
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTImageProcessor,
)

from frugalvit.training import models
from frugalvit.training.cards import share_error
from frugalvit.training.data import load_images
from frugalvit.training.loading import load_model
from frugalvit.training.train import ImageClassificationArguments, ImageClassificationTrainer, ModelArguments
from runs import check_resumes, error_of, parse
from runs import make as make_trainer
from tiny import save_vit


make = functools.partial(make_trainer, "train")
run = functools.partial(run_command, "train")
VIT = {"config_overrides": TINY_VIT}
# With these options, training views and losses are not random.
PLAIN = {"mixup": 0, "randaugment_layers": 0, "label_smoothing_factor": 0, "flip": 0, "crop_padding": 0}
SMALL = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2"
RESNET = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}


def test_learns_and_saves_a_complete_repository(class_names, tmp_path):
    options = PLAIN | {"train_split": "train[:256]", "num_train_epochs": 6, "learning_rate": 3e-3, "logging_steps": 16}
    own, out = run(tmp_path / "out", **VIT, **options, image_mean=[0.4, 0.5, 0.6]), tmp_path / "out"
    losses, found = logged(own, "loss"), logged(own, "eval_accuracy")
    assert losses[-1] < losses[0] - 0.2 and losses[0] < 2.5
    assert own.metrics["accuracy"] == max(found) > 0.15 and own.metrics["top5_accuracy"] > own.metrics["accuracy"]
    model, processor = AutoModelForImageClassification.from_pretrained(out), AutoImageProcessor.from_pretrained(out)
    assert model.config.id2label == dict(enumerate(class_names)) and model.config.label2id["truck"] == 9
    assert list(processor.image_mean) == [0.4, 0.5, 0.6] and dict(processor.size) == {"height": 32, "width": 32}
    assert measured(model.eval(), processor) == pytest.approx(own.metrics["accuracy"])
    card = (out / "README.md").read_text(encoding="utf-8")
    error = share_error(own.metrics["accuracy"], 32)
    assert f"accuracy {own.metrics['accuracy']:.2%} ± {error:.2%}." in card and "frugalvit train --train_split" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("fine_tuned", [False, True])
def test_python_and_command_have_the_same_defaults(fine_tuned, tmp_path):
    start = {"model": save_vit(tmp_path / "vit", num_labels=10)} if fine_tuned else VIT

    # None removes an option of `SHORT` from the command, so that this option has its default value.
    options = dict.fromkeys(("num_train_epochs", "per_device_train_batch_size", "logging_steps")) | start
    own = make(tmp_path / "out", **options)
    _, (*_, args) = parse("train", tmp_path / "out", **options)
    python = ImageClassificationTrainer(own.model, args, own.images, own.images, own.processing_class)
    assert values_of([python.args]) == values_of([own.args])


def test_a_stopped_run_continues(tmp_path):
    """The run uses dropout, CutMix and random erasing, and takes sharpness-aware steps."""
    dropout = f"{TINY_VIT},hidden_dropout_prob=0.1"
    again = check_resumes("train", tmp_path, 5, config_overrides=dropout, cutmix=1, erasing=0.5, sam_rho=0.05)
    assert again.state.global_step == 8 and type(again.optimizer.optimizer).__name__ == "SAM"


def test_images_are_mixed_and_labels_smoothed_in_training_alone(tmp_path):
    own = make(tmp_path / "out", **VIT, **PLAIN | {"mixup": 1, "label_smoothing_factor": 0.2})
    batch, seen = next(iter(own.get_train_dataloader())), next(iter(own.get_eval_dataloader()))
    assert batch["labels"].shape == (16, 10) and (batch["labels"] > 0).sum(1).max() == 2
    assert seen["labels"].tolist() == load_images("cifar10-subset", "test[:32]")["label"][:]
    pixels = own.processing_class(own.eval_dataset.images.cast_column("image", datasets.Image())["image"][:])
    torch.testing.assert_close(seen["pixel_values"], torch.stack([*map(torch.as_tensor, pixels["pixel_values"])]))
    for inputs, training in ((batch, True), (seen, False)):
        loss = own.compute_loss(own.model.train(training), inputs)
        logs, labels = own.model(inputs["pixel_values"]).logits.log_softmax(1), inputs["labels"]
        targets = 0.8 * labels + 0.2 / 10 if training else F.one_hot(labels, 10)
        torch.testing.assert_close(loss, -(targets * logs).sum(1).mean())


@pytest.fixture
def taught(tmp_path):
    """Save a ResNet teacher with an image std of 0.25 (students: 0.5). Return distillation options and the ResNet."""
    torch.manual_seed(0)
    teacher = ResNetForImageClassification(ResNetConfig(**RESNET, num_labels=10)).eval()
    with torch.no_grad():
        teacher.classifier[-1].weight *= 20
    teacher.save_pretrained(tmp_path / "teacher")
    ViTImageProcessor(size={"height": 32, "width": 32}, image_std=[0.25] * 3).save_pretrained(tmp_path / "teacher")
    return {"distill_from": tmp_path / "teacher"} | PLAIN, teacher


@pytest.mark.parametrize(("kind", "token"), [("soft", False), ("hard", True)])
def test_learns_from_a_teacher(kind, token, taught, tmp_path):
    options, teacher = taught
    options |= {"distill_weight": 0.3, "distill_kind": kind, "distill_temperature": 2, "label_smoothing_factor": 0.1}
    broadcast = {"model_type": "vit_context_broadcast", "config_overrides": f"{SMALL},use_distillation_token=true"}
    own = make(tmp_path / "out", **options, **broadcast if token else VIT)
    inputs = next(iter(own.get_train_dataloader()))
    pixels, labels = inputs["pixel_values"], inputs["labels"]
    loss, outputs = own.compute_loss(own.model.train(), inputs, return_outputs=True)
    with torch.no_grad():
        expected = teacher(2 * pixels).logits
    heads = (outputs.cls_logits, outputs.distillation_logits) if token else 2 * (outputs.logits,)
    if kind == "soft":
        of_teacher = F.kl_div((heads[1] / 2).log_softmax(1), (expected / 2).softmax(1), reduction="batchmean") * 4
    else:
        of_teacher = F.cross_entropy(heads[1], expected.argmax(1))
    of_labels = F.cross_entropy(heads[0], labels, label_smoothing=0.1)
    torch.testing.assert_close(loss, 0.7 * of_labels + 0.3 * of_teacher)
    # Without a teacher, the distillation head learns from the labels.
    own.teacher = None
    both = F.cross_entropy(heads[1], labels, label_smoothing=0.1)
    torch.testing.assert_close(own.compute_loss(own.model, inputs), (of_labels + both) / 2)


def test_the_kind_of_problem_is_single_labels(tmp_path):
    """The command sets the model's `problem_type`. The trainer refuses multi-label models, also as teachers."""
    folder = save_vit(tmp_path / "vit", num_labels=10, problem_type="multi_label_classification")
    own = make(tmp_path / "out", model=folder)
    assert own.model.config.problem_type == "single_label_classification"
    images, processor = own.images, own.processing_class
    with pytest.raises(ValueError, match="problem_type is 'multi_label_classification', expected None or 'single"):
        ImageClassificationTrainer(
            load_model(folder, "image-classification")[0], own.args, images, processing_class=processor
        )
    with pytest.raises(ValueError, match="distill_from is for one label an image"):
        make(tmp_path / "out", distill_from=folder, **VIT)


@pytest.mark.parametrize(
    ("model_type", "initialization", "options"),
    [
        ("vit_impulse_init", "impulse", "solver=adam_bounded,steps=3,kernel_size=5,pseudo_input=uniform"),
        ("vit_context_broadcast", "trunc_normal", "std=0.05,value_init=mimetic"),
        ("agent_cnn", "reference", ""),
        ("convmixer", "default", ""),
    ],
)
def test_a_published_configuration_draws_the_start_again(model_type, initialization, options, tmp_path):
    """With equal seeds, the saved configuration gives the initial weights of the original model."""
    torch.manual_seed(99)
    start = {"initialization": initialization, "initialization_options": options}
    sizes = {"convmixer": "hidden_size=16,num_hidden_layers=2", "agent_cnn": "image_size=32,patch_size=8"}
    arguments = ModelArguments(model_type=model_type, config_overrides=sizes.get(model_type, SMALL), **start)
    args = ImageClassificationArguments(str(tmp_path / "run"), seed=3, use_cpu=True)
    model, _ = models.build_model(arguments, args, ["ant", "bee"])
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        # Instead of training, the test sets all weights to zero.
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    config = AutoConfig.from_pretrained(tmp_path)
    named = "impulse" if (model_type, initialization) == ("vit_impulse_init", "default") else initialization
    assert getattr(config, "initialization", named) == named
    drawn = AutoModelForImageClassification.from_config(config).state_dict()
    assert all(torch.equal(drawn[name], weight) for name, weight in expected.items())


def test_a_wrong_field_of_the_configuration_is_one_line(tmp_path, capsys):
    error = error_of("train", tmp_path / "out", capsys, config_overrides="hidden_sizes=3")
    assert "config_overrides has 'hidden_sizes', which vit configurations do not have" in error
