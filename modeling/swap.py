"""Puts a SparseFormer into a LLaVA or a PaliGemma, in the place of their vision tower."""

import copy
from collections.abc import Iterable

import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from PIL import Image
from torch import nn
from transformers import (
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
)

from ..configuration.configuration_sparseformer import SparseFormerConfig
from ..configuration.configuration_sparseformer_llava import SparseFormerLlavaConfig
from ..configuration.configuration_sparseformer_paligemma import SparseFormerPaliGemmaConfig
from .hub import image_processor_config
from .modeling_sparseformer import SparseFormerModel
from .modeling_sparseformer_llava import (
    SparseFormerLlavaForConditionalGeneration,
    SparseFormerLlavaProcessor,
    clip_image_processor,
)
from .modeling_sparseformer_paligemma import SparseFormerPaliGemmaForConditionalGeneration


Swapped = SparseFormerLlavaForConditionalGeneration | SparseFormerPaliGemmaForConditionalGeneration


@torch.no_grad()
def swap_vision_tower(
    llava: LlavaForConditionalGeneration | PaliGemmaForConditionalGeneration, vision_model: nn.Module
) -> Swapped:
    """A LLaVA or a PaliGemma with its vision tower replaced by a SparseFormer.

    Layers of a LLaVA's tower are counted from its end, where both towers have the same blocks:
    `vision_feature_layer=22` of a tower with 24 blocks becomes -3. A PaliGemma reads the last one.

    Args:
        llava (`LlavaForConditionalGeneration` or `PaliGemmaForConditionalGeneration`):
            Of Transformers, in the style of LLaVA 1.5; PaliGemma 1 or 2. Its language model and projector become part
            of the new model; they are not copied. Accelerate may have shared it out among devices (`device_map`); the
            new model is shared out alike.
        vision_model (`SparseFormerVisionModel`, `...WithProjection` or `SparseFormerModel`):
            Bootstrapped from the tower that it replaces, or a CLIP or SigLIP with one that was. It is copied, in that
            one's precision, to where `llava` takes its inputs.

    Returns:
        `SparseFormerLlavaForConditionalGeneration` or `SparseFormerPaliGemmaForConditionalGeneration`, in the mode,
        training or evaluation, of `llava`.

    Raises:
        ValueError: if `llava` is no such model, or the vision model has another width, no [CLS] where the strategy
            leaves it out, or too few blocks.
    """
    parts = getattr(llava, "model", None)
    if not all(hasattr(parts, name) for name in ("vision_tower", "multi_modal_projector", "language_model")):
        raise ValueError(
            f"Got a {type(llava).__name__}, expected a LlavaForConditionalGeneration or "
            "PaliGemmaForConditionalGeneration of Transformers. For the original code base of LLaVA there is "
            "`SparseFormerVisionTower`."
        )
    if hasattr(parts, "image_newline"):
        raise ValueError(
            f"Got a {type(llava).__name__}, whose images are rows of tiles with a token that ends each row; a "
            "SparseFormer's tokens have no rows. Expected a LLaVA in the style of 1.5."
        )
    tower = getattr(vision_model, "vision_model", vision_model).base_model
    if getattr(tower.config, "model_type", None) != SparseFormerConfig.model_type:
        raise ValueError(f"Got a {type(vision_model).__name__} as vision model, expected a SparseFormer.")
    if llava.config.model_type in ("llava", SparseFormerLlavaConfig.model_type):
        model = _empty_llava(llava, tower)
    elif llava.config.model_type in ("paligemma", SparseFormerPaliGemmaConfig.model_type):
        model = _empty_paligemma(llava, tower)
    else:
        raise ValueError(
            f"Got a {type(llava).__name__}, whose projector or configuration counts on a grid of patches; a "
            "SparseFormer's tokens have none. Expected a LLaVA in the style of 1.5 or a PaliGemma."
        )
    dtype = next(parts.vision_tower.parameters()).dtype
    new_tower = SparseFormerModel(model.config.vision_config).to(input_device(llava), dtype)
    new_tower.load_state_dict(tower.state_dict())
    model.model.vision_tower = new_tower
    model.model.multi_modal_projector = parts.multi_modal_projector
    model.model.language_model = parts.language_model
    model.lm_head = llava.lm_head
    model.generation_config = llava.generation_config
    if hasattr(llava, "_hf_hook"):
        _share_out(model, llava)
    return model.train(llava.training)


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs, also if Accelerate shared the model out among devices."""
    hook = getattr(model, "_hf_hook", None)
    return next(model.parameters()).device if hook is None else torch.device(hook.execution_device)


def _share_out(model: Swapped, llava: nn.Module):
    """Let tensors follow the parts of a model that are on several devices, as in the model that they were taken from;
    the parts themselves keep the hooks that Accelerate gave them."""
    device = input_device(llava)
    add_hook_to_module(model.model.vision_tower, AlignDevicesHook(device))
    skip_keys = model._skip_keys_device_placement
    add_hook_to_module(model, AlignDevicesHook(device, io_same_device=True, skip_keys=skip_keys))
    # What saving and training ask.
    model.hf_device_map = {
        name: place for name, place in llava.hf_device_map.items() if not name.startswith("model.vision_tower")
    }
    if "" not in model.hf_device_map:
        model.hf_device_map["model.vision_tower"] = device


def _empty_llava(llava: nn.Module, tower: nn.Module) -> SparseFormerLlavaForConditionalGeneration:
    """A LLaVA for such a tower, without weights."""
    config = llava.config
    layers, blocks = config.vision_feature_layer, config.vision_config.num_hidden_layers

    def from_end(layer: int) -> int:
        return layer if layer < 0 else layer - blocks - 1

    _check_width(llava, tower, 1 if isinstance(layers, int) else len(layers))
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
        return SparseFormerLlavaForConditionalGeneration(new_config)


def _empty_paligemma(paligemma: nn.Module, tower: nn.Module) -> SparseFormerPaliGemmaForConditionalGeneration:
    """A PaliGemma for such a tower, without weights."""
    config = paligemma.config
    _check_width(paligemma, tower)
    fields = ("image_token_index", "vocab_size", "projection_dim", "hidden_size", "tie_word_embeddings")
    new_config = SparseFormerPaliGemmaConfig(
        # A copy: it says how many tokens an image has.
        text_config=type(config.text_config)(**config.text_config.to_dict()),
        vision_config=tower.config.to_dict(),
        **{name: getattr(config, name) for name in fields},
    )
    with torch.device("meta"):
        return SparseFormerPaliGemmaForConditionalGeneration(new_config)


def _first_linear(llava: nn.Module) -> nn.Linear:
    """The layer that reads the vision tower's tokens."""
    projector = llava.model.multi_modal_projector
    return projector.linear_1 if hasattr(projector, "linear_1") else projector.linear


def _check_width(llava: nn.Module, tower: nn.Module, layers: int = 1):
    """Raise unless the projector takes the channels of so many layers of a tower."""
    expected, given = _first_linear(llava).in_features, tower.config.hidden_size * layers
    if expected != given:
        raise ValueError(
            f"The projector takes {expected} channels, the vision model gives {given} ({layers} x "
            f"{tower.config.hidden_size}); bootstrap it from the tower that it is to replace."
        )


@torch.no_grad()
def match_channels_(model: Swapped, original: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let the projector read channels with the mean and the standard deviation that they had before the swap.

    A SparseFormer's tokens are averages of patches, so their channels spread less, and a projector that was trained on
    patches misreads them. The two numbers a channel are folded into its first layer, a new one: nothing is trained,
    and nothing is added to the model. Ours, not part of a paper.

    Args:
        model (`SparseFormerLlavaForConditionalGeneration` or `SparseFormerPaliGemmaForConditionalGeneration`):
            The result of `swap_vision_tower`; changed in place. It may share its projector with `original`.
        original (`LlavaForConditionalGeneration` or `PaliGemmaForConditionalGeneration`):
            The model before the swap; not changed.
        batches (iterable of pairs of `torch.Tensor`): Pixel values of the same images, `(batch, 3, height, width)`, as
            `model` and as `original` want them.

    Raises:
        ValueError: if the projector has no bias or is offloaded, or there is no image.
    """
    check_projector_is_held(original)
    old = _first_linear(original)
    if old.bias is None:
        raise ValueError("The projector has no bias to put the channels' means into.")
    sums = [torch.zeros(3, old.in_features, dtype=torch.float64) for _ in range(2)]
    for pixel_values in batches:
        for part, images, found in zip((model, original), pixel_values, sums, strict=True):
            tokens = _read_by_projector(part, images).flatten(0, -2).double().cpu()
            found += torch.stack([torch.full_like(tokens[0], len(tokens)), tokens.sum(0), tokens.square().sum(0)])
    (count, *_), _ = sums
    if not count.any():
        raise ValueError("There are no images to match the channels on.")
    (mean, std), (wanted_mean, wanted_std) = (
        (total / count, (squares / count - (total / count).square()).clamp(min=0).sqrt())
        for count, total, squares in sums
    )
    # A channel that never changes has nothing to spread.
    scale = torch.where(std > 1e-6 * wanted_std, wanted_std / std, 1.0)
    weight = old.weight.double().cpu()
    # The original may have the same one.
    model.model.multi_modal_projector = copy.deepcopy(model.model.multi_modal_projector)
    new = _first_linear(model)
    new.weight.copy_(weight * scale)
    new.bias.copy_(old.bias.double().cpu() + weight @ (wanted_mean - scale * mean))


def check_projector_is_held(llava: nn.Module):
    """Raise a ValueError if Accelerate keeps a projector's weights elsewhere between calls."""
    if any(parameter.is_meta for parameter in llava.model.multi_modal_projector.parameters()):
        raise ValueError("The projector is offloaded, but is to change; choose a `device_map` that gives it a device.")


def _read_by_projector(llava: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the tokens that the projector reads, `(batch, tokens, channels)`."""
    read = []
    handle = llava.model.multi_modal_projector.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        llava.get_image_features(pixel_values)
    finally:
        handle.remove()
    return read[0]


def matching_processor(
    processor: LlavaProcessor | PaliGemmaProcessor, model: Swapped
) -> SparseFormerLlavaProcessor | PaliGemmaProcessor:
    """The processor for a LLaVA or a PaliGemma with a SparseFormer: it inserts as many image tokens as the tower
    gives, whatever their number and the size of the images, or, a LLaVA's, as its call chooses (`num_image_tokens`).

    Args:
        processor (`LlavaProcessor` or `PaliGemmaProcessor`):
            That of the model whose tower was replaced; its tokenizer and chat template stay.
        model (`SparseFormerLlavaForConditionalGeneration` or `SparseFormerPaliGemmaForConditionalGeneration`):
            The model it is for.

    Returns:
        A `SparseFormerLlavaProcessor` or a `PaliGemmaProcessor`; save it beside the model.

    Raises:
        ValueError: if the number of tokens that it inserts is not the number that the model gives.
    """
    vision = model.config.vision_config
    if model.config.model_type == SparseFormerPaliGemmaConfig.model_type:
        fields = image_processor_config(vision)
        image_processor = getattr(transformers, fields.pop("image_processor_type"))(**fields)
        image_processor.image_seq_length = model.config.image_seq_length
        new = PaliGemmaProcessor(image_processor, processor.tokenizer, chat_template=processor.chat_template)
    else:
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
def check_image_tokens(processor: LlavaProcessor | PaliGemmaProcessor, model: nn.Module):
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
