"""The files of training/recipes/: each is read by its command and builds what it says, small, and counted in full."""

import functools
import re
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import timm
import torch
import torch.fx.experimental._config as fx_config
import transformers

from frugalvit import (
    BootstrappedViTConfig,
    BootstrappedViTForImageClassification,
    SparseFormerConfig,
    SparseFormerForImageClassification,
    SparseFormerForSemanticSegmentation,
    SparseFormerVisionModel,
    SparseFormerVisionModelWithProjection,
)
from frugalvit.common.macs import count_macs
from frugalvit.modeling.hosts import read_anatomy
from frugalvit.training import bootstrap, joint, segment, train
from frugalvit.training.arguments import RECIPES, read_config
from frugalvit.training.students import parse_overrides


MODULES = {"bootstrap": bootstrap, "segment": segment, "train": train, "joint": joint}


def read(name: str) -> tuple[dict, str]:
    """A file's values with its command, and its comment in one line."""
    text = RECIPES[name].read_text(encoding="utf-8")
    comment = " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))
    command = re.search(r"^command: (.*)$", text, re.MULTILINE)[1]
    return read_config(name, f"frugalvit {command}") | {"command": command}, comment


def recipes_of(command: str) -> list[str]:
    return [name for name in RECIPES if read(name)[0]["command"] == command]


BOOTSTRAP, SEGMENT, TRAIN, JOINT = (recipes_of(command) for command in MODULES)


def of_transformers(family: str, model: str, **fields):
    return getattr(transformers, f"{family}{model}")(getattr(transformers, f"{family}Config")(**fields))


def of_two_towers(family: str, projection_dim: int | None = None, **fields):
    config_class, model_class = (getattr(transformers, f"{family}{part}") for part in ("Config", "Model"))
    projection = {"projection_dim": projection_dim} if projection_dim else {}
    return model_class(config_class(vision_config=fields, **projection))


SMALL = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12}
BASE = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24}
DINOV2 = partial(of_transformers, "Dinov2", "Model", patch_size=14, image_size=518)
DINOV3 = partial(of_transformers, "DINOv3ViT", "Model", num_register_tokens=4)
CLIP = partial(of_two_towers, "CLIP")
CLIP_LARGE = partial(CLIP, patch_size=14, projection_dim=768, intermediate_size=4096, **LARGE)
# What the files name.
TEACHERS = {
    **{
        f"timm/{name}": partial(timm.create_model, name)
        for name in (
            "vit_base_patch16_224.augreg_in21k_ft_in1k",
            "vit_large_patch16_224.augreg_in21k_ft_in1k",
            "vit_large_patch16_384.augreg_in21k_ft_in1k",
        )
    },
    "openai/clip-vit-base-patch16": partial(CLIP, patch_size=16, projection_dim=512, intermediate_size=3072, **BASE),
    "openai/clip-vit-large-patch14": partial(CLIP_LARGE, image_size=224),
    "openai/clip-vit-large-patch14-336": partial(CLIP_LARGE, image_size=336),
    "facebook/dinov2-small": partial(DINOV2, **SMALL),
    "facebook/dinov2-base": partial(DINOV2, **BASE),
    "facebook/dinov2-large": partial(DINOV2, **LARGE),
    "facebook/dinov3-vits16-pretrain-lvd1689m": partial(DINOV3, intermediate_size=1536, **SMALL),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": partial(DINOV3, intermediate_size=3072, **BASE),
    "google/siglip2-base-patch16-224": partial(of_two_towers, "Siglip", patch_size=16, intermediate_size=3072, **BASE),
}


def test_every_value_is_an_argument_of_its_command():
    """And ends there as it is written; so does what the comment names."""
    parsers = {command: module.make_parser() for command, module in MODULES.items()}
    for name in RECIPES:
        values, comment = read(name)
        words = ["--config", name, "--output_dir", "out", "--use_cpu"]
        groups = parsers[values.pop("command")].parse(words)
        found = {field: value for group in groups for field, value in vars(group).items()}
        wrong = [field for field in values if found[field] not in (values[field], [values[field]])]
        assert wrong in ([], ["output_dir"]), name
        # Other commands are in it, too.
        own = re.sub(r"`[^`]*`|frugalvit evaluate [^.]*", "", comment)
        named = {option.removeprefix("no_") for option in re.findall(r"--([a-z]\w+)(?![-\w])", own)}
        assert named <= {*found, "config"}, name


def test_what_others_go_on_from_is_where_its_own_file_puts_it():
    assert {read(name)[0]["teacher"] for name in BOOTSTRAP} == TEACHERS.keys()
    for name in BOOTSTRAP + SEGMENT:
        values, comment = read(name)
        assert values["output_dir"] == name
        assert values.get("student", values.get("model", BOOTSTRAP[0])) in BOOTSTRAP
        assert ("The paper" in comment) == ("not reproduced here" in comment) != ("No paper says" in comment)


# Classes of the data sets that models are trained on from scratch.
CLASSES = {"ILSVRC/imagenet-1k": 1000, "uoft-cs/cifar100": 100, "uoft-cs/cifar10": 10, "ufldl-stanford/svhn": 10}


def of_train(values: dict):
    """The model of a recipe for `frugalvit train` or `joint`, and the pixels that it sees."""
    classes = CLASSES[values["dataset"]]
    if "variant" in values:
        config = BootstrappedViTConfig.from_variant(values["variant"], num_labels=classes)
        return BootstrappedViTForImageClassification(config), config.image_size
    overrides = parse_overrides(values["model_type"], values["config_overrides"])
    config = transformers.AutoConfig.for_model(values["model_type"], num_labels=classes, **overrides)
    return transformers.AutoModelForImageClassification.from_config(config), config.image_size


@contextmanager
def without_numbers():
    check = mock.patch("frugalvit.modeling.inheritance.check_student")
    with check, torch.device("meta"), fx_config.patch(meta_nonzero_assume_all_nonzero=True):
        yield


@functools.cache
def anatomy_of(name: str):
    return read_anatomy(TEACHERS[name]())


@functools.cache
@without_numbers()
def in_full(name: str):
    """The student of a recipe at its true size, without numbers in it, and the pixels that it sees."""
    values, _ = read(name)
    if name in TRAIN or name in JOINT:
        return of_train(values)
    if name in SEGMENT:
        fields = {"num_latent_tokens": values["num_latent_tokens"], "num_labels": values["num_labels"]}
        return SparseFormerForSemanticSegmentation(SparseFormerConfig.from_variant(values["model"], **fields)), 512
    first = values
    while "student" in first:
        earlier, _ = read(first["student"])
        values, first = earlier | values, earlier
    anatomy = anatomy_of(values["teacher"])
    student_class = SparseFormerVisionModel
    if anatomy.classifier is not None or anatomy.projection is not None:
        projects = anatomy.classifier is None
        student_class = SparseFormerVisionModelWithProjection if projects else SparseFormerForImageClassification
    options = {"num_latent_tokens": values["num_tokens"][0], "truncate": values.get("truncate")}
    # DINOv2 is made for 518 pixels and used with 224.
    pixels = values.get("image_size") or (224 if "dinov2" in name else anatomy.image_size[0])
    return student_class.from_teacher(anatomy, **options), pixels


def counts(name: str) -> list[str]:
    """Parameters and billions of multiply-accumulates of a recipe's comment."""
    return re.search(r"Counted: ([\d,]+) parameters(?:, ([\d.]+) G multiply)?", read(name)[1]).groups()


QUICK = ("augreg-base-49-224", "sparseformer-v1-tiny", "joint-small", "convmixer", "segment-augreg-base")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly) for name in RECIPES]
)
def test_parameters_and_multiplications(name):
    """Those of the comment are those that are counted, and within a percent of the paper's."""
    model, pixels = in_full(name)
    parameters, macs = counts(name)
    assert parameters == f"{model.num_parameters():,}"
    # A pair stands apart after training.
    if name not in JOINT:
        with without_numbers():
            found = count_macs(model, pixels).macs_with_attention / 1e9
        assert macs == f"{found:.3f}"
        if name in BOOTSTRAP and (printed := re.search(r"([\d.]+)G FLOPs", read(name)[1])):
            assert float(printed[1]) == pytest.approx(found, rel=0.01)
    if name in BOOTSTRAP and (printed := re.search(r"(\d+)M parameters", read(name)[1])):
        assert float(printed[1]) == pytest.approx(model.num_parameters() / 1e6, rel=0.01)
