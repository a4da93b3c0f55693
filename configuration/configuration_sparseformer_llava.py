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

    It is `LlavaConfig` with a `vision_config` that loads without this package; the other arguments are explained
    there.

    Args:
        vision_config (`SparseFormerConfig`, `PatchSparseFormerConfig` or `dict`, *optional*):
            The vision tower; by default CLIP's large model with 64 tokens.
        image_seq_length (`int`, *optional*):
            Tokens that an image gives the language model where a call chooses none. It is computed from the vision
            tower and `vision_feature_select_strategy`, whatever is given.

    Raises:
        ValueError: if `vision_config` is that of another model.
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, or values contradict each other;
            the message says what was given and what would fit.
    """

    model_type = "sparseformer_llava"

    def __post_init__(self, **kwargs):
        given = self.vision_config
        vision = SparseFormerConfig.from_variant("clip-large-64-224") if given is None else read_vision_config(given)
        self.vision_config = vision
        self.image_seq_length = self.count_image_tokens(vision.default_num_tokens)
        super().__post_init__(**kwargs)

    def count_image_tokens(self, num_tokens: int) -> int:
        """Return the number of tokens that an image gives the language model.

        Args:
            num_tokens (`int`): Latent tokens of the vision tower.
        """
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
