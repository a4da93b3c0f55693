"""Load models for inference by task, and choose a device and a precision. Raise an error if a model has missing or
unused weights."""

import functools
import inspect
import os
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten

import torch
import transformers
from accelerate.utils import is_bf16_available
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForSemanticSegmentation,
    AutoProcessor,
    PreTrainedConfig,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..configuration.configuration_base import pair
from ..modeling import modeling_patch_sparseformer, modeling_sparseformer, modeling_sparseformer_vlm
from ..modeling.context_broadcast_hosts import load_context_broadcast
from .choices import OPEN_CLIP
from .files import split_revision
from .text import shortened


# `model_type` of timm's models in Transformers.
TIMM = "timm_wrapper"
# Training on a CPU uses bfloat16 only if matrix products in bfloat16 have a speedup of more than this factor over
# float32. The speedup of all other operations is lower.
WORTHWHILE = 2
# Model types of VLMs whose projector accepts any number of tokens.
SEQUENCE_VLMS = ("llava", "paligemma")
# Model types of VLMs whose projector requires a grid of patches. The processors of these VLMs may cut images into
# tiles.
GRID_VLMS = ("gemma3", "llava_onevision")
# Modules that are not needed for image embeddings: parts for pretraining, and the pooler on top of [CLS].
UNUSED_BY_EMBEDDINGS = frozenset({"pooler", "decoder", "mask_token"})
# Errors that Transformers, timm, open_clip and PyTorch raise for wrong folders, names, configurations and weights.
# Errors of other types, such as TypeError, are bugs and keep their traceback.
LOADING_ERRORS = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    StrictDataclassError,
    SafetensorError,
    UnpicklingError,
)


@dataclass(frozen=True)
class Task:
    """Settings for loading the models of a task.

    Args:
        kind (`str`): Expected kind of model, with an article, for messages.
        choose_class (`Callable`): Returns the model class for a configuration. Raises a ValueError if the
            configuration is of another kind of model.
        optional_weights (`frozenset[str]`): Names of modules whose weights may be missing or left over.
        processor_class (`type` or `None`): Auto class of the model's processor, or `None` to load no processor.
        needs_rgb (`bool`): Whether to refuse models without three input channels. Image files are read as RGB.
    """

    kind: str
    choose_class: Callable[[PreTrainedConfig], type]
    optional_weights: frozenset[str] = frozenset()
    processor_class: type | None = AutoImageProcessor
    needs_rgb: bool = True


def vision_class(config: PreTrainedConfig) -> type:
    """Return the model class for a vision transformer's configuration. For backbones and for models for pretraining,
    return the base model's class. For other models, return the class in `config.architectures`. If neither
    Transformers nor this package has that class, return `AutoModelForImageClassification`, or the base model's class
    if the model type has no classifier."""
    architecture = (config.architectures or [""])[0]
    if config.model_type == TIMM:
        # In configurations that timm wrote, `architectures` contains no class of Transformers.
        headless = architecture == "TimmWrapperModel" or not config.num_labels
        return transformers.TimmWrapperModel if headless else transformers.TimmWrapperForImageClassification
    base_model = transformers.MODEL_MAPPING.get(type(config), AutoModel)
    if architecture.endswith(("ForPreTraining", "ForMaskedImageModeling", "Backbone")):
        return base_model
    if architecture and not architecture.endswith("ForImageClassification"):
        for module in (modeling_sparseformer, modeling_patch_sparseformer, modeling_sparseformer_vlm, transformers):
            if hasattr(module, architecture):
                return getattr(module, architecture)
    is_classifier = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if is_classifier or "AutoModelForImageClassification" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForImageClassification
    return base_model


def clip_class(config: PreTrainedConfig) -> type:
    if not hasattr(config, "text_config") or not hasattr(config, "vision_config"):
        raise ValueError(
            f"{config.name_or_path!r} is a {config.model_type}, expected a CLIP or SigLIP, with both sides."
        )
    return AutoModel


# The keys are names of tasks of Transformers' pipelines.
TASKS = {
    "image-classification": Task("an image classifier", lambda _: AutoModelForImageClassification),
    # Vision transformers with or without classifier, the vision model of a CLIP, or the vision tower of a LLaVA, also
    # after a swap.
    "image-feature-extraction": Task("a vision transformer", vision_class, UNUSED_BY_EMBEDDINGS),
    "image-segmentation": Task("a semantic segmentation model", lambda _: AutoModelForSemanticSegmentation),
    "zero-shot-image-classification": Task("a CLIP", clip_class),
    "image-text-to-text": Task("a LLaVA", lambda _: AutoModelForImageTextToText, processor_class=AutoProcessor),
}


def load_model(
    name: str | os.PathLike,
    task: str | Task,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    *,
    model_types: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    device_map: str | None = None,
) -> tuple[nn.Module, object]:
    """Load a model and its processor for inference.

    Args:
        name (`str` or `os.PathLike`):
            Folder that `save_pretrained` wrote, name of a model that ships with the package, or hub id (also
            `owner/name@revision`). The task "image-feature-extraction" also accepts `open_clip:MODEL:PRETRAINED`,
            `open_clip:hf-hub:ID` and `open_clip:local-dir:FOLDER`.
        task (`str` or `Task`): A key of `TASKS`.
        device (`str` or `torch.device`, *optional*): Default: an accelerator if there is one, otherwise the CPU.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run code that comes with the model.
        model_types (sequence of `str`, *optional*): Accepted values of `config.model_type`. Default: all values.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Data type of the weights.
        quantize (`str`, *optional*): Quantization of a VLM's language model by bitsandbytes, `"4bit"` or `"8bit"`.
        device_map (`str`, *optional*): How Accelerate distributes the weights over devices. It replaces `device`.

    Returns:
        The model in evaluation mode and its processor, which is `None` for tasks without a processor.

    Raises:
        ValueError: If the model cannot be loaded, is of another kind, or has missing or unused weights.
    """
    given = os.fspath(name)
    if isinstance(task, str):
        task = TASKS[task]
    if task is TASKS["image-feature-extraction"] and given.startswith(OPEN_CLIP):
        return _load_open_clip(given.removeprefix(OPEN_CLIP), device)
    device = choose_device(device)
    config = load_pretrained(AutoConfig, given, task.kind, trust_remote_code)
    if model_types and config.model_type not in model_types:
        raise ValueError(f"{given!r} is a {config.model_type}, expected one of {', '.join(model_types)}.")
    model_class = task.choose_class(config)
    options = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    is_placed = bool(device_map or quantize)
    if is_placed:
        options["device_map"] = device_map or {"": device}
    if quantize:
        # The vision tower, the projector and the language model's head are not quantized.
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=quantize == "4bit",
            load_in_8bit=quantize == "8bit",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_type="nf4",
            llm_int8_skip_modules=[".*vision_tower", ".*multi_modal_projector", "lm_head"],
        )
    if "pooler" in task.optional_weights and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
        options["add_pooling_layer"] = False
    if model_args := getattr(config, "model_args", None):
        # The number of classes is removed from `model_args`, because Transformers would pass the number to timm twice.
        options["model_args"] = {key: value for key, value in model_args.items() if key != "num_classes"}
    model, report = load_pretrained(model_class, given, task.kind, trust_remote_code, **options)
    problems = {
        "its checkpoint lacks": report["missing_keys"],
        "its model class does not use": report["unexpected_keys"],
        "its checkpoint has other shapes of": {key for key, *_ in report["mismatched_keys"]},
    }
    for problem, found in problems.items():
        if keys := sorted(key for key in found if task.optional_weights.isdisjoint(key.split("."))):
            raise ValueError(f"{given!r} is no complete {type(model).__name__}: {problem} {shortened(keys)}.")
    if not is_placed:
        model.to(device)
    model.eval()
    channels = getattr(getattr(model.config, "vision_config", model.config), "num_channels", 3)
    if task.needs_rgb and channels != 3:
        raise ValueError(f"{given!r} takes images of {channels} channels; files are read as RGB.")
    if task.processor_class is None:
        return model, None
    processor = load_pretrained(task.processor_class, given, task.kind, trust_remote_code)
    tower = getattr(getattr(model, "model", None), "vision_tower", None)
    if task is not TASKS["image-feature-extraction"] or tower is None:
        return model, processor
    is_swapped = isinstance(tower, modeling_sparseformer_vlm.SparseFormerGridTower)
    if is_swapped or model.config.model_type in GRID_VLMS:
        processor = processor_of_tower(model, processor)
    return tower.tower if is_swapped else tower, processor


def processor_of_tower(model: nn.Module, processor):
    """Return an image processor for a VLM's vision tower. The VLM's own `processor` may cut images into tiles."""
    height, width = pair(model.config.vision_config.image_size)
    fields = ("image_mean", "image_std", "rescale_factor", "resample")
    settings = {name: getattr(processor, name) for name in fields}
    if settings["resample"] == Image.Resampling.LANCZOS:
        # Bicubic replaces Lanczos, because torchvision, which training uses for resizing, has no Lanczos filter.
        settings["resample"] = Image.Resampling.BICUBIC
    return transformers.ViTImageProcessor(size={"height": height, "width": width}, **settings)


def _load_open_clip(name: str, device: str | torch.device | None) -> tuple[nn.Module, object]:
    import open_clip

    from ..modeling.open_clip_adapter import open_clip_image_processor

    has_weights = name.startswith(("hf-hub:", "local-dir:"))
    model_name, _, pretrained = (name, "", None) if has_weights else name.partition(":")
    device = choose_device(device)
    for path in Path(name.removeprefix("local-dir:")).glob("*") if has_weights else ():
        if path.is_fifo():
            raise ValueError(f"{str(path)!r} is a pipe, expected a file.")
    try:
        model = open_clip.create_model(model_name, pretrained=pretrained, require_pretrained=True, device=device)
    except LOADING_ERRORS as error:
        kind = "an open_clip model, open_clip:MODEL:PRETRAINED or open_clip:hf-hub:ID"
        raise loading_error(error, f"{OPEN_CLIP}{name}", kind) from error
    return model.float().eval(), open_clip_image_processor(model)


def load_pretrained(
    loader: type, name: str | os.PathLike, kind: str = "a model", trust_remote_code: bool = False, **options
):
    """Return `loader.from_pretrained(name, **options)`. If `loader` also returns a report of missing, unexpected and
    mismatched weights (`output_loading_info`), Context Broadcasting is inserted into a model that was saved with it.

    Args:
        loader (`type`): A class or an Auto class of configurations, models, processors or tokenizers.
        name (`str` or `os.PathLike`): See `load_model`.
        kind (`str`, *optional*, defaults to `"a model"`): Expected kind of model, with an article, for messages.
        trust_remote_code (`bool`, *optional*, defaults to `False`): See `load_model`.
        options: Further arguments of `from_pretrained`.

    Raises:
        ValueError: If loading fails with one of `LOADING_ERRORS`. The message is one line.
    """
    found, revision = split_revision(name, must_exist=True)
    if loader.__name__.startswith("Auto"):
        # `trust_remote_code` is only an argument of Auto classes. Without it, they would ask on stdin.
        options["trust_remote_code"] = trust_remote_code
    verbosity = logging.get_verbosity()
    shows_progress = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        loaded = loader.from_pretrained(found, **revision, **options)
        if options.get("output_loading_info"):
            model, report = loaded
            if getattr(model.config, "context_broadcast", None):
                load_context_broadcast(model, found, report)
        return loaded
    except LOADING_ERRORS as error:
        raise loading_error(error, name, kind) from error
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def loading_error(error: Exception, name: str | os.PathLike, kind: str) -> ValueError:
    """Convert one of `LOADING_ERRORS` to an error whose message is one line and contains the model's name."""
    message = f"{type(error).__name__}: {shorten(str(error), 300)}"
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        # The folder may be the output of an interrupted training, with checkpoints but no model yet.
        hint = get_last_checkpoint(folder) or "a folder that `save_pretrained` wrote"
        message = f"it has no config.json. Give {hint}."
        if (folder / "adapter_config.json").is_file():
            message = "it is an adapter of peft; merge it first: merge_and_unload, save_pretrained."
    elif "trust_remote_code" in str(error):
        message = "it brings its own code. Read that, and if you trust it, pass trust_remote_code."
    elif isinstance(error, OSError) and not folder.exists():
        message = f"there is no such folder here, and of the hub: {shorten(str(error), 300)}"
    return ValueError(f"Cannot load {os.fspath(name)!r} as {kind}: {message}")


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device `name`. The default is an accelerator if there is one, otherwise the CPU.

    Raises:
        ValueError: If the device cannot be used.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"The device '{name}' cannot be used here ({shorten(str(error), 300)}).") from error
    return device


@functools.cache
def bfloat16_is_fast() -> bool:
    """Measure whether the CPU multiplies bfloat16 matrices more than `WORTHWHILE` times as fast as float32 matrices.
    The speed cannot be inferred from the CPU's instruction set."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # A large product takes seconds if bfloat16 is emulated, so a small product is measured first.
    for size, least in ((128, 0.5), (512, WORTHWHILE)):
        seconds = {}
        for dtype in (torch.float32, torch.bfloat16):
            matrix = torch.ones(size, size, dtype=dtype)
            products = timeit.repeat("matrix @ matrix", timer=time.thread_time, repeat=6, number=1, globals=locals())
            seconds[dtype] = min(products)
        is_fast = seconds[torch.float32] > least * seconds[torch.bfloat16]
        if not is_fast:
            break
    torch.set_num_threads(threads)
    return is_fast


def choose_mixed_precision(device: torch.device) -> str:
    """Return `"bf16"` if the device computes fast in bfloat16, otherwise `"no"`."""
    if device.type == "cpu":
        fast = bfloat16_is_fast()
    elif device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = is_bf16_available()
    return "bf16" if fast else "no"
