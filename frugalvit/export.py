"""`frugalvit export`: write a model for a runtime without PyTorch, and compare its outputs with the original's."""

import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from PIL.Image import Resampling
from transformers import AutoImageProcessor

from .architectures import has_rois, load_saved_model
from .command_line import OutputOptions, SplitOptions, TokenOptions, argument, read_options
from .configuration.configuration_base import pair
from .evaluation.images import image_batches, images_to_evaluate
from .evaluation.two_towers import load_tokenizer
from .export_card import rows, write_card, write_plain_card
from .export_page import check_page, write_page
from .exported import (
    FORMATS,
    PRECISIONS,
    REPORT,
    ExportedModule,
    Part,
    check_format,
    export_parts,
    num_tokens_of,
    parts_of,
    program_file,
)
from .inference import choose_tokens
from .modeling.hosts import read_anatomy
from .modeling.image_format import ImageFormat, set_size
from .training.arguments import POSITIVE
from .training.cards import share_error
from .training.data import class_names, load_images, sample, split_names
from .training.files import atomic_directory, check_output_outside_input, write_json
from .training.loading import load_pretrained
from .training.scores import check_scores
from .training.text import format_table
from .version import __version__


PROG = "frugalvit export"
# Smallest allowed mean cosine with the original's outputs, and smallest allowed share of equal labels.
LEAST = {"float32": 0.99, "bfloat16": 0.99, "int8": 0.98}
BATCH_SIZE = 8
# Format that writes a student as a model of its teacher's class.
PLAIN = "transformers"


@dataclass(kw_only=True)
class ExportOptions(OutputOptions, SplitOptions, TokenOptions):
    """Write a folder with a model for another runtime, and compare this model's outputs with the original's. The
    folder has programs, preprocessing, labels, and a card with code that runs the model without PyTorch and frugalvit.
    The commands predict and evaluate can load the folder. With --format transformers, a student is written as a
    model of its teacher's class. The student must have been trained with --focusing inherited."""

    model: str = argument(help="Model folder or hub id (@revision, too).")
    format: str = argument("onnx", "Runtime, or transformers.", choices=[*FORMATS, PLAIN])
    precision: str = argument("float32", "onnx has no bfloat16.", choices=PRECISIONS)
    output_rois: bool = argument(False, "Keep RoIs and sampling points of a SparseFormer.")
    page: bool = argument(False, "Add a page that labels images in the browser; needs npm.")
    limit: int = argument(300, "Number of images to compare on, chosen at random.")
    calibration_data: list[str] | None = argument(None, "Data set to calibrate int8 on. Default: train of dataset.")
    calibration_images: int = argument(300, "Number of images to calibrate on.")
    force: bool = argument(False, "Write the folder even if its outputs differ too much from the original's.")
    json: bool = argument(False, "Print JSON.")

    expected = {"calibration_images": POSITIVE}

    def __post_init__(self):
        super().__post_init__()
        if self.format == PLAIN and (self.precision != "float32" or self.page):
            given = "page" if self.page else "precision"
            raise ValueError(f"{given} is for {' and '.join(FORMATS)}; leave it out with format {PLAIN}")


def main(argv: list[str] | None = None) -> None:
    options = read_options(ExportOptions, PROG, argv)
    check_output_outside_input(options.output, options.model)
    if options.format == PLAIN:
        report = export_plain(options)
        print(json.dumps(report, indent=2) if options.json else format_table([report]))
        return
    check_format(options.format, options.precision)
    if options.page:
        check_page(options.format)
    report = export_model(options)
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(format_table(rows(report)))
    print(f"\nWrote {options.output}: {report['bytes'] / 1e6:.1f} MB of programs. Its card has lines that run it.")
    if options.page:
        print(f"To open its page: python -m http.server --directory {options.output}, then http://localhost:8000")


@torch.no_grad()
def export_model(options: ExportOptions) -> dict[str, object]:
    """Export a model, compare the programs with the model, and write the folder. Return the contents of `report.json`.
    If the outputs differ too much and `force` is not set, raise a ValueError."""
    model = load_saved_model(options.model)
    image_processor = load_pretrained(AutoImageProcessor, options.model)
    image_format = ImageFormat.from_processor(image_processor)
    # The programs take images of the size that the image processor outputs. In DINOv2, `config.image_size` is larger
    # than this size, because it is the size for position embeddings.
    vision = getattr(model.config, "vision_config", model.config)
    if pair(vision.image_size) != image_format.size:
        vision.image_size = list(image_format.size)
    name = type(model).__name__
    if options.output_rois and not has_rois(model):
        raise ValueError(f"output_rois: {name} has no RoIs, expected a SparseFormer.")
    if options.page and not name.endswith("ForImageClassification"):
        raise ValueError(f"page: {name} has no labels to show, expected an image classifier.")
    choose_tokens(model, options.num_tokens, None)
    images, calibration_images = choose_images(options)
    parts = parts_of(model, options.output_rois or (options.page and has_rois(model)))
    tokenizer = None
    if "text_model" in parts:
        tokenizer = load_tokenizer(options.model, model.config.text_config.vocab_size)
    report = {
        "frugalvit": __version__,
        "format": options.format,
        "precision": options.precision,
        # A local path is private, so only the folder's name is written.
        "model": Path(options.model).name if Path(options.model).is_dir() else options.model,
        "architecture": type(model).__name__,
        "num_tokens": num_tokens_of(model),
        "calibration_images": len(calibration_images),
        "parts": {},
    }
    calibration = {}
    for name, part in parts.items():
        outputs = part(**part.example(1))
        for output, values in outputs.items():
            check_scores(values[-1] if isinstance(values, tuple) else values, output)
        report["parts"][name] = {"outputs": [*outputs]}
        if options.precision == "int8":
            calibration[name] = list(batches_for(part, image_processor, tokenizer, calibration_images, batch_size=1))
    with atomic_directory(options.output, options.overwrite) as folder:
        print(f"Exporting to {options.format}, which takes a minute or more.", file=sys.stderr)
        export_parts(parts, options.format, options.precision, folder, calibration)
        report["bytes"] = sum(path.stat().st_size for path in folder.rglob("*.*") if path.suffix != ".json")
        for processor in filter(None, (image_processor, tokenizer)):
            processor.save_pretrained(folder)
        # `ExportedModule` reads this file. After the comparison, the file is written again.
        write_json(folder / REPORT, report)
        print(f"Comparing on {len(images):,} images.", file=sys.stderr)
        for name, part in parts.items():
            batches = batches_for(part, image_processor, tokenizer, images)
            report["parts"][name] |= compare_outputs(part, ExportedModule(folder, name), batches)
        report["shortcomings"] = shortcomings(report)
        if report["shortcomings"] and not options.force:
            found = "; ".join(report["shortcomings"])
            raise ValueError(f"The program differs from {options.model}: {found} (--force writes it nevertheless).")
        write_json(folder / REPORT, report)
        write_card(folder, model, image_format, report, options.model)
        if options.page:
            write_page(folder, Path(options.output).name, program_file("onnx", options.precision, "model"))
    return report


@torch.no_grad()
def export_plain(options: ExportOptions) -> dict[str, object]:
    """Write a student as a model of its teacher's class, with an image processor for the new model's image size.
    Return the result of `compare_outputs`. Each model gets images from its own image processor."""
    student = load_saved_model(options.model)
    if not hasattr(student, "to_plain_vit"):
        raise ValueError(f"format {PLAIN} is for students with an inherited start; got a {type(student).__name__}.")
    choose_tokens(student, options.num_tokens, None)
    host = student.to_plain_vit()
    size = getattr(getattr(host.config, "vision_config", host.config), "image_size", None)
    if size is None:
        raise ValueError(f"format {PLAIN} needs images of one size; a {type(host).__name__} takes patches of any.")
    image_processor = load_pretrained(AutoImageProcessor, options.model)
    anatomy = read_anatomy(host)
    part = Part(student, "model")
    name = next(iter(part(**part.example(1))))
    call = anatomy.embed if anatomy.classifier is None else anatomy.run_classifier
    images, _ = choose_images(options)
    with atomic_directory(options.output, options.overwrite) as folder:
        host.save_pretrained(folder)
        # The student's images are resized twice, by its image processor and by its model. One bilinear step is enough.
        smaller = copy.deepcopy(image_processor)
        set_size(smaller, size)
        smaller.resample = Resampling.BILINEAR
        smaller.save_pretrained(folder)
        processors = (image_processor, load_pretrained(AutoImageProcessor, folder))
        views = zip(*(image_batches(each, images, BATCH_SIZE, skip_corrupt=True) for each in processors), strict=True)
        report = compare_outputs(
            lambda pixel_values, smaller: part(pixel_values),
            lambda pixel_values, smaller: {name: call(smaller)},
            ({"pixel_values": own, "smaller": smaller} for (own, _), (smaller, _) in views),
        )
        write_plain_card(folder, host, pair(size), report, options.model)
    return report


def choose_images(options: ExportOptions) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return random images for the comparison and, for int8, other random images for the calibration."""
    images, split = images_to_evaluate(dataclasses.replace(options, limit=None))
    columns = {"image_column": options.image_column, "name": options.dataset_config}
    if options.precision != "int8":
        source = images.select([])
    elif options.calibration_data:
        source = load_images(options.calibration_data, "train", **columns)
    elif split != "train" and "train" in split_names(options.dataset, options.dataset_config):
        source = load_images(options.dataset, "train", **columns)
    else:
        parts = images.train_test_split(test_size=min(options.limit, len(images) // 2), seed=0)
        source = parts["train"]
        images = parts["test"]
    return sample(images, options.limit, seed=0), sample(source, options.calibration_images, seed=0)


def batches_for(
    part: Part, image_processor, tokenizer, images: datasets.Dataset, batch_size: int = BATCH_SIZE
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of a program's inputs. A text encoder gets one sentence for each class of the data set. Other
    programs get the images."""
    if part.kind != "text_embeds":
        for pixel_values, _ in image_batches(image_processor, images, batch_size, skip_corrupt=True):
            yield {"pixel_values": pixel_values}
        return
    texts = [f"a photo of a {name.replace('_', ' ')}." for name in class_names(images) or ["thing"]]
    length = part.model.config.text_config.max_position_embeddings
    inputs = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    # Some tokenizers return no attention mask. For these tokenizers, a mask of ones is used.
    inputs = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
    for start in range(0, len(texts), batch_size):
        yield {name: inputs[name][start : start + batch_size] for name in ("input_ids", "attention_mask")}


def compare_outputs(
    part: Callable, exported: Callable, batches: Iterator[dict[str, torch.Tensor]]
) -> dict[str, object]:
    """Compare the outputs of the original and of the program for the same inputs.

    Returns:
        `compared` is the number of inputs. `min_cosine` and `mean_cosine` compare the first output of the original
        with the first output of the program. If this output is a tuple of feature maps, the last map is compared.
        `agreement` is the share of images, or of pixels, that get the same label from both, and `agreement_error` its
        standard error. Both are None if the first output is not logits.
    """
    cosines = []
    agreements = []
    for inputs in batches:
        outputs = [each(**inputs) for each in (part, exported)]
        name = next(iter(outputs[0]))
        found = (each[name][-1] if isinstance(each[name], tuple) else each[name] for each in outputs)
        expected, computed = (values.float() for values in found)
        check_scores(computed, name)
        cosines.append(F.cosine_similarity(expected.flatten(1), computed.flatten(1)))
        if name == "logits":
            agreements.append((expected.argmax(1) == computed.argmax(1)).float())
    cosines = torch.cat(cosines)
    agreement = torch.cat(agreements).mean().item() if agreements else None
    return {
        "compared": len(cosines),
        "min_cosine": cosines.min().item(),
        "mean_cosine": cosines.mean().item(),
        "agreement": agreement,
        "agreement_error": None if agreement is None else share_error(agreement, len(cosines)),
    }


def shortcomings(report: dict) -> list[str]:
    """Return a message for each mean cosine or agreement below its limit in `LEAST`. An agreement may be below the
    limit by one standard error, because the share among few images is uncertain."""
    least = LEAST[report["precision"]]
    found = []
    for name, part in report["parts"].items():
        # `not … >=` is true for NaN, but `<` would be false.
        if not part["mean_cosine"] >= least:
            cosine = f"mean cosine {part['mean_cosine']:.4f} of {name} on {part['compared']} inputs"
            found.append(f"{cosine}, expected {least}")
        # `agreement` is None for embeddings.
        if part["agreement"] is not None and not part["agreement"] + part["agreement_error"] >= least:
            agreement = f"agreement {part['agreement']:.4f} ± {part['agreement_error']:.4f} of {name}"
            found.append(f"{agreement} (standard error of {part['compared']} images), expected {least}")
    return found
