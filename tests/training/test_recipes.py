"""Test the files in training/recipes/: their values are arguments, and their comments give the right model sizes."""

import re
from contextlib import contextmanager

import pytest
import torch
import torch.fx.experimental._config as fx_config
import transformers

from frugalvit import (
    BootstrappedViTConfig,
    BootstrappedViTForImageClassification,
    SparseFormerConfig,
    SparseFormerForSemanticSegmentation,
)
from frugalvit.macs import count_macs
from frugalvit.training import bootstrap, joint, segment, train
from frugalvit.training.arguments import RECIPES, read_yaml
from frugalvit.training.students import parse_overrides


MODULES = {"bootstrap": bootstrap, "segment": segment, "train": train, "joint": joint}


def read(name: str) -> tuple[dict, str]:
    """Return a dict and a text. The dict contains a recipe's values, and its command under the key "command". The text
    is the recipe's comment as one line."""
    text = RECIPES[name].read_text(encoding="utf-8")
    comment = " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))
    command = re.search(r"^command: (.*)$", text, re.MULTILINE)[1]
    return read_yaml(name, f"frugalvit {command}") | {"command": command}, comment


def recipes_of(command: str) -> list[str]:
    return [name for name in RECIPES if read(name)[0]["command"] == command]


SEGMENT, TRAIN, JOINT = (recipes_of(command) for command in ("segment", "train", "joint"))
# Recipes without `model_type` fine-tune a pretrained model and do not set its size, so they are left out.
TRAIN = [name for name in TRAIN if "model_type" in read(name)[0]]


def test_every_value_and_every_option_of_the_comment_is_an_argument():
    parsers = {command: module.make_parser() for command, module in MODULES.items()}
    for name in RECIPES:
        values, comment = read(name)
        words = ["--config", name, "--output_dir", "out", "--use_cpu"]
        groups = parsers[values.pop("command")].parse(words)
        found = {field: value for group in groups for field, value in vars(group).items()}
        wrong = [field for field in values if found[field] not in (values[field], [values[field]])]
        assert wrong in ([], ["output_dir"]), name
        # The options of other commands in the recipe's comment are not checked.
        own = re.sub(r"`[^`]*`|frugalvit evaluate [^.]*", "", comment)
        named = {option.removeprefix("no_") for option in re.findall(r"--([a-z]\w+)(?![-\w])", own)}
        assert named <= {*found, "config"}, name


# Training from scratch takes the number of classes from the data set, which is not loaded here.
CLASSES = {"ILSVRC/imagenet-1k": 1000, "uoft-cs/cifar100": 100, "uoft-cs/cifar10": 10, "ufldl-stanford/svhn": 10}


def build_to_train(values: dict):
    """Build the model of a recipe for `frugalvit train` or `joint`. Return the model and its image size."""
    classes = CLASSES[values["dataset"]]
    if "variant" in values:
        config = BootstrappedViTConfig.from_variant(values["variant"], num_labels=classes)
        return BootstrappedViTForImageClassification(config), config.image_size
    overrides = parse_overrides(values["model_type"], values["config_overrides"])
    config = transformers.AutoConfig.for_model(values["model_type"], num_labels=classes, **overrides)
    return transformers.AutoModelForImageClassification.from_config(config), config.image_size


@contextmanager
def on_meta_device():
    with torch.device("meta"), fx_config.patch(meta_nonzero_assume_all_nonzero=True):
        yield


@on_meta_device()
def build_on_meta_device(name: str):
    """Build the model of a recipe on the meta device. Return the model and its image size."""
    values, _ = read(name)
    if name not in SEGMENT:
        return build_to_train(values)
    fields = {"num_latent_tokens": values["num_latent_tokens"], "num_labels": values["num_labels"]}
    return SparseFormerForSemanticSegmentation(SparseFormerConfig.from_variant(values["model"], **fields)), 512


def counts(name: str) -> list[str]:
    """Read the number of parameters and the billions of multiply-accumulates from a recipe's comment."""
    return re.search(r"(?:has|have) ([\d,]+) parameters(?: and needs ([\d.]+) G)?", read(name)[1]).groups()


QUICK = ("sparseformer-v1-tiny", "joint-small", "convmixer", "segment-augreg-base")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly) for name in SEGMENT + TRAIN + JOINT],
)
def test_parameters_and_multiplications(name):
    """The model's counts equal the numbers in the recipe's comment."""
    model, pixels = build_on_meta_device(name)
    parameters, macs = counts(name)
    assert parameters == f"{model.num_parameters():,}"
    # Comments of joint recipes give no multiply-accumulates, because the two models are used separately.
    if name not in JOINT:
        with on_meta_device():
            assert macs == f"{count_macs(model, pixels).macs_with_attention / 1e9:.3f}"
