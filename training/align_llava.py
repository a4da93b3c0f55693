"""Let a LLaVA learn to read a SparseFormer: the projector alone, without labels or with conversations.

    accelerate launch -m frugalvit.training.align_llava --model LLAVA --vision-model TOWER --dataset IMAGES \\
        --output OUT

The tower takes the place of the LLaVA's own, as in `frugalvit swap`; tower and language model stay as they are. A
PaliGemma is such a LLaVA, too.
Without text, the LLaVA as it was is the teacher: it answers a question about each image, and the new one learns to
give its answers, token by token with its distribution, from projected tokens whose mean is that of the old ones. With
LLaVA's files of conversations (`--dataset FILE.json`), it learns their answers. `--lora-rank` tunes the language
model, too (Hu et al. 2022), which is written with what was learned added to its weights.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import PartialState
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel

from ..common.choices import NO_EVALUATION
from ..common.conversations import (
    NO_ANSWER,
    default_prompt,
    hold_back_conversations,
    is_conversations,
    read_conversations,
)
from ..common.loading import load_llava, load_vision_model
from ..common.names import without_place
from ..common.splits import load_splits
from ..common.views import CAPTION, ImageFormat, random_seed
from ..modeling.layers import divergence
from ..modeling.modeling_sparseformer import SparseFormerPreTrainedModel
from ..modeling.swap import input_device, matching_processor, swap_vision_tower
from .components.answers import Answers, answer, select
from .components.arguments import DataArguments, OptimizerArguments, RunArguments, check, run_as_program
from .components.augmentation import BootstrapView, PairedEvalView
from .components.cards import say_license, write_card
from .components.checkpoints import TrainingState
from .components.images import as_images
from .components.optimizers import optimizer_with_schedule
from .components.partly_trained import Learner
from .components.runs import ImageTrainingArguments, start_run, training_arguments
from .options.align_llava import PRECISIONS, PROG, AnswerArguments, parse
from .trainer import ImageTrainer


# Of the learning rate: weights of the language model are moved less than those of the projector (LLaVA 1.5 takes 2e-4
# beside 1e-3).
LORA_RATE = 0.2
# Code in the model card.
USE = """

inputs = processor(images=image, text={prompt!r}, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=20)
print(processor.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


@dataclass
class AlignLlavaArguments(AnswerArguments, OptimizerArguments, ImageTrainingArguments):
    """Transformers' `TrainingArguments`, and the options of `frugalvit align-llava` by the same names.
    `ImageClassificationArguments` says which of `TrainingArguments` are not read.

    Args:
        num_tokens (`int`, *optional*): Latent tokens of the tower; as many as it has by itself if not given.
        lora_rank (`int`, *optional*, defaults to 0): Rank of the matrices that are learned beside the language model's
            (LoRA); 0 leaves the language model as it is.

    Raises:
        ValueError: if a value does not fit.
    """

    num_tokens: int | None = None
    lora_rank: int = 0

    @property
    def place_model_on_device(self) -> bool:
        """Whether the trainer moves the model; it does not, as the LLaVA may be on several devices."""
        return False


class AlignLlavaTrainer(ImageTrainer):
    """Transformers' `Trainer` of a LLaVA or a PaliGemma that learns to read a SparseFormer: its projector and, with
    `args.lora_rank`, its language model.

    Args:
        original (`PreTrainedModel`): The LLaVA with its own tower, in the precision that it is to have.
        tower (`SparseFormerPreTrainedModel`): A SparseFormer that was bootstrapped from that tower.
        args (`AlignLlavaArguments`): How it learns.
        train_dataset: Images, see `BootstrapTrainer`, about which the LLaVA as it was is asked; or `Questions`.
        eval_dataset, test_dataset (*optional*): The same, to choose the best epoch on and to measure it on.
        processing_class: The LLaVA's processor.
        callbacks (*optional*): As Transformers has them.
        tower_name (`str`, *optional*): The tower's name, for the card; by default where it was loaded from.
        quantize (`str`, *optional*): How the language model of `original` is quantized, as of `--quantize`. The
            written model has its weights as they were before, plus what LoRA learned.
        command (*optional*): Arguments of `ImageTrainer` that a command gives, as `run` and `data`.

    Raises:
        ValueError: if LLaVA, tower, images and arguments do not fit each other, or with FSDP or DeepSpeed.
    """

    metric = "agreement"

    def __init__(
        self,
        original: PreTrainedModel,
        tower: SparseFormerPreTrainedModel,
        args: AlignLlavaArguments,
        train_dataset,
        eval_dataset=None,
        test_dataset=None,
        processing_class=None,
        callbacks=None,
        *,
        tower_name: str | None = None,
        quantize: str | None = None,
        **command,
    ):
        train, evaluation, test = map(as_questions, (train_dataset, eval_dataset, test_dataset))
        self.original, self.processor, self.quantize = original, processing_class, quantize
        self.prompt = default_prompt(processing_class) if args.prompt is None else args.prompt
        self.tower_name = tower_name or tower.config._name_or_path
        self.image_tokens_before = count_image_tokens(original, processing_class)
        self.llava = swap_vision_tower(original, tower, new_first_layer=True)
        self.widths = original.config.vision_config.hidden_size, tower.config.hidden_size
        if args.num_tokens is not None:
            self.llava.set_num_tokens(args.num_tokens)
        self.new_processor = matching_processor(processing_class, self.llava)
        learner = Learner(self.llava)
        if args.lora_rank:
            learner.add_lora(args.lora_rank)
        student_format = ImageFormat.from_processor(self.new_processor.image_processor)
        self.learns_from_original = train.conversations is None
        teacher_format = (
            ImageFormat.from_processor(processing_class.image_processor) if self.learns_from_original else None
        )
        eval_view = PairedEvalView(student_format, teacher_format)
        view = BootstrapView(student_format, teacher_format, args.crop_scale, flip=args.flip)
        super().__init__(
            *(learner, args),
            # What is said of a part of an image may be about another one.
            train=(train.images, view if self.learns_from_original else eval_view),
            evaluation=(evaluation.images, eval_view),
            test=test.images,
            callbacks=callbacks,
            **command,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("What learns is small and the rest stays as it is: leave FSDP and DeepSpeed out.")
        self.train_questions = train
        self.questions = {self.eval_loader: evaluation, self.test_loader: test}
        # What there is to say about each batch of a loader's images, which are the same in every epoch.
        self.found: dict[object, dict[int, Answers]] = defaultdict(dict)
        self.before: float | None = None

    def outline(self) -> str:
        """The number of tokens of an image and of parameters that learn, in a sentence."""
        learned = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        before, now = self.widths
        new = f" The projector's first layer is new: the tower has {now:,} channels, the old one {before:,}."
        return (
            f"{self.llava.config.image_seq_length} tokens an image instead of {self.image_tokens_before}; "
            f"{learned:,} of {sum(parameter.numel() for parameter in self.model.parameters()):,} parameters learn."
            f"{new if now != before else ''}"
        )

    def train(self, *arguments, **options):
        """As `ImageTrainer.train`; the share of right tokens is measured before, too."""
        if self.eval_loader and self.before is None:
            self.before = self.measure(self.model, self.test_loader or self.eval_loader)["agreement"]
            self.accelerator.print(f"Before: {self.before:.2%} of the answers' tokens are right.")
        return super().train(*arguments, **options)

    def make_optimizer(self) -> tuple:
        in_projector = {*self.llava.model.multi_modal_projector.parameters()}
        learned = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        rates = {parameter: 1.0 if parameter in in_projector else LORA_RATE for parameter in learned}
        return optimizer_with_schedule(self.model, self.args, self.epochs, self.loader.steps_per_epoch, rates=rates)

    def ask(self, batch: dict, part: "Questions") -> Answers:
        """Return the questions about a batch of images, and the answers to them: those of the conversations, or else
        of the LLaVA as it was."""
        keys = list(zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True))
        if part.conversations is not None:
            return Answers([part.conversations[index] for _, index in keys])
        questions = self.args.questions
        chosen = [random_seed(self.args.seed, *key, CAPTION) % len(questions) for key in keys]
        pixel_values = batch.get("teacher_pixel_values", batch["pixel_values"]).to(self.llava.dtype)
        with self.accelerator.autocast(), self.model.as_it_was():
            return answer(
                *(self.original, self.processor, pixel_values, [questions[number] for number in chosen]),
                *(self.prompt, self.args.answer_tokens),
            )

    def read(self, model, batch: dict, answers: Answers) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
        """Let the new LLaVA predict each token of the answers.

        Returns:
            Its logits, `(answer tokens, vocabulary)` in float32, the tokens themselves, `(answer tokens,)`, how many
            of them are about each image, and the mean projected token of each image, `(batch, hidden_size)`.
        """
        device = self.accelerator.device
        inputs, labels = answers.inputs(self.new_processor, self.llava.config.image_seq_length, self.prompt)
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
        answers = self.ask(inputs, self.train_questions)
        said, tokens, _, seen = self.read(model, inputs, answers)
        if answers.logits is None:
            return F.cross_entropy(said, tokens)
        loss = divergence(said, answers.logits, 1.0)
        distance = (seen - answers.seen).square().sum(1) / answers.seen.square().sum(1)
        return loss + self.args.feature_loss_weight * distance.mean()

    @torch.inference_mode()
    def measure(self, model, loader) -> dict[str, float]:
        model.eval()
        shares, known = [], self.found[loader]
        # Finding the answers takes long.
        hidden = None if self.accelerator.is_main_process else True
        for number, batch in enumerate(tqdm(loader, desc="answers", leave=False, disable=hidden)):
            if number not in known:
                # Distributions of all answers would fill the memory.
                known[number] = Answers(self.ask(batch, self.questions[loader]).conversations)
            with self.accelerator.autocast():
                said, tokens, lengths, _ = self.read(model, batch, known[number])
            right = (said.argmax(-1) == tokens).float().split(lengths)
            shares.append(self.accelerator.gather_for_metrics(torch.stack([values.mean() for values in right])))
        return {"agreement": torch.cat(shares).mean().item()}

    @property
    def saved(self):
        return self.model

    def summary(self, state: TrainingState) -> str:
        rank, tokens = self.args.lora_rank, self.llava.config.image_seq_length
        language_model = f" and the language model (LoRA of rank {rank})" if rank else ""
        new = "" if len({*self.widths}) == 1 else ", its first layer a new one,"
        source = "answers of the LLaVA as it was" if self.learns_from_original else "conversations"
        text = (
            f"{without_place(self.base_model)} with {tokens} tokens an image, those of "
            f"{without_place(self.tower_name)}; the projector{new}{language_model} learned from {source}"
        )
        if self.before is None or "agreement" not in state.measured:
            return f"{text}, not evaluated."
        return f"{text}: {state.measured['agreement']:.2%} of the answers' tokens are right, {self.before:.2%} before."

    def write_repository(self, folder: Path, state: TrainingState, weights: dict[str, torch.Tensor]):
        plain = None
        if self.quantize:
            plain = load_llava(self.base_model, "cpu", self.llava.dtype)[0].model.language_model
        weights = self.model.whole_state(plain)
        # Saving takes them out of it. A head that is the embeddings counts once.
        num_parameters = sum({weight.data_ptr(): weight.numel() for weight in weights.values()}.values())
        self.llava.save_pretrained(folder, state_dict=weights)
        self.new_processor.save_pretrained(folder)
        # A PaliGemma's processor ends the line itself.
        token = self.processor.image_token
        place = token if self.prompt.endswith("\n") else f"{token}\n"
        example = self.prompt.removesuffix("\n").format(image=place, question=self.args.questions[0])
        write_card(
            *(folder, self.llava, self.summary(state), self.data, self.run, state, self.base_model, self.metric),
            use=USE.format(prompt=example),
            num_parameters=num_parameters,
        )


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    trainer = make_trainer(parse(argv), argv)
    trainer.accelerator.print(trainer.outline())
    trainer.train()
    trainer.say_result("agreement")
    return 0


def make_trainer(groups: tuple, argv: list[str] | None) -> AlignLlavaTrainer:
    """Return the trainer for the options of the command; `argv` are its arguments, for the card."""
    parts, asking, data, optimization, run = groups
    choose_precision(parts.dtype, run)
    start_run(run, PROG, argv, list(groups))
    say_license(run, parts.model)
    state = PartialState()
    single = state.num_processes == 1
    check(parts.device_map, parts.device_map is None or single, "device_map", "none with several processes")
    train, evaluation, test = load_questions(data, asking, run.seed)
    dtype = getattr(torch, parts.dtype)
    original, processor = load_llava(parts.model, state.device, dtype, parts.quantize, parts.device_map)
    tower, _ = load_vision_model(parts.vision_model, "cpu")
    args = training_arguments(AlignLlavaArguments, run, data, parts, asking, optimization)
    return AlignLlavaTrainer(
        *(original, tower, args, train, evaluation, test, processor),
        tower_name=parts.vision_model,
        quantize=parts.quantize,
        run=run,
        data=data,
        base_model=parts.model,
    )


def choose_precision(dtype: str, run: RunArguments):
    """Set the run's mixed precision to that of the weights that stay as they are; raise a ValueError if another one
    was asked for."""
    if (needed := PRECISIONS[dtype]) and run.mixed_precision == "auto":
        run.mixed_precision = needed
    fits = needed in (None, run.mixed_precision)
    check(run.mixed_precision, fits, "mixed_precision", f"{needed}, as --dtype is {dtype}")


@dataclass
class Questions:
    """Images to ask about, None for none, and conversations about each, None where the LLaVA as it was is asked."""

    images: object
    conversations: list[list[tuple[str, str]]] | None = None


def as_questions(given) -> Questions:
    """Return `Questions` as they are, and images as questions to the LLaVA as it was. A trainer takes both."""
    return given if isinstance(given, Questions) else Questions(None if given is None else as_images(given))


def load_questions(data: DataArguments, asking: AnswerArguments, seed: int) -> tuple[Questions, Questions, Questions]:
    """The questions to train, to evaluate and to test on."""
    if not is_conversations(data.dataset):
        return tuple(Questions(images) for images in load_splits(data))
    train = read_conversations(data.dataset[0], asking.image_folder)
    data.evaluated = "all"
    if data.eval_split == NO_EVALUATION:
        data.evaluated = None
        return Questions(*train), Questions(None), Questions(None)
    if data.eval_dataset:
        check(data.eval_dataset, is_conversations(data.eval_dataset), "eval_dataset", "a file of conversations, too")
        evaluation = read_conversations(data.eval_dataset[0], asking.image_folder)
        return Questions(*train), Questions(*evaluation), Questions(None)
    data.evaluated = "a tenth, held back"
    train, held_back = hold_back_conversations(*train, seed)
    return Questions(*train), Questions(*held_back), Questions(None)


@torch.no_grad()
def count_image_tokens(llava, processor) -> int:
    """Number of tokens that the language model of a LLaVA reads of an image."""
    pixel_values = processor.image_processor(Image.new("RGB", (8, 8)), return_tensors="pt")["pixel_values"]
    pixel_values = pixel_values.to(input_device(llava), llava.dtype)
    return len(llava.get_image_features(pixel_values).pooler_output[0])


if __name__ == "__main__":
    run_as_program(main, PROG)
