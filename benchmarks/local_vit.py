"""LocalViT for the tables, as its authors have it (Li et al. 2021, arXiv 2104.05707; ofsoundof/LocalViT, "hs+se").

The ViT of the family, whose MLPs are replaced by convolutions among the patches, with batch normalization and without
LayerNorm before; [CLS] passes by. Their squeeze-and-excitation has four channels: `reduction` is the width. Their drop
path, which is 0 in the tables, spares the convolutions. The only library with a LocalViT is vit-pytorch, and its
forward pass fails: its LayerNorm gets maps (1.26.11).
"""

import torch
from torch import nn
from torchvision.ops import Conv2dNormActivation, SqueezeExcitation
from transformers import AutoConfig, AutoModelForImageClassification

from frugalvit.configuration.configuration_vit_context_broadcast import ViTContextBroadcastConfig
from frugalvit.modeling.context_broadcast import ContextBroadcast
from frugalvit.modeling.modeling_vit_context_broadcast import ViTContextBroadcastForImageClassification


class LocalViTConfig(ViTContextBroadcastConfig):
    """`context_broadcast` is None or "cb", which stands at the end of the convolutions: its mean is the patches'."""

    model_type = "local_vit"


class LocalFeedForward(nn.Module):
    """The branch in an MLP's place, which is added to tokens `(batch, [CLS] + patches, hidden_size)`."""

    def __init__(self, config: LocalViTConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.grid = config.grid
        excitation = SqueezeExcitation(inner, inner // width, scale_activation=nn.Hardsigmoid)
        for layer in (excitation.fc1, excitation.fc2):
            # As timm draws linear layers, which theirs are; their convolutions start as PyTorch's.
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
            layer.layernorm_after, layer.mlp = nn.Identity(), LocalFeedForward(config)


AutoConfig.register(LocalViTConfig.model_type, LocalViTConfig)
AutoModelForImageClassification.register(LocalViTConfig, LocalViTForImageClassification)
