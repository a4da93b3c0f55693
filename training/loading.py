"""Models for the commands: loaded whole or refused, on the device that is there."""

import inspect
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

import torch
import transformers
from PIL import Image
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..configuration.configuration_base import pair
from ..modeling import modeling_patch_sparseformer, modeling_sparseformer
from .choices import OPEN_CLIP
from .files import IN_A_CLONE, checkpoint_path, shipped_checkpoints
from .text import shortened


# Transformers' model type for timm's models.
TIMM = "timm_wrapper"
# VLMs with a grid of patches, whose processors may cut images into tiles.
GRID_VLMS = ("gemma3", "llava_onevision")
# Parts that no embedding of images reads: what pretraining needs, and an extra layer after [CLS].
_UNREAD = frozenset({"pooler", "decoder", "mask_token"})


def choose_device(name: str | None = None) -> torch.device:
    """Return the device of a name, by default an accelerator if there is one; raise a ValueError if there is none."""
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"The device {name!r} cannot be used here ({shorten(str(error), 300)}).") from error
    return device


def vision_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the vision configuration of a CLIP or a LLaVA; other configurations as they are."""
    vision = getattr(config, "vision_config", None)
    return vision if isinstance(vision, PreTrainedConfig) else config


def split_revision(name: str | os.PathLike) -> tuple[str, dict[str, str]]:
    """Return a model's folder (of one that ships, by its name) or hub id, and the revision of `owner/name@revision`
    as an argument of `from_pretrained`."""
    name = os.fspath(name)
    if (place := Path(name).expanduser()).exists():
        return str(place), {}
    if name in (*shipped_checkpoints(), *IN_A_CLONE):
        return str(checkpoint_path(name)), {}
    hub_id, at, revision = name.partition("@")
    if at and not revision:
        raise ValueError(f"{name!r} names no revision; expected owner/name@revision.")
    return hub_id, {"revision": revision} if at else {}


def load_image_classifier(
    name: str | os.PathLike, device: str | torch.device | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, object]:
    """Load a classifier for inference, in float32, and its image processor; arguments and errors as in
    `load_pretrained`."""
    kind = "an image classifier"
    return load_with_image_processor(name, device, trust_remote_code, kind, lambda _: AutoModelForImageClassification)


def load_vision_model(
    name: str | os.PathLike, device: str | torch.device | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, object]:
    """Load a vision transformer or a SparseFormer for inference, in float32, and its image processor; arguments and
    errors as in `load_pretrained`.

    `name` may be of a vision transformer with or without classifier, a CLIP, a SigLIP or a LLaVA (for its vision
    tower), of Transformers or timm; or `open_clip:MODEL:PRETRAINED`, `open_clip:hf-hub:ID` or
    `open_clip:local-dir:FOLDER`. Weights that pretraining alone needs, and a pooler's, may be missing or left over.
    """
    if os.fspath(name).startswith(OPEN_CLIP):
        return _load_open_clip(os.fspath(name).removeprefix(OPEN_CLIP), device)
    kind = "a vision transformer"
    model, image_processor = load_with_image_processor(name, device, trust_remote_code, kind, _vision_class, _UNREAD)
    tower = getattr(getattr(model, "model", None), "vision_tower", None)
    if tower is not None and model.config.model_type in GRID_VLMS:
        # One tile of an image, of which these models cut several.
        height, width = pair(model.config.vision_config.image_size)
        fields = ("image_mean", "image_std", "rescale_factor", "resample")
        known = {name: getattr(image_processor, name) for name in fields}
        if known["resample"] == Image.Resampling.LANCZOS:
            # Training does not follow Lanczos; tiles hardly differ.
            known["resample"] = Image.Resampling.BICUBIC
        image_processor = transformers.ViTImageProcessor(size={"height": height, "width": width}, **known)
    return model if tower is None else tower, image_processor


def _vision_class(config: PreTrainedConfig) -> type:
    """Return the class that a configuration was saved with, if Transformers or this package has it, or the base model
    of one for pretraining or a backbone; else a classifier if there is one for such a configuration."""
    architecture = (config.architectures or [""])[0]
    if config.model_type == TIMM:
        # timm's own folders name no class.
        headless = architecture == "TimmWrapperModel" or not config.num_labels
        return transformers.TimmWrapperModel if headless else transformers.TimmWrapperForImageClassification
    base_model = transformers.MODEL_MAPPING.get(type(config), transformers.AutoModel)
    if architecture.endswith(("ForPreTraining", "ForMaskedImageModeling", "Backbone")):
        return base_model
    if architecture and not architecture.endswith("ForImageClassification"):
        for module in (modeling_sparseformer, modeling_patch_sparseformer, transformers):
            if hasattr(module, architecture):
                return getattr(module, architecture)
    is_classifier = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if is_classifier or "AutoModelForImageClassification" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForImageClassification
    return base_model


def load_llava(
    name: str | os.PathLike,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    device_map: str | None = None,
    grids: bool = False,
) -> tuple[PreTrainedModel, transformers.ProcessorMixin]:
    """Load a LLaVA 1.5, a PaliGemma or, with `grids`, another VLM whose vision tower can be replaced, and its
    processor; other arguments and errors as in `load_pretrained`."""
    types = ("llava", "paligemma", *(GRID_VLMS if grids else ()))

    def choose_class(config: PreTrainedConfig) -> type:
        if config.model_type not in types:
            raise ValueError(f"it is a {config.model_type}, expected one of {', '.join(types)}")
        return transformers.AutoModelForImageTextToText

    options = {"dtype": dtype, "quantize": quantize, "device_map": device_map}
    model = load_pretrained(name, device, False, "a LLaVA", choose_class, **options)
    hub_id, revision = split_revision(name)
    with loading_errors(name, "a LLaVA"):
        return model, transformers.AutoProcessor.from_pretrained(hub_id, **revision)


def load_with_image_processor(
    name: str | os.PathLike,
    device: str | torch.device | None,
    trust_remote_code: bool,
    kind: str,
    choose_class: Callable[[PreTrainedConfig], type],
    unread: frozenset[str] = frozenset(),
) -> tuple[PreTrainedModel, object]:
    """Load a model by `load_pretrained`, and its image processor; raise a ValueError if it is not for RGB images."""
    model = load_pretrained(name, device, trust_remote_code, kind, choose_class, unread)
    if (channels := getattr(vision_config_of(model.config), "num_channels", 3)) != 3:
        raise ValueError(f"{os.fspath(name)!r} takes images of {channels} channels; files are read as RGB.")
    return model, load_image_processor(name, trust_remote_code, kind)


def load_image_processor(name: str | os.PathLike, trust_remote_code: bool, kind: str):
    """Load the image processor of a model; arguments and errors as in `load_pretrained`."""
    hub_id, revision = split_revision(name)
    with loading_errors(name, kind):
        return AutoImageProcessor.from_pretrained(hub_id, trust_remote_code=trust_remote_code, **revision)


def load_pretrained(
    name: str | os.PathLike,
    device: str | torch.device | None,
    trust_remote_code: bool,
    kind: str,
    choose_class: Callable[[PreTrainedConfig], type],
    unread: frozenset[str] = frozenset(),
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Load a model of Transformers or of this package for inference; raise a ValueError if weights are missing.

    Args:
        name (`str` or `os.PathLike`): Folder that `save_pretrained` wrote, or a hub id, see `split_revision`.
        device, trust_remote_code, device_map: See `choose_device` and `from_pretrained`.
        kind (`str`): Expected kind of model, with an article, for messages.
        choose_class (`Callable`): Returns the class to load, given the configuration.
        unread (`frozenset[str]`, *optional*): Parts whose weights may be missing; a pooler is left out.
        quantize (`str`, *optional*): `"4bit"` or `"8bit"`, by bitsandbytes, for a language model.
    """
    given = os.fspath(name)
    name, revision = split_revision(name)
    device = choose_device(device and str(device))
    placed = bool(device_map or quantize)
    options = {"device_map": device_map or {"": device}} if placed else {}
    if quantize:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=quantize == "4bit",
            load_in_8bit=quantize == "8bit",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_type="nf4",
            # Only the language model.
            llm_int8_skip_modules=[".*vision_tower", ".*multi_modal_projector", "lm_head"],
        )
    with loading_errors(given, kind):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **revision)
        model_class = choose_class(config)
        if model_class.__name__.startswith("Auto"):
            # Classes of Transformers and of this package take no code from elsewhere.
            options["trust_remote_code"] = trust_remote_code
        if "pooler" in unread and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
            options["add_pooling_layer"] = False
        if model_args := getattr(config, "model_args", None):
            # timm notes the number of classes there, too; Transformers' wrapper would pass it twice.
            options["model_args"] = {key: value for key, value in model_args.items() if key != "num_classes"}
        # Other shapes are refused below, by name.
        options |= {"ignore_mismatched_sizes": True, "output_loading_info": True, **revision}
        model, report = model_class.from_pretrained(name, dtype=dtype, **options)
        if isinstance(getattr(config, "context_broadcast", None), dict):
            from ..modeling.context_broadcast_hosts import load_context_broadcast

            load_context_broadcast(model, name, report)
    check_complete(given, model, report, unread)
    return model.eval() if placed else model.eval().to(device)


def check_complete(
    given: str | os.PathLike, model: PreTrainedModel, report: dict, unread: frozenset[str] = frozenset()
):
    """Raise a ValueError if weights are missing, left over or of other shapes in the `report` of `from_pretrained`."""
    for problem, found in (
        ("checkpoint lacks", report["missing_keys"]),
        ("model class does not know", report["unexpected_keys"]),
        ("checkpoint has other shapes of", {key for key, *_ in report["mismatched_keys"]}),
    ):
        if keys := sorted(key for key in found if unread.isdisjoint(key.split("."))):
            raise ValueError(f"{given!r} is no complete {type(model).__name__}: its {problem} {shortened(keys)}.")


@contextmanager
def loading_errors(name: str | os.PathLike, kind: str):
    """Turn errors in loading a model, or a part of it, into a `ValueError` of one line, and silence Transformers."""
    verbosity = logging.get_verbosity()
    shows_progress = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    # Weights, configurations and remote code fail in more ways than can be listed.
    except Exception as error:
        message = f"{type(error).__name__}: {shorten(str(error), 300)}"
        folder = Path(name).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file():
            # A training that was stopped has written checkpoints alone.
            hint = get_last_checkpoint(folder) or "a folder that `save_pretrained` wrote"
            message = f"it has no config.json. Give {hint}."
            if (folder / "adapter_config.json").is_file():
                message = "it is an adapter of peft; merge it first: merge_and_unload, save_pretrained."
        elif "trust_remote_code" in str(error):
            message = "it brings its own code. Read that, and if you trust it, pass --trust-remote-code."
        elif isinstance(error, OSError) and not folder.exists():
            message = f"there is no such folder here, and of the hub: {shorten(str(error), 300)}"
        raise ValueError(f"Cannot load {os.fspath(name)!r} as {kind}: {message}") from error
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def _load_open_clip(name: str, device) -> tuple[nn.Module, object]:
    import open_clip

    from ..modeling.open_clip_adapter import open_clip_image_processor

    has_weights = name.startswith(("hf-hub:", "local-dir:"))
    model_name, _, pretrained = (name, "", None) if has_weights else name.partition(":")
    device = choose_device(device and str(device))
    for path in Path(name.removeprefix("local-dir:")).glob("*") if has_weights else ():
        if path.is_fifo():
            raise ValueError(f"{str(path)!r} is a pipe, which is not waited for; expected a file.")
    with loading_errors(f"{OPEN_CLIP}{name}", "an open_clip model, open_clip:MODEL:PRETRAINED or open_clip:hf-hub:ID"):
        model = open_clip.create_model(model_name, pretrained=pretrained, require_pretrained=True, device=device)
    return model.float().eval(), open_clip_image_processor(model)
