"""Let a LLaVA learn to read a SparseFormer: the projector alone, without labels or with conversations.

    accelerate launch -m frugalvit.training.align_llava --model LLAVA --vision_model TOWER --dataset IMAGES \\
        --output_dir OUT

The tower takes the place of that of a LLaVA or a PaliGemma, as in `frugalvit swap`; tower and language model are
frozen. Without text, the original model is the teacher: it answers a question about each image, and the new one learns
the distribution of each token of the answer, and the mean of the projected tokens. With LLaVA's files of conversations
(`--dataset FILE.json`), it learns their answers.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PaliGemmaProcessor, PreTrainedModel

from ..common.files import read_text
from ..common.loading import load_llava, load_vision_model
from ..common.splits import load_parts, load_splits
from ..modeling.image_format import ImageFormat
from ..modeling.modeling_bootstrapped_vit import divergence
from ..modeling.modeling_sparseformer import SparseFormerPreTrainedModel
from ..modeling.swap import first_layer, matching_processor, swap_vision_tower
from .arguments import ArgumentParser, DataArguments, ImageTrainingArguments, argument, check, run_as_program
from .augmentation import CAPTION, BootstrapView, EvalView, random_seed
from .cards import without_place
from .data import as_images
from .trainer import ImageTrainer, run_command, start


PROG = "frugalvit align-llava"
# Prompts of LLaVA 1.5 and of PaliGemma.
PROMPT = "USER: {image}{question} ASSISTANT:"
PALIGEMMA_PROMPT = "{image}{question}\n"
# The label of tokens outside of answers, as in Transformers.
NO_ANSWER = -100
# Code in the model card.
USE = """

inputs = processor(images=image, text={prompt!r}, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=20)
print(processor.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


@dataclass
class LlavaArguments:
    """The LLaVA and the tower that it is to read."""

    model: str = argument(help="Folder or hub id (@revision, too) of a LLaVA in the style of 1.5 or a PaliGemma.")
    vision_model: str = argument(help="Folder or hub id of a SparseFormer that was bootstrapped, best from its tower.")


@dataclass
class QuestionDataArguments(DataArguments):
    """Images to ask about, or LLaVA's conversations, to train and evaluate on, by their names."""

    image_folder: str | None = argument(None, "Folder of the images of conversations. Default: that of the file.")


@dataclass
class AlignLlavaArguments(ImageTrainingArguments):
    """Questions about the images, and what learns. With `bf16` or `fp16`, frozen weights have that precision, too."""

    metric_for_best_model: str = argument("agreement", "Metric that chooses the best model.")
    num_train_epochs: float = argument(1.0, "Epochs.")
    per_device_train_batch_size: int = argument(32, "Images of a step on a device.")
    per_device_eval_batch_size: int = argument(32, "Images of an evaluation step on a device.")
    learning_rate: float = argument(1e-3, "Highest learning rate.")
    warmup_steps: float = argument(0.03, "Steps of warm-up, or a share of all.")
    lr_scheduler_type: str = argument("cosine", "Schedule, a name of Transformers.")
    num_tokens: int | None = argument(None, "Latent tokens of the tower. Default: its own.")
    questions: list[str] = argument(
        ["What is in the image?", "Describe the image.", "What is this?"], "Questions, one for each view of an image."
    )
    prompt: str | None = argument(None, "Text with {image} and {question}. Default: LLaVA 1.5's or PaliGemma's.")
    answer_tokens: int = argument(16, "Most tokens of an answer that the LLaVA gives.")
    feature_loss_weight: float = argument(1.0, "Weight of the distance of projected tokens' means.")

    def __post_init__(self):
        super().__post_init__()
        check(self, lambda value: not value, "0, as answers have no smoothed labels", "label_smoothing_factor")
        is_prompt = lambda text: "{image}" in text and "{question}" in text  # noqa: E731
        check(self, is_prompt, "a text with {image} and {question}", "prompt")
        check(self, lambda value: value >= 0, "0 or more", "feature_loss_weight")
        check(self, lambda value: value >= 1, "1 or more", "num_tokens", "answer_tokens")


def read_conversations(file: str | Path, image_folder: str | Path | None = None) -> datasets.Dataset:
    """Read conversations about an image each, in LLaVA's format: a JSON list of records with `image`, a path, and
    `conversations`, whose `value`s are `from` "human" and "gpt" in turns. Records without an image are left out.

    Returns a `datasets.Dataset` with the columns `image`, not decoded, and `turns`, pairs of question and answer.
    Paths of images start from `image_folder`, by default the file's.
    """
    file = Path(file).expanduser()
    folder = Path(image_folder or file.parent).expanduser()
    columns = {"image": [], "turns": []}
    try:
        for record in json.loads(read_text(file)):
            if record.get("image") is None:
                continue
            said = record["conversations"]
            texts = [each["value"].replace("<image>", "").strip() for each in said]
            speakers = [each["from"] for each in said]
            if not texts or speakers != ["human", "gpt"] * (len(texts) // 2) or not all(texts[1::2]):
                raise ValueError(f'{said}, expected texts from "human" and "gpt" in turns, and no empty answer')
            columns["image"].append(str(folder / record["image"]))
            columns["turns"].append([texts[start : start + 2] for start in range(0, len(texts), 2)])
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"Cannot read LLaVA's conversations from {str(file)!r}: {error!r}") from error
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image(decode=False))


def encode(processor, image_tokens: int, turns: Sequence, prompt: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation and its labels, which are `NO_ANSWER` outside of answers. `turns` are
    pairs of question and answer, None for one that is still to be given, `prompt` the text around a question, and
    `image_tokens` the number of the image's tokens, before the first question."""
    tokenizer = processor.tokenizer
    # A PaliGemma's text starts after its image, and its answers on a line of their own.
    starts_after_image = isinstance(processor, PaliGemmaProcessor)
    behind, space = (tokenizer.bos_token or "", "") if starts_after_image else ("\n", " ")
    front = [] if starts_after_image or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def tokens(text: str) -> list[int]:
        return front + tokenizer(text, add_special_tokens=False)["input_ids"]

    text = ""
    spans = []
    for number, (question, answer) in enumerate(turns):
        image = "" if number else f"{processor.image_token * image_tokens}{behind}"
        text += prompt.format(image=image, question=question)
        if answer is None:
            break
        asked = tokens(text)
        text = f"{text}{space}{answer}{tokenizer.eos_token or ''}"
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
    """Return a model's inputs besides the images, and the labels, `(images, length)`, of the token ids and labels of
    texts. Padding is at the left, so that all texts end together."""
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


@torch.no_grad()
def answer(llava, processor, pixel_values: torch.Tensor, questions: list[str], prompt: str, length: int) -> tuple:
    """Generate the likeliest answer of a LLaVA or a PaliGemma to a question about each image, of at most `length`
    tokens. Return the token ids of each answer, the logits of all of them, `(answer tokens, vocabulary)`, and the mean
    projected token of each image, `(images, channels)`."""
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
    seen = torch.stack([each.float().mean(0) for each in features])
    answers = [row[mask].tolist() for row, mask in zip(tokens, kept, strict=True)]
    logits = torch.stack(given.logits, dim=1)
    return answers, logits[kept.to(logits.device)].float(), seen


class Learner(nn.Module):
    """A LLaVA, which may share its language model with another one. Its projector, a copy in float32, learns; the
    state has its parameters and no others."""

    def __init__(self, llava: PreTrainedModel):
        super().__init__()
        self.llava = llava.requires_grad_(False)
        llava.model.multi_modal_projector = copy.deepcopy(llava.model.multi_modal_projector).float().requires_grad_()
        self.register_state_dict_post_hook(drop_frozen)
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def train(self, mode: bool = True):
        """Stay in evaluation mode: no layer behaves otherwise in training."""
        return super().train(False)

    def forward(self, **inputs):
        return self.llava(**inputs)


def drop_frozen(learner: Learner, state: dict, prefix: str, metadata):
    # A head that is its model's embeddings has two names.
    named = learner.named_parameters(remove_duplicate=False)
    for name in state.keys() - {f"{prefix}{name}" for name, each in named if each.requires_grad}:
        del state[name]


class AlignLlavaTrainer(ImageTrainer):
    """Transformers' `Trainer` of a LLaVA or a PaliGemma, `original`, that learns to read a SparseFormer, `tower`: its
    projector.

    `train_dataset` and `eval_dataset` are images, see `BootstrapTrainer`, about which `original` is asked, or
    conversations of `read_conversations`; `processing_class` is its processor.
    """

    def __init__(
        self,
        original: PreTrainedModel,
        tower: SparseFormerPreTrainedModel,
        args: AlignLlavaArguments,
        train_dataset,
        eval_dataset=None,
        processing_class=None,
        **kwargs,
    ):
        self.original = original.to(args.device)
        self.processor = processing_class
        self.prompt = args.prompt or (PALIGEMMA_PROMPT if isinstance(processing_class, PaliGemmaProcessor) else PROMPT)
        self.tower_name = tower.config._name_or_path
        self.llava = swap_vision_tower(original, tower, new_first_layer=True)
        if args.num_tokens is not None:
            self.llava.set_num_tokens(args.num_tokens)
        processor = matching_processor(processing_class, self.llava)
        widths = {first_layer(each.model.multi_modal_projector).in_features for each in (original, self.llava)}
        if len(widths) > 1:
            # A tower of another family than the LLaVA's own.
            tower_format = ImageFormat.from_config(tower.config)
            processor.image_processor.image_mean = tower_format.mean
            processor.image_processor.image_std = tower_format.std
        train = self.take_images(train_dataset)
        self.has_teacher = "turns" not in train.features
        student_format = ImageFormat.from_processor(processor.image_processor)
        teacher_format = ImageFormat.from_processor(processing_class.image_processor) if self.has_teacher else None
        eval_view = EvalView(student_format, teacher_format)
        super().__init__(
            Learner(self.llava),
            args,
            train,
            eval_dataset,
            # Conversations may be about what a crop leaves out.
            BootstrapView(student_format, teacher_format) if self.has_teacher else eval_view,
            eval_view,
            processing_class=processor,
            **{"base_model": original.config._name_or_path} | kwargs,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("What learns is small and the rest stays as it is: train without FSDP and DeepSpeed.")
        # A PaliGemma's processor ends the line itself.
        token = self.processor.image_token
        place = token if self.prompt.endswith("\n") else f"{token}\n"
        prompt = self.prompt.removesuffix("\n").format(image=place, question=args.questions[0])
        self.card = {"use": USE.format(prompt=prompt)}

    def take_images(self, images):
        is_table = isinstance(images, datasets.Dataset) and "turns" in images.features
        return images.cast_column("image", datasets.Image(decode=False)) if is_table else as_images(images)

    def ask(self, batch: dict, images) -> tuple:
        """Return the token ids and labels of a text about each image of a batch: a conversation in `images`, or the
        teacher's answer, with its logits and mean projected tokens."""
        args = self.args
        indices = batch["index"].tolist()

        def encoded(turns: list) -> tuple[list[int], list[int]]:
            return encode(self.processing_class, self.llava.config.image_seq_length, turns, self.prompt)

        if "turns" in images.features:
            return [encoded(images[index]["turns"]) for index in indices], None
        epochs = batch["epoch"].tolist() if "epoch" in batch else [0] * len(indices)
        seeds = [random_seed(args.seed, *key, CAPTION) for key in zip(epochs, indices, strict=True)]
        questions = [args.questions[seed % len(args.questions)] for seed in seeds]
        pixel_values = batch.get("teacher_pixel_values", batch["pixel_values"]).to(self.llava.dtype)
        with self.accelerator.autocast():
            answers, *targets = answer(
                self.original, self.processor, pixel_values, questions, self.prompt, args.answer_tokens
            )
        asked = [encoded([(question, None)]) for question in questions]
        rows = [(ids + given, labels + given) for (ids, labels), given in zip(asked, answers, strict=True)]
        return rows, targets

    def read(self, model, batch: dict, rows: list) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
        """Let the new LLaVA predict each token of the answers. Return its logits, `(answer tokens, vocabulary)`, the
        tokens themselves, how many of them are about each image, and the mean projected token of each image."""
        inputs, labels = pad(rows, self.processing_class)
        inputs = {name: value.to(self.args.device) for name, value in inputs.items()}
        # No logits of what stands before the answers, but of the last token before them.
        length = labels.shape[1] - int((labels != NO_ANSWER).any(0).nonzero()[0])
        outputs = model(pixel_values=batch["pixel_values"].to(self.llava.dtype), logits_to_keep=length + 1, **inputs)
        labels = labels[:, -length:]
        answered = labels != NO_ANSWER
        features = torch.cat(list(outputs.image_outputs.pooler_output))
        seen = features.reshape(len(labels), -1, features.shape[-1]).float().mean(1)
        said = outputs.logits[:, :-1][answered.to(outputs.logits.device)].float()
        return said, labels[answered].to(said.device), answered.sum(1).tolist(), seen

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows, targets = self.ask(inputs, self.train_dataset.images)
        said, tokens, _, seen = self.read(model, inputs, rows)
        if targets is None:
            return F.cross_entropy(said, tokens)
        logits, expected = targets
        distance = (seen - expected).square().sum(1) / expected.square().sum(1)
        return divergence(said, logits, 1.0) + self.args.feature_loss_weight * distance.mean()

    def evaluation_loop(self, dataloader, *args, **kwargs):
        self.evaluated = dataloader.dataset.images
        return super().evaluation_loop(dataloader, *args, **kwargs)

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only=False, ignore_keys=None):
        """Return, for each image, the share of the answer's tokens that the model predicts."""
        inputs = self._prepare_inputs(inputs)
        rows, _ = self.ask(inputs, self.evaluated)
        with self.accelerator.autocast():
            said, tokens, lengths, _ = self.read(model, inputs, rows)
        right = (said.argmax(-1) == tokens).float().split(lengths)
        shares = torch.stack([values.mean() for values in right])
        return None, shares, torch.zeros_like(shares)

    def measure(self, prediction) -> dict[str, float]:
        """`agreement`, the mean share of the answers' tokens that are predicted."""
        return {"agreement": prediction.predictions.mean()}

    @property
    def trained(self) -> PreTrainedModel:
        return self.llava

    def weights(self) -> dict[str, torch.Tensor]:
        weights = self.llava.state_dict()
        # In the precision that they had.
        projector = {name: value.to(self.llava.dtype) for name, value in weights.items() if "projector." in name}
        return weights | projector

    def summary(self, metrics: dict[str, float]) -> str:
        source = "answers of the LLaVA as it was" if self.has_teacher else "conversations"
        text = (
            f"{without_place(self.base_model)} with {self.llava.config.image_seq_length} tokens an image, those of "
            f"{without_place(self.tower_name)}; the projector learned from {source}"
        )
        if "agreement" not in metrics:
            return f"{text}, not evaluated."
        return f"{text}: {metrics['agreement']:.2%} of the answers' tokens are right."


def load_questions(data: QuestionDataArguments) -> tuple:
    """Load the images or conversations to train, to evaluate and to test on."""
    if not data.dataset[0].endswith(".json"):
        return load_splits(data)

    def load(files: list[str], split: str, streaming: bool = False) -> datasets.Dataset:
        return read_conversations(files[0], data.image_folder)

    return load_parts(data, load, lambda _: ["train"])


def make_parser() -> ArgumentParser:
    return ArgumentParser([LlavaArguments, QuestionDataArguments, AlignLlavaArguments], PROG)


def make_trainer(options: LlavaArguments, data: QuestionDataArguments, args: AlignLlavaArguments) -> AlignLlavaTrainer:
    """Return the trainer for the arguments of the command."""
    start(args, options.model, options.vision_model)
    train, evaluation, test = load_questions(data)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    original, processor = load_llava(options.model, args.device, dtype)
    tower, _ = load_vision_model(options.vision_model, "cpu")
    trainer = AlignLlavaTrainer(original, tower, args, train, evaluation, processor, base_model=options.model)
    trainer.test_images = test
    return trainer


def main(argv: list[str] | None = None) -> int:
    return run_command(make_parser(), make_trainer, argv)


if __name__ == "__main__":
    run_as_program(main, PROG)
