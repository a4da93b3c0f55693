"""`frugalvit calibrate`: how sure a model must be with few tokens, so that more would seldom say something else."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import datasets
import torch
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from .budget import copy_with_configuration, source_folder
from .common.classes import match_labels
from .common.comparison import using_tokens
from .common.data import load_images, split_names
from .common.files import whole_folder
from .common.loading import load_image_classifier
from .common.macs import count_macs
from .common.metrics import check_scores
from .common.reading import Reader, share_read
from .common.risk import choose_confidence, most_wrong, stop_when_sure
from .common.splits import evaluation_splits
from .compare import sample
from .evaluation.images import image_batches
from .options.calibrate import parse
from .resources import locate_model
from .tokens import check_elastic


# What a card says begins so.
MARK = "**Calibrated.**"


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    name = locate_model(arguments.model)
    loading = {"device": arguments.device, "trust_remote_code": arguments.trust_remote_code}
    model, image_processor = load_image_classifier(name, **loading)
    check_elastic(model, "frugalvit calibrate")
    # An earlier one says nothing about this one.
    model.config.calibration = None
    counts = [model.check_num_tokens(count) for count in arguments.token_counts or model.config.adaptive_token_counts]
    if counts[-1] != model.config.default_num_tokens:
        raise ValueError(
            f"--token-counts ends with {counts[-1]}, expected {model.config.default_num_tokens}, with which the model "
            "computes where a call chooses nothing (`set_num_tokens`)."
        )
    images = images_without_labels(arguments)
    if most_wrong(len(images), arguments.disagreement, arguments.certainty) < 0:
        raise ValueError(
            f"{len(images):,} images are too few for a disagreement of {arguments.disagreement:g} with a certainty of "
            f"{arguments.certainty:g}; give more, or ask for less."
        )
    output = whole_folder(arguments.output, arguments.overwrite) if arguments.output else nullcontext()
    with output as folder:
        reading = {name: getattr(arguments, name) for name in ("batch_size", "num_workers", "skip_corrupt")}
        reader = Reader(image_processor, share_read(model, counts[-1]), arguments.exact)
        logits = look(model, reader, images, counts, **reading)
        reference, labels = f"{counts[-1]} tokens", logits[counts[-1]].argmax(-1)
        if arguments.teacher:
            teacher, teacher_processor = load_image_classifier(arguments.teacher, **loading)
            reader = Reader(teacher_processor, share_read(teacher), arguments.exact)
            reference, labels = "its teacher", teacher_labels(teacher, model, reader, images, **reading)
        found = calibrate(model, logits, labels, arguments.disagreement, arguments.certainty, reference)
        calibration = found["calibration"]
        if folder:
            model.config.calibration = calibration
            copy_with_configuration(model, source_folder(name), folder)
            write_into_card(folder / "README.md", describe(found))
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(describe(found).replace(f"{MARK} ", "").replace("`", ""))
    print(f"Wrote {arguments.output}." if arguments.output else "Nothing was written; --output FOLDER keeps it.")


def images_without_labels(arguments) -> datasets.Dataset:
    """Images that the arguments name, so many of them at random."""
    splits = [arguments.split] if arguments.split else evaluation_splits(split_names(arguments.dataset)) or ["train"]
    options = {"name": arguments.dataset_config, "image_column": arguments.image_column}
    images = load_images(arguments.dataset, splits[0], **options).select_columns(["image"])
    return sample(images, arguments.images, arguments.seed)


@torch.inference_mode()
def look(
    model: PreTrainedModel, reader: Reader, images: datasets.Dataset, counts: list[int], **reading
) -> dict[int, torch.Tensor]:
    """Logits of images with each number of tokens, `(images, labels)` float32 on the CPU.

    Args:
        model (`SparseFormerForImageClassification`): The classifier.
        reader (`Reader`): What turns `PIL.Image` into pixel values.
        images (`datasets.Dataset`): What `load_images` returns.
        counts (list of `int`): Numbers of tokens.
        reading: `batch_size` and others of `image_batches`.
    """
    found = {count: [] for count in counts}
    for pixel_values, _ in image_batches(reader, images, **reading):
        for count, several in found.items():
            several.append(model(pixel_values.to(model.device), num_tokens=count).logits.float().cpu())
            check_scores(several[-1])
    return {count: torch.cat(several) for count, several in found.items()}


@torch.inference_mode()
def teacher_labels(
    teacher: PreTrainedModel, model: PreTrainedModel, reader: Reader, images: datasets.Dataset, **reading
) -> torch.Tensor:
    """What a teacher says of images, as labels of its student, `(images,)`.

    Raises:
        ValueError: if they have not the same classes.
    """
    names = [teacher.config.id2label[index] for index in range(len(teacher.config.id2label))]
    try:
        labels_of = torch.tensor(match_labels(names, model.config.id2label))
    except ValueError as error:
        raise ValueError(f"--teacher: {error}") from error
    found = []
    for pixel_values, _ in image_batches(reader, images, **reading):
        found.append(teacher(pixel_values.to(teacher.device)).logits.argmax(-1).cpu())
    return labels_of[torch.cat(found)]


def calibrate(
    model: PreTrainedModel,
    logits: dict[int, torch.Tensor],
    labels: torch.Tensor,
    disagreement: float,
    certainty: float,
    reference: str,
) -> dict[str, object]:
    """The confidence that few tokens need, and what that saves on the images it was found on.

    Args:
        model (`SparseFormerForImageClassification`): The classifier.
        logits (mapping of `int` to `torch.Tensor`): What `look` returns.
        labels (`torch.Tensor`): `(images,)`, those that count.
        disagreement, certainty (`float`): See `choose_confidence`.
        reference (`str`): Whose labels these are.

    Returns:
        `dict`: `calibration`, for the configuration; `shares`, of images by their last look; `macs` of an image on
        average, and `saved`, how many times as many the last look alone needs.

    Raises:
        ValueError: if there is no such confidence.
    """
    confidence = choose_confidence(logits, labels, disagreement, certainty)
    if confidence is None:
        share = (stop_when_sure(logits, 1.0)[0] != labels).double().mean().item()
        raise ValueError(
            f"With all tokens, {share:.1%} of the images get another label than from {reference}; no confidence "
            f"promises at most {disagreement:.1%}. Ask for a larger --disagreement."
        )
    costs = {}
    for count in logits:
        with using_tokens(model, count):
            costs[count] = count_macs(model, model.config.image_size).macs_with_attention
    _, looks = stop_when_sure(logits, confidence)
    shares = {count: (looks == number).double().mean().item() for number, count in enumerate(logits, 1)}
    macs = sum(cost * (looks >= number).double().mean().item() for number, cost in enumerate(costs.values(), 1))
    last = list(logits)[-1]
    if macs >= costs[last]:
        raise ValueError(
            f"Only {shares[list(logits)[0]]:.0%} of the images are as sure as that takes, {confidence:.3f}: all looks "
            f"together would cost {macs / costs[last]:.2f} times as much as {last} tokens alone. Ask for a larger "
            "--disagreement, or for other --token-counts."
        )
    calibration = {
        "token_counts": list(logits),
        "confidence": confidence,
        "disagreement": disagreement,
        "certainty": certainty,
        "images": len(labels),
        "reference": reference,
    }
    return {"calibration": calibration, "shares": shares, "macs": macs, "saved": costs[last] / macs}


def describe(found: dict[str, object]) -> str:
    """What was found, as a paragraph of a card."""
    calibration = found["calibration"]
    first, *others = calibration["token_counts"]
    return (
        f"{MARK} `classify_adaptively()` looks with {first} tokens first, and with "
        f"{', then '.join(map(str, others))} where the likeliest class has less than {calibration['confidence']:.3f}. "
        f"At most {calibration['disagreement']:.1%} of images get another label than from {calibration['reference']}, "
        f"with a certainty of {calibration['certainty']:.0%}, if they are of the kind of those that this was found "
        f"on, {calibration['images']:,} without labels; of others, nothing is promised. {found['shares'][first]:.0%} "
        f"of these needed {first} tokens alone, {found['macs'] / 1e9:.3g} G multiply-accumulates on average, "
        f"{found['saved']:.2f} times fewer than with {others[-1]} tokens."
    )


def write_into_card(file: Path, paragraph: str):
    """Put a paragraph at the end of a card, in the place of an earlier one."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    text = re.sub(rf"\n*^{re.escape(MARK)}.*?(?=\n\n|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    ModelCard(f"{text.rstrip()}\n\n{paragraph}\n".lstrip()).save(file)
