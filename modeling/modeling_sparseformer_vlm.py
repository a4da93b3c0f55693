"""Gemma 3 and LLaVA-OneVision whose vision tower is a SparseFormer.

What follows their tower counts on rows and columns of patches: it pools neighbours, or ends each row with a token. Few
tokens compute, and each cell of the grid has the states of the tokens that look at it.
"""

import torch
from torch import nn
from transformers import (
    AutoModel,
    Gemma3ForConditionalGeneration,
    Gemma3Model,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionModel,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_base import pair
from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from ..configuration.configuration_sparseformer_base import SparseFormerBaseConfig
from ..configuration.configuration_sparseformer_vlm import SparseFormerGemma3Config, SparseFormerLlavaOnevisionConfig
from .dense import shares_of_tokens, spread
from .hub import HubModel
from .modeling_patch_sparseformer import PatchSparseFormerModel
from .modeling_sparseformer import SparseFormerModel, SparseFormerModelOutput


class SparseFormerGridTower(SparseFormerModel):
    """A SparseFormer whose states lie on a grid, as those of the vision transformer that it replaces: few tokens
    compute, and each cell has the state of the token whose RoI covers it, or the mean of several (`shares_of_tokens`).
    With a token for each patch, it gives what its teacher does, before any training.

    Args:
        config (`SparseFormerBaseConfig`): `feature_stride` is the size of a cell.
    """

    # Those of a tower that is loaded alone are the model's own; vLLM would leave them out.
    _keys_to_ignore_on_load_unexpected = None

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, output_rois: bool = False, **kwargs: Unpack[TransformersKwargs]
    ) -> SparseFormerModelOutput:
        """As of `SparseFormerModel`; `last_hidden_state` and `hidden_states` are `(batch, cells, hidden_size)`, row by
        row."""
        outputs = super().forward(pixel_values, output_rois=True, return_dict=True, **kwargs)
        (height, width), (cell_height, cell_width) = pixel_values.shape[-2:], pair(self.config.feature_stride)
        shares = shares_of_tokens(outputs.rois[-1], height // cell_height, width // cell_width)

        def on_grid(states: torch.Tensor) -> torch.Tensor:
            return spread(states[:, self.config.num_prefix_tokens :], shares).flatten(2).mT

        outputs.last_hidden_state = on_grid(outputs.last_hidden_state)
        if outputs.hidden_states is not None:
            # Layers that were not asked for are None.
            outputs.hidden_states = tuple(
                None if states is None else on_grid(states) for states in outputs.hidden_states
            )
        if not output_rois:
            outputs.rois = outputs.sampling_points = None
        return outputs


class PatchSparseFormerGridTower(SparseFormerGridTower, PatchSparseFormerModel):
    """`SparseFormerGridTower` whose tokens embed patches."""

    config: PatchSparseFormerConfig


def make_grid_tower(config: SparseFormerBaseConfig) -> SparseFormerGridTower:
    """Return a tower with fresh weights."""
    tower_class = PatchSparseFormerGridTower if config.embeds_patches else SparseFormerGridTower
    return tower_class._from_config(config)


class SparseFormerGemma3Model(Gemma3Model):
    """`Gemma3Model` with a SparseFormer as its vision tower."""

    config: SparseFormerGemma3Config

    def __init__(self, config: SparseFormerGemma3Config):
        super().__init__(config)
        self.vision_tower = make_grid_tower(config.tower_config)
        self.post_init()


class SparseFormerGemma3ForConditionalGeneration(HubModel, Gemma3ForConditionalGeneration):
    """Gemma 3 with a SparseFormer as its vision tower; `swap_vision_tower` puts one together."""

    config: SparseFormerGemma3Config
    auto_classes = {
        "AutoModel": "SparseFormerGemma3Model",
        "AutoModelForImageTextToText": "SparseFormerGemma3ForConditionalGeneration",
    }
    _keep_in_fp32_modules_strict = ["initial_rois"]

    def __init__(self, config: SparseFormerGemma3Config):
        config.validate()
        # Its own constructor would make a `Gemma3Model` first.
        super(Gemma3ForConditionalGeneration, self).__init__(config)
        self.model = SparseFormerGemma3Model(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def set_num_tokens(self, num_tokens: int | None):
        """Choose the vision tower's latent tokens of all calls, as of a SparseFormer alone. The grid stays."""
        self.model.vision_tower.set_num_tokens(num_tokens)

    def image_processor_config(self):
        """None: the processor is saved beside the model."""


class SparseFormerLlavaOnevisionModel(LlavaOnevisionModel):
    """`LlavaOnevisionModel` with a SparseFormer as its vision tower."""

    config: SparseFormerLlavaOnevisionConfig

    def __init__(self, config: SparseFormerLlavaOnevisionConfig):
        super().__init__(config)
        self.vision_tower = make_grid_tower(config.tower_config)
        self.post_init()


class SparseFormerLlavaOnevisionForConditionalGeneration(HubModel, LlavaOnevisionForConditionalGeneration):
    """LLaVA-OneVision with a SparseFormer as its vision tower; `swap_vision_tower` puts one together."""

    config: SparseFormerLlavaOnevisionConfig
    auto_classes = {
        "AutoModel": "SparseFormerLlavaOnevisionModel",
        "AutoModelForImageTextToText": "SparseFormerLlavaOnevisionForConditionalGeneration",
    }
    _keep_in_fp32_modules_strict = ["initial_rois"]

    def __init__(self, config: SparseFormerLlavaOnevisionConfig):
        config.validate()
        # Its own constructor would make a `LlavaOnevisionModel` first.
        super(LlavaOnevisionForConditionalGeneration, self).__init__(config)
        self.model = SparseFormerLlavaOnevisionModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def set_num_tokens(self, num_tokens: int | None):
        """Choose the vision tower's latent tokens of all calls, as of a SparseFormer alone. The grid stays."""
        self.model.vision_tower.set_num_tokens(num_tokens)

    def image_processor_config(self):
        """None: the processor is saved beside the model."""


AutoModel.register(SparseFormerGemma3Config, SparseFormerGemma3Model, exist_ok=True)
AutoModel.register(SparseFormerLlavaOnevisionConfig, SparseFormerLlavaOnevisionModel, exist_ok=True)


__all__ = [
    "SparseFormerGemma3Config",
    "SparseFormerGemma3ForConditionalGeneration",
    "SparseFormerLlavaOnevisionConfig",
    "SparseFormerLlavaOnevisionForConditionalGeneration",
]
