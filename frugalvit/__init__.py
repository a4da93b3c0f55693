"""Vision transformers that need less: fewer tokens, less data, no extra parameters.

Importing this package lets Transformers' Auto classes know its models. These, and its names, are imported when they
are first used.
"""

import importlib
from typing import TYPE_CHECKING

from .registry import public_names, register_when_asked
from .version import __version__


if TYPE_CHECKING:
    from .attention import measure_attention as measure_attention
    from .common.macs import count_context_broadcast as count_context_broadcast
    from .common.macs import count_macs as count_macs
    from .common.packing import pack_linear_layers as pack_linear_layers
    from .common.resources import checkpoint_path as checkpoint_path
    from .configuration.configuration_agent_cnn import *
    from .configuration.configuration_bootstrapped_vit import *
    from .configuration.configuration_convmixer import *
    from .configuration.configuration_patch_sparseformer import *
    from .configuration.configuration_sparseformer import *
    from .configuration.configuration_sparseformer_clip import *
    from .configuration.configuration_sparseformer_llava import *
    from .configuration.configuration_sparseformer_paligemma import *
    from .configuration.configuration_sparseformer_vlm import *
    from .configuration.configuration_vit_context_broadcast import *
    from .configuration.configuration_vit_impulse_init import *
    from .evaluation.features import extract_features as extract_features
    from .inference import Classifier as Classifier
    from .inference import Embedder as Embedder
    from .modeling.context_broadcast import ContextBroadcast as ContextBroadcast
    from .modeling.context_broadcast_hosts import insert_context_broadcast as insert_context_broadcast
    from .modeling.context_broadcast_hosts import remove_context_broadcast as remove_context_broadcast
    from .modeling.generalized_convolution import GeneralizedConv2d as GeneralizedConv2d
    from .modeling.heads import swap_backbone as swap_backbone
    from .modeling.hosts import read_anatomy as read_anatomy
    from .modeling.hosts.anatomy import Anatomy as Anatomy
    from .modeling.initialization import impulse_init_ as impulse_init_
    from .modeling.initialization import initialize_attention_ as initialize_attention_
    from .modeling.initialization import mimetic_init_ as mimetic_init_
    from .modeling.llava_tower import SparseFormerVisionTower as SparseFormerVisionTower
    from .modeling.modeling_agent_cnn import *
    from .modeling.modeling_bootstrapped_vit import *
    from .modeling.modeling_convmixer import *
    from .modeling.modeling_patch_sparseformer import *
    from .modeling.modeling_sparseformer import *
    from .modeling.modeling_sparseformer_clip import *
    from .modeling.modeling_sparseformer_llava import *
    from .modeling.modeling_sparseformer_llava import SparseFormerLlavaProcessor as SparseFormerLlavaProcessor
    from .modeling.modeling_sparseformer_paligemma import *
    from .modeling.modeling_sparseformer_vlm import *
    from .modeling.modeling_vit_context_broadcast import *
    from .modeling.modeling_vit_impulse_init import *
    from .modeling.open_clip_adapter import OpenClipVisual as OpenClipVisual
    from .modeling.open_clip_adapter import from_open_clip as from_open_clip
    from .modeling.open_clip_adapter import to_open_clip as to_open_clip
    from .modeling.swap import match_channels_ as match_channels_
    from .modeling.swap import matching_processor as matching_processor
    from .modeling.swap import swap_vision_tower as swap_vision_tower
    from .training.align_llava import AlignLlavaArguments as AlignLlavaArguments
    from .training.align_llava import AlignLlavaTrainer as AlignLlavaTrainer
    from .training.bootstrap import BootstrapArguments as BootstrapArguments
    from .training.bootstrap import BootstrapTrainer as BootstrapTrainer
    from .training.bootstrap import bootstrap as bootstrap
    from .training.joint import HintDecayCallback as HintDecayCallback
    from .training.joint import JointArguments as JointArguments
    from .training.joint import JointTrainer as JointTrainer
    from .training.losses import AlignmentLoss as AlignmentLoss
    from .training.losses import MapAlignmentLoss as MapAlignmentLoss
    from .training.segment import SegmentationArguments as SegmentationArguments
    from .training.segment import SegmentationTrainer as SegmentationTrainer
    from .training.train import ImageClassificationArguments as ImageClassificationArguments
    from .training.train import ImageClassificationTrainer as ImageClassificationTrainer

_NAMES = public_names()

__all__ = ["__version__", *sorted(_NAMES)]


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'frugalvit' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_NAMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})


register_when_asked()
