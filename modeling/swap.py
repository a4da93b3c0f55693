"""Puts a SparseFormer into a LLaVA, a PaliGemma or another model that reads images and texts, in the place of its
vision tower."""

import copy
import inspect
from collections.abc import Iterable

import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from PIL import Image
from torch import nn
from transformers import (
    PaliGemmaProcessor,
    PreTrainedModel,
    ProcessorMixin,
)

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer_base import is_sparseformer
from ..configuration.configuration_sparseformer_llava import SparseFormerLlavaConfig
from ..configuration.configuration_sparseformer_paligemma import SparseFormerPaliGemmaConfig
from .hosts import read_anatomy
from .hub import image_processor_config
from .modeling_sparseformer import SparseFormerModel
from .modeling_sparseformer_llava import (
    SparseFormerLlavaForConditionalGeneration,
    SparseFormerLlavaProcessor,
    clip_image_processor,
)
from .modeling_sparseformer_paligemma import SparseFormerPaliGemmaForConditionalGeneration
from .modeling_sparseformer_vlm import (
    CONNECTORS,
    TOWERS,
    VLMS,
    GridTowerMixin,
    cells_of_token,
    grid_class,
    grid_of,
    make_tower,
    part_name,
)


Swapped = SparseFormerLlavaForConditionalGeneration | SparseFormerPaliGemmaForConditionalGeneration | GridTowerMixin


@torch.no_grad()
def swap_vision_tower(
    vlm: PreTrainedModel, vision_model: nn.Module, image_grid: int | None = None, new_first_layer: bool = False
) -> Swapped:
    """A model that reads images and texts with its vision tower replaced by a SparseFormer.

    A LLaVA's or a PaliGemma's language model reads the SparseFormer's tokens, fewer than before. What counts on a grid
    of patches, as the others do, has its grid: few tokens compute, and what they hold goes to the cells that they look
    at (`SparseFormerGridTower`). Layers of a tower are counted from its end, where both towers have the same blocks:
    `vision_feature_layer=22` of a tower with 24 blocks becomes -3.

    Args:
        vlm (`PreTrainedModel`):
            Of Transformers, a LLaVA in the style of 1.5, a PaliGemma 1 or 2, or with a grid a LLaVA-NeXT, a
            LLaVA-OneVision, an Idefics3, a SmolVLM, a Gemma 3 or an InternVL (`...ForConditionalGeneration`). Its
            language model and projector become part of the new model; they are not copied. Accelerate may have shared
            it out among devices (`device_map`); the new model is shared out alike.
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
    parts = getattr(vlm, "model", None)
    # A part of such a model is no whole one.
    model_type = vlm.config.model_type if hasattr(vlm, "lm_head") else None
    model_class = model_type and grid_class(type(vlm))
    tower = getattr(vision_model, "vision_model", vision_model).base_model
    if not is_sparseformer(getattr(tower, "config", None)):
        raise ValueError(f"Got a {type(vision_model).__name__} as vision model, expected a SparseFormer.")
    if model_class is not None:
        model = _empty_on_grid(vlm, tower, image_grid, model_class)
    elif model_type in ("llava", SparseFormerLlavaConfig.model_type):
        model = _empty_llava(vlm, tower, new_first_layer)
    elif model_type in ("paligemma", SparseFormerPaliGemmaConfig.model_type):
        model = _empty_paligemma(vlm, tower, new_first_layer)
    else:
        raise ValueError(
            f"Got a {type(vlm).__name__}, expected a LlavaForConditionalGeneration or "
            "PaliGemmaForConditionalGeneration of Transformers, or that of a model with a grid: "
            f"{', '.join(VLMS)}. For the original code base of LLaVA there is `SparseFormerVisionTower`."
        )
    if model_class is None and image_grid is not None:
        raise ValueError(
            f"`image_grid` is {image_grid}, but a {type(vlm).__name__} reads tokens of any number; `set_num_tokens` "
            "chooses that."
        )
    name = part_name(parts, TOWERS)
    dtype = next(getattr(parts, name).parameters()).dtype
    new_tower = make_tower(model.config) if model_class else SparseFormerModel(model.config.vision_config)
    new_tower.to(input_device(vlm), dtype).load_state_dict(tower.state_dict())
    own = {name: new_tower}
    if image_grid is not None:
        check_projector_is_held(vlm)
        own |= _connector_for_grid(parts, model.model)
    elif model_class is None and _first_linear(model).in_features != _first_linear(vlm).in_features:
        check_projector_is_held(vlm)
        own |= _projector_with_new_first_layer(parts, _first_linear(model).in_features)
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


def _share_out(model: Swapped, llava: nn.Module, own: dict[str, nn.Module]):
    """Let tensors follow a model's parts on several devices, as in the model that the parts were taken from. These
    parts keep the hooks that Accelerate gave them; `own` parts have none yet."""
    device = input_device(llava)
    for part in own.values():
        add_hook_to_module(part, AlignDevicesHook(next(part.parameters()).device))
    skip_keys = model._skip_keys_device_placement
    add_hook_to_module(model, AlignDevicesHook(device, io_same_device=True, skip_keys=skip_keys))
    # What saving and training ask.
    tower = f"model.{part_name(model.model, TOWERS)}"
    model.hf_device_map = {name: place for name, place in llava.hf_device_map.items() if not name.startswith(tower)}
    if "" not in model.hf_device_map:
        model.hf_device_map[tower] = device


def _empty_llava(
    llava: nn.Module, tower: nn.Module, any_width: bool = False
) -> SparseFormerLlavaForConditionalGeneration:
    """A LLaVA for such a tower, without weights."""
    config = llava.config
    layers = config.vision_feature_layer
    if not any_width:
        _check_width(llava, tower, 1 if isinstance(layers, int) else len(layers))
    fields = {
        name: getattr(config, name)
        for name in ("image_token_index", "projector_hidden_act", "multimodal_projector_bias", "tie_word_embeddings")
    }
    new_config = SparseFormerLlavaConfig(
        text_config=config.text_config,
        vision_config=tower.config.to_dict(),
        vision_feature_layer=_from_end(layers, config.vision_config.num_hidden_layers),
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        **fields,
    )
    with torch.device("meta"):
        return SparseFormerLlavaForConditionalGeneration(new_config)


def _empty_paligemma(
    paligemma: nn.Module, tower: nn.Module, any_width: bool = False
) -> SparseFormerPaliGemmaForConditionalGeneration:
    """A PaliGemma for such a tower, without weights."""
    config = paligemma.config
    if not any_width:
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


def _empty_on_grid(
    vlm: PreTrainedModel, tower: nn.Module, image_grid: int | None, model_class: type
) -> GridTowerMixin:
    """A model that counts on a grid for such a tower, without weights."""
    config, vision = vlm.config, vlm.config.vision_config
    before = read_anatomy(getattr(vlm.model, part_name(vlm.model, TOWERS)))
    before.require_plain("replace")
    if before.hidden_size != tower.config.hidden_size:
        raise ValueError(
            f"The tower of this {type(vlm).__name__} has {before.hidden_size} channels, the vision model "
            f"{tower.config.hidden_size}; bootstrap it from the tower that it is to replace."
        )
    rows, (height, _) = grid_of(config), pair(vision.image_size)
    step = cells_of_token(config)
    fitting = [count for count in range(step, rows + 1, step) if height // (height // count) == count]
    grid = rows if image_grid is None else image_grid
    if grid not in fitting:
        raise ValueError(
            f"`image_grid` is {image_grid}, expected the rows of a grid of its images of {height} pixels that this "
            f"{type(vlm).__name__} takes: {', '.join(map(str, fitting))}."
        )
    cell = pair(vision.patch_size)[0] if grid == rows else height // grid
    fields = config.to_dict()
    # Its weights, not the way in which they were loaded.
    for name in ("auto_map", "architectures", "quantization_config"):
        fields.pop(name, None)
    fields["vision_config"]["patch_size"] = cell if isinstance(vision.patch_size, int) else [cell, cell]
    for name in ("mm_tokens_per_image", "image_seq_length"):
        if name in fields:
            fields[name] = fields[name] * grid**2 // rows**2
    if "vision_feature_layer" in fields:
        fields["vision_feature_layer"] = _from_end(config.vision_feature_layer, len(before.blocks))
    new_config = model_class.config_class.from_dict(
        fields
        | {
            "tower_config": tower.config.to_dict() | {"feature_stride": cell, "upsampler_hidden_size": None},
            "tower_front_tokens": before.num_prefix_tokens,
        }
    )
    with torch.device("meta"):
        return model_class(new_config)


def _connector_for_grid(parts: nn.Module, empty: nn.Module) -> dict[str, nn.Module]:
    """Return the part after the tower, by its name, with its old weights and the new grid."""
    name = part_name(parts, CONNECTORS)
    connector = getattr(empty, name)
    connector.load_state_dict(getattr(parts, name).state_dict(), assign=True)
    return {name: connector}


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


def _projector_with_new_first_layer(parts: nn.Module, width: int) -> dict[str, nn.Module]:
    """A copy of the projector that reads so many channels, by its name."""
    projector = copy.deepcopy(parts.multi_modal_projector)
    name = _first_name(projector)
    old = getattr(projector, name)
    new = nn.Linear(width, old.out_features, old.bias is not None, old.weight.device, old.weight.dtype)
    setattr(projector, name, new)
    return {"multi_modal_projector": projector}


def _check_width(llava: nn.Module, tower: nn.Module, layers: int = 1):
    """Raise unless the projector takes the channels of so many layers of a tower."""
    expected, given = _first_linear(llava).in_features, tower.config.hidden_size * layers
    if expected != given:
        raise ValueError(
            f"The projector takes {expected} channels, the vision model gives {given} ({layers} x "
            f"{tower.config.hidden_size}); bootstrap it from the tower that it is to replace, or let the projector "
            "learn to read another one: frugalvit align-llava."
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
    if hasattr(model.config, "tower_config"):
        raise ValueError(
            f"Channels are matched in the projector of a LLaVA in the style of 1.5 or a PaliGemma; a "
            f"{type(original).__name__} has its grid as before."
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
    projector = getattr(llava.model, part_name(llava.model, CONNECTORS))
    if any(parameter.is_meta for parameter in projector.parameters()):
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


def matching_processor(processor: ProcessorMixin, model: Swapped) -> ProcessorMixin:
    """Return the processor for a model with a SparseFormer as its vision tower. It inserts as many image tokens as the
    model makes of an image. A LLaVA's also inserts the number that its call chooses (`num_image_tokens`).

    Args:
        processor (`ProcessorMixin`):
            The processor of the model whose tower was replaced. Its tokenizer and chat template stay, and, if the
            model has a grid, its way to cut images into tiles.
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
            part.image_mean, part.image_std = list(config.tower_config.image_mean), list(config.tower_config.image_std)
    # What processors call a cell, the cells of a tile and the tokens that a language model reads of it.
    counts = {
        "patch_size": pair(config.vision_config.patch_size)[0],
        "num_image_tokens": config.image_grid**2,
        **dict.fromkeys(("image_seq_length", "image_seq_len"), config.tile_seq_length),
    }
    fields = {
        name: getattr(processor, name)
        for name in inspect.signature(type(processor)).parameters
        if hasattr(processor, name)
    }
    return type(processor)(**fields | parts | {name: count for name, count in counts.items() if name in fields})


@torch.no_grad()
def check_image_tokens(processor: ProcessorMixin, model: nn.Module):
    """Raise unless a processor inserts as many image tokens for an image as the model makes of it.

    Raises:
        ValueError: with both numbers.
    """
    # A Gemma 3's prompts have another token than the one that stands for an image.
    inputs = processor(images=Image.new("RGB", (37, 23), "gray"), text=processor.image_token, return_tensors="pt")
    inserted = int((inputs["input_ids"] == model.config.image_token_id).sum())
    inputs = inputs.to(input_device(model), getattr(model.model, part_name(model.model, TOWERS)).dtype)
    taken = inspect.signature(model.model.get_image_features).parameters
    features = model.get_image_features(**{name: value for name, value in inputs.items() if name in taken})
    given = sum(len(each) for each in features.pooler_output)
    if inserted != given:
        raise ValueError(
            f"The processor inserts {inserted} tokens (id {model.config.image_token_id}) for an image, the model "
            f"makes {given} of it. `matching_processor` makes one that fits."
        )
