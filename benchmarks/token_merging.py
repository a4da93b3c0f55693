"""Fine-tune a vision transformer whose tokens are merged by the code of ToMe or DiffRate, a recipe like `training/`'s.

    python benchmarks/token_merging.py --tome CHECKOUT --merged 10 --output_dir OUT

Their code is imported from a checkout and patches a timm copy of a Transformers ViT. DiffRate first searches how many
tokens each block keeps (--search_macs), with frozen weights, then tunes the weights (--rates FOLDER OF THE SEARCH).
"""

import functools
import importlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import timm.layers.helpers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput

from frugalvit.modeling.hosts import read_anatomy
from frugalvit.modeling.inheritance import block_weights
from frugalvit.modeling.modeling_bootstrapped_vit import divergence
from frugalvit.training.arguments import (
    DataArguments,
    OptimizerArguments,
    RunArguments,
    argument,
    check,
    parse_arguments,
    run_as_program,
)
from frugalvit.training.augmentation import BootstrapView, EvalView, ImageFormat
from frugalvit.training.data import load_splits, make_loaders
from frugalvit.training.loading import load_image_classifier
from frugalvit.training.loop import fit, optimizer_with_schedule, prepare, start_accelerator
from frugalvit.training.macs import count_macs
from frugalvit.training.metrics import evaluate_classifier


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
    """What to fine-tune, on which views."""

    teacher: str = argument("checkpoints/cifar10-vit", "Folder or hub id of a ViT of Transformers.")
    tome: str | None = argument(None, "Checkout of ToMe.")
    merged: int = argument(8, "Tokens that ToMe merges in each block.")
    diffrate: str | None = argument(None, "Checkout of DiffRate, instead of ToMe.")
    search_macs: float | None = argument(None, "Search DiffRate's rates for so many multiply-accumulates.")
    rates: str | None = argument(None, "Folder of the search whose rates DiffRate takes.")
    loss: str = argument(
        "labels", "labels: cross-entropy. teacher: divergence from its distribution.", choices=["labels", "teacher"]
    )
    temperature: float = argument(3.0, "Of both distributions, for --loss teacher.")
    crop_scale: list[float] = argument([0.8, 1.0], "Lowest and highest share of the area that a crop shows.")

    def __post_init__(self):
        check(self.tome, (self.tome is None) != (self.diffrate is None), "tome", "a checkout, or one by --diffrate")
        modes = (self.search_macs is None) != (self.rates is None)
        check(self.rates, self.tome is not None or modes, "rates", "a folder, or --search_macs instead")


class MergedViT(nn.Module):
    """A timm VisionTransformer whose blocks merge tokens, called like Transformers' classifiers.

    It never goes into training mode unless it `searches`: there is no dropout, and DiffRate keeps all tokens in that
    mode, behind masks through which its rates learn.
    """

    def __init__(self, vit: VisionTransformer, searches: bool = False):
        super().__init__()
        self.vit, self.searches = vit, searches

    def train(self, mode: bool = True):
        return super().train(mode and self.searches)

    def forward(self, pixel_values):
        if self.training:
            return self.vit(pixel_values)
        # DiffRate's counts multiply-accumulates besides, if it may.
        options = {"return_flop": False} if hasattr(self.vit, "_diffrate_info") else {}
        return ImageClassifierOutput(logits=self.vit(pixel_values, **options))


def main(argv: list[str] | None = None) -> int:
    """Run the recipe with a command line's arguments."""
    groups = [MergingArguments, DataArguments, OptimizerArguments, RunArguments]
    arguments = parse_arguments(PROG, __doc__.splitlines()[0], groups, argv)
    merging, data, optimization, run = arguments
    accelerator = start_accelerator(run, PROG, argv, list(arguments))

    teacher, processor = load_image_classifier(merging.teacher, accelerator.device)
    vit = as_timm(teacher)
    if merging.tome:
        apply_tome(vit, merging.tome, merging.merged)
    else:
        apply_diffrate(vit, merging.diffrate, merging.rates)
    model = MergedViT(vit, searches=merging.search_macs is not None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("selected_probability") == model.searches)
    teacher_macs = count_macs(teacher, teacher.config.image_size).macs_with_attention

    image_format = ImageFormat.from_processor(processor)
    train_images, eval_images = load_splits(data)
    view = BootstrapView(image_format, scale=merging.crop_scale)
    loader, eval_loader = make_loaders(
        accelerator, data, run, (train_images, view), (eval_images, EvalView(image_format))
    )
    optimizer, scheduler = optimizer_with_schedule(model, optimization, run.epochs, loader.steps_per_epoch)
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler)

    def compute_loss(model, batch):
        if merging.search_macs:
            logits, macs = model(batch["pixel_values"])
            excess = (macs - merging.search_macs) * DIFFRATE_SCALE / teacher_macs
            return F.cross_entropy(logits, batch["labels"]) + DIFFRATE_WEIGHT * excess**2
        logits = model(batch["pixel_values"]).logits
        if merging.loss == "labels":
            return F.cross_entropy(logits, batch["labels"])
        with torch.no_grad():
            teacher_logits = teacher(batch["pixel_values"]).logits
        return divergence(logits, teacher_logits, merging.temperature)

    def evaluate(model):
        update_rates(vit)
        return evaluate_classifier(accelerator, model, eval_loader)

    fit(
        accelerator,
        run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        compute_loss=compute_loss,
        evaluate=evaluate,
        # The model that counts is that of the last checkpoint, see `load_last`.
        save=lambda folder, state, weights: None,
    )
    return 0


@torch.no_grad()
def as_timm(model) -> VisionTransformer:
    """A copy of a Transformers `ViTForImageClassification` as timm's model.

    Raises:
        ValueError: if its logits differ.
    """
    config, teacher, embeddings = model.config, read_anatomy(model), model.base_model.embeddings
    vit = VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        num_classes=config.num_labels,
        embed_dim=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        mlp_ratio=config.intermediate_size / config.hidden_size,
        qkv_bias=config.qkv_bias,
        norm_layer=functools.partial(nn.LayerNorm, eps=config.layer_norm_eps),
    ).eval()
    weights = {"cls_token": embeddings.cls_token, "pos_embed": embeddings.position_embeddings}
    outer = {
        "patch_embed.proj": embeddings.patch_embeddings.projection.state_dict(),
        "norm": teacher.norm.state_dict(),
        "head": teacher.classifier.state_dict(),
    }
    weights |= {f"{part}.{name}": tensor for part, tensors in outer.items() for name, tensor in tensors.items()}
    for index, block in enumerate(map(block_weights, teacher.blocks)):
        for name in ("weight", "bias"):
            weights |= {f"blocks.{index}.{timm}.{name}": block[f"{ours}.{name}"] for ours, timm in PARTS.items()}
            if f"attention.q_proj.{name}" in block:
                qkv = torch.cat([block[f"attention.{letter}_proj.{name}"] for letter in "qkv"])
                weights[f"blocks.{index}.attn.qkv.{name}"] = qkv
    vit.load_state_dict(weights)
    pixel_values = torch.randn(
        8, 3, *vit.patch_embed.img_size, generator=torch.Generator().manual_seed(0), device="cpu"
    ).to(model.device)
    vit.to(model.device)
    difference = (vit(pixel_values) - model(pixel_values).logits).abs().max().item()
    if not difference < 1e-4:
        raise ValueError(f"timm's copy of {type(model).__name__} gives logits that differ by {difference:.1e}.")
    return vit


def apply_tome(vit: VisionTransformer, checkout: str, merged: int):
    """Let ToMe merge so many tokens in each block; attention stays proportional to their sizes in training, too."""
    with peer(checkout, "tome"):
        # Written for timm 0.4.12, it still fits: our blocks lack what later ones may have and it leaves out.
        importlib.import_module("tome").patch.timm(vit)
    vit.r = merged


def apply_diffrate(vit: VisionTransformer, checkout: str, rates: str | Path | None = None):
    """Let DiffRate prune and merge tokens, at the rates of a search, or those from which a search starts."""
    with peer(checkout, "DiffRate"):
        # Written for timm 0.4.5. Its CAFormer, which is imported with the rest, looks for a module that has moved,
        sys.modules.setdefault("timm.models.layers.helpers", timm.layers.helpers)
        importlib.import_module("DiffRate").patch.deit(vit)
    for block in vit.blocks:
        # and its blocks for a stochastic depth that timm has split in two; ours have none.
        block.drop_path = nn.Identity()
    if rates:
        weights = load_last(rates)
        vit.load_state_dict({name: tensor for name, tensor in weights.items() if "_ddp." in name}, strict=False)
        update_rates(vit)


def update_rates(vit: VisionTransformer):
    """Let DiffRate's modules take the rates from their weights, which they otherwise do in training steps alone."""
    for module in vit.modules():
        if hasattr(module, "update_kept_token_number"):
            module.update_kept_token_number()


def load_last(folder: str | Path) -> dict[str, torch.Tensor]:
    """Weights of a run's `vit` after its last epoch; choosing an epoch by its accuracy would favor whoever varies."""
    last = max(Path(folder).glob("checkpoints/step-*"))
    return {name.removeprefix("vit."): tensor for name, tensor in load_file(last / "model.safetensors").items()}


@contextmanager
def peer(checkout: str, package: str):
    """Import from a checkout inside, which has names such as `datasets` that must not be found there later."""
    if not (Path(checkout) / package).is_dir():
        raise ValueError(f"{checkout!r} is no checkout with a package {package!r}.")
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path.remove(str(checkout))


if __name__ == "__main__":
    run_as_program(main, PROG)
