"""Images as vectors: the embeddings of models, which neighbors, linear probes and comparisons look at."""

import argparse
import copy
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import torch
from PIL import Image
from torch import nn

from ..common.data import load_images
from ..common.exported import ExportedModule, is_exported
from ..common.labels import check_labels, class_names, label_numbers
from ..common.loading import load_exported, load_image_processor, load_vision_model
from ..common.packing import pack_linear_layers
from ..common.reading import Reader, share_read
from ..common.scores import check_scores
from ..common.splits import hold_back
from ..common.views import EvalView, ImageFormat, size_made_by
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


@dataclass
class LabeledParts:
    """Images to learn from and images to judge by, of the same classes.

    Args:
        train, test (`datasets.Dataset`): Images with labels, as `load_images` returns them.
        names (`list[str]`): Names of the classes.
        chosen (`torch.Tensor`): The data set's labels of these classes, `(len(names),)`, ascending.
        split (`str`): Name of the split of `test`.
    """

    train: datasets.Dataset
    test: datasets.Dataset
    names: list[str]
    chosen: torch.Tensor
    split: str

    def number(self, labels: torch.Tensor) -> torch.Tensor:
        """The data set's labels as numbers of `names`."""
        return torch.searchsorted(self.chosen, labels)


def image_embedder(
    model: nn.Module, image_size: tuple[int, int] | None = None, num_tokens: int | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of pixel values `(batch, channels, height, width)` that returns a model's embedding of them,
    `(batch, embedding_size)`.

    The embedding is what the model's classifier reads or would read: a transformer's pooled tokens, or a convolutional
    network's pooled feature map. A CLIP, or a SparseFormer in its place, projects the tokens; they are not normalized.

    Args:
        model (`nn.Module`): A model of `load_vision_model` or `load_exported`.
        image_size (pair of `int`, *optional*): Height and width of the images, see `read_anatomy`.
        num_tokens (`int`, *optional*): Latent tokens of a SparseFormer; its own choice if not given.

    Raises:
        ValueError: if the model has no such embedding.
    """
    chosen = {} if num_tokens is None else {"num_tokens": num_tokens}
    if isinstance(model, ExportedModule):
        name = next(name for name in EMBEDDINGS if name in model.outputs)
        return lambda images: model(images, **chosen)[name]
    model = without_agent(model)
    family = getattr(getattr(model, "config", None), "model_type", "")
    if hasattr(model, "get_image_features") and family.startswith("sparseformer"):
        return lambda images: model.get_image_features(images, **chosen).pooler_output
    if is_sparseformer(getattr(model, "config", None)):
        project = getattr(model, "visual_projection", nn.Identity())
        return lambda images: project(model.base_model(images, output_tokens=False, **chosen).pooler_output)
    if chosen:
        raise ValueError(f"`num_tokens` is {num_tokens}, and the tokens of a {type(model).__name__} cannot be chosen.")
    anatomy = read_anatomy(model, image_size)
    if anatomy.obstacle and hasattr(model, "base_model"):
        base = model.base_model
        return lambda images: _pooled(base(pixel_values=images), anatomy)
    anatomy.require_plain("take the embedding of", embeds=True)
    return anatomy.embed


def without_agent(model: nn.Module) -> nn.Module:
    """The vision transformer of one that was trained beside an agent; other models as they are."""
    return model.vit if getattr(getattr(model, "config", None), "model_type", "") == "bootstrapped_vit" else model


def _pooled(outputs, anatomy) -> torch.Tensor:
    pooled = getattr(outputs, "pooler_output", None)
    if pooled is None:
        raise anatomy.refusal("take the embedding of", anatomy.obstacle)
    return pooled.flatten(1)


def image_maker(image_processor):
    """An image processor that returns images: the one given, or, if that returns patches (SigLIP 2 NaFlex),
    `SquareImages` in its place, because `Anatomy.embed` takes images."""
    return SquareImages(image_processor) if hasattr(image_processor, "max_num_patches") else image_processor


class SquareImages:
    """Images of one size, called like an image processor.

    Args:
        image_processor: The one in whose place this stands; size and normalization are those that
            `ImageFormat.from_processor` finds.
    """

    def __init__(self, image_processor):
        self.format = ImageFormat.from_processor(image_processor)
        self.view = EvalView(self.format)

    def __call__(self, images: Sequence[Image.Image], return_tensors: str = "pt") -> dict[str, torch.Tensor]:
        pixels = torch.stack([self.view(image)["pixel_values"] for image in images])
        return {"pixel_values": self.format.normalize(pixels)}


@torch.no_grad()
def extract_features(
    model: nn.Module, image_processor, images: Sequence[Image.Image], batch_size: int = 64
) -> torch.Tensor:
    """Compute a vector for each image, the embedding of `image_embedder`: to search, to cluster, to classify.

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
    parameter, make, features = next(model.parameters()), image_maker(image_processor), []
    for start in range(0, len(images), batch_size):
        pixel_values = make(list(images[start : start + batch_size]), return_tensors="pt")["pixel_values"]
        features.append(embed(pixel_values.to(parameter.device, parameter.dtype)).float().cpu())
    return torch.cat(features)


@torch.inference_mode()
def embed_images(
    embed: Callable[[torch.Tensor], torch.Tensor],
    reader: Reader,
    images: datasets.Dataset,
    device: torch.device | str = "cpu",
    *,
    batch_size: int = 64,
    num_workers: int = 0,
    skip_corrupt: bool = False,
) -> LabeledFeatures:
    """Embeddings of a data set, with a progress bar.

    Args:
        embed (`Callable`): A function of `image_embedder`.
        reader (`Reader`): Turns `PIL.Image` into pixel values.
        images (`datasets.Dataset`): Images with labels, as `load_images` returns them.
        device (`torch.device`): The model's device.
        batch_size, num_workers, skip_corrupt: As in `image_batches`.
    """
    features, read = [], []
    for pixel_values, indices in image_batches(reader, images, batch_size, num_workers, skip_corrupt):
        features.append(embed(pixel_values.to(device)).float().cpu())
        check_scores(features[-1], "embeddings")
        read += indices
    return LabeledFeatures(torch.cat(features), torch.from_numpy(label_numbers(images)[read]))


def read_evaluated(
    arguments: argparse.Namespace, default_names: list[str] | None = None
) -> tuple[datasets.Dataset, str]:
    """`images_to_evaluate` of --eval-dataset, if it is given, else of --dataset, whatever --limit says."""
    evaluated = copy.copy(arguments)
    evaluated.dataset, evaluated.limit = arguments.eval_dataset or arguments.dataset, None
    return images_to_evaluate(evaluated, default_names)


def read_labeled_parts(arguments: argparse.Namespace) -> LabeledParts:
    """The images that `add_image_arguments` and `add_training_images_arguments` name, whatever --limit says.

    Where there is nothing to judge by but the images to learn from, a tenth of these is held back for it.

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
    if names is None:
        raise ValueError(f"{' '.join(arguments.dataset)} has no labels; name their column with --label-column.")
    test, split = read_evaluated(arguments, names)
    if not arguments.eval_dataset and split == arguments.train_split:
        train, test = hold_back(train)
        split = f"{split} ({len(test):,} images held back)"
    found = class_names(test)
    if found is None:
        raise ValueError(f"The split {split!r} has no labels to compare with; name their column with --label-column.")
    if found != names:
        raise ValueError(
            f"The images to learn from have {len(names)} classes ({', '.join(names[:3])}, …), those to judge by "
            f"{len(found)} ({', '.join(found[:3])}, …); expected the same."
        )
    for images, part in ((train, arguments.train_split), (test, split)):
        check_labels(images, part)
    chosen = choose_classes(arguments.classes, names) if arguments.classes else list(range(len(names)))
    names = [names[index] for index in chosen]
    if arguments.classes:
        train, test = (of_classes(images, chosen) for images in (train, test))
        if not len(train) or not len(test):
            raise ValueError(
                f"Of the classes {', '.join(names)} there are {len(train)} images to learn from and {len(test)} to "
                "judge by; expected some of both."
            )
    return LabeledParts(train, test, names, torch.tensor(chosen), split)


def choose_classes(wanted: Sequence[str], names: Sequence[str]) -> list[int]:
    """The labels of classes, ascending.

    Raises:
        ValueError: if the data set has no class of a name.
    """
    for name in wanted:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:5]
            raise ValueError(
                f"--classes: the data set has no class {name!r}; it has, for example, {', '.join(close)}."
            )
    return sorted({names.index(name) for name in wanted})


def of_classes(images: datasets.Dataset, chosen: Sequence[int]) -> datasets.Dataset:
    """The images that have one of the labels `chosen`."""
    return images.select(np.flatnonzero(np.isin(label_numbers(images), chosen)))


def evaluate_features(
    arguments: argparse.Namespace, score: Callable[[LabeledFeatures, LabeledFeatures], dict[str, object]]
) -> dict[str, object]:
    """Embed labeled images, score the embeddings, and describe model and images beside the scores.

    Args:
        arguments (`argparse.Namespace`): Arguments of `add_feature_arguments`.
        score (`Callable`): Takes the features of the images to learn from and of those to judge by; returns scores by
            name.

    Returns:
        `dict`: Model, data sets, splits, counts and `embedding_size`, then the scores.
    """
    parts = read_labeled_parts(arguments)
    parts.test = take_first(parts.test, arguments.limit)
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
    train, test = (embed_images(embed, reader, images, device, **options) for images in (parts.train, parts.test))
    for part in (train, test):
        part.labels = parts.number(part.labels)
    return {
        "model": arguments.model,
        "dataset": " ".join(arguments.dataset),
        "train_split": arguments.train_split,
        **({"eval_dataset": " ".join(arguments.eval_dataset)} if arguments.eval_dataset else {}),
        "split": parts.split,
        "classes": len(parts.names),
        "train_images": len(train),
        "images": len(test),
        "skipped": len(parts.train) - len(train) + len(parts.test) - len(test),
        "embedding_size": train.features.shape[1],
        **score(train, test),
    }
