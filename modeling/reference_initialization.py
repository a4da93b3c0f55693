"""Initialization of the reference implementation of *Bootstrapping ViTs* (Zhang et al., CVPR 2022).

The effect of the hint loss depends on this initialization. The hint loss compares features after a LayerNorm, and the
gradient of a LayerNorm is large for tokens with a small norm. Tokens have a small norm if, for example, patch
projections are initialized with a standard deviation of 0.02.
"""

import torch
from torch import nn
from transformers import ViTForImageClassification
from transformers import initialization as init

from .layers import uniform_init_


REFERENCE = "reference"


@torch.no_grad()
def reference_init_(vit: ViTForImageClassification):
    """Initialize the weights of a ViT in place. LayerNorms do not change, nor do weights that `from_pretrained` has
    loaded.

    - Patch projection: standard normal weights, zero biases.
    - Attention: Xavier-uniform weights, zero biases. The weights of queries, keys and values are drawn as one matrix.
    - MLPs: Xavier-uniform weights, standard normal biases. The authors may have meant small biases: their code calls
      `normal_(bias, 1e-6)`, which sets the mean to 1e-6 and leaves the standard deviation at 1.
    - Positions and [CLS]: normal with a standard deviation of 0.02.
    - Classifier: PyTorch's default.

    Raises:
        ValueError: if `vit` is not a `ViTForImageClassification`.
    """
    if not isinstance(vit, ViTForImageClassification):
        raise ValueError(
            f"`vit` is a {type(vit).__name__}, expected a ViTForImageClassification, the only class with a reference "
            "initialization."
        )
    embeddings = vit.base_model.embeddings
    init.normal_(embeddings.position_embeddings, std=0.02)
    init.normal_(embeddings.cls_token, std=0.02)
    init_patches_(embeddings.patch_embeddings.projection)
    for layer in vit.base_model.layers:
        attention = layer.attention
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        together = torch.empty(3 * len(attention.q_proj.weight), attention.q_proj.in_features)
        for projection, weight in zip(projections, init.xavier_uniform_(together).chunk(3), strict=True):
            init.copy_(projection.weight, weight)
            if projection.bias is not None:
                init.zeros_(projection.bias)
        init_xavier_(attention.o_proj)
        init_xavier_(layer.mlp.fc1, bias_std=1.0)
        init_xavier_(layer.mlp.fc2, bias_std=1.0)
    if isinstance(vit.classifier, nn.Linear):
        uniform_init_(vit.classifier)


def init_patches_(projection: nn.Conv2d):
    init.normal_(projection.weight)
    init.zeros_(projection.bias)


def init_xavier_(layer: nn.Module, bias_std: float = 0.0):
    init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        init.normal_(layer.bias, mean=1e-6, std=bias_std) if bias_std else init.zeros_(layer.bias)
