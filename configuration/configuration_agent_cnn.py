"""AgentCNN configuration: convolutional twins of vision transformers, from which these learn their biases."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Ints, Size, VisionConfig, at_least, pair, positive, rate


_SMALL = {
    "hidden_size": 288,
    "num_hidden_layers": 6,
    "num_positions": 9,
    "branch_dropout": 0.0,
    "initialization": "reference",
    "num_labels": 10,
}
_BASE = {
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_positions": 6,
    "norm_position": "after",
    "branch_dropout": 0.0,
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
    Configuration of an agent CNN (Zhang et al., *Bootstrapping ViTs*, arXiv 2112.03552, tables 1 and 2): a vision
    transformer's blocks with a generalized convolution in the place of attention. The defaults are Agent-S, but for
    `branch_dropout` and `initialization`; `from_variant` has the rest. Images of any size are taken. Fields of
    the image processor are `VisionConfig`'s, those that are not listed as in Transformers' `ViTConfig`.

    Args:
        stem (`str`, *optional*, defaults to `"patch"`):
            `"patch"`, a linear map of each patch, as a vision transformer has it, or `"res"`, as in a ResNet: a 7 x 7
            convolution, 3 x 3 max pooling (2 x 2 in the paper, 3 x 3 in its code) and a 3 x 3 convolution, each with
            stride 2.
        patch_size (`int`, *optional*, defaults to 16): Patch size in pixels, for `stem="patch"`.
        stem_channels (`int`, *optional*, defaults to 64): Channels of the first convolution of `stem="res"`.
        hidden_size (`int`, *optional*, defaults to 288): Channels of the feature maps.
        num_positions (`int`, *optional*, defaults to 9): Receptive field of the generalized convolutions ("H9").
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of the MLPs, of `stem="res"` and at the end.
        norm_position (`str`, *optional*, defaults to `"before"`):
            BatchNorm `"before"` the convolution and the MLP (Agent-S), or `"after"` them, at the end of the branch
            (Agent-B).
        downsample_after (sequence of `int`, *optional*, defaults to `()`):
            Blocks, from 0, after which 2 x 2 average pooling halves the map. For Agent-B, the paper has 1 and 3 (our
            default), its code 2 and 8.
        dropout (`float`, *optional*, defaults to 0.1): Dropout after the activation of the MLPs.
        branch_dropout (`float`, *optional*):
            Dropout at the end of the MLPs, which the reference implementation does not have; `dropout` if not given.
        initialization (`str`, *optional*, defaults to `"default"`):
            How weights of a fresh model are drawn: `"default"`, PyTorch's way, or `"reference"`, the reference
            implementation's, which the variants have; see `reference_initialization.py`.
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
    branch_dropout: float | int | None = at_least(0)(default=None)
    batch_norm_eps: float | int = positive(default=1e-5)
    initialization: Literal["default", "reference"] = "default"

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.branch_dropout is None:
            self.branch_dropout = self.dropout
        super().__post_init__(**kwargs)

    @property
    def stride(self) -> int:
        """Pixels of the image between neighboring positions of the last feature map, in each direction."""
        return (self.patch_size if self.stem == "patch" else 8) * 2 ** len(self.downsample_after)

    def validate_stride(self):
        """Blocks that halve the map exist, and leave some of it."""
        if not {*self.downsample_after} <= {*range(self.num_hidden_layers)}:
            last = self.num_hidden_layers - 1
            raise ValueError(f"`downsample_after` is {self.downsample_after}, expected blocks from 0 to {last}.")
        if min(pair(self.image_size)) < self.stride:
            raise ValueError(f"`image_size`={self.image_size} is less than the last map's stride of {self.stride}.")


__all__ = ["AgentCNNConfig"]
