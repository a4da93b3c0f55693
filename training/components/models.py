"""Models as a command's arguments describe them."""

import inspect
from pathlib import Path

import torch
from transformers import AutoConfig

from ...common.loading import check_folder, one_error, split_revision
from ...configuration.configuration_base import AttentionStartConfig, FrugalViTConfig
from ...modeling.hosts.timm import TIMM
from ...modeling.initialization import INITIALIZATIONS, START_FIELDS, initialize_attention_
from ...modeling.reference_initialization import REFERENCE, reference_init_
from .arguments import read_values
from .optimizers import classifiers_inside


# What `--model-type` should be, for messages.
NEW = "an architecture to train from scratch"


def start_options(name: str, text: str) -> dict:
    """Read `--initialization-options`, the arguments of an `--initialization`, as a dict.

    Raises:
        ValueError: if the initialization has no such option.
    """
    accepted = inspect.signature(INITIALIZATIONS[name]).parameters.keys() if name in INITIALIZATIONS else set()
    options = read_values("initialization_options", text)
    if unknown := sorted(options.keys() - accepted | options.keys() & {"model", "generator"}):
        raise ValueError(f"--initialization-options: --initialization {name} has no {unknown[0]!r}.")
    return options


def configure_start(config, name: str, text: str, seed: int) -> bool:
    """Write the start of a fresh model into its configuration, as far as the family has fields for that. Return
    whether the configuration holds all that was asked for, so that nothing is left for `initialize`.

    Raises:
        ValueError: if an option has no field.
    """
    options = start_options(name, text)
    if isinstance(config, FrugalViTConfig):
        config.initialization_seed = seed
    if name == "default":
        return True
    if name == REFERENCE and hasattr(config, "initialization"):
        config.initialization = name
        return True
    if name == REFERENCE or not isinstance(config, AttentionStartConfig):
        return False
    if unknown := sorted(options.keys() - START_FIELDS.keys()):
        raise ValueError(
            f"--initialization-options: {unknown[0]!r} of a {config.model_type} is its configuration's; say "
            "position_embedding in --config-overrides."
        )
    config.initialization = name
    # What is not given is said, too.
    own = inspect.signature(INITIALIZATIONS[name]).parameters["value_init"].default
    for option, value in ({"value_init": own} | options).items():
        setattr(config, START_FIELDS[option], value)
    return True


def initialize(model, name: str, text: str):
    """Initialize a fresh model or its attention, with the options of `--initialization-options`."""
    options = start_options(name, text)
    if name == REFERENCE:
        reference_init_(model)
    else:
        initialize_attention_(model, name, **options)


def choose_attention(model, wanted: str | None, device: torch.device):
    """Set the attention that a model trains with: the one wanted, or else eager attention on CPUs. Their fused
    attention has a slow backward pass: in bf16, a ViT with 65 tokens trains at half the speed."""
    if attention := wanted or ("eager" if device.type == "cpu" else None):
        model.set_attn_implementation(attention)


def read_config(given: str, kind: str, trust_remote_code: bool = False, **values):
    """Load the configuration of a checkpoint to go on from.

    Args:
        given (`str`): Folder or hub id.
        kind (`str`): Kind of model that is expected, for messages.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run code that comes with the model.
        values: Fields to set differently.
    """
    name, revision = split_revision(given)
    check_folder(Path(name))
    with one_error(given, kind):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **revision, **values)


def load_checkpoint(auto_class, given: str, config, kind: str, **options):
    """Load a checkpoint to go on from, in float32, with a new classifier where its own does not fit."""
    name, revision = split_revision(given)
    as_it_is = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with one_error(given, kind):
        model, info = auto_class.from_pretrained(name, config=config, **as_it_is, **revision, **options)
    check_loading(model, info, given)
    return model


def new_config(model_type: str, text: str, drop_path: float, **labels):
    """Return the configuration of a new model for these labels, with the fields of `--config-overrides`."""
    overrides = parse_overrides(model_type, text)
    # PVT's configuration keeps its own count of classes, unless it is given.
    counted = {"num_labels": len(labels["id2label"])} if "id2label" in labels else {}
    with one_error(model_type, NEW):
        config = AutoConfig.for_model(model_type, **counted | overrides, **labels)
    set_drop_path(config, drop_path)
    return config


def new_model(auto_class, config):
    """A model with fresh weights."""
    with one_error(config.model_type, NEW):
        return auto_class.from_config(config)


def set_drop_path(config, rate: float):
    """Set the rate at which branches of blocks are left out in training; raise a ValueError if the model has none."""
    if rate and config.model_type == TIMM:
        config.model_args["drop_path_rate"] = rate
    elif rate and not hasattr(config, "drop_path_rate"):
        raise ValueError(f"--drop-path is {rate}, but {config.model_type} models have none; expected 0.")
    elif rate:
        config.drop_path_rate = rate


def check_loading(model, info: dict, name: str):
    """Raise a ValueError if a checkpoint's backbone does not fit; its classifier or pooler may be lost or new."""
    backbone, prefix, heads = model.base_model, f"{model.base_model_prefix}.", classifiers_inside(model.base_model)
    parts = set() if backbone is model else {name.partition(".")[0] for name, _ in backbone.named_parameters()}

    def is_of_backbone(key: str) -> bool:
        # A folder of a backbone alone has its names without the prefix.
        inner = key.removeprefix(prefix)
        known = key.startswith(prefix) or inner.partition(".")[0] in parts
        return known and not inner.startswith(heads)

    lost = [*info["missing_keys"], *(key[0] for key in info["mismatched_keys"]), *info["unexpected_keys"]]
    if lost := sorted(filter(is_of_backbone, lost)):
        raise ValueError(
            f"--model {name} does not fit a {type(model).__name__}: {', '.join(lost[:3])} and others, {len(lost)} in "
            "all, are missing, unexpected or of another size. Expected a complete model of that architecture."
        )


def parse_overrides(model_type: str, text: str) -> dict:
    """Read `--config-overrides`, fields of a configuration, as a dict.

    Raises:
        ValueError: if the configuration has no such field.
    """
    defaults, overrides = AutoConfig.for_model(model_type), read_values("config_overrides", text)
    for name in overrides:
        if not hasattr(defaults, name):
            raise ValueError(f"--config-overrides: {model_type} configurations have no {name!r}.")
    return overrides
