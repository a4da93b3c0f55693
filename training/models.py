"""Models to train: new ones, and those of Transformers and timm to go on from."""

import inspect

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageClassification, ViTImageProcessor

from ..configuration.configuration_base import FrugalViTConfig, pair, set_image_size
from ..configuration.configuration_vit import AttentionStartConfig
from ..modeling import initialization
from ..modeling.context_broadcast_hosts import insert_context_broadcast, load_context_broadcast
from ..modeling.hosts.transformers import has_positions, resize_positions_
from ..modeling.hub import image_processor_config
from ..modeling.image_format import set_size
from ..modeling.reference_initialization import REFERENCE, reference_init_
from .arguments import read_values
from .loading import TIMM, load_image_processor, loading_errors, split_revision
from .students import parse_overrides
from .trainer import classifiers_inside


# Kind of the checkpoint to start from, for messages.
CLASSIFIER = "an image classifier to go on from"


def build_model(options, args, names: list[str]):
    """Return the classifier of `ModelArguments` for these class names, in float32, and its image processor."""
    labels = label_fields(names)
    model, processor = load_classifier(options, args, labels) if options.model else new_classifier(options, labels)
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
    """Return the fields of a configuration for these class names."""
    numbers = {name: number for number, name in enumerate(names)}
    return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": numbers}


def new_classifier(options, labels: dict):
    config = new_config(options.model_type or "vit", options.config_overrides, options.drop_path, **labels)
    is_configured = configure_start(config, options.initialization, options.initialization_options)
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
    if options.initialization == REFERENCE and not is_configured:
        reference_init_(model)
    elif not is_configured:
        values = start_options(options.initialization, options.initialization_options)
        initialization.initialize_attention_(model, options.initialization, **values)
    return model, processor


def load_classifier(options, args, labels: dict):
    trust = args.trust_remote_code
    config = read_config(options.model, CLASSIFIER, trust, problem_type="single_label_classification", **labels)
    if config.model_type == TIMM:
        # timm's own names and number of classes.
        for name in ("label_names", "label_descriptions"):
            vars(config).pop(name, None)
        config.model_args = {name: value for name, value in (config.model_args or {}).items() if name != "num_classes"}
    set_drop_path(config, options.drop_path)
    auto_class = AutoModelForImageClassification
    model = load_checkpoint(auto_class, options.model, config, CLASSIFIER, trust_remote_code=trust)
    processor = load_image_processor(options.model, trust, CLASSIFIER)
    if options.image_size:
        processor = resize(model, processor, options.image_size)
    return model, processor


def resize(model, processor, pixels: int):
    """Set the image size of a model, whose positions are interpolated, and return an image processor of that size."""
    config = model.config
    if config.model_type == TIMM:
        model.timm_model.set_input_size(img_size=(pixels, pixels))
        config.model_args["img_size"] = [pixels, pixels]
        config.pretrained_cfg = config.pretrained_cfg | {"input_size": [3, pixels, pixels]}
        return type(processor)(config.pretrained_cfg, architecture=config.architecture)
    if has_positions(model):
        resize_positions_(model, pixels)
    elif isinstance(config, FrugalViTConfig):
        set_image_size(config, pixels)
    set_size(processor, pixels)
    return processor


def start_options(name: str, text: str) -> dict:
    """Read `initialization_options`, the arguments of an initialization, as a dict."""
    function = initialization.INITIALIZATIONS.get(name)
    accepted = inspect.signature(function).parameters.keys() - {"model", "generator"} if function else set()
    options = read_values("initialization_options", text)
    if unknown := sorted(options.keys() - accepted):
        raise ValueError(f"initialization_options: initialization {name} has no {unknown[0]!r}.")
    return options


def configure_start(config, name: str, text: str) -> bool:
    """Write the initialization into the configuration of a new model. Return whether its family has fields for it."""
    options = start_options(name, text)
    if name == "default":
        return True
    if name == REFERENCE and hasattr(config, "initialization"):
        config.initialization = name
        return True
    if name == REFERENCE or not isinstance(config, AttentionStartConfig):
        return False
    config.initialization = name
    config.initialization_options = options
    return True


def read_config(given: str, kind: str, trust_remote_code: bool = False, **values):
    """Load the configuration of a checkpoint to go on from, with other `values`; `kind` is for messages."""
    name, revision = split_revision(given)
    with loading_errors(given, kind):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **revision, **values)


def load_checkpoint(auto_class, given: str, config, kind: str, **options):
    """Load a checkpoint to go on from, in float32, with a new classifier where its own does not fit. Weights of the
    backbone must not be random or left out."""
    name, revision = split_revision(given)
    options |= {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with loading_errors(given, kind):
        model, info = auto_class.from_pretrained(name, config=config, **revision, **options)
        load_context_broadcast(model, name, info)
    prefix = f"{model.base_model_prefix}."
    heads = tuple(f"{prefix}{head}" for head in classifiers_inside(model.base_model))
    keys = [*info["missing_keys"], *info["unexpected_keys"], *(key[0] for key in info["mismatched_keys"])]
    if wrong := sorted(key for key in keys if key.startswith(prefix) and not key.startswith(heads)):
        raise ValueError(
            f"model {given} does not fit a {type(model).__name__}: {', '.join(wrong[:3])} are missing, unexpected or "
            f"of another size, {len(wrong)} weights in all."
        )
    return model


def new_config(model_type: str, text: str, drop_path: float, **labels):
    """Return the configuration of a new model for these labels, with the fields of `config_overrides`."""
    config = AutoConfig.for_model(model_type, **parse_overrides(model_type, text) | labels)
    set_drop_path(config, drop_path)
    return config


def set_drop_path(config, rate: float):
    """Set the stochastic depth rate of a configuration; raise a ValueError if the model has none."""
    if rate and config.model_type == TIMM:
        config.model_args["drop_path_rate"] = rate
    elif rate and not hasattr(config, "drop_path_rate"):
        raise ValueError(f"drop_path is {rate}, but {config.model_type} models have none; expected 0.")
    elif rate:
        config.drop_path_rate = rate
