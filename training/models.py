"""Models as the arguments of a command describe them: new ones, and those of Transformers and timm to go on from."""

import inspect
import json
import statistics
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageClassification, ViTImageProcessor

from ..common.decoding import CorruptImageError, decode_image
from ..common.loading import check_folder, load_image_processor, one_error, split_revision
from ..configuration.configuration_base import FrugalViTConfig, pair, set_image_size
from ..configuration.configuration_vit import AttentionStartConfig
from ..configuration.configuration_vit_impulse_init import ViTImpulseInitConfig
from ..modeling import initialization
from ..modeling.context_broadcast_hosts import insert_context_broadcast, load_context_broadcast
from ..modeling.hosts.timm import TIMM
from ..modeling.hosts.transformers import has_positions, resize_positions_
from ..modeling.hub import image_processor_config
from ..modeling.reference_initialization import REFERENCE, reference_init_
from .arguments import read_values
from .optimizers import classifiers_inside
from .students import parse_overrides


# Models to train where none is named: a variant for images of up to 128 pixels, with larger patches for larger ones,
# and one for those beyond.
SMALL_VARIANT, LARGE_VARIANT, LARGEST_SMALL = "vit-tiny-h3-32", "vit-tiny-h3-224", 128
# Number of images read to choose between them.
FIRST_IMAGES = 16
# Kinds of models, for messages.
CLASSIFIER, NEW = "an image classifier to go on from", "an architecture to train from scratch"


def typical_pixels(images) -> int:
    """Return the median of the shorter sides of a data set's first images.

    Raises:
        CorruptImageError: if none of them can be read.
    """
    sides, failure = [], None
    for index, record in enumerate(images.take(FIRST_IMAGES)):
        try:
            sides.append(min(decode_image(record["image"], index).size))
        except CorruptImageError as error:
            failure = error
    if not sides and failure:
        raise failure
    return round(statistics.median(sides))


def choose_variant(options, pixels: int) -> str:
    """Choose a ViT-T for images of this size, with 256 tokens, or 196 for large images, write it into `options`, and
    return its name. It is that of Zheng et al. if its attention is to be initialized, else Transformers' ViT."""
    small = pixels <= LARGEST_SMALL
    variant = SMALL_VARIANT if small else LARGE_VARIANT
    config = ViTImpulseInitConfig.from_variant(variant)
    # The number of patches stays; each has more pixels.
    factor = max(round(pixels / config.image_size), 1) if small else 1
    fields = {
        "image_size": factor * config.image_size,
        "patch_size": factor * config.patch_size,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
    }
    if options.initialization in ("default", REFERENCE):
        options.model_type, fields["intermediate_size"] = "vit", 4 * config.hidden_size
    else:
        options.model_type, fields["resize_size"] = ViTImpulseInitConfig.model_type, config.resize_size
    options.config_overrides = ",".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
    return variant


def build_model(options, args, names: list[str]):
    """Return a classifier for these class names, in float32, and its image processor.

    Args: `options` are `ModelArguments`; `args`, `ImageClassificationArguments`, have the seed and `train_image_size`.

    Raises:
        ValueError: if there is no such model, or it cannot be as described.
    """
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    model, processor = (load_classifier if options.model else new_classifier)(options, args, labels)
    if options.context_broadcast:
        insert_context_broadcast(
            model,
            options.context_broadcast,
            options.context_broadcast_position,
            scale_init=options.context_broadcast_scale_init,
            blend=options.context_broadcast_blend,
        )
    return model, processor


def new_classifier(options, args, labels: dict):
    config = new_config(options.model_type or "vit", options.config_overrides, options.drop_path, **labels)
    is_configured = configure_start(config, options.initialization, options.initialization_options, args.seed)
    if hasattr(config, "image_mean"):
        config.image_mean, config.image_std = options.image_mean, options.image_std
        values = image_processor_config(config)
        processor = getattr(transformers, values.pop("image_processor_type"))(**values)
    else:
        size = getattr(config, "image_size", None) or options.image_size
        if size is None:
            raise ValueError(f"{config.model_type} models take images of any size; give image_size.")
        height, width = pair(size)
        values = {"image_mean": options.image_mean, "image_std": options.image_std}
        processor = ViTImageProcessor(size={"height": height, "width": width}, **values)
    model = new_model(AutoModelForImageClassification, config)
    if options.initialization == REFERENCE and not is_configured:
        reference_init_(model)
    elif not is_configured:
        values = start_options(options.initialization, options.initialization_options)
        initialization.initialize_attention_(model, options.initialization, **values)
    return model, processor


def load_classifier(options, args, labels: dict):
    trust = args.trust_remote_code
    # Configurations of timm's models keep their own count of classes, unless it is given.
    config = read_config(options.model, CLASSIFIER, trust, num_labels=len(labels["id2label"]), **labels)
    if of_timm := config.model_type == TIMM:
        for name in ("label_names", "label_descriptions"):
            vars(config).pop(name, None)
        config.model_args = {name: value for name, value in (config.model_args or {}).items() if name != "num_classes"}
    set_drop_path(config, options.drop_path)
    model_args, auto_class = getattr(config, "model_args", None), AutoModelForImageClassification
    if of_timm and args.train_image_size:
        # For training alone, so that it is not saved.
        config.model_args = model_args | {"dynamic_img_size": True}
    model = load_checkpoint(auto_class, options.model, config, CLASSIFIER, trust_remote_code=trust)
    processor = load_image_processor(options.model, trust, CLASSIFIER)
    if of_timm:
        model.config.model_args = model_args
        return model, finish_timm_model(model, processor, options)
    if options.image_size:
        if has_positions(model):
            resize_positions_(model, options.image_size)
        else:
            check_takes(model, options.image_size, "image_size")
            # Elsewhere the size may be that of weights.
            if isinstance(model.config, FrugalViTConfig):
                set_image_size(model.config, options.image_size)
        resize_by(processor, options.image_size)
    return model, processor


def finish_timm_model(model, processor, options):
    """Give a timm model a pooling if it has none, and positions for images of `image_size`; return its processor."""
    config, host = model.config, model.timm_model
    if getattr(host, "global_pool", None) == "":
        if getattr(host, "cls_token", None) is None:
            raise ValueError(
                f"model {options.model}, a {config.architecture}, neither pools its tokens nor has [CLS], so that a "
                "classifier has nothing to read. Save it with a pooling, for example global_pool='avg'."
            )
        host.global_pool = config.model_args["global_pool"] = "token"
    if pixels := options.image_size:
        if hasattr(host, "set_input_size"):
            patches = getattr(getattr(host, "patch_embed", None), "patch_size", ())
            if any(pixels % patch for patch in patches):
                raise ValueError(f"image_size is {pixels}, expected a multiple of the patches' {patches}.")
            host.set_input_size(img_size=(pixels, pixels))
            config.model_args["img_size"] = [pixels, pixels]
        config.pretrained_cfg = config.pretrained_cfg | {"input_size": [3, pixels, pixels]}
        processor = type(processor)(config.pretrained_cfg, architecture=config.architecture)
    return processor


def resize_by(processor, pixels: int):
    """Set the image size of an image processor; a center crop shows as much as it did."""
    square = {"height": pixels, "width": pixels}
    if getattr(processor, "do_center_crop", False):
        factor = pixels / min(dict(processor.crop_size).values())
        processor.size = {name: round(factor * value) for name, value in dict(processor.size).items()}
        processor.crop_size = square
    else:
        # ConvNeXt's crops a share of what it resizes.
        processor.size = {"shortest_edge": pixels} if "shortest_edge" in dict(processor.size) else square


def check_takes(model, pixels: int, name: str, **options):
    """Raise a ValueError that names the argument unless a model takes images of `pixels` x `pixels`, with `options` of
    its forward pass."""
    try:
        with torch.no_grad():
            model(pixel_values=torch.zeros(2, 3, pixels, pixels), **options)
    # Models fail in more ways than can be listed.
    except Exception as error:
        raise ValueError(
            f"{name} is {pixels}, and a {type(model).__name__} does not take images of that size "
            f"({' '.join(str(error).split())[:200]})."
        ) from error


def start_options(name: str, text: str) -> dict:
    """Read `initialization_options`, the arguments of an initialization, as a dict."""
    function = initialization.INITIALIZATIONS.get(name)
    accepted = inspect.signature(function).parameters.keys() - {"model", "generator"} if function else set()
    options = read_values("initialization_options", text)
    if unknown := sorted(options.keys() - accepted):
        raise ValueError(f"initialization_options: initialization {name} has no {unknown[0]!r}.")
    return options


def configure_start(config, name: str, text: str, seed: int) -> bool:
    """Write the initialization of a new model into its configuration, as far as the family has fields for it. Return
    whether the configuration holds all of it."""
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
    if unknown := sorted(options.keys() - initialization.START_FIELDS.keys()):
        raise ValueError(
            f"initialization_options: {unknown[0]!r} of a {config.model_type} is its configuration's; give "
            "position_embedding in config_overrides."
        )
    config.initialization = name
    # Defaults are written, too.
    default = inspect.signature(initialization.INITIALIZATIONS[name]).parameters["value_init"].default
    for option, value in ({"value_init": default} | options).items():
        setattr(config, initialization.START_FIELDS[option], value)
    return True


def read_config(given: str, kind: str, trust_remote_code: bool = False, **values):
    """Load the configuration of a checkpoint to go on from, with other `values`; `kind` is for messages."""
    name, revision = split_revision(given)
    check_folder(Path(name))
    with one_error(given, kind):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **revision, **values)


def load_checkpoint(auto_class, given: str, config, kind: str, **options):
    """Load a checkpoint to go on from, in float32, with a new classifier where its own does not fit.

    Raises:
        ValueError: if its backbone does not fit the configuration; its classifier or pooler may be lost or new.
    """
    name, revision = split_revision(given)
    options |= {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with one_error(given, kind):
        model, info = auto_class.from_pretrained(name, config=config, **revision, **options)
        load_context_broadcast(model, name, info)
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
            f"model {given} does not fit a {type(model).__name__}: {', '.join(lost[:3])} and others, {len(lost)} in "
            "all, are missing, unexpected or of another size. Expected a complete model of that architecture."
        )
    return model


def new_config(model_type: str, text: str, drop_path: float, **labels):
    """Return the configuration of a new model for these labels, with the fields of `config_overrides`."""
    overrides = parse_overrides(model_type, text)
    # PVT's configuration keeps its own count of classes, unless it is given.
    counted = {"num_labels": len(labels["id2label"])} if "id2label" in labels else {}
    with one_error(model_type, NEW):
        config = AutoConfig.for_model(model_type, **counted | overrides, **labels)
    set_drop_path(config, drop_path)
    return config


def new_model(auto_class, config):
    """Return a model with fresh weights."""
    with one_error(config.model_type, NEW):
        return auto_class.from_config(config)


def set_drop_path(config, rate: float):
    """Set the stochastic depth rate of a configuration; raise a ValueError if the model has none."""
    if rate and config.model_type == TIMM:
        config.model_args["drop_path_rate"] = rate
    elif rate and not hasattr(config, "drop_path_rate"):
        raise ValueError(f"drop_path is {rate}, but {config.model_type} models have none; expected 0.")
    elif rate:
        config.drop_path_rate = rate


def choose_attention(model, wanted: str | None, device: torch.device):
    """Set the attention that a model trains with: the one wanted, or else eager attention on CPUs. Their fused
    attention has a slow backward pass: in bf16, a ViT with 65 tokens trains at half the speed."""
    if attention := wanted or ("eager" if device.type == "cpu" else None):
        model.set_attn_implementation(attention)
