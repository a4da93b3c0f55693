"""Options of `frugalvit align-llava`."""

from dataclasses import dataclass

from ...common.choices import DEVICE_MAPS, QUANTIZATIONS
from ...common.prompts import PALIGEMMA_PROMPT, PROMPT, check_prompt
from ..components.arguments import (
    ArgumentParser,
    DataArguments,
    OptimizerArguments,
    RunArguments,
    argument,
    check,
    check_at_least,
    check_range,
    check_share,
)


PROG = "frugalvit align-llava"

PRECISIONS = {"float32": None, "bfloat16": "bf16", "float16": "fp16"}


QUESTIONS = ["What is in the image?", "Describe the image.", "What is this?"]


@dataclass
class LlavaArguments:
    """The LLaVA, the tower that it is to read, and the parts that learn."""

    model: str = argument(help="Folder or hub id (@revision, too) of a LLaVA in the style of 1.5 or a PaliGemma.")
    vision_model: str = argument(
        help="Folder or hub id of a SparseFormer that was bootstrapped from its tower, or, with a new first layer of "
        "the projector, from another vision transformer."
    )
    num_tokens: int | None = argument(None, "Latent tokens of the tower. Default: its own.")
    lora_rank: int = argument(
        0, "Rank of what is learned of the language model's matrices; 0 leaves them as they are."
    )
    dtype: str = argument(
        "float32",
        "Of the weights that stay as they are, and of those that are written. The ones that learn are float32.",
        choices=[*PRECISIONS],
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

    def __post_init__(self):
        check_at_least(self, 0, "lora_rank")
        check_at_least(self, 1, "num_tokens")


@dataclass
class AnswerArguments:
    """Questions about the images, and answers to them."""

    questions: list[str] = argument(QUESTIONS, "Questions, one of which is asked about each view of an image.")
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
    image_folder: str | None = argument(
        None, "Where images of conversations are. Default: the folder of the conversations."
    )

    def __post_init__(self):
        check(self.questions, all(self.questions) and bool(self.questions), "questions", "one text or more")
        if self.prompt is not None:
            check_prompt(self.prompt)
        check_at_least(self, 1, "answer_tokens")
        check_at_least(self, 0, "feature_loss_weight")
        check_share(self, "flip")
        check_range(self, "crop_scale")


@dataclass
class AlignmentOptimizerArguments(OptimizerArguments):
    """An optimizer with a warm-up and a schedule."""

    weight_decay: float = argument(0.0, "Weight decay; none on biases.")
    warmup_epochs: float = argument(0.03, "Epochs of linear warm-up from 0.")


@dataclass
class AlignmentRunArguments(RunArguments):
    """How long, how and where to train."""

    epochs: int = argument(1, "Epochs.")
    batch_size: int = argument(32, "Images of one optimizer step, over all processes and accumulation steps.")
    eval_batch_size: int = argument(32, "Images of one evaluation step, over all processes.")


GROUPS = [LlavaArguments, AnswerArguments, DataArguments, AlignmentOptimizerArguments, AlignmentRunArguments]


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        GROUPS,
        PROG,
        "Let a LLaVA learn to read a SparseFormer: the projector alone, without labels or with conversations.",
    )


def parse(argv: list[str] | None = None) -> tuple:
    return make_parser().parse(argv)
