"""SparseFormer: a vision transformer whose few tokens look where they choose.

Gao et al., *SparseFormer: Sparse Visual Recognition via Limited Latent Tokens* (v1) and *Bootstrapping SparseFormers
from Vision Foundation Models* (CVPR 2024). The order of operations and every other difference between the two stand in
the configuration. Weights load from the authors' checkpoints through `frugalvit convert showlab`.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    ModelOutput,
    SemanticSegmenterOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_base import pair
from ..configuration.configuration_sparseformer import SparseFormerConfig, choose_grid
from .context_broadcast import ContextBroadcast, broadcast_layers, has_context_broadcast
from .dense import FeatureMaps, MapUpsampler
from .hub import HubModel, image_processor_config, import_from_package
from .layers import (
    MLP,
    GenericForImageClassification,
    SelfAttention,
    check_pixel_values,
    drop_path,
    in_float32,
    rotary_table,
)
from .placement import AttentionForecast, CellPyramid, ContentPlacement, cells_of, known_size
from .pyramid import GridImage, PatchSampling, grid_rois, sample_features
from .segmentation import LinearDecoder, SegmentationHead, semantic_segmentation_loss


logger = logging.get_logger(__name__)


@dataclass
class SparseFormerModelOutput(BaseModelOutputWithPooling):
    """Output of `SparseFormerModel`.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(batch, [CLS] + tokens, hidden_size)`):
            Tokens after the final LayerNorm.
        pooler_output (`torch.FloatTensor` of shape `(batch, hidden_size)`): [CLS] or the mean token, normalized.
        hidden_states (`tuple`, *optional*): Input of the first cortex block and the output of each block.
        attentions (`tuple`, *optional*): `(batch, heads, [CLS] + tokens, [CLS] + tokens)` of each cortex block.
        rois (`tuple`, *optional*, with `output_rois=True`):
            `(batch, tokens, 4)` float32 after every adjustment: left, top, right, bottom, 0 to 1 across the image,
            not clamped.
        sampling_points (`tuple`, *optional*, with `output_rois=True`):
            `(batch, tokens, points, 2)` float32 of every sampling: x and y, 0 to 1 across the image.
        focusing_hidden_states (`tuple`, *optional*, with `output_focusing_hidden_states=True`):
            `(batch, tokens, focusing_hidden_size)` after every focusing iteration.
        stem_features (`torch.FloatTensor`, *optional*, with `output_stem_features=True`):
            `(batch, stem_channels, height / 4, width / 4)`, what the tokens sample.
        attention_forecast (`torch.FloatTensor`, *optional*, with `output_attention_forecast=True`):
            `(batch, rows, columns)` float32 logits of the share of a teacher's attention that falls on each cell of
            the finest grid, where `placement_rule` is `"learned"`.
    """

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    stem_features: torch.FloatTensor | None = None
    attention_forecast: torch.FloatTensor | None = None


@dataclass
class SparseFormerBackboneOutput(BackboneOutput):
    """`BackboneOutput` with the extra outputs of `SparseFormerModelOutput`."""

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class SparseFormerImageClassifierOutput(ImageClassifierOutput):
    """`ImageClassifierOutput` with the extra outputs of `SparseFormerModelOutput`."""

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class SparseFormerAdaptiveOutput(ModelOutput):
    """Scores of images that were each classified with as many tokens as they needed.

    Args:
        logits (`torch.FloatTensor` of shape `(batch, num_labels)`): Scores, from the last count that was tried.
        num_tokens (`torch.LongTensor` of shape `(batch,)`): That count.
        confidence (`float`): Probability of the likeliest class from which on an image was done, 0 to 1.
        disagreement (`float`, *optional*): The largest share of images, 0 to 1, that get another label than from the
            calibration's reference, as the calibration promises; None where it did not choose the confidence.
    """

    logits: torch.FloatTensor | None = None
    num_tokens: torch.LongTensor | None = None
    confidence: float | None = None
    disagreement: float | None = None


@dataclass
class SparseFormerSemanticSegmenterOutput(SemanticSegmenterOutput):
    """`SemanticSegmenterOutput` with the extra outputs of `SparseFormerModelOutput`.

    Args:
        token_maps (`torch.FloatTensor`, *optional*, with `output_token_maps=True`):
            `(batch, tokens, …)` of the size of the logits, the share of each token in each pixel's scores; sums to 1.
    """

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    token_maps: torch.FloatTensor | None = None


@dataclass
class SparseFormerVisionModelWithProjectionOutput(ModelOutput):
    """`SparseFormerModelOutput` with `image_embeds`, `(batch, projection_dim)`, the projected `pooler_output`."""

    image_embeds: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    focusing_hidden_states: tuple[torch.FloatTensor, ...] | None = None


def initial_rois(num_tokens: int, counts: Sequence[int] = ()) -> torch.Tensor:
    """RoIs before any adjustment, `(num_tokens, 4)` as left, top, right, bottom.

    The first root**2 tokens, root = floor(sqrt(num_tokens)), get boxes of side 0.5 on a grid, x in the outer loop; the
    remaining ones see the whole image, and so do all tokens if there are fewer than 4 (the reference implementation
    divides by zero there). With `counts`, smaller numbers of tokens, the tokens of the first count are laid out so,
    and then those that each next count adds.
    """
    if counts:
        added = [high - low for low, high in zip([0, *counts], [*counts, num_tokens], strict=False)]
        return torch.cat([initial_rois(count) for count in added])
    rois = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(num_tokens, 1)
    root = math.isqrt(num_tokens)
    if root > 1:
        corner = torch.linspace(0, 0.5, root)
        left_top = torch.cartesian_prod(corner, corner)
        rois[: root**2] = torch.cat([left_top, left_top + 0.5], dim=1)
    return rois


def initial_sampling_offsets(num_points: int) -> torch.Tensor:
    """Offsets from the center of a RoI before training, `(num_points, 2)` as x, y.

    Cell centers of a square grid, x in the inner loop, or uniform in +-0.5 if `num_points` is no square.
    """
    root = math.isqrt(num_points)
    if root**2 != num_points:
        return torch.rand(num_points, 2) - 0.5
    center = (torch.arange(root) + 0.5) / root - 0.5
    return torch.cartesian_prod(center, center).flip(1)


# exp(8) is a factor of almost 3,000 in one adjustment; the bound keeps five of them finite in float32.
MAX_LOG_SCALE = 8.0


def adjust_rois(rois: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """Move and scale RoIs by normalized deltas (equations 2 and 3 of the bootstrapping paper), in float32.

    Args:
        rois (`torch.Tensor`): `(batch, tokens, 4)` as left, top, right, bottom.
        deltas (`torch.Tensor`): `(batch, tokens, 4)`: shift in units of width and height, log scale of both.
    """
    rois, deltas = in_float32(rois), in_float32(deltas)
    left_top, right_bottom = rois.chunk(2, dim=-1)
    shift, log_scale = deltas.chunk(2, dim=-1)
    size = (right_bottom - left_top).abs()
    center = (left_top + right_bottom) * 0.5 + shift * size
    half = 0.5 * size * log_scale.clamp(max=MAX_LOG_SCALE).exp()
    return torch.cat([center - half, center + half], dim=-1)


def locate_sampling_points(rois: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Place sampling points in RoIs, in float32.

    Offsets are standardized over the points of a token and divided by 3, so that nearly all points lie within half the
    RoI's (signed) size of its center.

    Args:
        rois (`torch.Tensor`): `(batch, tokens, 4)`.
        offsets (`torch.Tensor`): `(batch, tokens, points, 2)` as x, y.

    Returns:
        `torch.Tensor`: `(batch, tokens, points, 2)`, 0 to 1 across the image.
    """
    rois, offsets = in_float32(rois), in_float32(offsets)
    left_top, right_bottom = rois.unsqueeze(2).chunk(2, dim=-1)
    # ExecuTorch has no `var_mean`.
    variance, mean = offsets.var(dim=2, keepdim=True), offsets.mean(dim=2, keepdim=True)
    # The square root has no finite gradient at 0, where all points of a token coincide.
    offsets = (offsets - mean) / (3 * (variance.clamp(min=1e-12).sqrt() + 1e-5))
    return (left_top + right_bottom) * 0.5 + offsets * (right_bottom - left_top)


class ClipGradient(torch.autograd.Function):
    """Identity whose gradient is clamped to +-`bound`."""

    @staticmethod
    def forward(ctx, points, bound):
        ctx.bound = bound
        return points.view_as(points)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-ctx.bound, ctx.bound), None


def encode_rois(rois: torch.Tensor, hidden_size: int, kind: str = "reference") -> torch.Tensor:
    """Sinusoidal encoding of RoIs, `(batch, tokens, 4)` to `(batch, tokens, hidden_size)`, in float32.

    Supplement A.2 of the bootstrapping paper prints d/8 frequencies from 1 to 128, each with a sine and a cosine,
    interleaved: `kind="paper"`. The reference implementation, and so `kind="reference"`, spaces d/4 frequencies from 1
    to 128, takes the sine of the even and the cosine of the odd ones, and puts all sines of a coordinate before its
    cosines.
    """
    count = hidden_size // (8 if kind == "paper" else 4)
    frequencies = torch.linspace(0, math.log(128), count, device=rois.device).exp()
    angles = (in_float32(rois) * math.pi).unsqueeze(-1) * frequencies
    if kind == "paper":
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(2)
    return torch.cat([angles[..., 0::2].sin(), angles[..., 1::2].cos()], dim=-1).flatten(2)


class SparseFormerStem(nn.Module):
    """Early convolution: `(batch, num_channels, height, width)` to `(batch, stem_channels, height / 4, width / 4)`."""

    def __init__(self, config: SparseFormerConfig):
        super().__init__()
        self.convolution = nn.Conv2d(config.num_channels, config.stem_channels, kernel_size=7, stride=2, padding=3)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        pixel_values = pixel_values.to(self.convolution.weight.dtype)
        # Pooling, normalizing and sampling are several times faster where a pixel's channels lie side by side.
        pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)
        # The paper's ReLU comes before pooling; after it, the same costs a quarter.
        features = F.max_pool2d(self.convolution(pixel_values), kernel_size=3, stride=2, padding=1).relu()
        # LayerNorm over channels without parameters; sampling reads it in float32.
        features = in_float32(features.permute(0, 2, 3, 1))
        return F.layer_norm(features, features.shape[-1:], eps=1e-5).permute(0, 3, 1, 2)


def focusing_eps(config: SparseFormerConfig) -> float:
    """Epsilon of LayerNorms before the cortex."""
    eps = config.focusing_layer_norm_eps
    return config.layer_norm_eps if eps is None else eps


def cortex_norm(config: SparseFormerConfig) -> Callable[[int], nn.Module]:
    """Return a function that makes a norm of the cortex, given its width."""
    norm_class = nn.LayerNorm if config.norm_type == "layer_norm" else nn.RMSNorm
    return functools.partial(norm_class, eps=config.layer_norm_eps)


def resize_table(values: torch.Tensor, grid: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    """Interpolate values of the cells of a grid, `(cells, channels)`, for the cells of another one."""
    if grid == new:
        return values
    image = in_float32(values).unflatten(0, grid).permute(2, 0, 1).unsqueeze(0)
    resized = F.interpolate(image, new, mode="bicubic", antialias=True)
    return resized.squeeze(0).permute(1, 2, 0).flatten(0, 1).to(values)


def place_among(counts: Sequence[int], number: torch.Tensor) -> torch.Tensor:
    """The place, `()`, of the largest of increasing counts that is not above a number, `()`, else of the smallest."""
    return (torch.tensor(counts, device=number.device) <= number).sum().sub(1).clamp(min=0)


class SparseFormerLatents(nn.Module):
    """The learned tokens and RoIs that every image starts from, and [CLS] and registers, which join them before the
    cortex."""

    def __init__(self, config: SparseFormerConfig):
        super().__init__()
        self.num_latent_tokens = config.num_latent_tokens
        self.num_class_tokens = config.use_cls_token * config.num_class_tokens
        self.num_register_tokens = config.num_register_tokens
        self.grid = config.token_grid
        # Where tokens are placed by content, there is one for each cell that they can have.
        self.grids = config.cell_grids() if config.placement == "content" else None
        num_rois = sum(map(math.prod, self.grids)) if self.grids else config.num_latent_tokens
        num_embeddings = 1 if config.shared_token_embedding else num_rois
        self.token_embedding = nn.Parameter(torch.empty(num_embeddings, config.latent_size))
        rois = torch.empty(num_rois, 4, dtype=torch.float32)
        if self.grids:
            # Cells are cut out of the image, and do not move.
            self.register_buffer("initial_rois", rois)
        else:
            self.initial_rois = nn.Parameter(rois)
        self.cls_token = self.register_tokens = None
        if self.num_class_tokens:
            self.cls_token = nn.Parameter(torch.empty(self.num_class_tokens, config.hidden_size))
        if self.num_register_tokens:
            self.register_tokens = nn.Parameter(torch.empty(self.num_register_tokens, config.hidden_size))

    def forward(
        self,
        batch_size: int,
        num_tokens: int,
        grid: tuple[int, int] | None = None,
        cells: torch.Tensor | None = None,
        grids: list[tuple[int, int]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the first tokens, those of a grid, or those of cells (`at_cells`). These are tokens
        `(1, num_tokens, latent_size)` and RoIs `(1, num_tokens, 4)`, in float32, for any image, and [CLS] and
        registers, `(batch, prefix tokens, hidden_size)`."""
        if cells is not None:
            return *self.at_cells(cells, grids), self.prefix(batch_size)
        tokens, rois = self.token_embedding.expand(self.num_latent_tokens, -1), in_float32(self.initial_rois)
        if grid != self.grid:
            tokens, rois = self.on_grid(grid)
        # Copies instead of views: sharding (FSDP) frees a module's parameters once the module has run.
        return tokens[:num_tokens].repeat(1, 1, 1), rois[:num_tokens].repeat(1, 1, 1), self.prefix(batch_size)

    def prefix(self, batch_size: int) -> torch.Tensor | None:
        prefix = [token for token in (self.cls_token, self.register_tokens) if token is not None]
        return torch.cat(prefix).repeat(batch_size, 1, 1) if prefix else None

    def at_cells(self, cells: torch.Tensor, grids: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens `(batch, tokens, latent_size)` and RoIs `(batch, tokens, 4)` of cells of these grids, given by
        number, `(batch, tokens)`; a batch of 1 is for all images."""
        tokens, rois = self.token_embedding, in_float32(self.initial_rois)
        if self.grids is None:
            tokens, rois = (torch.cat(tables) for tables in zip(*map(self.on_grid, grids), strict=True))
        elif grids != self.grids:
            # Other grids have the positions of ours, finer ones than ours those of the finest.
            parts = tokens.split([math.prod(grid) for grid in self.grids])
            tables = [
                resize_table(parts[min(level, len(parts) - 1)], self.grids[min(level, len(parts) - 1)], grid)
                for level, grid in enumerate(grids)
            ]
            tokens, rois = torch.cat(tables), cells_of(grids).to(rois)
        return tokens[cells], rois[cells]

    def _apply(self, fn, recurse: bool = True):
        # RoIs stay float32 in models that are cast, as in those that are loaded in half precision.
        rois = self.initial_rois.detach()
        super()._apply(fn, recurse)
        if self.initial_rois.itemsize < torch.float32.itemsize:
            self.initial_rois.data = rois.to(self.initial_rois.device, torch.float32)
        return self

    @torch.no_grad()
    def break_ties(self, first: int = 0, std: float = 0.05):
        """Move apart the RoIs of tokens, from number `first` on, that start on the same RoI with the same embedding as
        another one.

        They would get equal gradients and stay copies of each other for good: 12 of the paper's 48 tokens.
        """
        embedding = self.token_embedding.expand(self.num_latent_tokens, -1).to(self.initial_rois)
        starts = torch.cat([self.initial_rois, embedding], dim=1)
        tied = (starts[first:, None] == starts).all(dim=-1).sum(dim=1) > 1
        rois = self.initial_rois[first:]
        rois[tied] += std * torch.randn_like(rois[tied])

    def on_grid(self, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, `(cells, latent_size)`, and RoIs, `(cells, 4)`, for another grid: tokens, and how far each
        RoI is from its cell, are interpolated."""

        moved = self.initial_rois - grid_rois(self.grid).to(self.initial_rois)
        moved = resize_table(moved, self.grid, grid)
        return resize_table(self.token_embedding, self.grid, grid), grid_rois(grid).to(moved) + moved

    @torch.no_grad()
    def resize_grid(self, grid: tuple[int, int]):
        """Keep the tokens and RoIs of another grid in the place of the present ones."""
        tokens, rois = self.on_grid(grid)
        self.initial_rois = nn.Parameter(rois, self.initial_rois.requires_grad)
        self.token_embedding = nn.Parameter(tokens, self.token_embedding.requires_grad)
        self.grid, self.num_latent_tokens = grid, len(rois)

    @torch.no_grad()
    def resize_tokens(self, num_latent_tokens: int):
        """Keep the first tokens as they are, drop the last or add new ones that start like those of a new model, but
        each on a RoI of its own."""
        kept = min(num_latent_tokens, self.num_latent_tokens)
        rois = initial_rois(num_latent_tokens - kept).to(self.initial_rois)
        self.initial_rois = nn.Parameter(torch.cat([self.initial_rois[:kept], rois]), self.initial_rois.requires_grad)
        if len(self.token_embedding) == self.num_latent_tokens:
            embedding = self.token_embedding
            # New tokens start as copies of the mean token: the cortex has seen nothing else.
            new = embedding.mean(0, keepdim=True).expand(num_latent_tokens - kept, -1)
            self.token_embedding = nn.Parameter(torch.cat([embedding[:kept], new]), embedding.requires_grad)
        self.num_latent_tokens = num_latent_tokens
        self.break_ties(first=kept)


class SparseFormerMixing(nn.Module):
    """Adaptive mixing: a token generates the two matrices that decode what it sampled.

    A channels x channels matrix, a mixed_points x points matrix, then one linear layer to the token width. v1 adds a
    bias and a GELU after each product, bootstrapped models have one GELU after both.
    """

    def __init__(self, config: SparseFormerConfig, hidden_size: int):
        super().__init__()
        self.shapes = (
            (config.stem_channels, config.stem_channels),
            (config.num_mixed_points, config.num_sampling_points),
        )
        bottleneck = config.mixing_hidden_size or hidden_size // 4
        self.layernorm = nn.LayerNorm(hidden_size, eps=focusing_eps(config))
        self.bottleneck = nn.Linear(hidden_size, bottleneck)
        self.generator = nn.Linear(bottleneck, sum(rows * columns for rows, columns in self.shapes))
        if config.mixing_bias:
            self.channel_bias = nn.Parameter(torch.empty(config.stem_channels))
            self.point_bias = nn.Parameter(torch.empty(config.num_mixed_points, 1))
        else:
            self.channel_bias = self.point_bias = None
        self.out_proj = nn.Linear(config.num_mixed_points * config.stem_channels, hidden_size)

    def forward(self, tokens: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Mix what each token sampled, `(batch, tokens, points, channels)`, by matrices made from the token,
        `(batch, tokens, hidden_size)` or a batch of 1 for all images, to `(batch, tokens, hidden_size)`."""
        parameters = self.generator(self.bottleneck(self.layernorm(tokens)))
        channel_matrix, point_matrix = (
            matrix.unflatten(-1, shape)
            for matrix, shape in zip(
                parameters.split([rows * columns for rows, columns in self.shapes], dim=-1), self.shapes, strict=True
            )
        )
        mixed = sampled.to(parameters.dtype) @ channel_matrix
        if self.channel_bias is not None:
            mixed = F.gelu(mixed + self.channel_bias).to(parameters.dtype)
        mixed = point_matrix @ mixed
        if self.point_bias is not None:
            mixed = mixed + self.point_bias
        return self.out_proj(F.gelu(mixed).flatten(2))


class SparseFormerSampling(nn.Module):
    """Each token samples features at points in its RoI and mixes them."""

    def __init__(self, config: SparseFormerConfig, hidden_size: int):
        super().__init__()
        self.num_points = config.num_sampling_points
        self.padding_mode = config.sampling_padding_mode
        self.clip_gradients = config.clip_sampling_gradients
        self.offset_layernorm = nn.LayerNorm(hidden_size, eps=focusing_eps(config))
        self.offset_proj = nn.Linear(hidden_size, 2 * config.num_sampling_points, bias=False)
        self.offset_bias = nn.Parameter(torch.empty(2 * config.num_sampling_points))
        self.mixing = SparseFormerMixing(config, hidden_size)

    def forward(
        self, tokens: torch.Tensor, rois: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual branch `(batch, tokens, hidden_size)` and the points `(batch, tokens, points, 2)`."""
        offsets = in_float32(self.offset_proj(self.offset_layernorm(tokens))) + in_float32(self.offset_bias)
        points = locate_sampling_points(rois, offsets.unflatten(-1, (self.num_points, 2)))
        # Gradients are clipped for each image after this.
        points = points.expand(features.shape[0], -1, -1, -1)
        if self.clip_gradients and self.training:
            points = ClipGradient.apply(points, 1 / features.shape[2])
        return self.mixing(tokens, sample_features(features, points, self.padding_mode)), points


def placement_of(config: SparseFormerConfig) -> ContentPlacement:
    """The module that chooses the cells of each image."""
    return ContentPlacement(
        config.placement_rule, pair(config.patch_size), config.num_channels, config.placement_random_share
    )


def patch_sampling(config: SparseFormerConfig) -> PatchSampling:
    """The module that samples a patch for each token and embeds it."""
    return PatchSampling(
        pair(config.patch_size),
        config.num_channels,
        config.hidden_size,
        config.sampling_padding_mode,
        cortex_norm(config)(config.hidden_size) if config.patch_norm else None,
    )


class SparseFormerPositionEncoding(nn.Module):
    """Linear map of the sinusoidal encoding of RoIs; no gradient flows into the RoIs."""

    def __init__(self, config: SparseFormerConfig, hidden_size: int):
        super().__init__()
        self.hidden_size, self.kind = hidden_size, config.roi_encoding
        self.layernorm = nn.LayerNorm(hidden_size, eps=focusing_eps(config))
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, rois: torch.Tensor) -> torch.Tensor:
        encoding = encode_rois(rois.detach(), self.hidden_size, self.kind)
        return self.proj(self.layernorm(encoding.to(self.layernorm.weight.dtype)))


class SparseFormerRoIDeltas(nn.Module):
    """Tokens `(batch, tokens, hidden_size)` to RoI deltas `(batch, tokens, 4)`, by one or two linear layers."""

    def __init__(self, config: SparseFormerConfig, hidden_size: int):
        super().__init__()
        self.layernorm = nn.LayerNorm(hidden_size, eps=focusing_eps(config))
        self.dense = nn.Linear(hidden_size, hidden_size) if config.num_roi_delta_layers == 2 else None
        self.out_proj = nn.Linear(hidden_size, 4, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self.layernorm(tokens)
        return self.out_proj(tokens if self.dense is None else F.gelu(self.dense(tokens)))


class SparseFormerLayer(GradientCheckpointingLayer):
    """A transformer layer that performs the `steps` of the configuration, in their order.

    The cortex attends and has an MLP; focusing layers also sample features, encode RoIs and adjust them.

    Args:
        config (`SparseFormerConfig`): The configuration.
        steps (sequence of `str`): Operations, in order.
        focusing (`bool`): Whether the layer has the focusing width, and is iterated, or the full width.
        drop_path_rates (sequence of `float`): One for each execution of the layer.
    """

    def __init__(self, config: SparseFormerConfig, steps, focusing: bool, drop_path_rates):
        super().__init__()
        self.steps = tuple(steps)
        self.drop_path_rates = tuple(drop_path_rates)
        # v1's code drops RoI deltas along with the residual branches.
        self.drops_roi_deltas = config.num_roi_delta_layers == 1
        hidden_size = config.focusing_hidden_size if focusing else config.hidden_size
        if focusing and config.stage_embedding and config.num_focusing_iterations > 1:
            self.stage_embedding = nn.Parameter(torch.empty(config.num_focusing_iterations, hidden_size))
        else:
            self.stage_embedding = None
        if "sampling" in steps:
            self.sampling = patch_sampling(config) if config.patch_size else SparseFormerSampling(config, hidden_size)
        if "position_encoding" in steps:
            self.position_encoding = SparseFormerPositionEncoding(config, hidden_size)
        norm = functools.partial(nn.LayerNorm, eps=focusing_eps(config)) if focusing else cortex_norm(config)
        if "attention" in steps:
            self.layernorm_before = norm(hidden_size)
            if focusing:
                self.attention = SelfAttention(config, hidden_size, config.focusing_num_attention_heads)
            else:
                self.attention = SelfAttention(
                    config,
                    hidden_size,
                    config.num_attention_heads,
                    config.qkv_bias,
                    head_norm=norm if config.query_key_norm else None,
                    output_norm=norm if config.attention_norm else None,
                )
        if "mlp" in steps:
            self.layernorm_after = norm(hidden_size)
            if focusing:
                self.mlp = MLP(hidden_size, config.focusing_intermediate_size, config.focusing_hidden_act)
            else:
                inner_norm = norm if config.mlp_norm else None
                self.mlp = MLP(hidden_size, config.intermediate_size, config.hidden_act, config.gated_mlp, inner_norm)
        if "roi_adjustment" in steps:
            self.roi_deltas = SparseFormerRoIDeltas(config, hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rois: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        iteration: int = 0,
        leading: int | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Perform the steps on tokens, with RoIs (which every step but attention and MLP needs) and a feature map
        (which sampling needs). Tokens and RoIs that are alike for all images have a batch of 1. With `leading`, only
        the first so many tokens are computed; they attend to all.

        Returns:
            Tokens, RoIs and, if the layer samples, the sampling points, else None.
        """
        rate = self.drop_path_rates[iteration]
        points = None
        if self.stage_embedding is not None:
            hidden_states = hidden_states + self.stage_embedding[iteration]
        for step in self.steps:
            if step == "sampling":
                branch, points = self.sampling(hidden_states, rois, features)
                hidden_states = hidden_states + drop_path(branch, rate, self.training)
            elif step == "position_encoding":
                hidden_states = hidden_states + self.position_encoding(rois)
            elif step == "attention":
                tokens = self.layernorm_before(hidden_states)
                branch, _ = self.attention(tokens, tokens[:, :leading], **kwargs)
                hidden_states = hidden_states[:, :leading] + drop_path(branch, rate, self.training)
            elif step == "mlp":
                branch = self.mlp(self.layernorm_after(hidden_states))
                hidden_states = hidden_states + drop_path(branch, rate, self.training)
            else:
                deltas = self.roi_deltas(hidden_states)
                rois = adjust_rois(rois, drop_path(deltas, rate if self.drops_roi_deltas else 0.0, self.training))
        return hidden_states, rois, points


def join(prefix: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor:
    """Put class and register tokens, if there are any, in front of others."""
    return hidden_states if prefix is None else torch.cat([prefix.to(hidden_states.dtype), hidden_states], dim=1)


class SparseFormerPoolingHead(nn.Module):
    """The pooling of SigLIP: one learned query attends to all tokens, then an MLP; AIMv2's has none."""

    def __init__(self, config: SparseFormerConfig):
        super().__init__()
        hidden_size, heads = config.hidden_size, config.pooling_num_attention_heads or config.num_attention_heads
        intermediate_size = config.pooling_intermediate_size
        self.probe = nn.Parameter(torch.empty(1, hidden_size))
        self.attention = SelfAttention(config, hidden_size, heads)
        self.layernorm = self.mlp = None
        if intermediate_size != 0:
            self.layernorm = cortex_norm(config)(hidden_size)
            self.mlp = MLP(
                hidden_size,
                intermediate_size or config.intermediate_size,
                config.pooling_hidden_act or config.hidden_act,
            )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(batch, tokens, hidden_size)` to `(batch, hidden_size)`."""
        pooled, _ = self.attention(hidden_states, self.probe.repeat(len(hidden_states), 1, 1))
        return (pooled if self.mlp is None else pooled + self.mlp(self.layernorm(pooled)))[:, 0]


class SparseFormerPreTrainedModel(HubModel):
    """Base class of all SparseFormers: initialization, checks of input, teachers, and the number of tokens."""

    config: SparseFormerConfig
    base_model_prefix = "sparseformer"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    auto_classes = {
        "AutoModel": "SparseFormerModel",
        "AutoBackbone": "SparseFormerBackbone",
        "AutoModelForImageClassification": "SparseFormerForImageClassification",
        "AutoModelForSemanticSegmentation": "SparseFormerForSemanticSegmentation",
    }
    embeds = {"image": ("forward", "pooler_output")}
    embedding_arguments = ("num_tokens",)
    _no_split_modules = ["SparseFormerLayer", "SparseFormerLatents"]
    _keep_in_fp32_modules_strict = ["initial_rois"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": OutputRecorder(SparseFormerLayer, index=0, layer_name="layers"),
        "attentions": OutputRecorder(SelfAttention, index=1, layer_name="layers"),
    }

    # Of a model that has a SparseFormer as its image side, a vision class takes that.
    _keys_to_ignore_on_load_unexpected = [
        r"^text_(model|projection)\.",
        r"^logit_(scale|bias)$",
        r"^(model\.)?(language_model|multi_modal_projector|lm_head)\.",
        r"^feature_maps\.",
    ]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in Transformers. A CLIP, a SigLIP, a LLaVA or a PaliGemma with a SparseFormer is loaded as its image
        side."""
        base = "" if issubclass(cls, SparseFormerModel) else f"{cls.base_model_prefix}."
        kwargs.setdefault("key_mapping", {r"^(vision_model|model\.vision_tower)\.": base})
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        # Saved, weights have the names that they have here.
        (loaded[0] if isinstance(loaded, tuple) else loaded)._weight_conversions = None
        return loaded

    def get_input_embeddings(self) -> nn.Module:
        base = self.base_model
        return base.final_focusing_layer.sampling.projection if self.config.patch_size else base.stem.convolution

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        config = self.config
        head_dim = min(
            config.hidden_size // config.num_attention_heads,
            config.focusing_hidden_size // config.focusing_num_attention_heads,
        )
        if attn_implementation and "fl" in attn_implementation and head_dim < 16:
            raise ValueError(
                f"{attn_implementation!r} needs attention heads of 16 or more channels, this model's have {head_dim}. "
                'Use attn_implementation="sdpa" or "eager".'
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def no_weight_decay(self) -> list[str]:
        """Names of parameters that optimizers should not decay, besides biases and norms."""
        names = (
            *("initial_rois", "token_embedding", "cls_token", "register_tokens", "stage_embedding", "offset_bias"),
            "probe",
        )
        return [name for name, _ in self.named_parameters() if name.rsplit(".", 1)[-1] in names]

    @torch.no_grad()
    def _init_weights(self, module):
        """The reference implementation's initialization; bootstrapping depends on it."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, SparseFormerStem):
            weight = module.convolution.weight
            init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
            bound = weight[0].numel() ** -0.5
            init.uniform_(module.convolution.bias, -bound, bound)
        elif isinstance(module, SparseFormerLatents):
            if module.grid is None and module.grids is None:
                init.trunc_normal_(module.token_embedding, std=1.0)
                init.copy_(
                    module.initial_rois, initial_rois(module.num_latent_tokens, self.config.trained_token_counts[:-1])
                )
            else:
                # Takes the place of a teacher's position embeddings.
                init.trunc_normal_(module.token_embedding, std=std)
                init.copy_(module.initial_rois, cells_of(module.grids or [module.grid]))
            for token in (module.cls_token, module.register_tokens):
                if token is not None:
                    init.normal_(token)
        elif isinstance(module, SparseFormerMixing):
            init.constant_(module.layernorm.weight, module.layernorm.normalized_shape[0] ** -0.5)
            init.zeros_(module.generator.weight)
            matrices = [nn.init.xavier_uniform_(torch.empty(shape)).flatten() for shape in module.shapes]
            init.copy_(module.generator.bias, torch.cat(matrices))
            if module.channel_bias is not None:
                init.zeros_(module.channel_bias)
                init.zeros_(module.point_bias)
        elif isinstance(module, SparseFormerSampling):
            init.constant_(module.offset_layernorm.weight, module.offset_layernorm.normalized_shape[0] ** -0.5)
            init.zeros_(module.offset_proj.weight)
            init.copy_(module.offset_bias, initial_sampling_offsets(module.num_points).flatten())
        elif isinstance(module, SparseFormerRoIDeltas):
            init.constant_(module.layernorm.weight, module.layernorm.normalized_shape[0] ** -0.5)
            init.zeros_(module.out_proj.weight)
        elif isinstance(module, SparseFormerLayer) and module.stage_embedding is not None:
            init.normal_(module.stage_embedding)
        elif isinstance(module, AttentionForecast):
            for convolution in (module.embedding, *module.convolutions):
                init.kaiming_normal_(convolution.weight, nonlinearity="relu")
                init.zeros_(convolution.bias)
            # Foretells that attention is even.
            init.zeros_(module.head.weight)
            init.zeros_(module.head.bias)
        elif isinstance(module, SparseFormerPoolingHead):
            init.normal_(module.probe)
        elif isinstance(module, MapUpsampler):
            for convolution in module.modules():
                if isinstance(convolution, nn.Conv2d):
                    init.kaiming_normal_(convolution.weight)
                    init.zeros_(convolution.bias)
            init.zeros_(module.out_proj.weight)
        elif isinstance(module, SegmentationHead):
            init.trunc_normal_(module.query.weight, std=std)
            init.zeros_(module.query.bias)
        elif isinstance(module, ContextBroadcast):
            module.reset_parameters()

    def resize_tokens(self, num_latent_tokens: int):
        """Change the number of latent tokens in place, as continued bootstrapping needs; kept tokens stay as they are.
        Those that embed patches are interpolated between the cells of a new grid.

        Args:
            num_latent_tokens (`int`): New count, [CLS] not counted (80 tokens in the papers are 79 here).

        Raises:
            ValueError: if the count is below 1, or of tokens that embed patches makes no grid.
        """
        if num_latent_tokens < 1:
            raise ValueError(f"`num_latent_tokens` is {num_latent_tokens}, expected at least 1.")
        base, config = self.base_model, self.config
        num_latent_tokens = config.round_tokens(num_latent_tokens)
        smaller = [count for count in config.trained_token_counts if count < num_latent_tokens]
        if config.placement == "content":
            # Each cell has its token already.
            base.latents.num_latent_tokens = num_latent_tokens
        elif config.patch_size is None:
            base.latents.resize_tokens(num_latent_tokens)
        else:
            config.token_grid = choose_grid(num_latent_tokens, pair(config.image_size))
            base.latents.resize_grid(config.token_grid)
            # Smaller grids would be interpolated from one that is not the trained one.
            smaller = []
        config.elastic_token_counts = (
            [*smaller, num_latent_tokens] if config.elastic_token_counts and smaller else None
        )
        config.num_latent_tokens, config.num_tokens, config.calibration = num_latent_tokens, None, None

    def set_num_tokens(self, num_tokens: int | None):
        """Choose the number of latent tokens for all calls that choose none.

        The model keeps the choice when it is saved, exported or given to a pipeline. Unlike `resize_tokens`, this
        changes no weights.

        Args:
            num_tokens (`int`, *optional*): Count, [CLS] not counted; `None` for all tokens.

        Raises:
            ValueError: if it is below 1, above `num_latent_tokens`, or of tokens that embed patches makes no grid.
        """
        self.config.num_tokens = None if num_tokens is None else self.check_num_tokens(num_tokens)

    def check_num_tokens(self, num_tokens: int) -> int:
        """Return the count that the model computes with when `num_tokens` latent tokens are asked for. Warn once if
        the model was not made for it.

        Raises:
            ValueError: as `set_num_tokens`.
        """
        config = self.config
        num_tokens = config.round_tokens(num_tokens)
        if not 1 <= num_tokens <= config.num_latent_tokens:
            raise ValueError(
                f"`num_tokens` is {num_tokens}, expected 1 to {config.num_latent_tokens}, the latent tokens that this "
                "model has; `resize_tokens` adds more, which then have to be trained."
            )
        if num_tokens not in config.trained_token_counts and not torch.compiler.is_compiling():
            trained = ", ".join(map(str, config.trained_token_counts))
            logger.warning_once(
                f"This model was trained with {trained} latent tokens and is asked for {num_tokens}, with which it may"
                " be much worse; `frugalvit bootstrap --student MODEL --elastic-token-counts …` teaches it others."
            )
        return num_tokens

    @torch.no_grad()
    def place_by_content(self, rule: str = "detail", num_levels: int | None = None):
        """Place tokens by content, in place: those that embed the patches of a grid embed the cells of a quadtree
        from then on, see `frugalvit.modeling.placement`. Weights stay; positions are interpolated.

        Args:
            rule (`str`, *optional*, defaults to `"detail"`): `placement_rule` of the configuration.
            num_levels (`int`, *optional*): `num_placement_levels` of the configuration.

        Raises:
            ValueError: if tokens embed no patches, or are placed by content already.
        """
        base, config = self.base_model, self.config
        if config.placement == "content":
            raise ValueError("This model's tokens are placed by content already.")
        fields = {"placement": "content", "placement_rule": rule, "num_placement_levels": num_levels}
        placed, latents = type(config).from_dict(config.to_dict() | fields | {"token_grid": None}), base.latents
        grids = placed.cell_grids()
        tables = [resize_table(latents.token_embedding, latents.grid, grid) for grid in grids]
        latents.token_embedding = nn.Parameter(torch.cat(tables), latents.token_embedding.requires_grad)
        latents.initial_rois = nn.Parameter(
            cells_of(grids).to(latents.initial_rois), latents.initial_rois.requires_grad
        )
        latents.grid, latents.grids, latents.num_latent_tokens = None, grids, placed.num_latent_tokens
        counts = ("num_latent_tokens", "elastic_token_counts", "num_tokens")
        for name in (*fields, "token_grid", "placement_grid", *counts):
            setattr(config, name, getattr(placed, name))
        config.calibration = None
        base.stem = CellPyramid(pair(config.patch_size))
        base.placement = placement_of(config).to(latents.token_embedding)
        base.placement.apply(self._init_weights)

    @classmethod
    @torch.no_grad()
    def from_teacher(
        cls,
        teacher: nn.Module,
        num_latent_tokens: int | None = None,
        truncate: float | int | None = None,
        inherit_blocks: bool = True,
        focusing: str = "paper",
        check: bool = True,
        break_ties: bool = True,
        **fields,
    ):
        """Return a SparseFormer that inherits a teacher's blocks, final LayerNorm and classifier or projection.

        The paper's student (section 3.2) leaves out leading blocks and has a new focusing stage, which has to be
        bootstrapped. With `focusing="inherited"`, the student is the teacher at a lower resolution before any
        training: it inherits the patch embedding and all blocks, and its tokens' RoIs are the cells of a grid.

        Args:
            teacher (`nn.Module`):
                A plain pre-norm vision transformer of Transformers, timm or open_clip, see docs/models.md, or what
                `read_anatomy` read of it. The student pools as it does, and has its registers, gates, norms and rotary
                positions.
            num_latent_tokens (`int`, *optional*):
                Latent tokens. By default, as many as are a quarter of the teacher's image tokens when [CLS] is
                counted. For a teacher of 384 or more pixels, it is a quarter of the tokens that it would have at 224:
                49 for ViT-L/16-384, as in the paper.
            truncate (`float` or `int`, *optional*):
                Leading blocks left out: below 1 a fraction, from 1 on a count (1.0 is one block); 1/3 if the focusing
                stage is new, else none.
            inherit_blocks (`bool`, *optional*, defaults to `True`):
                With `False`, only the classifier's weights are inherited (an ablation of table 3).
            focusing (`str`, *optional*, defaults to `"paper"`):
                `"paper"`, a stage that is learned from random weights, or `"inherited"`.
            check (`bool`, *optional*, defaults to `True`):
                Whether to compare the two on two images of noise: the inherited blocks, given the teacher's tokens at
                RoIs that are its patches, have to compute what the teacher does.
            break_ties (`bool`, *optional*, defaults to `True`):
                With a new focusing stage, whether equal initial RoIs are moved apart, by N(0, 0.05) of the image: 12
                of the paper's 48 tokens start alike, and would stay alike. Neither paper nor reference does so
                (`results/bootstrap_choices.json` has the gain).
            fields: Fields of `SparseFormerConfig` to set differently, for example `stem_channels=32`.

        Returns:
            The model, in evaluation mode.

        Raises:
            ValueError: if the teacher is no such transformer, has no classifier where one is needed, or the numbers
                do not fit.
            ImportError: in a model's own code, where frugalvit is not installed.
        """
        # The code that reads teachers is not saved with a model.
        inheritance = import_from_package("inheritance", "Inheriting from a teacher")
        return inheritance.inherit(
            cls, teacher, num_latent_tokens, truncate, inherit_blocks, focusing, check, break_ties, **fields
        )


class SparseFormerModel(SparseFormerPreTrainedModel):
    """The bare SparseFormer, from pixels to tokens. `AutoModel` loads it, and it is the vision tower of LLaVA."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """As in Transformers. Loads a `SparseFormerVisionModelWithProjection` if `config` names that class."""
        # `AutoModel` has one class for all SparseFormers and gives it the folder's configuration.
        architectures = getattr(config, "architectures", None) or ()
        chosen = super()
        if cls is SparseFormerModel and SparseFormerVisionModelWithProjection.__name__ in architectures:
            chosen = SparseFormerVisionModelWithProjection
        return chosen.from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

    def __init__(self, config: SparseFormerConfig):
        config.validate()
        super().__init__(config)
        self.placement = None
        if config.patch_size is None:
            self.stem = SparseFormerStem(config)
        elif config.placement == "content":
            self.stem, self.placement = CellPyramid(pair(config.patch_size)), placement_of(config)
        else:
            self.stem = GridImage(pair(config.patch_size))
        self.latents = SparseFormerLatents(config)

        iterations, blocks = config.num_focusing_iterations, config.num_hidden_layers
        separate = not config.final_focusing_is_block
        total = iterations + separate + blocks
        rates = [config.drop_path_rate * i / max(total - 1, 1) for i in range(total)]
        cortex_rates = [[rate] for rate in rates[total - blocks :]]

        self.focusing_layer = self.transition = None
        if iterations:
            self.focusing_layer = SparseFormerLayer(config, config.focusing_steps, True, rates[:iterations])
            self.transition = nn.Linear(config.focusing_hidden_size, config.hidden_size)
        self.embedding_norm = cortex_norm(config)(config.hidden_size) if config.embedding_norm else nn.Identity()
        self.transition_layernorm = (
            nn.LayerNorm(config.hidden_size, eps=focusing_eps(config))
            if config.transition_layer_norm
            else nn.Identity()
        )
        self.final_focusing_layer = (
            SparseFormerLayer(config, config.final_focusing_steps, False, [rates[iterations]]) if separate else None
        )
        steps = [("attention", "mlp")] * blocks
        if config.final_focusing_is_block:
            steps[0] = config.final_focusing_steps
        self.layers = nn.ModuleList(
            SparseFormerLayer(config, layer_steps, False, rate)
            for layer_steps, rate in zip(steps, cortex_rates, strict=True)
        )
        self.layernorm = cortex_norm(config)(config.hidden_size) if config.final_norm else nn.Identity()
        attends = config.pooling in ("attention", "latent_attention")
        self.pooling_head = SparseFormerPoolingHead(config) if attends else None
        broadcast_layers(self.layers, config, has_class_token=config.use_cls_token)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        output_rois: bool = False,
        output_focusing_hidden_states: bool = False,
        output_stem_features: bool = False,
        output_attention_forecast: bool = False,
        output_tokens: bool = True,
        num_tokens: int | None = None,
        features: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerModelOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of any size from 4 x 4 pixels.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois` and `sampling_points`.
            output_focusing_hidden_states (`bool`, *optional*, defaults to `False`):
                Return `focusing_hidden_states`.
            output_stem_features (`bool`, *optional*, defaults to `False`): Return `stem_features`.
            output_attention_forecast (`bool`, *optional*, defaults to `False`): Return `attention_forecast`.
            output_tokens (`bool`, *optional*, defaults to `True`):
                Return `last_hidden_state` of all tokens. Without it, the last block computes [CLS] alone where that is
                what is pooled, and `last_hidden_state` has no other token, unless `hidden_states` or `attentions` are
                asked for or Context Broadcasting is in that block. That saves 8 % of the multiply-accumulates of
                augreg-base-49-224, 4 % of augreg-large-49-224's.
            num_tokens (`int` or `torch.LongTensor` of shape `()`, *optional*):
                Latent tokens to compute with, up to `config.num_latent_tokens`; `config.num_tokens`, else all, by
                default. Best one of `config.elastic_token_counts`: another one warns, once. A tensor, as a program
                takes it, chooses among these, see `read_num_tokens`.
            features (`torch.FloatTensor`, *optional*):
                The early convolution's map of the same images, if another call has computed it.

        Raises:
            ValueError: if the images have other channels or are smaller, or `num_tokens` does not fit.
        """
        pixel_values = check_pixel_values(pixel_values, self.config.num_channels, min_size=4)
        batch_size, forecast = pixel_values.shape[0], None
        grid = grids = cells = None
        if isinstance(num_tokens, torch.Tensor):
            num_tokens, grid, grids, cells = self.read_num_tokens(num_tokens)
        else:
            num_tokens = self.config.default_num_tokens if num_tokens is None else self.check_num_tokens(num_tokens)
            if self.placement is None and self.config.patch_size is not None:
                grid = self.config.grid_of(num_tokens)
        if self.placement is not None:
            size = known_size(pixel_values)
            grids, num_tokens = self.config.cell_grids(size), self.config.tokens_of_tree(num_tokens, size)
            levels = self.stem(pixel_values, grids)
            cells, forecast = self.placement(levels, num_tokens)
            features = self.placement.patches(levels, cells)
        elif features is None:
            features = self.stem(pixel_values) if grid is None else self.stem(pixel_values, grid)
        hidden_states, rois, prefix = self.latents(batch_size, num_tokens, grid, cells, grids)
        all_rois, all_points, focusing_hidden_states = [], [], []

        def run(layer, hidden_states, rois, iteration=0, leading=None):
            hidden_states, rois, points = layer(hidden_states, rois, features, iteration, leading, **kwargs)
            # Before the first sampling, all images have the same tokens and RoIs: compute them once.
            hidden_states, rois = (states.expand(batch_size, -1, -1) for states in (hidden_states, rois))
            if "roi_adjustment" in layer.steps or layer is self.final_focusing_layer and self.config.patch_size:
                all_rois.append(rois)
            if points is not None:
                all_points.append(points)
            return hidden_states, rois

        for iteration in range(self.config.num_focusing_iterations):
            hidden_states, rois = run(self.focusing_layer, hidden_states, rois, iteration)
            focusing_hidden_states.append(hidden_states)

        if self.transition is not None:
            hidden_states = self.transition(hidden_states)
        hidden_states = self.transition_layernorm(hidden_states)
        if self.final_focusing_layer is not None:
            hidden_states, rois = run(self.final_focusing_layer, hidden_states, rois)
        hidden_states = self.embedding_norm(join(prefix, hidden_states))
        kwargs |= self.rotation(rois)
        cls_alone = not output_tokens and self.reads_cls_alone(**kwargs)
        for layer in self.layers:
            leading = self.config.num_class_tokens if cls_alone and layer is self.layers[-1] else None
            hidden_states, rois = run(layer, hidden_states, rois, leading=leading)

        return SparseFormerModelOutput(
            last_hidden_state=self.layernorm(hidden_states),
            pooler_output=self.pool(hidden_states),
            rois=tuple(all_rois) if output_rois else None,
            sampling_points=tuple(all_points) if output_rois else None,
            focusing_hidden_states=tuple(focusing_hidden_states) if output_focusing_hidden_states else None,
            stem_features=self.features_of(features, pixel_values) if output_stem_features else None,
            attention_forecast=forecast if output_attention_forecast else None,
        )

    def read_num_tokens(self, num_tokens: torch.Tensor) -> tuple:
        """Return the count of tokens that a number in a tensor chooses: the largest of `config.trained_token_counts`
        that is not above it, else the smallest. The number is not known while a program is exported.

        Returns:
            `tuple`: The count and, where tokens embed the patches of a grid (else `None`), its rows and columns, the
            grids of all counts, and the numbers of its cells among all of theirs, `(1, count)`.
        """
        config, device = self.config, num_tokens.device
        counts = config.trained_token_counts
        place = place_among(counts, num_tokens)

        def read(values: list[int]) -> int:
            value = torch.tensor(values, device=device)[place].item()
            torch._check(value >= min(values))
            torch._check(value <= max(values))
            return value

        if config.placement == "content":
            base = math.prod(config.cell_grids()[0])
            return base + 3 * read([(count - base) // 3 for count in counts]), None, None, None
        count = read(list(counts))
        if config.patch_size is None:
            return count, None, None, None
        grids = [config.grid_of(each) for each in counts]
        grid = tuple(read([sides[axis] for sides in grids]) for axis in (0, 1))
        first = read([sum(counts[:number]) for number in range(len(counts))])
        return count, grid, grids, first + torch.arange(count, device=device).unsqueeze(0)

    def features_of(self, features: torch.Tensor | list[torch.Tensor], pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the features that tokens sample as one map, `(batch, channels, height / 4, width / 4)`: those of the
        early convolution, or, where tokens sample pixels, the image's, with 4 x 4 pixels as the channels of one place.
        """
        if self.config.patch_size is None:
            return features
        height, width = pixel_values.shape[-2:]
        padded = F.pad(pixel_values, (0, -width % 4, 0, -height % 4), mode="replicate")
        return F.pixel_unshuffle(padded, 4)

    def run_cortex(self, hidden_states: torch.Tensor, rois: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cortex alone, for any tokens.

        Args:
            hidden_states (`torch.Tensor`): `(batch, prefix + latent tokens, hidden_size)`, [CLS] and registers first.
            rois (`torch.Tensor`): `(batch, latent tokens, 4)`.

        Returns:
            pair of `torch.Tensor`: As `last_hidden_state` and `pooler_output`.
        """
        rotation = self.rotation(rois)
        for layer in self.layers:
            hidden_states, _, _ = layer(hidden_states, rois, **rotation)
        return self.layernorm(hidden_states), self.pool(hidden_states)

    def rotation(self, rois: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Rotary positions for the cortex, from the RoIs that it is given, `(batch, tokens, 4)`: cosines and sines
        that all blocks share, as `SelfAttention` takes them.

        A token without a grid is rotated as the patch around the center of its RoI would be. No gradient flows into
        the RoIs through it, as through the position encoding of the focusing stage. With it, students of a small
        DINOv3 had a cosine of 0.81 +- 0.06 with its embeddings, without 0.88 +- 0.03 (three seeds, three epochs of
        3,000 images; `results/rotary_centers.json`).
        """
        config = self.config
        if config.rope_theta is None:
            return {}
        left_top, right_bottom = in_float32(rois.detach()).chunk(2, dim=-1)
        centers = ((left_top + right_bottom) * 0.5).flip(-1)
        head_dim = config.hidden_size // config.num_attention_heads
        table = rotary_table(centers, config.rope_theta, config.rope_scale, config.rope_shift, head_dim)
        return {"position_embeddings": table}

    def reads_cls_alone(self, **kwargs) -> bool:
        """Whether the pooled embedding needs only [CLS] of the last block, and a call with these arguments returns no
        states or attentions of it."""
        last, names = self.layers[-1], ("output_hidden_states", "output_attentions")
        recorded = any(kwargs.get(name, getattr(self.config, name, False)) for name in names)
        plain = last.steps == ("attention", "mlp") and not has_context_broadcast(last)
        return self.config.pooling == "cls" and plain and not recorded

    def pool(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Pool tokens before the final LayerNorm, `(batch, tokens, hidden_size)`, to `(batch, pooled_size)`."""
        config, pooling = self.config, self.config.pooling
        if pooling == "cls":
            chosen = config.pooled_class_tokens or range(config.num_class_tokens)
            return self.layernorm(torch.stack([hidden_states[:, index] for index in chosen], dim=1)).flatten(1)
        if pooling == "cls_and_latent_mean":
            hidden_states = self.layernorm(hidden_states)
            return torch.cat([hidden_states[:, 0], hidden_states[:, config.num_prefix_tokens :].mean(dim=1)], dim=1)
        if pooling == "class_mean":
            pooled = hidden_states[:, : config.num_class_tokens]
        elif pooling in ("latent_mean", "latent_attention"):
            pooled = hidden_states[:, config.num_prefix_tokens :]
        else:
            pooled = hidden_states
        if pooling in ("attention", "latent_attention"):
            return self.pooling_head(self.layernorm(pooled))
        return self.layernorm(pooled.mean(dim=1)) if config.pool_before_norm else self.layernorm(pooled).mean(dim=1)


class SparseFormerForImageClassification(GenericForImageClassification, SparseFormerPreTrainedModel):
    """SparseFormer with a linear classifier on the pooled token.

    If the pooled token is [CLS], the last block computes only that one (`output_tokens` of the base model). To read
    other tokens of that block, for example by a hook, pass `output_tokens=True`.
    """

    model_class = SparseFormerModel
    output_class = SparseFormerImageClassifierOutput
    base_model_arguments = {"output_tokens": False}

    def train(self, mode: bool = True):
        """As in PyTorch. Training drops the calibration, which is of other weights."""
        if mode:
            self.config.calibration = None
        return super().train(mode)

    @torch.no_grad()
    def classify_adaptively(
        self,
        pixel_values: torch.Tensor,
        confidence: float | None = None,
        token_counts: Sequence[int] | None = None,
    ) -> SparseFormerAdaptiveOutput:
        """Classify images with few tokens, and those whose class is not sure enough again with more.

        Stem features are computed once. By default, an image is looked at twice at most: counts between the fewest and
        the most would save less than another look costs (`docs/elastic.md`).

        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`): Normalized images.
            confidence (`float`, *optional*):
                Probability of the likeliest class, 0 to 1, from which on an image is done. By default that of
                `config.calibration`, of a model that was calibrated for these counts, else 0.9, which promises
                nothing.
            token_counts (sequence of `int`, *optional*):
                Counts to try, in this order; by default those of the calibration, else the smallest of
                `config.elastic_token_counts` and `config.num_tokens` or all.

        Raises:
            ValueError: if `confidence` is no probability, or the model has not so many tokens.
        """
        config, base = self.config, self.base_model
        if token_counts is None:
            token_counts = config.adaptive_token_counts
        calibrated = config.holding_calibration
        if confidence is not None or not calibrated or [*token_counts] != [*calibrated["token_counts"]]:
            calibrated = None
        if confidence is None:
            confidence = calibrated["confidence"] if calibrated else 0.9
        if not 0 <= confidence <= 1:
            raise ValueError(f"`confidence` is {confidence}, expected a probability from 0 to 1.")
        features = base.stem(pixel_values) if config.patch_size is None else None
        logits, num_tokens, left = None, None, torch.arange(len(pixel_values), device=pixel_values.device)
        for count in token_counts:
            known = {} if features is None else {"features": features[left]}
            found = self(pixel_values[left], num_tokens=count, return_dict=True, **known).logits
            if logits is None:
                logits, num_tokens = found, torch.full_like(left, count)
            else:
                logits, num_tokens = logits.index_copy(0, left, found), num_tokens.index_fill(0, left, count)
            left = left[found.float().softmax(dim=-1).amax(dim=-1) < confidence]
            if not len(left):
                break
        return SparseFormerAdaptiveOutput(
            logits=logits,
            num_tokens=num_tokens,
            confidence=confidence,
            disagreement=calibrated["disagreement"] if calibrated else None,
        )


def check_places(config: SparseFormerConfig):
    """Raise a ValueError unless tokens end at places of their own, which a map needs."""
    steps = (*config.focusing_steps, *config.final_focusing_steps)
    if config.patch_size is None and "roi_adjustment" not in steps:
        raise ValueError(f"Tokens are placed by their RoIs, and no step of {list(steps)} adjusts any.")


class SparseFormerBackbone(BackboneMixin, SparseFormerPreTrainedModel):
    """SparseFormer as a backbone: feature maps at its teacher's own grid, whatever the number of tokens, in the place
    of Transformers' `Dinov2Backbone` and the like.

    A cell of a map has the state of the token whose RoI covers it, or the mean of several (`shares_of_tokens`); with
    `upsampler_hidden_size`, convolutions that see the image refine it. With a token for each patch of its teacher, it
    is the teacher's own map before any training.

    It loads from what any SparseFormer was saved to, for example a bootstrapped classifier:
    `SparseFormerBackbone.from_pretrained(folder, out_features=["stage4", "stage8"])`. Heads of Transformers take its
    configuration as `backbone_config`, see docs/dense_features.md.
    """

    _keys_to_ignore_on_load_unexpected = [
        *SparseFormerPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^(classifier|visual_projection|decode_head)\.",
    ]

    def __init__(self, config: SparseFormerConfig):
        check_places(config)
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.sparseformer = SparseFormerModel(config)
        self.feature_maps = FeatureMaps(config)
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        num_tokens: int | None = None,
        output_rois: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerBackboneOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of any size from `feature_stride` on.
            num_tokens (`int`, *optional*): As of `SparseFormerModel.forward`.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois` and `sampling_points`.
            kwargs: Passed to `SparseFormerModel.forward`.

        Returns:
            `SparseFormerBackboneOutput`: `feature_maps`, of each layer of `out_features` `(batch, hidden_size,
            height / stride, width / stride)`, rounded down, where the stride is `feature_stride`, divided by the
            layer's `feature_scales`, or as `reshape_hidden_states` says. All are spread by the last RoIs.

        Raises:
            ValueError: if the images have other channels or are smaller than a cell, or `num_tokens` does not fit.
        """
        kwargs |= {"output_rois": True, "return_dict": True}
        outputs = self.sparseformer(pixel_values, num_tokens=num_tokens, **kwargs)
        norm = self.sparseformer.layernorm if self.config.apply_layernorm else None
        places = outputs.hidden_states, outputs.rois[-1], pixel_values
        maps, _ = self.feature_maps(*places, norm, self.out_features)
        if not self.config.reshape_hidden_states:
            maps = tuple(map(self.in_a_row, maps, (outputs.hidden_states[index] for index in self.out_indices)))
        return SparseFormerBackboneOutput(
            feature_maps=maps,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois if output_rois else None,
            sampling_points=outputs.sampling_points if output_rois else None,
            focusing_hidden_states=outputs.focusing_hidden_states,
        )

    def in_a_row(self, features: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """A map `(batch, hidden_size, rows, columns)` behind [CLS] or the mean token of the states that it is of."""
        front = states[:, :1] if self.config.use_cls_token else states.mean(dim=1, keepdim=True)
        front = self.sparseformer.layernorm(front) if self.config.apply_layernorm else front
        return torch.cat([front, features.flatten(2).mT], dim=1)


# Arguments of `from_pretrained` that say where a checkpoint lies.
_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class SparseFormerForSemanticSegmentation(SparseFormerPreTrainedModel):
    """SparseFormer with a class for every pixel: scores of each latent token, spread over the image by its RoI and
    likeness (section 4.1 of the bootstrapping paper; `SegmentationHead` says what that leaves open). With
    `decoder_type="linear"`, a linear classifier of its feature maps, see `SparseFormerBackbone`, side by side where
    `out_features` names several.

    With 256 latent tokens, 512 x 512 pixels and 150 classes, base has 65.4 M parameters and 25.4 G
    multiply-accumulates, large 213.5 M and 66.3 G. Table 5 prints 68 M and 36 G, 216 M and 77 G, which the paper's
    text does not explain.

    It starts from a bootstrapped classifier, with more tokens and pixels (256 tokens for 512 x 512 in the paper):
    `SparseFormerForSemanticSegmentation.from_pretrained(folder, num_latent_tokens=256, image_size=512,
    num_labels=150)`.
    """

    # The loss is a mean over the pixels that count, whose number `Trainer` does not know.
    accepts_loss_kwargs = False

    def __init__(self, config: SparseFormerConfig):
        check_places(config)
        super().__init__(config)
        self.num_labels = config.num_labels
        self.sparseformer = SparseFormerModel(config)
        self.feature_maps = FeatureMaps(config) if config.decoder_type == "linear" else None
        self.decode_head = (SegmentationHead if self.feature_maps is None else LinearDecoder)(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, num_latent_tokens: int | None = None, **kwargs):
        """As in Transformers. `num_latent_tokens`, given here or in a `config`, may differ from the checkpoint's;
        `resize_tokens` changes it."""
        config = kwargs.get("config")
        if isinstance(config, SparseFormerConfig) and pretrained_model_name_or_path is not None:
            num_latent_tokens = num_latent_tokens or config.num_latent_tokens
            where = {name: kwargs[name] for name in _WHERE if kwargs.get(name) is not None}
            stored = SparseFormerConfig.from_pretrained(pretrained_model_name_or_path, **where)
            kwargs["config"] = copy.deepcopy(config)
            kwargs["config"].num_latent_tokens = stored.num_latent_tokens
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if num_latent_tokens is not None and num_latent_tokens != model.config.num_latent_tokens:
            model.resize_tokens(num_latent_tokens)
        return loaded

    def image_processor_config(self) -> dict:
        height, width = pair(self.config.image_size)
        fields = image_processor_config(self.config)
        for name in ("do_center_crop", "crop_size", "do_convert_rgb"):
            fields.pop(name, None)
        return {
            **fields,
            "image_processor_type": "SegformerImageProcessor",
            "size": {"height": height, "width": width},
            "do_reduce_labels": False,
        }

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_rois: bool = False,
        output_token_maps: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SparseFormerSemanticSegmenterOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images of any size from 4 x 4 pixels.
            labels (`torch.LongTensor` of shape `(batch, height, width)`, *optional*):
                Class numbers; `config.semantic_loss_ignore_index` does not count.
            output_rois (`bool`, *optional*, defaults to `False`): Return `rois` and `sampling_points`.
            output_token_maps (`bool`, *optional*, defaults to `False`): Return `token_maps`.
            kwargs: Passed to `SparseFormerModel.forward`.

        Returns:
            `SparseFormerSemanticSegmenterOutput`: `loss`, the mean over the pixels that count, and `(batch,
            num_labels, height / 4, width / 4)` `logits`, rounded up, or of a linear decoder at the grid of the last
            of the feature maps; the image processor's `post_process_semantic_segmentation` makes maps of them.

        Raises:
            ValueError: if the labels are of another size than the images, or no classes of the model.
        """
        if labels is not None and pixel_values is not None and labels.shape[-2:] != pixel_values.shape[-2:]:
            raise ValueError(
                f"Got masks of {' x '.join(map(str, labels.shape[-2:]))} pixels for images of "
                f"{' x '.join(map(str, pixel_values.shape[-2:]))}; expected the same size. Prepare both with the "
                "model's AutoImageProcessor: `processor(images, masks)`."
            )
        kwargs |= {"output_rois": True, "return_dict": True}
        if self.feature_maps is None:
            outputs = self.sparseformer(pixel_values, output_stem_features=True, **kwargs)
            tokens = outputs.last_hidden_state[:, self.config.num_prefix_tokens :]
            logits, token_maps = self.decode_head(tokens, outputs.rois[-1], outputs.stem_features)
        else:
            returns_states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
            outputs = self.sparseformer(pixel_values, **kwargs | {"output_hidden_states": True})
            norm = self.sparseformer.layernorm if self.config.apply_layernorm else None
            places = outputs.hidden_states, outputs.rois[-1], pixel_values
            maps, token_maps = self.feature_maps(*places, norm, self.config.out_features)
            logits = self.decode_head(maps)
            if not returns_states:
                outputs.hidden_states = None
        loss = None
        if labels is not None:
            ignored = self.config.semantic_loss_ignore_index
            loss = semantic_segmentation_loss(logits, labels, self.config.num_labels, ignored)
        return SparseFormerSemanticSegmenterOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois if output_rois else None,
            sampling_points=outputs.sampling_points if output_rois else None,
            focusing_hidden_states=outputs.focusing_hidden_states,
            token_maps=token_maps if output_token_maps else None,
        )


class SparseFormerVisionModel(SparseFormerModel):
    """SparseFormer as a vision encoder of CLIP, in the place of `CLIPVisionModel`.

    The same weights under the same names as `SparseFormerModel`, which `AutoModel` loads from the same folder.
    """

    loads_with = "AutoModel"


class SparseFormerVisionModelWithProjection(SparseFormerPreTrainedModel):
    """SparseFormer with a linear projection of the pooled token, in the place of `CLIPVisionModelWithProjection`.

    `AutoModel` loads it from a folder that it was saved to.
    """

    loads_with = "AutoModel"
    embeds = {"image": ("forward", "image_embeds")}

    def __init__(self, config: SparseFormerConfig):
        if config.projection_dim is None:
            raise ValueError(
                "`projection_dim` of the configuration is None, expected the width of the projected embedding."
            )
        super().__init__(config)
        self.sparseformer = SparseFormerModel(config)
        self.visual_projection = nn.Linear(config.pooled_size, config.projection_dim, bias=config.projection_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> SparseFormerVisionModelWithProjectionOutput:
        """Pixels to `image_embeds`, `(batch, projection_dim)`; keyword arguments go to `SparseFormerModel.forward`."""
        outputs = self.sparseformer(pixel_values, **kwargs)
        return SparseFormerVisionModelWithProjectionOutput(
            image_embeds=self.visual_projection(outputs.pooler_output),
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=outputs.pooler_output,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            rois=outputs.rois,
            sampling_points=outputs.sampling_points,
            focusing_hidden_states=outputs.focusing_hidden_states,
        )


__all__ = [
    "SparseFormerConfig",
    "SparseFormerModel",
    "SparseFormerBackbone",
    "SparseFormerForImageClassification",
    "SparseFormerForSemanticSegmentation",
    "SparseFormerPreTrainedModel",
    "SparseFormerVisionModel",
    "SparseFormerVisionModelWithProjection",
]
