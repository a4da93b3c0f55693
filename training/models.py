"""Build models to train: new models, or pretrained models of Transformers and timm with new heads."""

import inspect

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    ViTImageProcessor,
)

from ..configuration.configuration_base import FrugalViTConfig, pair, set_image_size
from ..configuration.configuration_vit import AttentionStartConfig
from ..modeling import initialization
from ..modeling.context_broadcast_hosts import insert_context_broadcast
from ..modeling.hosts.anatomy import is_timm
from ..modeling.hosts.transformers import has_positions, resize_positions_
from ..modeling.hub import image_processor_config
from ..modeling.image_format import set_size
from ..modeling.reference_initialization import REFERENCE, reference_init_
from .arguments import read_values
from .loading import TIMM, load_pretrained
from .students import parse_overrides


# Description of the expected kind of model, for messages.
CLASSIFIER = "an image classifier to go on from"


def build_model(options, args, names: list[str]):
    """Return a classifier in float32 for the classes `names`, and the classifier's image processor.

    Args:
        options (`ModelArguments`): Arguments of the model. If `options.model` is set, a pretrained classifier is
            loaded. Otherwise, a new classifier is built.
        args (`TrainingArguments`): The training arguments. Only `trust_remote_code` is used.
        names (`list[str]`): Class names.
    """
    labels = label_fields(names)
    if options.model:
        model, processor = pretrained_classifier(options, args, labels)
    else:
        model, processor = new_classifier(options, labels)
    if options.context_broadcast:
        insert_context_broadcast(
            model,
            options.context_broadcast,
            options.context_broadcast_position,
            scale_init=options.context_broadcast_scale_init,
            blend=options.context_broadcast_blend,
        )
    return model, processor


def label_fields(names: list[str]) -> dict:
    """Return the configuration fields that contain the class names."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def new_classifier(options, labels: dict):
    """Return a new, untrained classifier, and an image processor for the classifier's image size."""
    config = new_config(options.model_type or "vit", options.config_overrides, options.drop_path, **labels)
    is_configured = configure_initialization(config, options.initialization, options.initialization_options)
    normalization = {"image_mean": options.image_mean, "image_std": options.image_std}
    if isinstance(config, FrugalViTConfig):
        config.update(normalization)
        values = image_processor_config(config)
        processor = getattr(transformers, values.pop("image_processor_type"))(**values)
    else:
        size = getattr(config, "image_size", None) or options.image_size
        if size is None:
            raise ValueError(f"{config.model_type} models take images of any size; give image_size.")
        height, width = pair(size)
        processor = ViTImageProcessor(size={"height": height, "width": width}, **normalization)
    model = AutoModelForImageClassification.from_config(config)
    if is_configured:
        return model, processor
    if options.initialization == REFERENCE:
        reference_init_(model)
    else:
        values = initialization_arguments(options.initialization, options.initialization_options)
        initialization.initialize_attention_(model, options.initialization, **values)
    return model, processor


def pretrained_classifier(options, args, labels: dict):
    """Load a pretrained classifier and its image processor. `labels` replaces the checkpoint's classes."""
    trust = args.trust_remote_code
    fields = {"problem_type": "single_label_classification", **labels}
    config = load_pretrained(AutoConfig, options.model, CLASSIFIER, trust, **fields)
    if config.model_type == TIMM:
        # timm's configurations have further fields with class names. These fields would contradict `labels`.
        for name in ("label_names", "label_descriptions"):
            vars(config).pop(name, None)
        config.model_args = {name: value for name, value in (config.model_args or {}).items() if name != "num_classes"}
    set_drop_path(config, options.drop_path)
    model = load_with_new_head(AutoModelForImageClassification, options.model, config, CLASSIFIER, trust)
    processor = load_pretrained(AutoImageProcessor, options.model, CLASSIFIER, trust)
    if options.image_size:
        processor = resize(model, processor, options.image_size)
    return model, processor


def resize(model, processor, pixels: int):
    """Set a model's image size and interpolate its position embeddings. Return an image processor for the new size."""
    config = model.config
    if config.model_type == TIMM:
        model.timm_model.set_input_size(img_size=(pixels, pixels))
        config.model_args["img_size"] = [pixels, pixels]
        config.pretrained_cfg = config.pretrained_cfg | {"input_size": [3, pixels, pixels]}
        return type(processor)(config.pretrained_cfg, architecture=config.architecture)
    if config.model_type == "bootstrapped_vit":
        set_image_size(config, pixels)
        resize_positions_(model.vit, pixels)
    elif has_positions(model):
        resize_positions_(model, pixels)
    elif isinstance(config, FrugalViTConfig):
        set_image_size(config, pixels)
    set_size(processor, pixels)
    return processor


def initialization_arguments(name: str, text: str) -> dict:
    """Parse `text`, the argument `initialization_options`, into keyword arguments of the initialization `name`."""
    function = initialization.INITIALIZATIONS.get(name)
    accepted = inspect.signature(function).parameters.keys() - {"model", "generator"} if function else set()
    values = read_values("initialization_options", text)
    if unknown := sorted(values.keys() - accepted):
        raise ValueError(
            f"initialization_options: initialization {name} has no {unknown[0]!r}, expected some of "
            f"{', '.join(sorted(accepted)) or 'none'}."
        )
    return values


def configure_initialization(config: PreTrainedConfig, name: str, text: str) -> bool:
    """Configure the initialization of a new model. Return whether the model's class supports `name`."""
    values = initialization_arguments(name, text)
    if name == "default":
        return True
    if name == REFERENCE and hasattr(config, "initialization"):
        config.initialization = name
        return True
    if name == REFERENCE or not isinstance(config, AttentionStartConfig):
        return False
    config.initialization = name
    config.initialization_options = values
    return True


def load_with_new_head(auto_class: type, name: str, config: PreTrainedConfig, kind: str, trust_remote_code: bool):
    """Load a pretrained model in float32, with a new head if the checkpoint's head does not fit the configuration.

    Raises:
        ValueError: If weights of the backbone are missing or unused, or have another shape than in the model.
    """
    model, report = load_pretrained(
        auto_class,
        name,
        kind,
        trust_remote_code,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    prefix = f"{model.base_model_prefix}."
    heads = tuple(f"{prefix}{head}" for head in classifiers_inside(model.base_model))
    keys = [*report["missing_keys"], *report["unexpected_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if wrong := sorted(key for key in keys if key.startswith(prefix) and not key.startswith(heads)):
        raise ValueError(
            f"model {name} does not fit a {type(model).__name__}: {', '.join(wrong[:3])} are missing, unexpected or "
            f"of another size, {len(wrong)} weights in all."
        )
    return model


def new_config(model_type: str, text: str, drop_path: float, **labels) -> PreTrainedConfig:
    """Return the configuration of a new model, with the fields in `text` (`config_overrides`) and `labels`."""
    config = AutoConfig.for_model(model_type, **parse_overrides(model_type, text) | labels)
    set_drop_path(config, drop_path)
    return config


def set_drop_path(config: PreTrainedConfig, rate: float):
    """Set the stochastic depth rate of a configuration. Raise a ValueError if the model has no stochastic depth."""
    if rate and config.model_type == TIMM:
        config.model_args = {**(config.model_args or {}), "drop_path_rate": rate}
    elif rate and not hasattr(config, "drop_path_rate"):
        raise ValueError(f"drop_path is {rate}, but {config.model_type} models have none; expected 0.")
    elif rate:
        config.drop_path_rate = rate


def learning_rate_factors(model: torch.nn.Module, head_multiplier: float, layer_decay: float) -> dict[str, float]:
    """Return the learning rate factor of each parameter by name.

    The last block and the layers after it have the factor 1. The factor of an earlier block is `layer_decay` times the
    factor of the next block. The layers before the first block count as one more block. The longest list of modules in
    the base model is taken as the blocks. The factor of the head is `head_multiplier`.
    """
    base = model.base_model
    if base is model and head_multiplier != 1:
        raise ValueError(f"head_multiplier is {head_multiplier}, expected 1 for a {type(model).__name__}.")
    # In timm models, the blocks are in an `nn.Sequential`.
    kinds = (torch.nn.ModuleList, torch.nn.Sequential) if is_timm(base) else torch.nn.ModuleList
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, kinds)]
    name, blocks = max(lists, key=lambda item: len(item[1]), default=("", ()))
    last = len(blocks) - 1
    index = -1
    heads = classifiers_inside(base)
    names = {parameter: name for name, parameter in model.named_parameters()}
    factors = dict.fromkeys(names.values(), head_multiplier)
    for full_name, parameter in base.named_parameters():
        if full_name.startswith(heads):
            continue
        if blocks and full_name.startswith(f"{name}."):
            index = int(full_name.removeprefix(f"{name}.").partition(".")[0])
        elif index >= 0:
            index = last
        factors[names[parameter]] = layer_decay ** (last - index)
    return factors


def classifiers_inside(base: torch.nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of classifier parameters in a base model. Only timm's base models have classifiers."""
    if not is_timm(base):
        return ()
    heads = base.get_classifier()
    heads = heads if isinstance(heads, tuple) else (heads,)
    return tuple(f"{name}." for name, module in base.named_modules() if any(module is head for head in heads))
