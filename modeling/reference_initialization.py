"""How the reference implementation of *Bootstrapping ViTs* (Zhang et al., CVPR 2022) draws fresh weights.

It decides what the hints do. They compare features that a LayerNorm has brought to one length. Tokens that start short
(those of patch projections drawn at 0.02 do) are brought there by a large factor, which multiplies their gradient.
"""

import torch
from torch import nn
from transformers import ViTForImageClassification

from .generalized_convolution import GeneralizedConv2d
from .modeling_agent_cnn import AgentCNNEmbeddings, AgentCNNForImageClassification, AgentCNNMLP
from .modeling_bootstrapped_vit import BootstrappedViTForImageClassification


REFERENCE = "reference"


@torch.no_grad()
def reference_init_(model: nn.Module):
    """Draw all weights of a ViT, of an agent CNN or of a pair anew, in place, but those of norms, which stay.

    Patch projections are standard normal with biases of zero; linear layers and convolutions Xavier-uniform, queries,
    keys and values as one matrix, biases zero; those of MLPs and of the res-like stem standard normal. Positions and
    [CLS] are normal of 0.02, classifiers PyTorch's default.

    The biases are meant to be small: the code calls `normal_(bias, 1e-6)`, which sets their mean and leaves the
    standard deviation at 1. Here is what it draws.

    Args:
        model: A `ViTForImageClassification`, an `AgentCNNForImageClassification`, or a
            `BootstrappedViTForImageClassification`, whose two are both initialized.

    Raises:
        ValueError: if it is none of those.
    """
    if isinstance(model, BootstrappedViTForImageClassification):
        _init_vit(model.vit)
        _init_agent(model.twin)
    elif isinstance(model, ViTForImageClassification):
        _init_vit(model)
    elif isinstance(model, AgentCNNForImageClassification):
        _init_agent(model)
    else:
        raise ValueError(
            f"There is no reference initialization of a {type(model).__name__}; expected a ViTForImageClassification, "
            "an AgentCNNForImageClassification or a BootstrappedViTForImageClassification."
        )


def _init_vit(vit: ViTForImageClassification):
    embeddings = vit.base_model.embeddings
    nn.init.normal_(embeddings.position_embeddings, std=0.02)
    nn.init.normal_(embeddings.cls_token, std=0.02)
    _init_patches(embeddings.patch_embeddings.projection)
    for layer in vit.base_model.layers:
        attention = layer.attention
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        together = torch.empty(3 * len(attention.q_proj.weight), attention.q_proj.in_features)
        for projection, weight in zip(projections, nn.init.xavier_uniform_(together).chunk(3), strict=True):
            projection.weight.copy_(weight)
            if projection.bias is not None:
                projection.bias.zero_()
        _init_xavier(attention.o_proj)
        for linear in (layer.mlp.fc1, layer.mlp.fc2):
            _init_xavier(linear)
            nn.init.normal_(linear.bias, mean=1e-6)
    vit.classifier.reset_parameters()


def _init_agent(agent: AgentCNNForImageClassification):
    """Layers whose weights are the transformer's have none of their own."""
    for module in agent.modules():
        if isinstance(module, GeneralizedConv2d):
            _init_xavier(module)
        elif isinstance(module, AgentCNNMLP):
            for convolution in (module.fc1, module.fc2):
                _init_xavier(convolution)
                nn.init.normal_(convolution.bias, mean=1e-6)
        elif isinstance(module, AgentCNNEmbeddings) and module.is_res:
            _init_xavier(module.convolution)
            _init_xavier(module.projection)
            nn.init.normal_(module.projection.bias, mean=1e-6)
        elif isinstance(module, AgentCNNEmbeddings):
            _init_patches(module.projection)
    agent.classifier.reset_parameters()


def _init_patches(projection: nn.Conv2d):
    nn.init.normal_(projection.weight)
    nn.init.zeros_(projection.bias)


def _init_xavier(layer: nn.Module):
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        layer.bias.zero_()
