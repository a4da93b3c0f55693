"""Replacement of a VLM's vision tower by a SparseFormer, for LLaVA, PaliGemma, Gemma 3 and LLaVA-OneVision."""

import copy
from collections.abc import Iterable

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import (
    Gemma3Processor,
    LlavaOnevisionProcessor,
    PaliGemmaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from ..configuration.configuration_base import is_sparseformer, pair
from ..configuration.configuration_sparseformer_vlm import image_grid as image_grid_of
from .image_format import set_size
from .modeling_sparseformer_vlm import (
    SparseFormerGemma3ForConditionalGeneration,
    SparseFormerLlavaForConditionalGeneration,
    SparseFormerLlavaOnevisionForConditionalGeneration,
    SparseFormerLlavaProcessor,
    SparseFormerPaliGemmaForConditionalGeneration,
)


MODELS = {
    "llava": SparseFormerLlavaForConditionalGeneration,
    "paligemma": SparseFormerPaliGemmaForConditionalGeneration,
    "gemma3": SparseFormerGemma3ForConditionalGeneration,
    "llava_onevision": SparseFormerLlavaOnevisionForConditionalGeneration,
}
# Model types that expect a square grid of features from their vision tower.
GRID_MODELS = ("gemma3", "llava_onevision")


@torch.no_grad()
def swap_vision_tower(
    vlm: PreTrainedModel, vision_model: nn.Module, image_grid: int | None = None, new_first_layer: bool = False
) -> PreTrainedModel:
    """Return a VLM whose vision tower is replaced by a SparseFormer.

    `vision_feature_layer` is converted to a negative index, because the last blocks of the old and
    new tower correspond. For example, layer 22 of a tower with 24 blocks (25 hidden states) becomes -3.

    Args:
        vlm (`PreTrainedModel`):
            A `LlavaForConditionalGeneration` (LLaVA 1.5), `PaliGemmaForConditionalGeneration`,
            `Gemma3ForConditionalGeneration` or `LlavaOnevisionForConditionalGeneration`. It may have a `device_map`.
            The new model shares the weights of the language model and of the projector with `vlm`.
        vision_model (`SparseFormerVisionModel`, `SparseFormerVisionModelWithProjection` or `SparseFormerModel`):
            A SparseFormer or PatchSparseFormer that was bootstrapped from the old vision tower, or a CLIP or SigLIP
            with such a SparseFormer. The SparseFormer is copied to the device of the VLM's inputs and cast to the
            dtype of the old tower.
        image_grid (`int`, *optional*):
            Number of rows and columns of the feature grid in a Gemma 3 or a LLaVA-OneVision. By default, the feature
            grid does not change. With a smaller grid, the language model gets fewer tokens for each image.
        new_first_layer (`bool`, *optional*, defaults to `False`):
            Accept a vision model that is wider or narrower than the old tower of a LLaVA or a PaliGemma. The first
            layer of the projector then has new weights, which have to be trained.

    Raises:
        ValueError: if the class of `vlm` or `vision_model` is not supported, if the widths differ, or if `image_grid`
            does not fit the image size.
    """
    tower = getattr(vision_model, "vision_model", vision_model)
    if not is_sparseformer(getattr(tower, "config", None)):
        raise ValueError(f"Got a {type(vision_model).__name__} as vision model, expected a SparseFormer.")
    tower = tower.base_model
    tower_fields = tower.config.to_dict()
    tower_fields["model_type"] = tower_fields["model_type"].removesuffix("_projection")
    # VLMs with and without a language-modeling head have the same model type, so `lm_head` is also checked.
    if not hasattr(vlm, "lm_head") or vlm.config.model_type not in MODELS:
        raise ValueError(
            f"Got a {type(vlm).__name__}, expected a Llava-, PaliGemma-, Gemma3- or "
            "LlavaOnevisionForConditionalGeneration of Transformers. In LLaVA's original code base, use "
            "`SparseFormerVisionTower`."
        )
    model_class = MODELS[vlm.config.model_type]
    config = swapped_config(model_class.config_class, vlm.config, tower_fields, image_grid)
    with torch.device("meta"):
        model = model_class(config)
    old = vlm.model
    new = model.model
    has_grid = vlm.config.model_type in GRID_MODELS
    sparseformer = new.vision_tower.tower if has_grid else new.vision_tower
    sparseformer.load_state_dict(copy.deepcopy(tower.state_dict()), assign=True)
    sparseformer.to(input_device(vlm), next(old.vision_tower.parameters()).dtype)
    new_parts = {"vision_tower": new.vision_tower}
    if has_grid and image_grid is not None:
        # The new projector is built for the new grid, and gets the weights of the old projector.
        check_projector_on_device(vlm)
        new.multi_modal_projector.load_state_dict(old.multi_modal_projector.state_dict(), assign=True)
        new_parts["multi_modal_projector"] = new.multi_modal_projector
    elif not has_grid:
        expected = first_layer(old.multi_modal_projector).in_features
        width = first_layer(new.multi_modal_projector).in_features
        if width != expected and not new_first_layer:
            raise ValueError(
                f"The vision model has {width} channels, but the projector takes {expected} channels. Bootstrap a "
                "vision model from the tower that it replaces, or train the projector: frugalvit align-llava."
            )
        if width != expected:
            check_projector_on_device(vlm)
            new_parts["multi_modal_projector"] = with_new_first_layer(old.multi_modal_projector, width)
    for name, part in old.named_children():
        setattr(new, name, new_parts.get(name, part))
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    model.lm_head = vlm.lm_head
    model.generation_config = vlm.generation_config
    if hasattr(vlm, "_hf_hook"):
        dispatch_to_devices(model, vlm, new_parts)
    return model.train(vlm.training)


def swapped_config(
    config_class: type, old: PreTrainedConfig, tower_fields: dict, image_grid: int | None
) -> PreTrainedConfig:
    """Return the configuration of a VLM after `swap_vision_tower`. `old` is its configuration before the swap, and
    `tower_fields` are the configuration fields of the new vision tower."""
    fields = old.to_dict()
    for name in ("model_type", "auto_map", "architectures", "quantization_config"):
        fields.pop(name, None)
    if "vision_feature_layer" in fields:
        fields["vision_feature_layer"] = negative_index(old.vision_feature_layer, old.vision_config.num_hidden_layers)
    if old.model_type not in GRID_MODELS:
        if image_grid is not None:
            raise ValueError(
                f"`image_grid` is {image_grid}, expected None: a {old.model_type} reads any number of tokens, which "
                "`set_num_tokens` sets."
            )
        return config_class(**fields | {"vision_config": tower_fields})
    if tower_fields["hidden_size"] != old.vision_config.hidden_size:
        raise ValueError(
            f"The vision model has {tower_fields['hidden_size']} channels, but the tower of this {old.model_type} has "
            f"{old.vision_config.hidden_size} channels. Bootstrap a vision model from the tower that it replaces."
        )
    rows = image_grid_of(old)
    size = pair(old.vision_config.image_size)[0]
    cell = pair(old.vision_config.patch_size)[0]
    if image_grid not in (None, rows):
        # Gemma 3 pools each square of `pooled` x `pooled` cells to one token.
        pooled = rows // int(old.mm_tokens_per_image**0.5) if old.model_type == "gemma3" else 1
        cell = size // max(image_grid, 1)
        if not pooled <= image_grid < rows or image_grid % pooled or size // cell != image_grid:
            raise ValueError(
                f"`image_grid` is {image_grid}, expected a multiple of {pooled} up to {rows} whose cells are whole "
                f"pixels in images of {size} pixels."
            )
        if old.model_type == "gemma3":
            fields["mm_tokens_per_image"] = (image_grid // pooled) ** 2
    grid = {"tower_config": tower_fields, "image_size": size, "patch_size": cell}
    return config_class(**fields | {"vision_config": grid})


def negative_index(layers: int | list[int], blocks: int) -> int | list[int]:
    """Convert layer indices of a vision tower with `blocks` blocks to negative indices."""
    if isinstance(layers, int):
        return layers if layers < 0 else layers - blocks - 1
    return [negative_index(layer, blocks) for layer in layers]


def first_layer(projector: nn.Module) -> nn.Linear:
    return projector.linear_1 if hasattr(projector, "linear_1") else projector.linear


def with_new_first_layer(projector: nn.Module, width: int) -> nn.Module:
    """Return a copy of a projector with a new first layer, which has `width` input channels and random weights."""
    projector = copy.deepcopy(projector)
    layer = first_layer(projector)
    layer.in_features = width
    layer.weight = nn.Parameter(layer.weight.new_empty(layer.out_features, width))
    layer.reset_parameters()
    return projector


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs, also for a model that Accelerate has dispatched to several devices."""
    hook = getattr(model, "_hf_hook", None)
    return next(model.parameters()).device if hook is None else torch.device(hook.execution_device)


def dispatch_to_devices(model: PreTrainedModel, vlm: PreTrainedModel, new_parts: dict[str, nn.Module]):
    """Add hooks of Accelerate to `model` and to each module in `new_parts`, and set `model.hf_device_map`. The hooks
    move tensors between devices. The other parts of `model` come from `vlm` and keep their hooks."""
    device = input_device(vlm)
    for part in new_parts.values():
        add_hook_to_module(part, AlignDevicesHook(next(part.parameters()).device))
    skip_keys = model._skip_keys_device_placement
    add_hook_to_module(model, AlignDevicesHook(device, io_same_device=True, skip_keys=skip_keys))
    # `save_pretrained` and `Trainer` read `hf_device_map`.
    tower = "model.vision_tower"
    model.hf_device_map = {name: place for name, place in vlm.hf_device_map.items() if not name.startswith(tower)}
    if "" not in model.hf_device_map:
        model.hf_device_map[tower] = device


def check_projector_on_device(vlm: nn.Module):
    if any(parameter.is_meta for parameter in vlm.model.multi_modal_projector.parameters()):
        raise ValueError("The projector is offloaded, and cannot be changed; set a device for it in `device_map`.")


@torch.no_grad()
def match_channels_(
    model: PreTrainedModel, original: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Match the mean and standard deviation of each projector input channel to those of the original model, in place.

    The projector was trained on tokens of single patches. A token of a SparseFormer averages several patches, so the
    channels of these tokens have smaller standard deviations. A scale and a shift for each channel are merged into a
    copy of the projector's first layer. This method needs no training and no additional parameters. It is not part of
    a paper.

    Args:
        model (`PreTrainedModel`): The result of `swap_vision_tower` for a LLaVA 1.5 or PaliGemma; changed in place.
        original (`PreTrainedModel`): The VLM before the swap, which does not change.
        batches (iterable of pairs of `torch.Tensor`): Pixel values, `(batch, 3, height, width)`, of the same images
            for `model` and for `original`.

    Raises:
        ValueError: if `original` is a Gemma 3 or a LLaVA-OneVision, if the projector has no bias, is offloaded or has
            a new first layer for another number of channels, or if `batches` is empty.
    """
    if original.config.model_type in GRID_MODELS:
        raise ValueError(f"Got a {original.config.model_type}, expected a LLaVA 1.5 or a PaliGemma.")
    check_projector_on_device(original)
    old = first_layer(original.model.multi_modal_projector)
    if old.bias is None:
        raise ValueError("The first layer of the projector has no bias; matching channels needs one.")
    width = first_layer(model.model.multi_modal_projector).in_features
    if width != old.in_features:
        raise ValueError(
            f"The projector of `model` takes {width} channels, but the projector of `original` takes "
            f"{old.in_features} channels, so channels cannot be matched. Train the projector: frugalvit align-llava."
        )
    counts = torch.zeros(2, 1, dtype=torch.float64)
    sums = torch.zeros(2, old.in_features, dtype=torch.float64)
    squares = torch.zeros_like(sums)
    for pixel_values in batches:
        for index, (vlm, images) in enumerate(zip((model, original), pixel_values, strict=True)):
            tokens = record_projector_inputs(vlm, images).flatten(0, -2).double().cpu()
            counts[index] += len(tokens)
            sums[index] += tokens.sum(0)
            squares[index] += tokens.square().sum(0)
    if not counts.any():
        raise ValueError("`batches` is empty; matching channels needs images.")
    means = sums / counts
    mean, wanted_mean = means
    std, wanted_std = (squares / counts - means.square()).clamp(min=0).sqrt()
    # Constant channels are not scaled, because their standard deviation is zero.
    scale = torch.where(std > 1e-6 * wanted_std, wanted_std / std, 1.0)
    weight = old.weight.double().cpu()
    # The projector is copied, because `original` may share it.
    model.model.multi_modal_projector = copy.deepcopy(model.model.multi_modal_projector)
    new = first_layer(model.model.multi_modal_projector)
    new.weight.copy_(weight * scale)
    new.bias.copy_(old.bias.double().cpu() + weight @ (wanted_mean - scale * mean))


def record_projector_inputs(vlm: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Run a VLM's vision tower on images. Return the input of the projector, `(batch, tokens, channels)`."""
    recorded = []
    projector = vlm.model.multi_modal_projector
    handle = projector.register_forward_pre_hook(lambda module, inputs: recorded.append(inputs[0]))
    try:
        vlm.get_image_features(pixel_values)
    finally:
        handle.remove()
    return recorded[0]


def matching_processor(processor: ProcessorMixin, model: PreTrainedModel) -> ProcessorMixin:
    """Return the processor for a VLM whose vision tower is a SparseFormer.

    The processor inserts the model's number of image tokens for each image. It pads prompts on the left, because
    `generate` needs left padding. For a LLaVA, the argument `num_image_tokens` of the processor's `__call__` sets
    another number of latent tokens.

    Args:
        processor (`ProcessorMixin`): The processor of the VLM before the swap. The new processor resizes, crops and
            normalizes images in the same way.
        model (`PreTrainedModel`): The result of `swap_vision_tower`.

    Returns:
        A `SparseFormerLlavaProcessor` for a LLaVA, else a processor of the same class as `processor`. Save the
        processor in the folder of the model.
    """
    config = model.config
    parts = {name: copy.deepcopy(getattr(processor, name)) for name in processor.get_attributes()}
    parts["tokenizer"].padding_side = "left"
    parts["chat_template"] = processor.chat_template
    if isinstance(processor, Gemma3Processor):
        return Gemma3Processor(**parts, image_seq_length=config.image_seq_length)
    if isinstance(processor, LlavaOnevisionProcessor):
        return LlavaOnevisionProcessor(
            **parts,
            num_image_tokens=config.image_seq_length,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            vision_aspect_ratio=config.vision_aspect_ratio,
            image_token=processor.image_token,
            video_token=processor.video_token,
        )
    set_size(parts["image_processor"], config.vision_config.image_size)
    if isinstance(processor, PaliGemmaProcessor):
        parts["image_processor"].image_seq_length = config.image_seq_length
        return PaliGemmaProcessor(**parts)
    strategy = config.vision_feature_select_strategy
    return SparseFormerLlavaProcessor(
        **parts,
        # All images are smaller than this patch size, so `LlavaProcessor` counts no patches.
        patch_size=10**6,
        # With the strategy "default", `LlavaProcessor` subtracts one token for [CLS], so one token is added here.
        num_additional_image_tokens=config.image_seq_length + (strategy == "default"),
        vision_feature_select_strategy=strategy,
        image_token=processor.image_token,
        num_prefix_tokens=config.vision_config.num_prefix_tokens,
    )
