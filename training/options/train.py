"""Options of `frugalvit train`."""

from dataclasses import dataclass

from ...common.choices import CONTEXT_BROADCAST_POSITIONS, CONTEXT_BROADCASTS, INITIALIZATIONS, OPTIMIZERS, REFERENCE
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


PROG = "frugalvit train"


@dataclass
class ModelArguments:
    """The classifier to train."""

    model: str | None = argument(
        None, "Folder or hub id (owner/name@revision, too) of an image classifier to go on from."
    )
    model_type: str | None = argument(
        None,
        "Architecture to train from scratch, a model_type of Transformers or frugalvit. Default: vit; without "
        "--config-overrides a ViT-T for images of the size that the data set's first ones have.",
    )
    config_overrides: str = argument("", "Its configuration, for example image_size=32,patch_size=4,hidden_size=192.")
    initialization: str = argument(
        "default",
        "default, the architecture's own; of a ViT's attention; or reference, of a whole vit or agent_cnn, as "
        "`frugalvit joint` has it.",
        choices=["default", *INITIALIZATIONS, REFERENCE],
    )
    initialization_options: str = argument(
        "", "Arguments of frugalvit.initialize_attention_, for example kernel_size=5,value_init=mimetic."
    )
    context_broadcast: str | None = argument(
        None, "Context Broadcasting to insert into every block.", choices=[*CONTEXT_BROADCASTS]
    )
    context_broadcast_position: list[str] = argument(
        ["mlp_end"], "Where to insert it.", choices=[*CONTEXT_BROADCAST_POSITIONS]
    )
    context_broadcast_scale_init: float = argument(0.0, "Start of the scale of cb_s.")
    context_broadcast_blend: bool = argument(
        False, "Insert it with a learned blend, which starts as the model was: for trained models."
    )
    attn_implementation: str | None = argument(
        None, "eager, sdpa, …; default: eager on CPUs, whose fused attention goes back slowly, or else the model's."
    )
    image_size: int | None = argument(
        None,
        "Pixels of the images, for architectures that take any size and to go on from --model at another one.",
    )
    train_image_size: int | None = argument(
        None,
        "Pixels of training images where they are fewer than the model's, which then interpolates its positions: a "
        "quarter of the time at half of them, for the first epochs of fine-tuning.",
    )
    image_mean: list[float] = argument([0.5, 0.5, 0.5], "Mean of the channels, of values in 0..1, from scratch.")
    image_std: list[float] = argument([0.5, 0.5, 0.5], "Standard deviation of the channels, from scratch.")
    trust_remote_code: bool = argument(False, "Run code that comes with the model or the teacher.")

    def __post_init__(self):
        check_at_least(self, 1, "image_size", "train_image_size")


@dataclass
class LearningArguments:
    """How it learns; the defaults are for little data."""

    crop: str = argument(
        "padded",
        "padded: a crop from the padded image, for small images. resized: a random part, resized.",
        choices=["padded", "resized"],
    )
    crop_padding: int = argument(4, "Pixels of padding on each side for --crop padded.")
    padding_mode: str = argument("reflect", "What they show: the image, or black.", choices=["reflect", "constant"])
    crop_size: int | None = argument(
        None, "Pixels of the images when they are padded and cropped, before they are resized. Default: the model's."
    )
    crop_scale: list[float] = argument([0.08, 1.0], "Lowest and highest share of the area for --crop resized.")
    crop_ratio: list[float] = argument([3 / 4, 4 / 3], "Lowest and highest aspect ratio for --crop resized.")
    flip: float = argument(0.5, "Probability of a horizontal flip.")
    randaugment_layers: int = argument(2, "RandAugment's operations for an image; 0 turns it off.")
    randaugment_magnitude: int = argument(9, "RandAugment's strength, 0 to 30, of timm's 0 to 10.")
    erasing: float = argument(0.0, "Probability of erasing a rectangle.")
    augmentation: str = argument(
        "torchvision",
        "Whose RandAugment and erasing. timm: as DeiT trains, rand-m9-mstd0.5-inc1 and noise in erased rectangles; "
        "torchvision's are a third as strong and erase by the mean.",
        choices=["torchvision", "timm"],
    )
    repeated_augmentation: int = argument(1, "Views of an image in an epoch, which then has as many images fewer.")
    mixup: float = argument(0.2, "Mixup's Beta parameter; 0 turns it off.")
    cutmix: float = argument(0.0, "CutMix's Beta parameter; 0 turns it off.")
    label_smoothing: float = argument(0.1, "Share of the target that is spread over all classes.")
    optimizer: str = argument(
        "adamw",
        "adamw; muon, for devices that are fast at bf16; sam, adamw that seeks flat minima.",
        choices=[*OPTIMIZERS],
    )
    sam_rho: float = argument(0.05, "How far --optimizer sam looks.")
    drop_path: float = argument(0.0, "Probability of leaving a block's branch out, where the model has that.")
    distill_from: str | None = argument(None, "Folder or hub id (@revision, too) of a classifier to learn from.")
    distill_weight: float = argument(0.5, "Weight of its loss, the labels' loss has the rest.")
    distill_kind: str = argument(
        "soft", "soft: divergence from its distribution. hard: its best class is a label.", choices=["soft", "hard"]
    )
    distill_temperature: float = argument(1.0, "Temperature of both distributions in the divergence.")
    head_multiplier: float = argument(1.0, "The classifier's learning rate, in those of the last block.")
    layer_decay: float = argument(
        1.0, "Factor of the learning rate from a block to the one before it; 0.65 to 0.85 for pretrained models."
    )

    def __post_init__(self):
        check_share(self, "flip", "erasing", "label_smoothing", "drop_path", "distill_weight")
        check_at_least(self, 0, "crop_padding", "randaugment_layers", "mixup", "cutmix", "head_multiplier", "sam_rho")
        check(self.layer_decay, 0 < self.layer_decay <= 1, "layer_decay", "a number above 0, up to 1")
        check_at_least(self, 1, "repeated_augmentation", "crop_size")
        highest = 10 if self.augmentation == "timm" else 30
        fits = 0 <= self.randaugment_magnitude <= highest
        check(self.randaugment_magnitude, fits, "randaugment_magnitude", f"0 to {highest}")
        check(self.distill_temperature, self.distill_temperature > 0, "distill_temperature", "a positive number")
        check_range(self, "crop_scale", "crop_ratio")


GROUPS = [ModelArguments, DataArguments, LearningArguments, OptimizerArguments, RunArguments]


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        GROUPS,
        PROG,
        "Train an image classifier from scratch or go on from a checkpoint: the standard recipe for little data.",
    )


def parse(argv: list[str] | None = None) -> tuple:
    return make_parser().parse(argv)
