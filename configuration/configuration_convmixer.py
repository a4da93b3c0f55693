"""ConvMixer configuration: patches, depthwise and pointwise convolutions, with filters that may stay as they start."""

from huggingface_hub.dataclasses import strict

from .configuration_base import FrugalViTConfig, pair


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
        kernel_size (`int`, *optional*, defaults to 3): Size of the depthwise convolutions' filters; even ones, too.
        spatial_filters (`str`, *optional*, defaults to `"trained"`):
            `"trained"`, or filters that keep their first values, as their biases do: `"random"`, uniform; `"impulse"`,
            a one at a random position; or `"box"`, all ones. Each is scaled to the norm of random filters.
            `"signed_impulse"`, of which half are negative, is ours.
        spatial_activation (`bool`, *optional*, defaults to `False`):
            Whether an activation follows the depthwise convolutions, too, as Trockman & Kolter have it; the code of
            Zheng et al. leaves it out.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation.
        batch_norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of the BatchNorms.
        image_mean, image_std (`float` or sequence of `float`, *optional*):
            Normalization written into the image processor, for all channels or each.
        resize_size (`int`, *optional*):
            Shorter side to resize to before a center crop of `image_size`; `None` resizes straight to `image_size`.
        resample (`int`, *optional*, defaults to 2): PIL's resampling filter (2 bilinear, 3 bicubic).

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, if values contradict each other, or
            if a name looks like a misspelled field; the message says what was given and what would fit.
    """

    model_type = "convmixer"

    image_size: int | list[int] | tuple[int, int] = 32
    patch_size: int = 2
    num_channels: int = 3
    hidden_size: int = 256
    num_hidden_layers: int = 8
    kernel_size: int = 3
    spatial_filters: str = "trained"
    spatial_activation: bool = False
    hidden_act: str = "gelu"
    batch_norm_eps: float | int = 1e-5
    image_mean: float | list[float] | tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: float | list[float] | tuple[float, ...] = (0.5, 0.5, 0.5)
    resize_size: int | None = None
    resample: int = 2

    def validate_counts(self):
        """Counts and sizes are positive, and an image has a patch."""
        self._check_counts(
            "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "kernel_size", "resize_size"
        )
        self._check_sizes("image_size")
        if min(pair(self.image_size)) < self.patch_size:
            raise ValueError(f"Images of `image_size`={self.image_size} hold no patch of {self.patch_size} pixels.")

    def validate_choices(self):
        """Fields with a fixed set of values have one of them, and epsilon is positive."""
        self._check_choices(spatial_filters=SPATIAL_FILTERS)
        self._check_positive("batch_norm_eps")

    @staticmethod
    def _variants() -> dict[str, dict]:
        return VARIANTS


# Names read width and kernel size.
VARIANTS = {
    f"convmixer-{width}-k{kernel_size}": {"hidden_size": width, "kernel_size": kernel_size, "num_labels": 10}
    for width in (256, 512)
    for kernel_size in (3, 5, 8)
}


__all__ = ["ConvMixerConfig"]
