"""ViTImpulseInit: a plain vision transformer whose attention is initialized as a convolution.

Zheng et al., *Structured Initialization for Attention in Vision Transformers* (arXiv 2404.01139). By default, the
model has sinusoidal positions, average pooling, and initial attention maps that are impulse filters.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_vit_impulse_init import ViTImpulseInitConfig
from .initialization import is_drawn, parts_of_layers, start_attention_
from .layers import image_classification_loss, uniform_init_
from .vit import ViTEmbeddings, ViTModel, ViTPreTrainedModel


class ViTImpulseInitPreTrainedModel(ViTPreTrainedModel):
    """Base class of all `ViTImpulseInit` models, with weight initialization."""

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
        # Submodules are initialized before the model, so `start_attention_` overwrites their attention weights.
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


class ViTImpulseInitModel(ViTImpulseInitPreTrainedModel, ViTModel):
    """The bare vision transformer, which maps pixels to tokens."""

    def __init__(self, config: ViTImpulseInitConfig):
        config.validate()
        fixed = config.position_embedding == "sincos"
        super().__init__(config, ViTEmbeddings(config, use_cls_token=config.pooling == "cls", fixed_positions=fixed))
        self.post_init()


class ViTImpulseInitForImageClassification(ViTImpulseInitPreTrainedModel):
    """Vision transformer with a linear classifier on the pooled embedding."""

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
        """Compute logits, `(batch, num_labels)`. With `labels`, also compute the `image_classification_loss`."""
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
