"""The cortex of a SparseFormer: a plain transformer encoder, as a vision transformer's."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..configuration.configuration_sparseformer_base import SparseFormerBaseConfig
from .layers import MLP, SelfAttention, drop_path


def cortex_norm(config: SparseFormerBaseConfig) -> Callable[[int], nn.Module]:
    """Return a function that makes a norm of the cortex, given its width."""
    norm_class = nn.LayerNorm if config.norm_type == "layer_norm" else nn.RMSNorm
    return functools.partial(norm_class, eps=config.layer_norm_eps)


def cortex_attention(config: SparseFormerBaseConfig) -> SelfAttention:
    """Return the attention of a block, with the norms that the configuration asks for."""
    norm = cortex_norm(config)
    return SelfAttention(
        config,
        config.hidden_size,
        config.num_attention_heads,
        config.qkv_bias,
        head_norm=norm if config.query_key_norm else None,
        output_norm=norm if config.attention_norm else None,
    )


def cortex_mlp(config: SparseFormerBaseConfig) -> MLP:
    """Return the MLP of a block, with the gate and the norm that the configuration asks for."""
    inner_norm = cortex_norm(config) if config.mlp_norm else None
    return MLP(config.hidden_size, config.intermediate_size, config.hidden_act, config.gated_mlp, inner_norm)


class SparseFormerLayer(GradientCheckpointingLayer):
    """A block of the cortex: attention and MLP, each of normalized tokens.

    Args:
        config (`SparseFormerBaseConfig`): The configuration.
        drop_path_rate (`float`): Drop rate of each of the two branches, 0 to 1.
    """

    def __init__(self, config: SparseFormerBaseConfig, drop_path_rate: float):
        super().__init__()
        self.drop_path_rate, norm = drop_path_rate, cortex_norm(config)
        self.layernorm_before = norm(config.hidden_size)
        self.attention = cortex_attention(config)
        self.layernorm_after = norm(config.hidden_size)
        self.mlp = cortex_mlp(config)

    def forward(self, hidden_states: torch.Tensor, leading: int | None = None, **kwargs) -> torch.Tensor:
        """`(batch, tokens, hidden_size)` to the same shape. With `leading`, only the first so many tokens are
        computed; they attend to all."""
        tokens = self.layernorm_before(hidden_states)
        branch, _ = self.attention(tokens, tokens[:, :leading], **kwargs)
        hidden_states = hidden_states[:, :leading] + drop_path(branch, self.drop_path_rate, self.training)
        branch = self.mlp(self.layernorm_after(hidden_states))
        return hidden_states + drop_path(branch, self.drop_path_rate, self.training)


class SparseFormerPoolingHead(nn.Module):
    """The pooling of SigLIP: one learned query attends to all tokens, then an MLP; AIMv2's has none."""

    def __init__(self, config: SparseFormerBaseConfig):
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
