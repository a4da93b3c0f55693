"""Puts a SparseFormer into a LLaVA, a PaliGemma, a Gemma 3 or a LLaVA-OneVision, in the place of its vision tower."""

import copy
import inspect
from collections.abc import Iterable

import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from PIL import Image
from torch import nn
from transformers import Gemma3Processor, LlavaOnevisionProcessor, PaliGemmaProcessor, PreTrainedModel, ProcessorMixin

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer_base import is_sparseformer
from ..configuration.configuration_sparseformer_llava import SparseFormerLlavaConfig
from ..configuration.configuration_sparseformer_paligemma import SparseFormerPaliGemmaConfig
from ..configuration.configuration_sparseformer_vlm import image_grid as grid_of
from .hub import image_processor_config
from .modeling_patch_sparseformer import tower_class
from .modeling_sparseformer_llava import (
    SparseFormerLlavaForConditionalGeneration,
    SparseFormerLlavaProcessor,
    clip_image_processor,
)
from .modeling_sparseformer_paligemma import SparseFormerPaliGemmaForConditionalGeneration
from .modeling_sparseformer_vlm import (
    SparseFormerGemma3ForConditionalGeneration,
    SparseFormerLlavaOnevisionForConditionalGeneration,
    make_grid_tower,
)


# The new model, by the model type of what it is made from.
MODELS = {
    "llava": SparseFormerLlavaForConditionalGeneration,
    "paligemma": SparseFormerPaliGemmaForConditionalGeneration,
    "gemma3": SparseFormerGemma3ForConditionalGeneration,
    "llava_onevision": SparseFormerLlavaOnevisionForConditionalGeneration,
    SparseFormerLlavaConfig.model_type: SparseFormerLlavaForConditionalGeneration,
    SparseFormerPaliGemmaConfig.model_type: SparseFormerPaliGemmaForConditionalGeneration,
}


@torch.no_grad()
def swap_vision_tower(
    vlm: PreTrainedModel, vision_model: nn.Module, image_grid: int | None = None, new_first_layer: bool = False
) -> PreTrainedModel:
    """Return a VLM with its vision tower replaced by a SparseFormer.

    A LLaVA's or a PaliGemma's language model reads the SparseFormer's tokens, fewer than before. A Gemma 3 and a
    LLaVA-OneVision have a grid of patches: few tokens compute, and what they hold goes to the cells that they look at
    (`SparseFormerGridTower`). Layers of a tower are counted from its end, where both towers have the same blocks:
    `vision_feature_layer=22` of a tower with 24 blocks becomes -3.

    Args:
        vlm (`PreTrainedModel`):
            `LlavaForConditionalGeneration` (LLaVA 1.5), `PaliGemmaForConditionalGeneration`,
            `Gemma3ForConditionalGeneration` or `LlavaOnevisionForConditionalGeneration`. Its language model and
            projector become part of the new model; they are not copied. Accelerate may have shared it out among
            devices (`device_map`); the new model is shared out alike.
        vision_model (`SparseFormerVisionModel`, `...WithProjection` or `SparseFormerModel`):
            Bootstrapped from the tower that it replaces, or a CLIP or SigLIP with one that was. It is copied, in that
            one's precision, to where `vlm` takes its inputs.
        image_grid (`int`, *optional*):
            Rows, and columns, of the grid; by default as before. Of a smaller one, the language model reads fewer
            tokens.
        new_first_layer (`bool`, *optional*, defaults to `False`):
            Take a tower of another width, too, of a LLaVA or a PaliGemma: the first layer of the projector is then a
            new one, which says nothing until it is trained.

    Returns:
        `SparseFormerLlavaForConditionalGeneration` and the like, in the mode, training or evaluation, of `vlm`.

    Raises:
        ValueError: if `vlm` is no such model, the vision model has another width, no [CLS] where the strategy leaves
            it out, or too few blocks, or what follows takes no such grid.
    """
    tower = getattr(vision_model, "vision_model", vision_model).base_model
    if not is_sparseformer(getattr(tower, "config", None)):
        raise ValueError(f"Got a {type(vision_model).__name__} as vision model, expected a SparseFormer.")
    # A part of such a model is no whole one.
    if not hasattr(vlm, "lm_head") or vlm.config.model_type not in MODELS:
        raise ValueError(
            f"Got a {type(vlm).__name__}, expected a Llava-, PaliGemma-, Gemma3- or "
            "LlavaOnevisionForConditionalGeneration of Transformers. For the original code base of LLaVA there is "
            "`SparseFormerVisionTower`."
        )
    model, parts = _empty_model(vlm, tower, image_grid), vlm.model
    tower_config = getattr(model.config, "tower_config", None)
    if tower_config is not None:
        own = {"vision_tower": make_grid_tower(tower_config)}
        if image_grid is not None:
            # Its old weights, with the new grid.
            check_projector_is_held(vlm)
            own["multi_modal_projector"] = model.model.multi_modal_projector
            own["multi_modal_projector"].load_state_dict(parts.multi_modal_projector.state_dict(), assign=True)
    else:
        own = {"vision_tower": tower_class(model.config.vision_config)(model.config.vision_config)}
        expected, given = _first_linear(vlm).in_features, _first_linear(model).in_features
        if expected != given and not new_first_layer:
            raise ValueError(
                f"The projector takes {expected} channels, the vision model gives {given}; bootstrap it from the "
                "tower that it is to replace, or let the projector learn to read another one: frugalvit align-llava."
            )
        if expected != given:
            check_projector_is_held(vlm)
            own["multi_modal_projector"] = _projector_with_new_first_layer(vlm, given)
    own["vision_tower"].to(input_device(vlm), next(parts.vision_tower.parameters()).dtype)
    own["vision_tower"].load_state_dict(tower.state_dict())
    for part, module in parts.named_children():
        setattr(model.model, part, own.get(part, module))
    for part, parameter in parts.named_parameters(recurse=False):
        setattr(model.model, part, parameter)
    model.lm_head = vlm.lm_head
    model.generation_config = vlm.generation_config
    if hasattr(vlm, "_hf_hook"):
        _share_out(model, vlm, own)
    return model.train(vlm.training)


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs, also if Accelerate shared the model out among devices."""
    hook = getattr(model, "_hf_hook", None)
    return next(model.parameters()).device if hook is None else torch.device(hook.execution_device)


def _share_out(model: PreTrainedModel, llava: nn.Module, own: dict[str, nn.Module]):
    """Let tensors follow a model's parts on several devices, as in the model that the parts were taken from. These
    parts keep the hooks that Accelerate gave them; `own` parts have none yet."""
    device = input_device(llava)
    for part in own.values():
        add_hook_to_module(part, AlignDevicesHook(next(part.parameters()).device))
    skip_keys = model._skip_keys_device_placement
    add_hook_to_module(model, AlignDevicesHook(device, io_same_device=True, skip_keys=skip_keys))
    # What saving and training ask.
    tower = "model.vision_tower"
    model.hf_device_map = {name: place for name, place in llava.hf_device_map.items() if not name.startswith(tower)}
    if "" not in model.hf_device_map:
        model.hf_device_map[tower] = device


def _empty_model(vlm: PreTrainedModel, tower: nn.Module, image_grid: int | None) -> PreTrainedModel:
    """The new model for such a tower, without weights."""
    config, model_class = vlm.config, MODELS[vlm.config.model_type]
    fields = config.to_dict()
    # Its weights, not the way in which they were loaded.
    for name in ("model_type", "auto_map", "architectures", "quantization_config"):
        fields.pop(name, None)
    if "vision_feature_layer" in fields:
        fields["vision_feature_layer"] = _from_end(config.vision_feature_layer, config.vision_config.num_hidden_layers)
    if hasattr(model_class.config_class, "tower_config"):
        fields |= _grid_fields(vlm, tower, image_grid)
    elif image_grid is None:
        fields["vision_config"] = tower.config.to_dict()
    else:
        raise ValueError(
            f"`image_grid` is {image_grid}, but a {type(vlm).__name__} reads tokens of any number; `set_num_tokens` "
            "chooses that."
        )
    with torch.device("meta"):
        return model_class(model_class.config_class.from_dict(fields))


def _grid_fields(vlm: PreTrainedModel, tower: nn.Module, image_grid: int | None) -> dict:
    """Fields of the configuration of a Gemma 3 or a LLaVA-OneVision with such a tower that are not those it had."""
    config, vision, name = vlm.config, vlm.config.vision_config, type(vlm).__name__
    if vision.hidden_size != tower.config.hidden_size:
        raise ValueError(
            f"The tower of this {name} has {vision.hidden_size} channels, the vision model "
            f"{tower.config.hidden_size}; bootstrap it from the tower that it is to replace."
        )
    rows, (height, _) = grid_of(config), pair(vision.image_size)
    pooled = getattr(config, "mm_tokens_per_image", None)
    # Gemma 3 pools so many cells, each way, into a token.
    step = rows // int(pooled**0.5) if pooled else 1
    fitting = [count for count in range(step, rows + 1, step) if height // (height // count) == count]
    grid = rows if image_grid is None else image_grid
    if grid not in fitting:
        raise ValueError(
            f"`image_grid` is {image_grid}, expected the rows of a grid of its images of {height} pixels that this "
            f"{name} takes: {', '.join(map(str, fitting))}."
        )
    cell = pair(vision.patch_size)[0] if grid == rows else height // grid
    fields = {
        "vision_config": vision.to_dict() | {"patch_size": cell},
        "tower_config": tower.config.to_dict() | {"feature_stride": cell},
    }
    return fields | ({"mm_tokens_per_image": (grid // step) ** 2} if pooled else {})


def _from_end(layers: int | list[int], blocks: int) -> int | list[int]:
    """Layers of a tower with so many blocks, counted from its end."""
    if isinstance(layers, int):
        return layers if layers < 0 else layers - blocks - 1
    return [_from_end(layer, blocks) for layer in layers]


def _first_linear(llava: nn.Module) -> nn.Linear:
    """The layer that reads the vision tower's tokens."""
    return getattr(llava.model.multi_modal_projector, _first_name(llava.model.multi_modal_projector))


def _first_name(projector: nn.Module) -> str:
    return "linear_1" if hasattr(projector, "linear_1") else "linear"


def _projector_with_new_first_layer(llava: nn.Module, width: int) -> nn.Module:
    """A copy of the projector that reads so many channels."""
    projector = copy.deepcopy(llava.model.multi_modal_projector)
    name = _first_name(projector)
    old = getattr(projector, name)
    new = nn.Linear(width, old.out_features, old.bias is not None, old.weight.device, old.weight.dtype)
    setattr(projector, name, new)
    return projector


@torch.no_grad()
def match_channels_(
    model: PreTrainedModel, original: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
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
    if hasattr(model.config, "tower_config"):
        raise ValueError(
            f"Channels are matched in the projector of a LLaVA in the style of 1.5 or a PaliGemma; a "
            f"{type(original).__name__} has a grid."
        )
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


def matching_processor(processor: ProcessorMixin, model: PreTrainedModel) -> ProcessorMixin:
    """Return the processor for a model with a SparseFormer as its vision tower. It inserts as many image tokens as the
    model makes of an image. A LLaVA's also inserts the number that its call chooses (`num_image_tokens`).

    Args:
        processor (`ProcessorMixin`):
            The processor of the model whose tower was replaced. Its tokenizer and chat template stay, and how a
            LLaVA-OneVision's cuts images into tiles.
        model (`SparseFormerLlavaForConditionalGeneration` and the like):
            The model it is for.

    Returns:
        A `SparseFormerLlavaProcessor`, or one of the class of `processor`; save it beside the model.

    Raises:
        ValueError: if the number of tokens that it inserts is not the number that the model gives.
    """
    if hasattr(model.config, "tower_config"):
        new = _processor_on_grid(processor, model.config)
    elif model.config.model_type == SparseFormerPaliGemmaConfig.model_type:
        vision = model.config.vision_config
        fields = image_processor_config(vision)
        image_processor = getattr(transformers, fields.pop("image_processor_type"))(**fields)
        image_processor.image_seq_length = model.config.image_seq_length
        new = PaliGemmaProcessor(image_processor, processor.tokenizer, chat_template=processor.chat_template)
    else:
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


def _processor_on_grid(processor: ProcessorMixin, config) -> ProcessorMixin:
    """Return a copy of a processor with the model's grid, which prepares images as the model's tower takes them."""
    parts = {name: copy.deepcopy(getattr(processor, name)) for name in processor.get_attributes()}
    for part in parts.values():
        if hasattr(part, "image_mean"):
            part.image_mean = list(config.tower_config.image_mean)
            part.image_std = list(config.tower_config.image_std)
    parts["chat_template"] = processor.chat_template
    if isinstance(processor, Gemma3Processor):
        return Gemma3Processor(**parts, image_seq_length=config.tokens_per_grid)
    return LlavaOnevisionProcessor(
        **parts,
        num_image_tokens=config.tokens_per_grid,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        vision_aspect_ratio=config.vision_aspect_ratio,
        image_token=processor.image_token,
        video_token=processor.video_token,
    )


@torch.no_grad()
def check_image_tokens(processor: ProcessorMixin, model: nn.Module):
    """Raise unless a processor inserts as many image tokens for an image as the model makes of it.

    Raises:
        ValueError: with both numbers.
    """
    # A Gemma 3's prompts have another token than the one that stands for an image.
    inputs = processor(images=Image.new("RGB", (37, 23), "gray"), text=processor.image_token, return_tensors="pt")
    inserted = int((inputs["input_ids"] == model.config.image_token_id).sum())
    inputs = inputs.to(input_device(model), model.model.vision_tower.dtype)
    taken = inspect.signature(model.model.get_image_features).parameters
    features = model.get_image_features(**{name: value for name, value in inputs.items() if name in taken})
    given = sum(len(each) for each in features.pooler_output)
    if inserted != given:
        raise ValueError(
            f"The processor inserts {inserted} tokens (id {model.config.image_token_id}) for an image, the model "
            f"makes {given} of it. `matching_processor` makes one that fits."
        )
