"""Images as vectors: the embeddings of models, which neighbors, linear probes and comparisons look at."""

from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch import nn
from transformers import ViTImageProcessor

from ..common.exported import ExportedModule
from ..common.views import ImageFormat, size_made_by
from ..configuration.configuration_sparseformer_base import is_sparseformer
from ..modeling.hosts import read_anatomy


# Outputs of exported models that are an image's embedding.
EMBEDDINGS = ["image_embeds", "pooler_output"]


def image_embedder(
    model: nn.Module, image_size: tuple[int, int] | None = None, num_tokens: int | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that maps pixel values `(batch, channels, height, width)` to a model's embedding
    `(batch, embedding_size)`.

    The embedding is what the model's classifier reads or would read: a transformer's pooled tokens, or a convolutional
    network's pooled feature map. A CLIP, or a SparseFormer in its place, projects the tokens; they are not normalized.

    Args:
        model (`nn.Module`): A model of `load_vision_model` or `load_exported`.
        image_size (pair of `int`, *optional*): Height and width of the images, see `read_anatomy`.
        num_tokens (`int`, *optional*): Latent tokens of a SparseFormer; its own number by default.

    Raises:
        ValueError: if the model has no such embedding.
    """
    chosen = {} if num_tokens is None else {"num_tokens": num_tokens}
    if isinstance(model, ExportedModule):
        name = next(name for name in EMBEDDINGS if name in model.outputs)
        return lambda images: model(images, **chosen)[name]
    model = without_agent(model)
    config = getattr(model, "config", None)
    if hasattr(model, "get_image_features") and config.model_type.startswith("sparseformer"):
        return lambda images: model.get_image_features(images, **chosen).pooler_output
    if is_sparseformer(config):
        project = getattr(model, "visual_projection", nn.Identity())
        return lambda images: project(model.base_model(images, output_tokens=False, **chosen).pooler_output)
    if chosen:
        raise ValueError(f"`num_tokens` is {num_tokens}, and the tokens of a {type(model).__name__} cannot be chosen.")
    anatomy = read_anatomy(model, image_size)
    if anatomy.obstacle and hasattr(model, "base_model"):
        return lambda images: _pooled(model.base_model(pixel_values=images), anatomy)
    anatomy.require_plain("take the embedding of", embeds=True)
    return anatomy.embed


def without_agent(model: nn.Module) -> nn.Module:
    """Return the vision transformer of one trained beside an agent; other models as they are."""
    return model.vit if getattr(getattr(model, "config", None), "model_type", "") == "bootstrapped_vit" else model


def _pooled(outputs, anatomy) -> torch.Tensor:
    pooled = getattr(outputs, "pooler_output", None)
    if pooled is None:
        raise anatomy.refusal("take the embedding of", anatomy.obstacle)
    return pooled.flatten(1)


def image_maker(image_processor):
    """Return an image processor that makes images: the one given or, in the place of one that makes patches (SigLIP 2
    NaFlex), one that makes squares, because `Anatomy.embed` takes images."""
    if not hasattr(image_processor, "max_num_patches"):
        return image_processor
    image_format = ImageFormat.from_processor(image_processor)
    return ViTImageProcessor(
        size=dict(zip(("height", "width"), image_format.size, strict=True)),
        resample=image_format.resample,
        image_mean=list(image_format.mean),
        image_std=list(image_format.std),
    )


@torch.no_grad()
def extract_features(
    model: nn.Module, image_processor, images: Sequence[Image.Image], batch_size: int = 64
) -> torch.Tensor:
    """Compute the embedding of each image (see `image_embedder`), to search, to cluster or to classify.

    Args:
        model (`nn.Module`): A SparseFormer, a vision transformer of Transformers, timm or open_clip with or without
            classifier, or a CLIP.
        image_processor: Its image processor.
        images (sequence of `PIL.Image.Image`): RGB images.
        batch_size (`int`, *optional*, defaults to 64): Images at a time.

    Returns:
        `torch.Tensor`: `(images, embedding_size)`, float32, on the CPU; not normalized.

    Raises:
        ValueError: if there are no images, or the model has no such embedding.
    """
    if not len(images):
        raise ValueError("Got no images, expected at least one.")
    embed = image_embedder(model, size_made_by(image_processor))
    parameter, processor, features = next(model.parameters()), image_maker(image_processor), []
    for start in range(0, len(images), batch_size):
        pixel_values = processor(list(images[start : start + batch_size]), return_tensors="pt")["pixel_values"]
        features.append(embed(pixel_values.to(parameter.device, parameter.dtype)).float().cpu())
    return torch.cat(features)
