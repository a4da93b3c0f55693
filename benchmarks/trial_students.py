"""Parts that were tried in students with an inherited start and are not in the model family: tokens that show a larger
context, second looks at the image between blocks, and patches of fewer points.

Hooks put them into a student, so that `frugalvit bootstrap` trains it as any other. Before training, context tokens
attend as further patches would, second looks change nothing, and patches of fewer points change the outputs.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoImageProcessor

from frugalvit import SparseFormerForImageClassification
from frugalvit.common.loading import load_image_classifier
from frugalvit.configuration.configuration_base import pair
from frugalvit.modeling import inheritance
from frugalvit.modeling.focusing import adjust_rois
from frugalvit.modeling.layers import in_float32
from frugalvit.modeling.modeling_sparseformer import SparseFormerModel
from frugalvit.modeling.pyramid import GridImage, grid_rois, points_in, sample_features
from frugalvit.training import bootstrap


class ContextTokens(nn.Module):
    """Tokens of a coarser grid. They see the whole image at fewer pixels and attend with the others, but are not
    pooled. The student's own layer embeds them, and its positions, interpolated, are theirs."""

    def __init__(self, base: SparseFormerModel, grid: tuple[int, int]):
        super().__init__()
        self.grid, self.image_at = grid, GridImage(pair(base.config.patch_size))
        self.token_embedding = nn.Parameter(base.latents.on_grid(grid)[0].detach().clone())

    def hang_into(self, base: SparseFormerModel, images: dict):
        count = math.prod(self.grid)

        def join(layer, args):
            hidden_states, *others = args
            rois = grid_rois(self.grid).to(hidden_states.device).unsqueeze(0)
            embedding = self.token_embedding.unsqueeze(0)
            image = self.image_at(images["pixel_values"], self.grid)
            embedded, _ = base.final_focusing_layer.sampling(embedding, rois, image)
            return torch.cat([hidden_states, (embedding + embedded).to(hidden_states.dtype)], dim=1), *others

        def leave(layer, args, hidden_states):
            return hidden_states[:, :-count]

        base.layers[0].register_forward_pre_hook(join)
        base.layers[-1].register_forward_hook(leave)


class SecondLook(nn.Module):
    """Before a block, each token samples the image again, and a linear layer, which is zero at first, adds the sample.

    Args:
        base (`SparseFormerModel`): The model that it is added to.
        block (`int`): The block's number, from 0.
        moves (`bool`): The token moves its RoI before, by a layer that is zero at first; else the RoI stays.
        scale (`float`): The RoI's sides as shares of what they were.
    """

    def __init__(self, base: SparseFormerModel, block: int, moves: bool, scale: float = 1.0):
        super().__init__()
        width = base.config.hidden_size
        self.block = block
        self.image_at = GridImage(pair(base.config.patch_size))
        self.sampling = copy.deepcopy(base.final_focusing_layer.sampling)
        self.norm, self.deltas = nn.LayerNorm(width), nn.Linear(width, 4)
        self.out_proj = nn.Linear(width, width)
        for layer in (self.deltas, self.out_proj):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.deltas.bias[2:] = math.log(scale)
        self.deltas.requires_grad_(moves)
        self.norm.requires_grad_(moves)

    def hang_into(self, base: SparseFormerModel, images: dict):
        def look(layer, args):
            hidden_states, *others = args
            prefix = base.config.num_prefix_tokens
            front, tokens = hidden_states[:, :prefix], hidden_states[:, prefix:]
            rois = images["rois"] = adjust_rois(images["rois"], self.deltas(self.norm(tokens)))
            grid = base.config.token_grid
            # RoIs of half the size are read from the image at twice the size, up to its own.
            sizes = [grid, tuple(2 * cells for cells in grid)]
            patches = read_patches(
                [self.image_at(images["pixel_values"], size) for size in sizes], rois, self.sampling
            )
            sampled, _ = self.sampling(tokens, rois, patches)
            return torch.cat([front, tokens + self.out_proj(sampled).to(tokens.dtype)], dim=1), *others

        base.layers[self.block].register_forward_pre_hook(look)


def read_patches(levels: list[torch.Tensor], rois: torch.Tensor, sampling: nn.Module) -> torch.Tensor:
    """The pixels in RoIs `(batch, tokens, 4)` of two images, one made for all tokens' cells and one twice as large,
    between which smaller RoIs interpolate: `(batch, tokens, channels * rows * columns)`."""
    points = points_in(rois, sampling.patch_size)
    coarse, fine = (sample_features(level, points, sampling.padding_mode) for level in levels)
    left_top, right_bottom = in_float32(rois).chunk(2, dim=-1)
    area = (right_bottom - left_top).prod(-1).abs().clamp(min=1e-12) * rois.shape[1]
    share = (-0.5 * torch.log2(area)).clamp(0, 1)[..., None, None]
    return torch.lerp(coarse, fine, share).transpose(2, 3).flatten(2)


# Parts by name, made for a student.
TRIALS: dict[str, Callable[[SparseFormerModel], list[nn.Module]]] = {
    "one context token": lambda base: [ContextTokens(base, (1, 1))],
    "four context tokens": lambda base: [ContextTokens(base, (2, 2))],
    "second look": lambda base: [SecondLook(base, 3, moves=False)],
    "second look, moving": lambda base: [SecondLook(base, 3, moves=True)],
    "second look, half as large": lambda base: [SecondLook(base, 3, moves=False, scale=0.5)],
    "second look, half as large, moving": lambda base: [SecondLook(base, 3, moves=True, scale=0.5)],
    "two more looks, moving": lambda base: [SecondLook(base, 3, True), SecondLook(base, 6, True)],
}


def hang_into(base: SparseFormerModel, trial: str):
    """Add a trial's parts to a student."""
    images = {}

    def remember(module, args, kwargs):
        images["pixel_values"] = kwargs["pixel_values"] if "pixel_values" in kwargs else args[0]

    def remember_rois(layer, args, outputs):
        images["rois"] = outputs[1]

    base.register_forward_pre_hook(remember, with_kwargs=True)
    base.final_focusing_layer.register_forward_hook(remember_rois)
    base.trial = nn.ModuleList(TRIALS[trial](base))
    for part in base.trial:
        part.hang_into(base, images)


@contextmanager
def students_with(trial: str | None) -> Iterator[None]:
    """Give students that `bootstrap` makes inside a trial's parts, which it takes for new weights."""
    if trial is None:
        yield
        return
    build_student, freeze = bootstrap.build_student, bootstrap.freeze

    def build(*args):
        student = build_student(*args)
        hang_into(student.base_model, trial)
        return student

    def freeze_inherited(student, *args):
        return freeze(student, *args) - {*student.base_model.trial.parameters()}

    with mock.patch.multiple(bootstrap, build_student=build, freeze=freeze_inherited):
        yield


def load_trial(folder: Path, trial: str | None) -> tuple[nn.Module, object]:
    """Load a student with a trial's parts, and its image processor, from a run's folder."""
    if trial is None:
        return load_image_classifier(folder, "cpu")
    model = SparseFormerForImageClassification(AutoConfig.from_pretrained(folder))
    hang_into(model.base_model, trial)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval(), AutoImageProcessor.from_pretrained(folder)


@contextmanager
def resampled_patches() -> Iterator[None]:
    """Let students that inherit patches inside have fewer points than their teacher's patches. Weights are resampled
    as by Beyer et al., *FlexiViT: One Model for All Patch Sizes*, equation 3."""
    with mock.patch.object(inheritance, "spread_weight", resample_weight):
        yield


def resample_weight(weight: torch.Tensor, patch_size: tuple[int, int], anatomy=None) -> torch.Tensor:
    """Resample weights `(hidden_size, channels, rows, columns)` to another number of rows and columns. Their products
    with resized patches are nearest to those with the patches themselves, if all pixels vary alike."""
    rows, columns = weight.shape[2:]
    pixels = torch.eye(rows * columns).view(-1, 1, rows, columns)
    resized = F.interpolate(pixels, patch_size, mode="bilinear", antialias=True).flatten(1)
    solve = functools.partial(torch.linalg.lstsq, resized)
    flat = weight.detach().float().flatten(2).flatten(0, 1).T
    return solve(flat).solution.T.reshape(*weight.shape[:2], *patch_size).to(weight)
