"""Test `ImageTrainer`: runs that stop and continue, the best model, optimizers, and files in the output folder."""

import json
import math
import os
import signal
from types import SimpleNamespace

import datasets
import pytest
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from trainings import assert_equal, logged
from transformers import AutoModelForImageClassification, TrainerCallback

from frugalvit import BootstrapTrainer, ImageClassificationTrainer
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.training.align_llava import AlignLlavaTrainer
from frugalvit.training.arguments import ImageTrainingArguments
from frugalvit.training.data import load_images
from frugalvit.training.models import learning_rate_factors
from frugalvit.training.segment import SegmentationTrainer
from frugalvit.training.sharpness import SharpnessAwareTrainer
from frugalvit.training.train import SmallDataArguments, SmallDataView
from frugalvit.training.trainer import start
from frugalvit.training.views import EvalView, mixing
from runs import At
from tiny import make_vit


FORMAT = ImageFormat((16, 16))
VIEW = SimpleNamespace(crop="padded", crop_padding=2, crop_size=None, padding_mode="reflect", flip=0.5)
# Dropout draws random numbers, so a run that continues must restore the random state.
SIZES = {"image_size": 16, "hidden_size": 16, "intermediate_size": 32, "hidden_dropout_prob": 0.1, "num_labels": 10}
# A run with these arguments has two epochs of four steps.
ARGUMENTS = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 32}
ARGUMENTS |= {"learning_rate": 1e-2, "weight_decay": 0.05, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
ARGUMENTS |= {"logging_steps": 1, "use_cpu": True, "batch_eval_metrics": False}


class Learner(SharpnessAwareTrainer):
    """Trainer of a classifier. `factors` maps a step to the number by which the loss of this step is multiplied.
    If `accuracies` is set, successive calls of `measure` return successive items of `accuracies`."""

    factors, accuracies = {}, ()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["pixel_values"])
        loss = F.cross_entropy(outputs.logits, inputs["labels"]) * self.factors.get(self.state.global_step, 1)
        return (loss, outputs) if return_outputs else loss

    def measure(self, prediction):
        if self.accuracies:
            return {"accuracy": self.accuracies[len(logged(self, "eval_accuracy"))]}
        return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean().item()}

    def summary(self, metrics):
        return f"accuracy {metrics['accuracy']:.4f}" if metrics else "not evaluated"


@pytest.fixture
def make(tmp_path, images):
    def make(
        name="out",
        callbacks=(),
        train=images,
        evaluation=images,
        test=None,
        mix=None,
        factors=None,
        fields=None,
        image_format=FORMAT,
        **options,
    ):
        return Learner(
            make_vit(**SIZES | (fields or {})),
            SmallDataArguments(str(tmp_path / name), **ARGUMENTS | options),
            train,
            evaluation,
            SmallDataView(image_format, VIEW),
            EvalView(image_format),
            mix=mix,
            test_dataset=test,
            learning_rate_factors=factors,
            processing_class=transformers.ViTImageProcessor(size={"height": 16, "width": 16}),
            callbacks=list(callbacks),
        )

    return make


class Stop(TrainerCallback):
    """Save a checkpoint after a step and end the run."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_save = control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("options", [{}, {"dataloader_num_workers": 1}, {"gradient_accumulation_steps": 2}])
def test_a_run_that_continues_within_an_epoch_equals_one_without_a_stop(options, make):
    options |= {"mix": mixing(10, 0.8, 1.0), "evaluation": None}
    whole = make("whole", **options)
    whole.run()
    make(callbacks=[Stop(whole.state.max_steps * 3 // 4)], **options).run()
    own = make(**options)
    own.run()
    assert_equal(own.model.state_dict(), whole.model.state_dict())
    # All losses differ from each other, because views and the order of images change in each epoch.
    assert logged(own, "loss") == logged(whole, "loss") and len({*logged(own, "loss")}) == whole.state.max_steps


def test_a_run_on_a_stream_continues(make, write_parquet):
    def run(name, **options):
        stream = load_images(write_parquet(count=24), streaming=True)
        own = make(name, train=stream, evaluation=None, max_steps=6, **options)
        own.run()
        return logged(own, "loss")

    whole, stopped, own = run("whole"), run("out", callbacks=[Stop(2)]), run("out")
    # Each of two epochs has three batches. All losses differ, because the order of images and their views change.
    assert stopped == whole[:2] and own[:3] == whole[:3] and len({*whole}) == len(own) == 6


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_ctrl_c_saves_the_step_under_way(again, make, tmp_path, capsys):
    """The first Ctrl-C ends the run after the current step. A second Ctrl-C ends the run at once."""
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make(callbacks=[At(lambda step: step == 5 and os.kill(os.getpid(), signal.SIGINT))] * (1 + again)).run()
    printed = capsys.readouterr().err
    assert printed.count("Finishing and saving the current step.") == 1
    assert ("Stopped at step 6; the same command continues from there." in printed) != again
    assert signal.getsignal(signal.SIGINT) == handler
    assert (tmp_path / "out" / "checkpoint-6").is_dir() != again


@pytest.mark.parametrize(("step", "factor", "logging_steps"), [(0, math.inf, 1), (5, math.nan, 1), (6, math.nan, 50)])
def test_a_loss_that_is_not_finite_ends_the_run(step, factor, logging_steps, make, tmp_path):
    """The run ends before its weights are saved, even if losses are logged only every 50 steps."""
    own, handler = make(logging_steps=logging_steps), signal.getsignal(signal.SIGINT)
    own.factors = {step: factor}
    kept = f"{tmp_path}/out/checkpoint-4 is kept" if step else "There is no checkpoint yet"
    reported = 8 if logging_steps > 1 else step + 1
    what = "weights" if logging_steps > 1 else "loss"
    with pytest.raises(ValueError, match=rf"^At step {reported}, the {what} became .* learning_rate .*{kept}\.$"):
        own.run()
    assert signal.getsignal(signal.SIGINT) == handler and not (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "checkpoint-8").exists()


@pytest.mark.parametrize("files", [["config.json"], ["checkpoint-500/notes.txt"]])
def test_folders_of_others_are_refused_and_kept(files, make, tmp_path, capsys):
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")

    def begin(**options):
        start(ImageTrainingArguments(str(tmp_path / "out"), use_cpu=True, **options))

    with pytest.raises(ValueError, match="output_dir .*out is not empty .*overwrite_output_dir"):
        begin()
    begin(overwrite_output_dir=True)
    make(overwrite_output_dir=True, save_total_limit=1, num_train_epochs=3).run()
    for name in files:
        assert name == "config.json" or (tmp_path / "out" / name).read_text() == "mine"


def test_checkpoints_are_removed_when_a_new_run_starts(make, tmp_path):
    """With `overwrite_output_dir`, `run` removes the checkpoints of the earlier run. The steps before `run` remove no
    checkpoint, because a command may fail in these steps."""
    folder = tmp_path / "out"
    make(callbacks=[Stop(2)]).run()
    start(ImageTrainingArguments(str(folder), use_cpu=True, overwrite_output_dir=True))
    own = make(overwrite_output_dir=True, seed=1)
    assert (folder / "checkpoint-2").is_dir()
    own.run()
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.02}, "learning_rate was 0.01, now 0.02"),
        ({"seed": 1}, "seed was 42, now 1"),
        ({"per_device_train_batch_size": 16}, "total_train_batch_size was 8, now 16"),
        ({"fields": {"hidden_act": "relu"}}, "config.hidden_act was"),
        ({"fields": {"hidden_size": 32}}, "config.hidden_size was 16, now 32"),
        ({"image_format": ImageFormat((16, 16), mean=(0.4,) * 3)}, "image_formats.pixel_values.mean was"),
        ({"names": list("abcdefghij")}, "class_names was"),
    ],
)
def test_a_run_does_not_continue_with_other_settings(change, message, make, images, tmp_path):
    """With other settings, a finished or stopped run does not continue, and its files are kept."""
    callbacks = [Stop(2)] if "seed" in change else []
    make(callbacks=callbacks).run()
    files = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    if "names" in change:
        labels = images.cast_column("label", datasets.ClassLabel(names=change["names"]))
        change = {"train": labels, "evaluation": labels}
    with pytest.raises(
        ValueError, match=f"out holds a run with other settings: {message}.* pass overwrite_output_dir"
    ):
        make(**change).run()
    assert files == {path: path.read_bytes() for path in files}
    make(**change, overwrite_output_dir=True).run()
    make(**change).run()


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("optimizer.pt", lambda content: b""),
        ("scheduler.pt", lambda content: content[: len(content) // 2]),
        ("rng_state.pth", lambda content: b""),
        ("model.safetensors", lambda content: content[: len(content) // 2]),
        ("trainer_state.json", lambda content: content[: len(content) // 2]),
        ("trainer_state.json", lambda content: b"{}"),
        ("trainer_state.json", lambda content: b"null"),
    ],
)
def test_a_run_continues_from_the_newest_whole_checkpoint(file, damage, make, tmp_path, capsys):
    folder = tmp_path / "out"
    make().run()
    damaged = folder / "checkpoint-8" / file
    damaged.write_bytes(damage(damaged.read_bytes()))
    steps = []
    make(callbacks=[At(steps.append)]).run()
    assert steps == [4, 5, 6, 7]
    line = f"{damaged} is missing or damaged, so training continues from {folder / 'checkpoint-4'}."
    assert capsys.readouterr().out.count(line) == 1
    damaged.write_bytes(b"")
    with pytest.raises(ValueError, match=f"resume_from_checkpoint is .*, whose {file} is missing or damaged"):
        make(resume_from_checkpoint=str(damaged.parent)).run()


@pytest.mark.parametrize("best", [0, 1])
def test_the_best_epoch_is_kept_and_measured(best, make, images, tmp_path):
    """The kept model is measured on the test images. Without test images, it is measured on the evaluation images."""
    accuracies, saved = [(0.75, 0.25, 0.375), (0.25, 0.75, 0.375)][best], []
    for name, options, test, epoch, expected in (
        ("best", {}, None, best, 0.75),
        ("tested", {}, images, best, 0.375),
        ("last", {"load_best_model_at_end": False}, None, 1, accuracies[1]),
    ):
        own, folder = make(name, test=test, **options), tmp_path / name
        own.accuracies = accuracies
        assert own.run()["accuracy"] == expected
        card, results = ModelCard.load(folder / "README.md"), json.loads((folder / "eval_results.json").read_text())
        assert results["accuracy"] == expected
        assert f"accuracy {expected:.4f}" in card.text and f"step {4 * epoch + 4} of 8, chosen" in card.text
        saved.append(AutoModelForImageClassification.from_pretrained(folder).state_dict())
        assert_equal(saved[-1], own.model.state_dict())
    assert torch.equal(*(each["classifier.weight"] for each in saved[1:])) == (best == 1)


@pytest.mark.parametrize("prefix", ["eval", "test"])
def test_the_card_reports_no_metrics_of_other_images(prefix, make, images, tmp_path):
    """The card reports the metrics of `eval_dataset`, even if other images were evaluated after the training."""
    own = make(test=images)
    own.accuracies = (0.5, 0.75, 0.25)
    own.train()
    assert own.evaluate("cifar10-subset", metric_key_prefix=prefix)[f"{prefix}_accuracy"] == 0.25
    own.save_model()
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "accuracy 0.7500" in card and "chosen and measured on eval_dataset" in card


def test_a_finished_run_is_kept_and_a_longer_one_continues(make, tmp_path):
    steps = []

    def run(**options):
        own = make(lr_scheduler_type="constant", callbacks=[At(steps.append)], **options)
        own.accuracies = (0.75, 0.25, 0.5)
        own.run()
        assert json.loads((tmp_path / "out" / "train_results.json").read_text())["train_loss"] > 0
        return own, load_file(tmp_path / "out" / "model.safetensors")

    (first, saved), *more = run(), run(), run(num_train_epochs=3)
    assert steps == [*range(12)] and logged(more[1][0], "eval_accuracy") == [0.75, 0.25, 0.5]
    for own, kept in more:
        assert own.metrics == first.metrics and first.metrics["accuracy"] == 0.75
        assert_equal(kept, saved)


def test_methods_of_the_trainer_work_alone(make, images, pictures, tmp_path, hub, monkeypatch):
    """In a notebook, users call the trainer's methods one by one."""
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    # TensorBoard may write to the working directory, so the test changes to a temporary folder.
    monkeypatch.chdir(tmp_path)
    own = make(num_train_epochs=1, hub_model_id="someone/model", report_to="tensorboard")
    assert own.evaluate().keys() >= {"eval_loss", "eval_accuracy"} and own.train().global_step == 4
    assert own.evaluate({"other": images})["eval_other_accuracy"] == own.metrics["accuracy"]
    predictions = own.predict(pictures)
    assert predictions.predictions.shape == (32, 10) and predictions.label_ids is None
    with pytest.raises(ValueError, match="There are the classes airplane.* to train and .* to evaluate on"):
        own.evaluate(images.cast_column("label", type(images.features["label"])(names=list("abcdefghij"))))
    own.save_model(str(tmp_path / "saved"))
    names = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"}
    assert names == {path.name for path in (tmp_path / "saved").iterdir()}
    own.push_to_hub("All of it")
    [(_, header, files)] = hub.commits
    assert names <= files.keys() and header["summary"] == "All of it" and list((tmp_path / "out").glob("runs/*"))
    assert not any(name.startswith("checkpoint") for name in files)


def test_sharpness_aware_steps_compute_two_gradients(make, monkeypatch):
    """SAM moves the weights by rho along the first gradient. The second gradient updates the unmoved weights."""
    seen, compute_loss = [], Learner.compute_loss

    def note(self, model, *arguments, **options):
        seen.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
        return compute_loss(self, model, *arguments, **options)

    monkeypatch.setattr(Learner, "compute_loss", note)
    make(sam_rho=0.05, max_steps=2, warmup_steps=0, evaluation=None).run()
    first, led, second, led_again = seen
    assert (led - first).norm().item() == pytest.approx(0.05, rel=1e-3)
    assert not torch.equal(first, second) and not torch.equal(led_again, second)
    with pytest.raises(ValueError, match="sam_rho is 0.05, expected 0 with gradient accumulation or fp16"):
        make(sam_rho=0.05, gradient_accumulation_steps=2)


@pytest.mark.parametrize(("options", "kind"), [({}, "AdamW"), ({"sam_rho": 0.1}, "SAM")])
def test_optimizers_have_the_groups_of_the_trainer(options, kind, make):
    """Norms, biases, position embeddings and [CLS] have no weight decay. Frozen weights are in no group."""
    own = make(**options)
    own.model.vit.layernorm.requires_grad_(False)
    optimizer = own.create_optimizer()
    assert type(optimizer).__name__ == kind and own.create_optimizer() is optimizer
    assert [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups] == [(0.05, 0.01), (0.0, 0.01)]
    names = {id(parameter): name for name, parameter in own.model.named_parameters()}
    decayed, kept = ({names[id(each)] for each in group["params"]} for group in optimizer.param_groups)
    assert {name.rsplit(".", 1)[1] for name in decayed} == {"weight"} and "classifier.weight" in decayed
    assert {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings", "classifier.bias"} <= kept
    assert not any("norm" in name for name in decayed) and not any("vit.layernorm" in name for name in kept)


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_rates_fall_with_depth(library, make):
    """The learning rate falls from the last encoder block to the first. The classifier has its own factor."""
    if library == "timm":
        sizes = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}
        config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=sizes, num_labels=3)
        model, block = transformers.TimmWrapperForImageClassification(config), "timm_model.blocks.{}.mlp.fc1.weight"
        names = {"timm_model.cls_token": 0.25, "timm_model.norm.weight": 1.0, "timm_model.head.weight": 5.0}
    else:
        model, block = make_vit(num_hidden_layers=2), "vit.layers.{}.mlp.fc1.weight"
        names = {"vit.embeddings.cls_token": 0.25, "vit.layernorm.weight": 1.0, "classifier.weight": 5.0}
    names |= {block.format(0): 0.5, block.format(1): 1.0}
    factors, parameters = learning_rate_factors(model, 5.0, 0.5), dict(model.named_parameters())
    trainer = make(factors=factors)
    groups = trainer.create_optimizer(model).param_groups
    rates = {id(each): group["lr"] for group in groups for each in group["params"]}
    assert {name: rates[id(parameters[name])] / trainer.args.learning_rate for name in names} == pytest.approx(names)
    assert len(rates) == len(parameters)


@pytest.mark.parametrize(
    ("trainer", "before"),
    [(BootstrapTrainer, 2), (ImageClassificationTrainer, 1), (SegmentationTrainer, 1), (AlignLlavaTrainer, 2)],
)
def test_a_missing_processor_is_named(trainer, before, images, tmp_path):
    args = ImageTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="image processor is None, .* pass processing_class"):
        trainer(*[make_vit()] * before, args, images)
