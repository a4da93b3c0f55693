"""ConvMixer configuration: patches, depthwise and pointwise convolutions, with filters that may stay as they start."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Size, VisionConfig, at_least, positive


# Names read width and kernel size.
VARIANTS = {
    f"convmixer-{width}-k{kernel_size}": {"hidden_size": width, "kernel_size": kernel_size, "num_labels": 10}
    for width in (256, 512)
    for kernel_size in (3, 5, 8)
}


@strict
class ConvMixerConfig(VisionConfig):
    r"""
    Configuration of a ConvMixer (Trockman & Kolter, *Patches Are All You Need?*) as Zheng et al. (arXiv 2404.01139,
    table 4) use it to show that spatial filters need no training. The defaults are theirs. Images of any size
    are taken. Fields of the image processor are `VisionConfig`'s, those that are not listed as in `ViTConfig`.

    Args:
        kernel_size (`int`, *optional*, defaults to 3): Size of the depthwise convolutions' filters, odd or even.
        spatial_filters (`str`, *optional*, defaults to `"trained"`):
            `"trained"`, or filters that keep their first values, as their biases do: `"random"`, uniform; `"impulse"`,
            a one at a random position; or `"box"`, all ones. Each is scaled to the norm of random filters.
            `"signed_impulse"`, of which half are negative, is ours.
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
