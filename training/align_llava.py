"""Let a LLaVA learn to read a SparseFormer: the projector alone, without labels or with conversations.

    accelerate launch -m frugalvit.training.align_llava --model LLAVA --vision_model TOWER --dataset IMAGES \\
        --output_dir OUT

The tower takes the place of the LLaVA's own, as in `frugalvit swap`; tower and language model stay as they are. A
PaliGemma is such a LLaVA, too.
Without text, the LLaVA as it was is the teacher: it answers a question about each image, and the new one learns to
give its answers, token by token with its distribution, from projected tokens whose mean is that of the old ones. With
LLaVA's files of conversations (`--dataset FILE.json`), it learns their answers. `--lora_rank` tunes the language
model, too (Hu et al. 2022), which is written with what was learned added to its weights.
"""

import copy
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from transformers import PaliGemmaProcessor, PreTrainedModel

from ..common.choices import QUANTIZATIONS
from ..common.loading import load_llava, load_vision_model
from ..common.names import without_place
from ..common.splits import load_parts, load_splits
from ..common.views import CAPTION, ImageFormat, random_seed
from ..modeling.layers import divergence
from ..modeling.modeling_sparseformer import SparseFormerPreTrainedModel
from ..modeling.swap import matching_processor, swap_vision_tower
from .arguments import (
    ArgumentParser,
    DataArguments,
    ImageTrainingArguments,
    argument,
    check,
    check_from,
    run_as_program,
)
from .augmentation import BootstrapView, PairedEvalView
from .cards import write_card
from .data import as_images
from .llava import (
    NO_ANSWER,
    PALIGEMMA_PROMPT,
    PROMPT,
    Answers,
    Learner,
    answer,
    encode,
    pad,
    read_conversations,
    select,
)
from .optimizers import parameter_groups, with_rates
from .trainer import ImageTrainer, run_command, start


PROG = "frugalvit align-llava"
# Of the learning rate: weights of the language model are moved less than those of the projector (LLaVA 1.5 takes 2e-4
# beside 1e-3).
LORA_RATE = 0.2
# Code in the model card.
USE = """

inputs = processor(images=image, text={prompt!r}, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=20)
print(processor.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


@dataclass
class LlavaArguments:
    """The LLaVA and the tower that it is to read."""

    model: str = argument(help="Folder or hub id (@revision, too) of a LLaVA in the style of 1.5 or a PaliGemma.")
    vision_model: str = argument(
        help="Folder or hub id of a SparseFormer that was bootstrapped from its tower, or, with a new first layer of "
        "the projector, from another vision transformer."
    )
    quantize: str | None = argument(
        None,
        "Hold the language model's weights so (pip install 'frugalvit[quantize]'). They are written as they were.",
        choices=[*QUANTIZATIONS],
    )


@dataclass
class QuestionDataArguments(DataArguments):
    """Images to ask about, or LLaVA's conversations, to train and evaluate on, by their names."""

    image_folder: str | None = argument(
        None, "Where images of conversations are. Default: the folder of the conversations."
    )


@dataclass
class AlignLlavaArguments(ImageTrainingArguments):
    """How it learns: questions about the images, what learns, and Transformers' arguments. With `bf16` or `fp16`,
    weights that stay as they are have that precision, too; those that learn are float32."""

    metric_for_best_model: str = argument("agreement", "Metric that chooses the best model.")
    eval_on_start: bool = argument(True, "Measure the LLaVA with the new tower before training, too.")
    num_train_epochs: float = argument(1.0, "Epochs.")
    per_device_train_batch_size: int = argument(32, "Images of a step on a device.")
    per_device_eval_batch_size: int = argument(32, "Images of an evaluation step on a device.")
    learning_rate: float = argument(1e-3, "Highest learning rate, that of the projector; LoRA's is a fifth.")
    warmup_steps: float = argument(0.03, "Steps of warm-up, or a share of all.")
    lr_scheduler_type: str = argument("cosine", "Schedule, a name of Transformers.")
    num_tokens: int | None = argument(None, "Latent tokens of the tower. Default: its own.")
    lora_rank: int = argument(0, "Rank of LoRA in the language model; 0 leaves it as it is.")
    questions: list[str] = argument(
        ["What is in the image?", "Describe the image.", "What is this?"],
        "Questions, one of which is asked about each view of an image.",
    )
    prompt: str | None = argument(
        None, "What a question is put into, with {image} and {question}. Default: LLaVA 1.5's or PaliGemma's."
    )
    answer_tokens: int = argument(16, "Most tokens of an answer that the LLaVA gives.")
    feature_loss_weight: float = argument(
        1.0, "Weight of an added distance of the projected tokens' mean from that of the LLaVA as it was."
    )

    def __post_init__(self):
        super().__post_init__()
        check(self, lambda value: not value, "0, as answers have no smoothed labels", "label_smoothing_factor")
        is_prompt = lambda text: "{image}" in text and "{question}" in text  # noqa: E731
        check(self, is_prompt, "a text with {image} and {question}", "prompt")
        check_from(self, 0, "lora_rank", "feature_loss_weight")
        check_from(self, 1, "num_tokens", "answer_tokens")


class AlignLlavaTrainer(ImageTrainer):
    """Transformers' `Trainer` of a LLaVA or a PaliGemma that learns to read a SparseFormer: its projector and, with
    `args.lora_rank`, its language model.

    Args:
        original (`PreTrainedModel`): The LLaVA with its own tower, in the precision that it is to have.
        tower (`SparseFormerPreTrainedModel`): A SparseFormer that was bootstrapped from that tower.
        args (`AlignLlavaArguments`): How it learns.
        train_dataset: Images, see `BootstrapTrainer`, about which the LLaVA as it was is asked; or conversations, as
            `read_conversations` returns them.
        eval_dataset (*optional*): The same, to choose the best epoch on.
        processing_class: The LLaVA's processor.
        callbacks (*optional*): As Transformers has them.
        base_model (`str`, *optional*): Name of the LLaVA, by default where it was loaded from.
        quantize (`str`, *optional*): How the language model of `original` is quantized. The written model has the
            weights of `base_model`, plus what LoRA learned.

    Raises:
        ValueError: if LLaVA, tower, images and arguments do not fit each other, or with FSDP or DeepSpeed.
    """

    def __init__(
        self,
        original: PreTrainedModel,
        tower: SparseFormerPreTrainedModel,
        args: AlignLlavaArguments,
        train_dataset,
        eval_dataset=None,
        processing_class=None,
        callbacks=None,
        base_model: str | None = None,
        quantize: str | None = None,
    ):
        args = copy.copy(args)
        args.eval_on_start = args.eval_on_start and eval_dataset is not None
        self.original = original if quantize else original.to(args.device)
        self.processor, self.quantize = processing_class, quantize
        default_prompt = PALIGEMMA_PROMPT if isinstance(processing_class, PaliGemmaProcessor) else PROMPT
        self.prompt = args.prompt or default_prompt
        self.tower_name = tower.config._name_or_path
        self.llava = swap_vision_tower(original, tower, new_first_layer=True)
        if args.num_tokens is not None:
            self.llava.set_num_tokens(args.num_tokens)
        processor = matching_processor(processing_class, self.llava)
        learner = Learner(self.llava)
        if args.lora_rank:
            learner.add_lora(args.lora_rank)
        train = self.take_images(train_dataset)
        self.has_teacher = "turns" not in train.features
        student_format = ImageFormat.from_processor(processor.image_processor)
        teacher_format = ImageFormat.from_processor(processing_class.image_processor) if self.has_teacher else None
        eval_view = PairedEvalView(student_format, teacher_format)
        super().__init__(
            model=learner,
            args=args,
            train_dataset=train,
            eval_dataset=eval_dataset,
            # Conversations may be about what a crop leaves out.
            train_view=BootstrapView(student_format, teacher_format) if self.has_teacher else eval_view,
            eval_view=eval_view,
            processing_class=processor,
            callbacks=callbacks,
            base_model=base_model or original.config._name_or_path,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("What learns is small and the rest stays as it is: train without FSDP and DeepSpeed.")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """As in Transformers; a resumed run was measured before it began."""
        self.args.eval_on_start = self.args.eval_on_start and not resume_from_checkpoint
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def take_images(self, images):
        is_table = isinstance(images, datasets.Dataset) and "turns" in images.features
        return images.cast_column("image", datasets.Image(decode=False)) if is_table else as_images(images)

    def parameter_groups(self, model) -> list[dict]:
        in_projector = {*self.llava.model.multi_modal_projector.parameters()}
        rates = {parameter: LORA_RATE for parameter in model.parameters() if parameter not in in_projector}
        return with_rates(parameter_groups(model, self.args.weight_decay), rates, self.args.learning_rate)

    def ask(self, batch: dict, images) -> tuple[list[tuple[list[int], list[int]]], Answers | None]:
        """Return the token ids and labels of a text about each image of a batch, of conversations in `images`, or else
        with the answers of the LLaVA as it was, which are returned, too."""
        args, indices = self.args, batch["index"].tolist()

        def encoded(turns: list) -> tuple[list[int], list[int]]:
            return encode(self.processing_class, self.llava.config.image_seq_length, turns, self.prompt)

        if "turns" in images.features:
            return [encoded(images[index]["turns"]) for index in indices], None
        epochs = batch["epoch"].tolist() if "epoch" in batch else [0] * len(indices)
        seeds = [random_seed(args.seed, *key, CAPTION) for key in zip(epochs, indices, strict=True)]
        questions = [args.questions[seed % len(args.questions)] for seed in seeds]
        pixel_values = batch.get("teacher_pixel_values", batch["pixel_values"]).to(self.llava.dtype)
        with self.accelerator.autocast(), self.model.without_lora():
            answers = answer(self.original, self.processor, pixel_values, questions, self.prompt, args.answer_tokens)
        asked = [encoded([(question, None)]) for question in questions]
        rows = [(ids + given, labels + given) for (ids, labels), given in zip(asked, answers.tokens, strict=True)]
        return rows, answers

    def read(self, model, batch: dict, rows: list) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
        """Let the new LLaVA predict each token of the answers.

        Returns:
            Its logits, `(answer tokens, vocabulary)` in float32, the tokens themselves, `(answer tokens,)`, how many
            of them are about each image, and the mean projected token of each image, `(batch, hidden_size)`.
        """
        device = self.args.device
        inputs, labels = pad(rows, self.processing_class)
        inputs = {name: value.to(device) for name, value in inputs.items()}
        # Nothing is asked about what stands before the answers; the token before them is asked for the first.
        asked = labels.shape[1] - int((labels != NO_ANSWER).any(0).nonzero()[0])
        outputs = model(pixel_values=batch["pixel_values"].to(self.llava.dtype), logits_to_keep=asked + 1, **inputs)
        labels = labels[:, -asked:]
        answered = labels != NO_ANSWER
        features = torch.cat(list(outputs.image_outputs.pooler_output))
        seen = features.reshape(len(labels), -1, features.shape[-1]).float().mean(1)
        said, tokens = select(outputs.logits[:, :-1], answered).float(), labels[answered].to(device)
        # The projector may be on another device than what is returned.
        return said, tokens, answered.sum(1).tolist(), seen.to(device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows, answers = self.ask(inputs, self.train_dataset.images)
        said, tokens, _, seen = self.read(model, inputs, rows)
        if answers is None:
            return F.cross_entropy(said, tokens)
        loss = divergence(said, answers.logits, 1.0)
        distance = (seen - answers.seen).square().sum(1) / answers.seen.square().sum(1)
        return loss + self.args.feature_loss_weight * distance.mean()

    def evaluation_loop(self, dataloader, *args, **kwargs):
        """As in Transformers."""
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
        if not self.args.should_save:
            return {}
        plain = load_llava(self.base_model, "cpu", self.llava.dtype)[0].model.language_model if self.quantize else None
        return self.model.merged_state(plain)

    def write_card(self, folder: Path):
        # A PaliGemma's processor ends the line itself.
        token = self.processor.image_token
        place = token if self.prompt.endswith("\n") else f"{token}\n"
        prompt = self.prompt.removesuffix("\n").format(image=place, question=self.args.questions[0])
        # Its parameters are counted, without LoRA's and as they are before they are quantized.
        with torch.device("meta"):
            plain = type(self.llava)(self.llava.config)
        write_card(folder, self, plain, use=USE.format(prompt=prompt))

    def summary(self, metrics: dict[str, float]) -> str:
        rank = self.args.lora_rank
        language_model = f" and the language model (LoRA of rank {rank})" if rank else ""
        source = "answers of the LLaVA as it was" if self.has_teacher else "conversations"
        text = (
            f"{without_place(self.base_model)} with {self.llava.config.image_seq_length} tokens an image, those of "
            f"{without_place(self.tower_name)}; the projector{language_model} learned from {source}"
        )
        if "agreement" not in metrics:
            return f"{text}, not evaluated."
        start = next((each for each in self.state.log_history if each["step"] == 0), {}).get("eval_agreement")
        before = "" if start is None or (self.data and self.data.tested) else f", {start:.2%} before"
        return f"{text}: {metrics['agreement']:.2%} of the answers' tokens are right{before}."


def load_questions(data: QuestionDataArguments) -> tuple:
    """Load the images or conversations to train, to evaluate and to test on."""
    if not data.dataset[0].endswith(".json"):
        return load_splits(data)

    def load(files: list[str], split: str, streaming: bool = False) -> datasets.Dataset:
        return read_conversations(files[0], data.image_folder)

    return load_parts(data, load, lambda _: ["train"])


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        [LlavaArguments, QuestionDataArguments, AlignLlavaArguments],
        PROG,
        "Let a LLaVA learn to read a SparseFormer: the projector alone, without labels or with conversations.",
    )


def make_trainer(options: LlavaArguments, data: QuestionDataArguments, args: AlignLlavaArguments) -> AlignLlavaTrainer:
    """Return the trainer for the arguments of the command."""
    start(args)
    train, evaluation, test = load_questions(data)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    original, processor = load_llava(options.model, args.device, dtype, options.quantize)
    tower, _ = load_vision_model(options.vision_model, "cpu")
    trainer = AlignLlavaTrainer(
        original, tower, args, train, evaluation, processor, base_model=options.model, quantize=options.quantize
    )
    trainer.test_images = test
    return trainer


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    return run_command(make_parser(), make_trainer, argv)


if __name__ == "__main__":
    run_as_program(main, PROG)
