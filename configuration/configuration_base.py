"""Base classes of all configurations, and validators of their fields."""

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

# Factories of validated fields, for example `drop_path_rate: float | int = rate(default=0.0)`.
rate = interval(min=0.0, max=1.0, exclude_max=True)
positive = interval(min=0.0, exclude_min=True)


def at_least(low: int):
    """Return a factory of fields whose value is `None`, a number or a pair of numbers, none of them below `low`."""

    @as_validated_field
    def check(value):
        if isinstance(value, (list, tuple)) and len(value) != 2:
            raise ValueError(f"expected one or two numbers, got {value}")
        if value is not None and not min(pair(value)) >= low:
            raise ValueError(f"expected at least {low}, got {value}")

    return check


def pair(size) -> tuple[int, ...]:
    """Return height and width of a size, which may be one number for both."""
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def is_sparseformer(config) -> bool:
    """Return whether a configuration is a SparseFormer's."""
    # `model_type` is compared, because models loaded with remote code have other classes.
    return getattr(config, "model_type", "").removesuffix("_projection") in ("sparseformer", "patch_sparseformer")


def set_image_size(config, image_size: int | list[int]):
    """Change the size of a model's images in pixels, and `resize_size` in proportion."""
    if getattr(config, "resize_size", None) is not None:
        config.resize_size = round(config.resize_size * min(pair(image_size)) / min(pair(config.image_size)))
    config.image_size = image_size


class HubMixin:
    """Mixin of `HubModel` and its configurations and processors."""

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        """Do nothing: `HubModel.save_pretrained` saves the source files."""


@strict
class FrugalViTConfig(HubMixin, PreTrainedConfig):
    """Base configuration that rejects misspelled fields and makes the papers' models by name.

    Transformers keeps unknown keyword arguments as attributes, so that `num_hiden_layers=6` would build the default
    model without a warning. Here, an unknown name similar to a field's raises a `StrictDataclassError`.
    """

    # Fields of the papers' models by model name.
    _variants = {}

    @classmethod
    def variants(cls) -> list[str]:
        """Return the names of the papers' models, for `from_variant`."""
        return list(cls._variants)

    @classmethod
    def from_variant(cls, name: str, **overrides):
        """Return the configuration of a model of the papers.

        Args:
            name (`str`): One of `variants()`.
            overrides: Fields to change, for example `num_labels=10`.

        Raises:
            ValueError: if there is no variant of that name; the message lists similar names.
        """
        if name not in cls._variants:
            close = ", ".join(difflib.get_close_matches(name, cls._variants, n=4, cutoff=0.5) or cls._variants)
            family = cls.__name__.removesuffix("Config")
            raise ValueError(f"There is no {family} variant {name!r}. Did you mean: {close}?")
        return cls(**cls._variants[name] | overrides)

    def validate_names(self):
        """Check that no attribute is similar to the name of a field."""
        names = {field.name for field in fields(self)}
        for key in vars(self):
            if key in names or key.startswith("_") or hasattr(type(self), key):
                continue
            if difflib.get_close_matches(key, names, n=1, cutoff=0.85):
                nearest = ", ".join(f"`{name}`" for name in difflib.get_close_matches(key, names, cutoff=0.0))
                raise ValueError(f"{type(self).__name__} has no field `{key}`; did you mean one of {nearest}?")


@strict
class VisionConfig(FrugalViTConfig):
    """Base configuration of image models, with the preprocessing of their image processor.

    Args:
        image_mean, image_std (`float` or sequence of `float`, *optional*):
            Mean and standard deviation of normalization, one number or one for each channel; `None` if the model has
            no image processor.
        resize_size (`int`, *optional*):
            Shorter side to resize to before a center crop of `image_size`; `None` resizes straight to `image_size`.
        resample (`int`, *optional*, defaults to 2): PIL's resampling filter (2 bilinear, 3 bicubic).
    """

    image_mean: float | list[float] | tuple[float, ...] | None = (0.5, 0.5, 0.5)
    image_std: float | list[float] | tuple[float, ...] | None = (0.5, 0.5, 0.5)
    resize_size: int | None = at_least(1)(default=None)
    resample: int = 2

    def validate_preprocessing(self):
        """Check that mean and standard deviation are both given or both `None`, and that their lengths fit."""
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
    Base configuration of both SparseFormers: numbers of tokens, the transformer encoder, pooling and feature maps. The
    encoder can have the blocks of any plain vision transformer. Fields of the image processor are documented in
    `VisionConfig`, further fields in Transformers' `ViTConfig`.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 224):
            Size of preprocessed images in pixels, one number or height and width. The model itself takes any size.
        num_latent_tokens (`int`, *optional*, defaults to 48):
            Number of latent tokens, without [CLS]. The papers count [CLS]: 48 is their 49.
        elastic_token_counts (sequence of `int`, *optional*):
            Increasing numbers of latent tokens that the model is trained with; the last is `num_latent_tokens`.
        num_tokens (`int`, *optional*):
            Number of latent tokens if `forward` gets no `num_tokens`; `num_latent_tokens` by default.
        num_hidden_layers (`int`, *optional*, defaults to 8): Number of encoder blocks, after truncation.
        num_attention_heads, intermediate_size (`int`, *optional*):
            Number of attention heads, by default one per 64 channels, and MLP width, by default 4 times `hidden_size`.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of MLPs ("quick_gelu" for CLIP).
        gated_mlp (`bool`, *optional*, defaults to `False`): Use gated MLPs (SwiGLU with "silu").
        layer_scale (`bool`, *optional*, defaults to `False`): Use layer scale (DINOv2).
        norm_type (`str`, *optional*, defaults to `"layer_norm"`): `"layer_norm"` or `"rms_norm"`, in the encoder.
        extra_norms (sequence of `str`, *optional*, defaults to `()`):
            Norms that a plain transformer does not have: `"query_key"` for queries and keys of each head,
            `"attention"` before the output projection of attention, `"mlp"` before the second layer of MLPs (EVA-02).
        final_norm (`str`, *optional*, defaults to `"before_pooling"`):
            Place of the final norm: `"before_pooling"`, `"after_pooling"` (v1), or `None` for no final norm.
        rope_theta (`float`, *optional*):
            Base of the frequencies of rotary position embeddings, which rotate queries and keys of latent tokens by
            the centers of their RoIs (`rotary_table`). `None` for no rotation.
        rope_coordinates (sequence of `float`, *optional*):
            Coordinates of the image's top, left, bottom and right edges; DINOv3's by default.
        num_class_tokens (`int`, *optional*, defaults to 1):
            Number of [CLS] tokens, which are concatenated before the encoder; 0 for none.
        num_register_tokens (`int`, *optional*, defaults to 0): Number of registers, which follow the [CLS] tokens.
        pooling (`str`, *optional*, defaults to `"cls"`):
            The pooled embedding: `"cls"`, the concatenated class tokens; `"class_mean"`, the mean of class tokens;
            `"mean"`, the mean of all tokens; `"latent_mean"`, the mean of latent tokens; `"cls_and_latent_mean"`,
            [CLS] and the mean of latent tokens concatenated (DINOv2's classifiers); `"attention"` or
            `"latent_attention"`, attention of a learned query to all or to latent tokens (SigLIP, AIMv2).
        pooled_class_tokens (sequence of `int`, *optional*):
            Indices of the class tokens that `"cls"` and `"class_mean"` pool (RADIO); all by default.
        pooling_num_attention_heads (`int`, *optional*): Heads of attention pooling; the encoder's by default.
        pooling_intermediate_size (`int`, *optional*):
            MLP width of attention pooling; the encoder's by default, 0 for no MLP (AIMv2).
        out_features, out_indices (`list`, *optional*):
            Layers whose feature maps a backbone returns, as in Transformers: "stem", "stage1", and so on. The last
            layer by default; with `feature_scales`, evenly spaced layers, one for each scale.
        reshape_hidden_states (`bool`, *optional*, defaults to `True`):
            Return feature maps with rows and columns. With `False`, return sequences for DPT: [CLS] or, in models
            without [CLS], the mean token, then the cells.
        feature_scales (sequence of `float`, *optional*):
            Factors of rows and columns for each feature map, for example `[4, 2, 1, 0.5]` for ViTDet's pyramid; 1 by
            default.
        upsampler_hidden_size (`int`, *optional*):
            Width of the convolutions that add details of the image to feature maps (`MapUpsampler`); `None` for none.
        drop_path_rate (`float`, *optional*, defaults to 0.0): Largest stochastic depth rate; rates rise linearly.
    """

    # Name of the SparseFormer's configuration in the configuration of a CLIP or LLaVA.
    base_config_key = "vision_config"
    attribute_map = {"layer_norm_epsilon": "layer_norm_eps"}
    keys_to_ignore_at_inference = ["rois", "sampling_points", "focusing_hidden_states", "stem_features", "token_maps"]
    # Values that `extra_norms` may have.
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
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        names = kwargs.pop("out_features", None)
        numbers = kwargs.pop("out_indices", None)
        if names is None and numbers is None and self.feature_scales:
            count = len(self.feature_scales)
            numbers = [(place + 1) * self.num_hidden_layers // count for place in range(count)]
        self.set_output_features_output_indices(names, numbers)
        super().__post_init__(**kwargs)

    @property
    def stage_names(self) -> list[str]:
        """Names of layers that have feature maps."""
        return ["stem", *(f"stage{number}" for number in range(1, self.num_hidden_layers + 1))]

    @property
    def default_num_tokens(self) -> int:
        """Number of latent tokens if `forward` gets no `num_tokens`."""
        # The field is read once, because another thread may call `set_num_tokens`.
        num_tokens = self.num_tokens
        return self.num_latent_tokens if num_tokens is None else num_tokens

    def require_num_tokens(self, num_tokens: int):
        """Raise a ValueError if the model cannot compute with `num_tokens` latent tokens."""
        if type(num_tokens) is not int or not 1 <= num_tokens <= self.num_latent_tokens:
            raise ValueError(
                f"`num_tokens` is {num_tokens!r}, expected 1 to {self.num_latent_tokens}, the number of latent tokens "
                "of this model. `resize_tokens` adds more, which then have to be trained."
            )

    @property
    def trained_token_counts(self) -> tuple[int, ...]:
        """Numbers of latent tokens that the model is trained with."""
        return tuple(self.elastic_token_counts or [self.num_latent_tokens])

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens, which precede latent tokens."""
        return self.num_class_tokens + self.num_register_tokens

    @property
    def pooled_size(self) -> int:
        """Channels of the pooled embedding."""
        if self.pooling == "cls":
            return len(self.pooled_class_tokens or range(self.num_class_tokens)) * self.hidden_size
        return 2 * self.hidden_size if self.pooling == "cls_and_latent_mean" else self.hidden_size

    def validate_encoder(self):
        """Check numbers of tokens, heads, norms, pooling and scales of feature maps."""
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
        scales = self.feature_scales
        if scales is not None and (len(scales) != len(self.out_features) or any(scale <= 0 for scale in scales)):
            raise ValueError(
                f"`feature_scales` is {list(scales)}, expected a positive number for each of the "
                f"{len(self.out_features)} layers of `out_features`, {', '.join(self.out_features)}."
            )
