"""Puts a SparseFormer into a LLaVA, a PaliGemma, a Gemma 3 or a LLaVA-OneVision, in the place of its vision tower."""

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

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer_vlm import image_grid as grid_of
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
# Their towers have a grid of patches.
GRID_MODELS = ("gemma3", "llava_onevision")


@torch.no_grad()
def swap_vision_tower(
    vlm: PreTrainedModel, vision_model: nn.Module, image_grid: int | None = None, new_first_layer: bool = False
) -> PreTrainedModel:
    """Return a VLM with its vision tower replaced by a SparseFormer.

    Layers of a tower are counted from its end, where both towers have the same blocks: `vision_feature_layer=22` of a
    tower with 24 blocks becomes -3.

    Args:
        vlm (`PreTrainedModel`):
            `LlavaForConditionalGeneration` (LLaVA 1.5), `PaliGemmaForConditionalGeneration`,
            `Gemma3ForConditionalGeneration` or `LlavaOnevisionForConditionalGeneration`, also with a `device_map`. Its
            language model and projector become part of the new model; they are not copied.
        vision_model (`SparseFormerVisionModel`, `...WithProjection` or `SparseFormerModel`, or with `Patch`):
            Bootstrapped from the tower that it replaces, or a CLIP or SigLIP with one that was. It is copied, in that
            one's precision, to where `vlm` takes its inputs.
        image_grid (`int`, *optional*):
            Rows, and columns, of the grid of a Gemma 3 or a LLaVA-OneVision; by default as before. Of a smaller one,
            the language model reads fewer tokens.
        new_first_layer (`bool`, *optional*, defaults to `False`):
            Take a tower of another width, too, of a LLaVA or a PaliGemma: the first layer of the projector is then a
            new one, which has to be trained.

    Raises:
        ValueError: if `vlm` or `vision_model` is another model, the widths differ, or there is no such grid.
    """
    tower = getattr(vision_model, "vision_model", vision_model).base_model
    tower_fields = tower.config.to_dict()
    tower_fields["model_type"] = tower_fields.get("model_type", "").removesuffix("_projection")
    if tower_fields["model_type"] not in ("sparseformer", "patch_sparseformer"):
        raise ValueError(f"Got a {type(vision_model).__name__} as vision model, expected a SparseFormer.")
    # A part of a VLM has no head.
    if not hasattr(vlm, "lm_head") or vlm.config.model_type not in MODELS:
        raise ValueError(
            f"Got a {type(vlm).__name__}, expected a Llava-, PaliGemma-, Gemma3- or "
            "LlavaOnevisionForConditionalGeneration of Transformers. For the original code base of LLaVA there is "
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
        # The old weights, with the new grid.
        check_projector_is_held(vlm)
        new.multi_modal_projector.load_state_dict(old.multi_modal_projector.state_dict(), assign=True)
        new_parts["multi_modal_projector"] = new.multi_modal_projector
    elif not has_grid:
        expected = first_layer(old.multi_modal_projector).in_features
        width = first_layer(new.multi_modal_projector).in_features
        if width != expected and not new_first_layer:
            raise ValueError(
                f"The projector takes {expected} channels, the vision model gives {width}; bootstrap it from the "
                "tower that it is to replace, or let the projector learn to read another one: frugalvit align-llava."
            )
        if width != expected:
            check_projector_is_held(vlm)
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
    """Return the configuration of a VLM with another tower."""
    fields = old.to_dict()
    for name in ("model_type", "auto_map", "architectures", "quantization_config"):
        fields.pop(name, None)
    if "vision_feature_layer" in fields:
        fields["vision_feature_layer"] = count_from_end(old.vision_feature_layer, old.vision_config.num_hidden_layers)
    if old.model_type not in GRID_MODELS:
        if image_grid is not None:
            raise ValueError(
                f"`image_grid` is {image_grid}, but a {old.model_type} reads tokens of any number; `set_num_tokens` "
                "chooses that."
            )
        return config_class(**fields | {"vision_config": tower_fields})
    if tower_fields["hidden_size"] != old.vision_config.hidden_size:
        raise ValueError(
            f"The tower of this {old.model_type} has {old.vision_config.hidden_size} channels, the vision model "
            f"{tower_fields['hidden_size']}; bootstrap it from the tower that it is to replace."
        )
    rows = grid_of(old)
    size = pair(old.vision_config.image_size)[0]
    cell = pair(old.vision_config.patch_size)[0]
    if image_grid not in (None, rows):
        # A Gemma 3 pools cells, of several rows and columns, into a token.
        pooled = rows // int(old.mm_tokens_per_image**0.5) if old.model_type == "gemma3" else 1
        cell = size // max(image_grid, 1)
        if not pooled <= image_grid < rows or image_grid % pooled or size // cell != image_grid:
            raise ValueError(
                f"`image_grid` is {image_grid}, expected at most {rows}, in steps of {pooled}, with cells of whole "
                f"pixels in images of {size}."
            )
        if old.model_type == "gemma3":
            fields["mm_tokens_per_image"] = (image_grid // pooled) ** 2
    grid = {"tower_config": tower_fields, "image_size": size, "patch_size": cell}
    return config_class(**fields | {"vision_config": grid})


def count_from_end(layers: int | list[int], blocks: int) -> int | list[int]:
    """Convert layer indices of a tower to negative indices."""
    if isinstance(layers, int):
        return layers if layers < 0 else layers - blocks - 1
    return [count_from_end(layer, blocks) for layer in layers]


def first_layer(projector: nn.Module) -> nn.Linear:
    """Return the layer of a LLaVA's or a PaliGemma's projector that reads the vision tower's tokens."""
    return projector.linear_1 if hasattr(projector, "linear_1") else projector.linear


def with_new_first_layer(projector: nn.Module, width: int) -> nn.Module:
    """Return a copy of a projector that reads another number of channels."""
    projector = copy.deepcopy(projector)
    layer = first_layer(projector)
    layer.in_features = width
    layer.weight = nn.Parameter(layer.weight.new_empty(layer.out_features, width))
    layer.reset_parameters()
    return projector


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs, also if Accelerate shared the model out among devices."""
    hook = getattr(model, "_hf_hook", None)
    return next(model.parameters()).device if hook is None else torch.device(hook.execution_device)


def dispatch_to_devices(model: PreTrainedModel, vlm: PreTrainedModel, new_parts: dict[str, nn.Module]):
    """Let tensors follow a model's parts on several devices. Parts of `vlm` keep the hooks that Accelerate gave them;
    new ones have none yet."""
    device = input_device(vlm)
    for part in new_parts.values():
        add_hook_to_module(part, AlignDevicesHook(next(part.parameters()).device))
    skip_keys = model._skip_keys_device_placement
    add_hook_to_module(model, AlignDevicesHook(device, io_same_device=True, skip_keys=skip_keys))
    # Saving and training read it.
    tower = "model.vision_tower"
    model.hf_device_map = {name: place for name, place in vlm.hf_device_map.items() if not name.startswith(tower)}
    if "" not in model.hf_device_map:
        model.hf_device_map[tower] = device


def check_projector_is_held(vlm: nn.Module):
    """Raise a ValueError if Accelerate keeps a projector's weights elsewhere between calls."""
    if any(parameter.is_meta for parameter in vlm.model.multi_modal_projector.parameters()):
        raise ValueError("The projector is offloaded, but is to change; choose a `device_map` that gives it a device.")


@torch.no_grad()
def match_channels_(
    model: PreTrainedModel, original: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Let the projector read channels with the mean and the standard deviation that they had before the swap.

    A SparseFormer's tokens are averages of patches, so their channels spread less, and a projector that was trained on
    patches misreads them. The two numbers a channel are folded into its first layer, a new one: nothing is trained,
    and nothing is added to the model. Ours, not part of a paper.

    Args:
        model, original (`PreTrainedModel`):
            The result of `swap_vision_tower` of a LLaVA 1.5 or PaliGemma, changed in place, and the model before the
            swap, which is not changed and may share its projector.
        batches (iterable of pairs of `torch.Tensor`): Pixel values of the same images, `(batch, 3, height, width)`, as
            `model` and as `original` want them.

    Raises:
        ValueError: if the models have a grid, the projector has no bias or is offloaded, or there is no image.
    """
    if original.config.model_type in GRID_MODELS:
        raise ValueError(f"Channels are matched in a LLaVA 1.5 or PaliGemma, not a {original.config.model_type}.")
    check_projector_is_held(original)
    old = first_layer(original.model.multi_modal_projector)
    if old.bias is None:
        raise ValueError("The projector has no bias to put the channels' means into.")
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
        raise ValueError("There are no images to match the channels on.")
    mean, wanted_mean = sums / counts
    std, wanted_std = (squares / counts - (sums / counts).square()).clamp(min=0).sqrt()
    # A channel that never changes has nothing to spread.
    scale = torch.where(std > 1e-6 * wanted_std, wanted_std / std, 1.0)
    weight = old.weight.double().cpu()
    # The original may have the same one.
    model.model.multi_modal_projector = copy.deepcopy(model.model.multi_modal_projector)
    new = first_layer(model.model.multi_modal_projector)
    new.weight.copy_(weight * scale)
    new.bias.copy_(old.bias.double().cpu() + weight @ (wanted_mean - scale * mean))


def record_projector_inputs(vlm: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the tokens that the projector reads, `(batch, tokens, channels)`."""
    read = []
    handle = vlm.model.multi_modal_projector.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        vlm.get_image_features(pixel_values)
    finally:
        handle.remove()
    return read[0]


def matching_processor(processor: ProcessorMixin, model: PreTrainedModel) -> ProcessorMixin:
    """Return the processor for a model with a SparseFormer as its vision tower. It inserts as many image tokens as the
    model makes of an image, and pads prompts on the left, as `generate` wants them. A LLaVA's also inserts the number
    that its call chooses (`num_image_tokens`).

    Args:
        processor (`ProcessorMixin`):
            The processor of the model whose tower was replaced, whose resizing, cropping and normalization stay.
        model (`SparseFormerLlavaForConditionalGeneration` and the like): The model it is for.

    Returns:
        A `SparseFormerLlavaProcessor`, or one of the class of `processor`; save it beside the model.
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
        # No image is a million pixels high: all tokens are "additional" ones.
        patch_size=10**6,
        # `LlavaProcessor` takes one away for the [CLS] that "default" leaves out.
        num_additional_image_tokens=config.image_seq_length + (strategy == "default"),
        vision_feature_select_strategy=strategy,
        image_token=processor.image_token,
        num_prefix_tokens=config.vision_config.num_prefix_tokens,
    )
