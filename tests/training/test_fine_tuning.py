"""Pretrained models of Transformers and timm on other classes, by the recipe for image classifiers."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models._hub import save_for_hf
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BeitConfig,
    BeitForImageClassification,
    BitImageProcessor,
    ConvNextImageProcessor,
    Dinov2Config,
    Dinov2Model,
    LevitConfig,
    LevitForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTImageProcessor,
)

from frugalvit import cli, remove_context_broadcast
from frugalvit.common.data import load_images
from frugalvit.common.loading import load_vision_model
from frugalvit.modeling.context_broadcast import has_context_broadcast
from frugalvit.training import bootstrap
from frugalvit.training.trainer import ImageTrainer
from tiny import save_vit


SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
IMAGES = {"input_size": (3, 32, 32), "crop_pct": 1.0}
STILL = {"learning_rate": 1e-9, "epochs": 1, "config_overrides": None}
ViT = Callable[..., Path]


@pytest.fixture
def timm_vit(tmp_path) -> ViT:
    """Saves a small ViT as timm does."""

    def save(name="timm", architecture="vit_tiny_patch16_224", labels=None, **options) -> Path:
        torch.manual_seed(0)
        options = SIZES | {"num_classes": 5} | options
        labels = {"label_names": labels} if labels else {}
        model = timm.create_model(architecture, **options)
        save_for_hf(model, tmp_path / name, labels, model_args=options, data_config=IMAGES, safe_serialization=True)
        return tmp_path / name

    return save


@pytest.fixture
def transformers_vit(tmp_path) -> ViT:
    def save(name="transformers", **options) -> Path:
        return save_vit(tmp_path / name, **{"num_hidden_layers": 3, "num_labels": 5} | options)

    return save


@pytest.fixture(params=["timm_vit", "transformers_vit"])
def vit(request) -> ViT:
    return request.getfixturevalue(request.param)


def test_a_folder_of_timm_from_training_to_its_uses(timm_vit, tiny_run, tmp_path, class_names, capsys):
    """It learns, and the saved model is for `predict`, `evaluate`, `bootstrap`, Auto classes and timm."""
    names = ["ant", "bee", "cow", "dog", "emu"]
    plain = {"mixup": 0, "randaugment_layers": 0, "label_smoothing": 0, "flip": 0, "crop_padding": 0}
    folder = timm_vit(labels=names)
    results = tiny_run(model=folder, config_overrides=None, epochs=10, learning_rate=5e-3, **plain)
    losses = [record["train_loss"] for record in results["epochs"]]
    assert losses[-1] < losses[0] - 0.4
    out = tmp_path / "out"

    model = AutoModelForImageClassification.from_pretrained(out)
    assert model.config.id2label == dict(enumerate(class_names)) and model.config.label2id["truck"] == 9
    images = load_images("cifar10-subset", "test[:50]").cast_column("image", datasets.Image())
    processor = AutoImageProcessor.from_pretrained(out)
    pixel_values = processor(images["image"][:], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        logits = model(pixel_values).logits
    right = (logits.argmax(1) == torch.tensor(images["label"][:])).float().mean().item()
    assert right == pytest.approx(results["best"]["accuracy"])
    assert "A vit_tiny_patch16_224 classifier" in (out / "README.md").read_text(encoding="utf-8")
    there = timm.create_model("vit_tiny_patch16_224", **SIZES, num_classes=10).eval()
    there.load_state_dict(load_file(out / "model.safetensors"))
    with torch.inference_mode():
        torch.testing.assert_close(there(pixel_values), logits)

    images["image"][0].save(tmp_path / "image.png")
    capsys.readouterr()
    assert cli.main(["predict", "--model", str(out), "--top", "1", str(tmp_path / "image.png")]) == 0
    assert class_names[logits[0].argmax()] in capsys.readouterr().out
    data = ["--dataset", "cifar10-subset", "--split", "test[:50]"]
    measured = ["--output", str(tmp_path / "measured.json")]
    assert cli.main(["evaluate", "classification", "--model", str(out), *data, *measured]) == 0
    assert json.loads((tmp_path / "measured.json").read_text(encoding="utf-8"))["accuracy"] == pytest.approx(right)
    teacher = ["--teacher", str(out), "--train-split", "train[:16]", "--eval-split", "test[:8]", "--batch-size", "8"]
    options = ["--epochs", "1", "--num-latent-tokens", "4", "--warmup-epochs", "0", "--no-compare"]
    assert bootstrap.main([*teacher, *options, "--output", str(tmp_path / "student")]) == 0
    student = AutoModelForImageClassification.from_pretrained(tmp_path / "student")
    assert student.config.id2label == model.config.id2label


@pytest.mark.parametrize(
    "options",
    [
        {"num_classes": 0},
        {"global_pool": "avg", "class_token": False},
        {"architecture": "vit_base_patch16_siglip_224", "num_classes": 0},
        {"architecture": "deit_tiny_distilled_patch16_224"},
        {"architecture": "vit_small_patch16_dinov3", "num_classes": 0},
    ],
    ids=["headless", "mean", "siglip", "distilled", "dinov3"],
)
def test_every_weight_of_the_backbone_is_kept(options, timm_vit, tiny_trainer, tmp_path, class_names):
    folder = timm_vit(**options)
    tiny_trainer(model=folder, **STILL).model.save_pretrained(tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert {name for name in before.keys() ^ after.keys() if not name.startswith("head")} == set()
    for name, tensor in before.items():
        if not name.startswith("head"):
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert [*model.config.id2label.values()] == class_names
    assert model(torch.zeros(2, 3, 32, 32)).logits.shape == (2, 10)


@pytest.mark.parametrize("broadcast", [None, "cb", "blend"])
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_thousand_classes_become_ten(
    library, broadcast, request, tiny_run, tiny_trainer, tmp_path, class_names, caplog
):
    """They do with Context Broadcasting, too, which is saved with the model. Blended, training starts from the model
    as it was. The folder is for the next command."""
    size = {"num_classes": 1000} if library == "timm" else {"num_labels": 1000}
    folder = request.getfixturevalue(f"{library}_vit")(**size)
    arguments = ["--context-broadcast-blend"] if broadcast == "blend" else []
    options = {"context_broadcast": "cb"} if broadcast else {}
    results = tiny_run(*arguments, model=folder, **options, **STILL)
    assert ("changes what" in caplog.text) is (broadcast == "cb")
    before = load_vision_model(folder, "cpu")[0]
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    after, backbone = model.state_dict(), {}
    for name, tensor in before.state_dict().items():
        if "head" not in name and "classifier" not in name:
            backbone[name] = tensor
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)
    assert len(backbone) > 30 and before.config.num_labels == 1000
    assert [*model.config.id2label.values()] == class_names
    assert has_context_broadcast(model) is bool(broadcast)
    pixel_values = torch.randn(2, 3, 32, 32)
    logits = model(pixel_values).logits
    assert logits.shape == (2, 10)
    if broadcast:
        remove_context_broadcast(model)
        assert torch.allclose(model(pixel_values).logits, logits, atol=1e-5) is (broadcast == "blend")

    again = tiny_trainer("--trust-remote-code", name="again", model=tmp_path / "out", **STILL)
    assert again.evaluate()["eval_accuracy"] == pytest.approx(results["best"]["accuracy"])


@pytest.mark.parametrize("image_size", [None, 48])
def test_a_backbone_of_dinov2_gets_a_classifier(image_size, tiny_run, tmp_path, class_names):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}
    Dinov2Model(Dinov2Config(**sizes, image_size=56)).half().save_pretrained(tmp_path / "dino")
    BitImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}).save_pretrained(
        tmp_path / "dino"
    )
    tiny_run(model=tmp_path / "dino", image_size=image_size, **STILL)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "Dinov2ForImageClassification" and model.dtype == torch.float32
    assert [*model.config.id2label.values()] == class_names
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    pixels = image_size or 32
    assert dict(processor.crop_size) == {"height": pixels, "width": pixels}
    # The crop shows as much of an image as it did.
    assert processor.size["shortest_edge"] == 5 * pixels // 4
    positions = model.dinov2.embeddings.position_embeddings
    assert positions.shape[1] == 1 + ((image_size or 56) // 8) ** 2


@pytest.mark.parametrize("kind", ["vit_impulse_init", "convmixer"])
def test_another_size_stays_when_a_model_is_saved_again(kind, tiny_run, tmp_path):
    """In the image processor that training writes and in the configuration that a later folder gets its own from."""
    sizes = {"image_size": 32, "resize_size": 40, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2}
    model = AutoModelForImageClassification.from_config(AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(tmp_path / "model")
    tiny_run(model=tmp_path / "model", image_size=48, **STILL)
    AutoModelForImageClassification.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    processors = [AutoImageProcessor.from_pretrained(tmp_path / name) for name in ("out", "again")]
    assert {dict(processor.size)["shortest_edge"] for processor in processors} == {60}
    assert processors[0].to_dict() == processors[1].to_dict()


def test_models_without_positions_take_another_size(tiny_run, tmp_path):
    """Convolutions and relative positions take any, some attention none but its own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    stages = {"hidden_sizes": [8, 16, 16], "num_attention_heads": [2, 2, 2], "key_dim": [8, 8, 8]}
    models = {
        "resnet": ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
        "beit": BeitForImageClassification(BeitConfig(**sizes, use_relative_position_bias=True)),
        "levit": LevitForImageClassification(LevitConfig(image_size=64, depths=[1, 1, 1], **stages)),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path / name)
    ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path / "resnet")
    for name in ("resnet", "beit"):
        tiny_run(model=tmp_path / name, image_size=48, name=f"{name} trained", **STILL)
        processor = AutoImageProcessor.from_pretrained(tmp_path / f"{name} trained")
        model = AutoModelForImageClassification.from_pretrained(tmp_path / f"{name} trained")
        inputs = processor(Image.new("RGB", (60, 50)), return_tensors="pt")
        assert inputs["pixel_values"].shape[2:] == (48, 48) and model(**inputs).logits.shape == (1, 10)
    with pytest.raises(ValueError, match="--image-size 48: a LevitFor.* does not take images of that size"):
        tiny_run(model=tmp_path / "levit", image_size=48, **STILL)


def test_a_model_of_timm_at_another_size(timm_vit, tiny_run, tmp_path):
    folder = timm_vit()
    tiny_run(model=folder, image_size=48, **STILL)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    image = datasets.Image().decode_example(load_images("cifar10-subset", "test[:1]")[0]["image"])
    pixel_values = processor(image, return_tensors="pt")["pixel_values"]
    assert pixel_values.shape == (1, 3, 48, 48) and model(pixel_values).logits.shape == (1, 10)
    expected = timm.create_model("vit_tiny_patch16_224", **SIZES, num_classes=5)
    expected.load_state_dict(load_file(folder / "model.safetensors"))
    expected.set_input_size(img_size=(48, 48))
    torch.testing.assert_close(model.timm_model.pos_embed, expected.pos_embed, rtol=0, atol=1e-6)


def by_part(names_and_rates: list[tuple[str, float]]) -> dict[str, set[float]]:
    """Learning rates of the embeddings, of each block, of the last norm and of the classifier."""
    parts = {}
    for name, rate in names_and_rates:
        number = re.search(r"\.(?:layers|blocks)\.(\d+)\.", name)
        if number:
            part = f"block {number[1]}"
        elif re.search(r"classifier|\.head\.", name):
            part = "classifier"
        else:
            part = "norm" if re.search(r"\.(layer)?norm\.", name) else "embeddings"
        parts.setdefault(part, set()).add(round(rate, 9))
    return parts


def test_factors_of_learning_rates_end_in_the_optimizer(vit, tiny_trainer):
    """The same for equal models of both libraries."""
    options = {"config_overrides": None, "learning_rate": 1e-3, "layer_decay": 0.5, "head_multiplier": 4}
    own = tiny_trainer(model=vit(), **options)
    model, (optimizer, _) = own.model, own.make_optimizer()
    rates = {parameter: group["initial_lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert by_part([(name, rates[parameter]) for name, parameter in model.named_parameters()]) == {
        "embeddings": {1.25e-4},
        "block 0": {2.5e-4},
        "block 1": {5e-4},
        "block 2": {1e-3},
        "norm": {1e-3},
        "classifier": {4e-3},
    }


@pytest.mark.parametrize("distill", [False, True], ids=["labels", "distilled"])
def test_trains_on_smaller_images_and_evaluates_on_whole_ones(vit, distill, tiny_run, tmp_path, monkeypatch):
    folder, seen = vit(), {True: set(), False: set()}
    forward = nn.Conv2d.forward

    def note(module, images):
        seen[torch.is_grad_enabled()].add(tuple(images.shape[1:]))
        return forward(module, images)

    create_optimizer = ImageTrainer.create_optimizer

    def watch(self, model=None):
        monkeypatch.setattr(nn.Conv2d, "forward", note)
        return create_optimizer(self, model)

    monkeypatch.setattr(ImageTrainer, "create_optimizer", watch)
    options = {}
    if distill:
        tiny_run(name="teacher", model=folder, **STILL)
        monkeypatch.undo()
        monkeypatch.setattr(ImageTrainer, "create_optimizer", watch)
        seen[False].clear(), seen[True].clear()
        options["distill_from"] = tmp_path / "teacher"
    results = tiny_run(model=folder, config_overrides=None, epochs=1, train_image_size=16, **options)
    assert seen == {True: {(3, 16, 16)}, False: {(3, 32, 32)}}
    monkeypatch.undo()
    # The model is for its own size, as it was.
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert "dynamic_img_size" not in config.get("model_args", {})
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    images = load_images("cifar10-subset", "test[:50]").cast_column("image", datasets.Image())
    pixel_values = processor(images["image"][:], return_tensors="pt")["pixel_values"]
    assert pixel_values.shape[2:] == (32, 32)
    with torch.inference_mode():
        right = (model(pixel_values).logits.argmax(1) == torch.tensor(images["label"][:])).float().mean().item()
    assert right == pytest.approx(results["best"]["accuracy"])


@pytest.mark.parametrize("library", ["timm", "transformers"])
@pytest.mark.parametrize("blocks", [2, 4], ids=["more", "fewer"])
def test_a_backbone_that_is_not_whole_is_refused(library, blocks, request, tiny_run):
    folder = request.getfixturevalue(f"{library}_vit")()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if library == "timm":
        config["model_args"]["depth"] = blocks
    else:
        config["num_hidden_layers"] = blocks
        # The backbone alone, whose names have no prefix.
        weights = load_file(folder / "model.safetensors")
        weights = {name.removeprefix("vit."): tensor for name, tensor in weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="does not fit a .*ForImageClassification: .* 1[26] in all, are missing"):
        tiny_run(model=folder, config_overrides=None)


@pytest.mark.parametrize(
    ("library", "saved", "options", "message"),
    [
        ("timm", {}, {"image_size": 30}, "Images of 30 pixels do not divide into patches of .8, 8."),
        ("transformers", {}, {"train_image_size": 4}, "--train-image-size 4: a ViTFor.* does not take images of that"),
        ("timm", {"class_token": False, "global_pool": "", "num_classes": 0}, {}, "neither pools its tokens nor has"),
    ],
)
def test_what_cannot_be_is_refused(library, saved, options, message, request, tiny_run):
    folder = request.getfixturevalue(f"{library}_vit")(**saved)
    with pytest.raises(ValueError, match=message):
        tiny_run(model=folder, config_overrides=None, **options)


def test_timm_is_told_what_its_architecture_does_not_take(tmp_path, tiny_run):
    model = timm.create_model("resnet10t", num_classes=5)
    save_for_hf(model, tmp_path / "resnet", data_config=IMAGES, safe_serialization=True)
    with pytest.raises(ValueError, match="timm does not make a resnet10t with .*'dynamic_img_size': True"):
        tiny_run(model=tmp_path / "resnet", config_overrides=None, train_image_size=16)
    tiny_run(model=tmp_path / "resnet", **STILL | {"drop_path": 0.5})


def test_blocks_of_timm_are_left_out_in_training(timm_vit, tiny_trainer):
    model = tiny_trainer(model=timm_vit(), drop_path=0.3, **STILL).model
    assert model.timm_model.blocks[2].drop_path1.drop_prob == pytest.approx(0.3)


def test_training_goes_on_from_a_revision(cached, tiny_run, tmp_path):
    tiny_run(model="someone/model@v1", config_overrides=None, epochs=1)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "base_model: someone/model\n" in card and "--model someone/model@v1" in card
    assert (torch.tensor(ViTImageProcessor.from_pretrained(tmp_path / "out").image_mean) - 0.2).abs().max() < 1e-6
