"""Compute image embeddings with any supported model."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import ViTImageProcessor

from ..configuration.configuration_base import is_sparseformer
from ..exported import ExportedModule
from ..modeling.hosts import Anatomy, read_anatomy
from ..modeling.image_format import ImageFormat


# Names of outputs with image embeddings. If an exported model has both outputs, the first one is used.
EMBEDDINGS = ["image_embeds", "pooler_output"]


def image_embedder(
    model: nn.Module, image_size: tuple[int, int] | None = None, num_tokens: int | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that computes a model's image embeddings.

    The embedding is the classifier's input. In a model without a classifier, it is the pooled output of a transformer
    or the pooled feature map of a convolutional network. In a CLIP, or in a SparseFormer bootstrapped from a CLIP, it
    is the projected embedding. Only an exported CLIP normalizes its embeddings.

    Args:
        model (`nn.Module`): A model from `load_model` or `load_runnable`.
        image_size (`tuple[int, int]`, *optional*): Height and width of the images in pixels.
        num_tokens (`int`, *optional*): Number of latent tokens of a SparseFormer.

    Returns:
        `Callable`: Maps pixel values `(batch, channels, height, width)` to embeddings `(batch, embedding_size)`.
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
    anatomy = read_anatomy(model, image_size)
    if anatomy.unsupported_reason and hasattr(model, "base_model"):
        return lambda images: _pooled(model.base_model(pixel_values=images), anatomy)
    anatomy.require_plain("take the embedding of", embeds=True)
    return anatomy.embed


def _pooled(outputs, anatomy: Anatomy) -> torch.Tensor:
    if getattr(outputs, "pooler_output", None) is None:
        raise anatomy.unsupported_error("take the embedding of", anatomy.unsupported_reason)
    return outputs.pooler_output.flatten(1)


def without_agent(model: nn.Module) -> nn.Module:
    """Return the `vit` of a `BootstrappedViTForImageClassification`. Any other model is returned unchanged."""
    return model.vit if getattr(getattr(model, "config", None), "model_type", "") == "bootstrapped_vit" else model


def image_maker(image_processor):
    """Return `image_processor`. If it outputs patches (SigLIP 2 NaFlex), return a processor that outputs images."""
    if not hasattr(image_processor, "max_num_patches"):
        return image_processor
    image_format = ImageFormat.from_processor(image_processor)
    return ViTImageProcessor(
        size=dict(zip(("height", "width"), image_format.size, strict=True)),
        resample=image_processor.resample,
        image_mean=list(image_format.mean),
        image_std=list(image_format.std),
    )
