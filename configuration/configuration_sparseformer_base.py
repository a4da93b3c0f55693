"""Base configuration of SparseFormers: all but the stage before the cortex."""

import math

from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin

from .configuration_base import FrugalViTConfig, pair


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INCEPTION_MEAN, INCEPTION_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# Of SparseFormers with the papers' focusing stage, and of those whose tokens embed patches.
MODEL_TYPES = ("sparseformer", "patch_sparseformer")
# How a segmentation model makes a map of its tokens: by the paper's head, or of its feature maps.
DECODERS = ("attention", "linear")


def is_sparseformer(config) -> bool:
    """Whether a configuration is that of a SparseFormer. Never asked by class: remote code has another one of the same
    name."""
    return getattr(config, "model_type", None) in MODEL_TYPES


def one_or_pair(size: int | list[int] | tuple[int, ...]) -> int | tuple[int, ...]:
    """One number where height and width are alike: heads of Transformers divide by a backbone's `patch_size`."""
    sides = pair(size)
    return sides[0] if len(sides) == 2 and sides[0] == sides[1] else sides


@strict
class SparseFormerBaseConfig(BackboneConfigMixin, FrugalViTConfig):
    r"""
    Base configuration of SparseFormers. After the stage in which tokens look at the image, which subclasses describe,
    the cortex is a plain transformer encoder.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 224):
            Image size in pixels (or height and width) for preprocessing. The model itself takes any size: RoIs are
            relative to the image.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.
        num_latent_tokens (`int`, *optional*, defaults to 48):
            Latent tokens, [CLS] not counted (the papers count it: 49).
        elastic_token_counts (sequence of `int`, *optional*):
            Counts of latent tokens that the model is made for, increasing, with `num_latent_tokens` as the last. Every
            call may choose one (`num_tokens`). A smaller count takes the first tokens, which see the whole image; of
            tokens that embed patches, it has a coarser grid, for which they are interpolated.
        num_tokens (`int`, *optional*):
            Latent tokens of a call that chooses none; all of them by default.
        hidden_size (`int`, *optional*, defaults to 768): Width of the cortex.
        num_hidden_layers (`int`, *optional*, defaults to 8): Blocks of the cortex that exist, after truncation.
        num_attention_heads (`int`, *optional*): Heads of the cortex; one per 64 channels by default.
        intermediate_size (`int`, *optional*): MLP width of the cortex; 4 times its width by default.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of the cortex ("quick_gelu" for CLIP).
        qkv_bias (`bool`, *optional*, defaults to `True`): Biases on queries, keys and values of the cortex.
        gated_mlp (`bool`, *optional*, defaults to `False`):
            MLPs of the cortex have a gate: activated, it multiplies their first layer (SwiGLU with "silu").
        mlp_norm (`bool`, *optional*, defaults to `False`):
            A norm before the second layer of MLPs of the cortex (EVA-02).
        query_key_norm (`bool`, *optional*, defaults to `False`): Norms of each head's queries and keys in the cortex.
        attention_norm (`bool`, *optional*, defaults to `False`):
            A norm before the output projection of attention in the cortex.
        norm_type (`str`, *optional*, defaults to `"layer_norm"`): Norms of the cortex, or `"rms_norm"`.
        layer_norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of the cortex's norms.
        final_norm (`bool`, *optional*, defaults to `True`): Whether a norm follows the cortex.
        rope_theta (`float`, *optional*):
            Base of the frequencies by which the cortex rotates queries and keys of latent tokens, each according to
            the center of its RoI (`frugalvit.modeling.layers.rotary_table`). `None` rotates none.
        rope_scale, rope_shift (pair of `float`, *optional*):
            Factor and offset that take centers, 0 to 1 across the image, to coordinates, y first. DINOv3's by default.
        use_cls_token (`bool`, *optional*, defaults to `True`): A learned [CLS] joins the tokens before the cortex.
        num_class_tokens (`int`, *optional*, defaults to 1): Number of class tokens, with `use_cls_token`.
        num_register_tokens (`int`, *optional*, defaults to 0):
            Number of learned tokens that join after the class tokens and stand for nothing.
        pooling (`str`, *optional*, defaults to `"cls"`):
            `"cls"`, class tokens, side by side if there are several; `"class_mean"`, their mean; `"mean"`, that of all
            tokens, or `"latent_mean"`, of all but those in front; `"cls_and_latent_mean"`, both side by side (DINOv2's
            classifiers); `"attention"` to all tokens or `"latent_attention"`, by a learned query (SigLIP, AIMv2).
        pooled_class_tokens (sequence of `int`, *optional*): Indices of the class tokens that `"cls"` takes; all by
            default.
        pool_before_norm (`bool`, *optional*, defaults to `False`): Pool before the final norm (v1).
        pooling_num_attention_heads (`int`, *optional*): Heads of attention pooling; the cortex's by default.
        pooling_intermediate_size (`int`, *optional*): MLP width of attention pooling; the cortex's by default, 0 for
            no MLP (AIMv2).
        pooling_hidden_act (`str`, *optional*): Activation of that MLP; the cortex's by default.
        projection_dim (`int`, *optional*): Width of the projected embedding of CLIP-like models.
        projection_bias (`bool`, *optional*, defaults to `False`): A bias on that projection.
        out_features (`list[str]`, *optional*):
            Layers whose feature maps a backbone returns, in order: `"stem"`, before the cortex's first block,
            `"stage1"`, after it, and so on. The last by default; with several `feature_scales`, as many layers, evenly
            spaced.
        out_indices (`list[int]`, *optional*): The same layers by number, from 0, or from -1 for the last.
        apply_layernorm (`bool`, *optional*, defaults to `True`): Whether the final norm is applied to feature maps.
        reshape_hidden_states (`bool`, *optional*, defaults to `True`):
            Whether feature maps have rows and columns. If not, their cells follow [CLS], or the mean token where there
            is none, `(batch, 1 + cells, hidden_size)`, as DPT and Depth Anything take them.
        feature_stride (`int` or pair of `int`, *optional*):
            Height and width in pixels of a cell of feature maps: a patch of the teacher. By default `patch_size`, or
            16 where there is none.
        feature_scales (sequence of `float`, *optional*):
            Factor for the rows and columns of each map, for heads that want several strides, for example
            `[4, 2, 1, 0.5]` as in ViTDet's pyramid. All are 1 by default.
        upsampler_hidden_size (`int`, *optional*):
            Width of the convolutions that see the image and refine feature maps; `None` for no such convolutions.
        decoder_type (`str`, *optional*, defaults to `"attention"`):
            How a segmentation model makes a map of its tokens: by the head of the paper, or with a `"linear"`
            classifier of its feature maps.
        decoder_hidden_size (`int`, *optional*, defaults to 256): Width of the segmentation head.
        decoder_num_hidden_layers (`int`, *optional*, defaults to 2): Transformer blocks of the segmentation head.
        semantic_loss_ignore_index (`int`, *optional*, defaults to 255): Label of pixels that do not count.
        context_broadcast (`str`, *optional*):
            Context Broadcasting in every block of the cortex: `"cb"`, `"cb_s"`, `"cb_gate"` or `"cb_hybrid"`, see
            `insert_context_broadcast`.
        context_broadcast_position (`str` or several, *optional*, defaults to `"mlp_end"`):
            Where in a block: `"mlp_front"`, `"mlp_mid"`, `"mlp_end"`, `"attention_end"`.
        context_broadcast_scale_init (`float`, *optional*, defaults to 0.0): Start of the scale of `"cb_s"`.
        context_broadcast_blend (`bool`, *optional*, defaults to `False`):
            Whether a learned number leads from a plain transformer to Context Broadcasting, see `ContextBroadcast`.
        drop_path_rate (`float`, *optional*, defaults to 0.0):
            Largest stochastic depth rate; rises linearly over all layer executions.
        initializer_range (`float`, *optional*, defaults to 0.02): Std of truncated normal weights.
        image_mean, image_std (`float` or sequence of `float`, *optional*):
            Normalization written into the image processor, for all channels or each.
        resize_size (`int`, *optional*):
            Shorter side to resize to before a center crop of `image_size`; `None` resizes straight to `image_size`.
        resample (`int`, *optional*, defaults to 2): PIL's resampling filter (2 bilinear, 3 bicubic).

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, if values contradict each other, or
            if a name looks like a misspelled field; the message says what was given and what would fit.
    """

    # Of a CLIP or a LLaVA with a SparseFormer, the configuration of that.
    base_config_key = "vision_config"
    attribute_map = {"layer_norm_epsilon": "layer_norm_eps"}
    keys_to_ignore_at_inference = [
        "rois",
        "sampling_points",
        "focusing_hidden_states",
        "stem_features",
        "token_maps",
    ]

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
    qkv_bias: bool = True
    gated_mlp: bool = False
    mlp_norm: bool = False
    query_key_norm: bool = False
    attention_norm: bool = False
    norm_type: str = "layer_norm"
    layer_norm_eps: float | int = 1e-5
    final_norm: bool = True
    rope_theta: float | int | None = None
    rope_scale: list[float] | tuple[float, ...] = (4 * math.pi, 4 * math.pi)
    rope_shift: list[float] | tuple[float, ...] = (-2 * math.pi, -2 * math.pi)
    use_cls_token: bool = True
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
    feature_stride: int | list[int] | tuple[int, int] | None = None
    feature_scales: list[float | int] | tuple[float | int, ...] | None = None
    upsampler_hidden_size: int | None = None
    decoder_type: str = "attention"
    decoder_hidden_size: int = 256
    decoder_num_hidden_layers: int = 2
    semantic_loss_ignore_index: int = 255
    context_broadcast: str | None = None
    context_broadcast_position: str | list[str] | tuple[str, ...] = "mlp_end"
    context_broadcast_scale_init: float | int = 0.0
    context_broadcast_blend: bool = False
    drop_path_rate: float | int = 0.0
    initializer_range: float | int = 0.02
    image_mean: float | list[float] | tuple[float, ...] = INCEPTION_MEAN
    image_std: float | list[float] | tuple[float, ...] = INCEPTION_STD
    resize_size: int | None = None
    resample: int = 2

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in Transformers.

        Raises:
            ValueError: if the fields are those of another model, for example of the other kind of SparseFormer.
        """
        found = config_dict.get("model_type", cls.model_type)
        if found != cls.model_type:
            raise ValueError(f"This is the configuration of a {found}, expected that of a {cls.model_type}.")
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs):
        if self.num_attention_heads is None:
            self.num_attention_heads = max(self.hidden_size // 64, 1)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        self.feature_stride = one_or_pair(16 if self.feature_stride is None else self.feature_stride)
        self.rope_scale, self.rope_shift = tuple(self.rope_scale), tuple(self.rope_shift)
        names, numbers = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        if names is None and numbers is None and self.feature_scales:
            count = len(self.feature_scales)
            numbers = [(place + 1) * self.num_hidden_layers // count for place in range(count)]
        self.set_output_features_output_indices(names, numbers)
        super().__post_init__(**kwargs)

    @property
    def embeds_patches(self) -> bool:
        """Whether tokens embed patches, of a `PatchSparseFormerConfig`."""
        return self.model_type == MODEL_TYPES[1]

    @property
    def stage_names(self) -> list[str]:
        """Layers that have feature maps."""
        return ["stem", *(f"stage{number}" for number in range(1, self.num_hidden_layers + 1))]

    def set_output_features_output_indices(self, out_features: list | None, out_indices: list | tuple | None):
        """Choose the layers of which a backbone returns feature maps, by name or by number.

        Raises:
            ValueError: if there are no such layers, or they are not in order.
        """
        names = self.stage_names
        if unknown := [name for name in out_features or () if name not in names]:
            raise ValueError(f"`out_features` has {unknown}, expected some of {', '.join(names)}.")
        if unknown := [number for number in out_indices or () if not -len(names) <= number < len(names)]:
            raise ValueError(
                f"`out_indices` has {unknown}, expected numbers from 0, the stem, to {len(names) - 1}, the last "
                "layer, or from -1 backwards."
            )
        super().set_output_features_output_indices(out_features, out_indices)

    def to_dict(self) -> dict:
        """As in Transformers; `out_features` and `out_indices` are left out where they are the default."""
        fields = super().to_dict()
        if not self.feature_scales and self.out_features == self.stage_names[-1:]:
            del fields["out_features"], fields["out_indices"]
        return fields

    def round_tokens(self, num_tokens: int) -> int:
        """Return the count of latent tokens that the model computes with when `num_tokens` are asked for."""
        return num_tokens

    @property
    def default_num_tokens(self) -> int:
        """Latent tokens of a call that chooses none."""
        return self.num_latent_tokens if self.num_tokens is None else self.num_tokens

    @property
    def trained_token_counts(self) -> tuple[int, ...]:
        """Counts of latent tokens that the model is made for."""
        return tuple(self.elastic_token_counts or [self.num_latent_tokens])

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens, in front of the latent ones."""
        return self.use_cls_token * self.num_class_tokens + self.num_register_tokens

    @property
    def pooled_size(self) -> int:
        """Channels of the pooled embedding."""
        if self.pooling == "cls":
            return len(self.pooled_class_tokens or range(self.num_class_tokens)) * self.hidden_size
        return 2 * self.hidden_size if self.pooling == "cls_and_latent_mean" else self.hidden_size

    def validate_counts(self):
        """Counts and sizes are positive."""
        self._check_counts(
            "num_channels",
            "num_latent_tokens",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "num_class_tokens",
            "pooling_num_attention_heads",
            "projection_dim",
            "upsampler_hidden_size",
            "decoder_hidden_size",
            "resize_size",
        )
        for name in ("decoder_num_hidden_layers", "num_register_tokens", "pooling_intermediate_size"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}, expected at least 0.")
        self._check_sizes("image_size", low=4, reason=", each at least 4 (the stride of the stem)")
        self._check_sizes("feature_stride")

    def validate_widths(self):
        """Heads divide widths."""
        self._check_heads("hidden_size", "num_attention_heads")
        if self.decoder_hidden_size % max(self.decoder_hidden_size // 64, 1):
            raise ValueError(
                f"`decoder_hidden_size` is {self.decoder_hidden_size}, expected up to 64 or a multiple of 64, the "
                "width of its attention heads."
            )

    def _check_heads(self, width: str, heads: str):
        size, count = getattr(self, width), getattr(self, heads)
        if size % count:
            raise ValueError(
                f"`{width}`={size} is not divisible by `{heads}`={count}; choose heads that divide the width."
            )

    def validate_feature_maps(self):
        """There is a positive scale for each map."""
        scales, names = self.feature_scales, self.out_features
        if scales is not None and (len(scales) != len(names) or any(scale <= 0 for scale in scales)):
            raise ValueError(
                f"`feature_scales` is {list(scales)}, expected a positive number for each of the {len(names)} layers "
                f"of `out_features`, {', '.join(names)}."
            )

    def validate_token_counts(self):
        """Counts of tokens increase up to the largest."""
        counts = self.elastic_token_counts
        if counts is not None:
            ordered = all(low < high for low, high in zip([0, *counts], counts, strict=False))
            if not counts or not ordered or counts[-1] != self.num_latent_tokens:
                raise ValueError(
                    f"`elastic_token_counts` is {list(counts)}, expected increasing counts from 1, of which the last "
                    f"is `num_latent_tokens`={self.num_latent_tokens}."
                )
        if self.num_tokens is not None and not 1 <= self.num_tokens <= self.num_latent_tokens:
            raise ValueError(
                f"`num_tokens` is {self.num_tokens}, expected 1 to `num_latent_tokens`={self.num_latent_tokens}."
            )

    def validate_rotation(self):
        """Rotary positions have two axes, and two channels for each frequency of both."""
        for name in ("rope_scale", "rope_shift"):
            if len(getattr(self, name)) != 2:
                raise ValueError(f"`{name}` is {getattr(self, name)}, expected two numbers, for y and x.")
        if self.rope_theta is not None and self.hidden_size // self.num_attention_heads % 4:
            raise ValueError(
                f"Attention heads have {self.hidden_size // self.num_attention_heads} channels, expected a multiple "
                "of 4 where `rope_theta` rotates them."
            )

    def validate_pooling(self):
        """The kind of pooling is known, and the class tokens that it takes exist."""
        self._check_choices(
            pooling=(
                *("cls", "class_mean", "mean", "latent_mean", "cls_and_latent_mean"),
                *("attention", "latent_attention"),
            )
        )
        if self.pooling in ("cls", "class_mean", "cls_and_latent_mean") and not self.use_cls_token:
            raise ValueError(
                f"`pooling={self.pooling!r}` needs `use_cls_token=True`; without [CLS] choose `pooling='mean'`."
            )
        if any(not 0 <= index < self.num_class_tokens for index in self.pooled_class_tokens or ()):
            raise ValueError(
                f"`pooled_class_tokens` is {self.pooled_class_tokens}, expected numbers below `num_class_tokens`="
                f"{self.num_class_tokens}."
            )

    def validate_choices(self):
        """Fields with a fixed set of values have one of them, and rates and epsilons are in range."""
        self._check_choices(norm_type=("layer_norm", "rms_norm"), decoder_type=DECODERS)
        self._check_rates("drop_path_rate")
        self._check_positive("layer_norm_eps", "initializer_range")
        if self.rope_theta is not None:
            self._check_positive("rope_theta")
