"""ViTContextBroadcast: a plain vision transformer with Context Broadcasting (`context_broadcast.py`) and an optional
distillation token.

Hyeon-Woo et al., *Scratching Visual Transformer's Back with Uniform Attention* (arXiv 2210.08457). The paper uses
DeiT models.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from ..configuration.configuration_vit_context_broadcast import ViTContextBroadcastConfig
from .context_broadcast import ContextBroadcast, broadcast_block
from .initialization import is_drawn, parts_of_layers, start_attention_
from .layers import image_classification_loss
from .vit import ViTEmbeddings, ViTModel, ViTPreTrainedModel


@dataclass
class ViTContextBroadcastImageClassifierOutput(ImageClassifierOutput):
    """`ImageClassifierOutput` with the logits of both classifiers of a model with a distillation token.

    Args:
        cls_logits, distillation_logits (`torch.FloatTensor` of shape `(batch, num_labels)`, *optional*):
            Logits of the two classifiers; `logits` is their mean.
    """

    cls_logits: torch.FloatTensor | None = None
    distillation_logits: torch.FloatTensor | None = None


class ViTContextBroadcastPreTrainedModel(ViTPreTrainedModel):
    """Base class of all `ViTContextBroadcast` models, with weight initialization."""

    config: ViTContextBroadcastConfig
    auto_classes = {
        "AutoModel": "ViTContextBroadcastModel",
        "AutoModelForImageClassification": "ViTContextBroadcastForImageClassification",
    }

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        structured = self.config.initialization != "default"
        if isinstance(module, ContextBroadcast):
            module.reset_parameters()
        # Submodules are initialized before the model, so `start_attention_` overwrites their attention weights.
        elif isinstance(module, ViTContextBroadcastModel) and structured and is_drawn(module):
            start_attention_(parts_of_layers(module, module.embeddings.grid), self.config)


class ViTContextBroadcastModel(ViTContextBroadcastPreTrainedModel, ViTModel):
    """The bare vision transformer with Context Broadcasting, which maps pixels to tokens."""

    def __init__(self, config: ViTContextBroadcastConfig):
        config.validate()
        super().__init__(config, ViTEmbeddings(config, use_distillation_token=config.use_distillation_token))
        if config.context_broadcast is not None:
            positions = config.context_broadcast_position
            for layer in self.layers:
                broadcast_block(
                    layer.mlp,
                    layer.mlp.fc2,
                    attention=layer.attention,
                    attention_side="out",
                    positions=[positions] if isinstance(positions, str) else positions,
                    kind=config.context_broadcast,
                    scale_init=config.context_broadcast_scale_init,
                    blend=config.context_broadcast_blend,
                )
        self.post_init()


class ViTContextBroadcastForImageClassification(ViTContextBroadcastPreTrainedModel):
    """Vision transformer with Context Broadcasting and a linear classifier on [CLS]. With a distillation token, there
    is a second classifier on this token, and the logits are the mean of both classifiers' logits."""

    def __init__(self, config: ViTContextBroadcastConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = ViTContextBroadcastModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.distillation_classifier = None
        if config.use_distillation_token:
            self.distillation_classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ViTContextBroadcastImageClassifierOutput:
        """Compute logits, `(batch, num_labels)`. With `labels`, also compute the `image_classification_loss`. With a
        distillation token, the loss is the mean of both classifiers' losses."""
        outputs = self.vit(pixel_values, **kwargs)
        cls_logits = logits = self.classifier(outputs.last_hidden_state[:, 0])
        distillation_logits = None
        if self.distillation_classifier is not None:
            distillation_logits = self.distillation_classifier(outputs.last_hidden_state[:, 1])
            logits = (cls_logits + distillation_logits) / 2
        loss = None
        if labels is not None:
            loss = image_classification_loss(cls_logits, labels, self.config, num_items_in_batch)
            if distillation_logits is not None:
                second = image_classification_loss(distillation_logits, labels, self.config, num_items_in_batch)
                loss = (loss + second) / 2
        return ViTContextBroadcastImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cls_logits=None if distillation_logits is None else cls_logits,
            distillation_logits=distillation_logits,
        )


__all__ = [
    "ViTContextBroadcastConfig",
    "ViTContextBroadcastForImageClassification",
    "ViTContextBroadcastModel",
    "ViTContextBroadcastPreTrainedModel",
]
