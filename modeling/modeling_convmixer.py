"""ConvMixer: a CNN in which depthwise convolutions mix positions and pointwise convolutions mix channels.

Trockman & Kolter, *Patches Are All You Need?*. The filters of depthwise convolutions are trained or fixed. Fixed
filters are random values, impulses or boxes (Zheng et al., arXiv 2404.01139). Section 5.5 of Zheng et al. shows that
trained pointwise convolutions suffice if the fixed filters span the space of filters.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_convmixer import ConvMixerConfig
from .hub import HubModel
from .layers import image_classification_loss


class ConvMixerEmbeddings(nn.Module):
    """Patch embedding. It maps pixels to a feature map."""

    def __init__(self, config: ConvMixerConfig):
        super().__init__()
        self.projection = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.BatchNorm2d(config.hidden_size, eps=config.batch_norm_eps)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.norm(self.activation(self.projection(pixel_values.to(self.projection.weight.dtype))))


class ConvMixerSpatialMixing(nn.Conv2d):
    """Depthwise convolution whose output has the size of its input. Fixed filters are buffers."""

    def __init__(self, config: ConvMixerConfig):
        padding, self.extra = divmod(config.kernel_size - 1, 2)
        super().__init__(
            config.hidden_size, config.hidden_size, config.kernel_size, groups=config.hidden_size, padding=padding
        )
        if config.spatial_filters != "trained":
            for name, parameter in list(self.named_parameters()):
                delattr(self, name)
                self.register_buffer(name, parameter.detach())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Filters of even size reach one position farther to the right and bottom than to the left and top.
        if self.extra:
            hidden_states = F.pad(hidden_states, (0, 1, 0, 1))
        return super().forward(hidden_states)


class ConvMixerLayer(nn.Module):
    """Depthwise convolution with a residual connection, followed by a pointwise convolution."""

    def __init__(self, config: ConvMixerConfig):
        super().__init__()
        self.spatial_mixing = ConvMixerSpatialMixing(config)
        self.spatial_norm = nn.BatchNorm2d(config.hidden_size, eps=config.batch_norm_eps)
        self.channel_mixing = nn.Conv2d(config.hidden_size, config.hidden_size, kernel_size=1)
        self.channel_activation = ACT2FN[config.hidden_act]
        self.channel_norm = nn.BatchNorm2d(config.hidden_size, eps=config.batch_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Zheng et al. have no activation after depthwise convolutions. Trockman & Kolter have an activation here.
        hidden_states = hidden_states + self.spatial_norm(self.spatial_mixing(hidden_states))
        return self.channel_norm(self.channel_activation(self.channel_mixing(hidden_states)))


class ConvMixerPreTrainedModel(HubModel):
    """Base class of all ConvMixers, with weight initialization."""

    config: ConvMixerConfig
    base_model_prefix = "convmixer"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    auto_classes = {
        "AutoModel": "ConvMixerModel",
        "AutoModelForImageClassification": "ConvMixerForImageClassification",
    }
    embeds = {"image": ("forward", "pooler_output")}
    _no_split_modules = ["ConvMixerEmbeddings", "ConvMixerLayer"]
    _can_compile_fullgraph = True
    _input_embed_layer = "projection"
    _can_record_outputs = {"hidden_states": ConvMixerLayer}

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            # `uniform_init_` initializes parameters only, but the weights of fixed filters are buffers.
            bound = module.weight[0].numel() ** -0.5
            for tensor in (module.weight, module.bias):
                init.uniform_(tensor, -bound, bound)
        else:
            super()._init_weights(module)
        if isinstance(module, ConvMixerSpatialMixing) and self.config.spatial_filters.endswith(("impulse", "box")):
            init.copy_(module.weight, self._structured_filters(module.weight))

    def _structured_filters(self, weight: torch.Tensor) -> torch.Tensor:
        """Return impulse or box filters whose norm, sqrt(1/3), is the mean norm of random filters."""
        size = weight[0].numel()
        if self.config.spatial_filters == "box":
            return torch.full_like(weight, (3 * size) ** -0.5)
        filters = torch.zeros_like(weight)
        positions = torch.randint(size, (len(weight),), device=weight.device)
        filters.view(len(weight), size)[torch.arange(len(weight), device=weight.device), positions] = 3**-0.5
        if self.config.spatial_filters == "signed_impulse":
            # With random signs, x + BN(filter(x)) can initially be a difference of pixels. Without random signs, it
            # would always be a sum.
            filters *= 1 - 2 * torch.randint(2, (len(weight), 1, 1, 1), device=weight.device)
        return filters


class ConvMixerModel(ConvMixerPreTrainedModel):
    """The bare ConvMixer, which maps pixels to a feature map."""

    def __init__(self, config: ConvMixerConfig):
        config.validate()
        super().__init__(config)
        self.embeddings = ConvMixerEmbeddings(config)
        self.layers = nn.ModuleList(ConvMixerLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPoolingAndNoAttention:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images. Pixels at the right and bottom edges that do not fill a patch are ignored.

        Returns:
            `BaseModelOutputWithPoolingAndNoAttention`: `last_hidden_state`, `(batch, hidden_size, rows, columns)`, and
            `pooler_output`, the mean of the map, `(batch, hidden_size)`.
        """
        hidden_states = self.embeddings(pixel_values)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=hidden_states, pooler_output=hidden_states.mean((2, 3))
        )


class ConvMixerForImageClassification(ConvMixerPreTrainedModel):
    """ConvMixer with a linear classifier on the mean of its feature map."""

    def __init__(self, config: ConvMixerConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.convmixer = ConvMixerModel(config)
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
        outputs = self.convmixer(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = image_classification_loss(logits, labels, self.config, num_items_in_batch)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


__all__ = [
    "ConvMixerConfig",
    "ConvMixerForImageClassification",
    "ConvMixerModel",
    "ConvMixerPreTrainedModel",
]
