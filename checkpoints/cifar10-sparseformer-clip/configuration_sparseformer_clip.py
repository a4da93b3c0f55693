"""CLIP whose image side is a SparseFormer: configuration."""

from huggingface_hub.dataclasses import strict
from transformers import CLIPTextConfig

from .configuration_base import FrugalViTConfig
from .configuration_sparseformer import SparseFormerConfig


@strict
class SparseFormerCLIPConfig(FrugalViTConfig):
    r"""
    Configuration of a CLIP with a SparseFormer in the place of its vision transformer (Gao et al., *Bootstrapping
    SparseFormers from Vision Foundation Models*, section 4.2).

    Args:
        text_config (`CLIPTextConfig` or `dict`, *optional*): The text side, CLIP's own.
        vision_config (`SparseFormerConfig` or `dict`, *optional*):
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
    vision_config: dict | SparseFormerConfig | None = None
    projection_dim: int = 512
    logit_scale_init_value: float | int = 2.6592

    def __post_init__(self, **kwargs):
        for name, config_class in self.sub_configs.items():
            value = getattr(self, name)
            if isinstance(value, dict):
                value = config_class(**value)
            elif value is None:
                value = config_class() if name == "text_config" else config_class.from_variant("clip-base-49-224")
            setattr(self, name, value)
        super().__post_init__(**kwargs)

    def validate_projection(self):
        """The width that both sides are projected to is there, and the image side agrees."""
        self._check_counts("projection_dim")
        projected = self.vision_config.projection_dim
        if projected not in (None, self.projection_dim):
            raise ValueError(
                f"`projection_dim` is {self.projection_dim}, that of `vision_config` {projected}; expected the same."
            )


__all__ = ["SparseFormerCLIPConfig"]
