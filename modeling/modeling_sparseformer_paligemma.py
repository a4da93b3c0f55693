"""PaliGemma and PaliGemma 2 whose vision tower is a SparseFormer, bootstrapped from their SigLIP."""

from torch import nn
from transformers import AutoModel, PaliGemmaForConditionalGeneration, PaliGemmaModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from ..configuration.configuration_sparseformer_paligemma import SparseFormerPaliGemmaConfig
from .hub import HubModel
from .image_tokens import SparseFormerTowerMixin


class SparseFormerPaliGemmaModel(SparseFormerTowerMixin, PaliGemmaModel):
    """`PaliGemmaModel` with a SparseFormer as its vision tower."""

    config: SparseFormerPaliGemmaConfig


class SparseFormerPaliGemmaForConditionalGeneration(HubModel, PaliGemmaForConditionalGeneration):
    """PaliGemma with a SparseFormer as its vision tower; `swap_vision_tower` puts one together."""

    config: SparseFormerPaliGemmaConfig
    auto_classes = {
        "AutoModel": "SparseFormerPaliGemmaModel",
        "AutoModelForMultimodalLM": "SparseFormerPaliGemmaForConditionalGeneration",
        "AutoModelForImageTextToText": "SparseFormerPaliGemmaForConditionalGeneration",
    }
    _keep_in_fp32_modules_strict = ["initial_rois"]

    def __init__(self, config: SparseFormerPaliGemmaConfig):
        config.validate()
        # Its own constructor would make a `PaliGemmaModel` first.
        super(PaliGemmaForConditionalGeneration, self).__init__(config)
        self.model = SparseFormerPaliGemmaModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def set_num_tokens(self, num_tokens: int | None):
        """Choose the vision tower's latent tokens of all calls, as of a SparseFormer alone. A processor that was made
        before does not know: `matching_processor` makes one that fits."""
        self.model.vision_tower.set_num_tokens(num_tokens)
        self.config.text_config.num_image_tokens = self.config.image_seq_length


AutoModel.register(SparseFormerPaliGemmaConfig, SparseFormerPaliGemmaModel, exist_ok=True)
# `transformers serve` knows by these names what reads images and texts.
MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[SparseFormerPaliGemmaConfig.model_type] = (
    SparseFormerPaliGemmaForConditionalGeneration.__name__
)


__all__ = [
    "SparseFormerPaliGemmaConfig",
    "SparseFormerPaliGemmaForConditionalGeneration",
]
