"""Options of `frugalvit joint`."""

from dataclasses import dataclass

from ...common.choices import INITIALIZATIONS, JOINT_VARIANTS, OPTIMIZERS, REFERENCE
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


PROG = "frugalvit joint"
# The reference's clipping of the ViT's gradient; for Joint- and Shared-S it has none.
CLIPPING = {"joint-base": 2.0, "shared-base": 0.1}


@dataclass
class TwinArguments:
    """The two models and what they teach each other."""

    variant: str = argument("joint-small", "The paper's models.", choices=JOINT_VARIANTS)
    vit: str = argument("", "Other values of the ViT's configuration, for example image_size=32,patch_size=4.")
    agent: str = argument("", "Other values of the agent's, for example patch_size=4.")
    config_overrides: str = argument("", "Other values of the pair's, for example hint_weight=5,temperature=2.")
    without_hint_at: list[float] = argument(
        [], "Relative depths, above 0 to 1, where tokens get no hint: 1 is the last block."
    )
    initialization: str = argument(
        REFERENCE,
        "reference, of both models, as the paper's code has it; default, Transformers' and PyTorch's own; or that and "
        "another start of the ViT's attention.",
        choices=[REFERENCE, "default", *INITIALIZATIONS],
    )
    initialization_options: str = argument("", "Arguments of frugalvit.initialize_attention_.")
    attn_implementation: str | None = argument(
        None, "eager, sdpa, …; default: eager on CPUs, whose fused attention goes back slowly, or else the model's."
    )

    def __post_init__(self):
        for depth in self.without_hint_at:
            check(depth, 0 < depth <= 1, "without_hint_at", "numbers above 0, to 1")


@dataclass
class LearningArguments:
    """How they learn: views of the images, and the optimizer."""

    crop: str = argument(
        "padded",
        "padded: a crop from the padded image, for small images. resized: a random part, resized.",
        choices=["padded", "resized"],
    )
    crop_scale: list[float] = argument([0.6, 1.0], "Lowest and highest share of the area for --crop resized.")
    crop_size: int | None = argument(
        32, "Pixels of the images when they are padded and cropped, before they are resized for the model."
    )
    crop_padding: int = argument(4, "Pixels of padding on each side.")
    padding_mode: str = argument("constant", "What they show: the image, or black.", choices=["reflect", "constant"])
    flip: float = argument(0.5, "Probability of a horizontal flip.")
    optimizer: str = argument(
        "adamw",
        "adamw; muon, for devices that are fast at bf16; sam, adamw that seeks flat minima.",
        choices=[*OPTIMIZERS],
    )
    sam_rho: float = argument(0.05, "How far --optimizer sam looks; the reference: 0.1.")

    def __post_init__(self):
        check_share(self, "flip")
        check_at_least(self, 0, "crop_padding", "sam_rho")
        check_at_least(self, 1, "crop_size")
        check_range(self, "crop_scale")


@dataclass
class JointOptimizerArguments(OptimizerArguments):
    """An optimizer for both models, and its schedule."""

    warmup_epochs: float = argument(0.0, "Epochs of linear warm-up from 0.")


@dataclass
class JointRunArguments(RunArguments):
    """How long, how and where to train."""

    epochs: int = argument(240, "Epochs, in whose steps the weight of the hints decays linearly to 0.")
    batch_size: int = argument(64, "Images of one optimizer step, over all processes and accumulation steps.")
    max_grad_norm: float | None = argument(
        None,
        "Clip the ViT's gradient to this norm; 0 does not. Default: the reference's, 2 for joint-base, 0.1 for "
        "shared-base, 0 for the small ones.",
    )


GROUPS = [TwinArguments, DataArguments, LearningArguments, JointOptimizerArguments, JointRunArguments]


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        GROUPS,
        PROG,
        "Train a BootstrappedViT: a ViT together with an agent CNN, from which it learns its biases (Zhang et al., "
        "Bootstrapping ViTs).",
    )


def parse(argv: list[str] | None = None) -> tuple:
    return make_parser().parse(argv)
