"""`frugalvit export`: a model for runtimes without PyTorch, compared with the original before anything is written."""

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from .architectures import has_rois, image_side, load_model
from .common.classes import match_labels
from .common.data import load_images, sample, split_names
from .common.exported import (
    FORMATS,
    PIXELS_IN_FLOAT,
    REPORT,
    ExportedModule,
    Part,
    check_format,
    export_parts,
    first_layer,
    measured_of,
    modules_named,
    parts_of,
)
from .common.files import whole_folder, write_json
from .common.labels import class_names, label_numbers
from .common.loading import load_image_processor
from .common.macs import macs_of
from .common.reading import Reader
from .common.scores import check_scores
from .common.speed import duration, foretold, images_per_second
from .common.tables import format_table
from .common.views import ImageFormat, vision_config_of
from .configuration.configuration_base import pair
from .configuration.configuration_sparseformer_base import is_sparseformer
from .evaluation.images import image_batches, images_to_evaluate
from .evaluation.two_towers import load_tokenizer
from .export_card import agreement_rows, speed_rows, write_card
from .export_page import check_page, write_page
from .options.export import ALL, parse
from .tokens import check_elastic, choose_tokens
from .version import __version__


# What an exported model has to reach: the mean cosine with the original's outputs, and the share of images with the
# same label. Numbers of 8 bits are allowed more.
LEAST = {"float32": 0.99, "bfloat16": 0.99, "int8": 0.97}
BATCH_SIZE, BATCH_SIZES = 8, (1, 8)
# Passes of a comparison of speeds that is no benchmark.
ROUNDS, SECONDS = 10, 10
# How many times longer than counting multiply-accumulates exporting takes, roughly: 40 to 115 times, 49 to 79 and 12
# to 26 with shipped models and a ViT-B; of ExecuTorch a guess.
TIMES_COUNTING = {"onnx": 70, "openvino": 65, "torch": 18, "executorch": 200}
# Height and width of other images than those that a model is made for.
OTHER = (1.25, 0.75)
SENTENCE = "a photo of a {}."
# Texts of random tokens.
NOISE = 16


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    # What costs little is checked before the model is loaded.
    check_format(arguments.format, arguments.precision, arguments.any_size)
    if arguments.page:
        check_page(arguments.format, arguments.onnxruntime_web)
    report = export_model(arguments)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"{format_table(agreement_rows(report))}\n\n{format_table(speed_rows(report))}")
        print(f"\nWrote {arguments.output}: {report['bytes'] / 1e6:.1f} MB of programs. Its card tells how to run it.")
        if arguments.page:
            print(f"To see its page: python -m http.server --directory {arguments.output}, then http://localhost:8000")


def export_model(arguments: argparse.Namespace) -> dict[str, object]:
    """Export, compare, and write the folder, or none of it.

    Returns:
        `dict`: The contents of `report.json`.

    Raises:
        ValueError: if the exported model is not near enough to the original.
    """
    with tqdm(desc="loading", total=3, leave=False, disable=None) as progress:
        model = load_model(arguments.model)
        image_processor = load_image_processor(arguments.model, False, "a model")
        image_format = ImageFormat.from_processor(image_processor)
        vision = vision_config_of(model.config)
        if pair(vision.image_size) != image_format.size:
            # DINOv2's names the size that its positions are for, and its processor makes smaller images.
            vision.image_size = list(image_format.size)
        check_options(arguments, model)
        token_counts = choose_token_counts(model, arguments)
        output_rois = arguments.output_rois or (arguments.page and has_rois(model))
        parts = parts_of(model, output_rois, token_counts, arguments.any_size)
        tokenizer = tokenizer_of(model, arguments.model) if "text_model" in parts else None
        images, calibration_images = choose_images(arguments)
        with whole_folder(arguments.output, arguments.overwrite) as folder:
            progress.update()
            progress.set_description("exporting")
            started = time.perf_counter()
            macs = count(model, parts)
            seconds = foretell(parts, arguments.format, time.perf_counter() - started, images, calibration_images)
            tqdm.write(f"Exporting to {arguments.format}: {foretold(seconds)}.", file=sys.stderr)
            started = time.perf_counter()
            calibration, float_layers = None, arguments.float_layers
            if arguments.precision == "int8":
                if arguments.format in PIXELS_IN_FLOAT:
                    float_layers = [first_layer(model), *float_layers]
                calibration = {
                    name: with_token_counts(
                        part, batches_for(part, image_processor, tokenizer, calibration_images, batch_size=1)
                    )
                    for name, part in parts.items()
                }
            export_parts(
                parts,
                model.config,
                arguments.format,
                arguments.precision,
                folder,
                calibration,
                float_layers,
            )
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
                "macs": macs,
                "bytes": size,
                "calibration_images": len(calibration_images) if calibration else 0,
                "float_layers": float_layers,
                "any_size": arguments.any_size,
                "parts": {
                    name: {"outputs": list(part(**part.example(1)))}
                    | ({"num_tokens": {str(count): {} for count in part.token_counts}} if part.token_counts else {})
                    for name, part in parts.items()
                },
            }
            write_json(folder / REPORT, report)
            progress.update()
            progress.set_description("comparing")
            taken = duration(time.perf_counter() - started)
            tqdm.write(f"Exported in {taken}. Comparing on {len(images):,} images.", file=sys.stderr)
            right = right_labels(model, images)
            for name, part in parts.items():
                exported = ExportedModule(folder, name, trust_remote_code=True)
                for num_tokens, measured in measured_of(report["parts"][name]).items():
                    batches = batches_for(part, image_processor, tokenizer, images)
                    measured |= asdict(compare_outputs(part, exported, batches, right, num_tokens))
                    measured["images_per_second"] = speeds_of(part, exported, num_tokens)
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
                write_page(folder, Path(arguments.output).name, arguments.onnxruntime_web)
    return report


@torch.inference_mode()
def foretell(
    parts: dict[str, Part],
    name: str,
    counting: float,
    images: datasets.Dataset,
    calibration_images: datasets.Dataset,
) -> dict[str, float]:
    """Estimate the seconds that exporting, calibrating and comparing will take.

    Args:
        parts (`dict[str, Part]`), name (`str`): The parts to export, and the format.
        counting (`float`): Seconds that counting the multiply-accumulates took, which goes through every operation of
            the model once, as an exporter does.
        images, calibration_images (`datasets.Dataset`): Images to compare on, and to calibrate with.
    """
    once = {}
    for size in BATCH_SIZES:
        started = time.perf_counter()
        for part in parts.values():
            for num_tokens in part.token_counts or [None]:
                part(**part.example(size) | {"num_tokens": num_tokens})
        once[size] = time.perf_counter() - started
    methods = 1 if FORMATS[name].any_batch else max(len(part.token_counts) or 1 for part in parts.values())
    seconds = {"exporting": TIMES_COUNTING[name] * counting * methods}
    if len(calibration_images):
        times = max(len(part.token_counts) or 1 for part in parts.values())
        seconds["calibrating"] = 2 * len(calibration_images) * once[1] / times
    speeds = sum(min(2 * ROUNDS * passes, SECONDS) for passes in once.values())
    return seconds | {"comparing": 2 * len(images) / BATCH_SIZE * once[BATCH_SIZE] + speeds}


def check_options(arguments: argparse.Namespace, model: PreTrainedModel):
    """Raise a ValueError if an option does not fit the model or the other options."""
    name = type(model).__name__
    if arguments.output_rois and not has_rois(model):
        raise ValueError(f"--output-rois: {name} has no RoIs, expected a SparseFormer.")
    vision = vision_config_of(model.config)
    trees = getattr(vision, "placement", None) == "content"
    if arguments.any_size and (trees or not is_sparseformer(vision)):
        what = "trees, whose cells depend on the size" if trees else f"a {name}"
        raise ValueError(f"--any-size: this model has {what}; expected a SparseFormer with a fixed grid of tokens.")
    if arguments.page and not name.endswith("ForImageClassification"):
        raise ValueError(f"--page shows labels, which a {name} has not; expected an image classifier.")
    if arguments.float_layers and arguments.precision != "int8":
        raise ValueError(f"--float-layers is for --precision int8, not for {arguments.precision}.")
    modules_named(model, arguments.float_layers)


def choose_token_counts(model: PreTrainedModel, arguments: argparse.Namespace) -> tuple[int, ...]:
    """Numbers of tokens that the program is to take; none where it has one, with which the model then computes.

    Raises:
        ValueError: if the model has no such number, or is for no several of them.
    """
    counts = getattr(vision_config_of(model.config), "elastic_token_counts", None) or ()
    asked = arguments.num_tokens or ([ALL] if arguments.page and len(counts) > 1 else [])
    if len(asked) == 1 and ALL not in asked:
        choose_tokens(model, asked[0], None)
    if len(asked) < 2 and ALL not in asked:
        return ()
    check_elastic(image_side(model), f"--num-tokens {' '.join(map(str, asked))}")
    if others := [count for count in asked if count not in (ALL, *counts)]:
        raise ValueError(
            f"--num-tokens {others[0]}: a program for several numbers takes those that the model is made for: "
            f"{', '.join(map(str, counts))}."
        )
    return tuple(counts) if ALL in asked else tuple(sorted({*asked}))


def with_token_counts(part: Part, batches: Iterable[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Inputs of a program, with each of its numbers of tokens in turn."""
    if not part.token_counts:
        return list(batches)
    counts = map(torch.tensor, itertools.cycle(part.token_counts))
    return [inputs | {"num_tokens": count} for inputs, count in zip(batches, counts, strict=False)]


def choose_images(arguments: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Choose images to compare on and, for int8, others to calibrate with, both at random."""
    images, split = images_to_evaluate(argparse.Namespace(**vars(arguments) | {"limit": None}))
    columns = {"image_column": arguments.image_column, "name": arguments.dataset_config}
    calibrates = arguments.precision == "int8"
    if calibrates and arguments.calibration_data:
        source = load_images(arguments.calibration_data, "train", **columns)
    elif calibrates and split != "train" and "train" in split_names(arguments.dataset, arguments.dataset_config):
        source = load_images(arguments.dataset, "train", **columns)
    elif calibrates:
        # The images are split for calibration and comparison.
        parts = images.train_test_split(test_size=min(arguments.limit, len(images) // 2), seed=arguments.seed)
        source, images = parts["train"], parts["test"]
    else:
        source = images.select([])
    return (
        sample(images, arguments.limit, arguments.seed),
        sample(source, arguments.calibration_images, arguments.seed),
    )


def batches_for(
    part: Part, image_processor, tokenizer, images: datasets.Dataset, batch_size: int = BATCH_SIZE
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of a program's inputs. If it takes images of any size, every second batch has another size. Texts
    are sentences about the images' classes, or noise without classes or without a tokenizer."""
    if part.kind != "text_embeds":
        reader = Reader(image_processor, exact=True)
        for number, (pixel_values, _) in enumerate(image_batches(reader, images, batch_size, skip_corrupt=True)):
            if part.any_size and number % 2:
                size = [round(factor * side) for factor, side in zip(OTHER, pixel_values.shape[-2:], strict=True)]
                pixel_values = F.interpolate(pixel_values, size, mode="bilinear", antialias=True)
            yield {"pixel_values": pixel_values}
        return
    inputs, names = part.example(NOISE), class_names(images)
    if tokenizer is not None and names:
        texts = [SENTENCE.format(name.replace("_", " ")) for name in names]
        length = inputs["input_ids"].shape[1]
        texts = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        # Some tokenizers mask nothing.
        inputs = {"attention_mask": torch.ones_like(texts["input_ids"]), **texts}
    for start in range(0, len(inputs["input_ids"]), batch_size):
        yield {name: inputs[name][start : start + batch_size] for name in ("input_ids", "attention_mask")}


def tokenizer_of(model: PreTrainedModel, name: str):
    """The tokenizer of a CLIP, or `None` if it has none."""
    try:
        return load_tokenizer(name, model.config.text_config.vocab_size)
    except ValueError:
        return None


def count(model: PreTrainedModel, parts: dict[str, Part]) -> int:
    """Count the multiply-accumulates of one image."""
    [part] = [part for part in parts.values() if part.kind != "text_embeds"]
    vision = image_side(model)
    counted = part if part.kind == "image_features" else vision
    return macs_of(counted, pair(vision.config.image_size))


@dataclass
class Agreement:
    """How near an exported model is to the original.

    Args:
        compared (`int`): Images, or texts.
        min_cosine, mean_cosine (`float`): Over all inputs, the smallest and the mean cosine of the two models' first
            outputs; of feature maps, the last map counts.
        agreement (`float`, *optional*): Share of images, or of a segmenter pixels, with the same label.
        original_accuracy, accuracy (`float`, *optional*): Where the images have labels that the model knows.
    """

    compared: int
    min_cosine: float
    mean_cosine: float
    agreement: float | None = None
    original_accuracy: float | None = None
    accuracy: float | None = None


def _last(values: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return an output itself, or the last of several feature maps."""
    return values if isinstance(values, torch.Tensor) else values[-1]


@torch.no_grad()
def compare_outputs(
    part: Part,
    exported: ExportedModule,
    batches: Iterator[dict[str, torch.Tensor]],
    right: list[int] | None = None,
    num_tokens: int | None = None,
) -> Agreement:
    """Run the original and the program on the same inputs. `right` has the labels of all images, if they are known,
    and `num_tokens` is the number of tokens, if it can be chosen.

    Raises:
        ValueError: if an output is not finite.
    """
    cosines, same, labels = [], [], {"original_accuracy": [], "accuracy": []}
    for inputs in batches:
        expected = part(**inputs, num_tokens=num_tokens)
        name = next(iter(expected))
        computed = exported(**inputs, num_tokens=num_tokens)
        expected, computed = (_last(outputs[name]).float() for outputs in (expected, computed))
        check_scores(computed, name)
        cosines.append(F.cosine_similarity(expected.flatten(1), computed.flatten(1)))
        if name == "logits":
            both = expected.argmax(1), computed.argmax(1)
            same.append((both[0] == both[1]).float().flatten())
            for key, found in zip(labels, both if right is not None else (), strict=False):
                labels[key] += found.tolist()
    cosines = torch.cat(cosines)
    result = Agreement(len(cosines), cosines.min().item(), cosines.mean().item())
    if same:
        result.agreement = torch.cat(same).mean().item()
    # Images that cannot be read were left out.
    if right is not None and len(right) == len(cosines):
        for key, found in labels.items():
            hits = [label == answer for label, answer in zip(found, right, strict=True)]
            setattr(result, key, sum(hits) / len(hits))
    return result


def right_labels(model: PreTrainedModel, images: datasets.Dataset) -> list[int] | None:
    """Return a classifier's index of each image's label; `None` without labels, or if it does not know them."""
    if "label" not in images.features or not type(model).__name__.endswith("ForImageClassification"):
        return None
    labels = label_numbers(images)
    try:
        known = match_labels(class_names(images), model.config.id2label)
    except ValueError:
        return None
    return None if (labels < 0).any() else [known[label] for label in labels]


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
    """Return one line for each cosine or agreement that is too low."""
    least, problems = LEAST[report["precision"]], []
    limits = {
        "mean_cosine": least if min_cosine is None else min_cosine,
        "agreement": least if min_agreement is None else min_agreement,
    }
    for name, part in report["parts"].items():
        for num_tokens, measured in measured_of(part).items():
            of_name = name if num_tokens is None else f"{name} with {num_tokens} tokens"
            for measure, limit in limits.items():
                # NaN is not enough, either.
                if measured[measure] is not None and not measured[measure] >= limit:
                    problems.append(
                        f"{measure.replace('_', ' ')} {measured[measure]:.4f} of {of_name} on "
                        f"{measured['compared']} inputs, expected at least {limit}"
                    )
    return problems
