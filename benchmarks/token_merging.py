"""ToMe, DiffRate and random patches in copies of a teacher, as baselines for students.

ToMe (github.com/facebookresearch/ToMe) and DiffRate (github.com/OpenGVLab/DiffRate) are imported from their checkouts.
Each of them changes a copy of the teacher in timm. `tune` trains such a copy, or searches for the number of tokens
that each block of DiffRate keeps. As in DiffRate's code, weights are frozen in this search.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import datasets
import timm.layers.helpers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import shared
from frugalvit.baselines import Baseline, Vision, as_teacher
from frugalvit.macs import count_macs
from frugalvit.modeling.hosts import Anatomy, read_anatomy
from frugalvit.modeling.hosts.running import (
    compute_hidden_states,
    evaluation_mode,
    make_example,
    relative_difference,
)
from frugalvit.modeling.image_format import ImageFormat
from frugalvit.modeling.inheritance import TOLERANCE
from frugalvit.modeling.modeling_patch_sparseformer import PatchSparseFormerModel
from frugalvit.training.files import atomic_file
from frugalvit.training.loading import choose_device


# Names of the layers of an encoder block in frugalvit, and their names in timm.
PARTS = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.o_proj": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
# In a search of DiffRate's rates, the loss has an additional term: `DIFFRATE_WEIGHT` times the squared difference
# of the multiply-accumulates from their target. Both are divided by the teacher's multiply-accumulates and
# multiplied by `DIFFRATE_SCALE`. DeiT-S has 4.6 G multiply-accumulates.
DIFFRATE_WEIGHT = 5
DIFFRATE_SCALE = 4.6
# Learning rate of DiffRate's search. The search trains only few parameters.
SEARCH_RATE = 0.03
BATCH_SIZE = 64


class Embedded(NamedTuple):
    """Embeddings of images, and logits of the teacher's classifier. `logits` is None if there is no classifier."""

    embedding: torch.Tensor
    logits: torch.Tensor | None


class PooledViT(VisionTransformer):
    """timm's `VisionTransformer` with the pooling of the teacher. In a mean over tokens, the weight of a token is its
    number of patches, as in the MAE models of ToMe and DiffRate."""

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
        """Return the number of patches in each token, `(batch, tokens, 1)`, or None if no numbers are recorded."""
        noted = getattr(self, "_tome_info", None) or getattr(self, "_diffrate_info", {})
        # During a search, DiffRate masks tokens instead of removing them.
        return noted["size"] * noted["mask"][..., None] if self.training else noted.get("size")


class MergedViT(nn.Module):
    """A `PooledViT` whose blocks merge tokens, with the inputs and outputs of a Transformers classifier.

    In training mode, DiffRate masks tokens instead of removing them, because its rates need gradients. In training
    mode, DiffRate also returns multiply-accumulates. Training mode is therefore on only if `searches` is True. The
    model has no dropout.
    """

    def __init__(self, vit: PooledViT, searches: bool = False):
        super().__init__()
        self.vit = vit
        self.searches = searches
        self.eval()

    def train(self, mode: bool = True):
        return super().train(mode and self.searches)

    def forward(self, pixel_values: torch.Tensor) -> Embedded | tuple[Embedded, torch.Tensor]:
        # `return_flop=False`: by default, a DiffRate model also returns multiply-accumulates.
        options = {"return_flop": False} if hasattr(self.vit, "_diffrate_info") and not self.training else {}
        if not options or (dtype := next(self.vit.parameters()).dtype) == torch.float32:
            return self.vit(pixel_values, **options)
        # DiffRate's attention weights are always in float32. Autocast is needed if the values have another dtype.
        with torch.autocast(pixel_values.device.type, dtype):
            return self.vit(pixel_values, **options)


def tome(teacher: Anatomy, checkout: str | Path, merged: int, trace_source: bool = False) -> MergedViT:
    """Return a copy of the teacher in which ToMe (Bolya et al. 2023) merges `merged` tokens in each block. ToMe's
    proportional attention is used, also in training. With `trace_source`, ToMe records the patches in each token."""
    vit = as_timm(teacher)
    with peer(checkout, "tome"):
        # ToMe was written for timm 0.4.12. Its blocks ignore newer features of timm. `vit` uses none of them.
        importlib.import_module("tome").patch.timm(vit, trace_source=trace_source)
    vit.r = merged
    return MergedViT(vit)


def diffrate(teacher: Anatomy, checkout: str | Path, rates: Path | None = None) -> MergedViT:
    """Return a copy of the teacher in which DiffRate (Chen et al. 2023) prunes and merges tokens. `rates` is a folder
    in which `tune` has saved the result of a search. Without `rates`, the model is prepared for a search."""
    vit = as_timm(teacher)
    with peer(checkout, "DiffRate"):
        # DiffRate was written for timm 0.4.5, and imports a module that newer versions have renamed.
        sys.modules.setdefault("timm.models.layers.helpers", timm.layers.helpers)
        importlib.import_module("DiffRate").patch.deit(vit)
    for block in vit.blocks:
        # DiffRate uses `drop_path`, which blocks of newer timm versions do not have. `vit` has no stochastic depth.
        block.drop_path = nn.Identity()
        block.register_forward_pre_hook(keep_sizes_positive)
    if rates:
        weights = load_file(rates / "model.safetensors")
        vit.load_state_dict({name: tensor for name, tensor in weights.items() if "_ddp." in name}, strict=False)
        update_rates(vit)
    return MergedViT(vit, searches=rates is None)


def tune(
    folder: Path,
    model: MergedViT,
    anatomy: Anatomy,
    images: datasets.Dataset,
    image_format: ImageFormat,
    *,
    loss: str,
    search_macs: float | None = None,
    **options,
) -> MergedViT:
    """Fine-tune a model or search DiffRate's rates, or load the weights of a finished run from `folder`.

    `loss` is `"cosine"` (cosine distance from the teacher's embedding) or `"labels"` (cross-entropy). In a search, the
    squared difference between the multiply-accumulates and `search_macs` is added to the loss. `options` are arguments
    of `fit`.
    """
    file, device = folder / "model.safetensors", choose_device()
    model.to(device).train()
    if not file.is_file():
        anatomy.source.to(device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("selected_probability") == model.searches)
        whole = count_macs(anatomy.source, image_format.size).macs_with_attention

        def total_loss(pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            outputs, macs = model(pixel_values) if search_macs else (model(pixel_values), None)
            value = loss_of(loss, outputs, anatomy, pixel_values, labels)
            if search_macs:
                value = value + DIFFRATE_WEIGHT * ((macs - search_macs) * DIFFRATE_SCALE / whole) ** 2
            return value

        fit(model, images, image_format, total_loss, **options)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as aside:
            save_file(model.vit.state_dict(), aside)
    model.vit.load_state_dict(load_file(file))
    update_rates(model.vit)
    return model.eval()


def fit(
    model: nn.Module,
    images: datasets.Dataset,
    image_format: ImageFormat,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    learning_rate: float,
    epochs: int,
    warmup_epochs: float,
    scale: tuple[float, float],
    seed: int,
    bf16: bool = False,
):
    """Minimize `loss(pixel_values, labels)` by AdamW on random crops. `scale` is the range of relative crop areas."""
    torch.manual_seed(seed)
    loader = DataLoader(
        shared.Views(images, shared.cropped(image_format, scale)), BATCH_SIZE, shuffle=True, drop_last=True
    )
    optimizer, device = torch.optim.AdamW(param_groups_weight_decay(model, 0.05), learning_rate), choose_device()
    warmup_steps, steps = round(warmup_epochs * len(loader)), epochs * len(loader)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, warmup_steps, steps)
    for _ in range(epochs):
        for batch in tqdm(loader, leave=False):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                value = loss(batch["pixel_values"].to(device), batch["labels"].to(device))
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


def loss_of(loss: str, outputs: Embedded, anatomy: Anatomy, pixel_values: torch.Tensor, labels: torch.Tensor):
    if loss == "labels":
        return F.cross_entropy(outputs.logits.float(), labels)
    with torch.no_grad():
        target = anatomy.embed(pixel_values).float()
    return (1 - F.cosine_similarity(outputs.embedding.float(), target)).mean()


def merging(teacher: Anatomy, image_processor, checkout: str, merged: int) -> Baseline:
    model = tome(teacher, checkout, merged)
    return baseline(f"ToMe, {merged} a block", "ToMe, not tuned", model, teacher, image_processor)


def baseline(name: str, method: str, model: MergedViT, teacher: Anatomy, image_processor) -> Baseline:
    """Return a model with ToMe or DiffRate as a `Baseline` for `frugalvit.compare.compare`."""
    return Baseline(
        name=name,
        method=method,
        # A cast of `Vision` to another dtype also casts the classifier, whose input must have the same dtype.
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


def with_random_patches(anatomy: Anatomy, image_processor, patches: int, seed: int = 0, draws: int = 3) -> Baseline:
    """Return a `Baseline` in which the teacher embeds `patches` random patches of each image."""
    embed = RandomPatches(anatomy, patches, seed)
    return as_teacher(
        anatomy,
        name=f"{patches} random patches",
        method="teacher with random patches",
        model=Vision(anatomy.source, embed, anatomy.classifier),
        embed=embed,
        image_processor=image_processor,
        tokens=anatomy.num_prefix_tokens + patches,
        draws=draws,
    )


class RandomPatches:
    """A vision transformer that embeds only random patches of each image. Each call chooses new patches. Vision
    transformers with rotary position embeddings are not supported."""

    def __init__(self, anatomy: Anatomy, patches: int, seed: int):
        self.anatomy = anatomy
        self.patches = patches
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        with self.choosing():
            return self.anatomy.embed(pixel_values)

    def states(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens after the last block, `(batch, prefix + patches, hidden_size)`, and the indices of the
        kept patches, `(batch, patches)` int64."""
        with self.choosing():
            return compute_hidden_states(self.anatomy, pixel_values)[-1], self.kept

    @contextmanager
    def choosing(self):
        """Within this context, remove all but `self.patches` random patches of each image before the first block."""

        def leave_out(module, arguments, keywords):
            tokens = arguments[0] if arguments else keywords["hidden_states"]
            prefix = self.anatomy.num_prefix_tokens
            # Keep the patches with the largest random numbers. In this way, no patch is kept twice.
            noise = torch.rand(len(tokens), self.anatomy.num_patches, generator=self.generator)
            self.kept = noise.topk(self.patches).indices.to(tokens.device)
            patches = tokens[:, prefix:].gather(1, self.kept[..., None].expand(-1, -1, tokens.shape[-1]))
            tokens = torch.cat([tokens[:, :prefix], patches], dim=1)
            return ((tokens, *arguments[1:]), keywords) if arguments else ((), keywords | {"hidden_states": tokens})

        handle = self.anatomy.blocks[0].module.register_forward_pre_hook(leave_out, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


@torch.no_grad()
def as_timm(teacher: nn.Module | Anatomy) -> PooledViT:
    """Copy a vision transformer into a `PooledViT`. Layer scale is folded into the linear layers. A `ValueError` is
    raised if the copy's embeddings differ from the teacher's, for example because the teacher has register tokens."""
    anatomy = read_anatomy(teacher)
    projection = next(module for module in anatomy.model.modules() if isinstance(module, nn.Conv2d))
    blocks = [layer.state_dict() for layer in PatchSparseFormerModel.from_teacher(anatomy).layers]
    for block in blocks:
        fold_layer_scale(block)
    first = anatomy.blocks[0]
    vit = PooledViT(
        img_size=anatomy.image_size,
        patch_size=projection.kernel_size,
        num_classes=0 if anatomy.classifier is None else anatomy.classifier.out_features,
        embed_dim=projection.out_channels,
        depth=len(blocks),
        num_heads=first.attention.num_heads,
        mlp_ratio=len(first.mlp.up.weight) / projection.out_channels,
        norm_layer=functools.partial(nn.LayerNorm, eps=first.attention_norm.eps),
        final_norm=anatomy.norm is not None,
        no_embed_class=True,
    ).eval()
    vit.pooling, classifier = anatomy.pooling.mode, anatomy.classifier
    vit.head = None if classifier is None else nn.Linear(classifier.in_features, classifier.out_features)
    # For an image of zeros, the tokens before the first block are the position embeddings plus the projection's bias.
    with evaluation_mode(anatomy.model):
        tokens = compute_hidden_states(anatomy, torch.zeros_like(make_example(anatomy)[:1]))[0]
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
            qkv = torch.cat([block[f"attention.{letter}_proj.{name}"] for letter in "qkv"])
            weights[f"blocks.{index}.attn.qkv.{name}"] = qkv
    vit.load_state_dict(weights)
    images = make_example(anatomy)
    vit.to(images.device)
    with evaluation_mode(anatomy.model):
        value = relative_difference(vit(images).embedding, anatomy.embed(images))
    if not value < TOLERANCE:
        raise ValueError(f"timm's copy of {anatomy.name} gives embeddings that differ, relatively by {value:.1e}.")
    return vit


def fold_layer_scale(block: dict[str, torch.Tensor]):
    """Multiply the weights of linear layers by the layer scale that follows them. `block` is the state dict of an
    `EncoderLayer`, and is changed in place."""
    for scale, linear in (("attention_scale", "attention.o_proj"), ("mlp_scale", "mlp.fc2")):
        if scale in block:
            block[f"{linear}.weight"] = block[scale][:, None] * block[f"{linear}.weight"]
            block[f"{linear}.bias"] = block[scale] * block[f"{linear}.bias"]


def keep_sizes_positive(block: nn.Module, args):
    """Clamp token sizes to at least 1e-6, because attention takes their logarithm. DiffRate multiplies the size of a
    merged token by a similarity, which may be negative, and clamps sizes only during a search."""
    block._diffrate_info["size"] = block._diffrate_info["size"].clamp(min=1e-6)


def update_rates(vit: PooledViT):
    """Compute DiffRate's numbers of kept tokens from its weights. DiffRate's code does this only in training steps."""
    for module in vit.modules():
        if hasattr(module, "update_kept_token_number"):
            module.update_kept_token_number()


@contextmanager
def peer(checkout: str | Path, package: str):
    """Within this context, put a checkout on Python's import path. The checkout is removed from the path afterwards,
    because modules of the checkout may hide installed packages."""
    if not (Path(checkout) / package).is_dir():
        raise ValueError(f"{str(checkout)!r} is no checkout with a package {package!r}.")
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path.remove(str(checkout))
