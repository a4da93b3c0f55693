"""PaliGemma whose vision tower is a SparseFormer: configuration."""

from huggingface_hub.dataclasses import strict
from transformers import PaliGemmaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration_base import HubConfigMixin
from .configuration_sparseformer import read_vision_config


# The default vision tower: that of the SigLIP in PaliGemma, with a quarter of its tokens.
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "num_latent_tokens": 64,
    "use_cls_token": False,
    "pooling": "mean",
}
# The default language model, Gemma's 2B.
TEXT = {
    "model_type": "gemma",
    "vocab_size": 257152,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}


@strict
class SparseFormerPaliGemmaConfig(HubConfigMixin, PaliGemmaConfig):
    r"""
    Configuration of a PaliGemma or PaliGemma 2 with a SparseFormer as its vision tower. Its language model reads the
    tokens of the last layer after the final LayerNorm, each through one linear layer.

    It is `PaliGemmaConfig` with a `vision_config` that loads without this package; the other arguments are explained
    there.

    Args:
        vision_config (`SparseFormerConfig`, `PatchSparseFormerConfig` or `dict`, *optional*):
            The vision tower; by default as large as PaliGemma's, with 64 tokens. Its `projection_dim` is set to that
            of this configuration.

    Raises:
        ValueError: if `vision_config` is that of another model.
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, or values contradict each other;
            the message says what was given and what would fit.
    """

    model_type = "sparseformer_paligemma"

    def __post_init__(self, **kwargs):
        vision = read_vision_config(VISION if self.vision_config is None else self.vision_config)
        text = TEXT if self.text_config is None else self.text_config
        if isinstance(text, dict):
            text = CONFIG_MAPPING[text.get("model_type", "gemma")](**text)
        self.vision_config, self.text_config = vision, text
        # That of `PaliGemmaConfig` counts patches, which a SparseFormer does not have.
        super(PaliGemmaConfig, self).__post_init__(**kwargs)
        if text.use_bidirectional_attention is None:
            text.use_bidirectional_attention = True
        text.num_image_tokens = self.image_seq_length
        vision.projection_dim = self.projection_dim

    @property
    def image_seq_length(self) -> int:
        """Tokens that an image gives the language model where a call chooses none."""
        return self.count_image_tokens(self.vision_config.default_num_tokens)

    def count_image_tokens(self, num_tokens: int) -> int:
        """Return the number of tokens that an image gives the language model.

        Args:
            num_tokens (`int`): Latent tokens of the vision tower.
        """
        return num_tokens + self.vision_config.num_prefix_tokens


__all__ = ["SparseFormerPaliGemmaConfig"]
