"""Base classes of all configurations, and validators of configuration fields."""

import difflib
import math
from dataclasses import fields
from typing import Literal

from huggingface_hub.dataclasses import as_validated_field, strict
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin
from transformers.utils.type_validators import interval


Size = int | list[int] | tuple[int, int]
Floats = list[float | int] | tuple[float | int, ...]
Ints = list[int] | tuple[int, ...]

# `rate` and `positive` make validated dataclass fields, for example `dropout: float | int = rate(default=0.0)`.
rate = interval(min=0.0, max=1.0, exclude_max=True)
positive = interval(min=0.0, exclude_min=True)


def at_least(low: int):
    """Return a factory of dataclass fields. The fields accept `None`, a number, or a pair of numbers, and reject
    numbers below `low`."""

    @as_validated_field
    def check(value):
        if isinstance(value, (list, tuple)) and len(value) != 2:
            raise ValueError(f"expected one or two numbers, got {value}")
        if value is not None and not min(pair(value)) >= low:
            raise ValueError(f"expected at least {low}, got {value}")

    return check


def pair(size) -> tuple[int, ...]:
    """Return `(height, width)`. `size` is a pair, or one number for both sides."""
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def is_sparseformer(config) -> bool:
    """Return whether a configuration belongs to a SparseFormer or a PatchSparseFormer."""
    # `isinstance` fails for models loaded with remote code, because remote code defines its own classes.
    return getattr(config, "model_type", "").removesuffix("_projection") in ("sparseformer", "patch_sparseformer")


def set_image_size(config, image_size: int | list[int]):
    """Set the `image_size` of a configuration, in pixels. Multiply the configuration's `resize_size` by the ratio of
    the new `image_size` to the old `image_size`."""
    if getattr(config, "resize_size", None) is not None:
        config.resize_size = round(config.resize_size * min(pair(image_size)) / min(pair(config.image_size)))
    config.image_size = image_size


class HubMixin:
    """Mixin that disables `register_for_auto_class` of models, configurations and processors."""

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        """Do nothing, because `HubModel.save_pretrained` sets `auto_map` and saves the source files."""


@strict
class FrugalViTConfig(HubMixin, PreTrainedConfig):
    """Base configuration that rejects misspelled field names and has the papers' models as named variants.

    `PreTrainedConfig` keeps unknown keyword arguments as attributes: `num_hiden_layers=6` would build the default
    model without a warning. This class raises a `StrictDataclassError` if an unknown name is similar to a field name.
    """

    # Configuration fields of the papers' models, by variant name.
    _variants = {}

    @classmethod
    def variants(cls) -> list[str]:
        """Return the names of the papers' models that `from_variant` accepts."""
        return list(cls._variants)

    @classmethod
    def from_variant(cls, name: str, **overrides):
        """Return the configuration of one of the papers' models.

        Args:
            name (`str`): One of `variants()`.
            overrides: Fields to change, for example `num_labels=10`.

        Raises:
            ValueError: if `name` is not in `variants()`. The message lists similar names.
        """
        if name not in cls._variants:
            close = ", ".join(difflib.get_close_matches(name, cls._variants, n=4, cutoff=0.5) or cls._variants)
            family = cls.__name__.removesuffix("Config")
            raise ValueError(f"There is no {family} variant {name!r}. Did you mean: {close}?")
        return cls(**cls._variants[name] | overrides)

    def validate_names(self):
        """Check that no unknown attribute has a name similar to a field name."""
        names = {field.name for field in fields(self)}
        for key in vars(self):
            if key in names or key.startswith("_") or hasattr(type(self), key):
                continue
            if difflib.get_close_matches(key, names, n=1, cutoff=0.85):
                nearest = ", ".join(f"`{name}`" for name in difflib.get_close_matches(key, names, cutoff=0.0))
                raise ValueError(f"{type(self).__name__} has no field `{key}`; did you mean one of {nearest}?")


@strict
class VisionConfig(FrugalViTConfig):
    """Base configuration of image models. It contains the settings of the model's image processor.

    Args:
        image_mean, image_std (`float` or sequence of `float`, *optional*):
            Mean and standard deviation for normalization: one number, or one number for each channel. `None` if the
            model has no image processor.
        resize_size (`int`, *optional*):
            Length in pixels to which an image's shorter side is resized. After that, the image is center-cropped to
            `image_size`. With `None`, images are resized to `image_size` without a crop.
        resample (`int`, *optional*, defaults to 2): PIL's resampling filter: 2 for bilinear, 3 for bicubic.
    """

    image_mean: float | list[float] | tuple[float, ...] | None = (0.5, 0.5, 0.5)
    image_std: float | list[float] | tuple[float, ...] | None = (0.5, 0.5, 0.5)
    resize_size: int | None = at_least(1)(default=None)
    resample: int = 2

    def __post_init__(self, **kwargs):
        # Some subclasses have no field `intermediate_size`.
        if getattr(self, "intermediate_size", 0) is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def validate_preprocessing(self):
        """Check that `image_mean` and `image_std` are both set or both `None`. If they are lists, check that they have
        one value for each channel."""
        if (self.image_mean is None) != (self.image_std is None):
            raise ValueError(
                f"`image_mean` is {self.image_mean} and `image_std` is {self.image_std}; give both or neither."
            )
        for name in ("image_mean", "image_std"):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)) and len(value) != self.num_channels:
                raise ValueError(
                    f"`{name}` is {value}, expected one number or one for each of `num_channels`={self.num_channels}."
                )


@strict
class SparseFormerBaseConfig(BackboneConfigMixin, VisionConfig):
    r"""
    Base configuration of `SparseFormerConfig` and `PatchSparseFormerConfig`: numbers of tokens, the transformer
    encoder, pooling and feature maps. The encoder can have the blocks of any plain vision transformer. Fields that are
    not listed here are documented in `VisionConfig` and in Transformers' `ViTConfig`.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 224):
            Size of preprocessed images in pixels. The model also accepts images of other sizes.
        num_latent_tokens (`int`, *optional*, defaults to 48):
            Number of latent tokens, without [CLS]. The papers' numbers include [CLS], for example 49 instead of 48.
        elastic_token_counts (sequence of `int`, *optional*):
            Numbers of latent tokens that the model is trained with, in increasing order up to `num_latent_tokens`.
        num_tokens (`int`, *optional*):
            Number of latent tokens that `forward` computes with by default. `None` for all latent tokens.
        num_hidden_layers (`int`, *optional*, defaults to 8): Number of encoder blocks.
        num_attention_heads (`int`, *optional*): Number of attention heads; one per 64 channels by default.
        intermediate_size (`int`, *optional*): MLP width; 4 times `hidden_size` by default.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation function of the MLPs.
        gated_mlp (`bool`, *optional*, defaults to `False`): Use gated MLPs (SwiGLU with `hidden_act="silu"`).
        layer_scale (`bool`, *optional*, defaults to `False`): Use layer scale, as in DINOv2.
        norm_type (`str`, *optional*, defaults to `"layer_norm"`): Encoder norms: `"layer_norm"` or `"rms_norm"`.
        extra_norms (sequence of `str`, *optional*, defaults to `()`):
            Additional norms in each encoder block: `"query_key"` for the queries and keys of each head, `"attention"`
            before the output projection of attention, `"mlp"` before the second linear layer of the MLP (EVA-02).
        final_norm (`str`, *optional*, defaults to `"before_pooling"`):
            Place of the final norm: `"before_pooling"`, `"after_pooling"` (SparseFormer v1), or `None` for no final
            norm.
        rope_theta (`float`, *optional*):
            Base of the frequencies of rotary position embeddings, or `None` for no rotary position embeddings. The
            position of a latent token is the center of its RoI (`rotary_table`).
        rope_coordinates (sequence of `float`, *optional*):
            Coordinates of the image's top, left, bottom and right edges in RoPE. The default is that of DINOv3.
        num_class_tokens (`int`, *optional*, defaults to 1): Number of [CLS] tokens, which precede all other tokens.
        num_register_tokens (`int`, *optional*, defaults to 0): Number of register tokens, which follow the [CLS]
            tokens.
        pooling (`str`, *optional*, defaults to `"cls"`):
            Pooling of tokens to one embedding. `"cls"` concatenates the class tokens. `"class_mean"` is the mean of
            the class tokens, `"mean"` is the mean of all tokens, and `"latent_mean"` is the mean of the latent tokens.
            `"cls_and_latent_mean"` concatenates [CLS] and the mean of the latent tokens (DINOv2's classifiers).
            `"attention"` pools all tokens by the attention of a learned query (SigLIP, AIMv2), and
            `"latent_attention"` pools the latent tokens in the same way.
        pooled_class_tokens (sequence of `int`, *optional*):
            Indices of the class tokens that `"cls"` and `"class_mean"` pool (RADIO); all class tokens by default.
        pooling_num_attention_heads (`int`, *optional*): Heads of attention pooling; `num_attention_heads` by default.
        pooling_intermediate_size (`int`, *optional*):
            MLP width of attention pooling; `intermediate_size` by default, 0 for no MLP (AIMv2).
        out_features, out_indices (`list`, *optional*):
            Layers whose feature maps a backbone returns, by name ("stem", "stage1", …) or by index. The default is the
            last layer. With `feature_scales`, the default is evenly spaced layers, one for each scale.
        reshape_hidden_states (`bool`, *optional*, defaults to `True`):
            Return feature maps with rows and columns. With `False`, return sequences for DPT: first [CLS], then the
            cells. In models without [CLS], the mean of all tokens is first.
        feature_scales (sequence of `float`, *optional*):
            A factor for each feature map, by which the map is resized, for example `[4, 2, 1, 0.5]` for ViTDet's
            pyramid. By default, feature maps are not resized.
        upsampler_hidden_size (`int`, *optional*):
            Width of `MapUpsampler`, which adds image details to feature maps. `None` for no `MapUpsampler`.
        drop_path_rate (`float`, *optional*, defaults to 0.0):
            Stochastic depth rate of the last block. The rate increases linearly from block to block.
    """

    # The configurations of CLIPs and VLMs have a SparseFormer's configuration in the field `vision_config`.
    base_config_key = "vision_config"
    attribute_map = {"layer_norm_epsilon": "layer_norm_eps"}
    keys_to_ignore_at_inference = ["rois", "sampling_points", "stem_features", "token_maps"]
    known_norms = {"query_key", "attention", "mlp"}

    image_size: Size = at_least(4)(default=224)
    num_channels: int = at_least(1)(default=3)
    num_latent_tokens: int = at_least(1)(default=48)
    elastic_token_counts: Ints | None = None
    num_tokens: int | None = None
    hidden_size: int = at_least(1)(default=768)
    num_hidden_layers: int = at_least(1)(default=8)
    num_attention_heads: int | None = at_least(1)(default=None)
    intermediate_size: int | None = at_least(1)(default=None)
    hidden_act: str = "gelu"
    gated_mlp: bool = False
    layer_scale: bool = False
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    layer_norm_eps: float | int = positive(default=1e-5)
    extra_norms: list[str] | tuple[str, ...] = ()
    final_norm: Literal["before_pooling", "after_pooling", None] = "before_pooling"
    rope_theta: float | int | None = None
    rope_coordinates: Floats = (-2 * math.pi, -2 * math.pi, 2 * math.pi, 2 * math.pi)
    num_class_tokens: int = at_least(0)(default=1)
    num_register_tokens: int = at_least(0)(default=0)
    pooling: Literal[
        "cls", "class_mean", "mean", "latent_mean", "cls_and_latent_mean", "attention", "latent_attention"
    ] = "cls"
    pooled_class_tokens: Ints | None = None
    pooling_num_attention_heads: int | None = at_least(1)(default=None)
    pooling_intermediate_size: int | None = at_least(0)(default=None)
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    reshape_hidden_states: bool = True
    feature_scales: Floats | None = None
    upsampler_hidden_size: int | None = at_least(1)(default=None)
    drop_path_rate: float | int = rate(default=0.0)

    def __post_init__(self, **kwargs):
        if self.num_attention_heads is None:
            self.num_attention_heads = max(self.hidden_size // 64, 1)
        names = kwargs.pop("out_features", None)
        numbers = kwargs.pop("out_indices", None)
        if names is None and numbers is None and self.feature_scales:
            count = len(self.feature_scales)
            numbers = [(place + 1) * self.num_hidden_layers // count for place in range(count)]
        self.set_output_features_output_indices(names, numbers)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """Call `PreTrainedConfig.from_dict`. Raise a ValueError if `config_dict` is of a PatchSparseFormer and this
        class is of a SparseFormer, or the reverse, because most of the loaded model's weights would be random."""
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type.startswith("patch_sparseformer") != cls.has_patch_embedding:
            right = " or ".join(config_dict.get("architectures") or ()) or "a class of this model type"
            raise ValueError(
                f"`model_type` is {model_type!r}, expected {cls.model_type!r}; load the model by {right}, or by an "
                "`Auto` class of Transformers such as `AutoModel`."
            )
        return super().from_dict(config_dict, **kwargs)

    @property
    def stage_names(self) -> list[str]:
        """Names of all layers that can return a feature map."""
        return ["stem", *(f"stage{number}" for number in range(1, self.num_hidden_layers + 1))]

    @property
    def default_num_tokens(self) -> int:
        """Number of latent tokens that `forward` computes with if its argument `num_tokens` is `None`."""
        # The field is read once, because another thread may change the field between two reads.
        num_tokens = self.num_tokens
        return self.num_latent_tokens if num_tokens is None else num_tokens

    @property
    def trained_token_counts(self) -> tuple[int, ...]:
        """Numbers of latent tokens that the model is trained with."""
        return tuple(self.elastic_token_counts or [self.num_latent_tokens])

    @property
    def num_prefix_tokens(self) -> int:
        """Sum of `num_class_tokens` and `num_register_tokens`."""
        return self.num_class_tokens + self.num_register_tokens

    @property
    def pooled_size(self) -> int:
        """Number of channels of the pooled embedding."""
        if self.pooling == "cls":
            return len(self.pooled_class_tokens or range(self.num_class_tokens)) * self.hidden_size
        return 2 * self.hidden_size if self.pooling == "cls_and_latent_mean" else self.hidden_size

    def validate_encoder(self):
        """Check that token counts, attention heads, norms, pooling and feature scales are valid."""
        most = self.num_latent_tokens
        counts = list(self.elastic_token_counts or [most])
        if counts != sorted({*counts}) or counts[0] < 1 or counts[-1] != most:
            raise ValueError(
                f"`elastic_token_counts` is {counts}, expected increasing counts from 1, of which the last is "
                f"`num_latent_tokens`={most}."
            )
        if self.num_tokens is not None and not 1 <= self.num_tokens <= most:
            raise ValueError(f"`num_tokens` is {self.num_tokens}, expected 1 to `num_latent_tokens`={most}.")
        divisor = self.num_attention_heads if self.rope_theta is None else 4 * self.num_attention_heads
        if self.hidden_size % divisor:
            raise ValueError(
                f"`hidden_size`={self.hidden_size} is not divisible by `num_attention_heads`="
                f"{self.num_attention_heads}, or, with `rope_theta`, by four times that."
            )
        if not {*self.extra_norms} <= self.known_norms:
            raise ValueError(f"`extra_norms` is {self.extra_norms}, expected some of {sorted(self.known_norms)}.")
        if self.pooling in ("cls", "class_mean", "cls_and_latent_mean") and not self.num_class_tokens:
            raise ValueError(
                f"`pooling` is {self.pooling!r} and `num_class_tokens` is 0; add a class token or choose 'mean'."
            )
        if not {*(self.pooled_class_tokens or ())} <= {*range(self.num_class_tokens)}:
            raise ValueError(
                f"`pooled_class_tokens` is {self.pooled_class_tokens}, expected indices of the "
                f"{self.num_class_tokens} class tokens, from 0 on."
            )
        scales = self.feature_scales
        if scales is not None and (len(scales) != len(self.out_features) or any(scale <= 0 for scale in scales)):
            raise ValueError(
                f"`feature_scales` is {list(scales)}, expected a positive number for each of the "
                f"{len(self.out_features)} layers of `out_features`, {', '.join(self.out_features)}."
            )
