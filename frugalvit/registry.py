"""The model families, one line each, and the public names and Auto classes that follow from them."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType


# A family's public names are those in `__all__` of `configuration_<family>.py` and `modeling_<family>.py`.
FAMILIES = (
    "agent_cnn",
    "bootstrapped_vit",
    "convmixer",
    "patch_sparseformer",
    "sparseformer",
    "sparseformer_clip",
    "sparseformer_llava",
    "sparseformer_paligemma",
    "sparseformer_vlm",
    "vit_context_broadcast",
    "vit_impulse_init",
)

FUNCTIONS = {
    "AlignLlavaArguments": "frugalvit.training.align_llava",
    "AlignLlavaTrainer": "frugalvit.training.align_llava",
    "AlignmentLoss": "frugalvit.training.losses",
    "Anatomy": "frugalvit.modeling.hosts.anatomy",
    "bootstrap": "frugalvit.training.bootstrap",
    "BootstrapArguments": "frugalvit.training.bootstrap",
    "BootstrapTrainer": "frugalvit.training.bootstrap",
    "checkpoint_path": "frugalvit.common.resources",
    "Classifier": "frugalvit.inference",
    "ContextBroadcast": "frugalvit.modeling.context_broadcast",
    "count_context_broadcast": "frugalvit.common.macs",
    "count_macs": "frugalvit.common.macs",
    "Embedder": "frugalvit.inference",
    "extract_features": "frugalvit.evaluation.features",
    "from_open_clip": "frugalvit.modeling.open_clip_adapter",
    "GeneralizedConv2d": "frugalvit.modeling.generalized_convolution",
    "HintDecayCallback": "frugalvit.training.joint",
    "ImageClassificationArguments": "frugalvit.training.train",
    "ImageClassificationTrainer": "frugalvit.training.train",
    "impulse_init_": "frugalvit.modeling.initialization",
    "initialize_attention_": "frugalvit.modeling.initialization",
    "insert_context_broadcast": "frugalvit.modeling.context_broadcast_hosts",
    "JointArguments": "frugalvit.training.joint",
    "JointTrainer": "frugalvit.training.joint",
    "MapAlignmentLoss": "frugalvit.training.losses",
    "match_channels_": "frugalvit.modeling.swap",
    "matching_processor": "frugalvit.modeling.swap",
    "measure_attention": "frugalvit.attention",
    "mimetic_init_": "frugalvit.modeling.initialization",
    "OpenClipVisual": "frugalvit.modeling.open_clip_adapter",
    "pack_linear_layers": "frugalvit.common.packing",
    "read_anatomy": "frugalvit.modeling.hosts",
    "remove_context_broadcast": "frugalvit.modeling.context_broadcast_hosts",
    "SegmentationArguments": "frugalvit.training.segment",
    "SegmentationTrainer": "frugalvit.training.segment",
    "SparseFormerLlavaProcessor": "frugalvit.modeling.modeling_sparseformer_llava",
    "SparseFormerVisionTower": "frugalvit.modeling.llava_tower",
    "swap_backbone": "frugalvit.modeling.heads",
    "swap_vision_tower": "frugalvit.modeling.swap",
    "to_open_clip": "frugalvit.modeling.open_clip_adapter",
}


def public_names() -> dict[str, str]:
    """The names that `frugalvit` offers and the modules that define them."""
    names = dict(FUNCTIONS)
    # Modeling files export the configurations, too.
    for room in ("modeling", "configuration"):
        folder = os.path.dirname(importlib.util.find_spec(f"frugalvit.{room}").origin)
        for family in FAMILIES:
            names |= dict.fromkeys(
                _exports(os.path.join(folder, f"{room}_{family}.py")), f"frugalvit.{room}.{room}_{family}"
            )
    return names


def _exports(file: str) -> list[str]:
    """The names in a file's `__all__`. So does Transformers' `define_import_structure` find them; importing that would
    import Transformers."""
    with open(file, encoding="utf-8") as source:
        listed = re.search(r"^__all__ = \[(.*?)\]", source.read(), re.MULTILINE | re.DOTALL)[1]
    return re.findall(r'"(\w+)"', listed)


def _classes(room: str, family: str) -> list[type]:
    """The classes that a family's file in `configuration/` or `modeling/` exports."""
    module = importlib.import_module(f"frugalvit.{room}.{room}_{family}")
    return [getattr(module, name) for name in module.__all__]


def configuration_classes() -> list[type]:
    """The configurations of all families."""
    return [found for family in FAMILIES for found in _classes("configuration", family)]


_LOCK = threading.RLock()


def _once(register: Callable) -> Callable:
    """Let a registration run once for each argument, and not again within itself: registering looks names up."""
    done = set()

    @functools.wraps(register)
    def register_once(*arguments) -> None:
        with _LOCK:
            if arguments not in done:
                done.add(arguments)
                try:
                    register(*arguments)
                except BaseException:
                    done.discard(arguments)
                    raise

    return register_once


def register() -> None:
    """Let Transformers' Auto classes load the families' folders with the installed classes, all of them at once.

    `register_when_asked` does it family by family, when an Auto class is asked for one.
    """
    register_configurations()
    for family in FAMILIES:
        register_processors(family)
        register_models(family)


@_once
def register_configurations() -> None:
    """Register the configurations of all families, and of Transformers' models with Context Broadcasting."""
    import transformers
    from transformers.utils import is_torch_available

    found = configuration_classes()
    if is_torch_available():
        altered = importlib.import_module("frugalvit.modeling.context_broadcast_hosts")
        found += [getattr(altered, f"ContextBroadcast{name}") for name in altered.CONFIGURATIONS]
    for config_class in found:
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


@_once
def register_processors(family: str) -> None:
    """Register image processors for a family's configurations."""
    import transformers

    processors = {"torchvision": transformers.ViTImageProcessor, "pil": transformers.ViTImageProcessorPil}
    for config_class in _classes("configuration", family):
        transformers.AutoImageProcessor.register(config_class, image_processor_classes=processors, exist_ok=True)


@_once
def register_models(family: str) -> None:
    """Register a family's models, each with the Auto classes that its `auto_classes` names."""
    import transformers

    for model_class in _classes("modeling", family):
        for auto_class, name in getattr(model_class, "auto_classes", {}).items():
            if name == model_class.__name__:
                getattr(transformers, auto_class).register(model_class.config_class, model_class, exist_ok=True)


class _WhenAsked(dict):
    """The classes that were registered in a mapping of Transformers' Auto classes, in the place of its
    `_extra_content`. Those of this package come when they are asked for, so that importing it imports neither PyTorch
    nor Transformers.

    Args:
        registered (`dict`): Classes that others have registered.
        register (`Callable`): Registers what belongs to a key, or, given None, everything.
    """

    def __init__(self, registered: dict, register: Callable[[object], None]):
        super().__init__(registered)
        self.register = register

    def __contains__(self, key) -> bool:
        self.register(key)
        return super().__contains__(key)

    def __iter__(self):
        self.register(None)
        return super().__iter__()

    def __len__(self) -> int:
        self.register(None)
        return super().__len__()

    def keys(self):
        self.register(None)
        return super().keys()

    def values(self):
        self.register(None)
        return super().values()

    def items(self):
        self.register(None)
        return super().items()


def _for_model_type(mapping, model_type: str | None) -> None:
    # Transformers' own are found without us.
    if model_type is None or model_type not in mapping._mapping:
        register_configurations()


def _for_configuration(register_family: Callable[[str], None], config_class: type | None) -> None:
    if config_class is None:
        for family in FAMILIES:
            register_family(family)
        return
    family = getattr(config_class, "__module__", "").removeprefix("frugalvit.configuration.configuration_")
    if family in FAMILIES:
        register_family(family)


# What is registered in the mappings of each module of `transformers.models.auto`.
_AUTO_MODULES = {
    "configuration_auto": lambda mapping: functools.partial(_for_model_type, mapping),
    "image_processing_auto": lambda mapping: functools.partial(_for_configuration, register_processors),
    "modeling_auto": lambda mapping: functools.partial(_for_configuration, register_models),
    # A family's modeling file registers its processor.
    "processing_auto": lambda mapping: functools.partial(_for_configuration, register_models),
}


def _prepare(module: ModuleType) -> None:
    """Let the mappings of a module of Auto classes register families when they are asked for them."""
    make = _AUTO_MODULES[module.__name__.rpartition(".")[2]]
    for mapping in list(vars(module).values()):
        registered = vars(mapping).get("_extra_content") if hasattr(mapping, "_extra_content") else None
        if registered is not None and not isinstance(registered, _WhenAsked):
            mapping._extra_content = _WhenAsked(registered, make(mapping))


class _AutoModuleFinder(importlib.abc.MetaPathFinder):
    """Prepares modules of Auto classes as they are imported."""

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.rpartition(".")
        if package != "transformers.models.auto" or module not in _AUTO_MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_prepare(module: ModuleType) -> None:
                execute(module)
                _prepare(module)

            spec.loader.exec_module = execute_and_prepare
        return spec


def register_when_asked() -> None:
    """Let Transformers' Auto classes know the families, and import a family when one is asked for it."""
    if not any(isinstance(finder, _AutoModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoModuleFinder())
    for name in _AUTO_MODULES:
        if module := sys.modules.get(f"transformers.models.auto.{name}"):
            _prepare(module)
