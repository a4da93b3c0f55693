"""Measure image-text retrieval: find the captions of an image, and find the image of a caption."""

import argparse
import json
from pathlib import Path

import datasets
import torch

from ..training.data import readable_images
from ..training.files import read_text
from ..training.scores import check_scores
from .images import image_batches
from .two_towers import TwoTowers, embed_all_texts, load_two_towers, name_models


# Number of queries in one matrix product. All queries at once would need too much memory for large data sets.
CHUNK = 256


def run(arguments: argparse.Namespace) -> dict[str, object]:
    [dataset] = arguments.dataset
    images, captions = read_karpathy(dataset, arguments.image_folder, arguments.split, arguments.limit)
    found = images.add_column("captions", captions)
    found = readable_images(found, arguments.skip_corrupt, arguments.split)
    images, captions = found.remove_columns("captions"), found["captions"]
    towers = load_two_towers(arguments.model, arguments.vision_model, arguments.device, arguments.trust_remote_code)
    image_embeddings = embed_all_images(towers, images, arguments.batch_size, arguments.num_workers)
    texts = [caption for several in captions for caption in several]
    owners = torch.tensor([index for index, several in enumerate(captions) for _ in several])
    text_embeddings = embed_all_texts(towers, texts, arguments.batch_size)
    about = {"dataset": dataset, "images": len(images), "captions": len(texts)}
    return name_models(arguments) | about | retrieval_recall(image_embeddings, text_embeddings, owners)


def read_karpathy(
    path: str, folder: Path, split: str = "test", limit: int | None = None
) -> tuple[datasets.Dataset, list[list[str]]]:
    """Read images and captions of a split from a file in the format of Karpathy's COCO and Flickr30k splits."""
    try:
        entries = json.loads(read_text(path))["images"]
        entries = [entry for entry in entries if entry["split"] == split][:limit]
        captions = [[sentence["raw"] for sentence in entry["sentences"]] for entry in entries]
        # In COCO, `filepath` is the name of the image's folder. There is a folder for each year.
        names = [Path(entry.get("filepath", "")) / entry["filename"] for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no list of images as in Karpathy's splits ({type(error).__name__}: {error}); expected "
            '{"images": [{"filename": …, "split": …, "sentences": [{"raw": …}]}]}.'
        ) from error
    if not entries or not all(captions):
        raise ValueError(f"{path} has no images of the split {split!r}, or one without captions.")
    files = [folder / name if (folder / name).is_file() else folder / name.name for name in names]
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"{len(missing)} images of {path} are not in {folder}, for example {missing[0].name}.")
    images = datasets.Dataset.from_dict({"image": list(map(str, files))})
    return images.cast_column("image", datasets.Image(decode=False)), captions


@torch.inference_mode()
def embed_all_images(towers: TwoTowers, images: datasets.Dataset, batch_size: int, num_workers: int) -> torch.Tensor:
    """Return the normalized embeddings `(images, width)` of all images, on the CPU."""
    batches = image_batches(towers.image_processor, images, batch_size, num_workers)
    embeddings = torch.cat([towers.embed_images(pixel_values.to(towers.device)).cpu() for pixel_values, _ in batches])
    check_scores(embeddings, "embeddings")
    return embeddings


def retrieval_recall(
    image_embeddings: torch.Tensor, text_embeddings: torch.Tensor, owners: torch.Tensor
) -> dict[str, float]:
    """Measure recall at 1, 5 and 10 in percent.

    Equally similar candidates have a random order. If wrong candidates are as similar to the query as the best correct
    candidate, the query's score is the probability that the best correct candidate is among the first k.

    Args:
        image_embeddings (`torch.Tensor`): Normalized embeddings `(images, width)`.
        text_embeddings (`torch.Tensor`): Normalized embeddings `(captions, width)`.
        owners (`torch.Tensor`): Index of each caption's image, `(captions,)`. Every image has at least one caption.

    Returns:
        `dict`: `image_to_text@k` is the share of images whose k most similar captions include a caption of the image.
        `text_to_image@k` is the share of captions whose k most similar images include the caption's image.
    """
    images = torch.arange(len(image_embeddings))
    recall = {}
    for direction, queries, query_owners, keys, key_owners in (
        ("image_to_text", image_embeddings, images, text_embeddings, owners),
        ("text_to_image", text_embeddings, owners, image_embeddings, images),
    ):
        above = []
        tied = []
        for embeddings, own_images in zip(queries.split(CHUNK), query_owners.split(CHUNK), strict=True):
            similarities = embeddings @ keys.mT
            own = own_images[:, None] == key_owners
            best = similarities.masked_fill(~own, -torch.inf).amax(1, keepdim=True)
            wrong = similarities.masked_fill(own, -torch.inf)
            above.append((wrong > best).sum(1))
            tied.append((wrong == best).sum(1))
        for k in (1, 5, 10):
            found = (k - torch.cat(above)) / (1 + torch.cat(tied))
            recall[f"{direction}@{k}"] = 100 * found.clamp(0, 1).mean().item()
    return recall
