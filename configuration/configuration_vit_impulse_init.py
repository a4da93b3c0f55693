"""Configuration of vision transformers whose attention is initialized as a convolution (Zheng et al.)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Size, at_least
from .configuration_vit import Initialization, PlainViTConfig


# A variant name contains the model size, the number of heads and the image size. The names of variants from tables 5
# and 7 contain the depth, the width and the number of heads instead.
VARIANTS = {
    f"vit-{size}-h{heads}-{image_size}": {
        "image_size": image_size,
        "patch_size": patch_size,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_labels": num_labels,
        "resize_size": resize_size,
    }
    for size, width, all_heads in (("tiny", 192, (3, 8)), ("small", 384, (6, 16)))
    for heads in all_heads
    for image_size, patch_size, num_labels, resize_size in ((32, 2, 10, None), (224, 16, 1000, 256))
} | {
    f"vit-depth8-{width}-h{heads}": {
        "hidden_size": width,
        "num_hidden_layers": 8,
        "num_attention_heads": heads,
        "num_labels": 10,
    }
    for width in (64, 128, 256, 512)
    for heads in (4, 8, 16, 32)
}


@strict
class ViTImpulseInitConfig(PlainViTConfig):
    r"""
    Configuration of a vision transformer whose attention is initialized as a convolution (Zheng et al., *Structured
    Initialization for Attention in Vision Transformers*, arXiv 2404.01139). The default model is ViT-T for images of
    32 x 32 pixels, with sinusoidal positions and average pooling. `from_variant` returns the configurations of the
    paper's models. Other fields are documented in `PlainViTConfig` and `AttentionStartConfig`. With
    `initialization_options={"solver": "adam", "value_init": "default"}`, the initialization is Algorithm 1 of the
    paper. The authors' code uses the solver `"adam_bounded"` instead (docs/impulse_initialization.md).

    Args:
        position_embedding (`str`, *optional*, defaults to `"sincos"`):
            `"sincos"` for a fixed sinusoidal encoding, `"learned"` (table 1) for learned positions, or `"random"` for
            learned positions with a normal initialization. `"learned"` positions are initialized with the sinusoidal
            encoding if `initialization` is `"impulse"` or `"mimetic"`, and with truncated normal values otherwise.
        position_std (`float`, *optional*, defaults to 0.36):
            Standard deviation of `"random"` positions. The code that the authors published for NeurIPS 2025 uses
            0.02, except for one setup with 0.36 (18 * 0.02).
        pooling (`str`, *optional*, defaults to `"mean"`):
            Input of the classifier: `"mean"` for the mean of all tokens after the final LayerNorm, or `"cls"` for a
            learned [CLS] token (table 1).
        initialization (`str`, *optional*, defaults to `"impulse"`):
            Initialization of new weights. `"impulse"` and `"mimetic"` initialize attention; other linear layers get
            truncated normal weights. `"trunc_normal"` (as in timm) and `"kaiming_uniform"` (as in PyTorch) initialize
            all linear layers.
    """

    model_type = "vit_impulse_init"
    _variants = VARIANTS

    image_size: Size = at_least(1)(default=32)
    patch_size: Size = at_least(1)(default=2)
    hidden_size: int = at_least(1)(default=192)
    num_attention_heads: int = at_least(1)(default=3)
    position_embedding: Literal["sincos", "learned", "random"] = "sincos"
    position_std: float | int = 0.36
    pooling: Literal["mean", "cls"] = "mean"
    initialization: Initialization = "impulse"

    def validate_positions(self):
        """Check that `hidden_size` is divisible by 4, because positions have sines and cosines of x and y."""
        if self.hidden_size % 4:
            raise ValueError(
                f"`hidden_size`={self.hidden_size} is not a multiple of 4 (sines and cosines of x and y)."
            )


__all__ = ["ViTImpulseInitConfig"]
