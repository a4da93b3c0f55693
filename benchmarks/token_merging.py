"""A vision transformer whose tokens are merged by the code of ToMe or DiffRate, and a trainer for it, like those of
`training/`.

    python benchmarks/token_merging.py --teacher FOLDER --tome CHECKOUT --merged 16 --loss cosine --dataset … \\
        --output OUT

Their code is imported from a checkout and patches a timm copy of the teacher. ToMe works off the shelf (`tome`).
DiffRate first searches how many tokens each block keeps (--search-macs), with frozen weights and with labels, as its
authors do. Then weights can be tuned (DiffRate: --rates FOLDER OF THE SEARCH), with --loss cosine as students are
bootstrapped: on the teacher's embeddings alone, from the same --teacher-cache.
"""

import functools
import importlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import timm.layers.helpers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from frugalvit.common.contender import Contender, Vision
from frugalvit.common.loading import load_vision_model
from frugalvit.common.macs import count_macs
from frugalvit.common.metrics import evaluate_classifier
from frugalvit.common.precision import hold_teacher
from frugalvit.common.splits import load_splits
from frugalvit.common.views import EvalView, ImageFormat
from frugalvit.modeling.hosts import Anatomy, read_anatomy
from frugalvit.modeling.hosts.anatomy import TOLERANCE, difference, evaluating, norm_eps
from frugalvit.modeling.inheritance import block_weights
from frugalvit.modeling.layers import divergence
from frugalvit.training.components.arguments import (
    ArgumentParser,
    DataArguments,
    OptimizerArguments,
    RunArguments,
    argument,
    check,
    check_at_least,
    run_as_program,
)
from frugalvit.training.components.augmentation import BootstrapView
from frugalvit.training.components.optimizers import optimizer_with_schedule
from frugalvit.training.components.runs import ImageTrainingArguments, start_run, training_arguments
from frugalvit.training.components.teacher_cache import TeacherCache
from frugalvit.training.trainer import ImageTrainer


PROG = "python benchmarks/token_merging.py"
# Of a block: our names of its parts, timm's.
PARTS = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.o_proj": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
# DiffRate adds 5 times the squared distance from the target in G; scaled as if all of the teacher were DeiT-S's 4.6 G.
DIFFRATE_WEIGHT, DIFFRATE_SCALE = 5, 4.6


@dataclass
class MergingArguments:
    """The model to fine-tune, and the views of images."""

    teacher: str = argument("checkpoints/cifar10-vit", "Folder or hub id (@revision, too) of a classifying ViT.")
    tome: str | None = argument(None, "Checkout of ToMe.")
    merged: int = argument(8, "Tokens that ToMe merges in each block.")
    diffrate: str | None = argument(None, "Checkout of DiffRate, instead of ToMe.")
    search_macs: float | None = argument(None, "Search DiffRate's rates for so many multiply-accumulates.")
    rates: str | None = argument(None, "Folder of the search whose rates DiffRate takes.")
    loss: str = argument(
        "labels",
        "labels: cross-entropy. teacher: divergence from its distribution. cosine: of its embedding.",
        choices=["labels", "teacher", "cosine"],
    )
    temperature: float = argument(3.0, "Of both distributions, for --loss teacher.")
    crop_scale: list[float] = argument([0.8, 1.0], "Lowest and highest share of the area that a crop shows.")
    view_epochs: int | None = argument(None, "Epochs after which the views of an image come again.")
    teacher_cache: str | None = argument(
        None, "Folder for the teacher's embeddings, for --loss cosine; that of a bootstrapping on the same views, too."
    )

    def __post_init__(self):
        check(self.tome, (self.tome is None) != (self.diffrate is None), "tome", "a checkout, or one by --diffrate")
        modes = (self.search_macs is None) != (self.rates is None)
        check(self.rates, self.tome is not None or modes, "rates", "a folder, or --search-macs instead")
        fits = self.teacher_cache is None or (self.loss == "cosine" and self.search_macs is None)
        check(self.teacher_cache, fits, "teacher_cache", "none but with --loss cosine, which needs embeddings alone")
        if self.view_epochs is not None:
            check_at_least(self, 1, "view_epochs")


class Embedded(NamedTuple):
    """A model's outputs for images.

    Args:
        embedding (`torch.Tensor`): `(batch, embedding_size)`, as a teacher's classifier reads it.
        logits (`torch.Tensor`, *optional*): `(batch, labels)`, where there is a classifier.
    """

    embedding: torch.Tensor
    logits: torch.Tensor | None


class PooledViT(VisionTransformer):
    """A timm VisionTransformer that pools as its teacher does. Tokens that stand for several count as often in the
    mean, as both peers have it in what they patch for MAE."""

    pooling = "cls"

    def forward_head(self, tokens: torch.Tensor) -> Embedded:
        embedding = tokens[:, 0]
        if self.pooling != "cls":
            patches, weights = tokens[:, 1:], self.token_weights()
            if weights is None:
                mean = patches.mean(1)
            else:
                mean = (patches * weights[:, 1:]).sum(1) / weights[:, 1:].sum(1).detach()
            embedding = mean if self.pooling == "latent_mean" else torch.cat([embedding, mean], dim=1)
        return Embedded(embedding, None if self.head is None else self.head(embedding))

    def token_weights(self) -> torch.Tensor | None:
        """The number of tokens that each one stands for, `(batch, tokens, 1)`, as the peer's code notes it."""
        noted = getattr(self, "_tome_info", None) or getattr(self, "_diffrate_info", {})
        # A search keeps all tokens, behind a mask.
        return noted["size"] * noted["mask"][..., None] if self.training else noted.get("size")


class MergedViT(nn.Module):
    """A `PooledViT` whose blocks merge tokens, called like Transformers' classifiers.

    It never goes into training mode unless it `searches`: there is no dropout, and DiffRate keeps all tokens in that
    mode, behind masks through which its rates learn; it then returns its multiply-accumulates besides.
    """

    def __init__(self, vit: PooledViT, searches: bool = False):
        super().__init__()
        self.vit, self.searches = vit, searches
        self.eval()

    def train(self, mode: bool = True):
        return super().train(mode and self.searches)

    def forward(self, pixel_values: torch.Tensor) -> Embedded | tuple[Embedded, torch.Tensor]:
        # DiffRate's counts multiply-accumulates unless it may not.
        options = {"return_flop": False} if hasattr(self.vit, "_diffrate_info") and not self.training else {}
        if not options or (dtype := next(self.vit.parameters()).dtype) == torch.float32:
            return self.vit(pixel_values, **options)
        # DiffRate's attention is in float32, whatever its values are.
        with torch.autocast(pixel_values.device.type, dtype):
            return self.vit(pixel_values, **options)


def tome(
    teacher: nn.Module | Anatomy, checkout: str | Path, merged: int, tuned: str | Path | None = None
) -> MergedViT:
    """A copy of a teacher in which ToMe (Bolya et al. 2023) merges tokens in each block.

    Args:
        teacher (`nn.Module` or `Anatomy`): A model that `as_timm` takes.
        checkout (`str` or `Path`): A checkout of github.com/facebookresearch/ToMe.
        merged (`int`): Tokens that each block merges away.
        tuned (`str` or `Path`, *optional*): Folder of a run of this training, whose weights it takes.

    Returns:
        `MergedViT`: Takes `(batch, 3, height, width)` and returns `Embedded`.

    Raises:
        ValueError: if there is no such checkout, or `as_timm` refuses the teacher.
    """
    vit = as_timm(teacher)
    apply_tome(vit, checkout, merged)
    return with_weights(vit, tuned)


def merging(teacher: Anatomy, image_processor, checkout: str, merged: int) -> Contender:
    """ToMe, by its authors' code, without training."""
    model = tome(teacher, checkout, merged)
    return contender(f"ToMe, {merged} a block", "ToMe, not tuned", model, teacher, image_processor)


def contender(name: str, method: str, model: MergedViT, teacher: Anatomy, image_processor) -> Contender:
    """A peer's model beside the teacher that it is made of, for `frugalvit.compare.compare`."""
    return Contender(
        name=name,
        method=method,
        # The classifier is cast with the model, and the embedding to what it takes.
        model=Vision(
            nn.ModuleList([model, teacher.classifier]),
            lambda images: model(images).embedding.to(images.dtype),
            teacher.classifier,
        ),
        embed=lambda images: model(images).embedding,
        image_processor=image_processor,
        image_size=teacher.image_size,
        classifier=teacher.classifier,
        id2label=teacher.labels["id2label"],
    )


def diffrate(
    teacher: nn.Module | Anatomy, checkout: str | Path, rates: str | Path, tuned: str | Path | None = None
) -> MergedViT:
    """A copy of a teacher in which DiffRate (Chen et al. 2023) prunes and merges tokens.

    Args:
        teacher (`nn.Module` or `Anatomy`): A model that `as_timm` takes.
        checkout (`str` or `Path`): A checkout of github.com/OpenGVLab/DiffRate.
        rates (`str` or `Path`): Folder of a search by this training.
        tuned (`str` or `Path`, *optional*): Folder of a run of this training with these rates, whose weights it takes.

    Returns:
        `MergedViT`: Takes `(batch, 3, height, width)` and returns `Embedded`.

    Raises:
        ValueError: if there is no such checkout, or `as_timm` refuses the teacher.
    """
    vit = as_timm(teacher)
    apply_diffrate(vit, checkout, rates)
    return with_weights(vit, tuned)


def with_weights(vit: PooledViT, tuned: str | Path | None) -> MergedViT:
    if tuned:
        vit.load_state_dict(load_last(tuned))
    return MergedViT(vit)


@dataclass
class MergingTrainingArguments(MergingArguments, OptimizerArguments, ImageTrainingArguments):
    """The trainer's arguments."""

    def __post_init__(self):
        for group in (MergingArguments, OptimizerArguments, ImageTrainingArguments):
            group.__post_init__(self)


class MergingTrainer(ImageTrainer):
    """Fine-tunes a `MergedViT`, or searches its rates.

    Args:
        model (`MergedViT`): The model that learns.
        args (`MergingTrainingArguments`): How it learns.
        anatomy (`Anatomy`): The teacher's anatomy.
        image_format (`ImageFormat`): The images that the teacher takes.
        train, evaluation, test (`datasets.Dataset`): Images.
        command: Arguments of `ImageTrainer` that a command gives.
    """

    def __init__(self, model, args, anatomy: Anatomy, image_format: ImageFormat, train, evaluation, test, **command):
        view = BootstrapView(image_format, scale=args.crop_scale)
        super().__init__(
            *(model, args),
            train=(train, view),
            evaluation=(evaluation, EvalView(image_format)),
            test=test,
            loader_options={"view_epochs": args.view_epochs},
            **command,
        )
        self.anatomy, self.cache = anatomy, None
        self.teacher_macs = count_macs(anatomy.source, image_format.size).macs_with_attention
        anatomy.source.to(self.accelerator.device)
        if args.teacher_cache:
            self.cache = TeacherCache(
                *(args.teacher_cache, self.accelerator, anatomy.source, anatomy.embedding_size, view, train, args.seed)
            )
        hold_teacher(self.accelerator, anatomy.source)

    def before_epoch(self, epoch: int):
        if self.cache:
            self.cache.open(self.loader.sampler.views_of(epoch))

    def make_optimizer(self) -> tuple:
        return optimizer_with_schedule(self.model, self.args, self.run.epochs, self.loader.steps_per_epoch)

    def ask_teacher(self, what, pixel_values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), self.accelerator.autocast():
            return what(pixel_values).float()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        args, pixel_values = self.args, inputs["pixel_values"]
        if args.search_macs:
            outputs, macs = model(pixel_values)
            excess = (macs - args.search_macs) * DIFFRATE_SCALE / self.teacher_macs
            return F.cross_entropy(outputs.logits, inputs["labels"]) + DIFFRATE_WEIGHT * excess**2
        outputs = model(pixel_values)
        if args.loss == "labels":
            return F.cross_entropy(outputs.logits, inputs["labels"])
        if args.loss == "teacher":
            target = self.ask_teacher(self.anatomy.run_classifier, pixel_values)
            return divergence(outputs.logits, target, args.temperature)
        embed = functools.partial(self.ask_teacher, self.anatomy.embed, pixel_values)
        target = self.cache(inputs["index"], embed) if self.cache else embed()
        return (1 - F.cosine_similarity(outputs.embedding.float(), target)).mean()

    def measure(self, model, loader) -> dict[str, float]:
        update_rates(self.accelerator.unwrap_model(model).vit)
        return evaluate_classifier(self.accelerator, model, loader)

    def write_repository(self, folder, state, weights):
        """Nothing: the model that counts is that of the last checkpoint, see `load_last`."""


def main(argv: list[str] | None = None) -> int:
    """Train as a command line says."""
    groups = [MergingArguments, DataArguments, OptimizerArguments, RunArguments]
    arguments = ArgumentParser(groups, PROG, __doc__.splitlines()[0]).parse(argv)
    merging, data, optimization, run = arguments
    start_run(run, PROG, argv, list(arguments))

    teacher, processor = load_vision_model(merging.teacher, "cpu")
    image_format = ImageFormat.from_processor(processor)
    anatomy = read_anatomy(teacher, image_format.size)
    if anatomy.classifier is None:
        raise ValueError(f"--teacher {merging.teacher} is no classifier, whose accuracy could be measured.")
    vit = as_timm(anatomy)
    if merging.tome:
        apply_tome(vit, merging.tome, merging.merged)
    else:
        apply_diffrate(vit, merging.diffrate, merging.rates)
    model = MergedViT(vit, searches=merging.search_macs is not None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("selected_probability") == model.searches)
    # It has no gradient where embeddings are aligned, which several processes do not take.
    vit.head.requires_grad_(not model.searches and merging.loss != "cosine")
    parts = load_splits(data, learns_labels=merging.search_macs is not None or merging.loss == "labels")
    args = training_arguments(MergingTrainingArguments, run, data, merging, optimization)
    MergingTrainer(model, args, anatomy, image_format, *parts, run=run, data=data).train()
    return 0


@torch.no_grad()
def as_timm(teacher: nn.Module | Anatomy) -> PooledViT:
    """A copy of a vision transformer as timm's model, for images of the size that it is read for. Layer scale is
    folded into the layers before it, as the peers' blocks have none.

    Args:
        teacher (`nn.Module` or `Anatomy`): A plain vision transformer with [CLS] alone in front of its patches, whose
            classifier, if it has one, reads that, the mean of the others, or both.

    Raises:
        ValueError: if it is another, or the copy's embeddings or logits differ.
    """
    anatomy = read_anatomy(teacher)
    purpose = "copy into timm"
    anatomy.require_plain(purpose, embeds=True)
    if (anatomy.num_class_tokens, anatomy.num_register_tokens) != (1, 0):
        raise anatomy.refusal(purpose, "the peers know [CLS] in front of the patches, no less and no more")
    if anatomy.pooling not in ("cls", "latent_mean", "cls_and_latent_mean") or anatomy.pool_before_norm:
        raise anatomy.refusal(purpose, f"the peers do not pool by {anatomy.pooling!r}, or normalize after it")
    projection = next((module for module in anatomy.model.modules() if isinstance(module, nn.Conv2d)), None)
    if projection is None or projection.kernel_size != projection.stride or anatomy.rotary or anatomy.pre_norm:
        raise anatomy.refusal(purpose, "expected a convolution of patches and added positions before the first block")
    blocks = [block_weights(block) for block in anatomy.blocks]
    first = anatomy.blocks[0]
    vit = PooledViT(
        img_size=anatomy.image_size,
        patch_size=projection.kernel_size,
        num_classes=0 if anatomy.classifier is None else anatomy.classifier.out_features,
        embed_dim=anatomy.hidden_size,
        depth=len(blocks),
        num_heads=first.attention.num_heads,
        mlp_ratio=len(first.mlp.up.weight) / anatomy.hidden_size,
        qkv_bias="attention.q_proj.bias" in blocks[0],
        norm_layer=functools.partial(nn.LayerNorm, eps=norm_eps(first.attention_norm)),
        final_norm=anatomy.norm is not None,
        no_embed_class=True,
    ).eval()
    vit.pooling, classifier = anatomy.pooling, anatomy.classifier
    vit.head = None if classifier is None else nn.Linear(classifier.in_features, classifier.out_features)
    # What a black image has before the first block, but for the bias: positions, interpolated where the model does.
    with evaluating(anatomy.model):
        tokens = anatomy.states(torch.zeros_like(anatomy.example()[:1]))[0]
    bias = 0 if projection.bias is None else projection.bias
    weights = {"cls_token": tokens[:, :1], "pos_embed": tokens[:, 1:] - bias}
    outer = {"patch_embed.proj": projection, "norm": anatomy.norm, "head": classifier}
    weights |= {
        f"{part}.{name}": tensor
        for part, module in outer.items()
        if module is not None
        for name, tensor in module.state_dict().items()
    }
    if projection.bias is None:
        weights["patch_embed.proj.bias"] = torch.zeros(projection.out_channels)
    for index, block in enumerate(blocks):
        for name in ("weight", "bias"):
            weights |= {f"blocks.{index}.{timm}.{name}": block[f"{ours}.{name}"] for ours, timm in PARTS.items()}
            if f"attention.q_proj.{name}" in block:
                qkv = torch.cat([block[f"attention.{letter}_proj.{name}"] for letter in "qkv"])
                weights[f"blocks.{index}.attn.qkv.{name}"] = qkv
    vit.load_state_dict(weights)
    vit.to(anatomy.device)
    check_copy(vit, anatomy)
    return vit


def check_copy(vit: PooledViT, anatomy: Anatomy):
    """Raise a ValueError unless a copy computes what was read, on two images of noise."""
    images = anatomy.example()
    with evaluating(anatomy.model):
        expected = {"embeddings": anatomy.embed(images)}
        if anatomy.classifier is not None:
            expected["logits"] = anatomy.run_classifier(images)
    for (what, theirs), ours in zip(expected.items(), vit(images), strict=False):
        if not (value := difference(ours, theirs)) < TOLERANCE:
            raise ValueError(f"timm's copy of {anatomy.name} gives {what} that differ, relatively by {value:.1e}.")


def apply_tome(vit: PooledViT, checkout: str | Path, merged: int, trace_source: bool = False):
    """Let ToMe merge so many tokens in each block; attention stays proportional to their sizes in training, too. With
    `trace_source`, it notes of which patches each token was made."""
    with peer(checkout, "tome"):
        # Written for timm 0.4.12, it still fits: our blocks lack what later ones may have and it leaves out.
        importlib.import_module("tome").patch.timm(vit, trace_source=trace_source)
    vit.r = merged


def apply_diffrate(vit: PooledViT, checkout: str | Path, rates: str | Path | None = None):
    """Let DiffRate prune and merge tokens, at the rates of a search, or those from which a search starts."""
    with peer(checkout, "DiffRate"):
        # Written for timm 0.4.5. Its CAFormer, which is imported with the rest, looks for a module that has moved,
        sys.modules.setdefault("timm.models.layers.helpers", timm.layers.helpers)
        importlib.import_module("DiffRate").patch.deit(vit)
    for block in vit.blocks:
        # and its blocks for a stochastic depth that timm has split in two; ours have none.
        block.drop_path = nn.Identity()
        block.register_forward_pre_hook(keep_sizes_positive)
    if rates:
        weights = load_last(rates)
        vit.load_state_dict({name: tensor for name, tensor in weights.items() if "_ddp." in name}, strict=False)
        update_rates(vit)


def keep_sizes_positive(block: nn.Module, args):
    """Keep sizes above 0, as attention takes their logarithm. DiffRate multiplies the size of a merged token by its
    similarity, which may be negative. Its search keeps sizes at 1 or more; its model after the search does not."""
    block._diffrate_info["size"] = block._diffrate_info["size"].clamp(min=1e-6)


def update_rates(vit: PooledViT):
    """Let DiffRate's modules take the rates from their weights, which they otherwise do in training steps alone."""
    for module in vit.modules():
        if hasattr(module, "update_kept_token_number"):
            module.update_kept_token_number()


def load_last(folder: str | Path) -> dict[str, torch.Tensor]:
    """Weights of a run's `vit` after its last epoch; choosing an epoch by its accuracy would favor models that
    vary."""
    last = max(Path(folder).glob("checkpoints/step-*"), default=None)
    if last is None:
        raise ValueError(f"{str(folder)!r} holds no run of this training; expected the --output of one.")
    return {name.removeprefix("vit."): tensor for name, tensor in load_file(last / "model.safetensors").items()}


@contextmanager
def peer(checkout: str | Path, package: str):
    """Import from a checkout inside, which has names such as `datasets` that must not be found there later."""
    if not (Path(checkout) / package).is_dir():
        raise ValueError(f"{str(checkout)!r} is no checkout with a package {package!r}.")
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path.remove(str(checkout))


if __name__ == "__main__":
    run_as_program(main, PROG)
