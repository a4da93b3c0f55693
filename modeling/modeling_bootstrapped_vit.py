"""BootstrappedViT: a vision transformer that learns convolutional biases from an agent CNN during training.

Zhang et al., *Bootstrapping ViTs: Towards Liberating Vision Transformers from Pre-training* (CVPR 2022, arXiv
2112.03552). The transformer and the agent both classify images, and each learns from the other's predictions. Hint
losses pull the transformer's tokens towards the agent's feature maps after every block. After training, the agent is
not needed.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import ViTForImageClassification
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_bootstrapped_vit import BootstrappedViTConfig
from .generalized_convolution import generalized_conv2d
from .hub import HubModel
from .initialization import is_drawn, parts_of_layers, start_attention_
from .layers import in_float32
from .modeling_agent_cnn import AgentCNNForImageClassification, AgentCNNLayer, AgentCNNMLP
from .reference_initialization import REFERENCE, reference_init_


def divergence(logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return temperature^2 times the Kullback-Leibler divergence of a student from a teacher, averaged over the batch.
    Logits are `(batch, classes)`. The teacher's logits get no gradient."""
    student, teacher = (F.log_softmax(in_float32(x) / temperature, dim=1) for x in (logits, teacher_logits.detach()))
    return temperature**2 * F.kl_div(student, teacher, log_target=True, reduction="batchmean")


@dataclass
class BootstrappedViTOutput(ModelOutput):
    """Output of `BootstrappedViTForImageClassification`. Logits, hidden states and attentions are the transformer's.
    Without labels, the losses and the agent's logits are None.

    Args:
        loss (`torch.FloatTensor`, *optional*): The sum of all losses.
        agent_logits (`torch.FloatTensor` of shape `(batch, num_labels)`, *optional*): Logits of the agent.
        losses (`dict[str, torch.FloatTensor]`, *optional*):
            Weighted losses: `classification` and `agent_classification`; `divergence` of the transformer from the
            agent and `agent_divergence` of the agent from the transformer; `hints`, `(layers,)`.
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    agent_logits: torch.FloatTensor | None = None
    losses: dict[str, torch.FloatTensor] | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


def head_products(attention: nn.Module, num_heads: int) -> torch.Tensor:
    """Return the product W_O W_V of each head's output and value weights as the weight of a generalized convolution,
    `(hidden_size, hidden_size, heads)`. The bias of values is left out, as in the authors' code."""
    value = attention.v_proj.weight.unflatten(0, (num_heads, -1))
    output = attention.o_proj.weight.unflatten(1, (num_heads, -1))
    return torch.einsum("ohd,hdi->oih", output, value)


class SharedConvolution(nn.Module):
    """Generalized convolution with the weights of an attention layer. Kernel position i has the weights of head i."""

    def __init__(self, attention: nn.Module, num_heads: int):
        super().__init__()
        # `nn.Module` does not register modules in a list, so the attention's weights are saved only once.
        self.attention = [attention]
        self.num_heads = num_heads

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        [attention] = self.attention
        return generalized_conv2d(feature_map, head_products(attention, self.num_heads), attention.o_proj.bias)


class SharedMLP(nn.Module):
    """The agent's MLP, which uses the weights of the transformer's MLP. The agent has its own activation function and
    dropout."""

    def __init__(self, mlp: nn.Module, agent_mlp: AgentCNNMLP):
        super().__init__()
        self.mlp = [mlp]
        self.activation = agent_mlp.activation
        self.dropout = agent_mlp.dropout

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        [mlp] = self.mlp
        hidden_states = F.conv2d(feature_map, mlp.fc1.weight[:, :, None, None], mlp.fc1.bias)
        hidden_states = self.dropout(self.activation(hidden_states))
        return F.conv2d(hidden_states, mlp.fc2.weight[:, :, None, None], mlp.fc2.bias)


def hint(tokens: torch.Tensor, feature_map: torch.Tensor) -> torch.Tensor:
    """Return the hint loss: the mean squared difference of the transformer's normalized tokens, `(batch, patches,
    hidden_size)`, and the agent's normalized feature map, `(batch, hidden_size, rows, columns)`. The map gets no
    gradient. If the numbers of positions differ, the longer sequence is averaged to the length of the shorter one."""
    ours = in_float32(tokens).mT
    theirs = in_float32(feature_map.detach()).flatten(2)
    length = min(ours.shape[-1], theirs.shape[-1])
    ours, theirs = (x if x.shape[-1] == length else F.adaptive_avg_pool1d(x, length) for x in (ours, theirs))
    width = ours.shape[1:2]
    return F.mse_loss(F.layer_norm(ours.mT, width), F.layer_norm(theirs.mT, width))


def _drop_output(module: nn.Module, args, output: torch.Tensor, rate: float) -> torch.Tensor:
    return F.dropout(output, rate, module.training)


class BootstrappedViTForImageClassification(HubModel):
    """Vision transformer with its agent CNN. The agent is computed only if labels are given.

    `model.vit` is a `ViTForImageClassification` of Transformers, and `model.agent` is an
    `AgentCNNForImageClassification`. After training, these two models can be used and saved separately.
    """

    config: BootstrappedViTConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    # `AutoModel` loads this class, because no class without the classifiers of `vit` and `agent` exists.
    auto_classes = {
        "AutoModel": "BootstrappedViTForImageClassification",
        "AutoModelForImageClassification": "BootstrappedViTForImageClassification",
    }
    supports_gradient_checkpointing = True
    # The loss is a mean over the batch and does not use `num_items_in_batch`.
    accepts_loss_kwargs = False
    _no_split_modules = ["ViTEmbeddings", "ViTLayer", "AgentCNNEmbeddings", "AgentCNNLayer"]
    _can_compile_fullgraph = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: BootstrappedViTConfig):
        config.validate()
        config.agree()
        super().__init__(config)
        self.num_labels = config.num_labels
        self.hint_share = 1.0
        self.vit = ViTForImageClassification._from_config(config.vit_config)
        self.twin = AgentCNNForImageClassification._from_config(config.agent_config)
        if config.sharing == "weights":
            for block, layer in self.blocks():
                layer.convolution = SharedConvolution(block.attention, config.vit_config.num_attention_heads)
                layer.mlp = SharedMLP(block.mlp, layer.mlp)
        # The authors' code applies dropout in other places than Transformers' ViT does.
        if config.embedding_dropout is not None:
            self.vit.base_model.embeddings.dropout = nn.Dropout(config.embedding_dropout)
        if config.mlp_dropout:
            for block, _ in self.blocks():
                drop = functools.partial(_drop_output, rate=config.mlp_dropout)
                block.mlp.activation_fn.register_forward_hook(drop)
        self.post_init()

    def blocks(self) -> list[tuple[nn.Module, AgentCNNLayer]]:
        """Return pairs of corresponding blocks of the transformer and the agent."""
        return list(zip(self.vit.base_model.layers, self.twin.base_model.layers, strict=True))

    @property
    def agent(self) -> AgentCNNForImageClassification:
        """The agent CNN. If the agent shares the transformer's weights, this is a copy that shares no weights."""
        if self.config.sharing == "none":
            return self.twin
        agent = AgentCNNForImageClassification(self.config.agent_config).to(self.device, self.dtype)
        weights = self.twin.state_dict()
        for index, (block, layer) in enumerate(self.blocks()):
            prefix = f"agent.layers.{index}"
            weights[f"{prefix}.convolution.weight"] = head_products(block.attention, layer.convolution.num_heads)
            weights[f"{prefix}.convolution.bias"] = block.attention.o_proj.bias
            for name in ("fc1", "fc2"):
                linear = getattr(block.mlp, name)
                weights[f"{prefix}.mlp.{name}.weight"] = linear.weight[:, :, None, None]
                weights[f"{prefix}.mlp.{name}.bias"] = linear.bias
        agent.load_state_dict(weights)
        return agent.train(self.training)

    def get_input_embeddings(self) -> nn.Module:
        return self.vit.get_input_embeddings()

    @torch.no_grad()
    def _init_weights(self, module):
        # `self.vit` and `self.twin` are already initialized by the `_init_weights` methods of their own classes.
        if module is not self or not is_drawn(self.vit.base_model):
            return
        if self.config.initialization == REFERENCE:
            reference_init_(self.vit)
        elif self.config.initialization != "default":
            start_attention_(parts_of_layers(self.vit.base_model, self.config.grid), self.config)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        hint_share: float | torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BootstrappedViTOutput:
        """
        Args:
            labels (`torch.Tensor`, *optional*): `(batch,)` class indices. Without labels, the agent is not computed.
            hint_share (`float`, *optional*):
                Factor on `config.hint_weight`. The default is `self.hint_share`, which is 1 unless a
                `HintDecayCallback` changes it.
        """
        if labels is None:
            outputs = self.vit(pixel_values, **kwargs)
            return BootstrappedViTOutput(
                logits=outputs.logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
            )
        config = self.config
        hint_share = self.hint_share if hint_share is None else hint_share
        output_hidden_states = kwargs.pop("output_hidden_states", None)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        outputs = self.vit(pixel_values, output_hidden_states=True, **kwargs)
        agent = self.twin(pixel_values, output_hidden_states=True)
        pairs = zip(outputs.hidden_states[1:], agent.hidden_states[1:], strict=True)
        hints = [
            # The token [CLS] is left out, because it has no position in the agent's feature map.
            hint(tokens[:, 1:], feature_map)
            if config.hint_layers is None or layer in config.hint_layers
            else outputs.logits.new_zeros((), dtype=torch.float32)
            for layer, (tokens, feature_map) in enumerate(pairs)
        ]
        vit_logits = in_float32(outputs.logits)
        agent_logits = in_float32(agent.logits)
        losses = {
            "classification": config.classification_weight * F.cross_entropy(vit_logits, labels),
            "agent_classification": config.classification_weight * F.cross_entropy(agent_logits, labels),
            "divergence": config.divergence_weight * divergence(vit_logits, agent_logits, config.temperature),
            "agent_divergence": config.divergence_weight * divergence(agent_logits, vit_logits, config.temperature),
            "hints": hint_share * config.hint_weight * torch.stack(hints),
        }
        return BootstrappedViTOutput(
            loss=sum(term.sum() for term in losses.values()),
            logits=outputs.logits,
            agent_logits=agent.logits,
            losses=losses,
            hidden_states=outputs.hidden_states if output_hidden_states else None,
            attentions=outputs.attentions,
        )


__all__ = ["BootstrappedViTConfig", "BootstrappedViTForImageClassification"]
