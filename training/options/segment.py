"""Options of `frugalvit segment`."""

from dataclasses import dataclass

from ...common.choices import IGNORED
from ..components.arguments import (
    ArgumentParser,
    ImageArguments,
    OptimizerArguments,
    RunArguments,
    argument,
    check,
    check_at_least,
    check_range,
    check_share,
)


PROG = "frugalvit segment"


@dataclass
class SegmenterArguments:
    """The segmentation model to train."""

    model: str | None = argument(
        None, "Folder or hub id (@revision, too) of a bootstrapped SparseFormer or a segmentation model."
    )
    model_type: str | None = argument(None, "Architecture to train from scratch instead, a model_type.")
    config_overrides: str = argument("", "Its configuration, for example hidden_sizes=[32,64,160,256].")
    num_latent_tokens: int | None = argument(None, "Tokens of a SparseFormer, [CLS] not counted; 256 in the paper.")
    image_size: list[int] = argument([512], "Pixels of the crop, one number or height and width.")
    drop_path: float = argument(0.3, "Largest rate at which residual branches are left out.")
    trust_remote_code: bool = argument(False, "Run code that comes with the model.")

    def __post_init__(self):
        if (self.model is None) == (self.model_type is None):
            raise ValueError("expected either --model, to go on from, or --model-type, to train from scratch")
        check_at_least(self, 0, "drop_path")
        size = self.image_size
        check(size, len(size) in (1, 2) and min(size) >= 4, "image_size", "one number or two, at least 4")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return (self.image_size[0], self.image_size[-1])


@dataclass
class MaskedImageArguments(ImageArguments):
    """Images with masks to train and evaluate on."""

    dataset: list[str] = argument(
        help="datasets hub id, parquet files or folder of them, or a folder with images/ and annotations/."
    )
    mask_column: str | None = argument(None, "Name of the column of masks, where there are several.")
    num_labels: int | None = argument(None, "How many classes there are, where --class-names does not name them.")
    ignored_labels: list[int] = argument([], "Numbers in the masks that do not count, besides 255.")
    reduce_labels: bool = argument(False, "0 in the masks does not count, 1 is the first class (ADE20K).")

    def __post_init__(self):
        super().__post_init__()
        if self.class_names and self.num_labels not in (None, len(self.class_names)):
            raise ValueError(f"--num-labels is {self.num_labels}, --class-names has {len(self.class_names)}")
        if self.num_labels is not None:
            check(self.num_labels, 2 <= self.num_labels <= IGNORED, "num_labels", f"2 to {IGNORED}")
        for label in self.ignored_labels:
            check(label, 0 <= label <= IGNORED, "ignored_labels", "numbers from 0 to 255")


@dataclass
class AugmentationArguments:
    """Augmentation of images and masks."""

    scale: list[float] = argument([0.5, 2.0], "Shorter side of the resized image, in shorter sides of the crop.")
    max_share: float = argument(0.75, "Crops with more of one class are drawn anew.")
    flip: float = argument(0.5, "Probability of a horizontal flip.")
    distort: float = argument(0.5, "Probability of each change of brightness, contrast, saturation and hue.")

    def __post_init__(self):
        check_share(self, "max_share", "flip", "distort")
        check_range(self, "scale")


@dataclass
class SegmentOptimizerArguments(OptimizerArguments):
    """Optimizer and schedule."""

    learning_rate: float = argument(2e-5, "Highest learning rate, that of the last block.")
    weight_decay: float = argument(0.01, "Weight decay; none on biases, norms, positions and [CLS].")
    warmup_epochs: float = argument(0.0, "Epochs of linear warm-up, instead of --warmup-steps.")
    warmup_steps: int = argument(1500, "Steps of linear warm-up from 0.")
    lr_scheduler: str = argument("linear", "Schedule after the warm-up, a name of transformers.get_scheduler.")
    head_multiplier: float = argument(10.0, "The head's learning rate, in those of the last block.")
    layer_decay: float = argument(0.95, "Factor of the learning rate from a block to the one before it.")

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 0, "warmup_steps", "head_multiplier")
        check(self.layer_decay, 0 < self.layer_decay <= 1, "layer_decay", "a number above 0, up to 1")


@dataclass
class SegmentRunArguments(RunArguments):
    """How long, how and where to train."""

    epochs: int | None = argument(None, "Epochs. Default: as many as make 80,000 steps.")
    batch_size: int = argument(32, "Images of one optimizer step, over all processes and accumulation steps.")
    eval_batch_size: int = argument(16, "Images of one evaluation step, over all processes.")


GROUPS = [
    SegmenterArguments,
    MaskedImageArguments,
    AugmentationArguments,
    SegmentOptimizerArguments,
    SegmentRunArguments,
]


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        GROUPS,
        PROG,
        "Fine-tune a model for semantic segmentation: SparseFormers, and all of Transformers that have a class for "
        "it.",
    )


def parse(argv: list[str] | None = None) -> tuple:
    return make_parser().parse(argv)
