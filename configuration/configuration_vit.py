"""Base configurations of vision transformers: `AttentionStartConfig` and `PlainViTConfig`."""

from dataclasses import field
from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Size, VisionConfig, at_least, pair, positive, rate


Initialization = Literal["impulse", "mimetic", "trunc_normal", "kaiming_uniform"]


@strict
class AttentionStartConfig(VisionConfig):
    r"""
    Base configuration of model families whose attention can have a structured initialization.

    Args:
        initialization (`str`, *optional*, defaults to `"default"`):
            Initialization of new weights. `"default"` is the model family's default. `"impulse"` and `"mimetic"`
            initialize attention. `"trunc_normal"` (as in timm) and `"kaiming_uniform"` (as in PyTorch) initialize all
            linear layers of the blocks.
        initialization_options (`dict`, *optional*):
            Keyword arguments for the initialization, for example `{"solver": "adam"}` for `impulse_init_`.
    """

    initialization: Literal["default", Initialization] = "default"
    initialization_options: dict = field(default_factory=dict)


@strict
class PlainViTConfig(AttentionStartConfig):
    r"""
    Base configuration of plain vision transformers. Fields that are not listed here are documented in `VisionConfig`
    and in Transformers' `ViTConfig`.

    Args:
        patch_size (`int` or pair of `int`, *optional*, defaults to 16):
            Patch size in pixels. It must divide `image_size`.
        intermediate_size (`int`, *optional*): MLP width; 4 times `hidden_size` by default.
        drop_path_rate (`float`, *optional*, defaults to 0.0):
            Stochastic depth rate of the last block. The rate increases linearly from block to block.
    """

    attribute_map = {"layer_norm_epsilon": "layer_norm_eps"}

    image_size: Size = at_least(1)(default=224)
    patch_size: Size = at_least(1)(default=16)
    num_channels: int = at_least(1)(default=3)
    hidden_size: int = at_least(1)(default=384)
    num_hidden_layers: int = at_least(1)(default=12)
    num_attention_heads: int = at_least(1)(default=6)
    intermediate_size: int | None = at_least(1)(default=None)
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    layer_norm_eps: float | int = positive(default=1e-6)
    drop_path_rate: float | int = rate(default=0.0)
    initializer_range: float | int = positive(default=0.02)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and number of columns of patches."""
        height, width = pair(self.image_size)
        patch_height, patch_width = pair(self.patch_size)
        return height // patch_height, width // patch_width

    def validate_patches(self):
        """Check that `patch_size` divides `image_size`, and that `num_attention_heads` divides `hidden_size`."""
        for size, patch in zip(pair(self.image_size), pair(self.patch_size), strict=True):
            if size % patch:
                raise ValueError(
                    f"Patches of `patch_size`={self.patch_size} do not tile images of `image_size`={self.image_size}."
                )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"`hidden_size`={self.hidden_size} is not divisible by `num_attention_heads`="
                f"{self.num_attention_heads}; choose a number of heads that divides the width."
            )
