"""Vision transformers that need fewer tokens, less data and no extra parameters.

Importing this package registers its models with Transformers' Auto classes. The names in `_LAZY` are imported at their
first use.
"""

import importlib.util


if importlib.util.find_spec("frugalvit.modeling") is None:
    raise ModuleNotFoundError("This clone of frugalvit is not installed; in its folder, run: pip install -e .")

from .attention import measure_attention
from .macs import count_context_broadcast, count_macs
from .modeling.backbone_swap import swap_backbone
from .modeling.context_broadcast import ContextBroadcast
from .modeling.context_broadcast_hosts import (
    insert_context_broadcast,
    load_context_broadcast,
    remove_context_broadcast,
)
from .modeling.generalized_convolution import GeneralizedConv2d
from .modeling.hosts import Anatomy, read_anatomy, register_reader
from .modeling.initialization import impulse_init_, initialize_attention_, mimetic_init_
from .modeling.llava_tower import SparseFormerVisionTower
from .modeling.modeling_sparseformer_vlm import SparseFormerLlavaProcessor
from .modeling.open_clip_adapter import OpenClipVisual, from_open_clip, to_open_clip
from .modeling.packing import pack_linear_layers
from .modeling.vision_tower import match_channels_, matching_processor, swap_vision_tower
from .registry import register
from .training.files import checkpoint_path
from .training.losses import AlignmentLoss, MapAlignmentLoss
from .training.preprocessing import CorruptImageError
from .version import __version__


# Public names that are imported at their first use, and their modules.
_LAZY = {
    "AlignLlavaArguments": "training.align_llava",
    "AlignLlavaTrainer": "training.align_llava",
    "bootstrap": "training.bootstrap",
    "BootstrapArguments": "training.bootstrap",
    "BootstrapTrainer": "training.bootstrap",
    "Classifier": "inference",
    "Embedder": "inference",
    "extract_features": "evaluation.features",
    "HintDecayCallback": "training.joint",
    "ImageClassificationArguments": "training.train",
    "ImageClassificationTrainer": "training.train",
    "JointArguments": "training.joint",
    "JointTrainer": "training.joint",
    "SegmentationArguments": "training.segment",
    "SegmentationTrainer": "training.segment",
}
_CLASSES = register()

globals().update(_CLASSES)
__all__ = [
    "__version__",
    *_CLASSES,
    *_LAZY,
    "AlignmentLoss",
    "Anatomy",
    "checkpoint_path",
    "ContextBroadcast",
    "CorruptImageError",
    "count_context_broadcast",
    "count_macs",
    "from_open_clip",
    "GeneralizedConv2d",
    "impulse_init_",
    "initialize_attention_",
    "insert_context_broadcast",
    "load_context_broadcast",
    "MapAlignmentLoss",
    "match_channels_",
    "matching_processor",
    "measure_attention",
    "mimetic_init_",
    "OpenClipVisual",
    "pack_linear_layers",
    "read_anatomy",
    "register_reader",
    "remove_context_broadcast",
    "SparseFormerLlavaProcessor",
    "SparseFormerVisionTower",
    "swap_backbone",
    "swap_vision_tower",
    "to_open_clip",
]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'frugalvit' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
