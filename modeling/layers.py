"""Layers, outputs and functions that the model families share."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput, logging

from .hub import HubModel


logger = logging.get_logger(__name__)

# Standard deviation of new linear weights, as in the SparseFormer authors' reference implementation.
INITIALIZER_STD = 0.02


def uniform_init_(layer: nn.Module):
    """Initialize weights and biases uniformly in +-1 / sqrt(fan_in), PyTorch's default."""
    bound = layer.weight[0].numel() ** -0.5
    for parameter in layer.parameters():
        init.uniform_(parameter, -bound, bound)


def in_float32(values: torch.Tensor) -> torch.Tensor:
    """Cast values to float32. Return float64 values unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    """Compute attention with a softmax in float32.

    Returns:
        The output, `(batch, queries, heads, head_dim)`, and the attention weights, `(batch, heads, queries, keys)`.
    """
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = F.softmax(weights, dim=-1, dtype=torch.promote_types(weights.dtype, torch.float32)).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def rotary_table(
    centers: torch.Tensor, theta: float, scale: tuple[float, float], shift: tuple[float, float], head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of rotary position embeddings (Su et al. 2021, arXiv 2104.09864) for two axes.

    Each axis has n = head_dim / 4 frequencies. A token with its center at c on an axis is rotated by the angles
    (scale * c + shift) * theta^(-i / n), i = 0, …, n - 1. DINOv3 (Siméoni et al. 2025, arXiv 2508.10104) has
    scale = 4 pi and shift = -2 pi. In EVA-02 (Fang et al. 2023, arXiv 2303.11331), scale * c + shift is the
    position of the center in patches.

    Args:
        centers (`torch.Tensor` of shape `(..., 2)`): Centers of tokens as y and x, 0 to 1 across the image.

    Returns:
        Cosines and sines, `(..., head_dim / 2)` in float32: the frequencies of y, then those of x.
    """
    # `scale` and `shift` are Python numbers, because tensors on the CPU would be copied to the device at each call.
    axes = zip(in_float32(centers).unbind(-1), scale, shift, strict=True)
    coordinates = torch.stack([center * factor + offset for center, factor, offset in axes], dim=-1)
    steps = torch.arange(head_dim // 4, device=centers.device, dtype=torch.float32) / (head_dim // 4)
    angles = (coordinates.unsqueeze(-1) * theta**-steps).flatten(-2)
    return angles.cos(), angles.sin()


def rotate_tokens(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int) -> torch.Tensor:
    """Rotate the queries or keys of all tokens from index `first` on. Channel i rotates with channel i + head_dim / 2.

    Args:
        states (`torch.Tensor` of shape `(batch, heads, tokens, head_dim)`): Queries or keys.
        cos, sin (`torch.Tensor` of shape `(batch, rotated tokens, head_dim / 2)`):
            Results of `rotary_table`. A batch of 1 is used for all images.
    """
    if states.shape[2] <= first:
        return states
    cos = cos.unsqueeze(1).to(states.dtype)
    sin = sin.unsqueeze(1).to(states.dtype)
    low, high = states[:, :, first:].chunk(2, dim=-1)
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    return torch.cat([states[:, :, :first], rotated], dim=2)


def rotary_embeddings(config, rois: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `rotary_table` for the centers of RoIs: cosines and sines, each `(batch, tokens, head_dim / 2)`. RoIs
    get no gradient. `config.rope_theta` must be set."""
    left_top, right_bottom = in_float32(rois.detach()).chunk(2, dim=-1)
    centers = ((left_top + right_bottom) * 0.5).flip(-1)
    head_dim = config.hidden_size // config.num_attention_heads
    top, left, bottom, right = config.rope_coordinates
    return rotary_table(centers, config.rope_theta, (bottom - top, right - left), (top, left), head_dim)


class SelfAttention(nn.Module):
    """Multi-head self-attention through Transformers' attention interface.

    Args:
        head_norm (`Callable[[int], nn.Module]`, *optional*):
            Function from a width to a norm. The norms are applied to the queries and keys of each head.
        output_norm (`Callable[[int], nn.Module]`, *optional*):
            Function from a width to a norm. The norm is applied to the input of the output projection.
    """

    def __init__(
        self,
        config,
        hidden_size: int,
        num_heads: int,
        qkv_bias: bool = True,
        head_norm: Callable[[int], nn.Module] | None = None,
        output_norm: Callable[[int], nn.Module] | None = None,
    ):
        super().__init__()
        self.config = config
        self.head_dim = hidden_size // num_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.q_norm = head_norm(self.head_dim) if head_norm else None
        self.k_norm = head_norm(self.head_dim) if head_norm else None
        self.output_norm = output_norm(hidden_size) if output_norm else None
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        queries: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Tokens that are attended to.
            queries (`torch.Tensor` of shape `(batch, queries, hidden_size)`, *optional*):
                Tokens that attend; by default `hidden_states`.
            position_embeddings (`tuple` of two `torch.Tensor`, *optional*):
                Results of `rotary_table`, `(batch, rotated tokens, head_dim / 2)`. The rotated tokens are the last
                tokens of the sequence.
            attention_mask (`torch.Tensor`, *optional*): Mask from `create_bidirectional_mask` of Transformers, or
                `(batch, 1, 1, tokens)` floats that are added to the scores.

        Returns:
            The output, `(batch, queries, hidden_size)`, and the attention weights or `None`.
        """
        queries = hidden_states if queries is None else queries
        heads = (-1, self.head_dim)
        query = self.q_proj(queries).unflatten(-1, heads).transpose(1, 2)
        key = self.k_proj(hidden_states).unflatten(-1, heads).transpose(1, 2)
        value = self.v_proj(hidden_states).unflatten(-1, heads).transpose(1, 2)
        if self.q_norm is not None:
            query = self.q_norm(query)
            key = self.k_norm(key)
        if position_embeddings is not None:
            first = key.shape[2] - position_embeddings[0].shape[1]
            query = rotate_tokens(query, *position_embeddings, first)
            key = rotate_tokens(key, *position_embeddings, first)
        implementation = self.config._attn_implementation
        is_bias = isinstance(attention_mask, torch.Tensor) and attention_mask.is_floating_point()
        if is_bias and implementation != "eager":
            # FlashAttention cannot add a float mask to the scores, and flex attention fails on CPUs.
            implementation = "sdpa"
        if key.shape[0] == 0:
            # Transformers' attention implementations cannot reshape an empty batch, but `eager_attention_forward` can.
            implementation = "eager"
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, weights = attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        output = output.reshape(queries.shape)
        if self.output_norm is not None:
            output = self.output_norm(output)
        return self.o_proj(output), weights


class MLP(nn.Module):
    """Two linear layers with an activation between them.

    Args:
        gated (`bool`, *optional*, defaults to `False`):
            Whether a gate, a linear layer parallel to the first layer, is added (Shazeer 2020, arXiv 2002.05202). The
            activation is applied to the gate's output, and the result is multiplied by the first layer's output. With
            `hidden_act="silu"`, the MLP is a SwiGLU.
        norm (`Callable[[int], nn.Module]`, *optional*):
            Function from a width to a norm. The norm is applied to the input of the second layer.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        gated: bool = False,
        norm: Callable[[int], nn.Module] | None = None,
    ):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size) if gated else None
        self.fc1 = nn.Linear(hidden_size, intermediate_size)
        self.activation = ACT2FN[hidden_act]
        self.norm = norm(intermediate_size) if norm else nn.Identity()
        self.fc2 = nn.Linear(intermediate_size, hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = self.fc1(hidden_states)
        if self.gate_proj is None:
            inner = self.activation(inner)
        else:
            inner = self.activation(self.gate_proj(hidden_states)) * inner
        return self.fc2(self.norm(inner))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): set a residual branch, `(batch, ...)`, to zero for random training images.

    Args:
        rate (`float`): Probability that the branch of an image is set to zero.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if self.rate == 0.0 or not self.training:
            return branch
        keep = branch.new_empty((branch.shape[0],) + (1,) * (branch.ndim - 1)).bernoulli_(1 - self.rate)
        return branch * keep / (1 - self.rate)


def norm_factory(config) -> Callable[[int], nn.Module]:
    """Return a function that makes a norm of a given width, as a `SparseFormerBaseConfig` specifies."""
    norm_class = nn.LayerNorm if config.norm_type == "layer_norm" else nn.RMSNorm
    return functools.partial(norm_class, eps=config.layer_norm_eps)


class EncoderLayer(GradientCheckpointingLayer):
    """Pre-norm transformer block of `SparseFormerModel` and `PatchSparseFormerModel`. Options such as layer scale and
    gated MLPs allow students to inherit blocks of different vision transformers."""

    def __init__(self, config, drop_path_rate: float):
        super().__init__()
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate else nn.Identity()
        hidden_size = config.hidden_size
        norm = norm_factory(config)
        self.layernorm_before = norm(hidden_size)
        self.attention = SelfAttention(
            config,
            hidden_size,
            config.num_attention_heads,
            head_norm=norm if "query_key" in config.extra_norms else None,
            output_norm=norm if "attention" in config.extra_norms else None,
        )
        self.layernorm_after = norm(hidden_size)
        self.mlp = MLP(
            hidden_size,
            config.intermediate_size,
            config.hidden_act,
            config.gated_mlp,
            norm if "mlp" in config.extra_norms else None,
        )
        self.attention_scale = nn.Parameter(torch.ones(hidden_size)) if config.layer_scale else None
        self.mlp_scale = nn.Parameter(torch.ones(hidden_size)) if config.layer_scale else None

    def forward(self, hidden_states: torch.Tensor, num_queries: int | None = None, **kwargs) -> torch.Tensor:
        """Return the first `num_queries` output tokens, by default all. Each of them attends to all input tokens."""
        tokens = self.layernorm_before(hidden_states)
        branch, _ = self.attention(tokens, tokens[:, :num_queries], **kwargs)
        branch = branch if self.attention_scale is None else branch * self.attention_scale
        hidden_states = hidden_states[:, :num_queries] + self.drop_path(branch)
        branch = self.mlp(self.layernorm_after(hidden_states))
        branch = branch if self.mlp_scale is None else branch * self.mlp_scale
        return hidden_states + self.drop_path(branch)


class AttentionPooling(nn.Module):
    """Attention of one learned query to all tokens. An MLP follows in SigLIP, but not in AIMv2."""

    def __init__(self, config):
        super().__init__()
        hidden_size = config.hidden_size
        self.probe = nn.Parameter(torch.empty(1, hidden_size))
        self.attention = SelfAttention(
            config, hidden_size, config.pooling_num_attention_heads or config.num_attention_heads
        )
        self.layernorm = self.mlp = None
        if config.pooling_intermediate_size != 0:
            self.layernorm = norm_factory(config)(hidden_size)
            self.mlp = MLP(
                hidden_size,
                config.pooling_intermediate_size or config.intermediate_size,
                config.hidden_act,
            )

    def forward(self, hidden_states: torch.Tensor, areas: torch.Tensor | None = None) -> torch.Tensor:
        """Pool `(batch, tokens, hidden_size)` to `(batch, hidden_size)`. `areas`, `(batch, tokens)`, are weights: a
        token of area 2 counts as two tokens."""
        mask = None if areas is None else areas.to(hidden_states.dtype).log()[:, None, None]
        pooled, _ = self.attention(hidden_states, self.probe.repeat(hidden_states.shape[0], 1, 1), attention_mask=mask)
        if self.mlp is not None:
            pooled = pooled + self.mlp(self.layernorm(pooled))
        return pooled[:, 0]


class Pooler(nn.Module):
    """Pool the tokens of each image to one embedding, see `pooling` of `SparseFormerBaseConfig`.

    The final norm and the attention pooling are arguments of `forward`, because checkpoints store the weights of these
    two modules outside of the pooler.
    """

    def __init__(self, config):
        super().__init__()
        self.pooling = config.pooling
        self.num_prefix_tokens = config.num_prefix_tokens
        self.class_tokens = list(config.pooled_class_tokens or range(config.num_class_tokens))
        self.norm_last = config.final_norm == "after_pooling"

    def forward(
        self,
        tokens: torch.Tensor,
        norm: nn.Module,
        attention_pooling: AttentionPooling | None = None,
        areas: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            tokens (`torch.Tensor` of shape `(batch, prefix + latent tokens, hidden_size)`): Output of the last block.
            norm (`nn.Module`): The final norm, applied before or after pooling (`config.final_norm`).
            attention_pooling (`AttentionPooling`, *optional*):
                Module that pools the tokens if `config.pooling` is `"attention"` or `"latent_attention"`.
            areas (`torch.Tensor` of shape `(batch, latent tokens)`, *optional*):
                Weights of latent tokens, 1 on average. Padding has a weight of 0.

        Returns:
            The pooled embedding, `(batch, config.pooled_size)`.
        """
        if self.pooling in ("cls", "class_mean"):
            tokens = torch.stack([tokens[:, index] for index in self.class_tokens], dim=1)
            areas = None
            if self.pooling == "cls":
                return norm(tokens).flatten(1)
        elif self.pooling == "cls_and_latent_mean":
            tokens = norm(tokens)
            latent = tokens[:, self.num_prefix_tokens :]
            mean = latent.mean(dim=1) if areas is None else weighted_mean(latent, areas)
            return torch.cat([tokens[:, 0], mean], dim=1)
        elif self.pooling in ("latent_mean", "latent_attention"):
            tokens = tokens[:, self.num_prefix_tokens :]
        elif areas is not None:
            areas = F.pad(areas, (self.num_prefix_tokens, 0), value=1.0)
        tokens = tokens if self.norm_last else norm(tokens)
        if attention_pooling is not None:
            pooled = attention_pooling(tokens, areas)
        else:
            pooled = tokens.mean(dim=1) if areas is None else weighted_mean(tokens, areas)
        return norm(pooled) if self.norm_last else pooled


def weighted_mean(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of tokens, `(batch, tokens, hidden_size)`, with weights `(batch, tokens)`."""
    weights = weights.to(tokens.dtype)
    return (tokens * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True)


@dataclass
class SparseFormerModelOutput(BaseModelOutputWithPooling):
    """Output of `SparseFormerModel` and `PatchSparseFormerModel`.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(batch, prefix + latent tokens, hidden_size)`):
            Tokens after the final norm. Class tokens and registers come first.
        pooler_output (`torch.FloatTensor` of shape `(batch, pooled_size)`): The pooled embedding.
        hidden_states (`tuple`, *optional*): Input of the first encoder block and the output of each block.
        attentions (`tuple`, *optional*): Attention weights `(batch, heads, tokens, tokens)` of each encoder block.
        rois (`tuple`, *optional*, with `output_rois=True`):
            RoIs of the latent tokens after each adjustment, or the cells of a PatchSparseFormer: `(batch, latent
            tokens, 4)` float32. The values are left, top, right and bottom, 0 to 1 across the image, not clamped.
        sampling_points (`tuple`, *optional*, with `output_rois=True`):
            Points of each sampling, `(batch, latent tokens, points, 2)` float32: x and y, 0 to 1 across the image.
        stem_features (`torch.FloatTensor`, *optional*, with `output_stem_features=True`):
            Feature map that tokens sample, `(batch, stem_channels, height / 4, width / 4)`.
        attention_forecast (`torch.FloatTensor`, *optional*, with `output_attention_forecast=True`):
            Predicted attention of the teacher to each cell of a grid, `(batch, rows, columns)` float32. The values are
            logits: their softmax over all cells is the attention. Only a PatchSparseFormer with `placement="content"`
            returns them. The grid has twice the rows and columns of the tokens' grid.
    """

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    stem_features: torch.FloatTensor | None = None
    attention_forecast: torch.FloatTensor | None = None


@dataclass
class SparseFormerImageClassifierOutput(ImageClassifierOutput):
    """`ImageClassifierOutput` with the RoIs and sampling points of a `SparseFormerModelOutput`."""

    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class SparseFormerVisionModelWithProjectionOutput(ModelOutput):
    """`SparseFormerModelOutput` with `image_embeds`, `(batch, projection_dim)`, the projection of `pooler_output`."""

    image_embeds: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    rois: tuple[torch.FloatTensor, ...] | None = None
    sampling_points: tuple[torch.FloatTensor, ...] | None = None
    stem_features: torch.FloatTensor | None = None
    attention_forecast: torch.FloatTensor | None = None


class SparseFormerBasePreTrainedModel(HubModel):
    """Base class of `SparseFormerPreTrainedModel` and `PatchSparseFormerPreTrainedModel`."""

    base_model_prefix = "sparseformer"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    embeds = {"image": ("forward", "pooler_output")}
    embedding_arguments = ("num_tokens",)
    # Whether the last block may skip tokens that are not pooled. `insert_context_broadcast` sets this attribute to
    # False on the base model, because Context Broadcasting needs all tokens.
    skips_unread_tokens = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=INITIALIZER_STD)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, EncoderLayer):
            if module.mlp_scale is not None:
                init.ones_(module.attention_scale)
                init.ones_(module.mlp_scale)
        elif isinstance(module, AttentionPooling):
            init.normal_(module.probe)
        else:
            super()._init_weights(module)

    def set_num_tokens(self, num_tokens: int | None):
        """Set the default number of latent tokens, without [CLS].

        The configuration stores this number for saved and exported models and for pipelines. Weights do not change.

        Args:
            num_tokens (`int` or `None`): Number of latent tokens; `None` for all.

        Raises:
            ValueError: if `num_tokens` is below 1 or above `num_latent_tokens`, or if a PatchSparseFormer has no grid
                with that number of cells.
        """
        self.config.num_tokens = None if num_tokens is None else check_num_tokens(self.config, num_tokens)

    def num_last_queries(self, output_hidden_states: bool | None = None, output_attentions: bool | None = None, **_):
        """Return the number of class tokens if the last block may compute only the class tokens. Return None if the
        last block must compute all tokens. Arguments are those of `forward`."""
        config = self.config
        records_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        records_attentions = config.output_attentions if output_attentions is None else output_attentions
        if not self.skips_unread_tokens or config.pooling != "cls" or records_states or records_attentions:
            return None
        return config.num_class_tokens


def check_num_tokens(config, num_tokens: int) -> int:
    """Check and return `num_tokens`. Warn once if the model was not trained with this number of latent tokens. Raise a
    ValueError in the cases of `SparseFormerBasePreTrainedModel.set_num_tokens`."""
    if type(num_tokens) is not int or not 1 <= num_tokens <= config.num_latent_tokens:
        raise ValueError(
            f"`num_tokens` is {num_tokens!r}, expected 1 to {config.num_latent_tokens}, the number of latent tokens "
            "of this model (without [CLS]). `resize_tokens` adds more, which then have to be trained."
        )
    if config.has_patch_embedding:
        config.grid_of(num_tokens)
    if num_tokens not in config.trained_token_counts and not torch.compiler.is_compiling():
        trained = ", ".join(map(str, config.trained_token_counts))
        logger.warning_once(
            f"`num_tokens` is {num_tokens}, but this model was trained with {trained} latent tokens and may be much "
            "worse with other numbers. Bootstrap it with several numbers of tokens to choose between them."
        )
    return num_tokens


@dataclass
class AdaptiveClassifierOutput(ModelOutput):
    """Output of `classify_adaptively`.

    Args:
        logits (`torch.FloatTensor` of shape `(batch, num_labels)`): Logits from the last pass of each image.
        num_tokens (`torch.LongTensor` of shape `(batch,)`): Number of tokens in the last pass of each image.
        confidence (`float`): Argument of `classify_adaptively`.
    """

    logits: torch.FloatTensor | None = None
    num_tokens: torch.LongTensor | None = None
    confidence: float | None = None


def class_scores(config, logits: torch.Tensor) -> torch.Tensor:
    """Convert logits to float32 scores as Transformers' pipeline does. Logits of regression models do not change.
    Logits of multi-label models and of models with one label get a sigmoid. Other logits get a softmax."""
    logits = in_float32(logits)
    if config.problem_type == "regression":
        return logits
    is_multi_label = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return logits.sigmoid() if is_multi_label else logits.softmax(-1)


class AdaptiveClassifierMixin:
    """Mixin for image classifiers that use more tokens for images with uncertain predictions."""

    @torch.no_grad()
    def classify_adaptively(
        self,
        pixel_values: torch.Tensor,
        confidence: float = 0.9,
        token_counts: Sequence[int] | None = None,
        placements: Sequence[str] | None = None,
    ) -> AdaptiveClassifierOutput:
        """Classify images with few tokens. Classify uncertain images again with more tokens.

        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`): Normalized images.
            confidence (`float`, *optional*, defaults to 0.9):
                Threshold from 0 to 1. An image whose likeliest class has a lower probability is uncertain.
            token_counts (sequence of `int`, *optional*):
                Numbers of tokens to try, in order. By default, there are two numbers. The first is the smallest of
                `config.elastic_token_counts`. The second is `config.num_tokens` or, if `config.num_tokens` is None,
                the number of all tokens. A third number between these two costs more than it saves (docs/results.md).
            placements (sequence of `str`, *optional*):
                Placement of the tokens for each number of tokens, `"grid"` or `"content"`, for a PatchSparseFormer. By
                default, each look has the model's default placement. If `config.placement` is `"grid_then_content"`,
                the first placement is `"grid"`, and all others are `"content"`.
        """
        config = self.config
        if token_counts is None:
            most = config.default_num_tokens
            token_counts = sorted({min(config.trained_token_counts[0], most), most})
        if not 0 <= confidence <= 1:
            raise ValueError(f"`confidence` is {confidence}, expected a probability from 0 to 1.")
        if not token_counts:
            raise ValueError("`token_counts` is empty, expected the numbers of tokens to try.")
        if placements is None and getattr(config, "placement", None) == "grid_then_content":
            placements = ["grid"] + ["content"] * (len(token_counts) - 1)
        if placements is not None and len(placements) != len(token_counts):
            raise ValueError(f"`placements` has {len(placements)} values, expected one for each of {token_counts}.")
        if placements is not None and not config.has_patch_embedding:
            raise ValueError(f"`placements` is {placements}, expected None for a model with a focusing stage.")
        if config.problem_type == "regression":
            raise ValueError("`confidence` is a probability, and a regression has none; choose `num_tokens` instead.")
        inputs = {"pixel_values": pixel_values}
        if hasattr(self.base_model, "stem"):
            # The features of the stem do not depend on the number of tokens, so the stem runs once for all
            # `token_counts`.
            inputs["features"] = self.base_model.stem(pixel_values)
        unfinished = torch.arange(len(pixel_values), device=pixel_values.device)
        logits = num_tokens = None
        for look, count in enumerate(token_counts):
            chosen = {name: tensor[unfinished] for name, tensor in inputs.items()}
            if placements is not None:
                chosen["placement"] = placements[look]
            new_logits = self(**chosen, num_tokens=count).logits
            if logits is None:
                logits = new_logits
                num_tokens = torch.full_like(unfinished, count)
            else:
                logits = logits.index_copy(0, unfinished, new_logits)
                num_tokens = num_tokens.index_fill(0, unfinished, count)
            unfinished = unfinished[class_scores(config, new_logits).amax(dim=-1) < confidence]
            if not len(unfinished):
                break
        return AdaptiveClassifierOutput(logits=logits, num_tokens=num_tokens, confidence=confidence)


def resize(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize images, `(batch, channels, height, width)`, in float32. Images of the requested size are returned
    unchanged, except in exported programs with dynamic sizes."""
    is_static = all(isinstance(side, int) for side in (*size, *images.shape[-2:]))
    if is_static and size == tuple(images.shape[-2:]):
        return images
    return F.interpolate(in_float32(images), size, mode="bilinear", antialias=True)


def image_classification_loss(
    logits: torch.Tensor, labels: torch.Tensor, config, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Compute the loss of an image classifier in float32 for `config.problem_type`. If the problem type is unset, it
    is inferred from the labels and stored.

    `Trainer` passes `num_items_in_batch` when it accumulates gradients. The summed loss is divided by this number for
    every problem type, so that accumulated gradients equal the gradient of a large batch. Transformers'
    `self.loss_function` divides by this number only if labels are class indices.

    Args:
        logits (`torch.FloatTensor` of shape `(batch, num_labels)`): Scores of the classes.
        labels (`torch.Tensor`):
            `(batch,)` class indices, `(batch, num_labels)` zeros and ones for multi-label classification, or floats
            for regression.
        num_items_in_batch (`int`, *optional*): Number of labels by which the summed loss is divided.
    """
    if config.problem_type is None:
        if config.num_labels == 1:
            config.problem_type = "regression"
        elif labels.is_floating_point():
            config.problem_type = "multi_label_classification"
        else:
            config.problem_type = "single_label_classification"
    logits = in_float32(logits)
    labels = labels.to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    if config.problem_type == "single_label_classification":
        loss = F.cross_entropy(logits, labels, reduction=reduction)
    elif config.problem_type == "regression":
        loss = F.mse_loss(logits, labels.reshape(logits.shape).to(logits.dtype), reduction=reduction)
    else:
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
