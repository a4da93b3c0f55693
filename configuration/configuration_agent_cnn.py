"""Configuration of agent CNNs (Zhang et al., *Bootstrapping ViTs*, arXiv 2112.03552)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Ints, Size, VisionConfig, at_least, pair, positive, rate


_SMALL = {
    "hidden_size": 288,
    "num_hidden_layers": 6,
    "num_positions": 9,
    "initialization": "reference",
    "num_labels": 10,
}
_BASE = {
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_positions": 6,
    "norm_position": "after",
    "initialization": "reference",
    "num_labels": 10,
}
VARIANTS = {
    "agent-small": _SMALL,
    "agent-base": _BASE,
    "agent-small-res": {**_SMALL, "stem": "res", "downsample_after": (0, 1)},
    "agent-base-res": {**_BASE, "stem": "res", "downsample_after": (1, 3)},
}


@strict
class AgentCNNConfig(VisionConfig):
    r"""
    Configuration of an agent CNN (Zhang et al., *Bootstrapping ViTs*, arXiv 2112.03552, tables 1 and 2). An agent CNN
    has the blocks of a vision transformer, with a generalized convolution (`GeneralizedConv2d`) instead of attention.
    The default values are those of Agent-S, except for `initialization`. `from_variant` returns the configurations of
    the paper's models. Models accept images of any size. Fields that are not listed here are documented in
    `VisionConfig` and in Transformers' `ViTConfig`.

    Args:
        stem (`str`, *optional*, defaults to `"patch"`):
            `"patch"` for the patch embedding of a vision transformer, or `"res"` for a ResNet stem: a 7 x 7
            convolution, 3 x 3 max pooling and a 3 x 3 convolution, each with stride 2. The paper's text has 2 x 2 max
            pooling, but the paper's code has 3 x 3.
        patch_size (`int`, *optional*, defaults to 16): Patch size in pixels, for `stem="patch"`.
        stem_channels (`int`, *optional*, defaults to 64): Channels of the first convolution of `stem="res"`.
        hidden_size (`int`, *optional*, defaults to 288): Channels of the feature maps.
        num_positions (`int`, *optional*, defaults to 9): Number of positions in the kernel of each generalized
            convolution.
        hidden_act (`str`, *optional*, defaults to `"gelu"`):
            Activation function in the MLPs, in the ResNet stem and after the final norm.
        norm_position (`str`, *optional*, defaults to `"before"`):
            `"before"` for a BatchNorm before the convolution and one before the MLP (Agent-S), or `"after"` for a
            BatchNorm after the convolution and one after the MLP (Agent-B).
        downsample_after (sequence of `int`, *optional*, defaults to `()`):
            Indices of the blocks that are followed by 2 x 2 average pooling. For Agent-B with `stem="res"`, the
            indices are 1 and 3 in the paper's text and in our variant, but 2 and 8 in the paper's code.
        dropout (`float`, *optional*, defaults to 0.1): Dropout rate after the activation function in the MLPs.
        branch_dropout (`float`, *optional*, defaults to 0.0):
            Dropout rate at the end of the two residual branches of each block. If the agent shares weights with a
            transformer, the reference implementation sets this field to the transformer's dropout rate.
        initialization (`str`, *optional*, defaults to `"default"`):
            Initialization of new weights: `"default"` (PyTorch) or `"reference"` (reference implementation, see
            `reference_initialization.py`). All variants have `"reference"`.
    """

    model_type = "agent_cnn"
    _variants = VARIANTS

    image_size: Size = at_least(1)(default=224)
    num_channels: int = at_least(1)(default=3)
    stem: Literal["patch", "res"] = "patch"
    patch_size: int = at_least(1)(default=16)
    stem_channels: int = at_least(1)(default=64)
    hidden_size: int = at_least(1)(default=288)
    num_hidden_layers: int = at_least(1)(default=6)
    num_positions: int = at_least(1)(default=9)
    intermediate_size: int | None = at_least(1)(default=None)
    hidden_act: str = "gelu"
    norm_position: Literal["before", "after"] = "before"
    downsample_after: Ints = ()
    dropout: float | int = rate(default=0.1)
    branch_dropout: float | int = rate(default=0.0)
    batch_norm_eps: float | int = positive(default=1e-5)
    initialization: Literal["default", "reference"] = "default"

    @property
    def stride(self) -> int:
        """Stride of the last feature map in pixels."""
        return (self.patch_size if self.stem == "patch" else 8) * 2 ** len(self.downsample_after)

    def validate_stride(self):
        """Check that the blocks in `downsample_after` exist, and that `image_size` is at least `stride`."""
        if not {*self.downsample_after} <= {*range(self.num_hidden_layers)}:
            last = self.num_hidden_layers - 1
            raise ValueError(f"`downsample_after` is {self.downsample_after}, expected blocks from 0 to {last}.")
        if min(pair(self.image_size)) < self.stride:
            raise ValueError(
                f"`image_size` is {self.image_size}, expected at least {self.stride}, the stride of the last map."
            )


__all__ = ["AgentCNNConfig"]
