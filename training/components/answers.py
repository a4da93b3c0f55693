"""Questions to a LLaVA or a PaliGemma about images, and its answers, as tokens."""

import torch
from transformers import PaliGemmaProcessor

from ...common.conversations import NO_ANSWER, encode


class Answers:
    """Questions about the images of a batch, and the answers to them.

    Args:
        conversations (`list`): For each image, pairs of question and answer. An answer is a text, or, where a model
            gave it, a list of token ids.
        logits (`torch.Tensor`, *optional*): `(tokens of all answers, vocabulary)` float32, by which a model gave them.
        seen (`torch.Tensor`, *optional*): `(images, channels)` float32, each image's mean projected token.
    """

    def __init__(self, conversations: list, logits: torch.Tensor | None = None, seen: torch.Tensor | None = None):
        self.conversations, self.logits, self.seen = conversations, logits, seen

    def encoded(self, processor, image_tokens: int, prompt: str) -> list[tuple[list[int], list[int]]]:
        """Token ids and labels of each conversation."""
        found = []
        for turns in self.conversations:
            if isinstance(turns[-1][1], list):
                ((question, tokens),) = turns
                ids, labels = encode(processor, image_tokens, [(question, None)], prompt)
                found.append((ids + tokens, labels + tokens))
            else:
                found.append(encode(processor, image_tokens, turns, prompt))
        return found

    def inputs(self, processor, image_tokens: int, prompt: str) -> tuple[dict, torch.Tensor]:
        """Return a model's inputs besides the images, padded at the left so that all texts end together, and the
        labels, `(images, length)`, `NO_ANSWER` where nothing is asked."""
        rows = self.encoded(processor, image_tokens, prompt)
        labels = pad_left([labels for _, labels in rows], NO_ANSWER)
        inputs = text_inputs([ids for ids, _ in rows], processor)
        if "token_type_ids" in inputs:
            # From the first answer on.
            inputs["token_type_ids"] = ((labels != NO_ANSWER).cumsum(1) > 0).long()
        return inputs, labels


def text_inputs(rows: list[list[int]], processor) -> dict[str, torch.Tensor]:
    """Return `input_ids`, padded at the left, and their `attention_mask`; for a PaliGemma also the `token_type_ids` of
    questions, within which all tokens look at each other."""
    padding = processor.tokenizer.pad_token_id
    inputs = {
        "input_ids": pad_left(rows, 0 if padding is None else padding),
        "attention_mask": pad_left([[1] * len(ids) for ids in rows], 0),
    }
    if isinstance(processor, PaliGemmaProcessor):
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    return inputs


def pad_left(rows: list[list[int]], value: int) -> torch.Tensor:
    length = max(map(len, rows))
    return torch.tensor([[value] * (length - len(row)) + row for row in rows])


@torch.no_grad()
def answer(llava, processor, pixel_values: torch.Tensor, questions: list[str], prompt: str, length: int) -> Answers:
    """The likeliest answers of a LLaVA or a PaliGemma, to a question about each image.

    Args:
        llava (`LlavaForConditionalGeneration` or `PaliGemmaForConditionalGeneration`): The model that answers.
        processor (`LlavaProcessor` or `PaliGemmaProcessor`): Its own.
        pixel_values (`torch.Tensor`): `(images, 3, height, width)`.
        questions (`list[str]`): One for each image.
        prompt (`str`): The text around a question, with `{image}` and `{question}`.
        length (`int`): Most tokens of an answer.
    """
    features = llava.get_image_features(pixel_values).pooler_output
    rows = [encode(processor, len(features[0]), [(question, None)], prompt)[0] for question in questions]
    inputs = {name: value.to(pixel_values.device) for name, value in text_inputs(rows, processor).items()}
    given = llava.generate(
        **inputs,
        pixel_values=pixel_values,
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=int(processor.tokenizer.pad_token_id or 0),
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = given.sequences[:, inputs["input_ids"].shape[1] :].cpu()
    # Up to the end of a text, which is a part of the answer.
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for end in _ids(llava.generation_config.eos_token_id):
        ends |= tokens == end
    kept = ends.cumsum(1) - ends.int() == 0
    conversations = [
        [(question, row[mask].tolist())] for question, row, mask in zip(questions, tokens, kept, strict=True)
    ]
    seen = torch.stack([tokens.float().mean(0) for tokens in features]).to(pixel_values.device)
    return Answers(conversations, select(torch.stack(given.logits, dim=1), kept).float(), seen)


def select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values[mask]` of a mask on the CPU, without waiting for the device of the values."""
    return values[tuple(index.to(values.device) for index in mask.nonzero(as_tuple=True))]


def _ids(eos_token_id: int | list[int] | None) -> list[int]:
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
