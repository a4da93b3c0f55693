"""`frugalvit evaluate`: how good a model is on a task."""

import argparse
import time
from collections.abc import Mapping, Sequence

import datasets
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel

from .tables import format_table
from .training.data import SUBSET, CorruptImageError, decode_image, load_images
from .training.files import check_file_path, write_json
from .training.loading import load_image_classifier
from .training.metrics import evaluate_classifier


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="frugalvit evaluate", description=__doc__)
    tasks = parser.add_subparsers(title="tasks", dest="task", required=True, metavar="TASK")
    add_classification(tasks)
    arguments = parser.parse_args(argv)
    if arguments.json:
        check_file_path(arguments.json)
    results = {"task": arguments.task, **arguments.evaluate(arguments)}
    print(format_table([{"measure": name, "value": value} for name, value in results.items()]))
    if arguments.json:
        write_json(arguments.json, results)


def add_classification(tasks) -> None:
    parser = tasks.add_parser(
        "classification",
        help="top-1 and top-5 accuracy of an image classifier",
        description="Top-1 and top-5 accuracy of an image classifier, with the model's own image processor.",
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="model folder or hub id")
    parser.add_argument(
        "--dataset",
        nargs="+",
        default=[SUBSET],
        help=f"datasets hub id, image folder, parquet files or folder of them, or {SUBSET} (default)",
    )
    parser.add_argument("--dataset-config", "--dataset_config", help="configuration of a hub data set with several")
    parser.add_argument("--split", help="default: test; files given directly are one part, train")
    parser.add_argument("--image-column", "--image_column", help="where types do not tell")
    parser.add_argument("--label-column", "--label_column", help="where types do not tell")
    parser.add_argument("--limit", type=_positive, help="take only the first images")
    parser.add_argument("--batch-size", "--batch_size", type=_positive, default=64, help="default: 64")
    parser.add_argument("--num-workers", "--num_workers", type=int, default=0, help="processes that decode images")
    parser.add_argument("--skip-corrupt", "--skip_corrupt", action="store_true", help="leave out unreadable images")
    parser.add_argument("--json", metavar="OUT", help="also write the results to this file")
    parser.add_argument("--device", help="cpu, cuda, mps (default: an accelerator if there is one)")
    parser.add_argument(
        "--trust-remote-code", "--trust_remote_code", action="store_true", help="run code that comes with the model"
    )
    parser.set_defaults(evaluate=_classification)


def _classification(arguments: argparse.Namespace) -> dict[str, object]:
    files = all(path.endswith(".parquet") for path in arguments.dataset)
    split = arguments.split or ("train" if files else "test")
    images = load_images(
        arguments.dataset,
        split,
        name=arguments.dataset_config,
        image_column=arguments.image_column,
        label_column=arguments.label_column,
    )
    if arguments.limit:
        images = images.select(range(min(arguments.limit, len(images))))
    model, image_processor = load_image_classifier(arguments.model, arguments.device, arguments.trust_remote_code)
    results = classification_accuracy(
        model,
        image_processor,
        images,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
        skip_corrupt=arguments.skip_corrupt,
    )
    return {"model": arguments.model, "dataset": " ".join(arguments.dataset), "split": split, **results}


def classification_accuracy(
    model: PreTrainedModel,
    image_processor,
    images: datasets.Dataset,
    *,
    batch_size: int = 64,
    num_workers: int = 0,
    skip_corrupt: bool = False,
) -> dict[str, object]:
    """Evaluate an image classifier, with a progress bar.

    Labels are matched with the model's by name where the data set's names are all known to the model, and by index
    otherwise.

    Args:
        model (`PreTrainedModel`): The classifier, on its device.
        image_processor: What turns `PIL.Image` into pixel values.
        images (`datasets.Dataset`): What `load_images` returns.
        batch_size (`int`, *optional*, defaults to 64): Images at a time.
        num_workers (`int`, *optional*, defaults to 0): Processes that decode.
        skip_corrupt (`bool`, *optional*, defaults to `False`): Leave out images that cannot be read.

    Returns:
        `dict`: `images`, `skipped`, `accuracy`, `top5_accuracy`, `loss` and `images_per_second` (with decoding).

    Raises:
        ValueError: if there are no labels or no readable images, or the model does not know a label.
    """
    if "label" not in images.features:
        raise ValueError("The data set has no labels to compare with; name their column with --label-column.")
    names = images.features["label"].names
    if unlabeled := [index for index, label in enumerate(images["label"]) if label is None or label < 0]:
        raise ValueError(f"Image {unlabeled[0]} of the data set has no label; choose another --split.")
    loader = DataLoader(
        range(len(images)),
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=_Collate(images, image_processor, match_labels(names, model.config.id2label), skip_corrupt),
    )
    counts = {"images": 0, "skipped": 0}

    def batches(progress):
        for batch in loader:
            readable, skipped = len(batch["labels"]), batch.pop("skipped")
            counts["images"] += readable
            counts["skipped"] += skipped
            if readable:
                yield {name: tensor.to(model.device) for name, tensor in batch.items()}
            progress.update(readable + skipped)
        if not counts["images"]:
            raise ValueError(f"None of the {len(images)} images of the data set can be read.")

    with tqdm(total=len(images), desc="evaluate", unit=" images", leave=False, disable=None) as progress:
        start = time.perf_counter()
        metrics = evaluate_classifier(Accelerator(), model, batches(progress))
        seconds = time.perf_counter() - start
    return {**counts, **metrics, "images_per_second": counts["images"] / seconds}


def match_labels(names: Sequence[str], id2label: Mapping[int, str]) -> list[int]:
    """The model's index of each class of a data set.

    Classes are matched by name, whatever the case, if the model knows all of them, and by index otherwise.

    Raises:
        ValueError: if the data set has classes beyond the model's.
    """
    known = {label.casefold(): index for index, label in id2label.items()}
    if len(known) == len(id2label) and all(name.casefold() in known for name in names):
        return [known[name.casefold()] for name in names]
    if len(names) > len(id2label):
        raise ValueError(
            f"The data set has {len(names)} classes ({', '.join(names[:3])}, …), the model only {len(id2label)} "
            f"({', '.join(list(id2label.values())[:3])}, …); choose a model for this data set."
        )
    return list(range(len(names)))


class _Collate:
    """Indices to pixel values and labels of the images that can be read, and the number of those `skipped`."""

    def __init__(self, images: datasets.Dataset, image_processor, label_indices: list[int], skip_corrupt: bool):
        self.images, self.image_processor = images, image_processor
        self.label_indices, self.skip_corrupt = label_indices, skip_corrupt

    def __call__(self, indices: list[int]) -> dict:
        decoded, labels = [], []
        for index in indices:
            record = self.images[index]
            try:
                decoded.append(decode_image(record["image"], index))
            except CorruptImageError:
                if not self.skip_corrupt:
                    raise
                continue
            labels.append(self.label_indices[record["label"]])
        pixel_values = self.image_processor(decoded, return_tensors="pt").pixel_values if decoded else torch.empty(0)
        return {"pixel_values": pixel_values, "labels": torch.tensor(labels), "skipped": len(indices) - len(labels)}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value
