"""A SparseFormer as the tower of models that read images and texts: an error if a prompt has more or fewer places than
there are image tokens, and the places of these in the output."""

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import ModelOutput

from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from ..configuration.configuration_sparseformer import SparseFormerConfig
from .modeling_patch_sparseformer import tower_class


# A folder's configuration is read before its model's file; it names its tower's kind.
for config_class in (SparseFormerConfig, PatchSparseFormerConfig):
    if config_class.model_type not in CONFIG_MAPPING:
        AutoConfig.register(config_class.model_type, config_class)


class SparseFormerTowerMixin:
    """Mixin of a `LlavaModel` or `PaliGemmaModel` whose vision tower is a SparseFormer, with a clear message if there
    are more or fewer places than features."""

    def __init__(self, config: PreTrainedConfig):
        # The tower is built by `AutoModel`, which has to know it where this file is loaded as remote code. There,
        # a configuration from another process, as vLLM's are, may be of a class of the same name, read once more.
        AutoModel.register(type(config.vision_config), tower_class(config.vision_config), exist_ok=True)
        super().__init__(config)
        # Those of a tower that is loaded alone are this model's own; vLLM would leave them out.
        self._keys_to_ignore_on_load_unexpected = set()

    def get_placeholder_mask(
        self, input_ids: torch.LongTensor | None, inputs_embeds: torch.Tensor, image_features: torch.Tensor
    ) -> torch.Tensor:
        """The places where the features of images belong, `(batch, tokens, 1)` bool.

        Raises:
            ValueError: if there are more or fewer places than features.
        """
        try:
            return super().get_placeholder_mask(input_ids, inputs_embeds, image_features)
        except ValueError as error:
            if input_ids is None:
                raise
            inserted, given = int((input_ids == self.config.image_token_id).sum()), image_features.shape[:-1].numel()
            raise ValueError(
                f"The prompts have {inserted} image tokens (id {self.config.image_token_id}), the model makes {given} "
                "of their images. `matching_processor(processor, model)` makes a processor that fits; where its call "
                "chooses `num_image_tokens`, pass on to the model what it returns under that name."
            ) from error


def projected_tokens(outputs: ModelOutput) -> torch.Tensor:
    """Return the projected tokens that the language model has read of all images, one after the other, `(tokens,
    hidden_size)`, from the output of a `LlavaModel`, a `PaliGemmaModel` or one with a head. Versions of Transformers
    name them differently."""
    if getattr(outputs, "image_outputs", None) is not None:
        return torch.cat(list(outputs.image_outputs.pooler_output))
    features = outputs.image_hidden_states  # Before Transformers 5.24.
    return features.reshape(-1, features.shape[-1])
