"""ViTImpulseInit: a plain vision transformer whose attention starts as convolution.

After Zheng et al., *Structured Initialization for Attention in Vision Transformers* (arXiv 2404.01139): sinusoidal
positions, average pooling, and queries and keys that make every head's first attention map an impulse filter.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration.configuration_vit_impulse_init import ViTImpulseInitConfig
from .context_broadcast import ContextBroadcast, broadcast_layers
from .hub import HubModel
from .impulse import sincos_position_encoding
from .initialization import TransformerParts, is_drawn, parts_of_layers, start_attention_
from .layers import (
    GenericForImageClassification,
    PatchEmbeddings,
    PreNormLayer,
    SelfAttention,
    check_pixel_values,
    interpolate_positions,
    pre_norm_layers,
)


class ViTImpulseInitEmbeddings(nn.Module):
    """Patches, positions and, with `pooling="cls"`, a [CLS] in front."""

    def __init__(self, config: ViTImpulseInitConfig):
        super().__init__()
        self.grid, self.hidden_size = config.grid, config.hidden_size
        self.patch_embeddings = PatchEmbeddings(config)
        has_cls = config.pooling == "cls"
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.hidden_size)) if has_cls else None
        positions = self.sincos_positions()
        if config.position_embedding != "sincos":
            self.position_embeddings = nn.Parameter(positions)
        else:
            self.register_buffer("position_embeddings", positions, persistent=False)

    def sincos_positions(self) -> torch.Tensor:
        """`(1, positions, hidden_size)`; zero for [CLS]."""
        encoding = sincos_position_encoding(*self.grid, self.hidden_size)
        return F.pad(encoding, (0, 0, int(self.cls_token is not None), 0))[None]

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        """Positions that are not saved are computed: a model that was made without memory has none yet."""
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if "position_embeddings" in self._non_persistent_buffers_set:
            old, weight = self.position_embeddings, state_dict.get(f"{prefix}patch_embeddings.projection.weight")
            device = weight.device if old.is_meta and weight is not None else old.device
            self.position_embeddings = self.sincos_positions().to(device, old.dtype)

    def interpolate_pos_encoding(self, height: int, width: int) -> torch.Tensor:
        """Positions for images of another size, interpolated bicubically."""
        grid = self.patch_embeddings.grid_of((height, width))
        return interpolate_positions(self.position_embeddings, self.grid, grid)

    def forward(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False) -> torch.Tensor:
        """Pixels to tokens `(batch, [CLS] + patches, hidden_size)`.

        Raises:
            ValueError: if the image has another size than the configuration says and positions are not interpolated.
        """
        tokens = self.patch_embeddings(pixel_values, any_size=interpolate_pos_encoding)
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        positions = self.position_embeddings
        if interpolate_pos_encoding:
            positions = self.interpolate_pos_encoding(*pixel_values.shape[2:])
        return tokens + positions.to(tokens.dtype)


class ViTImpulseInitPreTrainedModel(HubModel):
    """Base class of the family, which draws fresh weights."""

    config: ViTImpulseInitConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    auto_classes = {
        "AutoModel": "ViTImpulseInitModel",
        "AutoModelForImageClassification": "ViTImpulseInitForImageClassification",
    }
    embeds = {"image": ("forward", "pooler_output")}
    _no_split_modules = ["ViTImpulseInitEmbeddings", "PreNormLayer"]
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
        config = self.config
        if isinstance(module, nn.Linear) and config.initialization != "kaiming_uniform":
            init.trunc_normal_(module.weight, std=config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            # PyTorch's default; timm leaves the patch projection at it, too.
            bound = module.weight[0].numel() ** -0.5
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, ViTImpulseInitEmbeddings):
            if config.position_embedding == "random":
                init.normal_(module.position_embeddings, std=config.position_std)
            elif config.position_embedding == "sincos" or config.initialization in ("impulse", "mimetic"):
                init.copy_(module.position_embeddings, module.sincos_positions())
            else:
                init.trunc_normal_(module.position_embeddings, std=config.initializer_range)
            if module.cls_token is not None:
                init.trunc_normal_(module.cls_token, std=config.initializer_range)
        elif isinstance(module, ContextBroadcast):
            module.reset_parameters()
        elif isinstance(module, ViTImpulseInitModel) and has_structure(config) and is_drawn(module):
            # Comes after all modules within.
            start_attention_(module.parts_to_initialize(), config, positions="keep")


def has_structure(config: ViTImpulseInitConfig) -> bool:
    """Whether attention starts with structure, so that weights are not drawn layer by layer alone."""
    return config.initialization in ("impulse", "mimetic") or config.impulse_value_init == "mimetic"


class ViTImpulseInitModel(ViTImpulseInitPreTrainedModel):
    """The bare vision transformer, from pixels to tokens."""

    def __init__(self, config: ViTImpulseInitConfig):
        config.validate()
        super().__init__(config)
        self.embeddings = ViTImpulseInitEmbeddings(config)
        self.layers = pre_norm_layers(config)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        broadcast_layers(self.layers, config, has_class_token=config.pooling == "cls")
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
            `BaseModelOutputWithPooling`: `last_hidden_state`, `(batch, [CLS] + patches, hidden_size)`, and
            `pooler_output`, `(batch, hidden_size)`, which the classifier reads.
        """
        weight = self.embeddings.patch_embeddings.projection.weight
        pixel_values = check_pixel_values(pixel_values, self.config.num_channels, tuple(weight.shape[2:]))
        hidden_states = self.embeddings(pixel_values.to(weight.dtype), interpolate_pos_encoding)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        pooled = hidden_states[:, 0] if self.config.pooling == "cls" else hidden_states.mean(dim=1)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


class ViTImpulseInitForImageClassification(GenericForImageClassification, ViTImpulseInitPreTrainedModel):
    """The vision transformer with a linear classifier on the pooled token."""

    model_class = ViTImpulseInitModel


__all__ = [
    "ViTImpulseInitConfig",
    "ViTImpulseInitForImageClassification",
    "ViTImpulseInitModel",
    "ViTImpulseInitPreTrainedModel",
]
