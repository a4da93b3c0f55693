"""A SparseFormer as the vision tower of a `LlavaModel` or a `PaliGemmaModel`."""

from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from ..configuration.configuration_sparseformer import SparseFormerConfig
from .modeling_patch_sparseformer import tower_class


# A folder's configuration is read before its model's file; it names its tower's kind.
for config_class in (SparseFormerConfig, PatchSparseFormerConfig):
    if config_class.model_type not in CONFIG_MAPPING:
        AutoConfig.register(config_class.model_type, config_class)


class SparseFormerTowerMixin:
    """Mixin of a `LlavaModel` or `PaliGemmaModel` whose vision tower is a SparseFormer."""

    def __init__(self, config: PreTrainedConfig):
        # The tower is built by `AutoModel`, which has to know it where this file is loaded as remote code. There,
        # a configuration from another process, as vLLM's are, may be of a class of the same name, read once more.
        AutoModel.register(type(config.vision_config), tower_class(config.vision_config), exist_ok=True)
        super().__init__(config)
        # Those of a tower that is loaded alone are this model's own; vLLM would leave them out.
        self._keys_to_ignore_on_load_unexpected = set()
