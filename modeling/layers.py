"""Building blocks that the model families share."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput, logging


logger = logging.get_logger(__name__)

# Standard deviation of fresh linear weights, the reference implementation's.
INITIALIZER_STD = 0.02


def in_float32(values: torch.Tensor) -> torch.Tensor:
    """Return values in float32, or in float64 if they have that already."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Softmax attention that returns its weights, `(batch, heads, queries, keys)`; the softmax is in float32."""
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = F.softmax(weights, dim=-1, dtype=torch.promote_types(weights.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def rotary_table(
    centers: torch.Tensor, theta: float, scale: tuple[float, float], shift: tuple[float, float], head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of the angles by which a token's queries and keys are rotated, in float32.

    Rotary positions (Su et al. 2021, arXiv 2104.09864) of two axes, each with a quarter of the channels' frequencies:
    a token at `(y, x)` has the angles (scale * center + shift) * theta^(-i / n), i = 0, …, n - 1, n = head_dim / 4.
    With scale = 4 pi and shift = -2 pi these are 2 pi (2 c - 1) f, DINOv3's (Siméoni et al. 2025, arXiv 2508.10104);
    EVA-02 (Fang et al. 2023, arXiv 2303.11331) counts patches. Neither needs a grid: the formula holds at any center.

    `centers` are `(..., 2)` as y, x, 0 to 1 across the image, results `(..., head_dim / 2)`, first the frequencies of
    y, then those of x.
    """
    # Numbers of Python instead of tensors, which a device would wait for.
    axes = zip(in_float32(centers).unbind(-1), scale, shift, strict=True)
    coordinates = torch.stack([center * factor + offset for center, factor, offset in axes], dim=-1)
    steps = torch.arange(head_dim // 4, device=centers.device, dtype=torch.float32) / (head_dim // 4)
    angles = (coordinates.unsqueeze(-1) * theta**-steps).flatten(-2)
    return angles.cos(), angles.sin()


def rotate_tokens(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int) -> torch.Tensor:
    """Rotate the tokens of queries or keys, `(batch, heads, tokens, head_dim)`, from number `first` on, by the angles
    of `rotary_table`, `(batch, rotated tokens, head_dim / 2)`."""
    if states.shape[2] <= first:
        return states
    cos = cos.unsqueeze(1).to(states.dtype)
    sin = sin.unsqueeze(1).to(states.dtype)
    return torch.cat([states[:, :, :first], rotate_half(states[:, :, first:], cos, sin)], dim=2)


def rotary_embeddings(config, rois: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the rotary positions of tokens with these RoIs, `(batch, tokens, 4)`, as `SelfAttention` takes them: a
    token without a grid is rotated as a patch around the center of its RoI would be. RoIs get no gradient."""
    if config.rope_theta is None:
        return None
    left_top, right_bottom = in_float32(rois.detach()).chunk(2, dim=-1)
    centers = ((left_top + right_bottom) * 0.5).flip(-1)
    head_dim = config.hidden_size // config.num_attention_heads
    top, left, bottom, right = config.rope_coordinates
    return rotary_table(centers, config.rope_theta, (bottom - top, right - left), (top, left), head_dim)


def rotate_half(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i with channel i + head_dim / 2 of states `(batch, heads, tokens, head_dim)`, by cosines and
    sines that broadcast with `(batch, heads, tokens, head_dim / 2)`."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class SelfAttention(nn.Module):
    """Multi-head attention through Transformers' attention interface, of tokens to themselves or of other queries.
    `head_norm` makes the norms of each head's queries and keys, `output_norm` that before the output projection, given
    their width."""

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
        """Return the output for each of the first tokens, `queries`, by default all, which attend to all, `(batch,
        tokens, hidden_size)`, and the attention weights if the implementation has them. `position_embeddings` are the
        cosines and sines, `(batch, rotated tokens, head_dim / 2)`, of the last tokens; `attention_mask`, `(batch, 1,
        1, tokens)`, is added to the scores."""
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
        if attention_mask is not None and attention_mask.is_floating_point() and "flash" in str(implementation):
            # FlashAttention adds nothing to scores.
            implementation = "sdpa"
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, weights = attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        output = output.reshape(queries.shape)
        if self.output_norm is not None:
            output = self.output_norm(output)
        return self.o_proj(output), weights


class MLP(nn.Module):
    """Two linear layers with an activation between, and a norm before the second, which `norm` makes, given its width.
    With a gate (Shazeer 2020, arXiv 2002.05202, SwiGLU for "silu"), the activated gate multiplies the first layer."""

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


def drop_path(branch: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    """Stochastic depth (Huang et al. 2016): zeroes a residual branch for whole images, `(batch, ...)`."""
    if rate == 0.0 or not training:
        return branch
    keep = branch.new_empty((branch.shape[0],) + (1,) * (branch.ndim - 1)).bernoulli_(1 - rate)
    return branch * keep / (1 - rate)


def norm_factory(config) -> Callable[[int], nn.Module]:
    """Norm-layer factory for a `SparseFormerBaseConfig`: makes a norm, given its width."""
    norm_class = nn.LayerNorm if config.norm_type == "layer_norm" else nn.RMSNorm
    return functools.partial(norm_class, eps=config.layer_norm_eps)


class EncoderLayer(GradientCheckpointingLayer):
    """A pre-norm transformer block of a SparseFormer: attention and MLP, each of normalized tokens, with the options
    of the vision transformers from which students inherit blocks."""

    def __init__(self, config, drop_path_rate: float):
        super().__init__()
        self.drop_path_rate = drop_path_rate
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

    def draw(self, std: float):
        """Start layer scale at 1."""
        if self.mlp_scale is not None:
            init.ones_(self.attention_scale)
            init.ones_(self.mlp_scale)

    def forward(self, hidden_states: torch.Tensor, num_queries: int | None = None, **kwargs) -> torch.Tensor:
        """`(batch, tokens, hidden_size)` to the same shape, or, with `num_queries`, to the first tokens alone, which
        attend to all."""
        tokens = self.layernorm_before(hidden_states)
        branch, _ = self.attention(tokens, tokens[:, :num_queries], **kwargs)
        branch = branch if self.attention_scale is None else branch * self.attention_scale
        hidden_states = hidden_states[:, :num_queries] + drop_path(branch, self.drop_path_rate, self.training)
        branch = self.mlp(self.layernorm_after(hidden_states))
        branch = branch if self.mlp_scale is None else branch * self.mlp_scale
        return hidden_states + drop_path(branch, self.drop_path_rate, self.training)


class AttentionPooling(nn.Module):
    """One learned query that attends to all tokens, then an MLP (SigLIP); AIMv2's has none."""

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

    def draw(self, std: float):
        """Draw the query as the reference implementation does."""
        init.normal_(self.probe)

    def forward(self, hidden_states: torch.Tensor, areas: torch.Tensor | None = None) -> torch.Tensor:
        """`(batch, tokens, hidden_size)` to `(batch, hidden_size)`. A token of area 2 counts as two, `(batch,
        tokens)`."""
        mask = None if areas is None else areas.log()[:, None, None]
        pooled, _ = self.attention(hidden_states, self.probe.repeat(len(hidden_states), 1, 1), attention_mask=mask)
        if self.mlp is not None:
            pooled = pooled + self.mlp(self.layernorm(pooled))
        return pooled[:, 0]


def pool_tokens(
    tokens: torch.Tensor,
    pooling: str,
    norm: Callable[[torch.Tensor], torch.Tensor],
    num_prefix_tokens: int,
    class_tokens: Sequence[int] = (),
    norm_last: bool = False,
    attend: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None,
    areas: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool tokens after the last block to one embedding of each image.

    Args:
        tokens (`torch.Tensor`): `(batch, prefix + other tokens, hidden_size)`.
        pooling (`str`): `pooling` of a `SparseFormerBaseConfig`.
        class_tokens (sequence of `int`): The class tokens that are pooled.
        norm_last (`bool`): Whether means are taken before the norm.
        attend (`Callable`, *optional*): Attention pooling.
        areas (`torch.Tensor`, *optional*): Weights of the other tokens, `(batch, other tokens)`, 1 on average but for
            those of weight 0; all count alike by default.
    """
    if pooling in ("cls", "class_mean"):
        tokens = torch.stack([tokens[:, index] for index in class_tokens], dim=1)
        if pooling == "cls":
            return norm(tokens).flatten(1)
        areas = None
    if areas is not None:
        areas = F.pad(areas.to(tokens.dtype), (num_prefix_tokens, 0), value=1.0)
    if pooling == "cls_and_latent_mean":
        tokens = norm(tokens)
        latent = tokens[:, num_prefix_tokens:]
        mean = latent.mean(dim=1) if areas is None else weighted_mean(latent, areas[:, num_prefix_tokens:])
        return torch.cat([tokens[:, 0], mean], dim=1)
    if pooling in ("latent_mean", "latent_attention"):
        tokens = tokens[:, num_prefix_tokens:]
        areas = None if areas is None else areas[:, num_prefix_tokens:]
    tokens = tokens if norm_last else norm(tokens)
    if pooling in ("attention", "latent_attention"):
        pooled = attend(tokens, areas)
    else:
        pooled = tokens.mean(dim=1) if areas is None else weighted_mean(tokens, areas)
    return norm(pooled) if norm_last else pooled


def weighted_mean(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean of tokens `(batch, tokens, hidden_size)` by weights `(batch, tokens)`."""
    return (tokens * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True)


def reads_class_tokens_alone(config, **kwargs) -> bool:
    """Whether of the last block a call with these arguments reads nothing but class tokens."""
    names = ("output_hidden_states", "output_attentions")
    recorded = any(kwargs.get(name, getattr(config, name, False)) for name in names)
    return config.pooling == "cls" and not recorded


def check_num_tokens(config, num_tokens: int) -> int:
    """Return the count of latent tokens that is asked for, with the errors of `set_num_tokens`. Warn once if the model
    was not trained for it."""
    if type(num_tokens) is not int or not 1 <= num_tokens <= config.num_latent_tokens:
        raise ValueError(
            f"`num_tokens` is {num_tokens!r}, expected 1 to {config.num_latent_tokens}, the latent tokens that this "
            "model has; `resize_tokens` adds more, which then have to be trained."
        )
    if num_tokens not in config.trained_token_counts and not torch.compiler.is_compiling():
        trained = ", ".join(map(str, config.trained_token_counts))
        logger.warning_once(
            f"This model was trained with {trained} latent tokens and is asked for {num_tokens}, with which it may be "
            "much worse. Bootstrapping it with `elastic_token_counts` teaches it others."
        )
    return num_tokens


@dataclass
class AdaptiveClassifierOutput(ModelOutput):
    """Logits of images, `(batch, num_labels)`, from the last count of tokens that was tried, that count, `(batch,)`,
    and the probability of the likeliest class from which on an image was done."""

    logits: torch.FloatTensor | None = None
    num_tokens: torch.LongTensor | None = None
    confidence: float | None = None


def class_scores(config, logits: torch.Tensor) -> torch.Tensor:
    """Turn logits into scores as Transformers' pipeline does: the numbers of a regression, sigmoids of a multi-label
    model or of a single label, otherwise softmax probabilities. Float32."""
    logits = in_float32(logits)
    if config.problem_type == "regression":
        return logits
    several = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return logits.sigmoid() if several else logits.softmax(-1)


def classify_adaptively(
    config,
    classify: Callable[[torch.Tensor, int], torch.Tensor],
    images: torch.Tensor,
    confidence: float,
    token_counts: Sequence[int] | None,
) -> AdaptiveClassifierOutput:
    """Body of a model's `classify_adaptively`, given the indices of all images, `(batch,)`, and a function that
    returns logits, `(chosen, num_labels)`, of some indices for a count."""
    if token_counts is None:
        most = config.default_num_tokens
        token_counts = sorted({min(config.trained_token_counts[0], most), most})
    if not 0 <= confidence <= 1:
        raise ValueError(f"`confidence` is {confidence}, expected a probability from 0 to 1.")
    if not token_counts:
        raise ValueError("`token_counts` is empty, expected the numbers of tokens to try.")
    if config.problem_type == "regression":
        raise ValueError("`confidence` is a probability, and a regression has none; choose `num_tokens` instead.")
    left = images
    logits = num_tokens = None
    for count in token_counts:
        found = classify(left, count)
        if logits is None:
            logits = found
            num_tokens = torch.full_like(left, count)
        else:
            logits = logits.index_copy(0, left, found)
            num_tokens = num_tokens.index_fill(0, left, count)
        left = left[class_scores(config, found).amax(dim=-1) < confidence]
        if not len(left):
            break
    return AdaptiveClassifierOutput(logits=logits, num_tokens=num_tokens, confidence=confidence)


def resize(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Images `(batch, channels, height, width)` at another size, in float32; those that have it are left as they are,
    if that is known: in a program for several sizes it is not."""
    is_known = all(isinstance(side, int) for side in (*size, *images.shape[-2:]))
    if is_known and size == tuple(images.shape[-2:]):
        return images
    return F.interpolate(in_float32(images), size, mode="bilinear", antialias=True)


def image_classification_loss(
    logits: torch.Tensor, labels: torch.Tensor, config, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Loss of an image classifier for `config.problem_type`, inferred from the labels and kept there if it is unset.

    Labels of logits `(batch, num_labels)` are `(batch,)` integers, `(batch, num_labels)` zeros and ones, or floats for
    regression. With `num_items_in_batch` (what `Trainer` hands over when it accumulates gradients) the summed loss is
    divided by that count for every problem type, so that accumulated steps add up to the large batch; Transformers'
    own loss does so for single labels alone.
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
