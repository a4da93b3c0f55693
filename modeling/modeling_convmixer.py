"""ConvMixer: depthwise convolutions mix positions, pointwise ones channels.

Trockman & Kolter, *Patches Are All You Need?*, with spatial filters that are trained, or keep random values, impulses
or boxes (Zheng et al., arXiv 2404.01139, section 5.5): mixing channels suffices if the filters span their space.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_convmixer import ConvMixerConfig
from .hub import HubModel
from .layers import GenericForImageClassification, activation, check_pixel_values


class ConvMixerEmbeddings(nn.Module):
    """Pixels to a map of patches."""

    def __init__(self, config: ConvMixerConfig):
        super().__init__()
        self.projection = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.activation = activation(config.hidden_act)
        self.norm = nn.BatchNorm2d(config.hidden_size, eps=config.batch_norm_eps)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.norm(self.activation(self.projection(pixel_values)))


class ConvMixerSpatialMixing(nn.Conv2d):
    """A filter for every channel, with padding that keeps the size. Filters that are not trained are buffers."""

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
        # An even filter reaches one position farther to the right and below.
        if self.extra:
            hidden_states = F.pad(hidden_states, (0, 1, 0, 1))
        return super().forward(hidden_states)


class ConvMixerLayer(nn.Module):
    """A layer that mixes positions, beside a residual connection, then channels."""

    def __init__(self, config: ConvMixerConfig):
        super().__init__()
        self.spatial_mixing = ConvMixerSpatialMixing(config)
        self.spatial_activation = activation(config.hidden_act) if config.spatial_activation else nn.Identity()
        self.spatial_norm = nn.BatchNorm2d(config.hidden_size, eps=config.batch_norm_eps)
        self.channel_mixing = nn.Conv2d(config.hidden_size, config.hidden_size, kernel_size=1)
        self.channel_activation = activation(config.hidden_act)
        self.channel_norm = nn.BatchNorm2d(config.hidden_size, eps=config.batch_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        branch = self.spatial_norm(self.spatial_activation(self.spatial_mixing(hidden_states)))
        return self.channel_norm(self.channel_activation(self.channel_mixing(hidden_states + branch)))


class ConvMixerPreTrainedModel(HubModel):
    """Base class of the family, which draws fresh weights."""

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
    _can_record_outputs = {"hidden_states": ConvMixerLayer}

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embeddings.projection

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            # PyTorch's default, which the random filters are, too.
            bound = module.weight[0].numel() ** -0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.BatchNorm2d):
            init.ones_(module.weight)
            init.zeros_(module.bias)
            init.zeros_(module.running_mean)
            init.ones_(module.running_var)
            init.zeros_(module.num_batches_tracked)
        if isinstance(module, ConvMixerSpatialMixing) and self.config.spatial_filters.endswith(("impulse", "box")):
            init.copy_(module.weight, self._structured_filters(module.weight))

    def _structured_filters(self, weight: torch.Tensor) -> torch.Tensor:
        """Impulses or boxes of the norm that random filters have on average, sqrt(1/3)."""
        filters, size = torch.zeros_like(weight), weight[0].numel()
        if self.config.spatial_filters == "box":
            return filters.fill_((3 * size) ** -0.5)
        positions = torch.randint(size, (len(weight),), device=weight.device)
        filters.view(len(weight), size)[torch.arange(len(weight), device=weight.device), positions] = 3**-0.5
        if self.config.spatial_filters == "signed_impulse":
            # Differences of pixels are then there from the start, beside sums: x + BN(filter(x)) is one or the other.
            filters *= 1 - 2 * torch.randint(2, (len(weight), 1, 1, 1), device=weight.device)
        return filters


class ConvMixerModel(ConvMixerPreTrainedModel):
    """The bare ConvMixer, from pixels to a feature map."""

    def __init__(self, config: ConvMixerConfig):
        config.validate()
        super().__init__(config)
        self.embeddings = ConvMixerEmbeddings(config)
        self.layers = nn.ModuleList(ConvMixerLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPoolingAndNoAttention:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`):
                Normalized images; pixels beyond whole patches are not looked at.

        Returns:
            `BaseModelOutputWithPoolingAndNoAttention`: `last_hidden_state`, `(batch, hidden_size, rows, columns)`, and
            `pooler_output`, its mean, `(batch, hidden_size)`.
        """
        pixel_values = check_pixel_values(pixel_values, self.config.num_channels, self.config.patch_size)
        hidden_states = self.embeddings(pixel_values.to(self.embeddings.projection.weight.dtype))
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=hidden_states, pooler_output=hidden_states.mean((2, 3))
        )


class ConvMixerForImageClassification(GenericForImageClassification, ConvMixerPreTrainedModel):
    """The ConvMixer with a linear classifier on the mean of its feature map."""

    model_class = ConvMixerModel
    output_class = ImageClassifierOutputWithNoAttention


__all__ = [
    "ConvMixerConfig",
    "ConvMixerForImageClassification",
    "ConvMixerModel",
    "ConvMixerPreTrainedModel",
]
