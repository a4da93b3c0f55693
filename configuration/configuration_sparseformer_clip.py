"""CLIP and SigLIP whose image side is a SparseFormer: configurations."""

import math

from huggingface_hub.dataclasses import strict
from transformers import CLIPTextConfig, SiglipTextConfig

from .configuration_base import FrugalViTConfig
from .configuration_sparseformer import SparseFormerConfig, read_vision_config
from .configuration_sparseformer_base import SparseFormerBaseConfig


# The default image side of a SigLIP.
SIGLIP_VISION = {
    "num_latent_tokens": 49,
    "hidden_act": "gelu_pytorch_tanh",
    "use_cls_token": False,
    "pooling": "attention",
}


@strict
class SparseFormerCLIPConfig(FrugalViTConfig):
    r"""
    Configuration of a CLIP with a SparseFormer in the place of its vision transformer (Gao et al., *Bootstrapping
    SparseFormers from Vision Foundation Models*, section 4.2).

    Args:
        text_config (`CLIPTextConfig` or `dict`, *optional*): The text side, CLIP's own.
        vision_config (`SparseFormerConfig`, `PatchSparseFormerConfig` or `dict`, *optional*):
            The image side; by default the base model with 49 tokens.
        projection_dim (`int`, *optional*, defaults to 512): Width of the space that both sides are projected to.
        logit_scale_init_value (`float`, *optional*, defaults to 2.6592): Initial logarithm of the logits' scale.

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, if values contradict each other, or
            if a name looks like a misspelled field; the message says what was given and what would fit.
    """

    model_type = "sparseformer_clip"
    sub_configs = {"text_config": CLIPTextConfig, "vision_config": SparseFormerConfig}

    text_config: dict | CLIPTextConfig | None = None
    vision_config: dict | SparseFormerBaseConfig | None = None
    projection_dim: int = 512
    logit_scale_init_value: float | int = 2.6592

    def __post_init__(self, **kwargs):
        text, vision = self.text_config or {}, self.vision_config
        self.text_config = CLIPTextConfig(**text) if isinstance(text, dict) else text
        vision = SparseFormerConfig.from_variant("clip-base-49-224") if vision is None else vision
        self.vision_config = read_vision_config(vision)
        super().__post_init__(**kwargs)

    def validate_projection(self):
        """The width that both sides are projected to is positive, and that of the image side is the same."""
        self._check_counts("projection_dim")
        projected = self.vision_config.projection_dim
        if projected not in (None, self.projection_dim):
            raise ValueError(
                f"`projection_dim` is {self.projection_dim}, that of `vision_config` {projected}; expected the same."
            )


@strict
class SparseFormerSiglipConfig(FrugalViTConfig):
    r"""
    Configuration of a SigLIP with a SparseFormer in the place of its vision transformer. Its text side ends in a
    linear layer to the width of the image side, which is not projected.

    Args:
        text_config (`SiglipTextConfig` or `dict`, *optional*): The text side, that of SigLIP or SigLIP 2.
        vision_config (`SparseFormerConfig`, `PatchSparseFormerConfig` or `dict`, *optional*):
            The image side; by default a base model with 49 tokens and SigLIP's pooling head.
        logit_scale_init_value (`float`, *optional*, defaults to log 10): Initial logarithm of the logits' scale.
        logit_bias_init_value (`float`, *optional*, defaults to -10.0):
            Initial bias of the logits; both as in section 3.2 of Zhai et al., *Sigmoid Loss for Language Image
            Pre-Training*.

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, if values contradict each other, or
            if a name looks like a misspelled field; the message says what was given and what would fit.
    """

    # Transformers' pipeline takes sigmoids, and pads texts, where "siglip" is part of the name.
    model_type = "sparseformer_siglip"
    sub_configs = {"text_config": SiglipTextConfig, "vision_config": SparseFormerConfig}

    text_config: dict | SiglipTextConfig | None = None
    vision_config: dict | SparseFormerBaseConfig | None = None
    logit_scale_init_value: float | int = math.log(10)
    logit_bias_init_value: float | int = -10.0

    def __post_init__(self, **kwargs):
        text = self.text_config or {}
        self.text_config = SiglipTextConfig(**text) if isinstance(text, dict) else text
        self.vision_config = read_vision_config(SIGLIP_VISION if self.vision_config is None else self.vision_config)
        super().__post_init__(**kwargs)

    def validate_widths(self):
        """The text side ends in the width of the image side."""
        text, vision = self.text_config.projection_size, self.vision_config.hidden_size
        if text != vision:
            raise ValueError(
                f"`projection_size` of `text_config` is {text}, `hidden_size` of `vision_config` {vision}; expected "
                "the same."
            )


__all__ = ["SparseFormerCLIPConfig", "SparseFormerSiglipConfig"]
