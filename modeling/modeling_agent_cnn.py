"""AgentCNN: a CNN with the blocks of a vision transformer, in which generalized convolutions replace attention.

Zhang et al., *Bootstrapping ViTs: Towards Liberating Vision Transformers from Pre-training* (CVPR 2022, arXiv
2112.03552), appendix E. A ViT that is trained together with an agent CNN learns convolutional biases from the CNN
(`modeling_bootstrapped_vit.py`).
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_agent_cnn import AgentCNNConfig
from .generalized_convolution import GeneralizedConv2d
from .hub import HubModel
from .layers import image_classification_loss, uniform_init_
from .reference_initialization import REFERENCE, init_patches_, init_xavier_


class AgentCNNEmbeddings(nn.Module):
    """Patch embedding or ResNet stem. It maps pixels to a feature map."""

    def __init__(self, config: AgentCNNConfig):
        super().__init__()
        self.is_res = config.stem == "res"
        if self.is_res:
            self.convolution = nn.Conv2d(
                config.num_channels, config.stem_channels, kernel_size=7, stride=2, padding=3, bias=False
            )
            self.norm = nn.BatchNorm2d(config.stem_channels, eps=config.batch_norm_eps)
            self.activation = ACT2FN[config.hidden_act]
            self.projection = nn.Conv2d(config.stem_channels, config.hidden_size, kernel_size=3, stride=2, padding=1)
        else:
            self.projection = nn.Conv2d(
                config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
            )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden_states = pixel_values.to(self.projection.weight.dtype)
        if self.is_res:
            hidden_states = self.activation(self.norm(self.convolution(hidden_states)))
            hidden_states = F.max_pool2d(hidden_states, kernel_size=3, stride=2, padding=1)
        return self.projection(hidden_states)


class AgentCNNMLP(nn.Module):
    """MLP on a feature map: two 1 x 1 convolutions with an activation between them."""

    def __init__(self, config: AgentCNNConfig):
        super().__init__()
        self.fc1 = nn.Conv2d(config.hidden_size, config.intermediate_size, kernel_size=1)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Conv2d(config.intermediate_size, config.hidden_size, kernel_size=1)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(self.activation(self.fc1(feature_map))))


class AgentCNNLayer(nn.Module):
    """Residual block of a generalized convolution and an MLP."""

    def __init__(self, config: AgentCNNConfig):
        super().__init__()
        self.norm_first = config.norm_position == "before"
        self.norm1 = nn.BatchNorm2d(config.hidden_size, eps=config.batch_norm_eps)
        self.convolution = GeneralizedConv2d(config.hidden_size, config.hidden_size, config.num_positions)
        self.norm2 = nn.BatchNorm2d(config.hidden_size, eps=config.batch_norm_eps)
        self.mlp = AgentCNNMLP(config)
        self.dropout = nn.Dropout(config.branch_dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            hidden_states = hidden_states + self.dropout(self.convolution(self.norm1(hidden_states)))
            return hidden_states + self.dropout(self.mlp(self.norm2(hidden_states)))
        hidden_states = hidden_states + self.dropout(self.norm1(self.convolution(hidden_states)))
        return hidden_states + self.dropout(self.norm2(self.mlp(hidden_states)))


class AgentCNNPreTrainedModel(HubModel):
    """Base class of all agent CNNs, with weight initialization."""

    config: AgentCNNConfig
    base_model_prefix = "agent"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    auto_classes = {
        "AutoModel": "AgentCNNModel",
        "AutoModelForImageClassification": "AgentCNNForImageClassification",
    }
    embeds = {"image": ("forward", "pooler_output")}
    _no_split_modules = ["AgentCNNEmbeddings", "AgentCNNLayer"]
    _can_compile_fullgraph = True
    _input_embed_layer = "projection"
    _can_record_outputs = {"hidden_states": AgentCNNLayer}

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, (nn.Conv2d, nn.Linear, GeneralizedConv2d)):
            uniform_init_(module)
        else:
            super()._init_weights(module)
        if self.config.initialization == REFERENCE:
            self._init_as_reference(module)

    def _init_as_reference(self, module: nn.Module):
        """Initialize weights as the authors' code does. Classifiers keep PyTorch's initialization. Submodules are
        initialized before the modules that contain them, so this method can overwrite the weights of submodules."""
        if isinstance(module, GeneralizedConv2d):
            init_xavier_(module)
        elif isinstance(module, AgentCNNMLP):
            init_xavier_(module.fc1, bias_std=1.0)
            init_xavier_(module.fc2, bias_std=1.0)
        elif isinstance(module, AgentCNNEmbeddings) and module.is_res:
            init_xavier_(module.convolution)
            init_xavier_(module.projection, bias_std=1.0)
        elif isinstance(module, AgentCNNEmbeddings):
            init_patches_(module.projection)


class AgentCNNModel(AgentCNNPreTrainedModel):
    """The bare agent CNN, which maps pixels to a feature map."""

    def __init__(self, config: AgentCNNConfig):
        config.validate()
        super().__init__(config)
        self.embeddings = AgentCNNEmbeddings(config)
        self.layers = nn.ModuleList(AgentCNNLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.BatchNorm2d(config.hidden_size, eps=config.batch_norm_eps)
        self.activation = ACT2FN[config.hidden_act]
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPoolingAndNoAttention:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images whose sides are at least `config.stride` pixels.

        Returns:
            `BaseModelOutputWithPoolingAndNoAttention`: `last_hidden_state`, the feature map, `(batch, hidden_size,
            rows, columns)`; `pooler_output`, the mean of the map, `(batch, hidden_size)`; and optionally
            `hidden_states`, the embeddings and each block's output before pooling.
        """
        hidden_states = self.embeddings(pixel_values)
        for index, layer in enumerate(self.layers):
            hidden_states = layer(hidden_states)
            # Pooling is not part of the layer, so the layer's output is the feature map before pooling. The hint loss
            # (`modeling_bootstrapped_vit.py`) uses this map, as in the authors' code.
            if index in self.config.downsample_after:
                hidden_states = F.avg_pool2d(hidden_states, kernel_size=2)
        hidden_states = self.activation(self.norm(hidden_states))
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=hidden_states, pooler_output=hidden_states.mean((2, 3))
        )


class AgentCNNForImageClassification(AgentCNNPreTrainedModel):
    """Agent CNN with a linear classifier on the mean of its feature map."""

    def __init__(self, config: AgentCNNConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.agent = AgentCNNModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutputWithNoAttention:
        """Compute logits, `(batch, num_labels)`. With `labels`, also compute the `image_classification_loss`."""
        outputs = self.agent(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = image_classification_loss(logits, labels, self.config, num_items_in_batch)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


__all__ = [
    "AgentCNNConfig",
    "AgentCNNForImageClassification",
    "AgentCNNModel",
    "AgentCNNPreTrainedModel",
]
