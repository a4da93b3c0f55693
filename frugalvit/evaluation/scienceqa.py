"""Accuracy of a LLaVA on ScienceQA (Lu et al. 2022): multiple-choice questions with or without an image."""

import argparse
import re
from collections.abc import Sequence
from string import ascii_uppercase

import datasets
import torch
from tqdm import tqdm

from ..modeling.vision_tower import input_device
from ..training.data import default_split, load_table
from ..training.loading import load_model
from ..training.preprocessing import decode_image
from .images import take_first


# Prompt for ScienceQA from the evaluation of LLaVA 1.5.
PROMPT = "USER: {image}{question}\nAnswer with the option's letter from the given choices directly. ASSISTANT:"
COLUMNS = ("image", "question", "choices", "answer")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    questions, split = read_questions(arguments.dataset, arguments.split)
    questions = take_first(questions, arguments.limit)
    model, processor = load_model(
        arguments.model,
        "image-text-to-text",
        arguments.device,
        arguments.trust_remote_code,
        dtype=getattr(torch, arguments.dtype),
        device_map=arguments.device_map,
    )
    results = scienceqa_accuracy(model, processor, questions, arguments.batch_size)
    return {"model": arguments.model, "dataset": " ".join(arguments.dataset), "split": split, **results}


def read_questions(dataset: list[str], split: str | None) -> tuple[datasets.Dataset, str]:
    """Load the questions of a split without decoding images. Return the questions and the split's name."""
    split = split or default_split(dataset)
    questions = load_table(dataset, split)
    if missing := [column for column in COLUMNS if column not in questions.column_names]:
        raise ValueError(
            f"{' '.join(dataset)} has no columns {missing}, it has {questions.column_names}; expected ScienceQA's."
        )
    for index, (choices, answer) in enumerate(zip(questions["choices"], questions["answer"], strict=True)):
        if answer not in range(len(choices or ())):
            raise ValueError(f"Question {index} has the answer {answer!r}, expected the number of one of {choices!r}.")
    return questions.cast_column("image", datasets.Image(decode=False)), split


def format_question(question: str, choices: Sequence[str], hint: str | None = None) -> str:
    """Format a question as lines: the context, the question, and one line for each option with its letter."""
    options = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)]
    return "\n".join([*([f"Context: {hint}"] if hint else []), question, *options])


def read_answer(text: str, num_choices: int) -> int | None:
    """Return the index of the option that an answer names, or `None` if the answer names no option.

    An answer names an option by a letter alone, a letter before a punctuation mark, or "answer is" before a letter.
    """
    letters = ascii_uppercase[:num_choices]
    # A letter before a word names no option. For example, the "A" in "A dog" is an article.
    match = re.match(rf"\s*\(?([{letters}])\s*(?:[).:,]|$)", text, re.MULTILINE) or re.search(
        rf"answer is:?\s*\(?([{letters}])\b", text, re.IGNORECASE
    )
    return letters.index(match[1].upper()) if match else None


def scienceqa_accuracy(model, processor, questions: datasets.Dataset, batch_size: int = 8) -> dict[str, object]:
    """Measure the accuracy of a LLaVA's answers.

    Args:
        model, processor: The LLaVA and its processor.
        questions (`datasets.Dataset`): Questions from `read_questions`.
        batch_size (`int`, *optional*, defaults to 8): Questions in a batch.

    Returns:
        `dict`: `questions`, `accuracy`, `image_accuracy` (questions with an image), `text_accuracy` (questions without
        an image) and `unanswered` (number of answers that name no option). The accuracy on zero questions is `None`.
    """
    right = {True: [], False: []}
    unanswered = 0
    has_image = [image is not None for image in questions["image"]]
    # The processor needs an image for every question of a batch or for none, so batches are not mixed.
    groups = [[index for index, has in enumerate(has_image) if has == kind] for kind in (True, False)]
    batches = [group[start : start + batch_size] for group in groups for start in range(0, len(group), batch_size)]
    for indices in tqdm(batches, desc="questions", leave=False, disable=None):
        records = [questions[index] for index in indices]
        for answer, record in zip(answer_questions(model, processor, records, indices), records, strict=True):
            chosen = read_answer(answer, len(record["choices"]))
            unanswered += chosen is None
            right[record["image"] is not None].append(chosen == record["answer"])
    every = right[True] + right[False]
    return {
        "questions": len(every),
        "accuracy": sum(every) / len(every),
        "image_accuracy": sum(right[True]) / len(right[True]) if right[True] else None,
        "text_accuracy": sum(right[False]) / len(right[False]) if right[False] else None,
        "unanswered": unanswered,
    }


@torch.inference_mode()
def answer_questions(model, processor, records: Sequence[dict], indices: Sequence[int]) -> list[str]:
    """Generate answers to a batch of questions. Either all questions have an image, or none has one. Error messages
    name a question by its number in `indices`."""
    images = None
    token = ""
    if records[0]["image"] is not None:
        images = [decode_image(record["image"], index) for record, index in zip(records, indices, strict=True)]
        token = f"{processor.image_token}\n"
    questions = [format_question(record["question"], record["choices"], record.get("hint")) for record in records]
    texts = [PROMPT.format(image=token, question=question) for question in questions]
    # With padding at the left, all answers begin at the same position.
    inputs = processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
    generated = model.generate(**inputs.to(input_device(model)), max_new_tokens=8, do_sample=False)
    return processor.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
