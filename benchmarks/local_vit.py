"""LocalViT as in its authors' code (Li et al. 2021, arXiv 2104.05707; ofsoundof/LocalViT, "hs+se").

The model is the ViT of the Context Broadcasting family with convolutions over the patches instead of MLPs. Batch
normalization follows each convolution. There is no LayerNorm before the convolutions, and [CLS] bypasses them.
The hidden layer of squeeze-and-excitation has only four channels. As in the authors' code, this number is the MLP's
width divided by the model's width. The only library with a LocalViT, vit-pytorch 1.26.11, cannot be used, because the
forward pass of its LocalViT fails.
"""

import torch
from torch import nn
from torchvision.ops import Conv2dNormActivation, SqueezeExcitation
from transformers import AutoConfig, AutoModelForImageClassification

from frugalvit.configuration.configuration_vit_context_broadcast import ViTContextBroadcastConfig
from frugalvit.modeling.context_broadcast import ContextBroadcast
from frugalvit.modeling.modeling_vit_context_broadcast import ViTContextBroadcastForImageClassification


class LocalViTConfig(ViTContextBroadcastConfig):
    """Configuration of a LocalViT. `context_broadcast` is None, or "cb" to add `ContextBroadcast` to each block."""

    model_type = "local_vit"


class LocalFeedForward(nn.Module):
    """Convolutional branch that replaces an MLP, for tokens `(batch, [CLS] + patches, hidden_size)`."""

    def __init__(self, config: LocalViTConfig):
        super().__init__()
        width = config.hidden_size
        inner = config.intermediate_size
        self.grid = config.grid
        excitation = SqueezeExcitation(inner, inner // width, scale_activation=nn.Hardsigmoid)
        for layer in (excitation.fc1, excitation.fc2):
            # In the authors' code, `fc1` and `fc2` are linear layers with timm's initialization.
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.convolutions = nn.Sequential(
            Conv2dNormActivation(width, inner, 1, activation_layer=nn.Hardswish),
            Conv2dNormActivation(inner, inner, 3, groups=inner, activation_layer=nn.Hardswish),
            excitation,
            Conv2dNormActivation(inner, width, 1, activation_layer=None),
        )
        self.broadcast = nn.Identity()
        if config.context_broadcast:
            self.broadcast = ContextBroadcast(config.context_broadcast)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        class_token, patches = tokens[:, :1], tokens[:, 1:]
        branch = self.convolutions(patches.mT.unflatten(2, self.grid)).flatten(2).mT
        return torch.cat([torch.zeros_like(class_token), self.broadcast(branch)], dim=1)


class LocalViTForImageClassification(ViTContextBroadcastForImageClassification):
    config: LocalViTConfig
    auto_classes = {"AutoModelForImageClassification": "LocalViTForImageClassification"}

    def __init__(self, config: LocalViTConfig):
        super().__init__(config)
        for layer in self.vit.layers:
            layer.layernorm_after = nn.Identity()
            layer.mlp = LocalFeedForward(config)


AutoConfig.register(LocalViTConfig.model_type, LocalViTConfig)
AutoModelForImageClassification.register(LocalViTConfig, LocalViTForImageClassification)
