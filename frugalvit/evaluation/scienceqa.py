"""ScienceQA (Lu et al. 2022): multiple-choice questions, some about an image, for a LLaVA."""

import argparse
import re
from collections.abc import Sequence

import datasets
import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from ..common.data import check_image_column, load_table
from ..common.decoding import decode_image
from ..common.loading import load_pretrained, split_revision
from ..common.prompts import SCIENCEQA_PROMPT, check_prompt
from ..common.splits import default_split
from ..modeling.swap import input_device
from .images import take_first


LETTERS = "ABCDEFGH"
COLUMNS = ("image", "question", "choices", "answer")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    questions, split = read_questions(arguments.dataset, arguments.split)
    questions = take_first(questions, arguments.limit)
    check_prompt(arguments.prompt)
    model = load_pretrained(
        *(arguments.model, arguments.device, arguments.trust_remote_code, "a LLaVA"),
        lambda _: AutoModelForImageTextToText,
        dtype=getattr(torch, arguments.dtype),
        quantize=arguments.quantize,
        device_map=arguments.device_map,
    )
    name, revision = split_revision(arguments.model)
    processor = AutoProcessor.from_pretrained(name, trust_remote_code=arguments.trust_remote_code, **revision)
    results = scienceqa_accuracy(
        model, processor, questions, arguments.prompt, arguments.batch_size, arguments.max_new_tokens
    )
    return {"model": arguments.model, "dataset": " ".join(arguments.dataset), "split": split, **results}


def read_questions(dataset: list[str], split: str | None) -> tuple[datasets.Dataset, str]:
    """Load the questions, with images that are not decoded, and their split.

    Raises:
        ValueError: if there is no such data set, or it lacks a column.
    """
    split = split or default_split(dataset)
    questions = load_table(dataset, split)
    if missing := [column for column in COLUMNS if column not in questions.column_names]:
        raise ValueError(
            f"{' '.join(dataset)} has no columns {missing}, it has {questions.column_names}; expected ScienceQA's."
        )
    # Where no question has an image, the column has no type.
    if questions.features["image"] != datasets.Value("null"):
        check_image_column(questions.features, "image", " ".join(dataset))
    questions = questions.cast_column("image", datasets.Image(decode=False))
    for index, record in enumerate(questions.select_columns(["question", "choices", "answer"])):
        check_question(index, **record)
    return questions, split


def check_question(index: int, question: str, choices: list[str], answer: int):
    """Raise a ValueError if a question is no text with some texts to choose from, one of which is right."""
    if not isinstance(question, str):
        raise ValueError(f"Question {index} is {question!r}, expected a text.")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"Question {index} has the choices {choices!r}, expected a list of texts.")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(
            f"Question {index} has the answer {answer!r}, expected a number from 0 to {len(choices) - 1}."
        )


def format_question(question: str, choices: Sequence[str], hint: str | None = None) -> str:
    """A question, its context and its lettered options, in lines."""
    if len(choices) > len(LETTERS):
        raise ValueError(f"The question {question!r} has {len(choices)} options, expected at most {len(LETTERS)}.")
    options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([*([f"Context: {hint}"] if hint else []), question, *options])


def read_answer(text: str, num_choices: int) -> int | None:
    """The number of the option that a text names, None for none: its letter alone or before a mark, or "the answer is"
    and a letter."""
    letters = LETTERS[:num_choices]
    # "A dog" names no option.
    match = re.match(rf"\s*\(?([{letters}])\s*(?:[).:,]|$)", text, re.MULTILINE) or re.search(
        rf"answer is:?\s*\(?([{letters}])\b", text, re.IGNORECASE
    )
    return letters.index(match[1].upper()) if match else None


@torch.inference_mode()
def scienceqa_accuracy(
    model,
    processor,
    questions: datasets.Dataset,
    prompt: str = SCIENCEQA_PROMPT,
    batch_size: int = 8,
    max_new_tokens: int = 8,
) -> dict[str, object]:
    """Let a LLaVA answer questions, with a progress bar.

    Args:
        model (`PreTrainedModel`): Generates text from text and images.
        processor: Its processor.
        questions (`datasets.Dataset`): Questions, as `read_questions` returns them.
        prompt (`str`, *optional*): The text around a question, with `{image}` and `{question}`.
        batch_size (`int`, *optional*, defaults to 8): Questions at a time.
        max_new_tokens (`int`, *optional*, defaults to 8): Tokens of an answer.

    Returns:
        `dict`: `questions`, `accuracy`, `image_accuracy` and `text_accuracy` (of questions with and without an image,
        `None` if there are none) and `unanswered`, the answers that name no option.
    """
    right = {True: [], False: []}
    unanswered = 0
    has = [image is not None for image in questions["image"]]
    with tqdm(total=len(questions), desc="questions", leave=False, disable=None) as progress:
        # A batch has images for all or for none.
        for has_image in (True, False):
            members = [index for index in range(len(questions)) if has[index] == has_image]
            for start in range(0, len(members), batch_size):
                indices = members[start : start + batch_size]
                records = [questions[index] for index in indices]
                images = [decode_image(records[i]["image"], indices[i]) for i in range(len(indices)) if has_image]
                for answer, record in zip(
                    _answers(model, processor, records, images, prompt, max_new_tokens), records, strict=True
                ):
                    chosen = read_answer(answer, len(record["choices"]))
                    unanswered += chosen is None
                    right[has_image].append(chosen is not None and chosen == record["answer"])
                progress.update(len(indices))

    def share(values: list[bool]) -> float | None:
        return sum(values) / len(values) if values else None

    return {
        "questions": len(questions),
        "accuracy": share(right[True] + right[False]),
        "image_accuracy": share(right[True]),
        "text_accuracy": share(right[False]),
        "unanswered": unanswered,
    }


def _answers(model, processor, records: list[dict], images: list[Image.Image], prompt: str, length: int) -> list[str]:
    texts = [
        prompt.format(
            image=f"{processor.image_token}\n" if images else "",
            question=format_question(record["question"], record["choices"], record.get("hint")),
        )
        for record in records
    ]
    # Answers follow the prompts, so these end together.
    inputs = processor(text=texts, images=images or None, padding=True, padding_side="left", return_tensors="pt").to(
        input_device(model)
    )
    generated = model.generate(**inputs, max_new_tokens=length, do_sample=False)
    return processor.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
