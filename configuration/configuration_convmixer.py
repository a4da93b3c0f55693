"""ConvMixer configuration: patches, depthwise and pointwise convolutions, with filters that may stay as they start."""

from huggingface_hub.dataclasses import strict

from .configuration_base import FrugalViTConfig


SPATIAL_FILTERS = ("trained", "random", "impulse", "signed_impulse", "box")


@strict
class ConvMixerConfig(FrugalViTConfig):
    r"""
    Configuration of a ConvMixer (Trockman & Kolter, *Patches Are All You Need?*) as Zheng et al. (arXiv 2404.01139,
    table 4) use it to show that spatial filters need no training. The defaults are theirs.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 32):
            Image size in pixels, or height and width, for preprocessing. The model takes any size.
        patch_size (`int`, *optional*, defaults to 2): Patch size in pixels.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.
        hidden_size (`int`, *optional*, defaults to 256): Channels of the feature maps.
        num_hidden_layers (`int`, *optional*, defaults to 8): Layers.
        kernel_size (`int`, *optional*, defaults to 3): Size of the depthwise convolutions' filters, odd or even.
        spatial_filters (`str`, *optional*, defaults to `"trained"`):
            `"trained"`, or filters that keep their first values, as their biases do: `"random"`, uniform; `"impulse"`,
            a one at a random position; or `"box"`, all ones. Each is scaled to the norm of random filters.
            `"signed_impulse"`, of which half are negative, is ours.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation.
        batch_norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of the BatchNorms.
        image_mean, image_std, resize_size, resample: Fields of the image processor.
    """

    model_type = "convmixer"

    image_size: int | list[int] | tuple[int, int] = 32
    patch_size: int = 2
    num_channels: int = 3
    hidden_size: int = 256
    num_hidden_layers: int = 8
    kernel_size: int = 3
    spatial_filters: str = "trained"
    hidden_act: str = "gelu"
    batch_norm_eps: float | int = 1e-5
    image_mean: float | list[float] | tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: float | list[float] | tuple[float, ...] = (0.5, 0.5, 0.5)
    resize_size: int | None = None
    resample: int = 2

    @staticmethod
    def _variants() -> dict[str, dict]:
        return VARIANTS

    def validate_values(self):
        """Counts and sizes are positive, and filters are known ones."""
        self._check_counts("patch_size", "num_channels", "hidden_size", "num_hidden_layers", "kernel_size")
        self._check_sizes("image_size")
        self._check_choices(spatial_filters=SPATIAL_FILTERS)


# Names read width and kernel size.
VARIANTS = {
    f"convmixer-{width}-k{kernel_size}": {"hidden_size": width, "kernel_size": kernel_size, "num_labels": 10}
    for width in (256, 512)
    for kernel_size in (3, 5, 8)
}


__all__ = ["ConvMixerConfig"]
