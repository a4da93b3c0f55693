"""Trainings of image classifiers, from its command line to a folder that loads."""

import runpy
import sys

import datasets
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTImageProcessor,
)

from frugalvit.attention import measure_attention
from frugalvit.common.data import load_images
from frugalvit.common.labels import class_names
from frugalvit.training import joint, train
from frugalvit.training.components import classifiers
from frugalvit.training.components.arguments import read_recipe, recipes_of
from frugalvit.training.components.models import parse_overrides


VIT = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SPARSE = (
    "image_size=32,num_latent_tokens=4,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,"
    "focusing_hidden_size=32,focusing_num_attention_heads=2,stem_channels=8,num_sampling_points=4,resize_size=null"
)
SWIN = "image_size=32,patch_size=4,embed_dim=16,depths=[1,1],num_heads=[1,2],window_size=4"
# A recipe for each architecture, and what makes it small.
RECIPES = {
    **dict.fromkeys(
        ("context-broadcast-base", "context-broadcast-small", "impulse-tiny", "impulse-cifar10"),
        "image_size=32,patch_size=8,num_hidden_layers=1,resize_size=null",
    ),
    "context-broadcast-swin-tiny": "image_size=32,embed_dim=24,depths=[1,1],num_heads=[1,2],window_size=4",
    "alone-small": "image_size=32,patch_size=8,num_hidden_layers=1",
    "agent-small-res": "image_size=32,num_hidden_layers=1,downsample_after=[0]",
    "convmixer": "patch_size=8,num_hidden_layers=1",
    "sparseformer-v1-tiny": "image_size=32,num_latent_tokens=9,focusing_hidden_size=64,hidden_size=128,"
    "num_hidden_layers=1,resize_size=null",
}


def epochs(results):
    return [{k: v for k, v in record.items() if k != "images_per_second"} for record in results["epochs"]]


def test_learns_and_saves_a_complete_model(tiny_run, tmp_path):
    plain = {"mixup": 0, "randaugment_layers": 0, "label_smoothing": 0}
    results = tiny_run(
        *("--image-mean", "0.4", "0.5", "0.6"), train_split="train[:256]", epochs=12, learning_rate=3e-3, **plain
    )
    losses = [record["train_loss"] for record in results["epochs"]]
    assert losses[-1] < losses[0] - 0.2 and losses[0] < 2.5
    assert results["best"]["accuracy"] == max(record["accuracy"] for record in results["epochs"]) > 0.15
    assert results["command"].startswith("frugalvit train --output") and "torch" in results["versions"]
    assert results["machine"]["threads"] >= 1

    names = class_names(load_images("cifar10-subset"))
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == dict(enumerate(names)) and model.config.label2id["truck"] == 9
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert list(processor.image_mean) == [0.4, 0.5, 0.6] and dict(processor.size) == {"height": 32, "width": 32}

    # What was measured is what a user measures.
    images = load_images("cifar10-subset", "test[:50]").cast_column("image", datasets.Image())
    pixel_values = processor([record["image"] for record in images], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        right = (model(pixel_values).logits.argmax(1) == torch.tensor(images["label"][:])).float().mean()
    assert right.item() == pytest.approx(results["best"]["accuracy"])
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"{results['best']['accuracy']:.2%}" in card and "frugalvit train --output" in card
    # No place on this machine is in it.
    assert str(tmp_path) not in card


def test_attends_eagerly_on_cpus_unless_told(tiny_run, fused_calls, tmp_path):
    tiny_run(name="default", model_type="vit")
    assert not fused_calls
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "default").config._attn_implementation == "sdpa"
    tiny_run(name="told", model_type="vit", attn_implementation="sdpa")
    assert fused_calls


def test_accumulating_gradients_changes_nothing(tiny_run):
    whole = tiny_run(name="whole")
    parts = tiny_run(name="parts", gradient_accumulation_steps=4)
    for ours, theirs in zip(epochs(parts), epochs(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


def test_initializes_attention_as_told(tiny_trainer):
    small = VIT | {"patch_size": 4, "hidden_size": 64, "position_embedding": "learned"}
    impulse = ",".join(f"{name}={value}" for name, value in small.items())
    masses = []
    for mass in (0.3, 0.9):
        options = {"initialization": "impulse", "initialization_options": f"mass={mass},value_init=mimetic"}
        model = tiny_trainer(model_type="vit_impulse_init", config_overrides=impulse, **options).model
        with torch.no_grad():
            model.vit.embeddings.patch_embeddings.projection.weight.zero_()  # positions alone
        masses.append(max(measure_attention(model, [torch.zeros(1, 3, 32, 32)])[0].mass))
    assert masses[0] < 0.4 < 0.6 < masses[1]


@pytest.mark.parametrize("name", ["impulse", "mimetic"])
def test_a_start_leaves_alone_what_it_is_told_to(name):
    """Also in the family that would start so by itself; and random positions stay what the configuration says."""
    overrides = ",".join(f"{field}={value}" for field, value in (VIT | {"position_embedding": "random"}).items())
    arguments = classifiers.ModelArguments(
        model_type="vit_impulse_init",
        config_overrides=f"{overrides},position_std=3",
        initialization=name,
        initialization_options="value_init=default",
    )
    model, _ = classifiers.build_model(arguments, classifiers.LearningArguments(), ["ant", "bee"])
    attention = model.vit.layers[0].attention
    assert attention.v_proj.weight.std() < 0.03
    assert model.vit.embeddings.position_embeddings.std() > 2


IMPULSE = "solver=adam_bounded,steps=3,renormalize_every=2,kernel_size=5,value_init=default,pseudo_input=uniform"
STARTS = {
    "impulse": [IMPULSE, "mass=null,per_layer=false"],
    "mimetic": ["value_init=default"],
    "trunc_normal": ["std=0.05,value_init=mimetic"],
    "kaiming_uniform": [""],
    "default": [""],
}


@pytest.mark.parametrize(
    ("model_type", "initialization", "options"),
    [
        *(
            (model_type, name, each)
            for model_type in ("vit_impulse_init", "vit_context_broadcast", "bootstrapped_vit")
            for name, options in STARTS.items()
            for each in options
        ),
        ("bootstrapped_vit", "reference", ""),
        ("agent_cnn", "reference", ""),
        ("convmixer", "default", ""),
    ],
)
def test_a_published_configuration_draws_the_start_again(model_type, initialization, options, tmp_path):
    """A saved configuration says how the run began, for every initialization and training."""
    start = {"initialization": initialization, "initialization_options": options}
    if model_type == "bootstrapped_vit":
        sizes = "patch_size=8,hidden_size=16,num_hidden_layers=2,intermediate_size=32"
        twins = joint.TwinArguments(vit=f"image_size=32,num_attention_heads=2,{sizes}", agent=sizes, **start)
        model = joint.build_twins(twins, ["ant", "bee"], seed=3)
    else:
        sizes = {"convmixer": "hidden_size=16,num_hidden_layers=2", "agent_cnn": "image_size=32,patch_size=8"}
        heads = "image_size=32,patch_size=8,hidden_size=16,num_hidden_layers=2,num_attention_heads=2"
        arguments = classifiers.ModelArguments(
            model_type=model_type, config_overrides=sizes.get(model_type, heads), **start
        )
        model, _ = classifiers.build_model(arguments, classifiers.LearningArguments(), ["ant", "bee"], seed=3)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # training
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    config = AutoConfig.from_pretrained(tmp_path)
    named = "impulse" if (model_type, initialization) == ("vit_impulse_init", "default") else initialization
    assert config.initialization_seed == 3 and getattr(config, "initialization", named) == named
    drawn = AutoModelForImageClassification.from_config(config).state_dict()
    assert all(torch.equal(drawn[name], weight) for name, weight in expected.items())
    config.initialization_seed = 4
    other = AutoModelForImageClassification.from_config(config).state_dict()
    assert not all(torch.equal(other[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(("pixels", "size", "patch"), [(28, 32, 2), (90, 96, 6), (250, 224, 16)])
@pytest.mark.parametrize("initialization", ["default", "impulse"])
def test_a_model_that_fits_the_images(pixels, size, patch, initialization, write_parquet):
    """It is chosen if none is named."""
    images = load_images(write_parquet(size=pixels, count=4, corrupt=[1]))
    arguments = classifiers.ModelArguments(initialization=initialization)
    variant = train.choose_variant(arguments, train.typical_pixels(images))
    assert variant == ("vit-tiny-h3-224" if pixels == 250 else "vit-tiny-h3-32")
    assert arguments.model_type == {"default": "vit", "impulse": "vit_impulse_init"}[initialization]
    fields = parse_overrides(arguments.model_type, arguments.config_overrides)
    assert (fields["image_size"], fields["patch_size"], fields["hidden_size"]) == (size, patch, 192)
    assert fields.get("resize_size", 256) == (None if initialization == "impulse" and pixels < 250 else 256)


def test_trains_the_model_that_it_chose(tiny_run, write_parquet, tmp_path):
    files = {"dataset": write_parquet(), "eval_dataset": write_parquet("two.parquet", 2), "train_split": "train"}
    options = {"config_overrides": None, "eval_split": "train", "batch_size": 2, "optimizer": "muon"}
    tiny_run("--steps-per-epoch", "1", epochs=1, warmup_epochs=0, randaugment_layers=0, **files, **options)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.model_type, config.image_size, config.hidden_size, config.num_labels) == ("vit", 32, 192, 2)


def test_learns_from_a_teacher(tiny_run, tmp_path):
    teacher = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=10)
    )
    teacher.save_pretrained(tmp_path / "teacher")
    ViTImageProcessor(size={"height": 40, "width": 40}, image_std=[0.25] * 3).save_pretrained(tmp_path / "teacher")
    alone = tiny_run(name="alone")
    taught = tiny_run(name="taught", distill_from=tmp_path / "teacher", distill_weight=0.5, distill_temperature=2)
    assert taught["epochs"][0]["train_loss"] < alone["epochs"][0]["train_loss"] - 0.5  # an untrained teacher is unsure
    none = tiny_run(name="none", distill_from=tmp_path / "teacher", distill_weight=0)
    assert epochs(none) == epochs(alone)
    ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])).save_pretrained(
        tmp_path / "teacher"
    )
    with pytest.raises(ValueError, match="has 2 classes, the data set 10"):
        tiny_run(name="refused", distill_from=tmp_path / "teacher")


CONTEXT_BROADCAST = (
    "image_size=32,patch_size=8,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,resize_size=null,"
    "use_distillation_token=true"
)


@pytest.fixture
def sure_teacher(tmp_path):
    """A classifier that takes every image for a ship."""
    teacher = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=10)
    )
    with torch.no_grad():
        teacher.classifier[-1].weight.zero_()
        teacher.classifier[-1].bias.zero_()[8] = 5
    teacher.save_pretrained(tmp_path / "sure")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "sure")
    return tmp_path / "sure"


@pytest.mark.parametrize("distill_kind", ["hard", "soft"])
def test_a_distillation_token_learns_from_the_teacher(tiny_run, tmp_path, sure_teacher, distill_kind):
    options = {"model_type": "vit_context_broadcast", "config_overrides": CONTEXT_BROADCAST, "learning_rate": 1e-2}
    results = tiny_run(distill_from=sure_teacher, distill_kind=distill_kind, mixup=0, **options)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    images = load_images("cifar10-subset", "test[:30]").cast_column("image", datasets.Image())
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    pixel_values = processor([record["image"] for record in images], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        outputs = model(pixel_values)
    assert (outputs.distillation_logits.argmax(1) == 8).all()
    assert (outputs.cls_logits.argmax(1) == 8).float().mean() < 0.5
    # Without a teacher both heads learn from the labels.
    alone = tiny_run(name="alone", **options | {"learning_rate": 3e-3, "epochs": 4})
    assert alone["epochs"][-1]["train_loss"] < alone["epochs"][0]["train_loss"]
    assert results["arguments"]["distill_kind"] == distill_kind


def test_inserts_context_broadcast(tiny_run, tmp_path):
    for name, options in (("vit", {}), ("swin", {"model_type": "swin", "config_overrides": SWIN})):
        tiny_run(
            *("--context-broadcast-position", "mlp_end", "attention_end"),
            name=name,
            context_broadcast="cb_s",
            learning_rate=1e-2,
            **options,
        )
        model = AutoModelForImageClassification.from_pretrained(tmp_path / name)
        scales = [parameter for key, parameter in model.named_parameters() if "context_broadcast" in key]
        assert len(scales) == 4 and all(scale.any() for scale in scales)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_of_the_papers_can_be_read(recipe, tiny_trainer):
    """One of each architecture, but for fewer and smaller images and layers, and fewer steps of Algorithm 1."""
    _, values = read_recipe(recipes_of("frugalvit train")[recipe])
    small = {"dataset": "cifar10-subset", "mixed_precision": "no", "learning_rate": 1e-3, "label_column": "label"}
    if "initialization_options" in values:
        small["initialization_options"] = values["initialization_options"] + ",steps=2"
    own = tiny_trainer(config=recipe, config_overrides=f"{values['config_overrides']},{RECIPES[recipe]}", **small)
    arguments, model = own.run.record["arguments"], own.model
    for name in ("cutmix", "erasing", "drop_path", "initialization", "context_broadcast", "padding_mode"):
        assert arguments[name] == values.get(name, arguments[name])
    loss = own.compute_loss(model.train(), next(own.loader.epoch(0)))
    loss.backward()
    assert loss.isfinite() and any(weight.grad is not None for weight in model.parameters())
    wanted = parse_overrides(values["model_type"], values["config_overrides"])
    for name in ("context_broadcast", "spatial_filters", "stem", "mixing_bias"):
        assert getattr(model.config, name, None) == wanted.get(name, getattr(model.config, name, None))


def test_other_architectures(tiny_run, tmp_path):
    resnet = "embedding_size=8,hidden_sizes=[8],depths=[1],layer_type=basic"
    with pytest.raises(ValueError, match="resnet models .* --image-size"):
        tiny_run(model_type="resnet", config_overrides=resnet)
    tiny_run(name="resnet", model_type="resnet", config_overrides=resnet, image_size=24, crop="resized", erasing=0.5)
    assert dict(AutoImageProcessor.from_pretrained(tmp_path / "resnet").size) == {"height": 24, "width": 24}
    tiny_run("--image-std", "0.2", "0.2", "0.3", name="sparse", model_type="sparseformer", config_overrides=SPARSE)
    assert (tmp_path / "sparse" / "modeling_sparseformer.py").exists()
    assert list(AutoImageProcessor.from_pretrained(tmp_path / "sparse").image_std) == [0.2, 0.2, 0.3]
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "sparse")
    assert type(model).__name__ == "SparseFormerForImageClassification"
    assert list(model.config.image_std) == [0.2, 0.2, 0.3]


def test_streams_skips_and_drops_paths(tiny_run, write_parquet):
    train_file, test_file = write_parquet("train.parquet", 24, corrupt=[5, 17]), write_parquet("test.parquet")
    files = {"dataset": train_file, "eval_dataset": test_file, "train_split": None, "eval_split": None}
    for name, streaming in (("map", ()), ("stream", ("--streaming",))):
        results = tiny_run("--skip-corrupt", *streaming, name=name, steps_per_epoch=2, batch_size=8, **files)
        assert results["epochs"][0]["step"] == 2 and results["epochs"][0]["skipped"] <= 2
    tiny_run(name="swin", model_type="swin", config_overrides=SWIN, drop_path=0.2)
    with pytest.raises(ValueError, match="--drop-path is 0.2, but vit models have none"):
        tiny_run(name="vit", drop_path=0.2)


def test_arguments_from_a_file(tiny_run, tmp_path):
    first = tiny_run("--class-names", *"abcdefghij", seed=3)
    options = dict.fromkeys(("config_overrides", "train_split", "eval_split", "epochs", "batch_size", "warmup_epochs"))
    again = tiny_run(name="again", config=tmp_path / "out" / "results.json", **options)
    assert epochs(again) == epochs(first) and again["arguments"] == first["arguments"]
    (tmp_path / "short.yaml").write_text("learning_rate: 1e-2\ncompile: false\nimage_mean: [0.1, 0.2, 0.3]\nseed: 5\n")
    results = tiny_run(name="short", config=tmp_path / "short.yaml", seed=4)
    assert [results["arguments"][name] for name in ("learning_rate", "image_mean", "seed")] == [
        0.01,
        [0.1, 0.2, 0.3],
        4,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config_overrides": "hidden_sizes=3"}, "vit configurations have no 'hidden_sizes'"),
        ({"initialization_options": "mass=0.3"}, "--initialization default has no 'mass'"),
        ({"model_type": "agent_cnn", "initialization": "impulse", "config_overrides": ""}, "found no attention"),
        ({"initialization": "impulse", "initialization_options": "mass=3"}, "`mass` is 3, expected a number above 0"),
        ({"context_broadcast": "cb_gate", "model_type": "swin", "config_overrides": SWIN}, "needs a class token"),
        (
            {"repeated_augmentation": 2, "streaming": True, "steps_per_epoch": 2, "train_split": "train"},
            "images that are not streamed",
        ),
        ({"crop_padding": 32}, "--crop-padding is 32, expected less than the images' 32 pixels"),
        ({"mixed_precision": None, "batch_size": 15}, "--batch-size 15 cannot be shared evenly"),
    ],
)
def test_values_that_cannot_be(options, message, tiny_run):
    with pytest.raises(ValueError, match=message):
        tiny_run(**options)


def test_images_need_labels(tiny_run, write_parquet):
    plain = {"train_split": None, "eval_split": None}
    without, labeled = write_parquet("without.parquet", 24, labels=False), write_parquet("with.parquet", 24)
    with pytest.raises(ValueError, match="has no labels to train with"):
        tiny_run(dataset=without, eval_dataset=labeled, **plain)
    with pytest.raises(ValueError, match="The evaluation images have no labels"):
        tiny_run(dataset=labeled, eval_dataset=without, **plain)


def test_a_program_prints_one_line(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["train", "--output", str(tmp_path), "--train-split", "nothing"])
    monkeypatch.delitem(sys.modules, train.__name__)
    with pytest.raises(SystemExit, match=rf"^frugalvit train: error: --output {tmp_path} is not empty.*$"):
        runpy.run_module("frugalvit.training.train", run_name="__main__")
