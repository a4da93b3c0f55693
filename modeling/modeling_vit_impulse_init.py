"""ViTImpulseInit: a plain vision transformer whose attention starts as convolution.

Zheng et al., *Structured Initialization for Attention in Vision Transformers* (arXiv 2404.01139): sinusoidal
positions, average pooling, and queries and keys that make every head's first attention map an impulse filter.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_vit_impulse_init import ViTImpulseInitConfig
from .initialization import is_drawn, parts_of_layers, start_attention_
from .layers import image_classification_loss
from .vit import ViTEmbeddings, ViTPreTrainedModel, uniform_init_, vit_layers


class ViTImpulseInitPreTrainedModel(ViTPreTrainedModel):
    """Base class of the family."""

    config: ViTImpulseInitConfig
    auto_classes = {
        "AutoModel": "ViTImpulseInitModel",
        "AutoModelForImageClassification": "ViTImpulseInitForImageClassification",
    }

    @torch.no_grad()
    def _init_weights(self, module):
        config = self.config
        structured = config.initialization in ("impulse", "mimetic")
        structured = structured or config.initialization_options.get("value_init") == "mimetic"
        if isinstance(module, nn.Linear) and config.initialization == "kaiming_uniform":
            uniform_init_(module)
        # Comes after all modules within.
        elif isinstance(module, ViTImpulseInitModel) and structured and is_drawn(module):
            start_attention_(parts_of_layers(module, module.embeddings.grid), config, positions="keep")
        else:
            super()._init_weights(module)

    def _init_positions(self, embeddings: ViTEmbeddings):
        config = self.config
        if config.position_embedding == "random":
            init.normal_(embeddings.position_embeddings, std=config.position_std)
        elif config.position_embedding == "sincos" or config.initialization in ("impulse", "mimetic"):
            init.copy_(embeddings.position_embeddings, embeddings.sincos_positions())
        else:
            super()._init_positions(embeddings)


class ViTImpulseInitModel(ViTImpulseInitPreTrainedModel):
    """The bare vision transformer, from pixels to tokens."""

    def __init__(self, config: ViTImpulseInitConfig):
        config.validate()
        super().__init__(config)
        self.embeddings = ViTEmbeddings(
            config,
            use_cls_token=config.pooling == "cls",
            fixed_positions=config.position_embedding == "sincos",
        )
        self.layers = vit_layers(config)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        interpolate_pos_encoding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`): Normalized images.
            interpolate_pos_encoding (`bool`, *optional*, defaults to `False`):
                Take images of another size than the configuration's.

        Returns:
            `BaseModelOutputWithPooling`: `last_hidden_state`, `(batch, [CLS] + patches, hidden_size)`, and
            `pooler_output`, `(batch, hidden_size)`, which the classifier reads.
        """
        pixel_values = pixel_values.to(self.embeddings.patch_embeddings.projection.weight.dtype)
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        pooled = hidden_states[:, 0] if self.config.pooling == "cls" else hidden_states.mean(dim=1)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


class ViTImpulseInitForImageClassification(ViTImpulseInitPreTrainedModel):
    """The vision transformer with a linear classifier on the pooled token."""

    # The loss divides by `num_items_in_batch` for every problem type.
    accepts_loss_kwargs = True

    def __init__(self, config: ViTImpulseInitConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = ViTImpulseInitModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Pixels to logits, and with labels the loss, see `image_classification_loss`."""
        outputs = self.vit(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = image_classification_loss(logits, labels, self.config, num_items_in_batch)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = [
    "ViTImpulseInitConfig",
    "ViTImpulseInitForImageClassification",
    "ViTImpulseInitModel",
    "ViTImpulseInitPreTrainedModel",
]
