"""LLaVAs and PaliGemmas in training: conversations as tokens, and a LLaVA of which a part learns."""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import datasets
import torch
from torch import nn
from transformers import PaliGemmaProcessor, PreTrainedModel


# Prompts of LLaVA 1.5 and of PaliGemma.
PROMPT = "USER: {image}{question} ASSISTANT:"
PALIGEMMA_PROMPT = "{image}{question}\n"
# The place of an image in LLaVA's files.
PLACEHOLDER = "<image>"
# The label of tokens outside of answers, as in Transformers.
NO_ANSWER = -100


def read_conversations(file: str | Path, image_folder: str | Path | None = None) -> datasets.Dataset:
    """Read conversations about an image each, in LLaVA's format: a JSON list of records with `image`, a path, and
    `conversations`, whose `value`s are `from` "human" and "gpt" in turns. Records without an image are left out.

    Args:
        file (`str` or `Path`): JSON file.
        image_folder (`str` or `Path`, *optional*): Folder that paths of images start from; by default the file's.

    Returns:
        `datasets.Dataset`: With the columns `image`, not decoded, and `turns`, pairs of question and answer.

    Raises:
        ValueError: if there is no such file, or a record is no such conversation.
    """
    file = Path(file).expanduser()
    folder = Path(image_folder or file.parent).expanduser()
    columns = {"image": [], "turns": []}
    try:
        for record in json.loads(file.read_text(encoding="utf-8")):
            if record.get("image") is not None:
                columns["image"].append(str(folder / record["image"]))
                columns["turns"].append(read_turns(record["conversations"]))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"Cannot read LLaVA's conversations from {str(file)!r}: {error!r}") from error
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image(decode=False))


def read_turns(conversation: list[dict]) -> list[list[str]]:
    """Return pairs of question and answer, without the place of the image."""
    texts = [each["value"].replace(PLACEHOLDER, "").strip() for each in conversation]
    speakers = [each["from"] for each in conversation]
    if not texts or speakers != ["human", "gpt"] * (len(texts) // 2) or not all(texts[1::2]):
        raise ValueError(f'{conversation}, expected texts from "human" and "gpt" in turns, and no empty answer')
    return [texts[start : start + 2] for start in range(0, len(texts), 2)]


def encode(processor, image_tokens: int, turns: Sequence, prompt: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation and its labels, the ids of its answers, which end with the end of a text.

    Args:
        processor: The processor of a LLaVA or a PaliGemma; its tokenizer is used.
        image_tokens (`int`): Number of the image's tokens, before the first question.
        turns (sequence of pairs of `str`): Questions and answers; None for an answer that is still to be given.
        prompt (`str`): The text around each question, with `{image}` and `{question}`.

    Returns:
        `tuple`: Two lists of `int`, equally long. Labels are `NO_ANSWER` outside of answers.
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


def pad(rows: Sequence[tuple[list[int], list[int]]], processor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a model's inputs besides the images, and their labels, `(images, length)`, of token ids and labels of
    each text. Padding is at the left, so that all texts end together."""
    length = max(len(ids) for ids, _ in rows)

    def stack(lists, value: int) -> torch.Tensor:
        return torch.tensor([[value] * (length - len(each)) + each for each in lists])

    labels = stack([labels for _, labels in rows], NO_ANSWER)
    inputs = {
        "input_ids": stack([ids for ids, _ in rows], processor.tokenizer.pad_token_id or 0),
        "attention_mask": stack([[1] * len(ids) for ids, _ in rows], 0),
    }
    if isinstance(processor, PaliGemmaProcessor):
        # 0 up to the first answer: these tokens attend to each other.
        inputs["token_type_ids"] = ((labels != NO_ANSWER).cumsum(1) > 0).long()
    return inputs, labels


class Answers(NamedTuple):
    """A model's answers to a question about each image of a batch."""

    # Token ids of each.
    tokens: list[list[int]]
    # (tokens of all answers, vocabulary), float32.
    logits: torch.Tensor
    # Each image's mean projected token, (images, channels), float32.
    seen: torch.Tensor


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
    inputs, _ = pad([encode(processor, len(features[0]), [(each, None)], prompt) for each in questions], processor)
    given = llava.generate(
        **{name: value.to(pixel_values.device) for name, value in inputs.items()},
        pixel_values=pixel_values,
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=int(processor.tokenizer.pad_token_id or 0),
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = given.sequences[:, inputs["input_ids"].shape[1] :].cpu()
    # Up to the end of a text, which is a part of the answer.
    end = llava.generation_config.eos_token_id
    ends = torch.isin(tokens, torch.tensor([end] if isinstance(end, int) else end or [], dtype=tokens.dtype))
    kept = ends.cumsum(1) - ends.int() == 0
    seen = torch.stack([each.float().mean(0) for each in features]).to(pixel_values.device)
    answers = [row[mask].tolist() for row, mask in zip(tokens, kept, strict=True)]
    return Answers(answers, select(torch.stack(given.logits, dim=1), kept).float(), seen)


def select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values[mask]` of a mask on the CPU, without waiting for the device of the values."""
    return values[tuple(index.to(values.device) for index in mask.nonzero(as_tuple=True))]


class Learner(nn.Module):
    """A LLaVA whose projector learns, as a copy in float32. Its state has the parameters that learn and no others.

    Args:
        llava (`SparseFormerLlavaForConditionalGeneration` or `SparseFormerPaliGemmaForConditionalGeneration`):
            May share its language model with another one.
    """

    def __init__(self, llava: PreTrainedModel):
        super().__init__()
        self.dtype = llava.dtype
        llava.requires_grad_(False)
        llava.model.multi_modal_projector = copy.deepcopy(llava.model.multi_modal_projector).float().requires_grad_()
        self.llava = llava
        self.register_state_dict_post_hook(_drop_frozen)
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def train(self, mode: bool = True):
        """Stay in evaluation mode: no layer behaves otherwise in training."""
        return super().train(False)

    def forward(self, **inputs):
        return self.llava(**inputs)

    def add_lora(self, rank: int):
        """Let the language model learn, too, by matrices of a low rank that are added to its own.

        Raises:
            ValueError: if peft is not installed.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError:
            raise ValueError("lora_rank is peft's: pip install 'frugalvit[finetune]'.") from None
        language_model = self.llava.model.language_model
        linear = {name for name, module in language_model.named_modules() if isinstance(module, nn.Linear)}
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear), language_model)
        for parameter in language_model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    @property
    def lora_layers(self) -> dict[str, nn.Module]:
        """The language model's layers that have LoRA, by their names in it."""
        modules = self.llava.model.language_model.named_modules()
        return {name: module for name, module in modules if hasattr(module, "lora_A")}

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Within it, the language model computes without its LoRA."""
        layers = self.lora_layers.values()
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def merged_state(self, language_model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """The LLaVA's weights by name, in the precision that it had, with LoRA added to them.

        Args:
            language_model (`nn.Module`, *optional*): The language model as it was, if this one's is quantized.
        """
        where, state, layers = "model.language_model", {}, self.lora_layers
        for name, value in self.llava.state_dict().items():
            if not name.startswith(f"{where}."):
                state[name] = value.to(self.dtype) if "multi_modal_projector." in name else value
        for name, value in (language_model or self.llava.model.language_model).state_dict().items():
            owner, _, rest = name.replace(".base_layer.", ".").rpartition(".")
            if owner in layers and rest == "weight":
                value = (value.float() + layers[owner].get_delta_weight("default").to(value.device)).to(value.dtype)
            if ".lora_" not in name:
                state[f"{where}.{owner}.{rest}"] = value
        return state


def _drop_frozen(learner: Learner, state: dict, prefix: str, metadata):
    # A head that is its model's embeddings has two names.
    named = learner.named_parameters(remove_duplicate=False)
    for name in state.keys() - {f"{prefix}{name}" for name, each in named if each.requires_grad}:
        del state[name]
