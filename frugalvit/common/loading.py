"""Models for the commands: loaded whole or refused, on the device that is there."""

import inspect
import json
import math
import os
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    MODEL_FOR_BACKBONE_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoProcessor,
    BitsAndBytesConfig,
    Gemma3ForConditionalGeneration,
    LlavaForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    PaliGemmaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
    ViTImageProcessor,
)
from transformers.utils import is_bitsandbytes_available, logging

from ..configuration.configuration_base import pair
from ..modeling import modeling_patch_sparseformer, modeling_sparseformer
from ..modeling.hosts.timm import TIMM
from ..modeling.open_clip_adapter import open_clip_image_processor
from .choices import OPEN_CLIP
from .exported import ExportedModule, is_exported
from .resources import locate_model


# A side of an image, or of what an image processor makes.
MOST_PIXELS = 4_096
# VLMs with a grid of patches, whose processors may cut images into tiles.
GRID_VLMS = {"gemma3": Gemma3ForConditionalGeneration, "llava_onevision": LlavaOnevisionForConditionalGeneration}
# Parts that no embedding of images reads: what pretraining needs, and an extra layer after [CLS].
_UNREAD = frozenset({"pooler", "decoder", "mask_token"})


def choose_device(name: str | None = None) -> torch.device:
    """Return the device of that name, or without a name an accelerator if there is one, else the CPU.

    Raises:
        ValueError: if this machine has no such device.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"The device {name!r} cannot be used here ({_one_line(error)}); expected one like 'cpu', 'cuda', 'cuda:1' "
            "or 'mps' that this machine has. Leave it out to have it chosen."
        ) from error
    return device


def split_revision(name: str | os.PathLike) -> tuple[str, dict[str, str]]:
    """The folder of a model, also of one that ships, by its name, or else its hub id; and its revision, as arguments
    of `from_pretrained`: `owner/name@revision` pins a branch, tag or commit.

    Raises:
        ValueError: if nothing follows the `@`, or a model of that name lies in a clone of the repository alone.
    """
    name = os.fspath(locate_model(name))
    if (place := Path(name).expanduser()).exists():
        return str(place), {}
    hub_id, at, revision = name.partition("@")
    if not at:
        return name, {}
    if not revision:
        raise ValueError(f"{name!r} names no revision; expected owner/name@revision.")
    return hub_id, {"revision": revision}


def load_image_classifier(
    name: str | os.PathLike,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    or_backbone: bool = False,
) -> tuple[PreTrainedModel, object]:
    """Load a model for inference, in float32, and its image processor.

    Args:
        name (`str` or `os.PathLike`): A folder that `save_pretrained` or `frugalvit export` wrote, or a hub id, see
            `split_revision`.
        device (`str` or `torch.device`, *optional*): Where to put it; see `choose_device`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run code that comes with the model.
        or_backbone (`bool`, *optional*, defaults to `False`): Take what was saved as a `SparseFormerBackbone`, too.

    Returns:
        `tuple`: The model and the image processor.

    Raises:
        ValueError: if there is no such model, it classifies nothing, weights are missing or left over, or a class has
            no name.
    """

    def choose_class(config: PreTrainedConfig) -> type:
        names = config.architectures or ()
        is_backbone = or_backbone and any(str(name).endswith("SparseFormerBackbone") for name in names)
        return MODEL_FOR_BACKBONE_MAPPING[type(config)] if is_backbone else AutoModelForImageClassification

    if is_exported(name):
        model = load_exported(name, device, trust_remote_code, "an image classifier", ["logits"])
        image_processor = load_image_processor(name, False, "an image classifier")
    else:
        kind = f"an image classifier{' or a SparseFormer backbone' * or_backbone}"
        model, image_processor = load_with_image_processor(name, device, trust_remote_code, kind, choose_class)
    labels = model.config.id2label
    if labels.keys() != {*range(len(labels))} or not all(isinstance(label, str) for label in labels.values()):
        raise ValueError(
            f"Cannot load {os.fspath(name)!r} as an image classifier: id2label in its config.json has no names of the "
            f"classes 0 to {len(labels) - 1}, one each."
        )
    return model, image_processor


def load_exported(
    name: str | os.PathLike,
    device: str | torch.device | None,
    trust_remote_code: bool,
    kind: str,
    outputs: list[str],
    part: str | None = None,
) -> ExportedModule:
    """Load a program that `frugalvit export` wrote.

    Args:
        name (`str` or `os.PathLike`): Its folder.
        device (`str` or `torch.device`, *optional*): The CPU, where it runs here.
        trust_remote_code (`bool`): Load programs that can run any code, those of torch.
        kind (`str`): Kind of model that is expected, for messages.
        outputs (`list[str]`): Outputs of which the program has to compute one at least.
        part (`str`, *optional*): The program, of several; the one that sees images if not given.

    Raises:
        ValueError: if it computes none of these, is asked to another device, is damaged or not trusted.
    """
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"The exported model {os.fspath(name)!r} runs on the CPU here, not on {str(device)!r}.")
    model = ExportedModule(name, part, trust_remote_code)
    if not {*outputs} & {*model.outputs}:
        raise ValueError(f"Cannot load {os.fspath(name)!r} as {kind}: it computes {', '.join(model.outputs)}.")
    return model


def load_vision_model(
    name: str | os.PathLike, device: str | torch.device | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, object]:
    """Load a vision transformer to bootstrap from or a SparseFormer to go on with, for inference, in float32, and its
    image processor.

    Parts that pretraining alone needs (a decoder, a mask token) and a pooler after [CLS] are left out: their weights
    may be missing or left over.

    Args:
        name (`str` or `os.PathLike`): A folder that `save_pretrained` or timm wrote or a hub id, of a vision
            transformer with or without classifier, a CLIP, a SigLIP, a SparseFormer or a LLaVA; or
            `open_clip:MODEL:PRETRAINED`, `open_clip:hf-hub:ID`, `open_clip:local-dir:FOLDER`, as open_clip names its
            models.
        device (`str` or `torch.device`, *optional*): Where to put it; see `choose_device`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run code that comes with the model.

    Returns:
        `tuple`: The model, of an open_clip model the whole, of a LLaVA the vision tower, and the image processor.

    Raises:
        ValueError: if there is no such model, or weights are missing or left over.
    """
    if os.fspath(name).startswith(OPEN_CLIP):
        return _load_open_clip(os.fspath(name).removeprefix(OPEN_CLIP), device)
    model, image_processor = load_with_image_processor(
        name, device, trust_remote_code, "a vision transformer", _vision_class, unread=_UNREAD
    )
    tower = getattr(getattr(model, "model", None), "vision_tower", None)
    if tower is None:
        return model, image_processor
    if model.config.model_type in GRID_VLMS:
        image_processor = _tile_processor(image_processor, model.config.vision_config)
    # A LLaVA's vision tower.
    return tower, image_processor


def _tile_processor(image_processor, config: PreTrainedConfig) -> ViTImageProcessor:
    """Return an image processor for the tower of a model that may cut images into tiles. It makes one tile of each."""
    height, width = pair(config.image_size)
    fields = ("do_convert_rgb", "do_normalize", "do_rescale", "image_mean", "image_std", "resample", "rescale_factor")
    known = {name: value for name in fields if (value := getattr(image_processor, name, None)) is not None}
    if known.get("resample") == Image.Resampling.LANCZOS:
        # Which training does not follow; tiles hardly differ.
        known["resample"] = Image.Resampling.BICUBIC
    return ViTImageProcessor(size={"height": height, "width": width}, **known)


def _vision_class(config: PreTrainedConfig) -> type:
    """The class that a configuration was saved with, if Transformers or this package has it, or the base model where
    that was for pretraining or a backbone; else a classifier where there is one for such a configuration."""
    architectures = config.architectures or ()
    if config.model_type == TIMM:
        # timm's own folders name no class.
        headless = "TimmWrapperModel" in architectures or not config.num_labels
        return transformers.TimmWrapperModel if headless else transformers.TimmWrapperForImageClassification
    for architecture in architectures:
        if architecture.endswith(("ForPreTraining", "ForMaskedImageModeling", "Backbone")):
            break
        for module in (modeling_sparseformer, modeling_patch_sparseformer, transformers):
            if hasattr(module, architecture) and not architecture.endswith("ForImageClassification"):
                return getattr(module, architecture)
    else:
        remote = getattr(config, "auto_map", None) or {}
        if type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING or "AutoModelForImageClassification" in remote:
            return AutoModelForImageClassification
    return MODEL_MAPPING.get(type(config), AutoModel)


def load_llava(
    name: str | os.PathLike,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    device_map: str | None = None,
    grids: bool = False,
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load a LLaVA in the style of 1.5, a PaliGemma or, with `grids`, another model with a vision tower that can be
    replaced, for inference, and its processor; other arguments and errors as in `load_pretrained`."""
    classes = {"llava": LlavaForConditionalGeneration, "paligemma": PaliGemmaForConditionalGeneration}
    if grids:
        classes |= GRID_VLMS

    def choose_class(config: PreTrainedConfig) -> type:
        if config.model_type not in classes:
            if config.model_type.startswith("sparseformer_"):
                raise ValueError("its tower is a SparseFormer already; give the model that this one was made from")
            raise ValueError(
                f"it is a {config.model_type}, expected a llava, in the style of LLaVA 1.5, or another of "
                f"{', '.join([*classes][1:])}"
            )
        return classes[config.model_type]

    model = load_pretrained(
        name, device, False, "a LLaVA", choose_class, dtype=dtype, quantize=quantize, device_map=device_map
    )
    hub_id, revision = split_revision(name)
    with one_error(name, "a LLaVA"):
        return model, AutoProcessor.from_pretrained(os.path.expanduser(hub_id), **revision)


def load_with_image_processor(
    name: str | os.PathLike,
    device: str | torch.device | None,
    trust_remote_code: bool,
    kind: str,
    choose_class: Callable[[PreTrainedConfig], type],
    unread: frozenset[str] = frozenset(),
) -> tuple[PreTrainedModel, object]:
    """`load_pretrained` and the model's image processor."""
    model = load_pretrained(name, device, trust_remote_code, kind, choose_class, unread)
    return model, load_image_processor(name, trust_remote_code, kind)


def load_image_processor(name: str | os.PathLike, trust_remote_code: bool, kind: str):
    """The image processor of a model, which has to take an image; arguments and errors as in `load_pretrained`."""
    hub_id, revision = split_revision(name)
    folder = Path(hub_id)
    files = [folder / file for file in ("preprocessor_config.json", "processor_config.json")]
    try:
        with one_error(name, kind):
            found = AutoImageProcessor.from_pretrained(hub_id, trust_remote_code=trust_remote_code, **revision)
    except ValueError as error:
        if folder.is_dir() and not any(file.exists() for file in files):
            raise ValueError(
                f"Cannot load {os.fspath(name)!r} as {kind}: without a preprocessor_config.json it does not say how "
                "its images are resized and normalized. Save the image processor of the model's family beside it."
            ) from error
        raise
    if problem := problem_with(found):
        raise ValueError(f"Cannot load {os.fspath(name)!r} as {kind}: {problem}.")
    return found


def problem_with(image_processor) -> str | None:
    """The reason why an image processor cannot prepare images, found by trying one; None if it can."""
    for attribute in ("size", "crop_size", "pad_size"):
        numbers = getattr(image_processor, attribute, None)
        try:
            numbers = [number for number in dict(numbers or {}).values() if number is not None]
        except (TypeError, ValueError):
            numbers = [numbers]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= MOST_PIXELS:
                return f"its image processor has the {attribute} {number!r}, expected 1 to {MOST_PIXELS:,} pixels"
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 61, 3), dtype=np.uint8))
    try:
        pixel_values = torch.as_tensor(np.asarray(image_processor(image, return_tensors="pt")["pixel_values"]))
    # As many ways to fail as there are processors.
    except Exception as error:
        return f"its image processor cannot prepare an image ({type(error).__name__}: {_one_line(error)})"
    if not pixel_values.isfinite().all():
        return "its image processor makes pixels that are not finite; check image_mean, image_std and rescale_factor"
    return None


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a folder's safetensors files, of which only the headers are read.

    Raises:
        ValueError: if a file is no safetensors file.
        PermissionError: if a file may not be read.
    """
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            # Of what may not be read, safetensors says that it is not there.
            path.open("rb").close()
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except PermissionError:
            raise
        except (SafetensorError, OSError) as error:
            raise ValueError(f"Cannot load {str(path)!r}: it holds no weights ({_one_line(error)}).") from error
    return shapes


def check_folder(folder: Path, kind: str):
    """Check that a folder holds a model whose configuration fits its weights, before a model of such a size is made.

    Each layer needs weights, and no width or number of tokens can be larger than all of them together. A path that is
    no folder is left to the hub.

    Raises:
        ValueError: if there is no model in the folder, its configuration cannot be read, or does not fit the weights.
    """
    if not folder.is_dir():
        return
    file = folder / "config.json"
    if not file.is_file():
        # What `Trainer` leaves where nobody has called `save_model`, and a run of ours before its first epoch's end.
        checkpoints = {path.parent for path in folder.glob("checkpoint-*/config.json")}
        if checkpoints:
            newest = max(checkpoints, key=lambda path: (len(path.name), path.name))
            hint = f"Its newest checkpoint has one: give {str(newest)!r}."
        elif (folder / "run.json").is_file():
            hint = "No epoch of this run is finished yet; the command that began it goes on with it."
        else:
            hint = "Give a folder that `save_pretrained` wrote."
        raise ValueError(f"There is no model in {str(folder)!r}: it has no config.json. {hint}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"Cannot load {str(folder)!r} as {kind}: its config.json is no JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ValueError(f"Cannot load {str(folder)!r} as {kind}: its config.json is no object of names and values.")
    shapes = tensor_shapes(folder)
    # Of other formats, what they hold is not known; no model has as much as this.
    tensors, values = (len(shapes), sum(map(math.prod, shapes.values()))) if shapes else (10_000, 10**9)

    def visit(fields: dict, where: str = ""):
        for name, value in fields.items():
            if isinstance(value, dict):
                visit(value, f"{where}{name}.")
            for number in value if isinstance(value, list) else [value]:
                if not isinstance(number, int) or isinstance(number, bool):
                    continue
                layers = re.search("layers$|blocks$|^depths?$", name)
                if layers or re.search("_size$|_sizes$|_dim$|_tokens$|_heads$|_points$|_channels$|_iterations$", name):
                    most = tensors if layers else max(values, MOST_PIXELS)
                    if number > most:
                        raise ValueError(
                            f"Cannot load {str(folder)!r} as {kind}: {where}{name} is {number:,} in config.json, and "
                            f"the weights have {tensors:,} tensors of {values:,} values in all."
                        )

    visit(config)


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
    """Load a model of Transformers or of this package for inference, whole or not at all.

    Args:
        name (`str` or `os.PathLike`): A folder that `save_pretrained` wrote, or a hub id, see `split_revision`.
        device (`str` or `torch.device`, *optional*): Where to put it; see `choose_device`.
        trust_remote_code (`bool`): Run code that comes with the model.
        kind (`str`): Kind of model that is expected, with an article, for messages.
        choose_class (`Callable`): The class to load it with, given its configuration.
        unread (`frozenset[str]`, *optional*): Parts, by name, that are not used: their weights may be missing or left
            over, and a pooler is left out where it can be.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Type of the weights.
        quantize (`str`, *optional*): `"4bit"` or `"8bit"`, the weights of a language model by bitsandbytes.
        device_map (`str`, *optional*): How Accelerate shares a model out among devices, for example `"auto"`, instead
            of `device`.

    Raises:
        ValueError: if there is no such model, it is of another kind, weights are missing or left over, or bitsandbytes
            is not installed.
    """
    given, (name, revision) = os.fspath(name), split_revision(name)
    folder = Path(name)
    if folder.is_file():
        raise ValueError(f"The model {given!r} is a file; give the folder that holds its config.json.")
    if not folder.is_dir() and (name.startswith((".", "~", os.sep)) or name.count("/") != 1 or folder.parent.is_dir()):
        raise ValueError(f"There is no folder {given!r}; give a folder that `save_pretrained` wrote, or a hub id.")

    device = choose_device(None if device is None else str(device))
    check_folder(folder, kind)
    placement = {"device_map": device_map} if device_map else {}
    if quantize:
        placement = {"device_map": device_map or {"": device}, "quantization_config": _quantization(quantize, dtype)}
    with one_error(given, kind):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **revision)
        model_class = choose_class(config)
        # Classes of Transformers and of this package take no code from elsewhere.
        remote = {"trust_remote_code": trust_remote_code} if model_class.__name__.startswith("Auto") else {}
        # Other shapes are refused below, by name.
        options = {"ignore_mismatched_sizes": True, **remote, **revision, **placement}
        if "pooler" in unread and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
            options["add_pooling_layer"] = False
        if model_args := getattr(config, "model_args", None):
            # timm notes the number of classes there, too; Transformers' wrapper would pass it twice.
            options["model_args"] = {key: value for key, value in model_args.items() if key != "num_classes"}
        model, report = model_class.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
    check_complete(given, model, report, kind, unread)
    return model.eval() if placement else model.eval().to(device)


def _quantization(bits: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Have bitsandbytes hold a language model in `bits`; the vision tower, the projector and the head stay as they
    are."""
    if not is_bitsandbytes_available():
        raise ValueError("--quantize is bitsandbytes', which is not installed: pip install 'frugalvit[quantize]'.")
    return BitsAndBytesConfig(
        load_in_4bit=bits == "4bit",
        load_in_8bit=bits == "8bit",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type="nf4",
        llm_int8_skip_modules=[".*vision_tower", ".*multi_modal_projector", "lm_head"],
    )


def check_complete(
    given: str | os.PathLike,
    model: PreTrainedModel,
    report: dict,
    kind: str,
    unread: frozenset[str] = frozenset(),
):
    """Raise a ValueError if weights are missing, left over or of other shapes, as the `report` of `from_pretrained`
    says; other arguments as in `load_pretrained`."""
    mismatched = [key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]]
    for problem, keys in (
        ("lacks", report["missing_keys"]),
        ("does not know", report["unexpected_keys"]),
        ("has other shapes of", mismatched),
    ):
        keys = sorted(key for key in keys if unread.isdisjoint(key.split(".")))
        if keys:
            names = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            part = "model class" if problem == "does not know" else "checkpoint"
            raise ValueError(
                f"{given!r} is no complete {type(model).__name__}: its {part} {problem} {names}. "
                f"Save it again as {kind}."
            )


@contextmanager
def one_error(name: str | os.PathLike, kind: str):
    """Within, an error in loading a model, or a part of it, becomes a clear one of one line, and Transformers prints
    nothing besides."""
    try:
        with _quiet_transformers():
            yield
    # Weights, configurations and remote code fail in more ways than can be listed.
    except Exception as error:
        if "trust_remote_code" in str(error):
            message = "it brings its own code. Read that, and if you trust it, pass --trust-remote-code."
        elif isinstance(error, OSError) and not Path(name).exists():
            message = f"there is no such folder here, and of the hub: {_one_line(error)}"
        else:
            message = f"{type(error).__name__}: {_one_line(error)}"
        raise ValueError(f"Cannot load {os.fspath(name)!r} as {kind}: {message}") from error


def _load_open_clip(name: str, device) -> tuple[nn.Module, object]:
    import open_clip

    has_weights = name.startswith(("hf-hub:", "local-dir:"))
    model_name, _, pretrained = (name, "", None) if has_weights else name.partition(":")
    if not (has_weights or pretrained):
        raise ValueError(
            f"The open_clip model {name!r} has no weights; give {OPEN_CLIP}MODEL:PRETRAINED, for example "
            f"{OPEN_CLIP}ViT-B-16:openai, or {OPEN_CLIP}hf-hub:ID."
        )
    device = choose_device(None if device is None else str(device))
    try:
        model = open_clip.create_model(model_name, pretrained=pretrained, require_pretrained=True, device=device)
    # Weights and configurations fail in more ways than can be listed.
    except Exception as error:
        message = f"{type(error).__name__}: {_one_line(error)}"
        raise ValueError(f"Cannot load the open_clip model {name!r}: {message}") from error
    return model.float().eval(), open_clip_image_processor(model)


@contextmanager
def _quiet_transformers():
    """Within, Transformers shows no progress bar and no report: errors say what matters."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _one_line(error: BaseException, limit: int = 300) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[:limit] + "…"
