"""Configuration of the small vision transformers of Zheng et al. and the initialization of their attention."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Size, at_least
from .configuration_vit import Initialization, PlainViTConfig


# Names contain size, heads and image size, or, for tables 5 and 7, depth, width and heads.
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
    Initialization for Attention in Vision Transformers*, arXiv 2404.01139). The defaults are ViT-T for 32 x 32 pixels
    with sinusoidal positions and average pooling; `from_variant` makes the other models. Further fields are documented
    in `PlainViTConfig` and `AttentionStartConfig`. The paper's method is `initialization_options={"solver": "adam",
    "value_init": "default"}`; its authors ran `"adam_bounded"` (docs/impulse_initialization.md).

    Args:
        position_embedding (`str`, *optional*, defaults to `"sincos"`):
            `"sincos"`, a fixed sinusoidal encoding; `"learned"` (table 1), initialized with the sinusoidal encoding
            or, for baselines, truncated normal; or `"random"`, learned and initialized normal.
        position_std (`float`, *optional*, defaults to 0.36):
            Standard deviation of random positions. The NeurIPS 2025 code has 0.02, and 18 times as much in one setup.
        pooling (`str`, *optional*, defaults to `"mean"`):
            Pooling for the classifier: `"mean"`, the average of tokens after the final LayerNorm, or `"cls"`, a
            learned [CLS] (table 1).
        initialization (`str`, *optional*, defaults to `"impulse"`):
            Initialization of new weights: `"impulse"` or `"mimetic"` for attention, with other linear layers truncated
            normal; or `"trunc_normal"` (timm's) or `"kaiming_uniform"` (PyTorch's) for all linear layers.
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
        """Check that the width can hold sines and cosines of x and y."""
        if self.hidden_size % 4:
            raise ValueError(
                f"`hidden_size`={self.hidden_size} is not a multiple of 4 (sines and cosines of x and y)."
            )


__all__ = ["ViTImpulseInitConfig"]
