"""Configurations of CLIP and SigLIP models whose vision model is a SparseFormer."""

import math

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, CLIPTextConfig, PreTrainedConfig, SiglipTextConfig
from transformers.configuration_utils import SubConfigSpec

from .configuration_base import FrugalViTConfig
from .configuration_patch_sparseformer import PatchSparseFormerConfig
from .configuration_sparseformer import SparseFormerConfig


for config_class in (SparseFormerConfig, PatchSparseFormerConfig):
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


@strict
class SparseFormerCLIPConfig(FrugalViTConfig):
    r"""
    Configuration of a CLIP whose vision model is a SparseFormer (Gao et al., *Bootstrapping SparseFormers from Vision
    Foundation Models*, section 4.2). It has the fields of `CLIPConfig`, but `vision_config` is a `SparseFormerConfig`
    or a `PatchSparseFormerConfig`.
    """

    model_type = "sparseformer_clip"
    sub_configs_defaults = {
        "text_config": CLIPTextConfig,
        "vision_config": SubConfigSpec(AutoConfig, "sparseformer", {"hidden_act": "quick_gelu"}),
    }

    text_config: dict | CLIPTextConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    projection_dim: int = 512
    logit_scale_init_value: float | int = 2.6592


@strict
class SparseFormerSiglipConfig(FrugalViTConfig):
    r"""
    Configuration of a SigLIP or SigLIP 2 whose vision model is a SparseFormer. It has the fields of `SiglipConfig`,
    but `vision_config` is a `SparseFormerConfig` or a `PatchSparseFormerConfig`. The text model's last linear layer
    has as many output channels as the image embedding. The initial logit scale and logit bias are those of Zhai et
    al., *Sigmoid Loss for Language Image Pre-Training*, section 3.2.
    """

    # `model_type` must contain "siglip", so that Transformers' pipeline computes sigmoids and pads texts for SigLIP.
    model_type = "sparseformer_siglip"
    sub_configs_defaults = {
        "text_config": SiglipTextConfig,
        "vision_config": SubConfigSpec(AutoConfig, "sparseformer", {"pooling": "attention"}),
    }

    text_config: dict | SiglipTextConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    logit_scale_init_value: float | int = math.log(10)
    logit_bias_init_value: float | int = -10.0


__all__ = ["SparseFormerCLIPConfig", "SparseFormerSiglipConfig"]
