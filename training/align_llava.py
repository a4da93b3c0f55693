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
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

import datasets
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ..common.choices import DEVICE_MAPS, NO_EVALUATION, QUANTIZATIONS
from ..common.loading import load_llava, load_vision_model
from ..common.names import without_place
from ..common.splits import hold_back, load_splits
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
    check_ranges,
    check_shares,
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
    default_prompt,
    encode,
    is_conversations,
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
# The training's precision for weights of another one than float32.
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
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
    device_map: str | None = argument(
        None,
        "Share the LLaVA out among the accelerators, the memory and the disk, as Accelerate does, in one process.",
        choices=[*DEVICE_MAPS],
    )


@dataclass
class QuestionDataArguments(DataArguments):
    """Images to ask about, or LLaVA's conversations, to train and evaluate on, by their names."""

    image_folder: str | None = argument(
        None, "Where images of conversations are. Default: the folder of the conversations."
    )


def is_prompt(text: str) -> bool:
    """Whether a text has places for an image and a question, and no others."""
    try:
        return {name for _, name, *_ in Formatter().parse(text) if name is not None} == {"image", "question"}
    except ValueError:
        return False


@dataclass
class AlignLlavaArguments(ImageTrainingArguments):
    """`ImageTrainingArguments` of a LLaVA: questions about the images, and what learns. With `bf16` or `fp16`, weights
    that stay as they are have that precision, too, in memory and as they are written; those that learn are float32.

    Raises:
        ValueError: if a value does not fit.
    """

    metric_for_best_model: str = argument("agreement", "Metric that chooses the best model.")
    eval_on_start: bool = argument(True, "Measure the LLaVA with the new tower before training, too.")
    num_train_epochs: float = argument(1.0, "Epochs.")
    per_device_train_batch_size: int = argument(32, "Images of a step on a device.")
    per_device_eval_batch_size: int = argument(32, "Images of an evaluation step on a device.")
    learning_rate: float = argument(1e-3, "Highest learning rate, that of the projector; LoRA's is a fifth.")
    warmup_steps: float = argument(0.03, "Steps of warm-up, or a share of all.")
    lr_scheduler_type: str = argument("cosine", "Schedule, a name of Transformers.")
    num_tokens: int | None = argument(None, "Latent tokens of the tower. Default: its own.")
    lora_rank: int = argument(
        0, "Rank of what is learned of the language model's matrices; 0 leaves them as they are."
    )
    questions: list[str] = argument(
        ["What is in the image?", "Describe the image.", "What is this?"],
        "Questions, one of which is asked about each view of an image.",
    )
    prompt: str | None = argument(
        None,
        "What a question is put into, with {image} and {question}. "
        f"Default: {PROMPT!r} for a LLaVA, {PALIGEMMA_PROMPT!r} for a PaliGemma.",
    )
    answer_tokens: int = argument(16, "Most tokens of an answer that the LLaVA gives.")
    feature_loss_weight: float = argument(
        1.0, "Weight of an added distance of the projected tokens' mean from that of the LLaVA as it was."
    )
    crop_scale: list[float] = argument([0.5, 1.0], "Lowest and highest share of the area that a crop shows.")
    flip: float = argument(0.5, "Probability of a horizontal flip.")

    def __post_init__(self):
        super().__post_init__()
        check(self, lambda value: value > 0, "a positive number", "learning_rate")
        check(self, lambda value: not value, "0, as answers have no smoothed labels", "label_smoothing_factor")
        check(self, lambda texts: texts and all(texts), "one text or more", "questions")
        check(self, is_prompt, "a text with {image}, {question} and no other braces", "prompt")
        check_from(self, 0, "lora_rank", "feature_loss_weight")
        check_from(self, 1, "num_tokens", "answer_tokens")
        check_shares(self, "flip")
        check_ranges(self, "crop_scale")

    @property
    def place_model_on_device(self) -> bool:
        """Whether Transformers moves the model; it does not, as the LLaVA may be on several devices."""
        return False


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
        base_model, tower_name (`str`, *optional*): Names of LLaVA and tower, for the card; by default where they were
            loaded from.
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
        tower_name: str | None = None,
        quantize: str | None = None,
    ):
        args = copy.copy(args)
        args.eval_on_start = args.eval_on_start and eval_dataset is not None
        precision = PRECISIONS.get(original.dtype)
        if precision and not getattr(args, precision):
            raise ValueError(f"{precision} is False, expected True for a LLaVA in {original.dtype}.")
        if not quantize and getattr(original, "hf_device_map", None) is None:
            original.to(args.device)
        self.original, self.processor, self.quantize = original, processing_class, quantize
        self.prompt = default_prompt(processing_class) if args.prompt is None else args.prompt
        self.tower_name = tower_name or tower.config._name_or_path
        self.has_new_layer = original.config.vision_config.hidden_size != tower.config.hidden_size
        self.llava = swap_vision_tower(original, tower, new_first_layer=True)
        if args.num_tokens is not None:
            self.llava.set_num_tokens(args.num_tokens)
        processor = matching_processor(processing_class, self.llava)
        if self.has_new_layer:
            # A tower of another family than the LLaVA's own.
            processor.image_processor.image_mean = tower.config.image_mean
            processor.image_processor.image_std = tower.config.image_std
        learner = Learner(self.llava)
        if args.lora_rank:
            learner.add_lora(args.lora_rank)
        train = self.take_images(train_dataset)
        self.has_teacher = "turns" not in train.features
        student_format = ImageFormat.from_processor(processor.image_processor)
        teacher_format = ImageFormat.from_processor(processing_class.image_processor) if self.has_teacher else None
        eval_view = PairedEvalView(student_format, teacher_format)
        view = BootstrapView(student_format, teacher_format, args.crop_scale, flip=args.flip)
        super().__init__(
            model=learner,
            args=args,
            train_dataset=train,
            eval_dataset=eval_dataset,
            # What is said of a part of an image may be about another one.
            train_view=view if self.has_teacher else eval_view,
            eval_view=eval_view,
            processing_class=processor,
            callbacks=callbacks,
            base_model=base_model or original.config._name_or_path,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("What learns is small and the rest stays as it is: train without FSDP and DeepSpeed.")
        # Token ids and labels of each image's text, by data set: they are the same in every evaluation.
        self.known = defaultdict(dict)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """As in Transformers; what goes on was measured before it began."""
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
        with self.accelerator.autocast(), self.model.as_it_was():
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
        self.evaluated = dataloader.dataset
        return super().evaluation_loop(dataloader, *args, **kwargs)

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only=False, ignore_keys=None):
        """Return, for each image, the share of the answer's tokens that the model predicts."""
        inputs = self._prepare_inputs(inputs)
        known = self.known[self.evaluated]
        indices = inputs["index"].tolist()
        if not known.keys() >= {*indices}:
            # Finding the answers takes long.
            known |= zip(indices, self.ask(inputs, self.evaluated.images)[0], strict=True)
        with self.accelerator.autocast():
            said, tokens, lengths, _ = self.read(model, inputs, [known[index] for index in indices])
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
        return self.model.whole_state(plain)

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
        tokens = self.llava.config.image_seq_length
        language_model = f" and the language model (LoRA of rank {rank})" if rank else ""
        new = ", its first layer a new one," if self.has_new_layer else ""
        source = "answers of the LLaVA as it was" if self.has_teacher else "conversations"
        text = (
            f"{without_place(self.base_model)} with {tokens} tokens an image, those of "
            f"{without_place(self.tower_name)}; the projector{new}{language_model} learned from {source}"
        )
        if "agreement" not in metrics:
            return f"{text}, not evaluated."
        start = [
            each["eval_agreement"] for each in self.state.log_history if each["step"] == 0 and "eval_agreement" in each
        ]
        before = f", {start[0]:.2%} before" if start and not (self.data and self.data.tested) else ""
        return f"{text}: {metrics['agreement']:.2%} of the answers' tokens are right{before}."


def load_questions(data: QuestionDataArguments) -> tuple:
    """Load the images or conversations to train, to evaluate and to test on."""
    if not is_conversations(data.dataset):
        return load_splits(data)
    train = read_conversations(data.dataset[0], data.image_folder)
    if data.eval_split == NO_EVALUATION:
        return train, None, None
    if data.eval_dataset:
        check(data, is_conversations, "a file of conversations, too", "eval_dataset")
        data.evaluated = "all"
        return train, read_conversations(data.eval_dataset[0], data.image_folder), None
    data.evaluated = "a tenth, held back"
    return *hold_back(train), None


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        [LlavaArguments, QuestionDataArguments, AlignLlavaArguments],
        PROG,
        "Let a LLaVA learn to read a SparseFormer: the projector alone, without labels or with conversations.",
    )


def make_trainer(options: LlavaArguments, data: QuestionDataArguments, args: AlignLlavaArguments) -> AlignLlavaTrainer:
    """Return the trainer for the arguments of the command."""
    start(args)
    check(options, lambda _: args.world_size == 1, "none with several processes", "device_map")
    train, evaluation, test = load_questions(data)
    dtype = next((dtype for dtype, name in PRECISIONS.items() if getattr(args, name)), torch.float32)
    original, processor = load_llava(options.model, args.device, dtype, options.quantize, options.device_map)
    tower, _ = load_vision_model(options.vision_model, "cpu")
    trainer = AlignLlavaTrainer(
        original,
        tower,
        args,
        train,
        evaluation,
        processor,
        base_model=options.model,
        tower_name=options.vision_model,
        quantize=options.quantize,
    )
    trainer.test_images = test
    return trainer


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    return run_command(make_parser(), make_trainer, argv)


if __name__ == "__main__":
    run_as_program(main, PROG)
