"""Test joint training of a ViT and its agent CNN."""

import functools

import datasets
import pytest
import torch
from huggingface_hub import ModelCard
from trainings import logged, run_command
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTForImageClassification

from frugalvit import AgentCNNForImageClassification, BootstrappedViTForImageClassification
from frugalvit.training import joint
from frugalvit.training.cards import share_error
from frugalvit.training.data import load_images
from runs import check_resumes, error_of
from runs import make as make_trainer


SIZES = "hidden_size=36,num_hidden_layers=2,intermediate_size=48,patch_size=8"
SMALL = {"vit": f"{SIZES},image_size=32", "agent": SIZES}
make = functools.partial(make_trainer, "joint", **SMALL)
VARIANTS = pytest.mark.parametrize("variant", ["joint-small", "shared-small"])


def run(output_dir, **options):
    return run_command("joint", output_dir, **SMALL | options)


def twins(variant="joint-small", **options):
    return joint.build_twins(joint.TwinArguments(variant=variant, **SMALL, **options), ["a", "b"])


@pytest.fixture
def recorded_hints(monkeypatch):
    """Record the hint loss and its weight in each forward pass of training and of evaluation."""
    calls, forward = {True: [], False: []}, BootstrappedViTForImageClassification.forward

    @functools.wraps(forward)
    def record(self, *arguments, **options):
        outputs = forward(self, *arguments, **options)
        if outputs.losses is not None:
            share = options.get("hint_share", self.hint_share)
            calls[self.training].append((float(share), outputs.losses["hints"].detach()))
        return outputs

    monkeypatch.setattr(BootstrappedViTForImageClassification, "forward", record)
    return calls


@VARIANTS
def test_both_models_learn_and_load_alone(variant, tmp_path):
    options = {"train_split": "train[:128]", "num_train_epochs": 5, "crop_padding": 0, "learning_rate": 2e-3}
    own, out = run(tmp_path / "out", variant=variant, **options), tmp_path / "out"
    losses = logged(own, "loss")
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert own.metrics["accuracy"] == max(logged(own, "eval_accuracy"))
    images = load_images("cifar10-subset", "test[:32]").cast_column("image", datasets.Image())
    for name, model_class, accuracy in (
        ("vit", ViTForImageClassification, own.metrics["accuracy"]),
        ("agent", AgentCNNForImageClassification, own.metrics["agent_accuracy"]),
    ):
        model = AutoModelForImageClassification.from_pretrained(out / name)
        assert type(model) is model_class and model.config.id2label[9] == "truck"
        pixels = AutoImageProcessor.from_pretrained(out / name)(images["image"][:], return_tensors="pt")
        with torch.inference_mode():
            right = (model(**pixels).logits.argmax(1) == torch.tensor(images["label"][:])).float().mean()
        assert right.item() == pytest.approx(accuracy)
        card = ModelCard.load(out / name / "README.md")
        assert card.data.eval_results[0].metric_value == round(accuracy, 4)
        assert f"The {name} of two models. A ViT and its agent CNN, trained together on" in card.text
        assert f"{model.num_parameters():,} parameters" in card.text
    pair = AutoModelForImageClassification.from_pretrained(out)
    assert torch.equal(pair(**pixels).logits, pair.vit(**pixels).logits)
    errors = [share_error(own.metrics[name], 32) for name in ("accuracy", "agent_accuracy")]
    accuracies = f"accuracy {own.metrics['accuracy']:.2%} ± {errors[0]:.2%} and {accuracy:.2%} ± {errors[1]:.2%}"
    assert accuracies in (out / "README.md").read_text("utf-8")


def test_a_stopped_run_continues(recorded_hints, tmp_path):
    """The weight of the hint loss decays linearly to 0. A continued run continues this decay."""
    check_resumes("joint", tmp_path, 5, **SMALL)
    shares = [share for share, _ in recorded_hints[True]]
    assert shares[:8] == [1 - step / 8 for step in range(8)] and shares[-2:] == shares[6:8]
    assert {share for share, _ in recorded_hints[False]} == {0.0}


def test_the_vits_gradient_alone_is_clipped(tmp_path):
    """With SGD at a learning rate of 1, weights change by their gradient. Only the ViT's gradient is clipped."""
    lengths = {}
    for norm in (0, 1e-3):
        options = {"learning_rate": 1.0, "weight_decay": 0, "lr_scheduler_type": "constant", "optim": "sgd"}
        own = make(tmp_path / f"{norm}", vit_max_grad_norm=norm, max_steps=1, eval_split="none", **options)
        before = {name: weight.clone() for name, weight in own.model.named_parameters()}
        own.train()
        moved = {name: (weight - before[name]).norm() for name, weight in own.model.named_parameters()}
        for part in ("vit.", "twin."):
            lengths[norm, part] = torch.stack([moved[name] for name in moved if name.startswith(part)]).norm().item()
    assert lengths[1e-3, "vit."] == pytest.approx(1e-3, rel=1e-3) and lengths[0, "vit."] > 0.1
    assert lengths[1e-3, "twin."] == pytest.approx(lengths[0, "twin."]) and lengths[0, "twin."] > 0.1


@VARIANTS
def test_both_start_as_the_reference_has_it(variant):
    model, default = twins(variant), twins(variant, initialization="default")
    for part in ("vit", "twin"):
        modules = getattr(model, part).modules()
        [projection] = [module for module in modules if getattr(module, "stride", None) == (8, 8)]
        assert projection.weight.std().item() == pytest.approx(1, abs=0.02) and not projection.bias.any()
    block, of_default = model.vit.base_model.layers[0], default.vit.base_model.layers[0]
    bounds = {block.attention.q_proj: 4 * 36, block.attention.v_proj: 4 * 36, block.attention.o_proj: 2 * 36}
    bounds[block.mlp.fc1] = 36 + 48
    if variant == "joint-small":
        layer = model.twin.base_model.layers[0]
        bounds[layer.convolution] = 2 * 9 * 36
        assert not layer.convolution.bias.any() and 0.6 < layer.mlp.fc1.bias.std() < 1.4
    for module, fans in bounds.items():
        assert module.weight.abs().max().item() == pytest.approx((6 / fans) ** 0.5, rel=0.02)
    assert 0.6 < block.mlp.fc1.bias.std() < 1.4 and not of_default.mlp.fc1.bias.any()
    impulse = twins(variant, initialization="impulse").vit.base_model.layers[0]
    assert impulse.mlp.fc1.weight.std() < 0.03


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1, expected 0"),
        ({"vit": "deep"}, "vit is 'deep', expected name=value pairs"),
    ],
)
def test_wrong_calls_are_one_line(options, message, tmp_path, capsys):
    assert message in error_of("joint", tmp_path / "out", capsys, **SMALL | options)
