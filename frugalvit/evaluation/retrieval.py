"""Image-text retrieval: recall of images by their captions and of captions by their images."""

import argparse
import json
from pathlib import Path

import datasets
import torch

from ..common.data import load_images, load_table
from ..common.files import read_text
from ..common.reading import Reader
from ..common.scores import check_scores
from .images import image_batches, take_first
from .two_towers import TwoTowers, embed_all_texts, load_two_towers, name_models


# Similarities that are held at once; 30,000 images have 4.5 billion with their captions.
CHUNK = 2**25
RANKS = (1, 5, 10)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    if arguments.dataset[0].endswith(".json"):
        images, captions = read_karpathy(arguments.dataset[0], arguments.image_folder, arguments.split)
    else:
        images, captions = read_parquet(arguments.dataset, arguments.caption_column)
    images, captions = take_first(images, arguments.limit), captions[: arguments.limit]
    towers = load_two_towers(arguments.model, arguments.vision_model, arguments.device, arguments.trust_remote_code)
    reader = Reader(towers.image_processor, towers.share_read, arguments.exact)
    image_embeddings = embed_all_images(towers, reader, images, arguments.batch_size, arguments.num_workers)
    texts = [caption for several in captions for caption in several]
    owners = torch.tensor([index for index, several in enumerate(captions) for _ in several])
    text_embeddings = embed_all_texts(towers, texts, arguments.batch_size)
    return {
        **name_models(arguments),
        "dataset": " ".join(arguments.dataset),
        "images": len(images),
        "captions": len(texts),
        **retrieval_recall(image_embeddings, text_embeddings, owners),
    }


def read_karpathy(path: str, folder: Path | None, split: str) -> tuple[datasets.Dataset, list[list[str]]]:
    """Read images and their captions from a file in the layout of Karpathy's splits of COCO and Flickr30k.

    Raises:
        ValueError: if the file is no such file, or an image is not there.
    """
    if folder is None or not folder.is_dir():
        raise ValueError(f"--image-folder is {folder}, expected the folder with the images that {path} names.")
    try:
        entries = json.loads(read_text(path))["images"]
        entries = [entry for entry in entries if entry["split"] == split]
        captions = [[sentence["raw"] for sentence in entry["sentences"]] for entry in entries]
        # Karpathy's COCO lies in a folder for each year.
        names = [Path(entry.get("filepath", "")) / entry["filename"] for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no list of images as Karpathy's splits have it ({type(error).__name__}: {error}); expected "
            '{"images": [{"filename": …, "split": …, "sentences": [{"raw": …}]}]}.'
        ) from error
    if not entries:
        raise ValueError(f"{path} has no images of the split {split!r}.")
    files = [folder / name if (folder / name).is_file() else folder / name.name for name in names]
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"{len(missing)} images of {path} are not in {folder}, for example {missing[0].name}.")
    images = datasets.Dataset.from_dict({"image": [{"path": str(file), "bytes": None} for file in files]})
    return images.cast_column("image", datasets.Image(decode=False)), check_captions(captions)


def read_parquet(paths: list[str], column: str) -> tuple[datasets.Dataset, list[list[str]]]:
    """Read images and their captions from parquet files with a column of lists of texts, or of texts.

    Raises:
        ValueError: if there is no such column.
    """
    images = load_images(paths, "train")
    table = load_table(paths, "train")
    if column not in table.column_names:
        raise ValueError(
            f"{' '.join(paths)} has no column {column!r} (--caption-column); it has {', '.join(table.column_names)}."
        )
    captions = table.select_columns(column)[column]
    lists = [each if isinstance(each, list) else [] if each is None else [each] for each in captions]
    return images, check_captions(lists)


def check_captions(captions: list[list[str]]) -> list[list[str]]:
    for index, several in enumerate(captions):
        if not several:
            raise ValueError(f"Image {index} has no caption.")
        if wrong := [caption for caption in several if not isinstance(caption, str)]:
            raise ValueError(f"Image {index} has the caption {wrong[0]!r}, expected a text.")
    return captions


@torch.inference_mode()
def embed_all_images(
    towers: TwoTowers, reader: Reader, images: datasets.Dataset, batch_size: int, num_workers: int
) -> torch.Tensor:
    """Embeddings of many images `(images, width)`, on the CPU, with a progress bar."""
    batches = image_batches(reader, images, batch_size, num_workers)
    embeddings = torch.cat([towers.embed_images(pixel_values.to(towers.device)).cpu() for pixel_values, _ in batches])
    check_scores(embeddings, "embeddings")
    return embeddings


def retrieval_recall(
    image_embeddings: torch.Tensor, text_embeddings: torch.Tensor, owners: torch.Tensor, chunk: int = CHUNK
) -> dict[str, float]:
    """Recall at 1, 5 and 10, in percent.

    A caption or image counts as found at k if fewer than k wrong ones are more similar. Similarities are computed in
    chunks, so that memory does not grow with images times captions.

    Args:
        image_embeddings (`torch.Tensor`): `(images, width)`, of norm 1.
        text_embeddings (`torch.Tensor`): `(captions, width)`, of norm 1.
        owners (`torch.Tensor`): `(captions,)`, the image of each caption; every image has one at least.
        chunk (`int`, *optional*): Similarities to hold at once.

    Returns:
        `dict`: `image_to_text@k` (for each image, whether one of its captions is among the k best) and
        `text_to_image@k` for each k.
    """
    num_images, num_texts = len(image_embeddings), len(text_embeddings)
    ranks = {"image_to_text": [], "text_to_image": []}
    for start in range(0, num_images, max(chunk // num_texts, 1)):
        rows = torch.arange(start, min(start + max(chunk // num_texts, 1), num_images))
        similarities = image_embeddings[rows] @ text_embeddings.mT
        own = owners == rows[:, None]
        best = similarities.masked_fill(~own, -torch.inf).amax(1, keepdim=True)
        ranks["image_to_text"].append(((similarities > best) & ~own).sum(1))
    for start in range(0, num_texts, max(chunk // num_images, 1)):
        rows = slice(start, start + max(chunk // num_images, 1))
        similarities = text_embeddings[rows] @ image_embeddings.mT
        own = similarities.gather(1, owners[rows, None])
        ranks["text_to_image"].append((similarities > own).sum(1))
    return {
        f"{direction}@{k}": 100 * (torch.cat(rank) < k).float().mean().item()
        for direction, rank in ranks.items()
        for k in RANKS
    }
