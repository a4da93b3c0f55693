"""Plain vision transformer, the base of `ViTImpulseInitModel` and `ViTContextBroadcastModel`."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.vit.modeling_vit import ViTPatchEmbeddings
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .hub import HubModel
from .impulse import sincos_position_encoding
from .layers import MLP, DropPath, SelfAttention, in_float32, uniform_init_


def interpolate_positions(positions: torch.Tensor, grid: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """Interpolate position embeddings, `(1, prefix + rows * columns, hidden_size)`, bicubically from `grid` to `size`.
    The position embeddings of prefix tokens do not change."""
    num_prefix_tokens = positions.shape[1] - grid[0] * grid[1]
    patches = positions[:, num_prefix_tokens:].unflatten(1, grid).permute(0, 3, 1, 2)
    patches = F.interpolate(in_float32(patches), size, mode="bicubic", align_corners=False).flatten(2).mT
    return torch.cat([positions[:, :num_prefix_tokens], patches.to(positions.dtype)], dim=1)


class ViTEmbeddings(nn.Module):
    """Patch embeddings with learned or sinusoidal positions, and optional [CLS] and distillation tokens."""

    def __init__(
        self,
        config,
        use_cls_token: bool = True,
        use_distillation_token: bool = False,
        fixed_positions: bool = False,
    ):
        super().__init__()
        self.grid = config.grid
        self.hidden_size = config.hidden_size
        self.patch_embeddings = ViTPatchEmbeddings(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.hidden_size)) if use_cls_token else None
        self.distillation_token = (
            nn.Parameter(torch.empty(1, 1, config.hidden_size)) if use_distillation_token else None
        )
        self.num_prefix_tokens = use_cls_token + use_distillation_token
        if fixed_positions:
            self.register_buffer("position_embeddings", self.sincos_positions(), persistent=False)
        else:
            num_tokens = self.num_prefix_tokens + self.patch_embeddings.num_patches
            self.position_embeddings = nn.Parameter(torch.empty(1, num_tokens, config.hidden_size))

    def sincos_positions(self) -> torch.Tensor:
        """Return sinusoidal positions, `(1, tokens, hidden_size)`. The positions of prefix tokens are zero."""
        encoding = sincos_position_encoding(*self.grid, self.hidden_size)
        return F.pad(encoding, (0, 0, self.num_prefix_tokens, 0))[None]

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        """Load weights, and compute fixed positions, which are not saved and have no values on the meta device."""
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        positions = self.position_embeddings
        if not isinstance(positions, nn.Parameter):
            weight = state_dict.get(f"{prefix}patch_embeddings.projection.weight", positions)
            device = weight.device if positions.is_meta else positions.device
            self.position_embeddings = self.sincos_positions().to(device, positions.dtype)

    def interpolate_pos_encoding(self, height: int, width: int) -> torch.Tensor:
        """Return position embeddings for images of `height` x `width` pixels, interpolated bicubically."""
        rows, columns = self.patch_embeddings.patch_size
        return interpolate_positions(self.position_embeddings, self.grid, (height // rows, width // columns))

    def forward(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False) -> torch.Tensor:
        height, width = pixel_values.shape[2:]
        tokens = self.patch_embeddings(pixel_values)
        prefix = [token for token in (self.cls_token, self.distillation_token) if token is not None]
        tokens = torch.cat([token.expand(tokens.shape[0], -1, -1) for token in prefix] + [tokens], dim=1)
        if interpolate_pos_encoding:
            return tokens + self.interpolate_pos_encoding(height, width).to(tokens.dtype)
        image_size = tuple(self.patch_embeddings.image_size)
        if (height, width) != image_size:
            expected = " x ".join(map(str, image_size))
            raise ValueError(
                f"`pixel_values` has images of {height} x {width} pixels, expected {expected}. Resize them, or pass "
                "`interpolate_pos_encoding=True`."
            )
        return tokens + self.position_embeddings.to(tokens.dtype)


class ViTLayer(GradientCheckpointingLayer):
    """Pre-norm transformer block."""

    def __init__(self, config, drop_path_rate: float):
        super().__init__()
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate else nn.Identity()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config, config.hidden_size, config.num_attention_heads, config.qkv_bias)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        branch, _ = self.attention(self.layernorm_before(hidden_states), **kwargs)
        hidden_states = hidden_states + self.drop_path(branch)
        branch = self.mlp(self.layernorm_after(hidden_states))
        return hidden_states + self.drop_path(branch)


class ViTPreTrainedModel(HubModel):
    """Base class of the plain vision transformers, with weight initialization."""

    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    embeds = {"image": ("forward", "pooler_output")}
    _no_split_modules = ["ViTEmbeddings", "ViTLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _input_embed_layer = "patch_embeddings"
    _can_record_outputs = {
        "hidden_states": ViTLayer,
        "attentions": OutputRecorder(SelfAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            # If the weights had a standard deviation of 0.02, embeddings of small patches would be much smaller than
            # the position embeddings.
            uniform_init_(module)
        elif isinstance(module, ViTEmbeddings):
            self._init_positions(module)
            for token in (module.cls_token, module.distillation_token):
                if token is not None:
                    init.trunc_normal_(token, std=std)
        else:
            super()._init_weights(module)

    def _init_positions(self, embeddings: ViTEmbeddings):
        init.trunc_normal_(embeddings.position_embeddings, std=self.config.initializer_range)


class ViTModel(ViTPreTrainedModel):
    """The bare plain vision transformer, without a head."""

    def __init__(self, config, embeddings: ViTEmbeddings):
        super().__init__(config)
        last = max(config.num_hidden_layers - 1, 1)
        self.embeddings = embeddings
        self.layers = nn.ModuleList(
            ViTLayer(config, config.drop_path_rate * index / last) for index in range(config.num_hidden_layers)
        )
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

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
                Interpolate position embeddings for images whose size differs from `config.image_size`.

        Returns:
            `BaseModelOutputWithPooling`: `last_hidden_state`, `(batch, prefix + patches, hidden_size)`, and
            `pooler_output`, `(batch, hidden_size)`, which is [CLS] or, without [CLS], the mean of all tokens.
        """
        pixel_values = pixel_values.to(self.embeddings.patch_embeddings.projection.weight.dtype)
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        pooled = hidden_states.mean(dim=1) if self.embeddings.cls_token is None else hidden_states[:, 0]
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)
