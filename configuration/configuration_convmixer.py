"""Configuration of ConvMixers with trained or fixed spatial filters."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Size, VisionConfig, at_least, positive


# A variant name contains the width and the kernel size.
VARIANTS = {
    f"convmixer-{width}-k{kernel_size}": {"hidden_size": width, "kernel_size": kernel_size, "num_labels": 10}
    for width in (256, 512)
    for kernel_size in (3, 5, 8)
}


@strict
class ConvMixerConfig(VisionConfig):
    r"""
    Configuration of a ConvMixer (Trockman & Kolter, *Patches Are All You Need?*). The default values are those of
    Zheng et al. (arXiv 2404.01139, table 4), who show that spatial filters need no training. Models accept images of
    any size. Fields that are not listed here are documented in `VisionConfig` and in Transformers' `ViTConfig`.

    Args:
        kernel_size (`int`, *optional*, defaults to 3): Kernel size of the depthwise convolutions, odd or even.
        spatial_filters (`str`, *optional*, defaults to `"trained"`):
            `"trained"`, or the kind of fixed filters. `"random"` filters are uniform random values, `"impulse"`
            filters have a one at a random position, and `"box"` filters are all ones. `"signed_impulse"` filters have
            a one of random sign and are not part of the paper. The mean norm of the filters is equal for all kinds of
            fixed filters. The biases of fixed filters are not trained.
    """

    model_type = "convmixer"
    _variants = VARIANTS

    image_size: Size = at_least(1)(default=32)
    patch_size: int = at_least(1)(default=2)
    num_channels: int = at_least(1)(default=3)
    hidden_size: int = at_least(1)(default=256)
    num_hidden_layers: int = at_least(1)(default=8)
    kernel_size: int = at_least(1)(default=3)
    spatial_filters: Literal["trained", "random", "impulse", "signed_impulse", "box"] = "trained"
    hidden_act: str = "gelu"
    batch_norm_eps: float | int = positive(default=1e-5)


__all__ = ["ConvMixerConfig"]
