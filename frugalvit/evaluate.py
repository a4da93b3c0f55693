"""`frugalvit evaluate`: measure the scores of a model on a task."""

import importlib
import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from .command_line import (
    DeviceOptions,
    ReadingOptions,
    SplitOptions,
    TokenOptions,
    argument,
    read_options,
)
from .training.arguments import PIXEL_VALUES, POSITIVE, CheckedArguments
from .training.choices import DEVICE_MAPS, DTYPES, OPEN_CLIP
from .training.files import check_file_path, write_json
from .training.text import format_table


PROG = "frugalvit evaluate"
CLIP = "CLIP or SigLIP: folder or hub id (@revision, too)."
VISION_MODEL = "SparseFormer in the place of the CLIP's image side."


@dataclass(kw_only=True)
class EvaluateOptions(DeviceOptions):
    model: str = argument(help="Folder or hub id (@revision, too).")
    batch_size: int = argument(64, "Images of a batch.")
    output: str | None = argument(None, "Write the results into this .json file, too.", metavar="FILE")
    json: bool = argument(False, "Print JSON instead of a table.")

    expected = {"batch_size": POSITIVE}


@dataclass(kw_only=True)
class ClassificationOptions(EvaluateOptions, SplitOptions, ReadingOptions, TokenOptions):
    """Measure the top-1 and top-5 accuracy of an image classifier."""

    class_names: list[str] | None = argument(None, "Names or numbers, in the model, of the labels 0, 1, …")
    attack: str | None = argument(None, "Fast gradient sign method, step 1/255 of the color range.", choices=["fgsm"])
    occlude: str | None = argument(None, "Hide the middle quarter of each image.", choices=["center"])


@dataclass(kw_only=True)
class KnnOptions(EvaluateOptions, SplitOptions, ReadingOptions):
    """Measure the accuracy of a nearest-neighbor classifier on a model's embeddings. The neighbors of an image are the
    labeled images with the highest cosine similarity to the image. The neighbors vote on the image's class. A vote has
    the weight exp(cosine / 0.07) (DINO, Caron et al. 2021)."""

    model: str = argument(
        help="SparseFormer, vision transformer or CLIP: folder or hub id (@revision, too), or "
        f"{OPEN_CLIP}MODEL:PRETRAINED."
    )
    train_split: str = argument("train", "Split of the labeled images.")
    eval_dataset: list[str] | None = argument(None, "Data set to evaluate on, if not another split of dataset.")
    neighbors: int = argument(20, "Number of neighbors that vote.")

    expected = {"neighbors": POSITIVE}


@dataclass(kw_only=True)
class SegmentationOptions(EvaluateOptions, SplitOptions, ReadingOptions):
    """Measure the mean IoU, mean accuracy and pixel accuracy of a semantic segmentation model."""

    dataset: list[str] = argument(help="Hub id, parquet files, or folder with images/ and annotations/.")
    batch_size: int = argument(16, "Images of a batch.")
    mask_column: str | None = argument(None, "Name of the column of masks, where there are several.")
    ignored_labels: list[int] = argument([], "Labels to ignore besides 255.")
    reduce_labels: bool = argument(False, "Ignore label 0 and subtract 1 from the others.")
    window: int | None = argument(None, "Height and width of a sliding window in pixels.")

    expected = {"window": POSITIVE, "ignored_labels": PIXEL_VALUES}


@dataclass(kw_only=True)
class ZeroShotOptions(EvaluateOptions, SplitOptions, ReadingOptions):
    """Measure the zero-shot accuracy of a CLIP. Each class name is put into several sentences. The embedding of a
    class is the mean embedding of its sentences. An image gets the class whose embedding is most similar to the
    image's embedding (Radford et al. 2021)."""

    model: str = argument(help=CLIP)
    vision_model: str | None = argument(None, VISION_MODEL)
    classes: str | None = argument(None, "File of class names, one a line, or imagenet. Default: the data set's.")
    templates: str = argument("imagenet", "File of sentences with {}, one a line, or imagenet.")


@dataclass(kw_only=True)
class RetrievalOptions(EvaluateOptions, ReadingOptions):
    """Measure the recall at 1, 5 and 10 of image-to-text and text-to-image retrieval, in percent. Each image
    searches all captions, and each caption searches all images."""

    model: str = argument(help=CLIP)
    vision_model: str | None = argument(None, VISION_MODEL)
    dataset: list[str] = argument(help="Karpathy's .json file of captions.")
    image_folder: Path = argument(help="Folder of the images.")
    split: str = argument("test", "Split of the file.")
    limit: int | None = argument(None, "Take only the first images.")

    expected = {"limit": POSITIVE}


@dataclass(kw_only=True)
class ScienceQAOptions(EvaluateOptions):
    """Measure the accuracy of a LLaVA on ScienceQA's multiple-choice questions. An answer that names none of the
    question's options counts as wrong."""

    batch_size: int = argument(8, "Questions of a batch.")
    dataset: list[str] = argument(help="Hub id or parquet files.")
    split: str | None = argument(None, "Split. Default: test, validation or train.")
    limit: int | None = argument(None, "Take only the first questions.")
    device_map: str | None = argument(None, "Distribute the weights, as Accelerate does.", choices=DEVICE_MAPS)
    dtype: str = argument("float32", "Data type of the weights.", choices=DTYPES)

    expected = {"limit": POSITIVE}


TASKS = {
    "classification": ClassificationOptions,
    "knn": KnnOptions,
    "segmentation": SegmentationOptions,
    "zero-shot": ZeroShotOptions,
    "retrieval": RetrievalOptions,
    "scienceqa": ScienceQAOptions,
}


@dataclass(kw_only=True)
class TaskOptions(CheckedArguments):
    """Evaluate a model on a task. `frugalvit evaluate TASK --help` lists the options of a task."""

    task: str = argument(
        help=" ".join(f"{name}: {inspect.getdoc(options).partition('.')[0]}." for name, options in TASKS.items()),
        choices=TASKS,
        positional=True,
    )


def main(argv: list[str] | None = None) -> None:
    task, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if task not in TASKS:
        # `task` is unknown or an option such as --help. `read_options` prints an error or the help, and exits.
        read_options(TaskOptions, PROG, [task])
    options = read_options(TASKS[task], f"{PROG} {task}", words)
    if options.output:
        check_file_path(options.output)
    module = importlib.import_module(f"frugalvit.evaluation.{task.replace('-', '_')}")
    results = {"task": task, **module.run(options)}
    if options.output:
        write_json(options.output, results)
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        print(format_table([{"measure": name, "value": value} for name, value in results.items()]))
