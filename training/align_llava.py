"""Align the projector of a LLaVA with a new vision tower, which is a SparseFormer. No labels are needed.

    accelerate launch -m frugalvit.training.align_llava --model LLAVA --vision_model TOWER --dataset IMAGES \\
        --output_dir OUT

The SparseFormer replaces the vision tower of a LLaVA or a PaliGemma, as in `frugalvit swap`. Only the projector is
trained. The original model is the teacher and generates an answer to a question about each image. The new model learns
the teacher's probabilities for each token of the answer, and the mean of the teacher's projected image tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PaliGemmaProcessor, PreTrainedModel

from ..modeling.image_format import ImageFormat
from ..modeling.modeling_bootstrapped_vit import divergence
from ..modeling.modeling_sparseformer import SparseFormerPreTrainedModel
from ..modeling.vision_tower import first_layer, matching_processor, swap_vision_tower
from .arguments import (
    NOT_NEGATIVE,
    POSITIVE,
    ArgumentParser,
    DataArguments,
    ImageTrainingArguments,
    argument,
    run_program,
)
from .cards import strip_directory
from .data import load_splits
from .loading import SEQUENCE_VLMS, load_model
from .trainer import ImageTrainer, run_command, start
from .views import CAPTION, BootstrapView, EvalView, as_images, seeded


PROG = "frugalvit align-llava"
# Prompts of LLaVA 1.5 and of PaliGemma.
PROMPT = "USER: {image}{question} ASSISTANT:"
PALIGEMMA_PROMPT = "{image}{question}\n"
# Label of tokens outside of answers. Transformers ignores tokens with this label.
NO_ANSWER = -100
# Code example in the model card.
USE = """

inputs = processor(images=image, text={prompt!r}, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=20)
print(processor.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


@dataclass
class LlavaArguments:
    """Arguments of the LLaVA and its new vision tower."""

    model: str = argument(help="Folder or hub id (owner/name@revision) of a LLaVA 1.5 or a PaliGemma.")
    vision_model: str = argument(help="Folder or hub id of a SparseFormer, preferably bootstrapped from the tower.")


@dataclass
class AlignLlavaArguments(ImageTrainingArguments):
    """Arguments of the alignment. Frozen weights are stored in bfloat16 with `bf16`, and in float16 with `fp16`."""

    metric_for_best_model: str = argument("agreement", "Metric that chooses the best model.")
    num_train_epochs: float = argument(1.0, "Epochs.")
    per_device_train_batch_size: int = argument(32, "Training batch size on each device.")
    per_device_eval_batch_size: int = argument(32, "Evaluation batch size on each device.")
    learning_rate: float = argument(1e-3, "Peak learning rate.")
    warmup_steps: float = argument(0.03, "Steps of warm-up, or a share of all.")
    num_tokens: int | None = argument(
        None, "Number of latent tokens of the tower. Default: that of its configuration."
    )
    questions: list[str] = argument(
        ["What is in the image?", "Describe the image.", "What is this?"],
        "Questions, of which one is drawn for each view of an image.",
    )
    prompt: str | None = argument(
        None,
        "Text with {image} and {question}. A LLaVA's {image} ends with a line break. Default: LLaVA 1.5's or "
        "PaliGemma's.",
    )
    answer_tokens: int = argument(16, "Largest number of tokens in an answer.")
    feature_loss_weight: float = argument(1.0, "Weight of the distance between means of projected tokens.")

    expected = {
        "prompt": ("a text with {image} and {question}", lambda text: "{image}" in text and "{question}" in text),
        "feature_loss_weight": NOT_NEGATIVE,
        "num_tokens": POSITIVE,
        "answer_tokens": POSITIVE,
    }


def encode(processor, image_tokens: int, question: str, prompt: str) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        processor: The processor of a LLaVA or a PaliGemma.
        image_tokens (`int`): Number of image tokens in the prompt.
        question (`str`): The question.
        prompt (`str`): Template that contains `{image}` and `{question}`.
    """
    tokenizer = processor.tokenizer
    if isinstance(processor, PaliGemmaProcessor):
        # In PaliGemma's prompt, [BOS] follows the image tokens instead of preceding them.
        first_ids = []
        separator = tokenizer.bos_token or ""
    else:
        first_ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        separator = "\n"
    text = prompt.format(image=f"{processor.image_token * image_tokens}{separator}", question=question)
    return first_ids + tokenizer(text, add_special_tokens=False)["input_ids"]


def pad(
    questions: Sequence[list[int]], answers: Sequence[list[int]], processor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Convert the token ids of questions and answers into a model's text inputs and labels. Each tensor has
    the shape `(images, length)`. Rows are padded on the left, so that generation starts at the same position in all
    rows."""
    rows = [question + answer for question, answer in zip(questions, answers, strict=True)]
    length = max(map(len, rows))

    def stack(lists, value: int) -> torch.Tensor:
        return torch.tensor([[value] * (length - len(each)) + each for each in lists])

    labels = stack(answers, NO_ANSWER)
    inputs = {
        "input_ids": stack(rows, processor.tokenizer.pad_token_id or 0),
        "attention_mask": stack([[1] * len(row) for row in rows], 0),
    }
    if isinstance(processor, PaliGemmaProcessor):
        # Tokens before the answer have type 0 and attend to each other in both directions.
        inputs["token_type_ids"] = (labels != NO_ANSWER).long()
    return inputs, labels


@torch.no_grad()
def answer(llava, processor, pixel_values: torch.Tensor, questions: list[str], prompt: str, length: int) -> tuple:
    """Generate the answer of a LLaVA or a PaliGemma to a question about each image, by greedy decoding.

    Args:
        llava (`PreTrainedModel`): The model.
        processor: The model's processor.
        pixel_values (`torch.Tensor`): The images, `(images, channels, height, width)`.
        questions (`list[str]`): A question for each image.
        prompt (`str`): Template that contains `{image}` and `{question}`.
        length (`int`): Largest number of tokens in an answer.

    Returns:
        `list[list[int]]`: The token ids of each answer.
        `torch.Tensor`: The logits of the tokens of all answers, `(answer tokens, vocabulary)`.
        `torch.Tensor`: The mean projected token of each image, `(images, channels)`.
    """
    features = llava.get_image_features(pixel_values).pooler_output
    asked = [encode(processor, len(features[0]), question, prompt) for question in questions]
    inputs, _ = pad(asked, [[]] * len(asked), processor)
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
    # An answer includes its first end-of-text token. Later tokens are dropped.
    end = llava.generation_config.eos_token_id
    ends = torch.isin(tokens, torch.tensor([end] if isinstance(end, int) else end or [], dtype=tokens.dtype))
    kept = ends.cumsum(1) - ends.int() == 0
    mean_features = torch.stack([each.float().mean(0) for each in features])
    answers = [row[mask].tolist() for row, mask in zip(tokens, kept, strict=True)]
    logits = torch.stack(given.logits, dim=1)
    return answers, logits[kept.to(logits.device)].float(), mean_features


class Learner(nn.Module):
    """Wrapper of a LLaVA that replaces the projector by a trainable copy in float32. All other weights are frozen. The
    state dict only contains the projector, because the frozen weights may be shared with the teacher."""

    def __init__(self, llava: PreTrainedModel):
        super().__init__()
        self.llava = llava.requires_grad_(False)
        llava.model.multi_modal_projector = copy.deepcopy(llava.model.multi_modal_projector).float().requires_grad_()
        self.register_state_dict_post_hook(drop_frozen)
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def train(self, mode: bool = True):
        """Keep the model in evaluation mode, even if `mode` is True."""
        return super().train(False)

    def forward(self, **inputs):
        return self.llava(**inputs)


def drop_frozen(learner: Learner, state: dict, prefix: str, metadata):
    # `remove_duplicate=False` is needed, because `state` contains both names of a parameter that two modules share.
    named = learner.named_parameters(remove_duplicate=False)
    for name in state.keys() - {f"{prefix}{name}" for name, each in named if each.requires_grad}:
        del state[name]


class AlignLlavaTrainer(ImageTrainer):
    """Transformers' `Trainer` that aligns the projector of a LLaVA or a PaliGemma with a new vision tower.

    Args:
        original (`PreTrainedModel`): The LLaVA or PaliGemma, which is the teacher.
        tower (`SparseFormerPreTrainedModel`): The new vision tower.
        args (`AlignLlavaArguments`): The training arguments.
        train_dataset: Images in a form that `BootstrapTrainer` accepts.
        eval_dataset (*optional*): Images to choose the best projector on.
        processing_class: The processor of `original`.
        base_model (`str`, *optional*): Name of `original` in the card. Default: the folder or hub id of `original`.
        kwargs: See `ImageTrainer`.
    """

    def __init__(
        self,
        original: PreTrainedModel,
        tower: SparseFormerPreTrainedModel,
        args: AlignLlavaArguments,
        train_dataset,
        eval_dataset=None,
        processing_class=None,
        base_model: str | None = None,
        **kwargs,
    ):
        teacher_format = ImageFormat.from_processor(getattr(processing_class, "image_processor", None))
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
            # If the widths of the two towers differ, they are from different model families. In this case, images for
            # the new LLaVA are normalized by the mean and the standard deviation of the new tower.
            tower_format = ImageFormat.from_config(tower.config)
            processor.image_processor.image_mean = tower_format.mean
            processor.image_processor.image_std = tower_format.std
        formats = (ImageFormat.from_processor(processor.image_processor), teacher_format)
        # The prompt in the card has no final line break, because PaliGemma's processor adds the line break.
        token = processing_class.image_token
        image = token if self.prompt.endswith("\n") else f"{token}\n"
        prompt = self.prompt.removesuffix("\n").format(image=image, question=args.questions[0])
        super().__init__(
            Learner(self.llava),
            args,
            as_images(train_dataset),
            eval_dataset,
            BootstrapView(*formats),
            EvalView(*formats),
            saved_model=self.llava,
            processing_class=processor,
            base_model=base_model or original.config.name_or_path,
            usage=USE.format(prompt=prompt),
            **kwargs,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("align-llava trains a small projector, expected no FSDP and no DeepSpeed.")

    def ask_teacher(self, batch: dict) -> tuple:
        """Generate the teacher's answer to a random question about each image of a batch. Return the questions, the
        answers' token ids and logits, and the mean projected token of each image."""
        args = self.args
        indices = batch["index"].tolist()
        epochs = batch["epoch"].tolist() if "epoch" in batch else [0] * len(indices)
        questions = []
        for epoch, index in zip(epochs, indices, strict=True):
            with seeded(args.seed, epoch, index, CAPTION):
                questions.append(args.questions[torch.randint(len(args.questions), ())])
        pixel_values = batch.get("teacher_pixel_values", batch["pixel_values"]).to(self.llava.dtype)
        with self.accelerator.autocast():
            given = answer(self.original, self.processor, pixel_values, questions, self.prompt, args.answer_tokens)
        return questions, *given

    def predict_answers(self, model, batch: dict, questions: list, answers: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors: the new LLaVA's logits for each token of the answers, `(answer tokens, vocabulary)`; and
        the mean projected token of each image, `(images, channels)`."""
        length = self.llava.config.image_seq_length
        asked = [encode(self.processing_class, length, question, self.prompt) for question in questions]
        inputs, labels = pad(asked, answers, self.processing_class)
        inputs = {name: value.to(self.args.device) for name, value in inputs.items()}
        # The logits start one token before the longest answer, because this token predicts the answer's first token.
        length = labels.shape[1] - int((labels != NO_ANSWER).any(0).nonzero()[0])
        outputs = model(pixel_values=batch["pixel_values"].to(self.llava.dtype), logits_to_keep=length + 1, **inputs)
        labels = labels[:, -length:]
        answered = labels != NO_ANSWER
        features = torch.cat(list(outputs.image_outputs.pooler_output))
        mean_features = features.reshape(len(labels), -1, features.shape[-1]).float().mean(1)
        return outputs.logits[:, :-1][answered.to(outputs.logits.device)].float(), mean_features

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        questions, answers, logits, expected = self.ask_teacher(inputs)
        predicted, features = self.predict_answers(model, inputs, questions, answers)
        distance = (features - expected).square().sum(1) / expected.square().sum(1)
        return divergence(predicted, logits, 1.0) + self.args.feature_loss_weight * distance.mean()

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only=False, ignore_keys=None):
        """For each image, return the model's accuracy on the tokens of the teacher's answer."""
        questions, answers, *_ = self.ask_teacher(inputs)
        with self.accelerator.autocast():
            logits, _ = self.predict_answers(model, inputs, questions, answers)
        found = logits.argmax(-1).split([len(given) for given in answers])
        tokens = [torch.tensor(given, device=logits.device) for given in answers]
        shares = torch.stack([(a == b).float().mean() for a, b in zip(found, tokens, strict=True)])
        return None, shares, torch.zeros_like(shares)

    def measure(self, prediction) -> dict[str, float]:
        """Return `agreement`, the model's accuracy on the tokens of the teacher's answer, averaged over images."""
        return {"agreement": prediction.predictions.mean()}

    def weights(self) -> dict[str, torch.Tensor]:
        weights = self.llava.state_dict()
        # The projector is trained in float32 and saved in the precision of the other weights.
        projector = {name: value.to(self.llava.dtype) for name, value in weights.items() if "projector." in name}
        return weights | projector

    def summary(self, metrics: dict[str, float]) -> str:
        text = (
            f"{strip_directory(self.base_model)} with {self.llava.config.image_seq_length} tokens an image, those of "
            f"{strip_directory(self.tower_name)}; the projector learned from answers of the LLaVA as it was"
        )
        if "agreement" not in metrics:
            return f"{text}, not evaluated."
        return f"{text}: {metrics['agreement']:.2%} of the answers' tokens agree with the original's."


def make_parser() -> ArgumentParser:
    return ArgumentParser([LlavaArguments, DataArguments, AlignLlavaArguments], PROG)


def make_trainer(options: LlavaArguments, data: DataArguments, args: AlignLlavaArguments) -> AlignLlavaTrainer:
    """Return the trainer for the arguments of the command."""
    start(args, options.model, options.vision_model)
    train, evaluation, test = load_splits(data, skip_corrupt=args.skip_corrupt)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    original, processor = load_model(
        options.model,
        "image-text-to-text",
        args.device,
        model_types=SEQUENCE_VLMS,
        dtype=dtype,
    )
    tower, _ = load_model(options.vision_model, "image-feature-extraction", "cpu")
    return AlignLlavaTrainer(
        original,
        tower,
        args,
        train,
        evaluation,
        processor,
        options.model,
        test_dataset=test,
        model_args=options,
        data_args=data,
    )


def main(argv: list[str] | None = None) -> int:
    return run_command(make_parser(), make_trainer, argv)


if __name__ == "__main__":
    raise SystemExit(run_program(main, PROG))
