"""ViTContextBroadcast: a plain vision transformer with Context Broadcasting, and its distilled form.

After Hyeon-Woo et al., *Scratching Visual Transformer's Back with Uniform Attention* (arXiv 2210.08457), which adds a
line to DeiT. That line stands in `context_broadcast.py`, which puts it into blocks of this family and others.
`ContextBroadcastViT…` are not these: Transformers' ViT into which it was inserted (`context_broadcast_hosts.py`).
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_vit_context_broadcast import ViTContextBroadcastConfig
from .context_broadcast import ContextBroadcast, broadcast_layers
from .hub import HubModel
from .initialization import TransformerParts, is_drawn, parts_of_layers, start_attention_
from .layers import (
    PatchEmbeddings,
    PreNormLayer,
    SelfAttention,
    check_pixel_values,
    image_classification_loss,
    interpolate_positions,
    pre_norm_layers,
)


@dataclass
class ViTContextBroadcastImageClassifierOutput(ImageClassifierOutput):
    """
    Args:
        cls_logits, distillation_logits (`torch.FloatTensor` of shape `(batch, num_labels)`, *optional*):
            Scores of the two classifiers of a distilled model; `logits` is their mean.
    """

    cls_logits: torch.FloatTensor | None = None
    distillation_logits: torch.FloatTensor | None = None


class ViTContextBroadcastEmbeddings(nn.Module):
    """Patches and learned positions, with [CLS] and, in distilled models, a distillation token in front."""

    def __init__(self, config: ViTContextBroadcastConfig):
        super().__init__()
        self.grid = config.grid
        self.patch_embeddings = PatchEmbeddings(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        has_second = config.use_distillation_token
        self.distillation_token = nn.Parameter(torch.empty(1, 1, config.hidden_size)) if has_second else None
        count = 1 + has_second + self.patch_embeddings.num_patches
        self.position_embeddings = nn.Parameter(torch.empty(1, count, config.hidden_size))

    def interpolate_pos_encoding(self, height: int, width: int) -> torch.Tensor:
        """Positions for images of another size, interpolated bicubically."""
        return interpolate_positions(
            self.position_embeddings, self.grid, self.patch_embeddings.grid_of((height, width))
        )

    def forward(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False) -> torch.Tensor:
        """Pixels to tokens `(batch, [CLS] + [distillation] + patches, hidden_size)`.

        Raises:
            ValueError: if the image has another size than the configuration says and positions are not interpolated.
        """
        patches = self.patch_embeddings(pixel_values, any_size=interpolate_pos_encoding)
        leading = [token for token in (self.cls_token, self.distillation_token) if token is not None]
        tokens = torch.cat([token.expand(patches.shape[0], -1, -1) for token in leading] + [patches], dim=1)
        positions = self.position_embeddings
        if interpolate_pos_encoding:
            positions = self.interpolate_pos_encoding(*pixel_values.shape[2:])
        return tokens + positions


class ViTContextBroadcastPreTrainedModel(HubModel):
    """Base class of the family, which draws fresh weights."""

    config: ViTContextBroadcastConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    auto_classes = {
        "AutoModel": "ViTContextBroadcastModel",
        "AutoModelForImageClassification": "ViTContextBroadcastForImageClassification",
    }
    embeds = {"image": ("forward", "pooler_output")}
    _no_split_modules = ["ViTContextBroadcastEmbeddings", "PreNormLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": PreNormLayer,
        "attentions": OutputRecorder(SelfAttention, index=1),
    }

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embeddings.patch_embeddings

    @torch.no_grad()
    def _init_weights(self, module):
        config, std = self.config, self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            # PyTorch's default, at which DeiT leaves it: drawn at 0.02, small patches would drown in positions.
            bound = module.weight[0].numel() ** -0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, ViTContextBroadcastEmbeddings):
            init.trunc_normal_(module.position_embeddings, std=std)
            init.trunc_normal_(module.cls_token, std=std)
            if module.distillation_token is not None:
                init.trunc_normal_(module.distillation_token, std=std)
        elif isinstance(module, ContextBroadcast):
            module.reset_parameters()
        elif isinstance(module, ViTContextBroadcastModel) and config.initialization != "default" and is_drawn(module):
            # Comes after all modules within.
            start_attention_(module.parts_to_initialize(), config)


class ViTContextBroadcastModel(ViTContextBroadcastPreTrainedModel):
    """The bare vision transformer, from pixels to tokens."""

    def __init__(self, config: ViTContextBroadcastConfig):
        config.validate()
        super().__init__(config)
        self.embeddings = ViTContextBroadcastEmbeddings(config)
        self.layers = pre_norm_layers(config)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        broadcast_layers(self.layers, config, has_class_token=True)
        self.post_init()

    def parts_to_initialize(self) -> TransformerParts:
        """The parts that initializations write to."""
        return parts_of_layers(self)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`): Normalized images.
            interpolate_pos_encoding (`bool`, *optional*, defaults to `False`):
                Take images of another size than the configuration's.

        Returns:
            `BaseModelOutputWithPooling`: `last_hidden_state`, `(batch, [CLS] + [distillation] + patches,
            hidden_size)`, and `pooler_output`, `(batch, hidden_size)`, its [CLS].
        """
        weight = self.embeddings.patch_embeddings.projection.weight
        pixel_values = check_pixel_values(pixel_values, self.config.num_channels, tuple(weight.shape[2:]))
        hidden_states = self.embeddings(pixel_values.to(weight.dtype), interpolate_pos_encoding)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=hidden_states[:, 0])


class ViTContextBroadcastForImageClassification(ViTContextBroadcastPreTrainedModel):
    """The vision transformer with a linear classifier on [CLS] and, in distilled models, one on the distillation
    token, whose logits are averaged."""

    # The loss divides by `num_items_in_batch` for every problem type.
    accepts_loss_kwargs = True

    def __init__(self, config: ViTContextBroadcastConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = ViTContextBroadcastModel(config)

        def classifier() -> nn.Module:
            return nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()

        self.classifier = classifier()
        self.distillation_classifier = classifier() if config.use_distillation_token else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ViTContextBroadcastImageClassifierOutput:
        """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch, num_channels, height, width)`): Normalized images.
            labels (`torch.Tensor`, *optional*):
                `(batch,)` class indices, or `(batch, num_labels)` floats (multi-label classification, regression).
            num_items_in_batch (`int`, *optional*): Divide the summed loss by this count (set by `Trainer`).
            kwargs: Passed to the base model's `forward`.

        Returns:
            `ViTContextBroadcastImageClassifierOutput`: `loss`, of a distilled model the mean of both classifiers', and
            `(batch, num_labels)` `logits`. Learning from a teacher is the part of training (`frugalvit train
            --distill-from`).
        """
        outputs = self.vit(pixel_values, **kwargs)
        every = [self.classifier(outputs.last_hidden_state[:, 0])]
        if self.distillation_classifier is not None:
            every.append(self.distillation_classifier(outputs.last_hidden_state[:, 1]))
        loss = None
        if labels is not None:
            losses = [image_classification_loss(each, labels, self.config, num_items_in_batch) for each in every]
            loss = sum(losses) / len(losses)
        distilled = dict(zip(("cls_logits", "distillation_logits"), every, strict=True)) if len(every) > 1 else {}
        return ViTContextBroadcastImageClassifierOutput(
            loss=loss,
            logits=sum(every) / len(every),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **distilled,
        )


__all__ = [
    "ViTContextBroadcastConfig",
    "ViTContextBroadcastForImageClassification",
    "ViTContextBroadcastModel",
    "ViTContextBroadcastPreTrainedModel",
]
