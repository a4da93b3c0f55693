"""LLaVA whose vision tower is a SparseFormer (section 4.3 of the bootstrapping paper): the language model reads a
quarter of the image tokens, or whatever number the tower has."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoConfig,
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
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llava.modeling_llava import LlavaCausalLMOutputWithPast, LlavaModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer import SparseFormerConfig
from ..configuration.configuration_sparseformer_llava import SparseFormerLlavaConfig
from .hub import HubModel, image_processor_config
from .modeling_sparseformer import SparseFormerModel


# LLaVA builds its tower by `AutoModel`, which has to know it where this file is loaded as remote code.
if SparseFormerConfig.model_type not in CONFIG_MAPPING:
    AutoConfig.register(SparseFormerConfig.model_type, SparseFormerConfig)
AutoModel.register(SparseFormerConfig, SparseFormerModel, exist_ok=True)


class SparseFormerLlavaModel(LlavaModel):
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
        """What the language model reads of each image.

        Args:
            pixel_values (`torch.FloatTensor` of shape `(images, num_channels, height, width)`): Normalized images.
            vision_feature_layer, vision_feature_select_strategy (*optional*): As in the configuration.
            num_image_tokens (`torch.LongTensor` of shape `(images,)`, or `int`, *optional*):
                Latent tokens of each image or of all; those that the vision tower chooses by default.

        Returns:
            The vision tower's output, of images with different numbers of tokens without its states. Its
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

    def get_placeholder_mask(
        self, input_ids: torch.LongTensor | None, inputs_embeds: torch.Tensor, image_features: torch.Tensor
    ) -> torch.Tensor:
        """Where the features of images belong, `(batch, tokens, 1)`.

        Raises:
            ValueError: if there are more or fewer places than features.
        """
        try:
            return super().get_placeholder_mask(input_ids, inputs_embeds, image_features)
        except ValueError as error:
            if input_ids is None:
                raise
            inserted, given = int((input_ids == self.config.image_token_id).sum()), len(image_features)
            raise ValueError(
                f"The prompts have {inserted} image tokens (id {self.config.image_token_id}), the model makes {given} "
                "of their images. `matching_processor(processor, model)` makes a processor that fits; where its call "
                "chooses `num_image_tokens`, pass on to the model what it returns under that name."
            ) from error

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        vision_feature_layer: int | list[int] | None = None,
        vision_feature_select_strategy: str | None = None,
        num_image_tokens: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LlavaModelOutputWithPast:
        """As of `LlavaModel`, with `num_image_tokens` as of `get_image_features`."""
        selection = {
            "vision_feature_layer": vision_feature_layer,
            "vision_feature_select_strategy": vision_feature_select_strategy,
        }
        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values, "return_dict": True}
        if pixel_values is None or num_image_tokens is None:
            return super().forward(
                input_ids, pixel_values, attention_mask, inputs_embeds=inputs_embeds, **selection, **kwargs
            )
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        features = self.get_image_features(
            pixel_values, num_image_tokens=num_image_tokens, return_dict=True, **selection
        ).pooler_output
        features = torch.cat(features).to(inputs_embeds.device, inputs_embeds.dtype)
        places = self.get_placeholder_mask(input_ids, inputs_embeds, features)
        inputs_embeds = inputs_embeds.masked_scatter(places, features)
        outputs = super().forward(attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        outputs.image_hidden_states = features
        return outputs


class SparseFormerLlavaForConditionalGeneration(HubModel, LlavaForConditionalGeneration):
    """LLaVA with a SparseFormer as its vision tower; `swap_vision_tower` puts one together."""

    config: SparseFormerLlavaConfig
    auto_classes = {
        "AutoModel": "SparseFormerLlavaModel",
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
        """Choose the vision tower's latent tokens of all calls that choose none, as of a SparseFormer alone. A
        processor that was made before does not know: `matching_processor` makes one that fits."""
        self.model.vision_tower.set_num_tokens(num_tokens)
        config = self.config
        config.image_seq_length = config.count_image_tokens(config.vision_config.default_num_tokens)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
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

        Raises:
            ValueError: if the prompts have more or fewer image tokens than the model makes of the images.
        """
        # An argument that older versions of Transformers do not have.
        encoded = {} if mm_encoder_outputs is None else {"mm_encoder_outputs": mm_encoder_outputs}
        return super().forward(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            vision_feature_layer=vision_feature_layer,
            vision_feature_select_strategy=vision_feature_select_strategy,
            labels=labels,
            logits_to_keep=logits_to_keep,
            image_sizes=image_sizes,
            num_image_tokens=num_image_tokens,
            **encoded,
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
        """The image tokens in the place of one."""
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
AutoProcessor.register(SparseFormerLlavaConfig, SparseFormerLlavaProcessor, exist_ok=True)


@torch.no_grad()
def swap_vision_tower(llava: nn.Module, vision_model: nn.Module) -> SparseFormerLlavaForConditionalGeneration:
    """A LLaVA with its vision tower replaced by a SparseFormer.

    Layers of the tower are counted from its end, where both towers have the same blocks: `vision_feature_layer=22` of
    a tower with 24 blocks becomes -3.

    Args:
        llava (`LlavaForConditionalGeneration`): Of Transformers, in the style of LLaVA 1.5. Its language model and
            projector become part of the new model; they are not copied.
        vision_model (`SparseFormerVisionModel`, `...WithProjection` or `SparseFormerModel`):
            Bootstrapped from the tower that it replaces. It is moved to that one's precision and device.

    Returns:
        The model, in the mode, training or evaluation, of `llava`.

    Raises:
        ValueError: if `llava` is no such model, or the vision model has another width, no [CLS] where the strategy
            leaves it out, or too few blocks.
    """
    parts = getattr(llava, "model", None)
    if not all(hasattr(parts, name) for name in ("vision_tower", "multi_modal_projector", "language_model")):
        raise ValueError(
            f"Got a {type(llava).__name__}, expected a LlavaForConditionalGeneration of Transformers. For the "
            "original code base there is `SparseFormerVisionTower`."
        )
    if hasattr(parts, "image_newline"):
        raise ValueError(
            f"Got a {type(llava).__name__}, whose images are rows of tiles with a token that ends each row; a "
            "SparseFormer's tokens have no rows. Expected a LLaVA in the style of 1.5."
        )
    if llava.config.model_type not in ("llava", SparseFormerLlavaConfig.model_type):
        raise ValueError(
            f"Got a {type(llava).__name__}, whose projector or configuration counts on a grid of patches; a "
            "SparseFormer's tokens have none. Expected a LLaVA in the style of 1.5."
        )
    tower = vision_model.base_model
    if getattr(tower.config, "model_type", None) != SparseFormerConfig.model_type:
        raise ValueError(f"Got a {type(vision_model).__name__} as vision model, expected a SparseFormer.")
    config = llava.config
    layers, blocks = config.vision_feature_layer, config.vision_config.num_hidden_layers

    def from_end(layer: int) -> int:
        return layer if layer < 0 else layer - blocks - 1

    count = 1 if isinstance(layers, int) else len(layers)
    expected, given = parts.multi_modal_projector.linear_1.in_features, tower.config.hidden_size * count
    if expected != given:
        raise ValueError(
            f"The projector takes {expected} channels, the vision model gives {given} ({count} x "
            f"{tower.config.hidden_size}); bootstrap it from the tower that it is to replace."
        )
    fields = {
        name: getattr(config, name)
        for name in ("image_token_index", "projector_hidden_act", "multimodal_projector_bias", "tie_word_embeddings")
    }
    new_config = SparseFormerLlavaConfig(
        text_config=config.text_config,
        vision_config=tower.config.to_dict(),
        vision_feature_layer=from_end(layers) if isinstance(layers, int) else [from_end(layer) for layer in layers],
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        **fields,
    )
    with torch.device("meta"):
        model = SparseFormerLlavaForConditionalGeneration(new_config)
    old = next(parts.vision_tower.parameters())
    new_tower = SparseFormerModel(new_config.vision_config).to(old)
    new_tower.load_state_dict(tower.state_dict())
    model.model.vision_tower = new_tower
    model.model.multi_modal_projector = parts.multi_modal_projector
    model.model.language_model = parts.language_model
    model.lm_head = llava.lm_head
    model.generation_config = llava.generation_config
    return model.train(llava.training)


def clip_image_processor(config: SparseFormerConfig) -> CLIPImageProcessor:
    """The image processor that a SparseFormer wants, as the class that LLaVA expects: it says its crop in any case."""
    fields = image_processor_config(config)
    fields.pop("image_processor_type")
    height, width = pair(config.image_size)
    fields |= {"crop_size": {"height": height, "width": width}, "do_center_crop": fields.get("do_center_crop", False)}
    return CLIPImageProcessor(**fields)


def matching_processor(
    processor: LlavaProcessor, model: SparseFormerLlavaForConditionalGeneration
) -> SparseFormerLlavaProcessor:
    """The processor for a LLaVA with a SparseFormer: it inserts as many image tokens as the tower gives, whatever
    their number and the size of the images, or as its call chooses (`num_image_tokens`).

    Args:
        processor (`LlavaProcessor`): That of the LLaVA whose tower was replaced; its tokenizer and chat template stay.
        model (`SparseFormerLlavaForConditionalGeneration`): The model it is for.

    Returns:
        A `SparseFormerLlavaProcessor`; save it beside the model.

    Raises:
        ValueError: if the number of tokens that it inserts is not the number that the model gives.
    """
    vision = model.config.vision_config
    new = SparseFormerLlavaProcessor(
        clip_image_processor(vision),
        processor.tokenizer,
        # No image is a million pixels high: all tokens are "additional" ones.
        patch_size=10**6,
        # LLaVA takes one away for the [CLS] that the strategy "default" leaves out.
        num_additional_image_tokens=vision.default_num_tokens + vision.num_prefix_tokens,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        chat_template=processor.chat_template,
        image_token=processor.image_token,
        num_latent_tokens=vision.num_latent_tokens,
        num_prefix_tokens=vision.num_prefix_tokens,
    )
    check_image_tokens(new, model)
    return new


@torch.no_grad()
def check_image_tokens(processor: LlavaProcessor, model: LlavaForConditionalGeneration):
    """Raise unless a processor inserts as many image tokens for an image as the model makes of it.

    Raises:
        ValueError: with both numbers.
    """
    inputs = processor(images=Image.new("RGB", (37, 23)), text=processor.image_token, return_tensors="pt")
    inserted = int((inputs["input_ids"] == model.config.image_token_index).sum())
    pixel_values = inputs["pixel_values"].to(next(model.model.vision_tower.parameters()))
    given = model.get_image_features(pixel_values).pooler_output[0].shape[0]
    if inserted != given:
        raise ValueError(
            f"The processor inserts {inserted} tokens (id {model.config.image_token_index}) for an image, the model "
            f"makes {given} of it. `matching_processor` makes one that fits."
        )


__all__ = [
    "SparseFormerLlavaConfig",
    "SparseFormerLlavaForConditionalGeneration",
]
