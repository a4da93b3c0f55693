"""`frugalvit export`: a model for runtimes without PyTorch, compared with the original before anything is written."""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from .architectures import has_rois, load_model
from .common.command_line import CommandParser, add_dataset_arguments, positive, probability
from .common.data import load_images, sample, split_names
from .common.exported import (
    FORMATS,
    PRECISIONS,
    REPORT,
    ExportedModule,
    Part,
    check_format,
    export_parts,
    first_layer,
    modules_named,
    parts_of,
)
from .common.files import whole_folder, write_json
from .common.labels import class_names, label_numbers, match_labels
from .common.loading import load_image_processor
from .common.reading import Reader
from .common.scores import check_scores
from .common.speed import images_per_second
from .common.tables import format_table
from .common.views import ImageFormat, vision_config_of
from .configuration.configuration_base import pair
from .evaluation.images import image_batches, images_to_evaluate
from .evaluation.two_towers import load_tokenizer
from .export_card import rows, write_card
from .export_page import check_page, write_page
from .version import __version__


# Mean cosine with the original's outputs and share of images with the same label that a program has to reach.
LEAST = {"float32": 0.99, "bfloat16": 0.99, "int8": 0.97}
BATCH_SIZE, BATCH_SIZES = 8, (1, 8)
# Rounds, and seconds after which no further one begins, in which speeds are measured.
ROUNDS, SECONDS = 10, 10
SENTENCE = "a photo of a {}."
# Number of random texts where there are no classes or no tokenizer.
NUM_RANDOM_TEXTS = 16
# Value of --num-tokens.
ALL = "all"


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="frugalvit export",
        description="Write a model for another runtime: a folder with programs, preprocessing, labels and a card "
        "whose lines run without PyTorch and frugalvit. Before that, its outputs are compared with the original's on "
        "images that calibration has not seen. predict, evaluate and demo take such folders.",
    )
    parser.add_argument("--model", required=True, help="model folder or hub id, owner/name@revision too")
    parser.add_argument("--output", metavar="OUT", required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--format", choices=tuple(FORMATS), default="onnx", help="runtime (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="onnx has no bfloat16")
    parser.add_argument(
        "--num-tokens",
        nargs="+",
        type=count_or_all,
        metavar="COUNT",
        help="latent tokens of a SparseFormer; several numbers that the model is made for, or "
        f"`{ALL}` of them, become an input of the program (default: the model's own; with --page all)",
    )
    parser.add_argument("--output-rois", action="store_true", help="with RoIs and sampling points of a SparseFormer")
    parser.add_argument("--page", action="store_true", help="with a page that labels images in the browser; needs npm")
    images = parser.add_argument_group("images to compare on")
    add_dataset_arguments(images)
    images.add_argument("--limit", type=positive, default=300, help="number of images (default: %(default)s)")
    images.add_argument("--calibration-data", nargs="+", metavar="DATA", help="for int8 (default: --dataset's train)")
    images.add_argument("--calibration-images", type=positive, default=300, help="default: %(default)s")
    images.add_argument("--seed", type=int, default=0, help="of the choice of images (default: %(default)s)")
    parser.add_argument(
        "--float-layers",
        nargs="+",
        default=[],
        metavar="NAME",
        help="for int8: modules whose layers stay in float32, by name or pattern (classifier, '*.mlp'); for openvino, "
        "the layer that reads the pixels does anyway",
    )
    gate = parser.add_argument_group("what the exported model has to reach")
    gate.add_argument("--min-cosine", type=probability, help="mean cosine of outputs (default: 0.99; int8 0.97)")
    gate.add_argument("--min-agreement", type=probability, help="share of same labels (default: 0.99; int8 0.97)")
    gate.add_argument("--force", action="store_true", help="write it whatever was measured")
    parser.add_argument("--license", help="of the model, for its card (default: that of the original's card)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a model folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def count_or_all(text: str) -> int | str:
    """A number from 1 on, or `ALL`, for argparse."""
    return text if text == ALL else positive(text)


def main(argv: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    # Cheap checks come before the model is loaded.
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


def export_model(arguments: argparse.Namespace) -> dict[str, object]:
    """Export, compare, and write the folder, or none of it. Return the contents of `report.json`.

    Raises:
        ValueError: if the exported model is not near enough to the original.
    """
    model = load_model(arguments.model)
    image_processor = load_image_processor(arguments.model, False, "a model")
    image_format = ImageFormat.from_processor(image_processor)
    # DINOv2's configuration names the size that its positions are for, and its processor makes smaller images.
    vision = vision_config_of(model.config)
    if pair(vision.image_size) != image_format.size:
        vision.image_size = list(image_format.size)
    check_options(arguments, model)
    output_rois = arguments.output_rois or (arguments.page and has_rois(model))
    parts = parts_of(model, output_rois, choose_token_counts(model, arguments))
    tokenizer = None
    if "text_model" in parts:
        # A CLIP without a tokenizer is compared on random texts.
        with suppress(ValueError):
            tokenizer = load_tokenizer(arguments.model, model.config.text_config.vocab_size)
    images, calibration_images = choose_images(arguments)
    calibration, float_layers = None, arguments.float_layers
    if arguments.precision == "int8":
        if arguments.format == "openvino":
            # It loses most in 8 bits.
            float_layers = [first_layer(model), *float_layers]
        calibration = {}
        for name, part in parts.items():
            batches = batches_for(part, image_processor, tokenizer, calibration_images, batch_size=1)
            # Each number of tokens in turn.
            counts = itertools.cycle([{"num_tokens": torch.tensor(count)} for count in part.token_counts] or [{}])
            calibration[name] = [inputs | count for inputs, count in zip(batches, counts, strict=False)]
    with whole_folder(arguments.output, arguments.overwrite) as folder:
        print(f"Exporting to {arguments.format}, which takes a minute or more.", file=sys.stderr)
        runtime = {"name": arguments.format, "precision": arguments.precision}
        export_parts(parts, model.config, **runtime, folder=folder, calibration=calibration, float_layers=float_layers)
        size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".json")
        for processor in filter(None, (image_processor, tokenizer)):
            processor.save_pretrained(folder)
        report = {
            "frugalvit": __version__,
            "format": arguments.format,
            "precision": arguments.precision,
            # Paths of this machine do not belong into a published folder.
            "model": Path(arguments.model).name if Path(arguments.model).is_dir() else arguments.model,
            "architecture": type(model).__name__,
            "bytes": size,
            "calibration_images": len(calibration_images),
            "float_layers": float_layers,
            "parts": {
                name: {"outputs": list(part(**part.example(1))), "num_tokens": [*part.token_counts], "measured": []}
                for name, part in parts.items()
            },
        }
        write_json(folder / REPORT, report)
        print(f"Comparing on {len(images):,} images.", file=sys.stderr)
        right = right_labels(model, images)
        for name, part in parts.items():
            program = ExportedModule(folder, name)
            for num_tokens in part.token_counts or [None]:
                batches = batches_for(part, image_processor, tokenizer, images)
                measured = {"num_tokens": num_tokens}
                measured |= compare_outputs(part, program, batches, right, num_tokens)
                measured["images_per_second"] = speeds_of(part, program, num_tokens)
                report["parts"][name]["measured"].append(measured)
        report["shortcomings"] = shortcomings(report, arguments.min_cosine, arguments.min_agreement)
        if report["shortcomings"] and not arguments.force:
            raise ValueError(
                f"{arguments.format} in {arguments.precision} is not what {arguments.model} is: "
                f"{'; '.join(report['shortcomings'])}. Nothing was written. Try another --precision, other "
                "--calibration-data, or --force."
            )
        write_json(folder / REPORT, report)
        write_card(folder, model, image_format, report, arguments.model, arguments.license)
        if arguments.page:
            write_page(folder, Path(arguments.output).name)
    return report


def check_options(arguments: argparse.Namespace, model: PreTrainedModel):
    """Raise a ValueError if an option does not fit the model or another option."""
    name = type(model).__name__
    if arguments.output_rois and not has_rois(model):
        raise ValueError(f"--output-rois: {name} has no RoIs, expected a SparseFormer.")
    if arguments.page and not name.endswith("ForImageClassification"):
        raise ValueError(f"--page shows labels, which a {name} has not; expected an image classifier.")
    if arguments.float_layers and arguments.precision != "int8":
        raise ValueError(f"--float-layers is for --precision int8, not for {arguments.precision}.")
    modules_named(model, arguments.float_layers)


def choose_token_counts(model: PreTrainedModel, arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return the numbers of tokens that the program takes as an input; none if it has one, which the model is set to.
    Raise a ValueError for numbers that the model is not for."""
    counts = getattr(vision_config_of(model.config), "elastic_token_counts", None) or ()
    asked = arguments.num_tokens or ([ALL] if arguments.page and len(counts) > 1 else [])
    if not asked:
        return ()
    given = f"--num-tokens {' '.join(map(str, asked))}"
    if not hasattr(model, "set_num_tokens"):
        raise ValueError(f"{given} is for SparseFormers, whose tokens can be chosen; got a {type(model).__name__}.")
    if len(asked) == 1 and ALL not in asked:
        model.set_num_tokens(asked[0])
        return ()
    chosen = {*counts} if ALL in asked else {*asked}
    if len(counts) < 2 or not chosen <= {*counts}:
        made_for = ", ".join(map(str, counts)) or "one number of tokens alone"
        raise ValueError(f"{given}: a program takes numbers that the model is made for, here {made_for}.")
    return tuple(sorted(chosen))


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
        # The images are split for calibration and comparison.
        parts = images.train_test_split(test_size=min(arguments.limit, len(images) // 2), seed=arguments.seed)
        source, images = parts["train"], parts["test"]
    return (
        sample(images, arguments.limit, arguments.seed),
        sample(source, arguments.calibration_images, arguments.seed),
    )


def batches_for(
    part: Part, image_processor, tokenizer, images: datasets.Dataset, batch_size: int = BATCH_SIZE
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of a program's inputs. Texts are sentences about the images' classes, or noise without classes or
    without a tokenizer."""
    if part.kind != "text_embeds":
        reader = Reader(image_processor, exact=True)
        for pixel_values, _ in image_batches(reader, images, batch_size, skip_corrupt=True):
            yield {"pixel_values": pixel_values}
        return
    inputs, names = part.example(NUM_RANDOM_TEXTS), class_names(images)
    if tokenizer is not None and names:
        texts = [SENTENCE.format(name.replace("_", " ")) for name in names]
        length = inputs["input_ids"].shape[1]
        texts = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        # Some tokenizers mask nothing.
        inputs = {"attention_mask": torch.ones_like(texts["input_ids"]), **texts}
    for start in range(0, len(inputs["input_ids"]), batch_size):
        yield {name: inputs[name][start : start + batch_size] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def compare_outputs(
    part: Part,
    exported: ExportedModule,
    batches: Iterator[dict[str, torch.Tensor]],
    right: list[int] | None = None,
    num_tokens: int | None = None,
) -> dict[str, object]:
    """Run the original and the program on the same inputs; raise a ValueError if an output is not finite.

    Args:
        part (`Part`), exported (`ExportedModule`), batches (iterator of `dict`): Original, program and inputs.
        right (`list[int]`, *optional*): Labels of all images.
        num_tokens (`int`, *optional*): Latent tokens, where they can be chosen.

    Returns:
        `dict`: The number of inputs that were `compared`; `min_cosine` and `mean_cosine` of the two models' first
        outputs (of feature maps, the last map); `agreement`, the share of images (of a segmenter, pixels) with the
        same label; `accuracy` and `original_accuracy` where labels are known.
    """
    cosines, labels = [], []
    for inputs in batches:
        outputs = [each(**inputs, num_tokens=num_tokens) for each in (part, exported)]
        name = next(iter(outputs[0]))
        found = (each[name][-1] if isinstance(each[name], tuple) else each[name] for each in outputs)
        expected, computed = (values.float() for values in found)
        check_scores(computed, name)
        cosines.append(F.cosine_similarity(expected.flatten(1), computed.flatten(1)))
        if name == "logits":
            labels.append(torch.stack([expected.argmax(1), computed.argmax(1)]))
    cosines = torch.cat(cosines)
    result = {"compared": len(cosines), "min_cosine": cosines.min().item(), "mean_cosine": cosines.mean().item()}
    result |= dict.fromkeys(("agreement", "accuracy", "original_accuracy"))
    if labels:
        expected, computed = torch.cat(labels, dim=1)
        result["agreement"] = (expected == computed).float().mean().item()
        # Images that cannot be read were left out.
        if right is not None and len(right) == len(cosines):
            for name, found in (("accuracy", computed), ("original_accuracy", expected)):
                result[name] = (found == torch.tensor(right)).float().mean().item()
    return result


def right_labels(model: PreTrainedModel, images: datasets.Dataset) -> list[int] | None:
    """Return a classifier's index of each image's label; `None` without labels, or if it does not know them."""
    if "label" not in images.features or not type(model).__name__.endswith("ForImageClassification"):
        return None
    labels = label_numbers(images)
    with suppress(ValueError):
        known = match_labels(class_names(images), model.config.id2label)
        return None if (labels < 0).any() else [known[label] for label in labels]
    return None


def speeds_of(part: Part, exported: ExportedModule, num_tokens: int | None = None) -> dict[str, dict[str, float]]:
    """Measure images a second of the original in PyTorch and of the program, in turns, by batch size."""
    if part.kind == "text_embeds":
        return {}
    models = {"pytorch float32": part, f"{exported.format} {exported.precision}": exported}
    models = {name: functools.partial(model, num_tokens=num_tokens) for name, model in models.items()}
    return {
        str(batch_size): images_per_second(models, part.example(batch_size)["pixel_values"], ROUNDS, SECONDS)
        for batch_size in BATCH_SIZES
    }


def shortcomings(report: dict, min_cosine: float | None, min_agreement: float | None) -> list[str]:
    """Return one line for each cosine or agreement that is too low; the limits are those of `LEAST` if not given."""
    least, problems = LEAST[report["precision"]], []
    for name, part in report["parts"].items():
        for measured in part["measured"]:
            tokens = f" with {measured['num_tokens']} tokens" if measured["num_tokens"] else ""
            for measure, limit in (("mean_cosine", min_cosine), ("agreement", min_agreement)):
                value, limit = measured[measure], least if limit is None else limit
                # NaN is not enough, either.
                if value is not None and not value >= limit:
                    problems.append(
                        f"{measure.replace('_', ' ')} {value:.4f} of {name}{tokens} on {measured['compared']} inputs, "
                        f"expected at least {limit}"
                    )
    return problems
