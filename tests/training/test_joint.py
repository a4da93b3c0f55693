"""A ViT trained beside its agent, on a few embedded images."""

import copy
import json
import shutil

import datasets
import pytest
import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTForImageClassification,
)

from frugalvit import (
    AgentCNNConfig,
    AgentCNNForImageClassification,
    BootstrappedViTForImageClassification,
    HintDecayCallback,
)
from frugalvit.common.data import load_images
from frugalvit.modeling.reference_initialization import reference_init_
from frugalvit.training import joint
from frugalvit.training.components import optimizers


SIZES = "hidden_size=36,num_hidden_layers=2,intermediate_size=48,patch_size=8"


@pytest.fixture
def run(tmp_path):
    """Runs the training on 64 images, batches of 16, and returns what `results.json` holds."""

    def run(name: str = "out", *arguments, **options):
        options = {
            "output_dir": tmp_path / name,
            "vit": f"{SIZES},image_size=32",
            "agent": SIZES,
            "train_split": "train[:64]",
            "eval_split": "test[:50]",
            "epochs": 2,
            "batch_size": 16,
            "logging_steps": 1,
        } | options
        texts = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        assert not joint.main([*texts, *arguments])
        return json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8"))

    return run


@pytest.fixture
def watched(monkeypatch):
    """The weight of the hints in every training step, and the hints."""
    calls, forward = [], BootstrappedViTForImageClassification.forward

    def watch(self, *arguments, **options):
        outputs = forward(self, *arguments, **options)
        if self.training:
            calls.append((self.hint_share.item(), outputs.losses["hints"].detach()))
        return outputs

    monkeypatch.setattr(BootstrappedViTForImageClassification, "forward", watch)
    return calls


@pytest.mark.parametrize("variant", ["joint-small", "shared-small"])
def test_trains_two_that_stand_alone(variant, run, tmp_path):
    results = run(variant=variant, train_split="train[:128]", eval_split="test[:100]", epochs=10, crop_padding=0)
    losses = [record["train_loss"] for record in results["epochs"]]
    assert losses[-1] < 0.5 * losses[0] and results["best"]["accuracy"] > 0.15
    images = load_images("cifar10-subset", "test[:100]").cast_column("image", datasets.Image())
    for name, model_class, accuracy in (
        ("vit", ViTForImageClassification, "accuracy"),
        ("agent", AgentCNNForImageClassification, "agent_accuracy"),
    ):
        folder = tmp_path / "out" / name
        model, processor = (
            auto_class.from_pretrained(folder) for auto_class in (AutoModelForImageClassification, AutoImageProcessor)
        )
        assert type(model) is model_class and model.config.id2label[9] == "truck"
        pixel_values = processor([record["image"] for record in images], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            right = (model(pixel_values).logits.argmax(1) == torch.tensor(images["label"][:])).float().mean()
        assert right.item() == pytest.approx(results["best"][accuracy])
        assert f"{results['best'][accuracy]:.2%}" in (folder / "README.md").read_text(encoding="utf-8")
    pair = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(pair(pixel_values).logits, pair.vit(pixel_values).logits)


def test_hints_fade_linearly_from_step_to_step(run, watched, tmp_path):
    run(epochs=2)
    assert [share for share, _ in watched] == [1 - step / 8 for step in range(8)]
    shutil.rmtree(max((tmp_path / "out" / "checkpoints").iterdir()))
    run(epochs=2)
    assert [share for share, _ in watched[8:]] == [1 - step / 8 for step in range(4, 8)]


@pytest.mark.parametrize("variant", ["joint-small", "shared-small"])
def test_both_start_as_the_reference_has_it(variant):
    def built(**options):
        sizes = {"vit": f"{SIZES},image_size=32", "agent": SIZES}
        return joint.build_twins(joint.TwinArguments(variant=variant, **sizes, **options), ["a", "b"])

    model, default = built(), built(initialization="default")
    for part in ("vit", "twin"):
        [projection] = [
            module for module in getattr(model, part).modules() if getattr(module, "stride", None) == (8, 8)
        ]
        assert projection.weight.std().item() == pytest.approx(1, abs=0.02) and not projection.bias.any()
    block, of_default = model.vit.base_model.layers[0], default.vit.base_model.layers[0]
    for projection, fans in (("q_proj", 4), ("v_proj", 4), ("o_proj", 2)):
        weight = getattr(block.attention, projection).weight
        assert weight.abs().max().item() == pytest.approx((6 / (fans * 36)) ** 0.5, rel=0.02)
    assert block.mlp.fc1.weight.abs().max().item() == pytest.approx((6 / (36 + 48)) ** 0.5, rel=0.02)
    assert 0.6 < block.mlp.fc1.bias.std() < 1.4 and not of_default.mlp.fc1.bias.any()
    assert built(initialization="impulse").vit.base_model.layers[0].mlp.fc1.weight.std() < 0.03
    if variant == "joint-small":
        layer = model.twin.base_model.layers[0]
        assert layer.convolution.weight.abs().max().item() == pytest.approx((6 / (2 * 9 * 36)) ** 0.5, rel=0.02)
        assert not layer.convolution.bias.any() and 0.6 < layer.mlp.fc1.bias.std() < 1.4


@pytest.mark.parametrize("variant", ["joint-small", "shared-small"])
def test_the_start_travels_with_the_configuration(variant, tmp_path):
    """The saved configuration names it. Loaded weights are not drawn again."""
    sizes = {"vit": f"{SIZES},image_size=32", "agent": SIZES}
    model = joint.build_twins(joint.TwinArguments(variant=variant, **sizes), ["a", "b"])
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path, num_labels=3, ignore_mismatched_sizes=True).state_dict()
    assert {name for name, weight in model.state_dict().items() if not torch.equal(weight, other[name])} == {
        f"{part}.classifier.{kind}" for part in ("vit", "twin") for kind in ("weight", "bias")
    }
    # The agent by itself starts as in the pair.
    assert AutoConfig.from_pretrained(tmp_path).agent_config.initialization == "reference"


def test_agents_alone_start_as_the_reference_has_it():
    sizes = {"hidden_size": 36, "num_hidden_layers": 1, "patch_size": 8, "num_labels": 2}
    fresh = AgentCNNForImageClassification(AgentCNNConfig.from_variant("agent-small", **sizes))
    default = AgentCNNForImageClassification(AgentCNNConfig(**sizes))
    assert default.base_model.embeddings.projection.weight.std() < 0.1
    reference_init_(default)
    assert default.config.initialization == "reference"
    for model in (fresh, default):
        embeddings, (layer,) = model.base_model.embeddings, model.base_model.layers
        assert embeddings.projection.weight.std().item() == pytest.approx(1, abs=0.03)
        assert not layer.convolution.bias.any() and 0.6 < layer.mlp.fc1.bias.std() < 1.4
        assert model.classifier.weight.abs().max() <= 1 / 6


def test_trainer_gives_the_recipes_weights(run, monkeypatch, tmp_path):
    """It has the command's batches and its optimizer, and no dropout, whose random numbers differ."""
    batches, forward = [], BootstrappedViTForImageClassification.forward

    def watch(self, pixel_values, labels=None, **options):
        if self.training:
            batches.append((pixel_values.clone(), labels.clone()))
        return forward(self, pixel_values, labels=labels, **options)

    monkeypatch.setattr(BootstrappedViTForImageClassification, "forward", watch)
    run(
        vit=f"{SIZES},image_size=32,hidden_dropout_prob=0,attention_probs_dropout_prob=0",
        agent=f"{SIZES},dropout=0",
        config_overrides="mlp_dropout=0",
        weight_decay=0,
    )
    monkeypatch.undo()
    trained = BootstrappedViTForImageClassification.from_pretrained(tmp_path / "out")
    set_seed(0)
    model = AutoModelForImageClassification.from_config(trained.config, attn_implementation="eager")
    examples = [
        {"pixel_values": image, "labels": label} for batch in batches for image, label in zip(*batch, strict=True)
    ]
    arguments = TrainingArguments(
        str(tmp_path / "trainer"),
        per_device_train_batch_size=16,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )

    def distance(callbacks: list) -> float:
        """Largest distance from the weights of the command's last step."""
        copied = copy.deepcopy(model)
        Trainer(copied, arguments, train_dataset=examples, callbacks=callbacks).train()
        assert copied.hint_share == 1
        weights = load_file(max((tmp_path / "out" / "checkpoints").iterdir()) / "model.safetensors")
        return max((copied.state_dict()[name] - weight).abs().max().item() for name, weight in weights.items())

    assert len(batches) == 8
    assert distance([HintDecayCallback()]) < 1e-5
    assert distance([]) > 1e-4


def test_only_hints_can_decay(tmp_path):
    model = AgentCNNForImageClassification(AgentCNNConfig(hidden_size=8, num_hidden_layers=1, num_labels=2))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
    trainer = Trainer(model, arguments, train_dataset=[{}], callbacks=[HintDecayCallback()])
    with pytest.raises(ValueError, match="AgentCNNFor.* has no hints to decay"):
        trainer.train()


@pytest.mark.parametrize("variant", ["joint-small", "shared-small"])
def test_dropout_is_where_the_reference_has_it(variant):
    """The ViT has it not after the embeddings, but in attention and MLPs and at the end of both; the agent once."""
    sizes = {"vit": f"{SIZES},image_size=32", "agent": SIZES}
    model = joint.build_twins(joint.TwinArguments(variant=variant, **sizes), ["a", "b"]).train()
    embeddings, block = model.vit.base_model.embeddings, model.vit.base_model.layers[0]
    pixel_values, tokens = torch.randn(2, 3, 32, 32), torch.randn(64, 4, 36)
    assert (embeddings(pixel_values) != 0).all()
    inner = []
    block.mlp.fc2.register_forward_pre_hook(lambda module, args: inner.append((args[0] == 0).float().mean().item()))
    block.mlp(tokens)
    assert inner.pop() == pytest.approx(0.1, abs=0.02) and block.attention.attention_dropout == 0.1
    assert block.dropout.p == 0.1
    model.eval()
    block.mlp(tokens)
    # But for what GELU rounds to zero.
    assert inner.pop() < 1e-3
    mlp = model.train().twin.base_model.layers[0].mlp
    assert (mlp.dropout.p, mlp.branch_dropout.p) == (0.1, 0)


def test_an_initialization_of_other_models_is_refused():
    with pytest.raises(ValueError, match="reference initialization of a Linear"):
        reference_init_(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "hinted"),
    [
        ((), [True] * 4),
        (("--without-hint-at", "0.25", "1"), [False, True, True, False]),
        (("--without-hint-at", "0.3"), [True, False, True, True]),
        (("--config-overrides", "hint_weight=0"), [False] * 4),
    ],
)
def test_hints_are_removed_by_depth(arguments, hinted, run, watched):
    deep = SIZES.replace("layers=2", "layers=4")
    run("out", *arguments, epochs=1, vit=f"{deep},image_size=32", agent=deep)
    assert [bool(value) for value in watched[0][1]] == hinted


def test_the_vits_gradient_alone_is_clipped(run, tmp_path, monkeypatch):
    """A step of plain gradient descent tells how long the gradient was."""
    monkeypatch.setattr(
        optimizers, "make_optimizer", lambda name, groups, lr, **_: torch.optim.SGD([{**g, "lr": lr} for g in groups])
    )
    lengths = []
    for norm in (0, 1e-3):
        name, states = f"clipped-{norm}", []
        for steps in (1, 2):
            run(
                f"{name}-{steps}",
                max_grad_norm=norm,
                epochs=1,
                steps_per_epoch=steps,
                learning_rate=1.0,
                weight_decay=0,
                lr_scheduler="constant",
            )
            folder = max((tmp_path / f"{name}-{steps}" / "checkpoints").iterdir())
            states.append(load_file(folder / "model.safetensors"))
        moved = {
            part: sum(
                (states[1][key] - states[0][key]).square().sum()
                for key in states[0]
                if key.startswith(part) and "running" not in key and "batches" not in key
            )
            ** 0.5
            for part in ("vit.", "twin.")
        }
        lengths.append(moved)
    assert lengths[1]["vit."] == pytest.approx(1e-3, rel=1e-3) and lengths[0]["vit."] > 0.1
    assert lengths[1]["twin."] > 0.1


def test_images_and_clipping_are_the_references(run, monkeypatch):
    """CIFAR's images are padded with black, ImageNet's cropped to at least 60 percent. Each pair has a norm to clip
    to."""
    views, view = [], joint.SmallDataView
    monkeypatch.setattr(joint, "SmallDataView", lambda *a, **options: views.append(view(*a, **options)) or views[-1])
    base = run("base", epochs=1, variant="joint-base-res", agent=f"{SIZES},downsample_after=[]")
    large = f"{SIZES},image_size=64".replace("patch_size=8", "patch_size=16")
    small = run("small", epochs=1, crop="resized", vit=large)
    assert (views[0].padding, views[0].padding_mode, views[0].part) == (4, "constant", None)
    assert views[1].crop_size == (32, 32)
    assert tuple(views[1].part.scale) == (0.6, 1)
    assert [results["arguments"]["max_grad_norm"] for results in (base, small)] == [2, 0]


def test_goes_on_where_it_stopped(run, tmp_path):
    """It does with sharpness-aware steps, whose state is the optimizer's own."""
    options = {"optimizer": "sam", "epochs": 2}
    whole = run("whole", **options)
    assert run("plain", epochs=2)["epochs"] != whole["epochs"]
    run("out", **options)
    folder = tmp_path / "out"
    shutil.rmtree(max((folder / "checkpoints").iterdir()))
    (folder / "results.json").unlink()
    again = run("out", **options)
    for ours, theirs in zip(again["epochs"], whole["epochs"], strict=True):
        assert {k: v for k, v in ours.items() if k != "images_per_second"} == {
            k: v for k, v in theirs.items() if k != "images_per_second"
        }
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_sharpness_aware_steps_look_as_far_as_they_are_told(run, monkeypatch):
    made, make = [], optimizers.make_optimizer
    monkeypatch.setattr(
        optimizers, "make_optimizer", lambda *a, **options: made.append(make(*a, **options)) or made[-1]
    )
    run(optimizer="sam", sam_rho=0.2, epochs=1, steps_per_epoch=1)
    assert {group["rho"] for group in made[0].param_groups} == {0.2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sam", "gradient_accumulation_steps": 2}, "needs --gradient-accumulation-steps 1"),
        ({"agent": SIZES.replace("36", "40")}, "`hidden_size`=36, `agent_config` `hidden_size`=40"),
    ],
)
def test_what_does_not_fit(options, message, run):
    with pytest.raises(Exception, match=message):
        run(**options)
