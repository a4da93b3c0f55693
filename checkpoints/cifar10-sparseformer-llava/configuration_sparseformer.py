"""SparseFormer configuration: both generations, every variant of the papers by name."""

from huggingface_hub.dataclasses import strict

from .configuration_base import FrugalViTConfig


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INCEPTION_MEAN, INCEPTION_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# What a layer can do with its tokens, in the order in which the configuration lists it.
STEPS = ("sampling", "position_encoding", "attention", "mlp", "roi_adjustment")


@strict
class SparseFormerConfig(FrugalViTConfig):
    r"""
    Configuration of a SparseFormer. The defaults are the base model bootstrapped from AugReg ViT-B/16 with 49 tokens
    (Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models*, table 1); `from_variant` has the rest.

    A SparseFormer is a stem, a focusing stage and a cortex. The focusing stage is one layer of width
    `focusing_hidden_size`, executed `num_focusing_iterations` times, and one at full width, executed once; the cortex
    is a plain transformer encoder. What the two generations do differently is written out in the fields below.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 224):
            Image size in pixels (or height and width) for preprocessing. The model itself takes any size: RoIs are
            relative to the image.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.
        num_latent_tokens (`int`, *optional*, defaults to 48):
            Latent tokens, [CLS] not counted (the papers count it: 49).
        num_sampling_points (`int`, *optional*, defaults to 16): Points that a token samples in its RoI, at least 2.
        num_mixed_points (`int`, *optional*):
            Points after mixing; `max(num_sampling_points, 32)` if not given, as in the reference implementation.
        stem_channels (`int`, *optional*, defaults to 64): Channels of the early convolution.
        focusing_hidden_size (`int`, *optional*, defaults to 384): Width of the iterated focusing layer.
        num_focusing_iterations (`int`, *optional*, defaults to 4):
            Executions of the focusing layer; the one at full width comes on top ("4+1" in the paper).
        focusing_steps (sequence of `str`, *optional*):
            What the focusing layer does in one execution, in order; of "sampling", "position_encoding", "attention",
            "mlp" and "roi_adjustment".
        final_focusing_steps (sequence of `str`, *optional*):
            The same for the layer at full width. If it attends (v1), it is a whole transformer block and counts as
            the first of the `num_hidden_layers`.
        focusing_num_attention_heads (`int`, *optional*): Heads of the focusing layer; one per 64 channels by default.
        focusing_intermediate_size (`int`, *optional*): MLP width of the focusing layer; 4 times its width by default.
        focusing_hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of the focusing layer's MLP.
        hidden_size (`int`, *optional*, defaults to 768): Width of the cortex.
        num_hidden_layers (`int`, *optional*, defaults to 8): Blocks of the cortex that exist, after truncation.
        num_attention_heads (`int`, *optional*): Heads of the cortex; one per 64 channels by default.
        intermediate_size (`int`, *optional*): MLP width of the cortex; 4 times its width by default.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of the cortex ("quick_gelu" for CLIP).
        qkv_bias (`bool`, *optional*, defaults to `True`): Biases on queries, keys and values of the cortex.
        layer_norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of every LayerNorm.
        shared_token_embedding (`bool`, *optional*, defaults to `True`):
            All latent tokens start from one learned embedding (v1: one each).
        stage_embedding (`bool`, *optional*, defaults to `True`):
            A learned embedding joins the tokens at the start of every focusing iteration.
        transition_layer_norm (`bool`, *optional*, defaults to `False`):
            LayerNorm after the linear layer that takes the tokens to full width.
        mixing_bias (`bool`, *optional*, defaults to `False`):
            Biases and a GELU after each of the two mixing products (v1); otherwise one GELU after both.
        mixing_hidden_size (`int`, *optional*, defaults to 128):
            Bottleneck of the generator of mixing parameters; `None` is a quarter of the token width (v1).
        num_roi_delta_layers (`int`, *optional*, defaults to 2): Linear layers that produce the RoI deltas, 1 or 2.
        sampling_padding_mode (`str`, *optional*, defaults to `"border"`):
            What a point outside the image reads: "border" or "zeros".
        clip_sampling_gradients (`bool`, *optional*, defaults to `False`):
            Clamp the gradient on sampling points to +-1 / height of the feature map (v1's training code).
        use_cls_token (`bool`, *optional*, defaults to `True`): A learned [CLS] joins the tokens before the cortex.
        pooling (`str`, *optional*, defaults to `"cls"`):
            `"cls"`, `"mean"` (over all tokens) or `"attention"` (SigLIP's head, which attends to all tokens).
        pool_before_norm (`bool`, *optional*, defaults to `False`): Pool before the final LayerNorm (v1).
        projection_dim (`int`, *optional*): Width of the projected embedding of CLIP-like models.
        decoder_hidden_size (`int`, *optional*, defaults to 256): Width of the segmentation head.
        decoder_num_hidden_layers (`int`, *optional*, defaults to 2): Transformer blocks of the segmentation head.
        semantic_loss_ignore_index (`int`, *optional*, defaults to 255): Label of pixels that do not count.
        context_broadcast (`str`, *optional*):
            Context Broadcasting in every block of the cortex: `"cb"`, `"cb_s"`, `"cb_gate"` or `"cb_hybrid"`, see
            `insert_context_broadcast`.
        context_broadcast_position (`str` or several, *optional*, defaults to `"mlp_end"`):
            Where: `"mlp_front"`, `"mlp_mid"`, `"mlp_end"`, `"attention_end"`.
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

    model_type = "sparseformer"
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
    num_sampling_points: int = 16
    num_mixed_points: int | None = None
    stem_channels: int = 64
    focusing_hidden_size: int = 384
    num_focusing_iterations: int = 4
    focusing_steps: list[str] | tuple[str, ...] = (
        "sampling",
        "position_encoding",
        "attention",
        "mlp",
        "roi_adjustment",
    )
    final_focusing_steps: list[str] | tuple[str, ...] = ("sampling", "position_encoding")
    focusing_num_attention_heads: int | None = None
    focusing_intermediate_size: int | None = None
    focusing_hidden_act: str = "gelu"
    hidden_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    layer_norm_eps: float | int = 1e-5
    shared_token_embedding: bool = True
    stage_embedding: bool = True
    transition_layer_norm: bool = False
    mixing_bias: bool = False
    mixing_hidden_size: int | None = 128
    num_roi_delta_layers: int = 2
    sampling_padding_mode: str = "border"
    clip_sampling_gradients: bool = False
    use_cls_token: bool = True
    pooling: str = "cls"
    pool_before_norm: bool = False
    projection_dim: int | None = None
    decoder_hidden_size: int = 256
    decoder_num_hidden_layers: int = 2
    semantic_loss_ignore_index: int = 255
    context_broadcast: str | None = None
    context_broadcast_position: str | list[str] | tuple[str, ...] = "mlp_end"
    drop_path_rate: float | int = 0.0
    initializer_range: float | int = 0.02
    image_mean: float | list[float] | tuple[float, ...] = INCEPTION_MEAN
    image_std: float | list[float] | tuple[float, ...] = INCEPTION_STD
    resize_size: int | None = None
    resample: int = 2

    def __post_init__(self, **kwargs):
        self.focusing_steps = tuple(self.focusing_steps)
        self.final_focusing_steps = tuple(self.final_focusing_steps)
        if self.num_mixed_points is None:
            self.num_mixed_points = max(self.num_sampling_points, 32)
        if self.num_attention_heads is None:
            self.num_attention_heads = max(self.hidden_size // 64, 1)
        if self.focusing_num_attention_heads is None:
            self.focusing_num_attention_heads = max(self.focusing_hidden_size // 64, 1)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.focusing_intermediate_size is None:
            self.focusing_intermediate_size = 4 * self.focusing_hidden_size
        super().__post_init__(**kwargs)

    @property
    def final_focusing_is_block(self) -> bool:
        """Whether the layer that focuses at full width attends and so is the first block of the cortex (v1)."""
        return "attention" in self.final_focusing_steps

    def validate_counts(self):
        """Counts and sizes are positive."""
        self._check_counts(
            "num_channels",
            "num_latent_tokens",
            "num_mixed_points",
            "stem_channels",
            "focusing_hidden_size",
            "num_focusing_iterations",
            "focusing_num_attention_heads",
            "focusing_intermediate_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "mixing_hidden_size",
            "projection_dim",
            "decoder_hidden_size",
            "resize_size",
        )
        if self.num_sampling_points < 2:
            raise ValueError(
                f"`num_sampling_points` is {self.num_sampling_points}, expected at least 2: "
                "sampling offsets are standardized over the points of a token."
            )
        if self.decoder_num_hidden_layers < 0:
            raise ValueError(f"`decoder_num_hidden_layers` is {self.decoder_num_hidden_layers}, expected at least 0.")
        self._check_sizes("image_size", low=4, reason=", each at least 4 (the stride of the stem)")

    def validate_widths(self):
        """Heads divide widths, and the positional encoding divides into sines and cosines of four coordinates."""
        for width, heads in (
            ("focusing_hidden_size", "focusing_num_attention_heads"),
            ("hidden_size", "num_attention_heads"),
        ):
            size, count = getattr(self, width), getattr(self, heads)
            if size % count:
                raise ValueError(
                    f"`{width}`={size} is not divisible by `{heads}`={count}; choose heads that divide the width."
                )
            if size % 8:
                raise ValueError(
                    f"`{width}`={size} is not a multiple of 8, as the RoI position encoding (sine and cosine of "
                    "four coordinates) wants it."
                )
        if self.decoder_hidden_size % max(self.decoder_hidden_size // 64, 1):
            raise ValueError(
                f"`decoder_hidden_size` is {self.decoder_hidden_size}, expected up to 64 or a multiple of 64, the "
                "width of its attention heads."
            )

    def validate_steps(self):
        """The lists of steps name known operations, each once, and can run."""
        for name in ("focusing_steps", "final_focusing_steps"):
            steps = getattr(self, name)
            if unknown := [step for step in steps if step not in STEPS]:
                raise ValueError(f"`{name}` has unknown steps {unknown}; the steps are {list(STEPS)}.")
            if len(set(steps)) != len(steps):
                raise ValueError(f"`{name}`={list(steps)} lists a step twice; each may come once.")
        if "sampling" not in [*self.focusing_steps, *self.final_focusing_steps]:
            raise ValueError("No focusing step samples the image: put 'sampling' into `focusing_steps`.")
        if self.final_focusing_is_block and self.use_cls_token:
            raise ValueError(
                "[CLS] has no RoI and joins after the focusing stage, but the full-width focusing layer attends and "
                "is a cortex block: set `use_cls_token=False` or take 'attention' out of `final_focusing_steps`."
            )

    def validate_choices(self):
        """Fields with a fixed set of values."""
        self._check_choices(
            pooling=("cls", "mean", "attention"),
            sampling_padding_mode=("border", "zeros"),
            num_roi_delta_layers=(1, 2),
        )
        if self.pooling == "cls" and not self.use_cls_token:
            raise ValueError("`pooling='cls'` needs `use_cls_token=True`; without [CLS] choose `pooling='mean'`.")
        self._check_rates("drop_path_rate")
        self._check_positive("layer_norm_eps", "initializer_range")

    @staticmethod
    def _variants() -> dict[str, dict]:
        return VARIANTS


def _v1(width: int, layers: int, tokens: int, drop_path_rate: float) -> dict:
    """SparseFormer as first published (Gao et al., *SparseFormer: Sparse Visual Recognition via Limited Latent
    Tokens*), where the layer that focuses at full width is a cortex block."""
    steps = ("attention", "roi_adjustment", "sampling", "mlp")
    return {
        "num_latent_tokens": tokens,
        "num_sampling_points": 36,
        "stem_channels": 96,
        "focusing_hidden_size": width // 2,
        "focusing_steps": steps,
        "final_focusing_steps": steps,
        "focusing_num_attention_heads": 64,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "layer_norm_eps": 1e-6,
        "shared_token_embedding": False,
        "stage_embedding": False,
        "transition_layer_norm": True,
        "mixing_bias": True,
        "mixing_hidden_size": None,
        "num_roi_delta_layers": 1,
        "sampling_padding_mode": "zeros",
        "clip_sampling_gradients": True,
        "use_cls_token": False,
        "pooling": "mean",
        "pool_before_norm": True,
        "drop_path_rate": drop_path_rate,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
        "resize_size": 256,
        "num_labels": 1000,
    }


def _bootstrapped(size: str, tokens: int, image_size: int = 224, truncated: bool = True, **fields) -> dict:
    """SparseFormer bootstrapped from a ViT of that size (table 1 of the bootstrapping paper); `tokens` with [CLS]."""
    width, focusing_width, blocks = {"base": (768, 384, 12), "large": (1024, 512, 24)}[size]
    return {
        "image_size": image_size,
        "num_latent_tokens": tokens - 1,
        "focusing_hidden_size": focusing_width,
        "hidden_size": width,
        "num_hidden_layers": blocks - blocks // 3 if truncated else blocks,
        "resize_size": image_size * 256 // 224,
        "num_labels": 1000,
        **fields,
    }


def _clip(size: str, tokens: int, image_size: int = 224) -> dict:
    return _bootstrapped(
        size,
        tokens,
        image_size,
        hidden_act="quick_gelu",
        projection_dim={"base": 512, "large": 768}[size],
        image_mean=CLIP_MEAN,
        image_std=CLIP_STD,
    )


# Names read family, size, tokens as the papers count them (latent + [CLS]) and image size; `-untruncated` keeps all of
# the teacher's blocks.
VARIANTS = {
    "v1-tiny": _v1(512, 8, 49, 0.2),
    "v1-small": _v1(640, 8, 64, 0.3),
    "v1-base": _v1(768, 10, 81, 0.4),
    **{
        f"augreg-{size}-{tokens}-{image_size}": _bootstrapped(size, tokens, image_size)
        for size in ("base", "large")
        for tokens in (49, 80, 100, 144, 196)
        for image_size in (224, 320, 384)
    },
    **{f"augreg-{size}-49-224-untruncated": _bootstrapped(size, 49, truncated=False) for size in ("base", "large")},
    "clip-base-49-224": _clip("base", 49),
    "clip-large-64-224": _clip("large", 64),
    "clip-large-128-224": _clip("large", 128),
    "clip-large-144-336": _clip("large", 144, 336),
}


__all__ = ["SparseFormerConfig"]
