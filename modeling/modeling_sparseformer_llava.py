"""LLaVA whose vision tower is a SparseFormer (section 4.3 of the bootstrapping paper): the language model reads a
quarter of the image tokens, or whatever number the tower has."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoProcessor,
    CLIPImageProcessor,
    LlavaForConditionalGeneration,
    LlavaModel,
    LlavaProcessor,
)
from transformers.cache_utils import Cache
from transformers.image_utils import make_flat_list_of_images
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from transformers.models.llava.modeling_llava import LlavaCausalLMOutputWithPast, LlavaModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer import SparseFormerConfig
from ..configuration.configuration_sparseformer_llava import SparseFormerLlavaConfig
from .hub import HubModel, image_processor_config
from .image_tokens import SparseFormerTowerMixin


class SparseFormerLlavaModel(SparseFormerTowerMixin, LlavaModel):
    """`LlavaModel` whose images may have different numbers of tokens."""

    config: SparseFormerLlavaConfig

    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        vision_feature_layer: int | list[int] | None = None,
        vision_feature_select_strategy: str | None = None,
        num_image_tokens: torch.LongTensor | Sequence[int] | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Return the tokens that the language model reads of each image.

        Args:
            pixel_values (`torch.FloatTensor` of shape `(images, num_channels, height, width)`): Normalized images.
            vision_feature_layer, vision_feature_select_strategy (*optional*): As in the configuration.
            num_image_tokens (`torch.LongTensor` of shape `(images,)`, or `int`, *optional*):
                Latent tokens of each image or of all; by default the vision tower chooses.

        Returns:
            The vision tower's output; where images have different numbers of tokens, its states are left out. Its
            `pooler_output` has for each image the projected tokens `(tokens, hidden_size)`.

        Raises:
            ValueError: if there are more or fewer numbers than images, or the tower has not so many tokens.
        """

        def compute(images: torch.Tensor, **chosen: int) -> BaseModelOutputWithPooling:
            return super(SparseFormerLlavaModel, self).get_image_features(
                images,
                vision_feature_layer=vision_feature_layer,
                vision_feature_select_strategy=vision_feature_select_strategy,
                return_dict=True,
                **chosen,
                **kwargs,
            )

        if num_image_tokens is None:
            return compute(pixel_values)
        counts = torch.as_tensor(num_image_tokens)
        counts = (counts.expand(len(pixel_values)) if counts.ndim == 0 else counts.flatten()).tolist()
        if len(counts) != len(pixel_values):
            raise ValueError(
                f"`num_image_tokens` has {len(counts)} numbers, expected one for each of the "
                f"{len(pixel_values)} images."
            )
        features: list[torch.Tensor | None] = [None] * len(counts)
        for count in set(counts):
            indices = [index for index, other in enumerate(counts) if other == count]
            if len(indices) == len(counts):
                return compute(pixel_values, num_tokens=count)
            outputs = compute(pixel_values[indices], num_tokens=count)
            for index, feature in zip(indices, outputs.pooler_output, strict=True):
                features[index] = feature
        return BaseModelOutputWithPooling(pooler_output=features)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        vision_feature_layer: int | list[int] | None = None,
        vision_feature_select_strategy: str | None = None,
        num_image_tokens: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LlavaModelOutputWithPast:
        """As of `LlavaModel`, with `num_image_tokens` as of `get_image_features`."""
        kwargs |= {"attention_mask": attention_mask, "return_dict": True}
        selection = {
            "vision_feature_layer": vision_feature_layer,
            "vision_feature_select_strategy": vision_feature_select_strategy,
        }
        if pixel_values is None or num_image_tokens is None:
            return super().forward(input_ids, pixel_values, **selection, **kwargs)
        image_outputs = self.get_image_features(
            pixel_values, num_image_tokens=num_image_tokens, return_dict=True, **selection
        )
        return super().forward(input_ids, **kwargs | {"mm_encoder_outputs": {"image": image_outputs}})


class SparseFormerLlavaForConditionalGeneration(HubModel, LlavaForConditionalGeneration):
    """LLaVA with a SparseFormer as its vision tower; `swap_vision_tower` puts one together."""

    config: SparseFormerLlavaConfig
    auto_classes = {
        "AutoModel": "SparseFormerLlavaModel",
        "AutoModelForMultimodalLM": "SparseFormerLlavaForConditionalGeneration",
        "AutoModelForImageTextToText": "SparseFormerLlavaForConditionalGeneration",
    }
    _keep_in_fp32_modules_strict = ["initial_rois"]

    def __init__(self, config: SparseFormerLlavaConfig):
        config.validate()
        # Its own constructor would make a `LlavaModel` first.
        super(LlavaForConditionalGeneration, self).__init__(config)
        self.model = SparseFormerLlavaModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def set_num_tokens(self, num_tokens: int | None):
        """Choose the vision tower's latent tokens for all calls that choose none, as for a SparseFormer alone. A
        processor that was made before inserts the old number; `matching_processor` makes one that fits."""
        self.model.vision_tower.set_num_tokens(num_tokens)
        config = self.config
        config.image_seq_length = config.count_image_tokens(config.vision_config.default_num_tokens)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        vision_feature_layer: int | list[int] | None = None,
        vision_feature_select_strategy: str | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        image_sizes: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        num_image_tokens: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LlavaCausalLMOutputWithPast:
        """As of `LlavaForConditionalGeneration`, besides:

        Args:
            num_image_tokens (`torch.LongTensor` of shape `(images,)`, or `int`, *optional*):
                Latent tokens of each image or of all, which `SparseFormerLlavaProcessor` returns where its call
                chooses them; by default `config.vision_config.default_num_tokens`.
        """
        return super().forward(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            vision_feature_layer=vision_feature_layer,
            vision_feature_select_strategy=vision_feature_select_strategy,
            labels=labels,
            logits_to_keep=logits_to_keep,
            image_sizes=image_sizes,
            mm_encoder_outputs=mm_encoder_outputs,
            num_image_tokens=num_image_tokens,
            **kwargs,
        )


class SparseFormerLlavaProcessor(LlavaProcessor):
    """`LlavaProcessor` whose call chooses the tokens of each image; `matching_processor` makes one for a model.

    What it saves loads as a plain `LlavaProcessor`, too, which inserts as many tokens for an image as the model makes
    where a call chooses none.

    Args:
        image_processor, tokenizer, patch_size, vision_feature_select_strategy, chat_template, image_token,
        num_additional_image_tokens: As of `LlavaProcessor`.
        num_latent_tokens (`int`): Latent tokens of the vision tower, the most that an image can have.
        num_prefix_tokens (`int`, *optional*, defaults to 0): Its [CLS] and registers.
    """

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        patch_size=None,
        vision_feature_select_strategy=None,
        chat_template=None,
        image_token="<image>",
        num_additional_image_tokens=0,
        num_latent_tokens=None,
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
        self.num_latent_tokens, self.num_prefix_tokens = num_latent_tokens, num_prefix_tokens
        module = SparseFormerLlavaProcessor.__module__.rpartition(".")[2]
        self.auto_map = {"AutoProcessor": f"{module}.{SparseFormerLlavaProcessor.__name__}"}
        # The numbers of tokens of a call's images, where the call chooses them.
        self._counts: list[int] | None = None

    def __call__(self, images=None, text=None, *args, num_image_tokens: int | Sequence[int] | None = None, **kwargs):
        """As of `LlavaProcessor`, besides:

        Args:
            num_image_tokens (`int` or sequence of `int`, *optional*):
                Latent tokens of every image, or of each in their order, [CLS] not counted; best those that the model
                was trained for, `config.vision_config.elastic_token_counts`.

        Returns:
            `BatchFeature`: Where the call chooses them, also `num_image_tokens`, a `torch.LongTensor` of shape
            `(images,)`, for the model.

        Raises:
            ValueError: if there are more or fewer numbers than images, the vision tower has not so many tokens, or the
                processor was not made by `matching_processor`.
        """
        if num_image_tokens is None or images is None:
            return super().__call__(images, text, *args, **kwargs)
        if self.num_latent_tokens is None:
            raise ValueError(
                "This processor was made for no model; `matching_processor(processor, model)` makes one whose calls "
                "choose `num_image_tokens`."
            )
        images = self.image_processor.fetch_images(images)
        total = len(make_flat_list_of_images(images))
        counts = [num_image_tokens] * total if isinstance(num_image_tokens, int) else list(num_image_tokens)
        if len(counts) != total:
            raise ValueError(
                f"`num_image_tokens` has {len(counts)} numbers, expected one for each of the {total} images."
            )
        for count in counts:
            if not 1 <= count <= self.num_latent_tokens:
                raise ValueError(
                    f"`num_image_tokens` is {count}, expected 1 to {self.num_latent_tokens}, the latent tokens of the "
                    "model that `matching_processor` made this processor for."
                )
        # A copy, as several threads may call.
        choosing = copy.copy(self)
        choosing._counts = [int(count) for count in counts]
        inputs = super(SparseFormerLlavaProcessor, choosing).__call__(images, text, *args, **kwargs)
        inputs["num_image_tokens"] = torch.tensor(choosing._counts)
        return inputs

    def replace_image_token(self, image_inputs: dict, image_idx: int, **kwargs) -> str:
        """Return the image tokens that replace one in the prompt."""
        if self._counts is None:
            return super().replace_image_token(image_inputs, image_idx, **kwargs)
        dropped = self.vision_feature_select_strategy == "default"
        return self.image_token * (self._counts[image_idx] + self.num_prefix_tokens - dropped)

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "num_image_tokens"]

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """As in Transformers; besides it writes the code that loads it where frugalvit is not installed."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in SparseFormerLlavaForConditionalGeneration._sources.items():
            (folder / name).write_text(source, encoding="utf-8", newline="\n")
        return super().save_pretrained(str(folder), push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoProcessor"):
        """Does nothing: `save_pretrained` writes the source files itself."""


AutoModel.register(SparseFormerLlavaConfig, SparseFormerLlavaModel, exist_ok=True)
# `transformers serve` knows by these names what reads images and texts.
MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[SparseFormerLlavaConfig.model_type] = (
    SparseFormerLlavaForConditionalGeneration.__name__
)
AutoProcessor.register(SparseFormerLlavaConfig, SparseFormerLlavaProcessor, exist_ok=True)


def clip_image_processor(config: SparseFormerConfig) -> CLIPImageProcessor:
    """Return a SparseFormer's image processor as the class that LLaVA expects, which names its crop in any case."""
    fields = image_processor_config(config)
    fields.pop("image_processor_type")
    height, width = pair(config.image_size)
    fields |= {"crop_size": {"height": height, "width": width}, "do_center_crop": fields.get("do_center_crop", False)}
    return CLIPImageProcessor(**fields)


__all__ = [
    "SparseFormerLlavaConfig",
    "SparseFormerLlavaForConditionalGeneration",
]
