"""Questions about images and answers to them: prompts as a LLaVA or a PaliGemma wants them, and LLaVA's own files of
conversations."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import datasets
from transformers import PaliGemmaProcessor

from .files import read_json, read_text
from .prompts import PALIGEMMA_PROMPT, PROMPT
from .splits import HELD_BACK_SHARE, MOST_HELD_BACK


# What stands for an image in LLaVA's files.
PLACEHOLDER = "<image>"
# The label of tokens that are no part of an answer, as in Transformers.
NO_ANSWER = -100


def default_prompt(processor) -> str:
    """The prompt of a processor's model, if no other is given."""
    return PALIGEMMA_PROMPT if isinstance(processor, PaliGemmaProcessor) else PROMPT


def is_conversations(dataset: Sequence[str]) -> bool:
    """Whether a data set is a file of conversations."""
    return len(dataset) == 1 and Path(dataset[0]).suffix.lower() in (".json", ".jsonl")


def read_conversations(
    file: str | Path, image_folder: str | Path | None = None
) -> tuple[datasets.Dataset, list[list[tuple[str, str]]]]:
    """Read conversations about an image each, in LLaVA's format: a list (or lines) of records with `image`, a path,
    and `conversations`, whose `value`s are `from` "human" and "gpt" in turns.

    Args:
        file (`str` or `Path`): JSON or JSON lines.
        image_folder (`str` or `Path`, *optional*): Folder that paths of images start from; the file's if not given.

    Returns:
        `tuple`: A `datasets.Dataset` with the column `image`, not decoded, and for each image the questions and
        answers in their order. Records without an image are left out.

    Raises:
        ValueError: if there is no such file, a record is no such conversation, or an image is not there.
    """
    file = Path(file).expanduser()
    folder = file.parent if image_folder is None else Path(image_folder).expanduser()
    try:
        if file.suffix.lower() == ".jsonl":
            records = [json.loads(line) for line in read_text(file).splitlines() if line.strip()]
        else:
            records = read_json(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot read conversations from {str(file)!r}: {error}") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{str(file)!r} holds no list of records, expected LLaVA's conversations.")
    images, conversations = [], []
    for number, record in enumerate(records):
        where = f"Record {number} of {str(file)!r}"
        if record.get("image") is None:
            continue
        if not isinstance(record["image"], str) or not (folder / record["image"]).is_file():
            raise ValueError(f"{where} has the image {record['image']!r}, which is not in {str(folder)!r}.")
        images.append(str(folder / record["image"]))
        conversations.append(_turns(record.get("conversations"), where))
    if not images:
        raise ValueError(f"{str(file)!r} has no conversation about an image.")
    table = datasets.Dataset.from_dict({"image": images}).cast_column("image", datasets.Image(decode=False))
    return table, conversations


def _turns(values, where: str) -> list[tuple[str, str]]:
    """Questions and answers of a record's `conversations`, without the place of the image."""
    roles = [value.get("from") if isinstance(value, dict) else None for value in values or []]
    if not roles or len(roles) % 2 or roles != ["human", "gpt"] * (len(roles) // 2):
        raise ValueError(f'{where} is no conversation: expected values from "human" and "gpt" in turns, got {roles}.')
    texts = [value.get("value") for value in values]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{where} says {text!r}, expected a text.")
    if sum(text.count(PLACEHOLDER) for text in texts) > 1:
        raise ValueError(f"{where} has several places for images, expected one image a conversation.")
    texts = [text.replace(PLACEHOLDER, "").strip() for text in texts]
    if not all(texts[1::2]):
        raise ValueError(f"{where} has an answer without words.")
    return list(zip(texts[::2], texts[1::2], strict=True))


def hold_back_conversations(images: datasets.Dataset, conversations: list, seed: int) -> tuple[tuple, tuple]:
    """Images and conversations to train on and, a tenth of them, to evaluate on, which the seed chooses.

    Raises:
        ValueError: if there is one only.
    """
    if len(images) < 2:
        raise ValueError("There is one conversation; expected more, some to evaluate on, or --eval-dataset.")
    count = min(max(round(HELD_BACK_SHARE * len(images)), 1), MOST_HELD_BACK)
    held_back = {*random.Random(seed).sample(range(len(images)), count)}
    parts = [[index for index in range(len(images)) if (index in held_back) == held] for held in (False, True)]
    return tuple((images.select(part), [conversations[index] for index in part]) for part in parts)


def encode(
    processor, image_tokens: int, turns: Sequence[tuple[str, str | None]], prompt: str = PROMPT
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation and its labels, the ids of its answers, which end with the end of a text.

    Args:
        processor: The processor of a LLaVA or a PaliGemma; its tokenizer is used.
        image_tokens (`int`): Number of the image's tokens, before the first question.
        turns (sequence of pairs of `str`): Questions and answers; the last answer may be None if it is still to be
            given.
        prompt (`str`, *optional*): The text around each question, with `{image}` and `{question}`.

    Returns:
        `tuple`: Two lists of `int`, equally long. Labels are `NO_ANSWER` (-100) outside of answers.
    """
    tokenizer = processor.tokenizer
    # A PaliGemma's text starts after its image, and its answers on a line of their own.
    starts_after_image = isinstance(processor, PaliGemmaProcessor)
    behind, space = (tokenizer.bos_token or "", "") if starts_after_image else ("\n", " ")
    front = [] if starts_after_image or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def tokens(text: str) -> list[int]:
        return front + tokenizer(text, add_special_tokens=False)["input_ids"]

    text, spans = "", []
    for number, (question, answer) in enumerate(turns):
        image = "" if number else f"{processor.image_token * image_tokens}{behind}"
        text += prompt.format(image=image, question=question)
        if answer is None:
            break
        asked, text = tokens(text), f"{text}{space}{answer}{tokenizer.eos_token or ''}"
        answered = tokens(text)
        # A tokenizer may put the end of the question and the start of the answer into one token.
        start = next((i for i, pair in enumerate(zip(asked, answered, strict=False)) if len({*pair}) == 2), len(asked))
        spans.append((start, len(answered)))
    ids = tokens(text)
    labels = [NO_ANSWER] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    return ids, labels
