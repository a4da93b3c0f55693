"""SparseFormer configuration: both generations, every variant of the papers by name."""

from huggingface_hub.dataclasses import strict

from .configuration_patch_sparseformer import PatchSparseFormerConfig
from .configuration_sparseformer_base import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    SparseFormerBaseConfig,
    is_sparseformer,
)


# Orders of operations of the focusing layer.
GENERATIONS = ("bootstrapped", "v1")


@strict
class SparseFormerConfig(SparseFormerBaseConfig):
    r"""
    Configuration of a SparseFormer. The defaults are the base model bootstrapped from AugReg ViT-B/16 with 49 tokens
    (Gao et al., *Bootstrapping SparseFormers from Vision Foundation Models*, table 1); `from_variant` has the rest.

    A SparseFormer is a stem, a focusing stage and a cortex. The focusing stage is one layer of width
    `focusing_hidden_size`, executed `num_focusing_iterations` times, and one at full width, executed once. The fields
    below say where the two generations differ; those of the cortex are `SparseFormerBaseConfig`'s. A student whose
    tokens embed patches as its teacher does has a `PatchSparseFormerConfig`.

    Args:
        num_sampling_points (`int`, *optional*, defaults to 16): Points that a token samples in its RoI, at least 2.
        num_mixed_points (`int`, *optional*):
            Points after mixing; `max(num_sampling_points, 32)` if not given, as in the reference implementation.
        stem_channels (`int`, *optional*, defaults to 64): Channels of the early convolution.
        focusing_hidden_size (`int`, *optional*, defaults to 384): Width of the iterated focusing layer.
        num_focusing_iterations (`int`, *optional*, defaults to 4):
            Executions of the focusing layer; the one at full width comes on top ("4+1" in the paper).
        generation (`str`, *optional*, defaults to `"bootstrapped"`):
            Order of operations of the focusing layers. `"bootstrapped"`: sampling, position encoding, attention, MLP,
            adjustment of RoIs; at full width the first two alone. `"v1"`: attention, adjustment of RoIs, sampling,
            MLP; the layer at full width is a whole transformer block and counts as the first of the
            `num_hidden_layers`.
        roi_encoding (`str`, *optional*, defaults to `"reference"`):
            Frequencies and order of the sinusoidal encoding of RoIs: `"reference"`, as the authors' code has them, or
            `"paper"`, as the supplement prints them, see `encode_rois`.
        focusing_num_attention_heads (`int`, *optional*): Heads of the focusing layer; one per 64 channels by default.
        focusing_intermediate_size (`int`, *optional*): MLP width of the focusing layer; 4 times its width by default.
        focusing_hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of the focusing layer's MLP.
        focusing_layer_norm_eps (`float`, *optional*): Epsilon of every LayerNorm before the cortex; that of the cortex
            by default.
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
            Values that a point outside the image reads: "border" or "zeros".
        clip_sampling_gradients (`bool`, *optional*, defaults to `False`):
            Clamp the gradient on sampling points to +-1 / height of the feature map (v1's training code).

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a value has the wrong type, if values contradict each other, or
            if a name looks like a misspelled field or is one of `PatchSparseFormerConfig`; the message says what was
            given and what would fit.
    """

    model_type = "sparseformer"

    num_sampling_points: int = 16
    num_mixed_points: int | None = None
    stem_channels: int = 64
    focusing_hidden_size: int = 384
    num_focusing_iterations: int = 4
    generation: str = "bootstrapped"
    roi_encoding: str = "reference"
    focusing_num_attention_heads: int | None = None
    focusing_intermediate_size: int | None = None
    focusing_hidden_act: str = "gelu"
    focusing_layer_norm_eps: float | int | None = None
    shared_token_embedding: bool = True
    stage_embedding: bool = True
    transition_layer_norm: bool = False
    mixing_bias: bool = False
    mixing_hidden_size: int | None = 128
    num_roi_delta_layers: int = 2
    sampling_padding_mode: str = "border"
    clip_sampling_gradients: bool = False

    def __post_init__(self, **kwargs):
        if self.num_mixed_points is None:
            self.num_mixed_points = max(self.num_sampling_points, 32)
        if self.focusing_num_attention_heads is None:
            self.focusing_num_attention_heads = max(self.focusing_hidden_size // 64, 1)
        if self.focusing_intermediate_size is None:
            self.focusing_intermediate_size = 4 * self.focusing_hidden_size
        super().__post_init__(**kwargs)

    @property
    def map_channels(self) -> int:
        """Channels of the map that the paper's segmentation head reads."""
        return self.stem_channels

    @property
    def final_focusing_is_block(self) -> bool:
        """Whether the layer that focuses at full width is the first block of the cortex."""
        return self.generation == "v1"

    def validate_patches(self):
        """No token embeds patches."""
        for name in ("patch_size", "token_grid", "placement"):
            if name in vars(self):
                raise ValueError(f"`{name}` is a field of PatchSparseFormerConfig; a SparseFormerConfig has none.")

    def validate_focusing_counts(self):
        """Counts and sizes of the focusing stage are positive."""
        self._check_counts(
            "num_mixed_points",
            "stem_channels",
            "focusing_hidden_size",
            "num_focusing_iterations",
            "focusing_num_attention_heads",
            "focusing_intermediate_size",
            "mixing_hidden_size",
        )
        if self.num_sampling_points < 2:
            raise ValueError(
                f"`num_sampling_points` is {self.num_sampling_points}, expected at least 2: "
                "sampling offsets are standardized over the points of a token."
            )

    def validate_focusing_widths(self):
        """Heads divide the width, and the positional encoding divides into sines and cosines of four coordinates."""
        self._check_heads("focusing_hidden_size", "focusing_num_attention_heads")
        for width in ("focusing_hidden_size", "hidden_size"):
            if getattr(self, width) % 8:
                raise ValueError(
                    f"`{width}`={getattr(self, width)} is not a multiple of 8, as the RoI position encoding (sine "
                    "and cosine of four coordinates) wants it."
                )

    def validate_generation(self):
        """v1 has nothing that joins after the focusing stage, as its first block is in there."""
        if self.final_focusing_is_block and (self.num_prefix_tokens or self.rope_theta is not None):
            raise ValueError(
                "[CLS] and registers have no RoI and join after the focusing stage, and rotary positions are those of "
                "its last RoIs, but the full-width focusing layer of `generation='v1'` is a cortex block: set "
                "`use_cls_token=False`, no `num_register_tokens` and no `rope_theta`, or choose 'bootstrapped'."
            )

    def validate_focusing_choices(self):
        """Fields of the focusing stage with a fixed set of values have one of them."""
        self._check_choices(
            sampling_padding_mode=("border", "zeros"),
            roi_encoding=("reference", "paper"),
            generation=GENERATIONS,
            num_roi_delta_layers=(1, 2),
        )
        if self.focusing_layer_norm_eps is not None:
            self._check_positive("focusing_layer_norm_eps")

    @staticmethod
    def _variants() -> dict[str, dict]:
        return VARIANTS


def _v1(width: int, layers: int, tokens: int, drop_path_rate: float) -> dict:
    """SparseFormer as first published (Gao et al., *SparseFormer: Sparse Visual Recognition via Limited Latent
    Tokens*), where the layer that focuses at full width is a cortex block."""
    return {
        "num_latent_tokens": tokens,
        "num_sampling_points": 36,
        "stem_channels": 96,
        "focusing_hidden_size": width // 2,
        "generation": "v1",
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


def read_vision_config(value: SparseFormerBaseConfig | dict) -> SparseFormerBaseConfig:
    """Return the `vision_config` of a model whose vision tower is a SparseFormer.

    Args:
        value (`SparseFormerConfig`, `PatchSparseFormerConfig` or `dict`):
            The configuration, or its fields, of which `model_type` is `"sparseformer"` if not given.

    Raises:
        ValueError: if it is that of another model.
    """
    if isinstance(value, dict):
        embeds_patches = value.get("model_type") == PatchSparseFormerConfig.model_type
        return (PatchSparseFormerConfig if embeds_patches else SparseFormerConfig).from_dict(value)
    if not is_sparseformer(value):
        raise ValueError(f"`vision_config` is a {type(value).__name__}, expected a SparseFormerConfig.")
    return value


def check_feature_layers(layers: int | list[int], vision: SparseFormerBaseConfig):
    """Raise a ValueError unless a SparseFormer has the states that are read of it, as a LLaVA counts them."""
    states = vision.num_hidden_layers + 1
    for layer in [layers] if isinstance(layers, int) else layers:
        if not -states <= layer < states:
            raise ValueError(
                f"`vision_feature_layer` asks for {layer}, the SparseFormer has {states} (the input of its first "
                f"block and the output of each): {-states} to {states - 1}."
            )


__all__ = ["SparseFormerConfig"]
