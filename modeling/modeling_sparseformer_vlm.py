"""Vision-language models (VLMs) whose vision tower is a SparseFormer. `swap_vision_tower` makes these models.

LLaVA (Gao et al., *Bootstrapping SparseFormers*, section 4.3) and PaliGemma use the SparseFormer's tokens. Gemma 3 and
LLaVA-OneVision need a grid of patches: `SparseFormerGridTower` averages the tokens whose RoIs cover a grid cell.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoProcessor,
    Gemma3ForConditionalGeneration,
    Gemma3Model,
    LlavaForConditionalGeneration,
    LlavaModel,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionModel,
    LlavaProcessor,
    PaliGemmaForConditionalGeneration,
    PaliGemmaModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.models.llava.modeling_llava import LlavaModelOutputWithPast
from transformers.processing_utils import ImagesKwargs, ProcessingKwargs, Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_base import HubMixin
from ..configuration.configuration_patch_sparseformer import PatchSparseFormerConfig
from ..configuration.configuration_sparseformer import SparseFormerConfig
from ..configuration.configuration_sparseformer_vlm import (
    SparseFormerGemma3Config,
    SparseFormerGridConfig,
    SparseFormerLlavaConfig,
    SparseFormerLlavaOnevisionConfig,
    SparseFormerPaliGemmaConfig,
)
from .dense import assignment_weights, scatter_to_grid
from .hub import HubModel
from .modeling_patch_sparseformer import PatchSparseFormerModel
from .modeling_sparseformer import SparseFormerModel


class SparseFormerGridTower(PreTrainedModel):
    """SparseFormer that returns hidden states on the patch grid of the vision transformer that it replaces.

    Each grid cell has the mean hidden state of the tokens whose RoIs cover it (`assignment_weights`). A new student
    with one token per patch returns the same hidden states as its teacher.
    """

    config: SparseFormerGridConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: SparseFormerGridConfig):
        super().__init__(config)
        self.tower = AutoModel.from_config(config.tower_config)
        self.post_init()

    def set_num_tokens(self, num_tokens: int | None):
        self.tower.set_num_tokens(num_tokens)

    @can_return_tuple
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BaseModelOutputWithPooling:
        """Arguments are those of `SparseFormerModel.forward`. Hidden states are `(batch, cells, hidden_size)`, row by
        row."""
        outputs = self.tower(pixel_values, **kwargs | {"output_rois": True, "return_dict": True})
        height, width = (side // self.config.patch_size for side in pixel_values.shape[-2:])
        weights = assignment_weights(outputs.rois[-1], height, width)

        def on_grid(states: torch.Tensor | None) -> torch.Tensor | None:
            # Hidden states of layers that were not requested are None.
            if states is None:
                return None
            return scatter_to_grid(states[:, self.config.tower_config.num_prefix_tokens :], weights).flatten(2).mT

        return BaseModelOutputWithPooling(
            last_hidden_state=on_grid(outputs.last_hidden_state),
            pooler_output=outputs.pooler_output,
            hidden_states=outputs.hidden_states and tuple(map(on_grid, outputs.hidden_states)),
            attentions=outputs.attentions,
        )


for config_class, model_class in (
    (SparseFormerConfig, SparseFormerModel),
    (PatchSparseFormerConfig, PatchSparseFormerModel),
    (SparseFormerGridConfig, SparseFormerGridTower),
):
    AutoModel.register(config_class, model_class, exist_ok=True)


class SparseFormerTowerMixin:
    """Mixin for VLMs without a language-modeling head. vLLM builds such models by `AutoModel`."""

    prompt_hint = "Call the processor that `frugalvit.matching_processor(processor, model)` returns for this model."

    def __init__(self, config: PreTrainedConfig):
        if type(config.vision_config) not in MODEL_MAPPING:
            # vLLM pickles configurations with their classes. Unpickled classes are not registered with `AutoModel`, so
            # the configuration is built again with a registered class.
            config.vision_config = AutoConfig.for_model(**config.vision_config.to_dict())
        super().__init__(config)

    def get_placeholder_mask(self, *args, **kwargs):
        try:
            return super().get_placeholder_mask(*args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{error}. {self.prompt_hint}") from error


def auto_classes_of(name: str) -> dict[str, str]:
    """Return the `auto_classes` of a VLM, given the prefix of its class names."""
    head = f"{name}ForConditionalGeneration"
    return {"AutoModel": f"{name}Model", "AutoModelForMultimodalLM": head, "AutoModelForImageTextToText": head}


class SparseFormerVLMMixin(HubModel):
    """Mixin for VLMs with a language-modeling head."""

    def set_num_tokens(self, num_tokens: int | None):
        """Set the default number of latent tokens of the vision tower. The model then needs a new processor, see
        `matching_processor`."""
        self.model.vision_tower.set_num_tokens(num_tokens)

    def image_processor_config(self):
        """Return `None`, because a VLM's processor is saved separately."""


class SparseFormerLlavaModel(SparseFormerTowerMixin, LlavaModel):
    """`LlavaModel` with a SparseFormer as its vision tower. Images may have different numbers of tokens."""

    config: SparseFormerLlavaConfig
    prompt_hint = (
        "Pass the number of latent tokens to the processor of the model: `processor(…, num_image_tokens=9)`. "
        "`frugalvit.matching_processor(processor, model)` returns a processor with the default of the model."
    )

    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        num_image_tokens: torch.LongTensor | Sequence[int] | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Return the projected tokens of each image, `(tokens, hidden_size)`, in `pooler_output`.

        Args:
            pixel_values (`torch.FloatTensor` of shape `(images, num_channels, height, width)`): Normalized images.
            num_image_tokens (`int` or sequence of `int`, *optional*):
                Number of latent tokens per image: one number for all images, or one number for each image.
            kwargs: Arguments of `LlavaModel.get_image_features`.
        """
        kwargs["return_dict"] = True
        if num_image_tokens is None:
            return super().get_image_features(pixel_values, **kwargs)
        counts = torch.as_tensor(num_image_tokens).expand(len(pixel_values)).tolist()
        features: list[torch.Tensor | None] = [None] * len(counts)
        for count in set(counts):
            indices = [index for index, other in enumerate(counts) if other == count]
            outputs = super().get_image_features(pixel_values[indices], num_tokens=count, **kwargs)
            for index, feature in zip(indices, outputs.pooler_output, strict=True):
                features[index] = feature
        return BaseModelOutputWithPooling(pooler_output=features)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        num_image_tokens: torch.LongTensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LlavaModelOutputWithPast:
        """Arguments are those of `LlavaModel.forward`. `num_image_tokens` is documented in `get_image_features`."""
        kwargs["return_dict"] = True
        if pixel_values is not None and num_image_tokens is not None:
            names = ("vision_feature_layer", "vision_feature_select_strategy")
            selection = {name: kwargs.get(name) for name in names}
            outputs = self.get_image_features(pixel_values, num_image_tokens, return_dict=True, **selection)
            kwargs["mm_encoder_outputs"] = {"image": outputs}
            pixel_values = None
        return super().forward(input_ids, pixel_values, **kwargs)


class SparseFormerLlavaForConditionalGeneration(SparseFormerVLMMixin, LlavaForConditionalGeneration):
    """LLaVA with a SparseFormer as its vision tower.

    `forward` and `generate` also accept `num_image_tokens`, which `SparseFormerLlavaProcessor` returns. It is the
    number of latent tokens per image: one number for all images, or one number for each image.
    """

    config: SparseFormerLlavaConfig
    auto_classes = auto_classes_of("SparseFormerLlava")

    def __init__(self, config: SparseFormerLlavaConfig):
        if config.vision_feature_select_strategy == "default" and config.vision_config.num_prefix_tokens == 0:
            raise ValueError(
                '`vision_feature_select_strategy` is "default", which removes [CLS], but this SparseFormer has no '
                '[CLS]; choose "full".'
            )
        # The constructor of `LlavaForConditionalGeneration` is skipped, because it makes a `LlavaModel`.
        super(LlavaForConditionalGeneration, self).__init__(config)
        self.model = SparseFormerLlavaModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.count_image_tokens()
        self.post_init()

    def count_image_tokens(self):
        """Set `config.image_seq_length`, the number of tokens of an image in the prompt."""
        config = self.config
        vision = config.vision_config
        drops_cls = config.vision_feature_select_strategy == "default"
        config.image_seq_length = vision.default_num_tokens + vision.num_prefix_tokens - drops_cls

    def set_num_tokens(self, num_tokens: int | None):
        super().set_num_tokens(num_tokens)
        self.count_image_tokens()

    def prepare_inputs_for_generation(self, input_ids: torch.LongTensor, num_image_tokens=None, **kwargs) -> dict:
        # `generate` accepts only arguments that are named in this signature.
        return super().prepare_inputs_for_generation(input_ids, num_image_tokens=num_image_tokens, **kwargs)


class SparseFormerPaliGemmaModel(SparseFormerTowerMixin, PaliGemmaModel):
    """`PaliGemmaModel` with a SparseFormer as its vision tower."""

    config: SparseFormerPaliGemmaConfig


class SparseFormerPaliGemmaForConditionalGeneration(SparseFormerVLMMixin, PaliGemmaForConditionalGeneration):
    """PaliGemma with a SparseFormer as its vision tower."""

    config: SparseFormerPaliGemmaConfig
    auto_classes = auto_classes_of("SparseFormerPaliGemma")


class SparseFormerGemma3Model(SparseFormerTowerMixin, Gemma3Model):
    """`Gemma3Model` with a SparseFormer as its vision tower."""

    config: SparseFormerGemma3Config


class SparseFormerGemma3ForConditionalGeneration(SparseFormerVLMMixin, Gemma3ForConditionalGeneration):
    """Gemma 3 with a SparseFormer as its vision tower."""

    config: SparseFormerGemma3Config
    auto_classes = auto_classes_of("SparseFormerGemma3")


class SparseFormerLlavaOnevisionModel(SparseFormerTowerMixin, LlavaOnevisionModel):
    """`LlavaOnevisionModel` with a SparseFormer as its vision tower."""

    config: SparseFormerLlavaOnevisionConfig


class SparseFormerLlavaOnevisionForConditionalGeneration(SparseFormerVLMMixin, LlavaOnevisionForConditionalGeneration):
    """LLaVA-OneVision with a SparseFormer as its vision tower."""

    config: SparseFormerLlavaOnevisionConfig
    auto_classes = auto_classes_of("SparseFormerLlavaOnevision")


class SparseFormerLlavaImagesKwargs(ImagesKwargs, total=False):
    # Number of latent tokens per image, without [CLS]: one number for all images, or one number for each image. The
    # model is trained with the numbers in `config.vision_config.elastic_token_counts`.
    num_image_tokens: int | list[int] | tuple[int, ...]


class SparseFormerLlavaProcessorKwargs(ProcessingKwargs, total=False):
    images_kwargs: SparseFormerLlavaImagesKwargs


class SparseFormerLlavaProcessor(HubMixin, LlavaProcessor):
    """`LlavaProcessor` with the argument `num_image_tokens`, the number of latent tokens of each image. The processor
    also returns `num_image_tokens`, as an input of the model. `matching_processor` makes the processor of a model.

    A saved processor can also be loaded as a `LlavaProcessor`, which has no `num_image_tokens`.

    Args:
        num_prefix_tokens (`int`, *optional*, defaults to 0):
            Number of class tokens and registers of the vision tower.
    """

    valid_processor_kwargs = SparseFormerLlavaProcessorKwargs

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        patch_size=None,
        vision_feature_select_strategy=None,
        chat_template=None,
        image_token="<image>",
        num_additional_image_tokens=0,
        num_prefix_tokens=0,
        **kwargs,
    ):
        super().__init__(
            image_processor,
            tokenizer,
            patch_size=patch_size,
            vision_feature_select_strategy=vision_feature_select_strategy,
            chat_template=chat_template,
            image_token=image_token,
            num_additional_image_tokens=num_additional_image_tokens,
        )
        self.num_prefix_tokens = num_prefix_tokens
        self.auto_map = {"AutoProcessor": "modeling_sparseformer_vlm.SparseFormerLlavaProcessor"}

    def _process_images(self, images, num_image_tokens: int | Sequence[int] | None = None, **kwargs):
        inputs, replacements = super()._process_images(images, **kwargs)
        if num_image_tokens is not None:
            counts = [num_image_tokens] * len(replacements) if isinstance(num_image_tokens, int) else num_image_tokens
            if len(counts) != len(replacements):
                raise ValueError(
                    f"`num_image_tokens` has {len(counts)} numbers, expected one number for each of the "
                    f"{len(replacements)} images."
                )
            others = self.num_prefix_tokens - (self.vision_feature_select_strategy == "default")
            replacements = [self.image_token * (count + others) for count in counts]
            inputs["num_image_tokens"] = list(counts)
        return inputs, replacements


for model_class, head_class in (
    (SparseFormerLlavaModel, SparseFormerLlavaForConditionalGeneration),
    (SparseFormerPaliGemmaModel, SparseFormerPaliGemmaForConditionalGeneration),
    (SparseFormerGemma3Model, SparseFormerGemma3ForConditionalGeneration),
    (SparseFormerLlavaOnevisionModel, SparseFormerLlavaOnevisionForConditionalGeneration),
):
    AutoModel.register(model_class.config_class, model_class, exist_ok=True)
    # `transformers serve` looks up the class of a model in this table.
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[model_class.config_class.model_type] = head_class.__name__
AutoProcessor.register(SparseFormerLlavaConfig, SparseFormerLlavaProcessor, exist_ok=True)


__all__ = [
    "SparseFormerGemma3Config",
    "SparseFormerGemma3ForConditionalGeneration",
    "SparseFormerLlavaConfig",
    "SparseFormerLlavaForConditionalGeneration",
    "SparseFormerLlavaOnevisionConfig",
    "SparseFormerLlavaOnevisionForConditionalGeneration",
    "SparseFormerPaliGemmaConfig",
    "SparseFormerPaliGemmaForConditionalGeneration",
]
