"""`frugalvit features --dense`: feature maps of images, and their principal components as colors."""

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import save_file
from transformers import MODEL_FOR_BACKBONE_MAPPING, PreTrainedConfig, PreTrainedModel

from .common.files import check_file_path, whole_file
from .common.image_files import find_images, read_images
from .common.loading import load_vision_model, load_with_image_processor
from .common.views import prepare_images, restore_images, vision_config_of
from .configuration.configuration_sparseformer_base import is_sparseformer
from .modeling.hosts import read_anatomy
from .modeling.modeling_sparseformer import SparseFormerBackbone, SparseFormerPreTrainedModel
from .pictures import check_picture_path, draw_maps, save_figure


# Images that are seen at once.
BATCH_SIZE = 8
# What a backbone does not read of a folder.
_HEADS = frozenset({"classifier", "visual_projection", "decode_head", "feature_maps"})
# A map of the last layer as it is.
_PLAIN = {"out_features": None, "out_indices": None, "feature_scales": None, "upsampler_hidden_size": None}


def write_dense_features(arguments: argparse.Namespace) -> None:
    """Compute feature maps as `frugalvit features --dense` does, and write or draw them."""
    if arguments.limit < 1:
        raise ValueError(f"--limit is {arguments.limit}, expected at least 1.")
    if arguments.picture:
        check_picture_path(arguments.picture)
    if arguments.output:
        if Path(arguments.output).suffix != ".safetensors":
            raise ValueError(f"Cannot write {arguments.output!r}: expected a file name ending in .safetensors.")
        check_file_path(arguments.output)
    paths = find_images(arguments.places, arguments.limit)
    names, images = zip(
        *itertools.islice(read_images(paths, image_column=arguments.image_column), arguments.limit), strict=True
    )

    model, image_processor = load_with_image_processor(
        *(arguments.model, arguments.device, arguments.trust_remote_code, "a SparseFormer"),
        *(_choose_backbone, _HEADS),
    )
    model = as_backbone(model)
    if arguments.layers:
        last = model.config.num_hidden_layers
        if wrong := [layer for layer in arguments.layers if not 1 <= layer <= last]:
            raise ValueError(f"--layers has {wrong[0]}, expected 1 to {last}.")
        model.out_indices = sorted({*arguments.layers})
    pixel_values = prepare_at_size(image_processor, images, arguments.size)
    maps = dense_features(model, pixel_values, arguments.num_tokens)
    drawn = {f"{arguments.num_tokens or model.config.default_num_tokens} tokens": maps}

    if arguments.teacher:
        teacher, teacher_processor = load_vision_model(
            arguments.teacher, arguments.device, arguments.trust_remote_code
        )
        seen = prepare_at_size(teacher_processor, images, arguments.size or pixel_values.shape[-2:])
        expected = teacher_features(teacher, seen, model)
        for name, found in maps.items():
            cosine = F.cosine_similarity(at_size_of(found, expected[name]), expected[name]).mean().item()
            print(f"{name}: cosine with the teacher's map {cosine:.3f}")
        drawn = {"Teacher": expected} | drawn
    if arguments.output:
        about = {"model": str(arguments.model), "images": json.dumps(names), "num_tokens": str(arguments.num_tokens)}
        with whole_file(arguments.output) as aside:
            save_file({name: each.contiguous() for name, each in maps.items()}, aside, about)
        print(f"Wrote {arguments.output}.")
    if arguments.picture:
        save_figure(draw_dense(restore_images(image_processor, pixel_values), drawn), arguments.picture)
        print(f"Drew {arguments.picture}.")


def _choose_backbone(config: PreTrainedConfig) -> type:
    if not is_sparseformer(config) and not config.model_type.startswith("sparseformer_"):
        raise ValueError(f"it is a {config.model_type}, whose maps are its own; `frugalvit bootstrap` makes a student")
    return MODEL_FOR_BACKBONE_MAPPING[type(vision_config_of(config))]


def prepare_at_size(image_processor, images: Sequence[Image.Image], size: Sequence[int] | None = None) -> torch.Tensor:
    """Pixel values of images, stretched to a height and width if that is given."""
    if size is None:
        return prepare_images(image_processor, images)
    height, width = size
    options = {"size": {"height": height, "width": width}, "do_resize": True, "do_center_crop": False}
    return image_processor(list(images), return_tensors="pt", **options)["pixel_values"]


def as_backbone(model: PreTrainedModel) -> SparseFormerBackbone | None:
    """A backbone with the weights of a SparseFormer, which are not copied; None of other models, and of those whose
    tokens embed no patches, as their maps show what tokens have gathered from far around."""
    if isinstance(model, SparseFormerBackbone):
        # Rows and columns, also of one that was saved for DPT.
        model.config.reshape_hidden_states = True
        return model
    if not isinstance(model, SparseFormerPreTrainedModel) or not model.config.embeds_patches:
        return None
    with torch.device("meta"):
        backbone = SparseFormerBackbone(type(model.config).from_dict(model.config.to_dict() | _PLAIN))
    backbone.sparseformer = model.base_model
    return backbone.eval()


@torch.no_grad()
def dense_features(
    model: SparseFormerBackbone, pixel_values: torch.Tensor, num_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    """Compute a backbone's feature maps.

    Args:
        model (`SparseFormerBackbone`): The backbone, which names the layers.
        pixel_values (`torch.Tensor`): `(images, channels, height, width)`.
        num_tokens (`int`, *optional*): Latent tokens, as in the backbone's call.

    Returns:
        `dict[str, torch.Tensor]`: `(images, hidden_size, rows, columns)` float32 on the CPU by the layer's name.
    """
    parts = [
        [each.float().cpu() for each in model(batch.to(model.device), num_tokens=num_tokens).feature_maps]
        for batch in pixel_values.split(BATCH_SIZE)
    ]
    return {name: torch.cat(maps) for name, maps in zip(model.out_features, zip(*parts, strict=True), strict=True)}


@torch.no_grad()
def teacher_features(
    teacher: torch.nn.Module, pixel_values: torch.Tensor, student: SparseFormerBackbone
) -> dict[str, torch.Tensor]:
    """Compute a teacher's maps after the blocks of which the student has feature maps, counted from the last block.
    Shapes are those of `dense_features`.

    Raises:
        ValueError: if the teacher is no plain vision transformer, has another width, or fewer blocks.
    """
    anatomy = read_anatomy(teacher)
    anatomy.require_plain("compare feature maps with")
    if anatomy.hidden_size != student.config.hidden_size:
        raise ValueError(
            f"The teacher's features have {anatomy.hidden_size} channels, the student's {student.config.hidden_size}; "
            "give the teacher that the student was made from."
        )
    ahead = len(anatomy.blocks) - student.config.num_hidden_layers
    if ahead < 0:
        raise ValueError(f"The teacher has {-ahead} blocks fewer than the student; give the one it was made from.")
    if tuple(pixel_values.shape[-2:]) != tuple(anatomy.image_size):
        anatomy = anatomy.resized(tuple(pixel_values.shape[-2:]))
    layers, normalized = [index + ahead for index in student.out_indices], student.config.apply_layernorm
    parts = [
        [each.float().cpu() for each in anatomy.feature_maps(batch.to(anatomy.device), layers, normalized)]
        for batch in pixel_values.split(BATCH_SIZE)
    ]
    return {name: torch.cat(maps) for name, maps in zip(student.out_features, zip(*parts, strict=True), strict=True)}


def at_size_of(features: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Resize maps to the rows and columns of others."""
    size = others.shape[-2:]
    return features if features.shape[-2:] == size else F.interpolate(features, size, mode="bilinear")


def principal_colors(reference: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Color maps by the first three principal components of the first map, as DINOv2's are drawn. Colors from 0 to 1
    are the values between its 1st and its 99th percentile.

    Args:
        reference, others (`torch.Tensor`): `(images, channels, rows, columns)`, all with as many channels.

    Returns:
        `list[torch.Tensor]`: `(images, 3, rows, columns)` each.
    """
    vectors = reference.movedim(1, -1).flatten(0, -2).double()
    mean = vectors.mean(0)
    _, directions = torch.linalg.eigh((vectors - mean).T @ (vectors - mean))
    directions = directions[:, -3:].flip(-1)
    # A component's sign is open; its largest part is positive.
    directions = directions * directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    found = [
        ((each.movedim(1, -1).double() - mean) @ directions).movedim(-1, 1).float() for each in (reference, *others)
    ]
    values = found[0].movedim(1, 0).flatten(1).sort(dim=1).values
    low, high = (values[:, round(share * (values.shape[1] - 1))].view(3, 1, 1) for share in (0.01, 0.99))
    return [((each - low) / (high - low).clamp(min=1e-12)).clamp(0, 1) for each in found]


def draw_dense(images: torch.Tensor, maps: Mapping[str, Mapping[str, torch.Tensor]]) -> Figure:
    """Draw images and the colors of feature maps beside them, a row for each image.

    Args:
        images (`torch.Tensor`): `(images, channels, height, width)`, 0 to 1.
        maps (`Mapping`): Maps of layers, `(images, channels, rows, columns)`, by the names of model and layer. A layer
            is colored by the components of the first model's.

    Returns:
        `matplotlib.figure.Figure`: As of `draw_maps`.
    """
    layers = list(next(iter(maps.values())))
    colors = {layer: principal_colors(*(several[layer] for several in maps.values())) for layer in layers}
    columns = [(layer, place, name) for layer in layers for place, name in enumerate(maps)]
    return draw_maps(
        list(images),
        [[colors[layer][place][index] for layer, place, _ in columns] for index in range(len(images))],
        headings=["Input", *(name if len(layers) == 1 else f"{name}, {layer}" for layer, _, name in columns)],
        captions=None,
        legend="First three principal components as red, green and blue.",
    )
