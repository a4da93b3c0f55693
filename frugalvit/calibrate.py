"""`frugalvit calibrate`: the confidence that few tokens need, so that more would seldom give another label; or the
fewest tokens that embed images nearly as the most do."""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from torch import nn
from transformers import PreTrainedModel

from .common.classes import match_labels
from .common.data import load_images, sample, split_names
from .common.files import whole_folder
from .common.loading import load_image_classifier, load_vision_model
from .common.macs import macs_of
from .common.num_tokens import WithTokens, using_tokens
from .common.packing import pack_linear_layers
from .common.reading import Reader, share_read
from .common.risk import choose_confidence, last_safe, most_wrong, stop_when_sure
from .common.scores import check_scores
from .common.splits import evaluation_splits
from .common.views import size_made_by
from .evaluation.embeddings import image_embedder, image_maker
from .evaluation.images import image_batches
from .model_folders import copy_with_configuration, source_folder
from .options.calibrate import parse
from .tokens import check_elastic


# What a card says begins so.
MARK = "**Calibrated.**"


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    asked = arguments.disagreement, arguments.certainty
    promise = LabelPromise(*asked) if arguments.cosine is None else CosinePromise(*asked, arguments.cosine)
    loading = {"device": arguments.device, "trust_remote_code": arguments.trust_remote_code}
    model, image_processor = promise.load(arguments.model, **loading)
    check_elastic(model, "frugalvit calibrate")
    # An earlier one says nothing about this one.
    model.config.calibration = None
    counts = [model.check_num_tokens(count) for count in arguments.token_counts or promise.counts_of(model.config)]
    if counts[-1] != model.config.default_num_tokens:
        raise ValueError(
            f"--token-counts ends with {counts[-1]}, expected {model.config.default_num_tokens}, with which the model "
            "computes where a call chooses nothing (`set_num_tokens`)."
        )
    images = images_without_labels(arguments)
    if most_wrong(len(images), *asked) < 0:
        raise ValueError(
            f"{len(images):,} images are too few for a disagreement of {arguments.disagreement:g} with a certainty of "
            f"{arguments.certainty:g}; give more, or ask for less."
        )
    reading = {name: getattr(arguments, name) for name in ("batch_size", "num_workers", "skip_corrupt")}

    def ask(model, image_processor, counts: list[int | None]) -> dict[int | None, torch.Tensor]:
        reader = Reader(image_maker(image_processor), share_read(model, counts[-1]), arguments.exact)
        pack_linear_layers(model)
        return look(model, promise.answers(model, image_processor), reader, images, counts, **reading)

    output = whole_folder(arguments.output, arguments.overwrite) if arguments.output else nullcontext()
    with output as folder:
        answers = ask(model, image_processor, counts)
        reference, expected = f"{counts[-1]} tokens", promise.expected(answers[counts[-1]])
        if arguments.teacher:
            teacher, teacher_processor = promise.load(arguments.teacher, **loading)
            given = ask(teacher, teacher_processor, [None])[None]
            reference, expected = "its teacher", promise.expected_by_teacher(given, teacher, model, answers)
        found = promise.find(model, answers, expected, reference)
        if folder:
            promise.keep(model, found)
            copy_with_configuration(model, source_folder(arguments.model), folder)
            write_into_card(folder / "README.md", promise.describe(found))
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(promise.describe(found).replace(f"{MARK} ", "").replace("`", ""))
    print(f"Wrote {arguments.output}." if arguments.output else "Nothing was written; --output FOLDER keeps it.")


def images_without_labels(arguments: argparse.Namespace) -> datasets.Dataset:
    """Images that the arguments name, so many of them at random."""
    splits = [arguments.split] if arguments.split else evaluation_splits(split_names(arguments.dataset)) or ["train"]
    options = {"name": arguments.dataset_config, "image_column": arguments.image_column}
    images = load_images(arguments.dataset, splits[0], **options).select_columns(["image"])
    return sample(images, arguments.images, arguments.seed)


@torch.inference_mode()
def look(
    model: nn.Module, answer: Callable, reader: Reader, images: datasets.Dataset, counts: Sequence, **reading
) -> dict[int | None, torch.Tensor]:
    """Compute the logits or embeddings of images with each number of tokens, `(images, width)` float32 on the CPU.

    Args:
        model (`nn.Module`): The model, whose number of tokens is chosen.
        answer (`Callable`): Takes pixel values to logits or embeddings, `(batch, width)`.
        reader (`Reader`): Turns `PIL.Image` into pixel values.
        images (`datasets.Dataset`): Images, as `load_images` returns them.
        counts (sequence of `int`): Numbers of tokens; `None` for a model that has no choice.
        reading: `batch_size` and others of `image_batches`.
    """
    found, device = {count: [] for count in counts}, next(model.parameters()).device
    for pixel_values, _ in image_batches(reader, images, **reading):
        for count, several in found.items():
            with nullcontext() if count is None else using_tokens(model, count):
                several.append(answer(pixel_values.to(device)).float().cpu())
            check_scores(several[-1])
    return {count: torch.cat(several) for count, several in found.items()}


def costs_of(model: PreTrainedModel, counts: Iterable[int]) -> dict[int, int]:
    """Multiply-accumulates of an image with each number of tokens."""
    return {count: macs_of(WithTokens(model, count), model.config.image_size) for count in counts}


class Promise:
    """A promise that few tokens seldom answer otherwise.

    Args:
        disagreement, certainty (`float`): `risk` and `certainty` of `most_wrong`.
    """

    def __init__(self, disagreement: float, certainty: float):
        self.disagreement, self.certainty = disagreement, certainty

    def terms(self, images: int, reference: str) -> dict[str, object]:
        """Terms of the promise for a configuration, made from so many images and a reference in words."""
        asked = {"disagreement": self.disagreement, "certainty": self.certainty}
        return {**asked, "images": images, "reference": reference}


class LabelPromise(Promise):
    """The promise that few images get another label with few tokens, if these are sure, than with more."""

    load = staticmethod(load_image_classifier)

    def counts_of(self, config) -> list[int]:
        """Numbers of tokens with which images are looked at."""
        return config.adaptive_token_counts

    def answers(self, model: nn.Module, image_processor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function from pixel values to logits."""
        return lambda pixel_values: model(pixel_values).logits

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        """The labels that count, `(images,)` int64, given those logits."""
        return logits.argmax(-1)

    def expected_by_teacher(self, logits: torch.Tensor, teacher, model, answers) -> torch.Tensor:
        """A teacher's likeliest class of each image, as the student numbers it, `(images,)` int64.

        Raises:
            ValueError: if teacher and student have not the same classes.
        """
        names = [teacher.config.id2label[index] for index in range(len(teacher.config.id2label))]
        try:
            return torch.tensor(match_labels(names, model.config.id2label))[logits.argmax(-1)]
        except ValueError as error:
            raise ValueError(f"--teacher: {error}") from error

    def find(
        self, model: PreTrainedModel, logits: dict[int, torch.Tensor], labels: torch.Tensor, reference: str
    ) -> dict[str, object]:
        """Find the confidence that few tokens need, and the savings on the images that it is found on.

        Args:
            model (`SparseFormerForImageClassification`): The classifier.
            logits (mapping of `int` to `torch.Tensor`): The logits of `look`, by number of tokens.
            labels (`torch.Tensor`): The labels that count, `(images,)`.
            reference (`str`): Source of the labels, in words.

        Returns:
            `dict`: `calibration`, for the configuration; `shares` of images, by their last number of tokens; `macs` of
            an image on average; and `saved`, the ratio of the last look's alone to them.

        Raises:
            ValueError: if there is no such confidence.
        """
        confidence = choose_confidence(logits, labels, self.disagreement, self.certainty)
        if confidence is None:
            share = (stop_when_sure(logits, 1.0)[0] != labels).double().mean().item()
            raise ValueError(
                f"With all tokens, {share:.1%} of the images get another label than from {reference}; no confidence "
                f"promises at most {self.disagreement:.1%}. Ask for a larger --disagreement."
            )
        costs = costs_of(model, logits)
        _, looks = stop_when_sure(logits, confidence)
        shares = {count: (looks == number).double().mean().item() for number, count in enumerate(logits, 1)}
        macs = sum(cost * (looks >= number).double().mean().item() for number, cost in enumerate(costs.values(), 1))
        last = list(logits)[-1]
        if macs >= costs[last]:
            raise ValueError(
                f"Only {shares[list(logits)[0]]:.0%} of the images are as sure as that takes, {confidence:.3f}: all "
                f"looks together would cost {macs / costs[last]:.2f} times as much as {last} tokens alone. Ask for a "
                "larger --disagreement, or for other --token-counts."
            )
        terms = self.terms(len(labels), reference)
        calibration = {"token_counts": list(logits), "confidence": confidence, **terms}
        return {"calibration": calibration, "shares": shares, "macs": macs, "saved": costs[last] / macs}

    def keep(self, model: PreTrainedModel, found: dict[str, object]):
        """Note the promise in a model's configuration."""
        model.config.calibration = found["calibration"]

    def describe(self, found: dict[str, object]) -> str:
        """The promise as a paragraph of a card."""
        calibration = found["calibration"]
        first, *others = calibration["token_counts"]
        return (
            f"{MARK} `classify_adaptively()` looks with {first} tokens first, and with "
            f"{', then '.join(map(str, others))} where the likeliest class has less than "
            f"{calibration['confidence']:.3f}. At most {calibration['disagreement']:.1%} of images get another label "
            f"than from {calibration['reference']}, {certainly(calibration)}. {found['shares'][first]:.0%} of these "
            f"needed {first} tokens alone, {found['macs'] / 1e9:.3g} G multiply-accumulates on average, "
            f"{found['saved']:.2f} times fewer than with {others[-1]} tokens."
        )


class CosinePromise(Promise):
    """The promise that few images have an embedding with few tokens that is far from the one with the most.

    All images get as many tokens. Looking again with more at some images would cost more than it saves.

    Args:
        disagreement, certainty (`float`): As of `Promise`.
        cosine (`float`): Cosine of two embeddings from which on they agree.
    """

    load = staticmethod(load_vision_model)

    def __init__(self, disagreement: float, certainty: float, cosine: float):
        super().__init__(disagreement, certainty)
        self.cosine = cosine

    def counts_of(self, config) -> list[int]:
        """Numbers of tokens to choose from."""
        return [count for count in config.trained_token_counts if count <= config.default_num_tokens]

    def answers(self, model: nn.Module, image_processor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function from pixel values to embeddings."""
        return image_embedder(model, size_made_by(image_processor))

    def expected(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The embeddings that count, `(images, width)`, given these."""
        return embeddings

    def expected_by_teacher(self, embeddings: torch.Tensor, teacher, model, answers) -> torch.Tensor:
        """A teacher's embeddings, `(images, width)`.

        Raises:
            ValueError: if they have another width than the student's.
        """
        width = next(iter(answers.values())).shape[1]
        if embeddings.shape[1] != width:
            raise ValueError(f"--teacher: its embeddings have {embeddings.shape[1]} numbers, the model's {width}.")
        return embeddings

    def find(
        self, model: PreTrainedModel, embeddings: dict[int, torch.Tensor], expected: torch.Tensor, reference: str
    ) -> dict[str, object]:
        """Find the fewest tokens that are enough, and the savings.

        Args:
            model (`PreTrainedModel`): A SparseFormer.
            embeddings (mapping of `int` to `torch.Tensor`): The embeddings of `look`, by number of tokens.
            expected (`torch.Tensor`): The embeddings that count, `(images, width)`.
            reference (`str`): Source of these embeddings, in words.

        Returns:
            `dict`: `num_tokens`; `calibration`, the promise; `cosines`, the mean for each number of tokens; `macs` of
            an image; and `saved`, the ratio of those of the most tokens to them.

        Raises:
            ValueError: if not even the most are enough.
        """
        # The safest first.
        counts = [*embeddings][::-1]
        cosines = {count: F.cosine_similarity(embeddings[count], expected) for count in counts}
        wrong = torch.stack([each < self.cosine for each in cosines.values()])
        last = last_safe(wrong, self.disagreement, self.certainty)
        if last is None:
            raise ValueError(
                f"With all tokens, the embeddings of {wrong[0].double().mean():.1%} of the images have a cosine below "
                f"{self.cosine:g} with those of {reference}; that many exceed --disagreement {self.disagreement:g}. "
                "Ask for a smaller --cosine or a larger --disagreement."
            )
        costs, chosen = costs_of(model, counts), counts[last]
        calibration = {"cosine": self.cosine, **self.terms(len(expected), reference)}
        means = {count: each.double().mean().item() for count, each in cosines.items()}
        found = {"num_tokens": chosen, "calibration": calibration, "cosines": means, "macs": costs[chosen]}
        return found | {"saved": costs[counts[0]] / costs[chosen]}

    def keep(self, model: PreTrainedModel, found: dict[str, object]):
        """Let a model compute with so many tokens."""
        model.set_num_tokens(found["num_tokens"])

    def describe(self, found: dict[str, object]) -> str:
        """The promise as a paragraph of a card."""
        calibration, count = found["calibration"], found["num_tokens"]
        return (
            f"{MARK} With {count} tokens, with which it computes by default, at most "
            f"{calibration['disagreement']:.1%} of images have an embedding whose cosine with that of "
            f"{calibration['reference']} is below {calibration['cosine']:g}, {certainly(calibration)}. Their mean "
            f"cosine was {found['cosines'][count]:.3f}, at {found['macs'] / 1e9:.3g} G multiply-accumulates, "
            f"{found['saved']:.2f} times fewer than with {max(found['cosines'])} tokens."
        )


def certainly(calibration: dict[str, object]) -> str:
    """The certainty of a promise, and the images that it is about, in words."""
    return (
        f"with a certainty of {calibration['certainty']:.0%}, if they are of the kind of those that this was found "
        f"on, {calibration['images']:,} without labels; of others, nothing is promised"
    )


def write_into_card(file: Path, paragraph: str):
    """Put a paragraph at the end of a card, in the place of an earlier one."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    text = re.sub(rf"\n*^{re.escape(MARK)}.*?(?=\n\n|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    ModelCard(f"{text.rstrip()}\n\n{paragraph}\n".lstrip()).save(file)
