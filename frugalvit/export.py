"""`frugalvit export`: write a model for a runtime without PyTorch, once its outputs are those of the original."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F

from .architectures import has_rois, load_saved_model
from .command_line import CommandParser, add_dataset_arguments, positive
from .configuration.configuration_base import pair
from .evaluation.images import image_batches, images_to_evaluate
from .evaluation.two_towers import load_tokenizer
from .export_card import rows, write_card
from .export_page import check_page, write_page
from .export_plain import write_plain_card, write_smaller_processor
from .exported import (
    FORMATS,
    PRECISIONS,
    REPORT,
    ExportedModule,
    Part,
    check_format,
    export_parts,
    parts_of,
    program_file,
)
from .inference import choose_tokens
from .modeling.hosts import read_anatomy
from .modeling.image_format import ImageFormat
from .training.data import class_names, load_images, sample, split_names
from .training.files import atomic_directory, check_output_outside_input, write_json
from .training.loading import load_processor, vision_config_of
from .training.scores import check_scores
from .training.text import format_table
from .version import __version__


# Least mean cosine with the original's outputs, and share of images with the original's label.
LEAST = {"float32": 0.99, "bfloat16": 0.99, "int8": 0.97}
BATCH_SIZE = 8
# The format of a student as a model of its teacher's class.
PLAIN = "transformers"


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit export",
        description="Write a model for another runtime: programs, preprocessing, labels and a card whose lines run "
        "without PyTorch and frugalvit. Its outputs are compared with the original's first. predict, evaluate and "
        "demo take such folders. Or write a student with an inherited start as a model of its teacher's class.",
    )
    parser.add_argument("--model", required=True, help="model folder or hub id, owner/name@revision too")
    parser.add_argument("--output", metavar="OUT", required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--format", choices=(*FORMATS, PLAIN), default="onnx", help=f"runtime, or {PLAIN}")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="onnx has no bfloat16")
    parser.add_argument(
        "--num-tokens", type=positive, metavar="COUNT", help="latent tokens (default: the model's own)"
    )
    parser.add_argument("--output-rois", action="store_true", help="with RoIs and sampling points of a SparseFormer")
    parser.add_argument("--page", action="store_true", help="with a page that labels images in the browser; needs npm")
    images = parser.add_argument_group("images to compare on")
    add_dataset_arguments(images)
    images.add_argument("--limit", type=positive, default=300, help="number of images")
    images.add_argument("--calibration-data", nargs="+", metavar="DATA", help="for int8 (default: --dataset's train)")
    images.add_argument("--calibration-images", type=positive, default=300, help="number of them")
    parser.add_argument("--force", action="store_true", help="write it however far it is from the original")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a model folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    check_output_outside_input(arguments.output, arguments.model)
    if arguments.format == PLAIN:
        for name, given in (("--precision", arguments.precision != "float32"), ("--page", arguments.page)):
            if given:
                raise ValueError(f"{name} is for {' and '.join(FORMATS)}; leave it out with --format {PLAIN}.")
        report = export_plain(arguments)
        print(json.dumps(report, indent=2) if arguments.json else format_table([report]))
        return
    check_format(arguments.format, arguments.precision)
    if arguments.page:
        check_page(arguments.format)
    report = export_model(arguments)
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    print(format_table(rows(report)))
    print(f"\nWrote {arguments.output}: {report['bytes'] / 1e6:.1f} MB of programs. Its card tells how to run it.")
    if arguments.page:
        print(f"To see its page: python -m http.server --directory {arguments.output}, then http://localhost:8000")


@torch.no_grad()
def export_model(arguments: argparse.Namespace) -> dict[str, object]:
    """Export, compare, and write the folder, or none of it. Return the contents of `report.json`."""
    model = load_saved_model(arguments.model)
    image_processor = load_processor(arguments.model)
    image_format = ImageFormat.from_processor(image_processor)
    # DINOv2's configuration has the size of its position embeddings, and its processor makes smaller images.
    vision = vision_config_of(model.config)
    if pair(vision.image_size) != image_format.size:
        vision.image_size = list(image_format.size)
    name = type(model).__name__
    if arguments.output_rois and not has_rois(model):
        raise ValueError(f"--output-rois: {name} has no RoIs, expected a SparseFormer.")
    if arguments.page and not name.endswith("ForImageClassification"):
        raise ValueError(f"--page shows labels; got a {name}, expected an image classifier.")
    choose_tokens(model, arguments.num_tokens, None)
    images, calibration_images = choose_images(arguments)
    parts = parts_of(model, arguments.output_rois or (arguments.page and has_rois(model)))
    tokenizer = None
    if "text_model" in parts:
        tokenizer = load_tokenizer(arguments.model, model.config.text_config.vocab_size)
    report = {
        "frugalvit": __version__,
        "format": arguments.format,
        "precision": arguments.precision,
        # A published folder has no paths of this machine.
        "model": Path(arguments.model).name if Path(arguments.model).is_dir() else arguments.model,
        "architecture": type(model).__name__,
        "calibration_images": len(calibration_images),
        "parts": {},
    }
    calibration = {}
    for name, part in parts.items():
        outputs = part(**part.example(1))
        for output, values in outputs.items():
            check_scores(values[-1] if isinstance(values, tuple) else values, output)
        report["parts"][name] = {"outputs": [*outputs]}
        if arguments.precision == "int8":
            calibration[name] = list(batches_for(part, image_processor, tokenizer, calibration_images, batch_size=1))
    with atomic_directory(arguments.output, arguments.overwrite) as folder:
        print(f"Exporting to {arguments.format}, which takes a minute or more.", file=sys.stderr)
        export_parts(parts, arguments.format, arguments.precision, folder, calibration)
        report["bytes"] = sum(path.stat().st_size for path in folder.rglob("*.*") if path.suffix != ".json")
        for processor in filter(None, (image_processor, tokenizer)):
            processor.save_pretrained(folder)
        # `ExportedModule` reads it.
        write_json(folder / REPORT, report)
        print(f"Comparing on {len(images):,} images.", file=sys.stderr)
        for name, part in parts.items():
            batches = batches_for(part, image_processor, tokenizer, images)
            report["parts"][name] |= compare_outputs(part, ExportedModule(folder, name), batches)
        report["shortcomings"] = shortcomings(report)
        if report["shortcomings"] and not arguments.force:
            found = "; ".join(report["shortcomings"])
            raise ValueError(f"The program is not what {arguments.model} is: {found} (--force writes it).")
        write_json(folder / REPORT, report)
        write_card(folder, model, image_format, report, arguments.model)
        if arguments.page:
            write_page(folder, Path(arguments.output).name, program_file("onnx", arguments.precision, "model"))
    return report


@torch.no_grad()
def export_plain(arguments: argparse.Namespace) -> dict[str, object]:
    """Write a student as a model of its teacher's class, with an image processor of its size. Return what
    `compare_outputs` finds when each has its own processor."""
    student = load_saved_model(arguments.model)
    if not hasattr(student, "to_plain_vit"):
        raise ValueError(f"--format {PLAIN} is for students with an inherited start; got a {type(student).__name__}.")
    choose_tokens(student, arguments.num_tokens, None)
    host = student.to_plain_vit()
    size = getattr(vision_config_of(host.config), "image_size", None)
    if size is None:
        raise ValueError(f"--format {PLAIN} needs images of one size; a {type(host).__name__} takes patches of any.")
    image_processor = load_processor(arguments.model)
    anatomy = read_anatomy(host)
    part = Part(student, "model")
    name = next(iter(part(**part.example(1))))
    call = anatomy.embed if anatomy.classifier is None else anatomy.run_classifier
    images, _ = choose_images(arguments)
    with atomic_directory(arguments.output, arguments.overwrite) as folder:
        host.save_pretrained(folder)
        write_smaller_processor(folder, ImageFormat.from_processor(image_processor), pair(size))
        processors = (image_processor, load_processor(folder))
        views = zip(*(image_batches(each, images, BATCH_SIZE, skip_corrupt=True) for each in processors), strict=True)
        report = compare_outputs(
            lambda pixel_values, smaller: part(pixel_values),
            lambda pixel_values, smaller: {name: call(smaller)},
            ({"pixel_values": own, "smaller": smaller} for (own, _), (smaller, _) in views),
        )
        write_plain_card(folder, host, pair(size), report, arguments.model)
    return report


def choose_images(arguments: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Choose images to compare on and, for int8, others to calibrate with, both at random."""
    images, split = images_to_evaluate(argparse.Namespace(**vars(arguments) | {"limit": None}))
    columns = {"image_column": arguments.image_column, "name": arguments.dataset_config}
    if arguments.precision != "int8":
        source = images.select([])
    elif arguments.calibration_data:
        source = load_images(arguments.calibration_data, "train", **columns)
    elif split != "train" and "train" in split_names(arguments.dataset, arguments.dataset_config):
        source = load_images(arguments.dataset, "train", **columns)
    else:
        parts = images.train_test_split(test_size=min(arguments.limit, len(images) // 2), seed=0)
        source = parts["train"]
        images = parts["test"]
    return sample(images, arguments.limit, seed=0), sample(source, arguments.calibration_images, seed=0)


def batches_for(
    part: Part, image_processor, tokenizer, images: datasets.Dataset, batch_size: int = BATCH_SIZE
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of a program's inputs. Texts are sentences about the images' classes."""
    if part.kind != "text_embeds":
        for pixel_values, _ in image_batches(image_processor, images, batch_size, skip_corrupt=True):
            yield {"pixel_values": pixel_values}
        return
    texts = [f"a photo of a {name.replace('_', ' ')}." for name in class_names(images) or ["thing"]]
    length = part.model.config.text_config.max_position_embeddings
    inputs = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    # Some tokenizers mask nothing.
    inputs = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
    for start in range(0, len(texts), batch_size):
        yield {name: inputs[name][start : start + batch_size] for name in ("input_ids", "attention_mask")}


def compare_outputs(
    part: Callable, exported: Callable, batches: Iterator[dict[str, torch.Tensor]]
) -> dict[str, object]:
    """Run the original and the program on the same inputs. Return cosines of the first outputs (of feature maps, the
    last map) and the share of images (of a segmenter, pixels) with the same label."""
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
    return {
        "compared": len(cosines),
        "min_cosine": cosines.min().item(),
        "mean_cosine": cosines.mean().item(),
        "agreement": torch.cat(agreements).mean().item() if agreements else None,
    }


def shortcomings(report: dict) -> list[str]:
    """Return one line for each cosine or agreement below `LEAST`."""
    least = LEAST[report["precision"]]
    return [
        f"{measure.replace('_', ' ')} {part[measure]:.4f} of {name} on {part['compared']} inputs, expected {least}"
        for name, part in report["parts"].items()
        for measure in ("mean_cosine", "agreement")
        # Embeddings have no labels to agree on; NaN is not enough.
        if part[measure] is not None and not part[measure] >= least
    ]
