"""Let a LLaVA learn to read a SparseFormer: the projector alone, without labels.

    accelerate launch -m frugalvit.training.align_llava --model LLAVA --vision_model TOWER --dataset IMAGES \\
        --output_dir OUT

The tower takes the place of that of a LLaVA or a PaliGemma, as in `frugalvit swap`; tower and language model are
frozen. The original model is the teacher: it answers a question about each image, and the new one learns the
distribution of each token of the answer, and the mean of the projected tokens.
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
    run_as_program,
)
from .augmentation import CAPTION, BootstrapView, EvalView, seeded
from .cards import strip_directory
from .loading import SEQUENCE_VLMS, load_model
from .splits import load_splits
from .trainer import ImageTrainer, require_processor, run_command, start
from .views import as_images


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

    expected = {
        "prompt": ("a text with {image} and {question}", lambda text: "{image}" in text and "{question}" in text),
        "feature_loss_weight": NOT_NEGATIVE,
        "num_tokens": POSITIVE,
        "answer_tokens": POSITIVE,
    }


def encode(processor, image_tokens: int, question: str, prompt: str) -> list[int]:
    """Return the token ids of a question about an image, which is `image_tokens` long; `prompt` is the text around."""
    tokenizer = processor.tokenizer
    if isinstance(processor, PaliGemmaProcessor):
        # Its text starts after its image.
        front = []
        behind = tokenizer.bos_token or ""
    else:
        front = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        behind = "\n"
    text = prompt.format(image=f"{processor.image_token * image_tokens}{behind}", question=question)
    return front + tokenizer(text, add_special_tokens=False)["input_ids"]


def pad(
    questions: Sequence[list[int]], answers: Sequence[list[int]], processor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a model's inputs besides the images, and the labels, `(images, length)`, of token ids of questions and
    answers. Padding is at the left, so that all texts end together."""
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
        # 0 up to the answer: these tokens attend to each other.
        inputs["token_type_ids"] = (labels != NO_ANSWER).long()
    return inputs, labels


@torch.no_grad()
def answer(llava, processor, pixel_values: torch.Tensor, questions: list[str], prompt: str, length: int) -> tuple:
    """Generate the likeliest answer of a LLaVA or a PaliGemma to a question about each image, of at most `length`
    tokens. Return the token ids of each answer, the logits of all of them, `(answer tokens, vocabulary)`, and the mean
    projected token of each image, `(images, channels)`."""
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

    `train_dataset` and `eval_dataset` are images, see `BootstrapTrainer`, about which `original` is asked;
    `processing_class` is its processor.
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
        require_processor(processing_class)
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
        formats = [ImageFormat.from_processor(each.image_processor) for each in (processor, processing_class)]
        # A PaliGemma's processor ends the line itself.
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
            raise ValueError("What learns is small and the rest stays as it is: train without FSDP and DeepSpeed.")

    def ask(self, batch: dict) -> tuple:
        """Return a question about each image of a batch, the token ids of the teacher's answers, their logits and the
        images' mean projected tokens."""
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

    def read(self, model, batch: dict, questions: list, answers: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the new LLaVA predict each token of the answers. Return its logits, `(answer tokens, vocabulary)`, and
        the mean projected token of each image."""
        length = self.llava.config.image_seq_length
        asked = [encode(self.processing_class, length, question, self.prompt) for question in questions]
        inputs, labels = pad(asked, answers, self.processing_class)
        inputs = {name: value.to(self.args.device) for name, value in inputs.items()}
        # No logits of what stands before the answers, but of the last token before them.
        length = labels.shape[1] - int((labels != NO_ANSWER).any(0).nonzero()[0])
        outputs = model(pixel_values=batch["pixel_values"].to(self.llava.dtype), logits_to_keep=length + 1, **inputs)
        labels = labels[:, -length:]
        answered = labels != NO_ANSWER
        features = torch.cat(list(outputs.image_outputs.pooler_output))
        seen = features.reshape(len(labels), -1, features.shape[-1]).float().mean(1)
        return outputs.logits[:, :-1][answered.to(outputs.logits.device)].float(), seen

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        questions, answers, logits, expected = self.ask(inputs)
        said, seen = self.read(model, inputs, questions, answers)
        distance = (seen - expected).square().sum(1) / expected.square().sum(1)
        return divergence(said, logits, 1.0) + self.args.feature_loss_weight * distance.mean()

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only=False, ignore_keys=None):
        """Return, for each image, the share of the answer's tokens that the model predicts."""
        questions, answers, *_ = self.ask(inputs)
        with self.accelerator.autocast():
            said, _ = self.read(model, inputs, questions, answers)
        found = said.argmax(-1).split([len(given) for given in answers])
        tokens = [torch.tensor(given, device=said.device) for given in answers]
        shares = torch.stack([(a == b).float().mean() for a, b in zip(found, tokens, strict=True)])
        return None, shares, torch.zeros_like(shares)

    def measure(self, prediction) -> dict[str, float]:
        """`agreement`, the mean share of the answers' tokens that are predicted."""
        return {"agreement": prediction.predictions.mean()}

    def weights(self) -> dict[str, torch.Tensor]:
        weights = self.llava.state_dict()
        # In the precision that they had.
        projector = {name: value.to(self.llava.dtype) for name, value in weights.items() if "projector." in name}
        return weights | projector

    def summary(self, metrics: dict[str, float]) -> str:
        text = (
            f"{strip_directory(self.base_model)} with {self.llava.config.image_seq_length} tokens an image, those of "
            f"{strip_directory(self.tower_name)}; the projector learned from answers of the LLaVA as it was"
        )
        if "agreement" not in metrics:
            return f"{text}, not evaluated."
        return f"{text}: {metrics['agreement']:.2%} of the answers' tokens are right."


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
    run_as_program(main, PROG)
