"""ViTImpulseInit configuration: the small vision transformers of Zheng et al. and how their attention starts."""

from huggingface_hub.dataclasses import strict

from .configuration_base import INITIALIZATIONS, AttentionStartConfig, PatchTransformerConfig


@strict
class ViTImpulseInitConfig(AttentionStartConfig, PatchTransformerConfig):
    r"""
    Configuration of a vision transformer whose attention starts as convolution (Zheng et al., *Structured
    Initialization for Attention in Vision Transformers*, arXiv 2404.01139). The defaults are ViT-T for 32 x 32 pixels,
    with sinusoidal positions and average pooling; `from_variant` has the rest.

    Args:
        image_size (`int` or pair of `int`, *optional*, defaults to 32): Image size in pixels, or height and width.
        patch_size (`int` or pair of `int`, *optional*, defaults to 2): Patch size in pixels; divides the image.
        num_channels (`int`, *optional*, defaults to 3): Channels of the image.
        hidden_size (`int`, *optional*, defaults to 192): Width of the tokens.
        num_hidden_layers (`int`, *optional*, defaults to 12): Blocks.
        num_attention_heads (`int`, *optional*, defaults to 3): Heads; divides `hidden_size`.
        intermediate_size (`int`, *optional*): Width inside the MLP; four times `hidden_size` if not given.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of the MLP.
        qkv_bias (`bool`, *optional*, defaults to `True`): Biases on queries, keys and values.
        layer_norm_eps (`float`, *optional*, defaults to 1e-6): Epsilon of the LayerNorms.
        position_embedding (`str`, *optional*, defaults to `"sincos"`):
            `"sincos"`, a fixed sinusoidal encoding, `"learned"` (table 1), which starts as that or, for baselines,
            truncated normal, or `"random"`, learned from a normal start.
        position_std (`float`, *optional*, defaults to 0.36):
            Standard deviation of the start of random positions; see `impulse_init_`.
        pooling (`str`, *optional*, defaults to `"mean"`):
            How tokens are pooled for the classifier: `"mean"`, their average after the final LayerNorm, or `"cls"`, a
            learned [CLS] (table 1).
        initialization (`str`, *optional*, defaults to `"impulse"`):
            How weights of a fresh model are drawn: `"impulse"` or `"mimetic"` attention, the rest truncated normal;
            or all linear layers `"trunc_normal"` (timm's way) or `"kaiming_uniform"` (PyTorch's).
        impulse_solver, impulse_kernel_size, impulse_mass, impulse_steps,
        impulse_renormalize_every, impulse_pseudo_input, impulse_per_layer, impulse_value_init:
            As in `AttentionStartConfig`. The defaults are the start that trained best at width 96 and depth 4, not the
            paper's, which is `impulse_solver="adam"` (as printed; `"adam_bounded"` as its authors ran it) with
            `impulse_value_init="default"`. At width 256 and depth 8, `impulse_value_init="default"` was better;
            docs/impulse_initialization.md has the evidence.
        context_broadcast (`str`, *optional*):
            Context Broadcasting in every block: `"cb"`, `"cb_s"`, `"cb_gate"` or `"cb_hybrid"`, see
            `insert_context_broadcast`.
        context_broadcast_position (`str` or several, *optional*, defaults to `"mlp_end"`):
            Where in a block: `"mlp_front"`, `"mlp_mid"`, `"mlp_end"`, `"attention_end"`.
        context_broadcast_scale_init (`float`, *optional*, defaults to 0.0): Start of the scale of `"cb_s"`.
        context_broadcast_blend (`bool`, *optional*, defaults to `False`):
            Whether a learned number leads from a plain transformer to Context Broadcasting, see `ContextBroadcast`.
        drop_path_rate (`float`, *optional*, defaults to 0.0):
            Largest stochastic depth rate; rises linearly over the blocks.
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

    model_type = "vit_impulse_init"
    attribute_map = {"layer_norm_epsilon": "layer_norm_eps"}

    image_size: int | list[int] | tuple[int, int] = 32
    patch_size: int | list[int] | tuple[int, int] = 2
    num_channels: int = 3
    hidden_size: int = 192
    num_hidden_layers: int = 12
    num_attention_heads: int = 3
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    layer_norm_eps: float | int = 1e-6
    position_embedding: str = "sincos"
    position_std: float | int = 0.36
    pooling: str = "mean"
    initialization: str = "impulse"
    context_broadcast: str | None = None
    context_broadcast_position: str | list[str] | tuple[str, ...] = "mlp_end"
    context_broadcast_scale_init: float | int = 0.0
    context_broadcast_blend: bool = False
    drop_path_rate: float | int = 0.0
    initializer_range: float | int = 0.02
    image_mean: float | list[float] | tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: float | list[float] | tuple[float, ...] = (0.5, 0.5, 0.5)
    resize_size: int | None = None
    resample: int = 2

    def validate_widths(self):
        """The positional encoding divides into sines and cosines of two coordinates."""
        if self.hidden_size % 4:
            raise ValueError(
                f"`hidden_size`={self.hidden_size} is not a multiple of 4, as the sinusoidal encoding (sine and "
                "cosine of two coordinates) wants it."
            )

    @staticmethod
    def _starts() -> tuple[str, ...]:
        return INITIALIZATIONS

    def validate_choices(self):
        """Fields with a fixed set of values have one of them, and the width of positions is positive."""
        self._check_choices(position_embedding=("sincos", "learned", "random"), pooling=("mean", "cls"))
        self._check_positive("position_std")

    @staticmethod
    def _variants() -> dict[str, dict]:
        return VARIANTS


# Names read size, heads and image size, or, of tables 5 and 7, depth, width and heads.
VARIANTS = {
    f"vit-{size}-h{heads}-{image_size}": {
        "image_size": image_size,
        "patch_size": patch_size,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_labels": num_labels,
        "resize_size": resize_size,
    }
    for size, width, all_heads in (("tiny", 192, (3, 8)), ("small", 384, (6, 16)))
    for heads in all_heads
    for image_size, patch_size, num_labels, resize_size in ((32, 2, 10, None), (224, 16, 1000, 256))
} | {
    f"vit-depth8-{width}-h{heads}": {
        "hidden_size": width,
        "num_hidden_layers": 8,
        "num_attention_heads": heads,
        "num_labels": 10,
    }
    for width in (64, 128, 256, 512)
    for heads in (4, 8, 16, 32)
}


__all__ = ["ViTImpulseInitConfig"]
