"""Vision transformers that need less: fewer tokens, less data, no extra parameters.

Importing this package registers its models with Transformers' Auto classes. Functions and trainings are imported when
they are first used.
"""

import importlib.util


if importlib.util.find_spec("frugalvit.modeling") is None:
    raise ModuleNotFoundError("This clone of frugalvit is not installed; in its folder, run: pip install -e .")

from .registry import register
from .version import __version__


_FUNCTIONS = {
    "AlignLlavaArguments": "training.align_llava",
    "AlignLlavaTrainer": "training.align_llava",
    "AlignmentLoss": "training.losses",
    "Anatomy": "modeling.hosts.anatomy",
    "bootstrap": "training.bootstrap",
    "BootstrapArguments": "training.bootstrap",
    "BootstrapTrainer": "training.bootstrap",
    "checkpoint_path": "common.files",
    "Classifier": "inference",
    "ContextBroadcast": "modeling.context_broadcast",
    "count_context_broadcast": "common.macs",
    "count_macs": "common.macs",
    "Embedder": "inference",
    "extract_features": "evaluation.features",
    "from_open_clip": "modeling.open_clip_adapter",
    "GeneralizedConv2d": "modeling.generalized_convolution",
    "HintDecayCallback": "training.joint",
    "ImageClassificationArguments": "training.train",
    "ImageClassificationTrainer": "training.train",
    "impulse_init_": "modeling.initialization",
    "initialize_attention_": "modeling.initialization",
    "insert_context_broadcast": "modeling.context_broadcast_hosts",
    "JointArguments": "training.joint",
    "JointTrainer": "training.joint",
    "MapAlignmentLoss": "training.losses",
    "load_context_broadcast": "modeling.context_broadcast_hosts",
    "match_channels_": "modeling.swap",
    "matching_processor": "modeling.swap",
    "measure_attention": "attention",
    "mimetic_init_": "modeling.initialization",
    "OpenClipVisual": "modeling.open_clip_adapter",
    "pack_linear_layers": "common.packing",
    "read_anatomy": "modeling.hosts",
    "register_reader": "modeling.hosts",
    "remove_context_broadcast": "modeling.context_broadcast_hosts",
    "SegmentationArguments": "training.segment",
    "SegmentationTrainer": "training.segment",
    "SparseFormerLlavaProcessor": "modeling.modeling_sparseformer_vlm",
    "SparseFormerVisionTower": "modeling.llava_tower",
    "swap_backbone": "modeling.heads",
    "swap_vision_tower": "modeling.swap",
    "to_open_clip": "modeling.open_clip_adapter",
}
_CLASSES = register()

globals().update(_CLASSES)
__all__ = ["__version__", *sorted({*_CLASSES, *_FUNCTIONS})]


def __getattr__(name: str):
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'frugalvit' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_FUNCTIONS[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS})
