"""Configurations of LLaVA, PaliGemma, Gemma 3 and LLaVA-OneVision models whose vision tower is a SparseFormer."""

from huggingface_hub.dataclasses import strict
from transformers import (
    AutoConfig,
    Gemma3Config,
    LlavaConfig,
    LlavaOnevisionConfig,
    PaliGemmaConfig,
    PreTrainedConfig,
)
from transformers.configuration_utils import SubConfigSpec

from .configuration_base import HubMixin, pair
from .configuration_patch_sparseformer import PatchSparseFormerConfig
from .configuration_sparseformer import SparseFormerConfig


def image_grid(config: PreTrainedConfig) -> int:
    """Return the number of patches along each side of a VLM's square images."""
    vision = config.vision_config
    return pair(vision.image_size)[0] // pair(vision.patch_size)[0]


@strict
class SparseFormerGridConfig(PreTrainedConfig):
    r"""
    Configuration of `SparseFormerGridTower`, a SparseFormer whose hidden states form a grid of cells.

    Args:
        tower_config (`SparseFormerConfig`, `PatchSparseFormerConfig` or `dict`, *optional*):
            Configuration of the SparseFormer.
        image_size (`int`, *optional*, defaults to 224): Height and width of images in pixels.
        patch_size (`int`, *optional*, defaults to 16): Height and width of a grid cell in pixels.
    """

    model_type = "sparseformer_grid"
    base_config_key = "vision_config"
    sub_configs_defaults = {"tower_config": SubConfigSpec(AutoConfig, "sparseformer")}

    tower_config: dict | PreTrainedConfig | None = None
    image_size: int = 224
    patch_size: int = 16

    @property
    def num_channels(self) -> int:
        return self.tower_config.num_channels

    @property
    def hidden_size(self) -> int:
        return self.tower_config.hidden_size

    @property
    def layer_norm_eps(self) -> float:
        return self.tower_config.layer_norm_eps


for config_class in (SparseFormerConfig, PatchSparseFormerConfig, SparseFormerGridConfig):
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


TOWER = SubConfigSpec(AutoConfig, "sparseformer")
GRID_TOWER = SubConfigSpec(SparseFormerGridConfig)


@strict
class SparseFormerLlavaConfig(HubMixin, LlavaConfig):
    """`LlavaConfig` whose `vision_config` is a `SparseFormerConfig` or a `PatchSparseFormerConfig`.
    `SparseFormerLlavaForConditionalGeneration` sets the field `image_seq_length`."""

    model_type = "sparseformer_llava"
    sub_configs_defaults = LlavaConfig.sub_configs_defaults | {"vision_config": TOWER}


@strict
class SparseFormerPaliGemmaConfig(HubMixin, PaliGemmaConfig):
    """`PaliGemmaConfig` whose `vision_config` is a `SparseFormerConfig` or a `PatchSparseFormerConfig`."""

    model_type = "sparseformer_paligemma"
    sub_configs_defaults = PaliGemmaConfig.sub_configs_defaults | {"vision_config": TOWER}

    def __post_init__(self, **kwargs):
        # `PaliGemmaConfig.__post_init__` is skipped, because it would set the number of image tokens to the number of
        # patches.
        super(PaliGemmaConfig, self).__post_init__(**kwargs)
        if self.text_config.use_bidirectional_attention is None:
            self.text_config.use_bidirectional_attention = True
        self.vision_config.projection_dim = self.projection_dim

    @property
    def image_seq_length(self) -> int:
        """Number of tokens for each image in the prompt."""
        return self.vision_config.default_num_tokens + self.vision_config.num_prefix_tokens


@strict
class SparseFormerGemma3Config(HubMixin, Gemma3Config):
    """`Gemma3Config` whose `vision_config` is a `SparseFormerGridConfig`."""

    model_type = "sparseformer_gemma3"
    sub_configs_defaults = Gemma3Config.sub_configs_defaults | {"vision_config": GRID_TOWER}

    @property
    def image_seq_length(self) -> int:
        """Number of tokens for each image in the prompt."""
        return self.mm_tokens_per_image


@strict
class SparseFormerLlavaOnevisionConfig(HubMixin, LlavaOnevisionConfig):
    """`LlavaOnevisionConfig` whose `vision_config` is a `SparseFormerGridConfig`."""

    model_type = "sparseformer_llava_onevision"
    sub_configs_defaults = LlavaOnevisionConfig.sub_configs_defaults | {"vision_config": GRID_TOWER}

    @property
    def image_seq_length(self) -> int:
        """Number of tokens for each image tile in the prompt, without newline tokens."""
        return image_grid(self) ** 2


__all__ = [
    "SparseFormerGemma3Config",
    "SparseFormerLlavaConfig",
    "SparseFormerLlavaOnevisionConfig",
    "SparseFormerPaliGemmaConfig",
]
