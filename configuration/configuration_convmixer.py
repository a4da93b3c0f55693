"""Configuration of ConvMixers, whose spatial filters may be trained or fixed."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Size, VisionConfig, at_least, positive


# Names contain width and kernel size.
VARIANTS = {
    f"convmixer-{width}-k{kernel_size}": {"hidden_size": width, "kernel_size": kernel_size, "num_labels": 10}
    for width in (256, 512)
    for kernel_size in (3, 5, 8)
}


@strict
class ConvMixerConfig(VisionConfig):
    r"""
    Configuration of a ConvMixer (Trockman & Kolter, *Patches Are All You Need?*), with which Zheng et al. (arXiv
    2404.01139, table 4) show that spatial filters need no training. The defaults are those of Zheng et al. Models take
    images of any size. Fields of the image processor are documented in `VisionConfig`, further fields in `ViTConfig`.

    Args:
        kernel_size (`int`, *optional*, defaults to 3): Size of the depthwise convolutions' filters, odd or even.
        spatial_filters (`str`, *optional*, defaults to `"trained"`):
            `"trained"`, or fixed filters and biases: `"random"`, uniform; `"impulse"`, a one at a random position;
            `"box"`, all ones; or `"signed_impulse"`, impulses of random sign, which the paper does not have. Filters
            are scaled to the mean norm of random filters.
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
