"""LLaVA whose vision tower is a SparseFormer: configuration."""

from huggingface_hub.dataclasses import strict
from transformers import LlavaConfig

from .configuration_base import HubConfigMixin
from .configuration_sparseformer import SparseFormerConfig, check_feature_layers, read_vision_config


@strict
class SparseFormerLlavaConfig(HubConfigMixin, LlavaConfig):
    r"""
    Configuration of a LLaVA with a SparseFormer as its vision tower (Gao et al., *Bootstrapping SparseFormers from
    Vision Foundation Models*, section 4.3).

    `LlavaConfig` with a `vision_config` that needs no package to be known; see there for the other arguments.

    Args:
        vision_config (`SparseFormerConfig` or `dict`, *optional*):
            The vision tower; by default CLIP's large model with 64 tokens.
        image_seq_length (`int`, *optional*):
            Tokens that an image gives the language model where a call chooses none. It follows from the vision tower
            and `vision_feature_select_strategy`.
    """

    model_type = "sparseformer_llava"

    def __post_init__(self, **kwargs):
        given = self.vision_config
        vision = SparseFormerConfig.from_variant("clip-large-64-224") if given is None else read_vision_config(given)
        self.vision_config = vision
        self.image_seq_length = self.count_image_tokens(vision.default_num_tokens)
        super().__post_init__(**kwargs)

    def count_image_tokens(self, num_tokens: int) -> int:
        """Tokens that an image of so many latent tokens gives the language model."""
        vision = self.vision_config
        # "default" leaves out the first token.
        dropped = self.vision_feature_select_strategy == "default" and vision.use_cls_token
        return num_tokens + vision.num_prefix_tokens - dropped

    def validate_vision_tower(self):
        """The vision tower is a SparseFormer with the layers and the [CLS] that are asked for."""
        vision = self.vision_config
        if self.vision_feature_select_strategy == "default" and not vision.use_cls_token:
            raise ValueError(
                '`vision_feature_select_strategy="default"` leaves out [CLS], and this SparseFormer has none; choose '
                '"full".'
            )
        check_feature_layers(self.vision_feature_layer, vision)


__all__ = ["SparseFormerLlavaConfig"]
