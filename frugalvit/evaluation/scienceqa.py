"""ScienceQA (Lu et al. 2022): multiple-choice questions, some about an image, for a LLaVA."""

import argparse
import re
from collections.abc import Sequence
from string import ascii_uppercase

import datasets
import torch
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from ..common.data import load_table
from ..common.decoding import decode_image
from ..common.loading import load_pretrained, split_revision
from ..common.prompts import SCIENCEQA_PROMPT, check_prompt
from ..common.splits import default_split
from ..modeling.swap import input_device
from .images import take_first


COLUMNS = ("image", "question", "choices", "answer")
# Tokens of an answer.
MAX_NEW_TOKENS = 8


def run(arguments: argparse.Namespace) -> dict[str, object]:
    check_prompt(arguments.prompt)
    questions, split = read_questions(arguments.dataset, arguments.split)
    questions = take_first(questions, arguments.limit)
    model = load_pretrained(
        arguments.model,
        arguments.device,
        arguments.trust_remote_code,
        "a LLaVA",
        lambda config: AutoModelForImageTextToText,
        dtype=getattr(torch, arguments.dtype),
        quantize=arguments.quantize,
        device_map=arguments.device_map,
    )
    name, revision = split_revision(arguments.model)
    processor = AutoProcessor.from_pretrained(name, trust_remote_code=arguments.trust_remote_code, **revision)
    results = scienceqa_accuracy(model, processor, questions, arguments.prompt, arguments.batch_size)
    return {"model": arguments.model, "dataset": " ".join(arguments.dataset), "split": split, **results}


def read_questions(dataset: list[str], split: str | None) -> tuple[datasets.Dataset, str]:
    """Load the questions, with images that are not decoded, and their split."""
    split = split or default_split(dataset)
    questions = load_table(dataset, split)
    if missing := [column for column in COLUMNS if column not in questions.column_names]:
        raise ValueError(
            f"{' '.join(dataset)} has no columns {missing}, it has {questions.column_names}; expected ScienceQA's."
        )
    questions = questions.cast_column("image", datasets.Image(decode=False))
    for index, (choices, answer) in enumerate(zip(questions["choices"], questions["answer"], strict=True)):
        if answer not in range(len(choices or ())):
            raise ValueError(f"Question {index} has the answer {answer!r}, expected the number of one of {choices!r}.")
    return questions, split


def format_question(question: str, choices: Sequence[str], hint: str | None = None) -> str:
    """Write a question, its context and its lettered options, in lines."""
    options = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase[: len(choices)], choices, strict=True)]
    return "\n".join([*([f"Context: {hint}"] if hint else []), question, *options])


def read_answer(text: str, num_choices: int) -> int | None:
    """Return the number of the option that a text names, or None: its letter alone or before a mark, or "the answer
    is" and a letter."""
    letters = ascii_uppercase[:num_choices]
    # "A dog" names no option.
    match = re.match(rf"\s*\(?([{letters}])\s*(?:[).:,]|$)", text, re.MULTILINE) or re.search(
        rf"answer is:?\s*\(?([{letters}])\b", text, re.IGNORECASE
    )
    return letters.index(match[1].upper()) if match else None


@torch.inference_mode()
def scienceqa_accuracy(
    model, processor, questions: datasets.Dataset, prompt: str = SCIENCEQA_PROMPT, batch_size: int = 8
) -> dict[str, object]:
    """Let a LLaVA answer the questions of `read_questions`.

    Returns:
        `dict`: `questions`, `accuracy`, `image_accuracy` and `text_accuracy` (of questions with and without an image,
        `None` if there are none) and `unanswered`, the answers that name no option.
    """
    right, unanswered = {True: [], False: []}, 0
    has_image = [image is not None for image in questions["image"]]
    with tqdm(total=len(questions), desc="questions", leave=False, disable=None) as progress:
        # A batch has images for all or for none.
        for kind in (True, False):
            members = [index for index, has in enumerate(has_image) if has == kind]
            for start in range(0, len(members), batch_size):
                indices = members[start : start + batch_size]
                records = [questions[index] for index in indices]
                images = [decode_image(questions[index]["image"], index) for index in indices] if kind else None
                texts = [
                    prompt.format(
                        image=f"{processor.image_token}\n" if kind else "",
                        question=format_question(record["question"], record["choices"], record.get("hint")),
                    )
                    for record in records
                ]
                # Answers follow the prompts, so these end together.
                inputs = processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
                inputs = inputs.to(input_device(model))
                generated = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
                generated = generated[:, inputs["input_ids"].shape[1] :]
                answers = processor.batch_decode(generated, skip_special_tokens=True)
                for answer, record in zip(answers, records, strict=True):
                    chosen = read_answer(answer, len(record["choices"]))
                    unanswered += chosen is None
                    right[kind].append(chosen == record["answer"])
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
