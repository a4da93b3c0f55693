"""Image classifiers to train: new ones, and those of Transformers and timm for other classes and sizes."""

import inspect
import statistics
from dataclasses import replace

import torch
import transformers
from transformers import AutoModelForImageClassification, ViTImageProcessor

from ...common.decoding import CorruptImageError, decode_image
from ...common.loading import load_image_processor
from ...common.views import ImageFormat
from ...configuration.configuration_base import FrugalViTConfig, pair, set_image_size
from ...configuration.configuration_vit_impulse_init import ViTImpulseInitConfig
from ...modeling.context_broadcast_hosts import insert_context_broadcast
from ...modeling.hosts.timm import TIMM
from ...modeling.hosts.transformers import has_positions, resize_positions_
from ...modeling.hub import image_processor_config
from ...modeling.reference_initialization import REFERENCE
from ..options.train import LearningArguments, ModelArguments
from .arguments import write_values
from .models import (
    configure_start,
    initialize,
    load_checkpoint,
    new_config,
    new_model,
    read_config,
    set_drop_path,
)


logger = transformers.utils.logging.get_logger(__name__)
# What is trained where no model is named: a variant of `ViTImpulseInitConfig` for small images, up to so many pixels
# with larger patches, and one for those beyond.
SMALL_VARIANT, LARGE_VARIANT, LARGEST_SMALL = "vit-tiny-h3-32", "vit-tiny-h3-224", 128
# Images that are looked at for that.
FIRST_IMAGES = 16
# What `--model` should be, for messages.
KIND = "an image classifier to go on from"


def typical_pixels(images) -> int:
    """The median of the shorter sides of a data set's first images.

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


def choose_variant(arguments: ModelArguments, pixels: int) -> str:
    """Choose a ViT-T for images of so many pixels, with 256 tokens, or 196 for large images, and return its name.

    It is written into `arguments`: the model of Zheng et al. if its attention is to be initialized, otherwise
    Transformers' ViT of the same sizes.
    """
    small = pixels <= LARGEST_SMALL
    variant = SMALL_VARIANT if small else LARGE_VARIANT
    config = ViTImpulseInitConfig.from_variant(variant)
    names = ("image_size", "patch_size", "hidden_size", "num_attention_heads")
    fields = {name: getattr(config, name) for name in names}
    if small:
        # The number of patches stays; each has more pixels.
        factor = max(round(pixels / config.image_size), 1)
        fields |= {"image_size": factor * config.image_size, "patch_size": factor * config.patch_size}
    if arguments.initialization in ("default", REFERENCE):
        arguments.model_type, fields["intermediate_size"] = "vit", 4 * config.hidden_size
    else:
        arguments.model_type, fields["resize_size"] = ViTImpulseInitConfig.model_type, config.resize_size
    arguments.config_overrides = write_values(fields)
    return variant


def build_model(arguments: ModelArguments, learning: LearningArguments, names: list[str], seed: int = 0):
    """Return the classifier for these class names, in float32, and its image processor.

    `seed` is that of fresh weights of this package's families; the weights of other models are drawn by PyTorch's
    random numbers as they are.
    """
    model, processor = load_or_create(arguments, learning, names, seed)
    if arguments.context_broadcast:
        report = insert_context_broadcast(
            model,
            arguments.context_broadcast,
            arguments.context_broadcast_position,
            scale_init=arguments.context_broadcast_scale_init,
            blend=arguments.context_broadcast_blend,
        )
        if arguments.model and report.changes_outputs:
            logger.warning(
                f"--context-broadcast {arguments.context_broadcast} changes what {arguments.model} computes, so that "
                "fine-tuning begins below it; --context-broadcast-blend begins where it was."
            )
    return model, processor


def load_or_create(arguments: ModelArguments, learning: LearningArguments, names: list[str], seed: int = 0):
    """Return a pretrained or a new model, before Context Broadcasting is inserted, and its image processor."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    if arguments.model:
        # Configurations of timm's models keep their own count of classes, unless it is given.
        config = read_config(arguments.model, KIND, arguments.trust_remote_code, num_labels=len(names), **labels)
        if config.model_type == TIMM:
            prepare_timm_config(config)
        set_drop_path(config, learning.drop_path)
        model_args = getattr(config, "model_args", None)
        if config.model_type == TIMM and arguments.train_image_size:
            # For training alone, so that it is not saved.
            config.model_args = model_args | {"dynamic_img_size": True}
        try:
            model = load_checkpoint(
                *(AutoModelForImageClassification, arguments.model, config, KIND),
                trust_remote_code=arguments.trust_remote_code,
            )
        except ValueError as failure:
            error = failure.__cause__
            if config.model_type != TIMM or not isinstance(error, TypeError):
                raise
            # Architectures of timm differ in what they can be made with.
            raise ValueError(
                f"--model {arguments.model}: timm does not make a {config.architecture} with {config.model_args} "
                f"({' '.join(str(error).split())}). Leave out --drop-path and --train-image-size if they are in there."
            ) from error
        processor = load_image_processor(arguments.model, arguments.trust_remote_code, KIND)
        if config.model_type == TIMM:
            model.config.model_args = model_args
            processor = finish_timm_model(model, processor, arguments)
        elif arguments.image_size:
            if has_positions(model):
                resize_positions_(model, arguments.image_size)
            else:
                check_takes(model, arguments.image_size, "--image-size")
                # Elsewhere the size may be that of weights.
                if isinstance(model.config, FrugalViTConfig):
                    set_image_size(model.config, arguments.image_size)
            resize_by(processor, arguments.image_size)
        return model, processor

    config = new_config(arguments.model_type or "vit", arguments.config_overrides, learning.drop_path, **labels)
    is_configured = configure_start(config, arguments.initialization, arguments.initialization_options, seed)
    if hasattr(config, "image_mean"):
        config.image_mean, config.image_std = arguments.image_mean, arguments.image_std
        values = image_processor_config(config)
        processor = getattr(transformers, values.pop("image_processor_type"))(**values)
    else:
        height, width = image_size(config, arguments)
        size = {"height": height, "width": width}
        processor = ViTImageProcessor(size=size, image_mean=arguments.image_mean, image_std=arguments.image_std)
    model = new_model(AutoModelForImageClassification, config)
    if not is_configured:
        initialize(model, arguments.initialization, arguments.initialization_options)
    return model, processor


def prepare_timm_config(config):
    """Remove from a timm model's configuration the classes that timm notes besides the number of labels."""
    for name in ("label_names", "label_descriptions"):
        vars(config).pop(name, None)
    config.model_args = {name: value for name, value in (config.model_args or {}).items() if name != "num_classes"}


def finish_timm_model(model, processor, arguments: ModelArguments):
    """Complete a timm model that was loaded for other classes: give it a pooling if it has none, and positions for
    images of `--image-size`. Return its image processor.

    Raises:
        ValueError: if the model cannot have a pooling, or images of that size.
    """
    config, host = model.config, model.timm_model
    if getattr(host, "global_pool", None) == "":
        if getattr(host, "cls_token", None) is None:
            raise ValueError(
                f"--model {arguments.model}, a {config.architecture}, neither pools its tokens nor has [CLS], so that "
                "a classifier has nothing to read. Save it with a pooling, for example global_pool='avg'."
            )
        host.global_pool = config.model_args["global_pool"] = "token"
    if arguments.image_size:
        size = (arguments.image_size,) * 2
        if hasattr(host, "set_input_size"):
            patches = getattr(getattr(host, "patch_embed", None), "patch_size", ())
            if any(arguments.image_size % patch for patch in patches):
                raise ValueError(f"Images of {arguments.image_size} pixels do not divide into patches of {patches}.")
            host.set_input_size(img_size=size)
            config.model_args["img_size"] = list(size)
        config.pretrained_cfg = config.pretrained_cfg | {"input_size": [3, *size]}
        processor = type(processor)(config.pretrained_cfg, architecture=config.architecture)
    return processor


def resize_by(processor, pixels: int):
    """Let an image processor make square images of `pixels` x `pixels`; a center crop shows as much as it did."""
    square = {"height": pixels, "width": pixels}
    if getattr(processor, "do_center_crop", False):
        factor = pixels / min(dict(processor.crop_size).values())
        processor.size = {name: round(factor * value) for name, value in dict(processor.size).items()}
        processor.crop_size = square
    elif "shortest_edge" in dict(processor.size):
        # ConvNeXt's, which crops a share of what it resizes.
        processor.size = {"shortest_edge": pixels}
    else:
        processor.size = square


def image_size(config, arguments: ModelArguments) -> tuple[int, int]:
    """Height and width in pixels of the images that a configuration, or else `--image-size`, asks for."""
    size = getattr(config, "image_size", None) or arguments.image_size
    if size is None:
        raise ValueError(f"{config.model_type} models take images of any size; say which with --image-size.")
    return pair(size)


def format_in_training(model, image_format: ImageFormat, pixels: int | None) -> tuple[ImageFormat, dict]:
    """Return the format of images of `--train-image-size`, and the arguments of the model's forward pass for them.

    Raises:
        ValueError: if the model takes no images of that size.
    """
    if pixels is None:
        return image_format, {}
    options = {}
    if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        options["interpolate_pos_encoding"] = True
    check_takes(model, pixels, "--train-image-size", **options)
    return replace(image_format, size=(pixels, pixels)), options


def check_takes(model, pixels: int, option: str, **options):
    """Raise a ValueError that names an option of the command unless a model takes images of `pixels` x `pixels`, with
    `options` of its forward pass."""
    try:
        with torch.no_grad():
            model(pixel_values=torch.zeros(2, 3, pixels, pixels), **options)
    # Models fail in more ways than can be listed.
    except Exception as error:
        raise ValueError(
            f"{option} {pixels}: a {type(model).__name__} does not take images of that size "
            f"({' '.join(str(error).split())[:200]})."
        ) from error
