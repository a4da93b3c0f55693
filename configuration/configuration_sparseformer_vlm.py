"""Gemma 3 and LLaVA-OneVision whose vision tower is a SparseFormer with a grid of patches: configurations."""

from huggingface_hub.dataclasses import strict
from transformers import Gemma3Config, LlavaOnevisionConfig, PreTrainedConfig

from .configuration_base import HubConfigMixin, pair
from .configuration_sparseformer import SparseFormerConfig, check_feature_layers, read_vision_config


def image_grid(config: PreTrainedConfig) -> int:
    """Return the rows, and columns, of patches of a VLM's square images, with its own tower or a SparseFormer."""
    vision = config.vision_config
    return pair(vision.image_size)[0] // pair(vision.patch_size)[0]


@strict
class SparseFormerGemma3Config(HubConfigMixin, Gemma3Config):
    r"""
    Configuration of a Gemma 3 with a SparseFormer as its vision tower.

    It is `Gemma3Config`; the arguments that are not listed are explained there.

    Args:
        vision_config (`SiglipVisionConfig` or `dict`, *optional*):
            The tower that was replaced. Its `patch_size` is the size of a cell of the SparseFormer's grid.
        tower_config (`SparseFormerConfig`, `PatchSparseFormerConfig` or `dict`, *optional*): The vision tower.
    """

    model_type = "sparseformer_gemma3"
    sub_configs = {**Gemma3Config.sub_configs, "tower_config": SparseFormerConfig}

    tower_config: dict | PreTrainedConfig | None = None

    def __post_init__(self, **kwargs):
        self.tower_config = read_vision_config(self.tower_config or {})
        super().__post_init__(**kwargs)

    @property
    def tokens_per_grid(self) -> int:
        """Tokens that the language model reads of a grid."""
        return self.mm_tokens_per_image


@strict
class SparseFormerLlavaOnevisionConfig(HubConfigMixin, LlavaOnevisionConfig):
    r"""
    Configuration of a LLaVA-OneVision with a SparseFormer as its vision tower.

    It is `LlavaOnevisionConfig`; the arguments that are not listed are explained there.

    Args:
        vision_config (`SiglipVisionConfig` or `dict`, *optional*):
            The tower that was replaced. Its `patch_size` is the size of a cell of the SparseFormer's grid.
        tower_config (`SparseFormerConfig`, `PatchSparseFormerConfig` or `dict`, *optional*): The vision tower.
    """

    model_type = "sparseformer_llava_onevision"
    sub_configs = {**LlavaOnevisionConfig.sub_configs, "tower_config": SparseFormerConfig}

    tower_config: dict | PreTrainedConfig | None = None

    def __post_init__(self, **kwargs):
        self.tower_config = read_vision_config(self.tower_config or {})
        super().__post_init__(**kwargs)

    @property
    def tokens_per_grid(self) -> int:
        """Tokens that the language model reads of a grid; a new line is one more."""
        return image_grid(self) ** 2

    def validate_feature_layer(self):
        """The tower has the layers that are read of it."""
        check_feature_layers(self.vision_feature_layer, self.tower_config)


__all__ = ["SparseFormerGemma3Config", "SparseFormerLlavaOnevisionConfig"]
