"""Options of `frugalvit bootstrap`."""

from dataclasses import dataclass

from ...common.choices import FOCUSINGS, PLACEMENT_RULES, PLACEMENTS
from ..components.arguments import (
    ArgumentParser,
    DataArguments,
    RunArguments,
    argument,
    check,
    check_at_least,
    check_range,
    check_share,
)


PROG = "frugalvit bootstrap"

# What the command line leaves open. "paper" is made for 224 pixels, and students of 32 pixels learn slowly with it.
# "small" has a focusing stage of the paper's sampling points, half its iterations and mixed points, three quarters of
# its stem channels and bottleneck; large steps, tokens that are told what to hold, all blocks but one. "inherited" is
# for students that begin as their teacher at a lower resolution, which large steps destroy.
RECIPES = {
    "paper": {
        "config_overrides": "",
        "truncate": 1 / 3,
        "crop_scale": [0.5, 1.0],
        "token_loss_weight": 0.0,
        "learning_rate": 2e-4,
        "inherited_learning_rate": 0.1,
        "warmup_epochs": 1.0,
        "repeats": 1,
        "batch_size": 128,
    },
    "small": {
        "config_overrides": "stem_channels=48,num_mixed_points=16,mixing_hidden_size=96,num_focusing_iterations=2",
        "truncate": 1.0,
        "crop_scale": [0.8, 1.0],
        "token_loss_weight": 4.0,
        "learning_rate": 6e-3,
        "inherited_learning_rate": 0.1,
        "warmup_epochs": 0.5,
        "repeats": 2,
        "batch_size": 64,
    },
    "inherited": {
        "config_overrides": "",
        "truncate": 0.0,
        "crop_scale": [0.5, 1.0],
        "token_loss_weight": 0.0,
        "learning_rate": 1e-3,
        "inherited_learning_rate": 0.02,
        "warmup_epochs": 0.1,
        "repeats": 1,
        "batch_size": 64,
    },
}


# Pixels of the largest images that "small" is for.
LARGEST_SMALL = 96


def check_blocks(arguments, *names: str):
    """Raise a ValueError unless counts and shares of blocks are in range, or None (not given)."""
    for name in names:
        value = getattr(arguments, name)
        fits = value is None or 0 <= value < 1 or (value >= 1 and float(value).is_integer())
        check(value, fits, name, "a share from 0 to below 1, or a count")


def by_recipe(name: str, help: str, besides: str = ""):
    """An argument whose default is the recipe's, with a help text that says so."""
    values = []
    for recipe, fields in RECIPES.items():
        value = fields[name]
        text = " ".join(map(str, value)) if isinstance(value, list) else f"{value:.3g}"
        values.append(f"{text} ({recipe})")
    return argument(None, f"{help} Default: {', '.join(values)}{besides}.")


@dataclass
class StudentArguments:
    """Teacher and student."""

    teacher: str = argument(
        help="Folder or hub id (@revision, too) of the vision transformer, CLIP, SigLIP, LLaVA, PaliGemma, Gemma 3 or "
        "LLaVA-OneVision to bootstrap from, or open_clip:MODEL:PRETRAINED."
    )
    student: str | None = argument(None, "Folder or hub id (@revision, too) of a SparseFormer to continue from.")
    recipe: str | None = argument(
        None,
        "Whose defaults apply, where an argument below has one for each. Default: inherited with --focusing "
        f"inherited, else small for teachers of up to {LARGEST_SMALL} pixels without --student, else paper.",
        choices=[*RECIPES],
    )
    focusing: str = argument(
        "paper",
        "paper: a focusing stage that is learned from random weights. inherited: the teacher's patch embedding at the "
        "cells of a grid, so that the student starts as its teacher at a lower resolution.",
        choices=FOCUSINGS,
    )
    placement: str = argument(
        "grid",
        "With --focusing inherited, grid: tokens look at the cells of a grid. content: at cells of several sizes, "
        "small where an image has detail. Such students have 4, 7, 10 … tokens; other counts are rounded down.",
        choices=PLACEMENTS,
    )
    placement_rule: str = argument(
        "detail", "With --placement content, what says which cells are made smaller.", choices=PLACEMENT_RULES
    )
    num_latent_tokens: int | None = argument(
        None, "Latent tokens, [CLS] not counted. Default: a quarter of the teacher's with [CLS], or --student's."
    )
    elastic_token_counts: list[int] | None = argument(
        None,
        "Counts of latent tokens that one student is to serve, for example 16 36 64: a call chooses. Each step trains "
        "the largest, the smallest and two others. Default: --student's.",
    )
    image_size: int | None = argument(None, "Pixels of the student's images. Default: the teacher's, or --student's.")
    config_overrides: str = argument(
        "",
        "The student's configuration, for example stem_channels=32; besides, of the recipe small, "
        f"{RECIPES['small']['config_overrides']}.",
    )
    upsampler_hidden_size: int | None = argument(
        None,
        "Make a backbone (SparseFormerBackbone), whose map convolutions of this width refine, for example 128. With "
        "--dense-loss-weight, which trains them together with the tokens. Default: none, or --student's.",
    )
    truncate: float | None = by_recipe("truncate", "Leading blocks left out: a share of the teacher's, or a count.")
    tune: float | None = argument(
        None,
        "Blocks to tune, from the first inherited one: a share of the teacher's, or a count. Default: 0.333, with "
        "--focusing inherited all.",
    )
    tune_all: bool = argument(False, "Tune every inherited block.")
    inherit_blocks: bool = argument(True, "Inherit the teacher's blocks, or its classifier alone.")
    break_ties: bool = argument(
        True,
        "Move initial RoIs apart that are equal, which the paper and its code leave; --focusing inherited has none.",
    )
    attn_implementation: str | None = argument(
        None, "The student's attention in training. Default: eager on CPUs, whose fused attention goes back slowly."
    )
    trust_remote_code: bool = argument(False, "Run code that comes with the teacher.")
    compile_teacher: bool = argument(False, "Compile the teacher (torch.compile).")

    def __post_init__(self):
        fits = self.placement == "grid" or self.focusing == "inherited" or self.student is not None
        check(self.placement, fits, "placement", "grid without --focusing inherited or --student")
        check_at_least(self, 1, "num_latent_tokens", "image_size", "upsampler_hidden_size")
        if self.elastic_token_counts is not None:
            counts = self.elastic_token_counts = sorted({*self.elastic_token_counts})
            check(counts, len(counts) > 1 and counts[0] > 0, "elastic_token_counts", "two or more counts from 1")
            fits = self.num_latent_tokens in (None, counts[-1])
            check(self.num_latent_tokens, fits, "num_latent_tokens", f"--elastic-token-counts' largest, {counts[-1]}")
            self.num_latent_tokens = counts[-1]
        check_blocks(self, "truncate", "tune")


@dataclass
class AlignmentArguments:
    """The losses that align student and teacher, and the views of images."""

    loss: str = argument(
        "cosine", "cosine: of the final embeddings (eq. 5). kl: of the class distributions.", choices=["cosine", "kl"]
    )
    temperature: float = argument(3.0, "Of both distributions, for --loss kl.")
    label_loss_weight: float = argument(0.0, "Weight of an added cross-entropy with the labels.")
    token_loss_weight: float | None = by_recipe(
        "token_loss_weight",
        "Weight of an added distance of each token from the teacher's where it looks.",
        ", 0 with --teacher-cache",
    )
    token_layers: list[int] | None = argument(
        None, "Layers of these tokens, -1 for the last; a LLaVA reads -2. Default: all, the first one's inputs, too."
    )
    token_distance: str = argument(
        "normalized",
        "normalized: of LayerNorm-ed tokens. raw: of tokens as they are, which a LLaVA reads.",
        choices=["normalized", "raw"],
    )
    dense_loss_weight: float = argument(
        0.0,
        "Weight of an added distance of the student's feature map from the teacher's, cell by cell, for heads that "
        "read maps. Of what distinguishes an image's cells, it is 1 minus the cosine, and a tenth of the squared log "
        "of how many times as long vectors are.",
    )
    dense_layers: list[int] | None = argument(
        None, "Layers of these maps, from the last, -1, backwards; name those that a head reads. Default: -1."
    )
    elastic_loss_weight: float = argument(
        0.0,
        "With --elastic-token-counts, weight of an added distance of each token from those of the largest count where "
        "it looks.",
    )
    crop_scale: list[float] | None = by_recipe("crop_scale", "Lowest and highest share of the area that a crop shows.")
    crop_ratio: list[float] = argument([3 / 4, 4 / 3], "Lowest and highest aspect ratio of a crop.")
    flip: float = argument(0.5, "Probability of a horizontal flip.")
    zoom_out: float = argument(
        1.0,
        "Half of the images are put on a canvas, whose sides are up to so many times theirs: objects become smaller.",
    )
    canvas_images: float = argument(
        0.0, "With --zoom-out, share of these canvases that show another image of the data set; others are plain."
    )
    view_epochs: int | None = argument(
        None, "Epochs after which the views of an image come again, and with them what --teacher-cache knows."
    )
    teacher_cache: str | None = argument(
        None,
        "Folder for the teacher's embeddings, and with --dense-loss-weight its maps in bfloat16: what another run, or "
        "an earlier epoch, left there is used again.",
    )

    def __post_init__(self):
        check_at_least(self, 1, "view_epochs")
        if self.teacher_cache and self.token_loss_weight:
            raise ValueError("--teacher-cache keeps no tokens, which --token-loss-weight needs.")
        check(self.temperature, self.temperature > 0, "temperature", "a positive number")
        check_share(self, "flip", "canvas_images")
        check_at_least(self, 0, "label_loss_weight", "elastic_loss_weight", "token_loss_weight", "dense_loss_weight")
        check(self.zoom_out, 1 <= self.zoom_out <= 100, "zoom_out", "1 to 100")
        fits = self.canvas_images == 0 or self.zoom_out > 1
        check(self.canvas_images, fits, "canvas_images", "0 without --zoom-out above 1")
        check_range(self, "crop_scale", "crop_ratio")


@dataclass
class ScheduleArguments:
    """An optimizer; a warm-up in which inherited weights stay as they are, then half a cosine."""

    learning_rate: float | None = by_recipe("learning_rate", "Highest learning rate.", ", a quarter with --student")
    inherited_learning_rate: float | None = by_recipe(
        "inherited_learning_rate", "That of inherited weights, relative to --learning-rate."
    )
    weight_decay: float = argument(0.05, "Weight decay; none on biases, norms, RoIs, token embeddings and [CLS].")
    optimizer: str = argument("adamw", "adamw, or muon, for devices that are fast at bf16.", choices=["adamw", "muon"])
    warmup_epochs: float | None = by_recipe("warmup_epochs", "Epochs of warm-up.", ", 0 with --student")
    repeats: int | None = by_recipe("repeats", "Steps on every batch, for which the teacher runs once.")

    def __post_init__(self):
        check_at_least(self, 1, "repeats")
        check_at_least(self, 0, "weight_decay", "inherited_learning_rate", "warmup_epochs")
        if self.learning_rate is not None:
            check(self.learning_rate, self.learning_rate > 0, "learning_rate", "a positive number")


@dataclass
class BootstrapRunArguments(RunArguments):
    """How long, how and where to train."""

    epochs: int | None = argument(None, "Epochs. Default: 20, or 5 with --student.")
    batch_size: int | None = by_recipe(
        "batch_size", "Images of one optimizer step, over all processes and accumulation steps."
    )
    compare: bool = argument(True, "Measure images a second of student and teacher at the end.")


GROUPS = [StudentArguments, AlignmentArguments, DataArguments, ScheduleArguments, BootstrapRunArguments]


def make_parser() -> ArgumentParser:
    return ArgumentParser(
        GROUPS,
        PROG,
        "Bootstrap a SparseFormer from a vision transformer, without labels. (A BootstrappedViT is another method's: "
        "`frugalvit joint` trains it.)",
    )


def parse(argv: list[str] | None = None) -> tuple:
    return make_parser().parse(argv)
