"""LLaVA whose vision tower is a SparseFormer (section 4.3 of the bootstrapping paper): the language model reads a
quarter of the image tokens, or whatever number the tower has."""

import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    CLIPImageProcessor,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration_base import pair
from .configuration_sparseformer import SparseFormerConfig
from .configuration_sparseformer_llava import SparseFormerLlavaConfig
from .hub import HubModel, image_processor_config
from .modeling_sparseformer import SparseFormerModel


# LLaVA builds its tower by `AutoModel`, which has to know it where this file is loaded as remote code.
if SparseFormerConfig.model_type not in CONFIG_MAPPING:
    AutoConfig.register(SparseFormerConfig.model_type, SparseFormerConfig)
AutoModel.register(SparseFormerConfig, SparseFormerModel, exist_ok=True)


class SparseFormerLlavaForConditionalGeneration(HubModel, LlavaForConditionalGeneration):
    """LLaVA with a SparseFormer as its vision tower; `swap_vision_tower` puts one together."""

    config: SparseFormerLlavaConfig
    auto_classes = {"AutoModelForImageTextToText": "SparseFormerLlavaForConditionalGeneration"}
    _keep_in_fp32_modules_strict = ["initial_rois"]

    def __init__(self, config: SparseFormerLlavaConfig):
        config.validate()
        super().__init__(config)


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


def matching_processor(processor: LlavaProcessor, model: SparseFormerLlavaForConditionalGeneration) -> LlavaProcessor:
    """The processor for a LLaVA with a SparseFormer: it inserts as many image tokens as the tower gives, whatever
    their number and the size of the images.

    Args:
        processor (`LlavaProcessor`): That of the LLaVA whose tower was replaced; its tokenizer and chat template stay.
        model (`SparseFormerLlavaForConditionalGeneration`): The model it is for.

    Returns:
        A `LlavaProcessor`; save it beside the model.

    Raises:
        ValueError: if the number of tokens that it inserts is not the number that the model gives.
    """
    vision = model.config.vision_config
    new = LlavaProcessor(
        clip_image_processor(vision),
        processor.tokenizer,
        # No image is a million pixels high: all tokens are "additional" ones.
        patch_size=10**6,
        # LLaVA takes one away for the [CLS] that the strategy "default" leaves out.
        num_additional_image_tokens=vision.num_latent_tokens + vision.num_prefix_tokens,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        chat_template=processor.chat_template,
        image_token=processor.image_token,
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


__all__ = ["SparseFormerLlavaConfig", "SparseFormerLlavaForConditionalGeneration"]
