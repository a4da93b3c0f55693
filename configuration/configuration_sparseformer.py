"""Configuration of SparseFormers, with the models of both papers as named variants."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import Size, SparseFormerBaseConfig, at_least


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def _v1(width: int, layers: int, tokens: int, drop_path_rate: float) -> dict:
    """Return the configuration fields of a v1 model (Gao et al., *SparseFormer: Sparse Visual Recognition via Limited
    Latent Tokens*)."""
    return {
        "generation": "v1",
        "num_latent_tokens": tokens,
        "num_sampling_points": 36,
        "mixing_hidden_size": None,
        "stem_channels": 96,
        "focusing_hidden_size": width // 2,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "layer_norm_eps": 1e-6,
        "num_class_tokens": 0,
        "pooling": "mean",
        "final_norm": "after_pooling",
        "drop_path_rate": drop_path_rate,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
        "resize_size": 256,
        "num_labels": 1000,
    }


def _bootstrapped(size: str, tokens: int, image_size: int = 224, truncated: bool = True, **fields) -> dict:
    """Return the configuration fields of a model that is bootstrapped from a ViT (table 1 of the bootstrapping paper).
    `tokens` is the number of tokens including [CLS]."""
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


# The name of a bootstrapped variant contains the teacher's family, the model size, the number of tokens including
# [CLS], and the image size. Variants with "-untruncated" keep all blocks of the teacher.
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
}
CLIP_VARIANTS = {
    "clip-base-49-224": _clip("base", 49),
    "clip-large-64-224": _clip("large", 64),
    "clip-large-128-224": _clip("large", 128),
    "clip-large-144-336": _clip("large", 144, 336),
}


@strict
class SparseFormerConfig(SparseFormerBaseConfig):
    r"""
    Configuration of a SparseFormer. The default model is bootstrapped from AugReg ViT-B/16 and has 49 tokens (Gao et
    al., *Bootstrapping SparseFormers from Vision Foundation Models*, table 1). `from_variant` returns the
    configurations of the papers' models.

    A SparseFormer has a stem, a focusing stage and a transformer encoder. The first layer of the focusing stage has
    width `focusing_hidden_size` and is executed `num_focusing_iterations` times. The last layer of the focusing stage
    has the encoder's width and is executed once. Other fields are documented in `SparseFormerBaseConfig`.

    Args:
        generation (`str`, *optional*, defaults to `"bootstrapped"`):
            `"v1"` for models of *SparseFormer: Sparse Visual Recognition via Limited Latent Tokens*, `"bootstrapped"`
            for models of the bootstrapping paper:

            - Bootstrapped: the first focusing layer samples, encodes positions, attends and adjusts RoIs. The last
              focusing layer only samples and encodes positions. All latent tokens start from one embedding, and each
              iteration adds a learned embedding.
            - v1: the first focusing layer attends, adjusts RoIs, then samples. The last focusing layer does the same
              and is the first of the `num_hidden_layers` encoder blocks. Each token starts from its own embedding.
              Adaptive mixing has biases, and a LayerNorm follows the projection to the encoder's width. RoI deltas
              come from one linear layer, and drop path is applied to them. Features outside the image are zero, and
              the gradients of sampling points are clamped.
        num_sampling_points (`int`, *optional*, defaults to 16):
            Number of points that each token samples in its RoI, at least 2.
        num_mixed_points (`int`, *optional*):
            Number of points after mixing; `max(num_sampling_points, 32)` by default, as in the reference code.
        mixing_hidden_size (`int`, *optional*, defaults to 128):
            Width of the bottleneck layer in adaptive mixing; `None` for a quarter of the token width (v1).
        stem_channels (`int`, *optional*, defaults to 64): Number of channels of the stem's feature map.
        focusing_hidden_size (`int`, *optional*, defaults to 384): Width of the first focusing layer.
        num_focusing_iterations (`int`, *optional*, defaults to 4):
            Number of executions of the first focusing layer. The paper's "4+1" also counts the last focusing layer.
        focusing_layer_norm_eps (`float`, *optional*):
            Epsilon of LayerNorms in the focusing stage; `layer_norm_eps` by default.
        roi_encoding (`str`, *optional*, defaults to `"reference"`):
            Sinusoidal encoding of RoIs: `"reference"` (the authors' code) or `"paper"` (the paper's supplement).
            `encode_rois` documents the differences.
        feature_stride (`int` or pair of `int`, *optional*, defaults to 16):
            Height and width of a feature map's cell in pixels. `from_teacher` sets the teacher's patch size.
    """

    model_type = "sparseformer"
    has_patch_embedding = False
    _variants = VARIANTS

    generation: Literal["bootstrapped", "v1"] = "bootstrapped"
    num_sampling_points: int = at_least(2)(default=16)
    num_mixed_points: int | None = at_least(1)(default=None)
    mixing_hidden_size: int | None = at_least(1)(default=128)
    stem_channels: int = at_least(1)(default=64)
    focusing_hidden_size: int = at_least(1)(default=384)
    num_focusing_iterations: int = at_least(1)(default=4)
    focusing_layer_norm_eps: float | int | None = None
    roi_encoding: Literal["reference", "paper"] = "reference"
    feature_stride: Size = at_least(1)(default=16)

    def __post_init__(self, **kwargs):
        if self.num_mixed_points is None:
            self.num_mixed_points = max(self.num_sampling_points, 32)
        if self.focusing_layer_norm_eps is None:
            self.focusing_layer_norm_eps = self.layer_norm_eps
        super().__post_init__(**kwargs)

    @property
    def is_v1(self) -> bool:
        return self.generation == "v1"

    @property
    def focusing_num_attention_heads(self) -> int:
        """Number of heads of the first focusing layer: `num_attention_heads` in v1, else one per 64 channels."""
        return self.num_attention_heads if self.is_v1 else max(self.focusing_hidden_size // 64, 1)

    def validate_focusing(self):
        """Check that widths are divisible by the number of attention heads and by 8, and that v1 has neither prefix
        tokens nor rotary positions."""
        if self.focusing_hidden_size % self.focusing_num_attention_heads:
            raise ValueError(
                f"`focusing_hidden_size`={self.focusing_hidden_size} is not divisible by its "
                f"{self.focusing_num_attention_heads} attention heads."
            )
        for width in ("focusing_hidden_size", "hidden_size"):
            if getattr(self, width) % 8:
                raise ValueError(
                    f"`{width}` is {getattr(self, width)}, expected a multiple of 8, because the encoding of RoIs has "
                    "a sine and a cosine of four coordinates."
                )
        if self.is_v1 and (self.num_prefix_tokens or self.rope_theta is not None):
            raise ValueError(
                "`generation='v1'` has no [CLS], registers or rotary positions, because its first block belongs to "
                "the focusing stage: set `num_class_tokens=0`, `num_register_tokens=0` and `rope_theta=None`."
            )


@strict
class SparseFormerProjectionConfig(SparseFormerConfig):
    """Configuration of `SparseFormerVisionModelWithProjection`.

    Args:
        projection_dim (`int`, *optional*, defaults to 512): Width of the projected embedding.
        projection_bias (`bool`, *optional*, defaults to `False`): Add a bias to the projection, as in EVA-02's CLIP.
    """

    model_type = "sparseformer_projection"
    _variants = CLIP_VARIANTS

    projection_dim: int = at_least(1)(default=512)
    projection_bias: bool = False


__all__ = ["SparseFormerConfig", "SparseFormerProjectionConfig"]
