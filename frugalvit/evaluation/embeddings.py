"""Images as vectors: the embeddings of models, which neighbors, linear probes and comparisons look at."""

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import datasets
import torch
from PIL import Image
from torch import nn
from transformers import ViTImageProcessor

from ..common.data import load_images
from ..common.exported import ExportedModule, is_exported
from ..common.labels import check_labels, class_names, label_numbers
from ..common.loading import load_exported, load_image_processor, load_vision_model
from ..common.packing import pack_linear_layers
from ..common.reading import Reader, share_read
from ..common.scores import check_scores
from ..common.splits import hold_back
from ..common.tables import shortened
from ..common.views import ImageFormat, size_made_by
from ..configuration.configuration_sparseformer_base import is_sparseformer
from ..modeling.hosts import read_anatomy
from .images import image_batches, images_to_evaluate, take_first


# Outputs of exported models that are an image's embedding.
EMBEDDINGS = ["image_embeds", "pooler_output"]


@dataclass
class LabeledFeatures:
    """Embeddings of labeled images.

    Args:
        features (`torch.Tensor`): `(images, embedding_size)`, float32, on the CPU.
        labels (`torch.Tensor`): `(images,)`, int64, from 0.
    """

    features: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


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


@torch.no_grad()
def embed_images(
    embed: Callable, reader: Reader, images: datasets.Dataset, device: torch.device | str, **options
) -> LabeledFeatures:
    """Embed a data set's labeled images by `embed`; `options` as in `image_batches`."""
    features, read = [], []
    for pixel_values, indices in image_batches(reader, images, **options):
        features.append(embed(pixel_values.to(device)).float().cpu())
        check_scores(features[-1], "embeddings")
        read += indices
    return LabeledFeatures(torch.cat(features), torch.from_numpy(label_numbers(images)[read]))


def read_evaluated(
    arguments: argparse.Namespace, default_names: list[str] | None = None
) -> tuple[datasets.Dataset, str]:
    """`images_to_evaluate` of --eval-dataset if given, else of --dataset; without --limit."""
    evaluated = copy.copy(arguments)
    evaluated.dataset, evaluated.limit = arguments.eval_dataset or arguments.dataset, None
    return images_to_evaluate(evaluated, default_names)


def read_labeled_parts(arguments: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset, str]:
    """Load the images to learn from, the test images, and the name of their split; without --limit.

    Without other images, a tenth of the images to learn from is held back to test on.

    Raises:
        ValueError: if labels are missing, or both have not the same classes.
    """
    train = load_images(
        arguments.dataset,
        arguments.train_split,
        name=arguments.dataset_config,
        image_column=arguments.image_column,
        label_column=arguments.label_column,
    )
    names = class_names(train)
    test, split = read_evaluated(arguments, names)
    if names is None or class_names(test) is None:
        raise ValueError(f"{arguments.train_split!r} or {split!r} has no labels; name their column: --label-column.")
    if not arguments.eval_dataset and split == arguments.train_split:
        train, test = hold_back(train)
        split = f"{split} ({len(test):,} images held back)"
    if class_names(test) != names:
        raise ValueError(
            f"The images to learn from have the classes {shortened(names)}, the test images "
            f"{shortened(class_names(test))}; expected the same."
        )
    check_labels(train, arguments.train_split)
    check_labels(test, split)
    return train, test, split


def evaluate_features(
    arguments: argparse.Namespace, score: Callable[[LabeledFeatures, LabeledFeatures], dict[str, object]]
) -> dict[str, object]:
    """Embed labeled images and score the embeddings.

    Args:
        arguments (`argparse.Namespace`): Arguments of `add_feature_arguments`.
        score (`Callable`): Maps the features of the images to learn from and of the test images to scores by name.

    Returns:
        `dict`: Model, data sets, splits, counts and `embedding_size`, then the scores.
    """
    train_images, test_images, split = read_labeled_parts(arguments)
    test_images = take_first(test_images, arguments.limit)
    if is_exported(arguments.model):
        kind = "a model with an embedding"
        model = load_exported(arguments.model, arguments.device, kind, EMBEDDINGS)
        image_processor, device = load_image_processor(arguments.model, False, kind), model.device
    else:
        model, image_processor = load_vision_model(arguments.model, arguments.device, arguments.trust_remote_code)
        device = next(model.parameters()).device
        pack_linear_layers(model)
    embed = image_embedder(model, size_made_by(image_processor))
    reader = Reader(image_maker(image_processor), share_read(model), arguments.exact)
    options = {name: getattr(arguments, name) for name in ("batch_size", "num_workers", "skip_corrupt")}
    train = embed_images(embed, reader, train_images, device, **options)
    test = embed_images(embed, reader, test_images, device, **options)
    about = {"model": arguments.model, "dataset": " ".join(arguments.dataset), "train_split": arguments.train_split}
    if arguments.eval_dataset:
        about["eval_dataset"] = " ".join(arguments.eval_dataset)
    return about | {
        "split": split,
        "classes": len(class_names(train_images)),
        "train_images": len(train),
        "images": len(test),
        "skipped": len(train_images) - len(train) + len(test_images) - len(test),
        "embedding_size": train.features.shape[1],
        **score(train, test),
    }
