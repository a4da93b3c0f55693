"""Focusing stage of the papers' SparseFormers: tokens sample the image in their RoIs and adjust the RoIs.

Gao et al., *SparseFormer: Sparse Visual Recognition via Limited Latent Tokens* (v1) and *Bootstrapping SparseFormers
from Vision Foundation Models* (CVPR 2024). An early convolution computes a feature map of the image. A focusing layer,
which is narrower than the encoder, is executed several times. A layer of the encoder's width follows. The papers order
the operations differently: see `SparseFormerV1FocusingLayer` (first paper) and `SparseFormerFocusingLayer` (second).
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..configuration.configuration_sparseformer import SparseFormerConfig
from .layers import MLP, DropPath, SelfAttention, in_float32


def initial_rois(num_tokens: int, counts: Sequence[int] = ()) -> torch.Tensor:
    """Return the initial RoIs of tokens, `(num_tokens, 4)`, as left, top, right, bottom.

    With root = floor(sqrt(num_tokens)), the RoIs of the first root**2 tokens are squares of side 0.5 on a grid, with x
    in the outer loop. The RoI of every further token is the whole image. With fewer than 4 tokens, the authors'
    formula divides by zero, so all RoIs are the whole image.

    A model can be trained with several numbers of tokens. `num_tokens` is then the largest of these numbers, and
    `counts` are the other numbers in ascending order. The first `counts[0]` tokens get RoIs by the rule above. The
    tokens that each larger number adds get RoIs by the same rule, as if they were the only tokens.
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
    """Return initial sampling offsets from a RoI's center, `(num_points, 2)`, as x and y. If `num_points` is a square
    number, the offsets are a square grid with x in the inner loop. Otherwise, the offsets are drawn uniformly from
    -0.5 to 0.5."""
    root = math.isqrt(num_points)
    if root**2 != num_points:
        return torch.rand(num_points, 2) - 0.5
    center = (torch.arange(root) + 0.5) / root - 0.5
    return torch.cartesian_prod(center, center).flip(1)


# One adjustment scales a RoI by at most exp(8), almost 3,000. After five adjustments, RoIs are finite in float32.
MAX_LOG_SCALE = 8.0


def adjust_rois(rois: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """Move and scale RoIs in float32 (equations 2 and 3 of the bootstrapping paper).

    Args:
        rois (`torch.Tensor` of shape `(batch, tokens, 4)`): Left, top, right, bottom.
        deltas (`torch.Tensor` of shape `(batch, tokens, 4)`):
            Shifts of x and y in units of the RoI's width and height, then log scales of the width and height.
    """
    left_top, right_bottom = in_float32(rois).chunk(2, dim=-1)
    shift, log_scale = in_float32(deltas).chunk(2, dim=-1)
    size = (right_bottom - left_top).abs()
    center = (left_top + right_bottom) * 0.5 + shift * size
    half = 0.5 * size * log_scale.clamp(max=MAX_LOG_SCALE).exp()
    return torch.cat([center - half, center + half], dim=-1)


def locate_sampling_points(rois: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return sampling points, `(batch, tokens, points, 2)` float32, as x and y, 0 to 1 across the image.

    The offsets of each token are normalized to a mean of 0 and a standard deviation of 1/3, in units of the RoI's
    size. Most points therefore lie inside the RoI.

    Args:
        rois (`torch.Tensor` of shape `(batch, tokens, 4)`): Left, top, right, bottom.
        offsets (`torch.Tensor` of shape `(batch, tokens, points, 2)`): Offsets in x and y.
    """
    left_top, right_bottom = in_float32(rois).unsqueeze(2).chunk(2, dim=-1)
    offsets = in_float32(offsets)
    if offsets.shape[0] == 0:
        # `offsets.var` would warn about an empty batch.
        return offsets
    variance = offsets.var(dim=2, keepdim=True)
    mean = offsets.mean(dim=2, keepdim=True)
    # If all points of a token coincide, the variance is 0. The clamp avoids the infinite gradient of `sqrt` at 0.
    offsets = (offsets - mean) / (3 * (variance.clamp(min=1e-12).sqrt() + 1e-5))
    return (left_top + right_bottom) * 0.5 + offsets * (right_bottom - left_top)


def sample_features(features: torch.Tensor, points: torch.Tensor, padding_mode: str) -> torch.Tensor:
    """Sample a feature map at points by bilinear interpolation in float32.

    Args:
        features (`torch.Tensor` of shape `(batch, channels, height, width)`): The feature map.
        points (`torch.Tensor` of shape `(batch, tokens, points, 2)`):
            x and y, 0 to 1 across the image. A batch of 1 is used for all images.
        padding_mode (`str`): `"border"` or `"zeros"`, for points outside the image.

    Returns:
        Samples, `(batch, tokens, points, channels)`. The samples at NaN points are NaN.
    """
    # The clamp keeps pixel indices in the range of integers. It changes only points that are far outside of the image,
    # where all samples are zero or equal to the border.
    points = points.to(torch.promote_types(in_float32(points).dtype, features.dtype)).clamp(-2, 3)
    # NaN is replaced, because `grid_sample` on CPUs accesses memory outside of the feature map at NaN.
    grid = (points.nan_to_num() * 2 - 1).expand(features.shape[0], -1, -1, -1)
    # The mask is NaN at NaN points and 0 elsewhere. A model that diverged therefore returns NaN.
    nan_mask = 0 * points.detach().sum(-1, keepdim=True)
    sampled = F.grid_sample(features.to(grid.dtype), grid, padding_mode=padding_mode, align_corners=False)
    return sampled.permute(0, 2, 3, 1) + nan_mask


class ClipGradient(torch.autograd.Function):
    """Identity function whose gradient is clamped to +-`bound`."""

    @staticmethod
    def forward(ctx, points, bound):
        ctx.bound = bound
        return points.view_as(points)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-ctx.bound, ctx.bound), None


def encode_rois(rois: torch.Tensor, hidden_size: int, kind: str = "reference") -> torch.Tensor:
    """Return the sinusoidal encoding, `(batch, tokens, hidden_size)` float32, of RoIs, `(batch, tokens, 4)`.

    `kind="paper"` follows supplement A.2 of the bootstrapping paper. Each coordinate has hidden_size/8 frequencies
    from 1 to 128, and its sines and cosines are interleaved. `kind="reference"` follows the authors' code. Each
    coordinate has hidden_size/4 frequencies from 1 to 128. Its channels are the sines at the frequencies with even
    indices, then the cosines at the frequencies with odd indices.
    """
    count = hidden_size // (8 if kind == "paper" else 4)
    frequencies = torch.linspace(0, math.log(128), count, device=rois.device).exp()
    angles = (in_float32(rois) * math.pi).unsqueeze(-1) * frequencies
    if kind == "paper":
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(2)
    return torch.cat([angles[..., 0::2].sin(), angles[..., 1::2].cos()], dim=-1).flatten(2)


class SparseFormerStem(nn.Module):
    """Early convolution of images to a feature map, `(batch, stem_channels, height / 4, width / 4)`."""

    def __init__(self, config: SparseFormerConfig):
        super().__init__()
        self.convolution = nn.Conv2d(config.num_channels, config.stem_channels, kernel_size=7, stride=2, padding=3)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        pixel_values = pixel_values.to(self.convolution.weight.dtype)
        # Pooling, normalizing and sampling are several times faster with channels last.
        pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)
        # The paper applies ReLU before pooling. ReLU after pooling has the same result at a quarter of the cost.
        features = F.max_pool2d(self.convolution(pixel_values), kernel_size=3, stride=2, padding=1).relu()
        # Sampling needs float32. The LayerNorm over channels has no parameters.
        features = in_float32(features.permute(0, 2, 3, 1))
        return F.layer_norm(features, features.shape[-1:], eps=1e-5).permute(0, 3, 1, 2)


class SparseFormerLatents(nn.Module):
    """Initial latent tokens, initial RoIs, [CLS] tokens and register tokens of a model. In v1, each latent token has
    its own embedding. In bootstrapped models, all latent tokens share one embedding."""

    def __init__(self, config: SparseFormerConfig):
        super().__init__()
        self.config = config
        embeddings = config.num_latent_tokens if config.is_v1 else 1
        self.token_embedding = nn.Parameter(torch.empty(embeddings, config.focusing_hidden_size))
        self.initial_rois = nn.Parameter(torch.empty(config.num_latent_tokens, 4, dtype=torch.float32))
        self.cls_token = self.register_tokens = None
        if config.num_class_tokens:
            self.cls_token = nn.Parameter(torch.empty(config.num_class_tokens, config.hidden_size))
        if config.num_register_tokens:
            self.register_tokens = nn.Parameter(torch.empty(config.num_register_tokens, config.hidden_size))

    def forward(self, batch_size: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the initial latent tokens and RoIs, which all images share, and the prefix tokens.

        Returns:
            The first `num_tokens` latent tokens, `(1, num_tokens, width)`, and their RoIs, `(1, num_tokens, 4)`
            float32. The third result is the [CLS] and register tokens, `(batch, prefix tokens, hidden_size)`, or None.
        """
        tokens = self.token_embedding.expand(len(self.initial_rois), -1)
        rois = in_float32(self.initial_rois)
        prefix = [token for token in (self.cls_token, self.register_tokens) if token is not None]
        # `repeat` returns copies. FSDP frees a module's parameters after its forward pass, so views would be invalid.
        return (
            tokens[:num_tokens].repeat(1, 1, 1),
            rois[:num_tokens].repeat(1, 1, 1),
            torch.cat(prefix).repeat(batch_size, 1, 1) if prefix else None,
        )

    def _apply(self, fn, recurse: bool = True):
        # RoIs stay in float32 when the model is cast to float16 or bfloat16. `from_pretrained` also keeps RoIs in
        # float32.
        rois = self.initial_rois.detach()
        super()._apply(fn, recurse)
        if self.initial_rois.itemsize < torch.float32.itemsize:
            self.initial_rois.data = rois.to(self.initial_rois.device, torch.float32)
        return self

    @torch.no_grad()
    def break_ties(self, first: int = 0, std: float = 0.05):
        """Add noise to the RoIs of tokens that have the same RoI and embedding as another token. Tokens before
        index `first` do not change. In the paper, 12 of 48 latent tokens have the same RoI and embedding. Without
        noise, these tokens would get equal gradients and stay equal."""
        embedding = self.token_embedding.expand(len(self.initial_rois), -1).to(self.initial_rois)
        starts = torch.cat([self.initial_rois, embedding], dim=1)
        tied = (starts[first:, None] == starts).all(dim=-1).sum(dim=1) > 1
        rois = self.initial_rois[first:]
        rois[tied] += std * torch.randn_like(rois[tied])

    @torch.no_grad()
    def resize_tokens(self, num_latent_tokens: int):
        """Drop the last latent tokens, or add latent tokens whose RoIs are those of `initial_rois`. `break_ties` adds
        noise to the added tokens that would otherwise be equal to another token."""
        kept = min(num_latent_tokens, len(self.initial_rois))
        if len(self.token_embedding) > 1:
            embedding = self.token_embedding
            # A new token gets the mean of all embeddings, because the encoder was trained with similar embeddings.
            new = embedding.mean(0, keepdim=True).expand(num_latent_tokens - kept, -1)
            self.token_embedding = nn.Parameter(torch.cat([embedding[:kept], new]), embedding.requires_grad)
        rois = initial_rois(num_latent_tokens - kept).to(self.initial_rois)
        self.initial_rois = nn.Parameter(torch.cat([self.initial_rois[:kept], rois]), self.initial_rois.requires_grad)
        self.break_ties(first=kept)


class SparseFormerMixing(nn.Module):
    """Adaptive mixing: each token generates two matrices that multiply the token's sampled features.

    The matrices have the shapes `(channels, channels)` and `(mixed_points, points)`. A linear layer to the token width
    follows. v1 has a bias and a GELU after each product. Bootstrapped models have one GELU after both products and no
    biases.
    """

    def __init__(self, config: SparseFormerConfig, hidden_size: int):
        super().__init__()
        self.shapes = (
            (config.stem_channels, config.stem_channels),
            (config.num_mixed_points, config.num_sampling_points),
        )
        bottleneck = config.mixing_hidden_size or hidden_size // 4
        self.layernorm = nn.LayerNorm(hidden_size, eps=config.focusing_layer_norm_eps)
        self.bottleneck = nn.Linear(hidden_size, bottleneck)
        self.generator = nn.Linear(bottleneck, sum(math.prod(shape) for shape in self.shapes))
        if config.is_v1:
            self.channel_bias = nn.Parameter(torch.empty(config.stem_channels))
            self.point_bias = nn.Parameter(torch.empty(config.num_mixed_points, 1))
        else:
            self.channel_bias = self.point_bias = None
        self.out_proj = nn.Linear(config.num_mixed_points * config.stem_channels, hidden_size)

    def forward(self, tokens: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """
        Args:
            tokens (`torch.Tensor` of shape `(batch, tokens, hidden_size)`):
                Tokens that generate the matrices. A batch of 1 is used for all images.
            sampled (`torch.Tensor` of shape `(batch, tokens, points, channels)`): Sampled features.

        Returns:
            Mixed features, `(batch, tokens, hidden_size)`.
        """
        parameters = self.generator(self.bottleneck(self.layernorm(tokens)))
        channel_matrix, point_matrix = parameters.split([math.prod(shape) for shape in self.shapes], dim=-1)
        mixed = sampled.to(parameters.dtype) @ channel_matrix.unflatten(-1, self.shapes[0])
        if self.channel_bias is not None:
            mixed = F.gelu(mixed + self.channel_bias).to(parameters.dtype)
        mixed = point_matrix.unflatten(-1, self.shapes[1]) @ mixed
        if self.point_bias is not None:
            mixed = mixed + self.point_bias
        return self.out_proj(F.gelu(mixed).flatten(2))


class SparseFormerSampling(nn.Module):
    """Sampling of features at points in each token's RoI, followed by adaptive mixing."""

    def __init__(self, config: SparseFormerConfig, hidden_size: int):
        super().__init__()
        self.num_points = config.num_sampling_points
        self.padding_mode = "zeros" if config.is_v1 else "border"
        self.clip_gradients = config.is_v1
        self.offset_layernorm = nn.LayerNorm(hidden_size, eps=config.focusing_layer_norm_eps)
        self.offset_proj = nn.Linear(hidden_size, 2 * config.num_sampling_points, bias=False)
        self.offset_bias = nn.Parameter(torch.empty(2 * config.num_sampling_points))
        self.mixing = SparseFormerMixing(config, hidden_size)

    def forward(
        self, tokens: torch.Tensor, rois: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual branch, `(batch, tokens, hidden_size)`, and the sampling points, `(batch, tokens,
        points, 2)`."""
        offsets = in_float32(self.offset_proj(self.offset_layernorm(tokens))) + in_float32(self.offset_bias)
        points = locate_sampling_points(rois, offsets.unflatten(-1, (self.num_points, 2)))
        # Points are expanded before `ClipGradient`, so that gradients are clipped for each image separately.
        points = points.expand(features.shape[0], -1, -1, -1)
        if self.clip_gradients and self.training:
            points = ClipGradient.apply(points, 1 / features.shape[2])
        return self.mixing(tokens, sample_features(features, points, self.padding_mode)), points


class SparseFormerPositionEncoding(nn.Module):
    """Linear projection of the sinusoidal encoding of RoIs. RoIs get no gradient."""

    def __init__(self, config: SparseFormerConfig, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.kind = config.roi_encoding
        self.layernorm = nn.LayerNorm(hidden_size, eps=config.focusing_layer_norm_eps)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, rois: torch.Tensor) -> torch.Tensor:
        encoding = encode_rois(rois.detach(), self.hidden_size, self.kind)
        return self.proj(self.layernorm(encoding.to(self.layernorm.weight.dtype)))


class SparseFormerRoIDeltas(nn.Module):
    """LayerNorm and one or two linear layers that compute RoI deltas, `(batch, tokens, 4)`, from tokens."""

    def __init__(self, config: SparseFormerConfig, hidden_size: int):
        super().__init__()
        self.layernorm = nn.LayerNorm(hidden_size, eps=config.focusing_layer_norm_eps)
        self.dense = None if config.is_v1 else nn.Linear(hidden_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, 4, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self.layernorm(tokens)
        return self.out_proj(tokens if self.dense is None else F.gelu(self.dense(tokens)))


class SparseFormerFocusingLayer(GradientCheckpointingLayer):
    """Focusing layer of the bootstrapping paper: sampling, position encoding, attention, MLP and RoI adjustment. The
    layer is executed several times, and each execution has its own drop path rate."""

    def __init__(self, config: SparseFormerConfig, drop_path_rates: Sequence[float]):
        super().__init__()
        self.drop_paths = nn.ModuleList(DropPath(rate) for rate in drop_path_rates)
        hidden_size = config.focusing_hidden_size
        eps = config.focusing_layer_norm_eps
        self.stage_embedding = None
        if config.num_focusing_iterations > 1:
            self.stage_embedding = nn.Parameter(torch.empty(config.num_focusing_iterations, hidden_size))
        self.sampling = SparseFormerSampling(config, hidden_size)
        self.position_encoding = SparseFormerPositionEncoding(config, hidden_size)
        self.layernorm_before = nn.LayerNorm(hidden_size, eps=eps)
        self.attention = SelfAttention(config, hidden_size, config.focusing_num_attention_heads)
        self.layernorm_after = nn.LayerNorm(hidden_size, eps=eps)
        self.mlp = MLP(hidden_size, 4 * hidden_size, "gelu")
        self.roi_deltas = SparseFormerRoIDeltas(config, hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, rois: torch.Tensor, features: torch.Tensor, iteration: int = 0, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch, tokens, width)`):
                Latent tokens. A batch of 1 is used for all images.
            rois (`torch.Tensor` of shape `(batch, tokens, 4)`): The tokens' RoIs. A batch of 1 is used for all images.
            features (`torch.Tensor` of shape `(batch, channels, height, width)`): Output of the stem.
            iteration (`int`, *optional*, defaults to 0): Index of the execution.

        Returns:
            The new tokens, the adjusted RoIs and the sampling points, `(batch, tokens, points, 2)`.
        """
        drop_path = self.drop_paths[iteration]
        if self.stage_embedding is not None:
            hidden_states = hidden_states + self.stage_embedding[iteration]
        branch, points = self.sampling(hidden_states, rois, features)
        hidden_states = hidden_states + drop_path(branch)
        hidden_states = hidden_states + self.position_encoding(rois)
        branch, _ = self.attention(self.layernorm_before(hidden_states), **kwargs)
        hidden_states = hidden_states + drop_path(branch)
        branch = self.mlp(self.layernorm_after(hidden_states))
        hidden_states = hidden_states + drop_path(branch)
        return hidden_states, adjust_rois(rois, self.roi_deltas(hidden_states)), points


class SparseFormerV1FocusingLayer(GradientCheckpointingLayer):
    """Focusing layer of the first paper (v1): attention, RoI adjustment, sampling and MLP. With `full_width`, it is
    also the first encoder block."""

    def __init__(self, config: SparseFormerConfig, drop_path_rates: Sequence[float], full_width: bool = False):
        super().__init__()
        self.drop_paths = nn.ModuleList(DropPath(rate) for rate in drop_path_rates)
        hidden_size = config.hidden_size if full_width else config.focusing_hidden_size
        self.sampling = SparseFormerSampling(config, hidden_size)
        self.layernorm_before = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config, hidden_size, config.num_attention_heads)
        self.layernorm_after = nn.LayerNorm(hidden_size, eps=config.layer_norm_eps)
        if full_width:
            self.mlp = MLP(hidden_size, config.intermediate_size, config.hidden_act)
        else:
            self.mlp = MLP(hidden_size, 4 * hidden_size, "gelu")
        self.roi_deltas = SparseFormerRoIDeltas(config, hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, rois: torch.Tensor, features: torch.Tensor, iteration: int = 0, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the layer with the arguments and return values of `SparseFormerFocusingLayer.forward`."""
        drop_path = self.drop_paths[iteration]
        branch, _ = self.attention(self.layernorm_before(hidden_states), **kwargs)
        hidden_states = hidden_states + drop_path(branch)
        # As in the authors' v1 code, drop path is also applied to RoI deltas.
        rois = adjust_rois(rois, drop_path(self.roi_deltas(hidden_states)))
        branch, points = self.sampling(hidden_states, rois, features)
        hidden_states = hidden_states + drop_path(branch)
        branch = self.mlp(self.layernorm_after(hidden_states))
        hidden_states = hidden_states + drop_path(branch)
        # In the first execution, `rois` has a batch of 1, because all images share the initial RoIs.
        return hidden_states, rois.expand(hidden_states.shape[0], -1, -1), points


class FinalSamplingLayer(GradientCheckpointingLayer):
    """Last layer of the focusing stage in the bootstrapping paper: sampling and position encoding at the width of the
    encoder. The layer does not adjust RoIs."""

    def __init__(self, config: SparseFormerConfig, drop_path_rate: float):
        super().__init__()
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate else nn.Identity()
        self.sampling = SparseFormerSampling(config, config.hidden_size)
        self.position_encoding = SparseFormerPositionEncoding(config, config.hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, rois: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new tokens and the sampling points, `(batch, tokens, points, 2)`."""
        branch, points = self.sampling(hidden_states, rois, features)
        hidden_states = hidden_states + self.drop_path(branch)
        return hidden_states + self.position_encoding(rois), points
