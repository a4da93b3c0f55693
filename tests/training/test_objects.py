"""Trainers as objects: what a notebook does with them."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import GradientState
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification, TrainerCallback

import frugalvit
from frugalvit import (
    BootstrapArguments,
    BootstrapTrainer,
    ImageClassificationArguments,
    ImageClassificationTrainer,
    SparseFormerForImageClassification,
    bootstrap,
)
from frugalvit.common.data import load_images
from frugalvit.common.decoding import decode_image
from frugalvit.modeling.layers import divergence
from frugalvit.training import bootstrap as recipe
from frugalvit.training import train, trainer
from frugalvit.training.losses import Targets


SMALL = {"stem_channels": 8, "num_sampling_points": 4, "num_mixed_points": 4, "mixing_hidden_size": 8}
OVERRIDES = ",".join(f"{name}={value}" for name, value in SMALL.items())
# What makes a call short.
SHORT = {
    **{"recipe": "paper", "epochs": 1, "batch_size": 16, "config_overrides": OVERRIDES},
    **{"mixed_precision": "no", "compare": False},
}


@pytest.fixture(scope="module")
def images():
    return load_images("cifar10-subset", "train[:32]")


@pytest.fixture(scope="module")
def held_back():
    return load_images("cifar10-subset", "test[:16]")


class Pairs(Dataset):
    """A dataset of PyTorch, as torchvision has them."""

    def __init__(self, images):
        self.classes = images.features["label"].names
        self.pairs = [(decode_image(row["image"], 0), row["label"]) for row in images]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def of_command(teacher, tmp_path_factory):
    """The folder of a student that the command bootstrapped."""
    folder = tmp_path_factory.mktemp("command")
    options = SHORT | {"teacher": teacher, "train_split": "train[:32]", "eval_split": "test[:16]"}
    words = [text for name, value in options.items() if name != "compare" for text in (f"--{name}", str(value))]
    recipe.main([*words, "--no-compare", "--output", str(folder / "out")])
    return folder / "out"


def test_one_call_gives_what_the_command_gives(of_command, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    splits = {"train_split": "train[:32]", "eval_split": "test[:16]"}
    student = bootstrap(str(teacher), "cifar10-subset", output=tmp_path / "out", **SHORT, **splits)
    assert isinstance(student, SparseFormerForImageClassification)
    assert_equal(weights(tmp_path / "out"), weights(of_command))
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "frugalvit bootstrap" in card and "ipykernel" not in card and str(tmp_path) not in card
    # Made again, it is there.
    assert_equal(
        bootstrap(str(teacher), "cifar10-subset", output=tmp_path / "out", **SHORT, **splits).state_dict(),
        student.state_dict(),
    )


@pytest.mark.parametrize("kind", ["data set", "PyTorch", "PIL", "paths", "folder"])
def test_images_are_what_people_have(kind, of_command, images, held_back, teacher, tmp_path):
    """The same student from the same pixels."""
    pictures = [decode_image(row["image"], 0) for row in images]
    for number, picture in enumerate(pictures):
        (tmp_path / "images").mkdir(exist_ok=True)
        picture.save(tmp_path / "images" / f"{number:02}.png")
    given = {
        "data set": datasets.Dataset.from_dict({"picture": pictures}),
        "PyTorch": Pairs(images),
        "PIL": pictures,
        "paths": sorted((tmp_path / "images").iterdir()),
        "folder": str(tmp_path / "images"),
    }[kind]
    bootstrap(str(teacher), given, output=tmp_path / "out", eval_images=held_back, **SHORT)
    assert_equal(weights(tmp_path / "out"), weights(of_command))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epoch": 1}, TypeError, "no option 'epoch'; did you mean 'epochs'"),
        ({"epochs": 0}, ValueError, r"--epochs is 0, expected"),
        # Before the teacher is loaded.
        ({"teacher": "no/teacher", "images": "nowhere/at/all"}, ValueError, "'nowhere/at/all' is no data set"),
        ({"num_tokens": [4]}, ValueError, "--elastic-token-counts is"),
        ({"images": 5}, ValueError, "The images are a int; expected a data set"),
        ({"images": ["nowhere.png"] * 32, "eval_images": ["nowhere.png"]}, ValueError, r"Image \d+ of the data set"),
        ({"images": [None] * 32, "eval_images": [None]}, ValueError, r"Item \d+ of the images is a NoneType"),
    ],
)
def test_what_does_not_fit_is_raised(options, error, message, teacher, tmp_path):
    """A notebook does not exit, and no model is left behind."""
    splits = {"train_split": "train[:32]", "eval_split": "test[:16]"}
    options = {"teacher": str(teacher), "images": "cifar10-subset", **SHORT, **splits} | options
    with pytest.raises(error, match=message):
        bootstrap(output=tmp_path / "out", **options)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.fixture
def make(teacher, images, held_back, tmp_path):
    """Makes a trainer of a fresh student."""

    def make(name="out", callbacks=None, eval_dataset=held_back, **options):
        model = AutoModelForImageClassification.from_pretrained(teacher)
        torch.manual_seed(0)
        student = SparseFormerForImageClassification.from_teacher(model, num_latent_tokens=4, truncate=1 / 3, **SMALL)
        values = {"num_train_epochs": 2, "per_device_train_batch_size": 16, "logging_steps": 1, "use_cpu": True}
        return BootstrapTrainer(
            teacher=model,
            model=student,
            args=BootstrapArguments(output_dir=str(tmp_path / name), **values | options),
            train_dataset=images,
            eval_dataset=eval_dataset,
            processing_class=AutoImageProcessor.from_pretrained(teacher),
            callbacks=callbacks,
        )

    return make


def test_a_trainer_can_be_asked(make):
    """A trainer tells which weights are frozen, the weights of its losses, and how long an epoch is."""
    own = make()
    layers = own.student.sparseformer.layers
    assert [all(weight.requires_grad for weight in layer.parameters()) for layer in layers] == [True, False]
    assert not own.student.classifier.weight.requires_grad
    assert (own.args.recipe, own.args.learning_rate, own.args.crop_scale) == ("small", 6e-3, [0.8, 1.0])
    assert own.args.token_loss_weight == 4 and own.align.align_tokens
    assert own.loader.steps_per_epoch == 2 * own.args.repeats == 4
    optimizer, schedule = own.make_optimizer()
    assert {weight for group in optimizer.param_groups for weight in group["params"]} == {
        weight for weight in own.student.parameters() if weight.requires_grad
    }
    assert schedule.get_last_lr()
    # DeepSpeed starts between the two, and leaves `Trainer` without a schedule.
    own.create_optimizer()
    own.lr_scheduler = None
    assert own.create_scheduler(own.total_steps) is own.lr_scheduler and own.lr_scheduler.get_last_lr()


class Recorder(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_step_end(self, args, state, control, **_):
        self.events.append(state.global_step)

    def on_evaluate(self, args, state, control, metrics, **_):
        self.events += [value for name, value in metrics.items() if name == "eval_alignment"]


def test_trains_evaluates_and_saves_as_a_trainer(make, held_back, tmp_path, monkeypatch):
    recorder = Recorder()
    own = make(callbacks=[recorder], load_best_model_at_end=True)
    before = own.evaluate()
    assert before.keys() >= {"eval_alignment", "eval_accuracy", "eval_teacher_accuracy"}
    output = own.train()
    assert output.global_step == own.state.global_step == 8 and output.training_loss > 0
    # What others of this process gather is theirs.
    assert not GradientState().in_dataloader
    steps = [event for event in recorder.events if isinstance(event, int)]
    alignments = [event for event in recorder.events if isinstance(event, float)]
    assert steps == [*range(1, 9)] and len(alignments) == 3
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["best"]["alignment"] == own.state.best_metric == max(alignments[1:]) > before["eval_alignment"]
    assert own.train().global_step == 8
    # The best model is in the trainer and in the folder, with a card that names no command.
    assert own.evaluate()["eval_alignment"] == pytest.approx(results["best"]["alignment"], abs=1e-6)
    student = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert_equal(student.state_dict(), own.student.state_dict())
    assert "frugalvit.BootstrapTrainer" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert own.evaluate([decode_image(row["image"], 0) for row in held_back], metric_key_prefix="other") == {
        "other_alignment": pytest.approx(results["best"]["alignment"], abs=1e-6)
    }
    best = (tmp_path / "out" / "README.md").read_bytes()
    own.save_model()
    assert (tmp_path / "out" / "README.md").read_bytes() == best
    own.save_model(tmp_path / "saved")
    assert "not evaluated" in (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert_equal(weights(tmp_path / "saved"), weights(tmp_path / "out"))
    uploaded = []

    def upload(folder, *told):
        uploaded.append((told, {path.name for path in Path(folder).iterdir()}))

    monkeypatch.setattr(trainer, "upload_folder", upload)
    own.args.hub_model_id, own.args.hub_private_repo = "owner/name", True
    assert own.push_to_hub("All of it", token="secret") == "owner/name"
    [(told, names)] = uploaded
    assert told == ("owner/name", True, "secret", "All of it", None) and {"README.md", "model.safetensors"} <= names
    assert not names & {"checkpoints", "results.json", "metrics.jsonl"}


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise RuntimeError("stopped")


@pytest.mark.parametrize("same", [False, True], ids=["another trainer", "the same trainer"])
def test_a_run_that_stopped_goes_on(same, make, tmp_path):
    """Nothing of the first call is left in a trainer: neither tokens of the teacher, nor the wish to stop."""
    make("whole").train()
    own = make(callbacks=[Stop()], save_steps=2)
    with pytest.raises(RuntimeError, match="stopped"):
        own.train()
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000002"]
    if same:
        own.remove_callback(Stop)
    else:
        own = make(save_steps=2)
    own.train()
    assert own.state.global_step == 8
    assert_equal(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    make(learning_rate=1e-5, overwrite=True, num_train_epochs=1).train()


def test_a_classifier_is_trained_as_by_the_command(images, held_back, tmp_path):
    vit = "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
    words = ("--train-split", "train[:32]", "--eval-split", "test[:16]", "--epochs", "1", "--batch-size", "16")
    train.main([*words, "--config-overrides", vit, "--mixed-precision", "no", "--output", str(tmp_path / "command")])
    groups = train.parse([*words, "--config-overrides", vit, "--output", "unused"])
    torch.manual_seed(0)
    model, processor = train.build_model(groups[0], groups[2], images.features["label"].names)
    args = ImageClassificationArguments(
        output_dir=str(tmp_path / "out"), num_train_epochs=1, per_device_train_batch_size=16, use_cpu=True
    )
    ImageClassificationTrainer(model, args, Pairs(images), held_back, processing_class=processor).train()
    assert_equal(weights(tmp_path / "out"), weights(tmp_path / "command"))


def test_every_recipe_has_a_trainer_with_its_arguments():
    for name in ("Bootstrap", "ImageClassification", "Joint", "Segmentation", "AlignLlava"):
        kind, arguments = getattr(frugalvit, f"{name}Trainer"), getattr(frugalvit, f"{name}Arguments")
        assert issubclass(kind, trainer.ImageTrainer) and arguments(output_dir="unused", use_cpu=True)


def test_losses_can_be_asked(make):
    """Each part is what it says, times its weight."""
    torch.manual_seed(0)
    embeddings, targets, labels = torch.randn(2, 32), Targets(torch.randn(2, 32)), torch.tensor([3, 5])
    outputs = SimpleNamespace(pooler_output=embeddings)

    def loss(**options):
        own = make(recipe="paper", **options)
        return own.align(outputs, targets, labels), own.student.classifier, own.anatomy.classifier

    cosine, classify, classify_teacher = loss()
    assert cosine.item() == pytest.approx(1 - F.cosine_similarity(embeddings, targets.embedding).mean().item())
    with_labels, *_ = loss(label_loss_weight=0.5)
    added = 0.5 * F.cross_entropy(classify(embeddings), labels)
    assert (with_labels - cosine).item() == pytest.approx(added.item(), rel=1e-5)
    of_classes, *_ = loss(loss="kl", temperature=2.0)
    expected = divergence(classify(embeddings), classify_teacher(targets.embedding), 2.0)
    assert of_classes.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_only_model": True}, "save_only_model is True, expected False"),
        ({"logging_steps": 0.5}, "logging_steps is 0.5, expected 1 or more"),
        ({"label_smoothing_factor": 0.1}, "expected 0: that of trainers here is label_smoothing"),
        ({"learning_rate": -1}, r"--learning-rate is -1, expected"),
    ],
)
def test_arguments_that_a_recipe_cannot_follow_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BootstrapArguments(output_dir=str(tmp_path), use_cpu=True, **options)


def test_what_does_not_fit_a_trainer_is_refused(make, held_back):
    with pytest.raises(ValueError, match="--batch-size 64"):
        make(per_device_train_batch_size=64)
    for given, named in ((held_back.to_iterable_dataset(), "IterableDataset"), ({"a": held_back}, "dict")):
        with pytest.raises(ValueError, match=f"{named}; expected (one|a) data set"):
            make(eval_dataset=given)


def test_what_is_saved_before_a_training_does_not_keep_it_from_beginning(make, tmp_path):
    own = make(num_train_epochs=1)
    own.save_metrics("eval", own.evaluate())
    own.save_state()
    own.save_model(tmp_path / "start")
    assert "frugalvit.BootstrapTrainer" in (tmp_path / "start" / "README.md").read_text(encoding="utf-8")
    assert own.train().global_step == 4
    assert {"all_results.json", "eval_results.json", "trainer_state.json"} <= {*os.listdir(tmp_path / "out")}


@pytest.mark.parametrize(("options", "steps"), [({"max_steps": 5}, 5), ({"num_train_epochs": 1.5}, 6)])
def test_a_training_may_end_within_an_epoch(options, steps, make, tmp_path):
    """The schedule ends where the training does. A second call of `train` has nothing left to do."""
    own = make(**options)
    own.train()
    assert own.state.global_step == own.total_steps == steps
    assert max(own.lr_scheduler.get_last_lr()) == pytest.approx(0, abs=1e-6)
    assert make(**options).train().global_step == steps
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [record["step"] for record in results["epochs"]] == [4, steps]
    assert "of 2, chosen and measured" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_a_given_checkpoint_is_gone_back_to(make, tmp_path):
    make(save_steps=1).train()
    before = weights(tmp_path / "out")
    steps = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert steps == ["step-00000007", "step-00000008"]
    own = make(save_steps=1)
    own.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoints" / steps[0]))
    assert own.state.global_step == 8
    assert_equal(weights(tmp_path / "out"), before)
    with pytest.raises(ValueError, match="checkpoint-500 is no checkpoint of a training"):
        make().train(resume_from_checkpoint=str(tmp_path / "checkpoint-500"))


def test_a_dataset_of_pytorch_is_held_back_from(images, teacher, tmp_path):
    bootstrap(str(teacher), Pairs(images), output=tmp_path / "out", **SHORT | {"batch_size": 8})
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (record["images"]["images"], record["images"]["evaluation images"]) == (29, 3)
    assert record["best"]["accuracy"] >= 0


@pytest.mark.parametrize("order", ["names", "numbers", "other", "unknown"])
def test_a_classifier_learns_its_own_labels(order, images, tmp_path):
    """Labels are matched by name, whatever their numbers in the data."""
    names = images.features["label"].names
    own = {"names": names, "numbers": [f"LABEL_{n}" for n in range(10)], "other": names[::-1], "unknown": names[:5]}
    config = SimpleNamespace(id2label=dict(enumerate(own[order])), num_labels=len(own[order]))
    if order == "unknown":
        with pytest.raises(ValueError, match="the model only 5"):
            train.classes_of(config, names)
    else:
        assert train.classes_of(config, names) == (list(range(10))[::-1] if order == "other" else None)
