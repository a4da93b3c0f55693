"""Base class of all configurations, and choices that several of them share."""

import difflib
import math
from dataclasses import fields

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin


CONTEXT_BROADCASTS = ("cb", "cb_s", "cb_gate", "cb_hybrid")
CONTEXT_BROADCAST_POSITIONS = ("mlp_front", "mlp_mid", "mlp_end", "attention_end")


POOLINGS = ("cls", "class_mean", "mean", "latent_mean", "cls_and_latent_mean", "attention", "latent_attention")


def pair(size) -> tuple[int, ...]:
    """Height and width of a size, which may be one number for both."""
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def is_sparseformer(config) -> bool:
    """Whether a configuration is a SparseFormer's. Told by `model_type`: remote code has classes of its own."""
    return getattr(config, "model_type", "").removesuffix("_projection") in ("sparseformer", "patch_sparseformer")


def set_image_size(config, image_size: int | list[int]):
    """Change the size of a model's images, in pixels; a center crop shows as much of them as it did."""
    if getattr(config, "resize_size", None) is not None:
        config.resize_size = round(config.resize_size * min(pair(image_size)) / min(pair(config.image_size)))
    config.image_size = image_size


class HubConfigMixin:
    """Mixin of the configurations of `HubModel`s, which save the source files of both."""

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Does nothing."""


@strict
class FrugalViTConfig(HubConfigMixin, PreTrainedConfig):
    """Base configuration: a misspelled field is an error, and saving is left to the models.

    Transformers keeps unknown keyword arguments as attributes, so that `num_hiden_layers=6` would silently build the
    default model. Here a name that is close to that of a field raises a `StrictDataclassError`, as wrong values do.
    """

    def __post_init__(self, **kwargs):
        for name in ("image_mean", "image_std"):
            if isinstance(value := getattr(self, name, None), list):
                setattr(self, name, tuple(value))
        super().__post_init__(**kwargs)

    @staticmethod
    def _variants() -> dict[str, dict]:
        """Fields of the papers' models by name."""
        return {}

    @classmethod
    def variants(cls) -> list[str]:
        """Names of the papers' models, for `from_variant`."""
        return list(cls._variants())

    @classmethod
    def from_variant(cls, name: str, **overrides):
        """Return the configuration of one of the papers' models, by its name among `variants()`, with other fields
        set differently, for example `num_labels=10`.

        Raises:
            ValueError: if there is no variant of that name; the message lists the names.
        """
        variants = cls._variants()
        if name not in variants:
            close = ", ".join(difflib.get_close_matches(name, variants, n=4, cutoff=0.5) or variants)
            family = cls.__name__.removesuffix("Config")
            raise ValueError(f"There is no {family} variant {name!r}. Did you mean: {close}?")
        return cls(**{**variants[name], **overrides})

    def validate_names(self):
        """No attribute looks like a misspelled field."""
        names = {field.name for field in fields(self)}
        for key in vars(self):
            if key in names or key.startswith("_") or hasattr(type(self), key):
                continue
            if close := difflib.get_close_matches(key, names, n=1, cutoff=0.85):
                raise ValueError(
                    f"{type(self).__name__} has no field `{key}`; did you mean `{close[0]}`? "
                    f"The fields are: {', '.join(sorted(names))}."
                )

    def validate_preprocessing(self):
        """In families that prepare images, there is a mean and a standard deviation for every channel."""
        if (getattr(self, "image_mean", 0) is None) != (getattr(self, "image_std", 0) is None):
            raise ValueError("One of `image_mean` and `image_std` is None; give both or none.")
        for name in ("image_mean", "image_std"):
            value = getattr(self, name, None)
            if isinstance(value, (list, tuple)) and len(value) != self.num_channels:
                raise ValueError(
                    f"`{name}` has {len(value)} values, expected one number or one for each of the "
                    f"`num_channels`={self.num_channels} channels."
                )

    def _check_counts(self, *names: str, low: int = 1):
        for name in names:
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"`{name}` is {value}, expected at least {low}.")

    def _check_heads(self, width: str, heads: str):
        size, count = getattr(self, width), getattr(self, heads)
        if size % count:
            raise ValueError(f"`{width}`={size} is not divisible by `{heads}`={count}.")

    def _check_choices(self, **choices: tuple):
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, expected one of {list(allowed)}.")

    def _check_positive(self, *names: str):
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}, expected a positive number.")

    def _check_rates(self, *names: str):
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, expected 0 <= rate < 1.")

    def _check_sizes(self, *names: str, low: int = 1):
        for name in names:
            size = pair(getattr(self, name))
            if len(size) != 2 or min(size) < low:
                raise ValueError(f"`{name}` is {getattr(self, name)}, expected one or two sizes from {low} on.")


@strict
class SparseFormerBaseConfig(BackboneConfigMixin, FrugalViTConfig):
    r"""
    Base configuration of both SparseFormers: counts of tokens, the transformer encoder, whose blocks may be those of
    any plain vision transformer, pooling, feature maps and preprocessing.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 224):
            Pixels, or height and width, for preprocessing. The model itself takes any size.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.
        num_latent_tokens (`int`, *optional*, defaults to 48): Latent tokens, without [CLS] (the papers count it: 49).
        elastic_token_counts (sequence of `int`, *optional*):
            Counts of latent tokens that a call may choose, increasing, with `num_latent_tokens` as the last.
        num_tokens (`int`, *optional*): Latent tokens of a call that chooses none; all of them by default.
        hidden_size (`int`, *optional*, defaults to 768): Width of the encoder.
        num_hidden_layers (`int`, *optional*, defaults to 8): Blocks of the encoder that exist, after truncation.
        num_attention_heads (`int`, *optional*): Attention heads; one per 64 channels by default.
        intermediate_size (`int`, *optional*): MLP width; 4 times `hidden_size` by default.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of MLPs ("quick_gelu" for CLIP).
        gated_mlp (`bool`, *optional*, defaults to `False`): Gated MLPs (SwiGLU with "silu").
        mlp_norm (`bool`, *optional*, defaults to `False`): Norm before the second layer of MLPs (EVA-02).
        query_key_norm (`bool`, *optional*, defaults to `False`): Norms of each head's queries and keys.
        attention_norm (`bool`, *optional*, defaults to `False`): Norm before attention's output projection.
        layer_scale (`bool`, *optional*, defaults to `False`): Learned factors of the branches' channels (DINOv2).
        norm_type (`str`, *optional*, defaults to `"layer_norm"`): Norms of the encoder, or `"rms_norm"`.
        layer_norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of the encoder's norms.
        final_norm (`bool`, *optional*, defaults to `True`): Whether a norm follows the encoder.
        rope_theta (`float`, *optional*):
            Base of the frequencies by which queries and keys of latent tokens are rotated, each by the center of its
            RoI (`rotary_table`). `None` rotates none.
        rope_scale, rope_shift (pair of `float`, *optional*):
            Factor and offset that take centers, 0 to 1 across the image, to coordinates, y first. DINOv3's by default.
        num_class_tokens (`int`, *optional*, defaults to 1): [CLS] tokens, which join before the encoder; 0 for none.
        num_register_tokens (`int`, *optional*, defaults to 0): Registers, which join behind the [CLS] tokens.
        pooling (`str`, *optional*, defaults to `"cls"`):
            `"cls"`, class tokens, side by side if there are several; `"class_mean"`, their mean; `"mean"`, that of all
            tokens, or `"latent_mean"`, of all but those in front; `"cls_and_latent_mean"`, both side by side (DINOv2's
            classifiers); `"attention"` to all tokens or `"latent_attention"`, by a learned query (SigLIP, AIMv2).
        pooled_class_tokens (sequence of `int`, *optional*): Indices of the class tokens that `"cls"` takes; all by
            default.
        pool_before_norm (`bool`, *optional*, defaults to `False`): Pool before the final norm (v1).
        pooling_num_attention_heads (`int`, *optional*): Heads of attention pooling; the encoder's by default.
        pooling_intermediate_size (`int`, *optional*): MLP width of attention pooling; the encoder's by default, 0 for
            no MLP (AIMv2).
        pooling_hidden_act (`str`, *optional*): Activation of that MLP; the encoder's by default.
        projection_dim (`int`, *optional*): Width of the projected embedding of CLIP-like models.
        projection_bias (`bool`, *optional*, defaults to `False`): A bias on that projection.
        out_features, out_indices (`list`, *optional*):
            Layers whose feature maps a backbone returns, as in Transformers: "stem", "stage1", and so on. The last by
            default; with several `feature_scales`, as many, evenly spaced.
        apply_layernorm (`bool`, *optional*, defaults to `True`): Whether the final norm is applied to feature maps.
        reshape_hidden_states (`bool`, *optional*, defaults to `True`):
            Whether feature maps have rows and columns, or their cells follow [CLS] (or the mean token), for DPT.
        feature_scales (sequence of `float`, *optional*):
            Factors for the rows and columns of each map, as `[4, 2, 1, 0.5]` of ViTDet's pyramid; 1 by default.
        upsampler_hidden_size (`int`, *optional*):
            Width of the convolutions that see the image and refine feature maps; `None` for no such convolutions.
        drop_path_rate (`float`, *optional*, defaults to 0.0): Largest stochastic depth rate; rises linearly.
        initializer_range (`float`, *optional*, defaults to 0.02): Std of truncated normal weights.
        image_mean, image_std (`float` or sequence of `float`, *optional*):
            Normalization of the image processor; `None` where the model has no image processor.
        resize_size (`int`, *optional*):
            Shorter side to resize to before a center crop of `image_size`; `None` resizes straight to `image_size`.
        resample (`int`, *optional*, defaults to 2): PIL's resampling filter (2 bilinear, 3 bicubic).
    """

    # Of a CLIP or a LLaVA with a SparseFormer, the configuration of that.
    base_config_key = "vision_config"
    attribute_map = {"layer_norm_epsilon": "layer_norm_eps"}
    keys_to_ignore_at_inference = ["rois", "sampling_points", "focusing_hidden_states", "stem_features", "token_maps"]

    image_size: int | list[int] | tuple[int, int] = 224
    num_channels: int = 3
    num_latent_tokens: int = 48
    elastic_token_counts: list[int] | tuple[int, ...] | None = None
    num_tokens: int | None = None
    hidden_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    gated_mlp: bool = False
    mlp_norm: bool = False
    query_key_norm: bool = False
    attention_norm: bool = False
    layer_scale: bool = False
    norm_type: str = "layer_norm"
    layer_norm_eps: float | int = 1e-5
    final_norm: bool = True
    rope_theta: float | int | None = None
    rope_scale: list[float] | tuple[float, ...] = (4 * math.pi, 4 * math.pi)
    rope_shift: list[float] | tuple[float, ...] = (-2 * math.pi, -2 * math.pi)
    num_class_tokens: int = 1
    num_register_tokens: int = 0
    pooling: str = "cls"
    pooled_class_tokens: list[int] | tuple[int, ...] | None = None
    pool_before_norm: bool = False
    pooling_num_attention_heads: int | None = None
    pooling_intermediate_size: int | None = None
    pooling_hidden_act: str | None = None
    projection_dim: int | None = None
    projection_bias: bool = False
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True
    feature_scales: list[float | int] | tuple[float | int, ...] | None = None
    upsampler_hidden_size: int | None = None
    drop_path_rate: float | int = 0.0
    initializer_range: float | int = 0.02
    image_mean: float | list[float] | tuple[float, ...] | None = (0.5, 0.5, 0.5)
    image_std: float | list[float] | tuple[float, ...] | None = (0.5, 0.5, 0.5)
    resize_size: int | None = None
    resample: int = 2

    def __post_init__(self, **kwargs):
        if self.num_attention_heads is None:
            self.num_attention_heads = max(self.hidden_size // 64, 1)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        self.rope_scale = tuple(self.rope_scale)
        self.rope_shift = tuple(self.rope_shift)
        names = kwargs.pop("out_features", None)
        numbers = kwargs.pop("out_indices", None)
        if names is None and numbers is None and self.feature_scales:
            count = len(self.feature_scales)
            numbers = [(place + 1) * self.num_hidden_layers // count for place in range(count)]
        self.set_output_features_output_indices(names, numbers)
        super().__post_init__(**kwargs)

    @property
    def stage_names(self) -> list[str]:
        """Layers that have feature maps."""
        return ["stem", *(f"stage{number}" for number in range(1, self.num_hidden_layers + 1))]

    @property
    def default_num_tokens(self) -> int:
        """Latent tokens of a call that chooses none."""
        return self.num_latent_tokens if self.num_tokens is None else self.num_tokens

    @property
    def trained_token_counts(self) -> tuple[int, ...]:
        """Counts of latent tokens that the model is trained for."""
        return tuple(self.elastic_token_counts or [self.num_latent_tokens])

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens, in front of the latent ones."""
        return self.num_class_tokens + self.num_register_tokens

    @property
    def pooled_size(self) -> int:
        """Channels of the pooled embedding."""
        if self.pooling == "cls":
            return len(self.pooled_class_tokens or range(self.num_class_tokens)) * self.hidden_size
        return 2 * self.hidden_size if self.pooling == "cls_and_latent_mean" else self.hidden_size

    def validate_counts(self):
        """Counts and sizes are positive, and heads divide widths."""
        self._check_counts(
            "num_channels",
            "num_latent_tokens",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "pooling_num_attention_heads",
            "projection_dim",
            "upsampler_hidden_size",
            "resize_size",
        )
        self._check_counts("num_class_tokens", "num_register_tokens", "pooling_intermediate_size", low=0)
        self._check_sizes("image_size", low=4)
        self._check_heads("hidden_size", "num_attention_heads")

    def validate_tokens(self):
        """Counts of tokens increase up to the largest."""
        counts = list(self.trained_token_counts)
        if counts != sorted({*counts}) or counts[0] < 1 or counts[-1] != self.num_latent_tokens:
            raise ValueError(
                f"`elastic_token_counts` is {counts}, expected increasing counts from 1, of which the last is "
                f"`num_latent_tokens`={self.num_latent_tokens}."
            )
        if self.num_tokens is not None and not 1 <= self.num_tokens <= self.num_latent_tokens:
            raise ValueError(
                f"`num_tokens` is {self.num_tokens}, expected 1 to `num_latent_tokens`={self.num_latent_tokens}."
            )

    def validate_encoder(self):
        """Choices exist, numbers are in range, and what is pooled is there."""
        self._check_choices(
            norm_type=("layer_norm", "rms_norm"),
            pooling=POOLINGS,
        )
        self._check_rates("drop_path_rate")
        self._check_positive("layer_norm_eps", "initializer_range")
        if self.rope_theta is not None and self.hidden_size // self.num_attention_heads % 4:
            raise ValueError(
                f"Attention heads have {self.hidden_size // self.num_attention_heads} channels, expected a multiple "
                "of 4 where `rope_theta` rotates them."
            )
        if self.pooling in ("cls", "class_mean", "cls_and_latent_mean") and not self.num_class_tokens:
            raise ValueError(f"`pooling={self.pooling!r}` needs `num_class_tokens`; without, choose 'mean'.")
        scales = self.feature_scales
        if scales is not None and (len(scales) != len(self.out_features) or any(scale <= 0 for scale in scales)):
            raise ValueError(
                f"`feature_scales` is {list(scales)}, expected a positive number for each of the "
                f"{len(self.out_features)} layers of `out_features`, {', '.join(self.out_features)}."
            )
